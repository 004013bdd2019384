"""Long rows train in bounded memory, and ranks that share rows compute what one process does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from run_learner import FORKS
from torch.multiprocessing.spawn import start_processes

from benchmarks.long.__main__ import LongConfig, main, run
from benchmarks.long.ranks import CASES
from benchmarks.long.ranks import run as run_rank
from benchmarks.long.rows import VOCABULARY
from redraft.engine.process import free_port

WITH_WINDOWS = ("eagle3", "eagle3-window", "dflash", "dflash-window")


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, (*WITH_WINDOWS, "eagle3+again", "dflash+again")), (4, tuple(CASES))],
)
def test_context_parallel_ranks_equal_one_process(
    ranks: int, cases: tuple[str, ...], tmp_path: Path
) -> None:
    """In float64: the loss, each gradient and the held-out metrics, over gloo."""
    said = tmp_path / "said"
    process = FORKS.Process(target=share_rows, args=(ranks, list(cases), said))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    errors = json.loads(said.read_text())
    assert errors.keys() == set(cases)
    assert max(errors.values()) < 1e-10, errors


def share_rows(ranks: int, cases: list[str], said: Path) -> None:
    """`python -m benchmarks.long.ranks`, in a fork of a process that has imported PyTorch."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT, 0o600), 1)
    torch.set_num_threads(1)
    start_processes(run_rank, (ranks, free_port(), cases), ranks, start_method="fork")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("tokens", [1 << 15, pytest.param(1 << 17, marks=pytest.mark.slow)])
def test_a_long_row_trains_in_less_memory_than_its_logits_would_take(tokens: int) -> None:
    found = run(1, "rows", "eagle3-window", str(tokens))
    assert found["tokens"] == tokens
    logits_mib = tokens * VOCABULARY * 4 / 2**20
    assert 0 < found["peak_mib"] < logits_mib, found


@pytest.mark.slow
def test_memory_of_a_long_row_grows_with_its_length_and_not_faster(tmp_path: Path) -> None:
    output = tmp_path / "long.json"
    cfg = LongConfig(
        lengths=(8192, 32768), cases=("eagle3", "dflash"), ranks=(2,), threads=1, output=output
    )
    main(cfg)
    written = json.loads(output.read_text())
    for case in cfg.cases:
        short, long = (row for row in written["long"]["rows"] if row["case"] == case)
        assert long["peak_mib"] < 4.5 * short["peak_mib"]
    assert written["long"]["context_parallel_error"] < 1e-10
    before = output.read_bytes()
    main(cfg)  # nothing is left to do
    assert output.read_bytes() == before
