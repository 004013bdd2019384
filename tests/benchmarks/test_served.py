"""Forecast against a real vLLM that takes its filters from the target's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.served import SAMPLING, ServedCase, measure_served


@pytest.mark.slow
@pytest.mark.vllm
def test_forecasts_with_the_targets_filters_are_the_engines_counts(
    tiny_target: Path, tmp_path: Path
) -> None:
    served = measure_served(ServedCase(target=tiny_target), tmp_path)
    assert served["sampling"] == SAMPLING
    for name in ("greedy", "sampled"):
        assert served[f"error_{name}"] < 0.02, served[name]
        assert 1.1 < served[name]["tau_engine"] < 3.9, "some drafts are accepted and some are not"
    assert served["sampled"]["ignoring_filters"]["error"] > 0.02, (
        "a forecast without filters would be noticed"
    )
