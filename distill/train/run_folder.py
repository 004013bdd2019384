"""The folder of a training run: config, metrics, checkpoints, and the exported draft.

outputs/NAME/
  run.json                  resolved config and the date of the start, written first
  tokens/                   the tokenised data (`distill.data.tokens`)
  metrics.jsonl             one line per logged step
  checkpoints/step-000100/  published with a manifest; the newest two are kept
  best/                     with --loop.stop-by acceptance: the checkpoint of the best evaluation
  draft/                    the exported draft
  .previous/                with --overwrite: the earlier run, until this one is complete"""

from __future__ import annotations

import datetime
import fcntl
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from redraft.distill.data.day import choose_day
from redraft.files.artifact import find_foreign, naming, publish, verify, write_whole
from redraft.files.lock import NO_LOCKS, describe_missing
from redraft.files.replaced import (
    PREVIOUS,
    drop_previous,
    find_obstacle,
    keep_previous,
    undo_move,
)

KEPT_CHECKPOINTS = 2
MAY_CHANGE = {"overwrite", "output", "wandb", "prove"}
"""Config keys that may differ when a run is resumed, because they do not affect training."""

TOKENS = "tokens"  # Folder of the tokenised data in a run.
LOCK = ".lock"  # File that is locked while a process writes the run.
RUN = "run.json"
CHECKPOINTS = "checkpoints"
PUBLISHED = ("best", "draft", "candidate")
RESULTS = (
    *(RUN, "metrics.jsonl", "report.*", "adapt.json", "vllm-*.log"),
    *("answers-*.json", "mode-*.json", "start-*.json", "without-draft-*.json"),
    *(CHECKPOINTS, *PUBLISHED, "target-cache"),
)
"""Names of a run's results, which --overwrite replaces. Everything else in the folder stays."""
T = TypeVar("T")


def _is_step(checkpoint: Path) -> bool:
    return checkpoint.name.removeprefix("step-").isdigit()


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def lasting(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that a resumed run must share: no servers, storage or caches."""
    kept = {key: value for key, value in config.items() if key not in MAY_CHANGE}
    if "signal" in kept:
        # It matters whether servers provide the signal, but not at which addresses.
        kept["signal"] = {**kept["signal"], "url": bool(kept["signal"]["url"]), "storage": None}
    if isinstance(kept.get("data"), dict):
        kept["data"] = {**kept["data"], "cache": None}
    if isinstance(kept.get("loop"), dict):
        # Compiling changes only the rounding.
        kept["loop"] = {**kept["loop"], "compile": None}
        if kept["loop"].get("stop_by") == "acceptance":
            # Evaluations in one run are compared, so all use the same number of draft tokens.
            number = config["prove"]["num_speculative_tokens"]
            kept["prove"] = {"num_speculative_tokens": number}
    return kept


def _leave_out_nan(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the finite numbers of a line, because a report with NaN would be refused."""
    return {name: value for name, value in entry.items() if np.isfinite(value).all()}


def _date(config: dict[str, Any], day: str | None) -> dict[str, Any]:
    """Return a config with the date of its run, which is `day` if the config sets none."""
    if not isinstance(config.get("data"), dict):
        return config
    return {**config, "data": {**config["data"], "date": config["data"].get("date") or day}}


def _find_foreign(folder: Path) -> Path | None:
    """Return the first file in a run's folder that the run itself did not write, or None."""
    if folder.name in ("target-cache", PREVIOUS):
        return None
    if folder.name != CHECKPOINTS:
        return find_foreign(folder)
    for path in sorted(folder.iterdir()):
        # A manual copy (step-000100-good) does not belong to the run.
        is_ours = _is_step(path) or path.name in (CHECKPOINTS, "metrics.jsonl")
        if not is_ours and not path.name.startswith("."):
            return path
        if path.is_dir() and is_ours and (foreign := _find_foreign(path)) is not None:
            return foreign
    return None


class RunFolder:
    """A run's folder. Every rank opens it once, but only the main process writes to it."""

    def __init__(
        self, folder: Path, accelerator: Accelerator, date: datetime.date | None = None
    ) -> None:
        self.folder, self.accelerator = folder, accelerator
        self.config: dict[str, Any] = {}
        # The date of the run's first start, for chat templates that write the date.
        self.date = date or choose_day()
        self.metrics: list[dict[str, Any]] = []
        self.inputs: dict[str, str] = {}
        self._replaces = False

    @classmethod
    def open(
        cls,
        folder: Path,
        config: dict[str, Any],
        accelerator: Accelerator,
        *,
        overwrite: bool,
        date: datetime.date | None = None,
    ) -> RunFolder:
        """Open the run in `folder`: a new run, or the existing one if it has this config.

        With `overwrite`, it is a new run, which replaces an earlier run when `begin` is called.
        `date` is the date of a new run, by default today.

        Raises:
            ValueError: the folder contains a different run and `overwrite` is not set; the folder
                contains files that the run would replace although it reads them or did not write
                them; or not all ranks see the folder.
        """
        run = cls(folder, accelerator, date)
        # Convert it to the form in which it will be read back, with lists for tuples and text for
        # paths, so that equal configs compare equal.
        run.config = json.loads(json.dumps(config, default=str))
        # All ranks read the date from here, because midnight may pass between two of them.
        day = run.on_main(lambda: run._claim(overwrite))
        if not (folder / LOCK).exists():
            raise ValueError(
                f"{folder} is not accessible from every machine of this launch: choose a shared folder as "
                "--output"
            )
        run.date = datetime.date.fromisoformat(day)
        return run

    def on_main(self, work: Callable[[], T]) -> T:
        """Call `work` on the main process while the others wait, and return its result on all.

        If `work` raises, the main process raises that error, and the others raise a ValueError with
        the same message.
        """
        told: list[Any] = [
            None,
            None,
        ]  # error and result, in a list because broadcast_object_list fills it in place
        if self.accelerator.is_main_process:
            try:
                told[1] = work()
            except Exception as error:
                told[0] = str(error)
                raise
            finally:
                # Do this after an error too, because the other ranks wait for this broadcast.
                broadcast_object_list(told, from_process=0)
        elif broadcast_object_list(told, from_process=0) and told[0] is not None:
            raise ValueError(told[0])
        result: T = told[1]
        return result

    def _claim(self, overwrite: bool) -> str:
        """Claim the folder for this process. Return the date on which the run first started."""
        started = self.folder / RUN
        # A run that failed on a wrong flag has left only run.json and perhaps tokens, so nothing is
        # lost.
        previous = self.folder / PREVIOUS
        early = {RUN, TOKENS, LOCK, PREVIOUS}
        if self.folder.is_dir():
            undo_move(previous)
        is_new = not self.folder.exists()
        holds_work = not is_new and any(path.name not in early for path in self.folder.iterdir())
        if holds_work and not started.exists():
            raise ValueError(
                f"{self.folder} is not a redraft run (no {RUN}): choose a different --output"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._own()
        # Without --overwrite, the end of a run publishes again, and removes the earlier run.
        published = [self.folder / name for name in PUBLISHED]
        replaced = [*(self._results() if overwrite else published), previous]
        if not is_new and (obstacle := find_obstacle(replaced, self.config, _find_foreign)):
            raise ValueError(f"{obstacle}: choose a different --output")
        self._replaces = overwrite and holds_work
        if self._replaces:
            return self.date.isoformat()
        if started.exists():
            about = json.loads(started.read_text())
            before, now = (
                _date(lasting(config), about.get("date"))
                for config in (about.get("config", {}), self.config)
            )
            changed = [key for key in now if before.get(key) != now[key]]
            if not changed:
                return str(about["date"])
            if holds_work:
                key, was, is_now = changed[0], before.get(changed[0]), now[changed[0]]
                while isinstance(was, dict) and isinstance(is_now, dict):
                    part = next(
                        part for part in {**was, **is_now} if was.get(part) != is_now.get(part)
                    )
                    key, was, is_now = f"{key}.{part}", was.get(part), is_now.get(part)
                flag = f"--{key.replace('_', '-')}"
                raise ValueError(
                    f"{self.folder} contains a different run: {flag} was {was!r}, but is now {is_now!r}; "
                    f"{self._way_out()}"
                )
        self._describe()
        return self.date.isoformat()

    def _results(self) -> list[Path]:
        return sorted(path for name in RESULTS for path in self.folder.glob(name))

    def _way_out(self) -> str:
        obstacle = find_obstacle(self._results(), self.config, _find_foreign)
        return (
            "choose a different --output"
            if obstacle
            else "give --overwrite, or a different --output"
        )

    def _describe(self) -> None:
        about = {"command": sys.argv, "date": self.date.isoformat(), "config": self.config}
        if self.inputs:
            about["inputs"] = self.inputs
        write_whole(self.folder / RUN, json.dumps(about, indent=2) + "\n")

    def begin(self) -> None:
        """Set aside the earlier run that this one replaces.

        Call this after the last check that could refuse the run.
        """
        self.on_main(self._begin)

    def _begin(self) -> None:
        if self._replaces:
            keep_previous(self._results(), self.folder / PREVIOUS)
            self._describe()
            self._replaces = False

    def complete(self) -> None:
        """Remove the earlier run that this one has replaced."""
        if self.accelerator.is_main_process:
            drop_previous(self.folder / PREVIOUS)

    def _own(self) -> None:
        # The lock belongs to the process, which may open its run again. The kernel releases it when
        # the process exits.
        self._owner = (self.folder / LOCK).open("a")
        try:
            fcntl.lockf(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"another process is training in {self.folder}: choose a different --output"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            print(
                f"warning: {describe_missing(self.folder / LOCK, error)}: start no other process "
                "with this --output"
            )

    def confirm(self, hash_inputs: Callable[[], dict[str, str]]) -> None:
        """Record the hashes of the run's inputs, which only the main process computes.

        All ranks must call this.

        Raises:
            ValueError: the run was trained on different inputs.
        """

        def record() -> dict[str, str]:
            inputs = hash_inputs()
            if self._replaces:
                return inputs
            about = json.loads((self.folder / RUN).read_text())
            before = about.get("inputs", {})
            changed = [name for name, value in inputs.items() if before.get(name, value) != value]
            if changed and self._checkpoints():
                raise ValueError(
                    f"the {changed[0]} of the run in {self.folder} has changed: {self._way_out()}"
                )
            write_whole(self.folder / RUN, json.dumps({**about, "inputs": inputs}, indent=2) + "\n")
            return inputs

        self.inputs = self.on_main(record)

    def log(self, step: int, **values: float | int | bool | list[float]) -> None:
        entry = _leave_out_nan({"step": step, **values})
        self.metrics.append(entry)
        self.accelerator.log(values, step=step)
        if self.accelerator.is_main_process:
            path = self.folder / "metrics.jsonl"
            with naming(path), path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Publish a checkpoint for `step`, and delete all but the newest checkpoints."""
        self._publish(self.folder / CHECKPOINTS / f"step-{step:06d}", step, write)
        if self.accelerator.is_main_process:
            for old in self._checkpoints()[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)

    def save_best(self, step: int, write: Callable[[Path], None]) -> None:
        self._publish(self.folder / "best", step, write)

    def restore_best(self, read: Callable[[Path], None]) -> None:
        """Read the checkpoint that `save_best` wrote.

        The metrics stay unchanged.

        Raises:
            ValueError: a file is missing, corrupt or truncated; the message names it.
        """
        self.on_main(lambda: verify(self.folder / "best"))
        read(self.folder / "best")

    def _publish(self, final: Path, step: int, write: Callable[[Path], None]) -> None:
        if self.accelerator.is_main_process:
            publish(
                final,
                lambda partial: self._write_together(partial, write),
                {"step": step},
                overwrite=True,
            )
        else:
            self._write_together(None, write)
        self.accelerator.wait_for_everyone()

    def _write_together(self, partial: Path | None, write: Callable[[Path], None]) -> None:
        # The folder's name is random, and known only to the main process.
        shared = [str(partial)]
        broadcast_object_list(shared, from_process=0)
        write(Path(shared[0]))
        # The manifest, which is written next, contains the digests of all ranks' files.
        self.accelerator.wait_for_everyone()

    def _checkpoints(self) -> list[Path]:
        # Sort by number, because as text, step-1000000 sorts before step-999999. A manual copy
        # (step-000100-good) does not belong to the run.
        named = (self.folder / CHECKPOINTS).glob("step-*")
        return sorted(filter(_is_step, named), key=_step_of)

    @property
    def will_resume(self) -> bool:
        """Whether `restore` will read a checkpoint, as the main process sees it."""
        return not self._replaces and bool(self._checkpoints())

    def restore(self, read: Callable[[Path], None]) -> int:
        """Read the newest checkpoint and drop later metrics.

        Returns the checkpoint's step, or 0 if there is no checkpoint.

        Raises:
            ValueError: the checkpoint is corrupt or truncated.
        """
        # The folder may not be visible on other machines yet.
        newest = self.on_main(self._verify_newest)
        step = 0
        if newest:
            read(self.folder / CHECKPOINTS / newest)
            step = _step_of(Path(newest))
        self.metrics = self.on_main(lambda: self._cut_metrics(step))
        return step

    def _verify_newest(self) -> str:
        checkpoints = self._checkpoints()
        if not checkpoints:
            return ""
        newest = checkpoints[-1]
        verify(newest, f"delete {newest} to resume from the checkpoint before it")
        return newest.name

    def _cut_metrics(self, step: int) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        # A kill may have truncated the last line.
        whole = [_leave_out_nan(json.loads(line)) for line in lines if line.endswith("}")]
        # The steps after the checkpoint will be taken and logged again.
        kept = [entry for entry in whole if entry["step"] <= step]
        write_whole(path, "".join(json.dumps(entry) + "\n" for entry in kept))
        return kept
