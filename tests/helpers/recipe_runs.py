"""Training of a standalone draft on a small target in a separate process.

It runs from the command line to the exit status.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from run_learner import FORKS

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/train.py")
STEPS = 8

Done = subprocess.CompletedProcess[str]


def build_command(target: Path, data: Path, output: Path, *flags: str) -> list[str]:
    """The recipe's arguments for `target`, with further flags.

    No engine, and eight steps unless they say otherwise.
    """
    defaults = {
        "--target": str(target),
        "--draft.layers": "0",
        "--data.source": str(data),
        "--data.held-out": "0.2",
        "--data.num-prompts": "4",
        "--data.max-prompt-tokens": "128",
        "--loop.steps": str(STEPS),
        "--loop.batch-size": "2",
        "--loop.sequence-length": "128",
        "--loop.save-every": "2",
        "--loop.eval-every": "4",
        "--optim.lr": "1e-3",
        "--prove.max-tokens": "8",
        "--output": str(output),
    }
    if "--draft.num-layers" in flags:
        del defaults["--draft.layers"]
    return [
        "standalone",
        *(part for pair in defaults.items() if pair[0] not in flags for part in pair),
        "--prove.no-engine",
        *flags,
    ]


def run(arguments: Sequence[str]) -> Done:
    """`python recipes/train.py standalone ...`, by a process that forks with everything imported."""
    with forked(arguments) as (process, folder):
        process.join(600)
        assert process.exitcode is not None, "it did not end"
        written = [(folder / name).read_text() for name in ("out", "err")]
        return Done([RECIPE, *arguments], process.exitcode, *written)


def kill_when(arguments: Sequence[str], condition: Callable[[], bool]) -> None:
    """Start the recipe and kill -9 it as soon as `condition` holds."""
    with forked(arguments) as (process, _):
        deadline_s = time.monotonic() + 1200
        while not condition():
            assert process.is_alive(), "it ended before it could be killed"
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
        process.kill()
        process.join()


@contextlib.contextmanager
def forked(arguments: Sequence[str]):
    """The recipe's process, and the folder of its `out` and `err`; it is gone on exit."""
    with TemporaryDirectory() as folder:
        process: ForkServerProcess = FORKS.Process(
            target=execute, args=(folder, [RECIPE, *arguments])
        )
        process.start()
        try:
            yield process, Path(folder)
        finally:
            process.kill()
            process.join()


def execute(folder: str, argv: list[str]) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    sys.argv = argv
    runpy.run_path(RECIPE, run_name="__main__")
