"""Check everything that only a GPU runs, in fifteen minutes on one card.

On a machine without a GPU, it runs only the phases that need none.

    $ python -m benchmarks.gpu                       # every phase, the most valuable first
    $ python -m benchmarks.gpu --phases facts tests --tests "norm or attention"

    facts    versions, the card, its bandwidth and its matrix products                  facts.json
    tests    tests/gpu in shards                                                        tests.json
    train    whole training runs and a resumed one, on a small random target            train.json
    micro    kernels and attention compared with the card's limits; swaps and capture   micro.json
    step     the steps that `redraft plan` counts: device and host time of each part    step.json
    loss     the fused loss alone                                                       loss.json
    engine   vLLM: its model runner, CUDA graphs, capture and swaps                     engine.json

Each phase is a process with a time limit. It writes its file after every result, so a kill loses at
most one phase. Its log is in the same folder. `tests` and `train` measure no time, so they run side
by side. On a CPU, step, loss and engine are skipped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import msgspec

PhaseName = Literal["facts", "tests", "train", "micro", "step", "loss", "engine"]

LEFT_S = 8.0
"""Time in seconds to keep in reserve at the end. A phase that would get less than this is
skipped.
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The check's settings."""

    output: Path = Path("outputs/gpu")
    """Folder for the results. Files of the selected phases are replaced."""
    phases: tuple[PhaseName, ...] = ("facts", "tests", "train", "micro", "step", "loss", "engine")
    """Phases to run, in this order."""
    minutes: float = 14.5
    """Time limit of all phases together."""
    tests: str = ""
    """Tests to run, as an expression for `pytest -k`. By default, all tests run."""
    trainings: tuple[str, ...] = ("eagle3", "standalone", "dflash", "compiled", "cached")
    """Training runs: families, `compiled` for EAGLE-3 with compiled layers, `cached` for Medusa on
    a cached signal.
    """
    steps: int | None = None
    """Number of steps in each training run. By default, 60 on a GPU and 3 on a CPU."""
    families: tuple[str, ...] = ("eagle3", "dflash", "mtp", "medusa", "standalone")
    """Draft families whose training step is measured."""
    drafts: tuple[Literal["eagle3", "draft_model"], ...] = ("eagle3", "draft_model")
    """Drafts that the engine serves."""

    @property
    def device(self) -> str:
        from redraft.engine.hardware import this_machine

        return this_machine().device


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the check, run in its own process."""

    name: PhaseName
    module: str
    """Name of a module in benchmarks.gpu. Its `MEASURES` has this phase's function."""
    limit_s: float
    needs_gpu: bool = False
    is_timed: bool = True
    """Whether the phase measures time and therefore runs alone."""


PHASES = (
    Phase(name="facts", module="facts", limit_s=60),
    Phase(name="tests", module="shards", limit_s=190, is_timed=False),
    Phase(name="train", module="trainings", limit_s=190, is_timed=False),
    Phase(name="micro", module="micro", limit_s=100),
    Phase(name="step", module="family_steps", limit_s=230, needs_gpu=True),
    Phase(name="loss", module="family_steps", limit_s=90, needs_gpu=True),
    Phase(name="engine", module="engines", limit_s=230, needs_gpu=True),
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a phase ended."""

    name: PhaseName
    outcome: str
    seconds: float


def main(cfg: Config) -> None:
    """Run the phases, and print the outcome of each as it ends.

    Raises:
        ValueError: a phase failed or exceeded its time limit.
    """
    cfg.output.mkdir(parents=True, exist_ok=True)
    began_s, device = time.monotonic(), cfg.device
    phases = [next(phase for phase in PHASES if phase.name == name) for name in cfg.phases]
    ended: list[Ended] = []
    with ThreadPoolExecutor(len(PHASES)) as pool:
        for group in group_phases(phases):
            left_s = began_s + 60 * cfg.minutes - time.monotonic()
            for one in pool.map(
                lambda phase, left_s=left_s: run_phase(phase, cfg, device, left_s), group
            ):
                ended.append(one)
                print(f"{one.name:<8} {one.outcome}, {one.seconds:.0f} s", flush=True)
    if failed := [one.name for one in ended if one.outcome not in ("passed", "left out")]:
        raise ValueError(f"{', '.join(failed)} failed: the logs are in {cfg.output}")


def group_phases(phases: Sequence[Phase]) -> list[list[Phase]]:
    """Group neighbouring phases that measure no time; each group runs side by side."""
    groups: list[list[Phase]] = []
    for phase in phases:
        if groups and not phase.is_timed and not groups[-1][-1].is_timed:
            groups[-1].append(phase)
        else:
            groups.append([phase])
    return groups


def run_phase(phase: Phase, cfg: Config, device: str, left_s: float) -> Ended:
    """Run a phase in its own process for at most `left_s` seconds."""
    limit_s = min(phase.limit_s, left_s - LEFT_S)
    if (phase.needs_gpu and device == "cpu") or limit_s < LEFT_S:
        return Ended(name=phase.name, outcome="left out", seconds=0)
    file = cfg.output / f"{phase.name}.json"
    file.unlink(missing_ok=True)
    settings = msgspec.json.encode(cfg, enc_hook=str).decode()
    command = [sys.executable, "-m", "benchmarks.gpu.check", phase.name, settings]
    began_s = time.monotonic()
    with (cfg.output / f"{phase.name}.log").open("w") as log:
        # The process gets its own session, so that the limit also stops its children.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
            outcome = "passed" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Ended(name=phase.name, outcome=outcome, seconds=time.monotonic() - began_s)


def measure(name: str, settings: str) -> None:
    """Run a phase in this process."""
    from benchmarks.gpu.results import Results

    cfg = msgspec.json.decode(settings, type=Config, dec_hook=lambda kind, text: kind(text))
    phase = next(one for one in PHASES if one.name == name)
    module = import_module(f"benchmarks.gpu.{phase.module}")
    module.MEASURES[name](cfg, Results(cfg.output / f"{name}.json"))


if __name__ == "__main__":
    measure(*sys.argv[1:])
