"""Long rows train in bounded memory, and ranks that share rows compute what one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.long.__main__ import LongConfig, main, run
from benchmarks.long.ranks import CASES
from benchmarks.long.rows import VOCABULARY

WITH_WINDOWS = ("eagle3", "eagle3-window", "dflash", "dflash-window")


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, (*WITH_WINDOWS, "eagle3+again", "dflash+again")), (4, tuple(CASES))],
)
def test_context_parallel_ranks_equal_one_process(ranks: int, cases: tuple[str, ...]) -> None:
    """In float64: the loss, each gradient and the held-out metrics, over gloo."""
    errors = run(1, "ranks", str(ranks), *cases)
    assert errors.keys() == set(cases)
    assert max(errors.values()) < 1e-10, errors


def test_a_long_row_of_128k_tokens_trains_in_less_memory_than_its_logits_would_take() -> None:
    tokens = 1 << 17
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
