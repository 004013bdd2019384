"""A target shared out over two processes gives the answers and the training of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from launches import ROOT, accelerate_launch, require, run_all

SCRIPT = str(ROOT / "tests/helpers/shard_target.py")


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "zero2", "zero3"])
def test_a_target_in_shards_trains_as_a_whole_one(config: str, random_target: Path, tmp_path: Path) -> None:
    require(config)
    run_all([[sys.executable]], [SCRIPT, str(random_target), str(tmp_path / "one.pt")])
    run_all(accelerate_launch(config), [SCRIPT, str(random_target), str(tmp_path / "two.pt")])
    one, two = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("one", "two"))
    assert two["held"] == one["held"] // 2
    assert two["answers"] == one["answers"]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert two["tau"] == pytest.approx(one["tau"], rel=1e-3)
    assert two["weights"].keys() == one["weights"].keys()
    for name, weight in one["weights"].items():
        assert float((two["weights"][name] - weight).abs().max()) < 1e-3, name
