"""Adapt a draft to a different version of the target: a fine-tune, or a later checkpoint.

    OLD ──────────────► forecast ─┐
                                  ├─► train the better start ─► forecast ─► gain over OLD proven? ─► publish
    a new start ──────► forecast ─┘                                                       no ─► keep OLD

After a fine-tune, the base model's head is usually the better start, but a standalone draft made of
target layers starts better from the fine-tune's layers. So both starts are forecast on answers of
the new target.
"""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from redraft.distill.launch.ranks import leave
from redraft.distill.run.start import start
from redraft.distill.run.training_run import Config, Run, refuse
from redraft.distill.train.run_config import HeadConfig
from redraft.engine.hardware import Machine
from redraft.eval.forecast.greedy import Forecast
from redraft.eval.intervals import CONFIDENCE, estimate_tau_gain
from redraft.files.artifact import write_whole
from redraft.files.folder import is_hub_name
from redraft.files.kept import compute_once
from redraft.heads.family import Family
from redraft.heads.provenance import read_provenance

VERDICT = "adapt.json"
CANDIDATE = "candidate"  # Folder of the trained draft in the run, until the gain is proven.

Start = Literal["old", "new"]


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """The result of `adapt`, as in adapt.json.

    Forecasts are tau at temperature 0 on the held-out prompts.
    """

    old: str
    """Folder of the draft for the earlier version of the target."""
    start: Start
    tau_old: float
    """Forecast of the old draft without further training."""
    tau_new_start: float | None
    """Forecast of the newly initialised draft before training. None if it could not be created."""
    tau_adapted: float
    gain: float
    """`tau_adapted` - `tau_old`."""
    interval: tuple[float, float]
    """95% interval of the gain, over prompts."""
    draft: str | None
    """Folder of the published draft. None if the old draft is kept."""

    @property
    def verdict(self) -> str:
        low, high = self.interval
        gain = (
            f"tau {self.tau_old:.2f} -> {self.tau_adapted:.2f}, gain {self.gain:+.2f} "
            f"[{low:+.2f}, {high:+.2f}]"
        )
        return (
            f"serve {self.draft}: {gain}"
            if self.draft
            else f"keep {self.old}: {gain} is not proven"
        )


def adapt(
    family: Family, cfg: Config, old: Path, machine: Machine | None = None
) -> Adaptation | None:
    """Train `old` or a new start for the target in `cfg`, and publish the draft if it gains.

    The target must be a later version of `old`'s target. The result is returned on the main process
    only. Raises the same errors as `run`.
    """
    started_s = time.perf_counter()
    training = Run(family, cfg, machine)
    training.target = replace(training.target, has_moved=True)
    starts: dict[Start, Config] = {"old": training.cfg}
    drafts: dict[Start, Any] = {"old": start(training)}
    if (new := _new_start(training, old, drafts["old"])) is not None:
        starts["new"], drafts["new"] = new, start(training, new)
    training.folder.begin()
    forecasts = {name: training.forecast(drafts[name], starts[name]) for name in starts}
    chosen = training.folder.on_main(lambda: _choose(training, forecasts))
    trained, cost = training.train(drafts[chosen])
    candidate = training.publish(trained, CANDIDATE)
    before = forecasts["old"]
    if before is None:
        training.prove(candidate, None, cost, started_s)
        return None
    after, fresh = training.forecasts[candidate], forecasts.get("new")
    gain = estimate_tau_gain(
        [p.counts for p in after.per_prompt], [p.counts for p in before.per_prompt]
    )
    interval = gain.interval(CONFIDENCE)
    draft = training.folder.folder / "draft"
    found = Adaptation(
        old=str(old),
        start=chosen,
        tau_old=before.overall.tau,
        tau_new_start=fresh.overall.tau if fresh else None,
        tau_adapted=after.overall.tau,
        gain=gain.value,
        interval=interval,
        draft=str(draft) if interval[0] > 0 else None,
    )
    write_whole(training.folder.folder / VERDICT, json.dumps(asdict(found), indent=2) + "\n")
    if found.draft is None:
        shutil.rmtree(candidate)
        training.folder.complete()
        leave(training.accelerator)
    else:
        shutil.rmtree(draft, ignore_errors=True)  # published by this run before it was killed
        candidate.rename(draft)
        training.forecasts[draft] = after
        training.prove(draft, before, cost, started_s)
    print(found.verdict)
    return found


def _choose(run: Run, forecasts: Mapping[Start, Forecast | None]) -> Start:
    """Return the start with the higher forecast.

    A resumed run keeps the start that it chose before.
    """
    taus = {
        name: forecast.overall.tau for name, forecast in forecasts.items() if forecast is not None
    }
    best: str = max(taus, key=lambda name: taus[name])
    kept = compute_once(
        run.folder.folder, "start", [sorted(taus), run.folder.inputs], str, lambda: best
    )
    chosen: Start = "old" if kept == "old" else "new"
    print(
        "; ".join(f"the {name} draft starts with tau {tau:.2f}" for name, tau in taus.items()),
        end="",
    )
    print(f": training the {chosen} one")
    return chosen


def _new_start(training: Run, old: Path, loaded: Any) -> Config | None:
    """Return settings for a new start with the options of `old`.

    None if no new start is possible.
    """
    cfg = training.cfg
    if isinstance(cfg, HeadConfig):
        new = replace(cfg, start_from=None, head=loaded.config)
        try:
            refuse(training.family, new)
        except ValueError as error:
            print(f"no new start: {error}")
            return None
        return new
    options = read_provenance(old).config.draft
    if options is None:
        return None
    name = options.checkpoint
    if (
        not options.layers
        and not options.num_layers
        and not (Path(str(name)).exists() or is_hub_name(str(name)))
    ):
        return None
    return replace(cfg, draft=options)
