"""kill -9 of a rank, or of what started it.

The others are gone soon after, and the next launch goes on exactly.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from launches import ENVIRONMENT, ROOT, accelerate_launch, require, run_all

SCRIPT = str(ROOT / "tests/helpers/run_on_ranks.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
GONE_S = 120


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def written(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*")}


def break_off(commands: Sequence[Sequence[str]], folder: Path, victim: str) -> None:
    """Start a run on the nodes, and kill -9 a rank of the last, or its launcher.

    The kill comes when there is a checkpoint.
    """
    output, pids = folder / "broken", folder / "pids"
    pids.mkdir()
    nodes = [
        subprocess.Popen(
            [*command, SCRIPT, str(output), str(pids)],
            cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for command in commands
    ]  # fmt: skip
    try:
        wait_until((output / "checkpoints/step-000002/manifest.json").exists, 900)
        ranks = [int(path.name) for path in pids.iterdir()]
        assert len(ranks) == 2
        of_the_last = [pid for pid in ranks if parent(pid) == nodes[-1].pid]
        os.kill(nodes[-1].pid if victim == "launcher" else of_the_last[-1], signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, ranks)), GONE_S)
        after = written(output)
        wait_until(lambda: all(node.poll() is not None for node in nodes), GONE_S)
        assert written(output) == after
        assert not (output / "weights.pt").exists()
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def assert_goes_on(command: Callable[[], Sequence[Sequence[str]]], folder: Path) -> None:
    pids = folder / "other-pids"
    pids.mkdir()
    run_all(command(), [SCRIPT, str(folder / "broken"), str(pids)])
    run_all(command(), [SCRIPT, str(folder / "whole"), str(pids)])
    broken, whole = (
        torch.load(folder / name / "weights.pt", weights_only=True) for name in ("broken", "whole")
    )
    assert broken.keys() == whole.keys()
    assert all(torch.equal(broken[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_without_torchrun_no_rank_writes_on_and_the_run_is_resumed_exactly_by_as_many_ranks(
    tmp_path: Path,
) -> None:
    break_off([TORCHRUN], tmp_path, "launcher")
    assert_goes_on(lambda: [TORCHRUN], tmp_path)
    alone = subprocess.run(
        [sys.executable, SCRIPT, str(tmp_path / "whole"), str(tmp_path / "pids")],
        cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, timeout=900,
    )  # fmt: skip
    assert alone.returncode != 0
    said = alone.stderr.strip().splitlines()[-1]
    assert said.startswith("ValueError: ")
    assert re.search(r"\b2 processes\b.*\badamw\b.*\b1 process\b.*\badamw$", said)


@pytest.mark.slow
def test_without_one_rank_the_other_ends(tmp_path: Path) -> None:
    break_off([TORCHRUN], tmp_path, "rank")


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("victim", ["rank", "launcher"])
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "zero3"])
def test_a_broken_run_ends_whole_and_is_resumed_exactly(
    config: str, victim: str, nodes: int, tmp_path: Path
) -> None:
    require(config)
    break_off(accelerate_launch(config, nodes=nodes), tmp_path, victim)
    assert_goes_on(lambda: accelerate_launch(config, nodes=nodes), tmp_path)
