"""A target shared out over two processes gives the answers and the training of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import ROOT, accelerate_launch, require, run_all
from transformers import PreTrainedTokenizerFast

from redraft.distill.signal.sharded import load_sharded
from redraft.files.checkpoint import load_causal_lm, new_model
from redraft.files.target_folder import TargetFolder
from redraft.files.target_sizes import TargetSizes
from tests.helpers.served_targets import save_served_target
from tests.helpers.target_families import make_config

GB = 10**9

SCRIPT = str(ROOT / "tests/helpers/shard_target.py")


def train(
    config: str | None, target: Path, output: Path, *flags: str
) -> tuple[dict[str, Any], str]:
    """What came of the training, and what was said.

    On two processes by a config, or on one without any.
    """
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
def test_a_target_in_shards_trains_as_a_whole_one(
    config: str, random_target: Path, tmp_path: Path
) -> None:
    require(config)
    one, _ = train(None, random_target, tmp_path / "one.pt")
    two, said = train(config, random_target, tmp_path / "two.pt")
    assert_same(one, two)
    assert "--loop.compile" not in said


@pytest.mark.slow
def test_ranks_make_equally_many_passes_of_one_document_a_row(
    small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    target = save_served_target("gpt_oss", tmp_path / "target", small_tokenizer)
    one, _ = train(None, target, tmp_path / "one.pt")
    two, _ = train("ddp", target, tmp_path / "two.pt")
    assert_same(one, two)


@pytest.mark.slow
def test_each_machine_holds_a_whole_target(random_target: Path, tmp_path: Path) -> None:
    """Four ranks on two machines: each holds half of a layer, not a quarter."""
    one, _ = train(None, random_target, tmp_path / "one.pt")
    machines = accelerate_launch("ddp", "--num_processes", "4", nodes=2)
    run_all(machines, [SCRIPT, str(random_target), str(tmp_path / "four.pt")])
    assert_same(one, torch.load(tmp_path / "four.pt", weights_only=True))


def test_shards_are_not_rounded_where_transformers_keeps_float32(tmp_path: Path) -> None:
    model = new_model(make_config("deepseek_v3"), torch.float32)
    for name, tensor in model.named_buffers():
        if "e_score" in name:
            tensor.copy_(5 + torch.arange(len(tensor)) / 1000)
    model.save_pretrained(tmp_path / "target")
    whole = load_causal_lm(tmp_path / "target", torch.bfloat16)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    try:
        folder = tmp_path / "target"
        target = TargetFolder(name=str(folder), folder=folder, dtype="bfloat16")
        sharded = load_sharded(target, torch.device("cpu"))
        found = {**dict(sharded.named_buffers()), **dict(sharded.named_parameters())}
        for name, tensor in whole.state_dict().items():
            here = found[name]
            assert torch.equal(getattr(here, "full_tensor", lambda here=here: here)(), tensor), name
    finally:
        torch.distributed.destroy_process_group()


def test_machines_share_a_target_if_it_leaves_one_of_them_too_little_memory() -> None:
    sizes = TargetSizes(outside=4 * GB, layers=(GB,) * 64)
    assert sizes.choose_ranks(16, 8, 80 * GB) == 8  # 4 + 64 / 8 + 2 = 14 GB, at most 32
    assert sizes.choose_ranks(16, 8, 34 * GB) == 16  # at most 13.6
    assert sizes.choose_ranks(16, 8, None) == 8
    assert sizes.choose_ranks(2, 1, 200 * GB) == 2  # one process on each machine
    assert sizes.choose_ranks(8, 8, 10 * GB) == 8


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_a_draft_is_compiled_beside_a_target_in_shards(
    config: str, random_target: Path, tmp_path: Path
) -> None:
    one, _ = train(None, random_target, tmp_path / "one.pt")
    two, said = train(config, random_target, tmp_path / "two.pt", "compiled")
    assert_same(one, two)
    assert one["graphs"] == 0 < two["graphs"]
    assert said.count("only the draft's layers are compiled") == 1, "one process says so"
