"""A target shared out over two processes gives the answers and the training of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import ROOT, accelerate_launch, require, run_all

SCRIPT = str(ROOT / "tests/helpers/shard_target.py")


def train(config: str | None, target: Path, output: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """What came of the training, and what was said; on two processes by a config, or on one without any."""
    commands = [[sys.executable]] if config is None else accelerate_launch(config)
    (said,) = run_all(commands, [SCRIPT, str(target), str(output), *flags])
    return torch.load(output, weights_only=True), said


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert two["held"] == one["held"] // 2
    assert two["answers"] == one["answers"]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert two["tau"] == pytest.approx(one["tau"], rel=1e-3)
    assert two["weights"].keys() == one["weights"].keys()
    for name, weight in one["weights"].items():
        assert float((two["weights"][name] - weight).abs().max()) < 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "zero2", "zero3"])
def test_a_target_in_shards_trains_as_a_whole_one(config: str, random_target: Path, tmp_path: Path) -> None:
    require(config)
    one, _ = train(None, random_target, tmp_path / "one.pt")
    two, said = train(config, random_target, tmp_path / "two.pt")
    assert_same(one, two)
    assert "--loop.compile" not in said


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_a_draft_is_compiled_beside_a_target_in_shards(config: str, random_target: Path, tmp_path: Path) -> None:
    one, _ = train(None, random_target, tmp_path / "one.pt")
    two, said = train(config, random_target, tmp_path / "two.pt", "compiled")
    assert_same(one, two)
    assert one["graphs"] == 0 < two["graphs"]
    assert said.count("those of the target are in shards, and stay as they are") == 1, "one process says so"
