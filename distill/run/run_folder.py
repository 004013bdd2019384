"""The folder of one training run: config, metrics, checkpoints, and the exported draft.

outputs/NAME/
  run.json                  resolved config and the date of the start, written first
  tokens/                   the tokenised data (`distill.data.tokens`)
  metrics.jsonl             one line per logged step
  checkpoints/step-000100/  published with a manifest; the newest two are kept
  best/                     with --loop.stop-by acceptance: the checkpoint of the best evaluation
  draft/                    the exported draft"""

from __future__ import annotations

import datetime
import fcntl
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from redraft.distill.data.day import choose_day
from redraft.heads.files.artifact import publish, verify, write_whole

KEPT_CHECKPOINTS = 2
MAY_CHANGE = {"overwrite", "output", "wandb", "prove"}
"""Config keys that may differ when a run is resumed: they do not change the training."""

TOKENS = "tokens"  # Folder of the tokenised data in a run.
LOCK = ".lock"  # File that is locked while a process writes the run.
T = TypeVar("T")


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _lasting(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config on which a resumed run must agree: not servers, storage, caches."""
    kept = {key: value for key, value in config.items() if key not in MAY_CHANGE}
    if "signal" in kept:
        # Whether servers give the signal is a part of the training. The addresses are not.
        kept["signal"] = {**kept["signal"], "url": bool(kept["signal"]["url"]), "storage": None}
    if isinstance(kept.get("data"), dict):
        kept["data"] = {**kept["data"], "cache": None}
    if isinstance(kept.get("loop"), dict):
        # Compiling changes the rounding only.
        kept["loop"] = {**kept["loop"], "compile": None}
        if kept["loop"].get("stop_by") == "acceptance":
            # Evaluations of one run are compared, so all are at one number of draft tokens.
            kept["num_speculative_tokens"] = config["prove"]["num_speculative_tokens"]
    return kept


class RunFolder:
    """A run's folder, opened once by every rank; only the main process writes."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self.folder, self.accelerator = folder, accelerator
        self.config: dict[str, Any] = {}
        self.date = choose_day()  # of the run's first start, for chat templates that write the date
        self.metrics: list[dict[str, Any]] = []

    @classmethod
    def open(
        cls, folder: Path, config: dict[str, Any], accelerator: Accelerator, *, overwrite: bool
    ) -> RunFolder:
        """The run in `folder`, new, or continued if it has this config.

        Raises:
            ValueError: it holds another run and `overwrite` is not set, or not all ranks see it.
        """
        run = cls(folder, accelerator)
        # As it will be read back: tuples are lists and paths are text, so an equal config compares
        # equal.
        run.config = json.loads(json.dumps(config, default=str))
        run.on_main(lambda: run._claim(overwrite))
        if not (folder / "run.json").exists():
            raise ValueError(
                f"{folder} is not seen by every machine of this launch: choose a shared one as "
                "--output"
            )
        # Read by all ranks: midnight may pass between two of them.
        run.date = datetime.date.fromisoformat(
            json.loads((folder / "run.json").read_text())["date"]
        )
        return run

    def beside(self, name: str) -> RunFolder:
        """A run in a subfolder of this one, with separate checkpoints and metrics."""
        run = RunFolder(self.folder / name, self.accelerator)
        run.config, run.date = self.config, self.date
        run.folder.mkdir(exist_ok=True)
        return run

    def on_main(self, work: Callable[[], T]) -> T:
        """Call `work` on the main process while the others wait, and return the result on all.

        Raises on the main process, as `work`; on the others, a ValueError with the same message.
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
                # Also after an error, because the others wait for this broadcast.
                broadcast_object_list(told, from_process=0)
        elif broadcast_object_list(told, from_process=0) and told[0] is not None:
            raise ValueError(told[0])
        result: T = told[1]
        return result

    def _claim(self, overwrite: bool) -> None:
        started = self.folder / "run.json"
        # A run that failed on a wrong flag left run.json and perhaps tokens: nothing is lost.
        early = {started.name, TOKENS, LOCK}
        holds_work = self.folder.exists() and any(
            path.name not in early for path in self.folder.iterdir()
        )
        if holds_work and not started.exists():
            raise ValueError(
                f"{self.folder} is not a run of ours (no run.json): choose another --output"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._own()
        for path in self.folder.iterdir() if overwrite else ():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if started.exists():
            before, now = (
                _lasting(json.loads(started.read_text()).get("config", {})),
                _lasting(self.config),
            )
            changed = [key for key in now if before.get(key) != now[key]]
            if not changed:
                return
            if holds_work:
                key, was, is_now = changed[0], before.get(changed[0]), now[changed[0]]
                while isinstance(was, dict) and isinstance(is_now, dict):
                    part = next(
                        part for part in {**was, **is_now} if was.get(part) != is_now.get(part)
                    )
                    key, was, is_now = f"{key}.{part}", was.get(part), is_now.get(part)
                was = f"{key} was {was!r} and is now {is_now!r}"
                raise ValueError(
                    f"{self.folder} holds another run, {was}: give --overwrite, or another --output"
                )
        about = {"command": sys.argv, "date": self.date.isoformat(), "config": self.config}
        write_whole(started, json.dumps(about, indent=2) + "\n")

    def _own(self) -> None:
        # A lock of the process, which may open its run again; the kernel drops it when the process
        # ends.
        self._owner = (self.folder / LOCK).open("a")
        try:
            fcntl.lockf(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"another process trains in {self.folder}: choose another --output"
            ) from None

    def confirm(self, inputs: dict[str, str]) -> None:
        """Note what the run reads, by hash, on the main process.

        Raises:
            ValueError: it was trained on others.
        """
        about = json.loads((self.folder / "run.json").read_text())
        changed = [
            name
            for name, value in inputs.items()
            if about.get("inputs", {}).get(name, value) != value
        ]
        if changed and self._checkpoints():
            raise ValueError(
                f"the {changed[0]} of the run in {self.folder} has changed since: give "
                "--overwrite, or another --output"
            )
        write_whole(
            self.folder / "run.json", json.dumps({**about, "inputs": inputs}, indent=2) + "\n"
        )

    def log(self, step: int, **values: float | int | bool | list[float]) -> None:
        entry = {"step": step, **values}
        self.metrics.append(entry)
        self.accelerator.log(values, step=step)
        if self.accelerator.is_main_process:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Publish a checkpoint of `step`, and delete all but the newest ones."""
        self._publish(self.folder / "checkpoints" / f"step-{step:06d}", step, write)
        if self.accelerator.is_main_process:
            for old in self._checkpoints()[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)

    def save_best(self, step: int, write: Callable[[Path], None]) -> None:
        self._publish(self.folder / "best", step, write)

    def restore_best(self, read: Callable[[Path], None]) -> None:
        """Read the checkpoint of `save_best`.

        The metrics stay.

        Raises:
            ValueError: if it is missing, corrupt or truncated, naming the file.
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
        # The folder's name is random, and known to the main process only.
        shared = [str(partial)]
        broadcast_object_list(shared, from_process=0)
        write(Path(shared[0]))
        # The manifest, written next, holds the digests of all ranks' files.
        self.accelerator.wait_for_everyone()

    def _checkpoints(self) -> list[Path]:
        # By number: as text, step-1000000 comes before step-999999. A person's copy
        # (step-000100-good) is not ours.
        named = (self.folder / "checkpoints").glob("step-*")
        return sorted(
            (path for path in named if path.name.removeprefix("step-").isdigit()), key=_step_of
        )

    def restore(self, read: Callable[[Path], None]) -> int:
        """Read the newest checkpoint and drop later metrics; returns its step, or 0.

        Raises:
            ValueError: a checkpoint is corrupt or truncated.
        """
        newest = self.on_main(self._verify_newest)  # another machine may not see it yet
        step = 0
        if newest:
            read(self.folder / "checkpoints" / newest)
            step = _step_of(Path(newest))
        self.metrics = self.on_main(lambda: self._cut_metrics(step))
        return step

    def _verify_newest(self) -> str:
        checkpoints = self._checkpoints()
        if not checkpoints:
            return ""
        verify(checkpoints[-1])
        return checkpoints[-1].name

    def _cut_metrics(self, step: int) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [
            json.loads(line) for line in lines if line.endswith("}")
        ]  # a kill may have cut the last line
        # The steps after the checkpoint will be done, and logged, again.
        kept = [entry for entry in whole if entry["step"] <= step]
        write_whole(path, "".join(json.dumps(entry) + "\n" for entry in kept))
        return kept
