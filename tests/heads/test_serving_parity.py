"""Does serving see what training saw? Every head against the real vLLM: inputs, outputs and drafted tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from make_heads import make_random, make_target, signal_of_prefix
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from heads import eagle1, eagle3, medusa, mtp
from heads.mtp_folder import as_mimo, stitch
from heads.target import Target

pytestmark = pytest.mark.vllm

NUM_TOKENS = 3
TOLERANCE = 1e-4


def make_engine_target(**overrides: Any) -> Any:
    # a head size that vLLM's CPU attention has
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}
    return make_target(**{**sizes, "num_key_value_heads": 1, "initializer_range": 0.2, **overrides})


def run_engine(folder: Path, target: Path, speculative_config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The outputs and drafted blocks of a vLLM in a process of its own."""
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 12)]
    spec = {
        "target": str(target),
        "speculative_config": {"num_speculative_tokens": NUM_TOKENS, **speculative_config},
        "prompts": prompts,
        "max_tokens": 12,
        "out": str(folder / "dump.pt"),
        **options,
    }
    command = [sys.executable, str(Path(__file__).with_name("run_engine.py")), json.dumps(spec)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {"prompts": prompts, **torch.load(folder / "dump.pt", weights_only=False)}


def prefix_of(dump: dict[str, Any], block: dict[str, Any]) -> list[int]:
    request = block["request"]
    return [*dump["prompts"][request], *dump["outputs"][request][: block["num_output"]]]


def usable_blocks(dump: dict[str, Any]) -> list[dict[str, Any]]:
    """Blocks that were drafted while their request still ran."""
    blocks = [b for b in dump["blocks"] if b["num_output"] <= len(dump["outputs"][b["request"]])]
    assert len(blocks) >= 6
    return blocks


class RecordedSteps:
    """A head's `step`, recording its last row's inputs and outputs."""

    def __init__(self, head: Any) -> None:
        self._step, self.rows = head.step, []
        head.step = self

    def __call__(self, ids: Any, feature: Any, position_ids: Any, memory: Any) -> Any:
        hidden, fed_back = self._step(ids, feature, position_ids, memory)
        self.rows.append((ids[0], position_ids[0], feature[0], hidden[0], fed_back[0]))
        return hidden, fed_back


def assert_recurrent_head_serves_as_it_trains(head: Any, model: Any, dump: dict[str, Any], read: int = 0) -> None:
    """First passes over whole prompts row by row, later passes at their row, and every drafted token.

    `read` is which of the drafter's outputs its head reads.
    """
    recorded = RecordedSteps(head)
    prompts_seen = 0
    for block in usable_blocks(dump):
        prefix = prefix_of(dump, block)
        recorded.rows.clear()
        drafted = head.propose(prefix, signal_of_prefix(head, model, prefix), NUM_TOKENS)
        assert [token for token, _ in drafted] == block["drafted"]
        if block["num_output"] > 1:  # a first pass after verification holds rejected rows too
            continue
        prompts_seen += 1
        for served, ours in zip(block["passes"], recorded.rows, strict=True):
            assert_pass_equals(served, ours, read)
    assert prompts_seen == len(dump["prompts"])


def assert_pass_equals(served: dict[str, Any], ours: Sequence[torch.Tensor], read: int) -> None:
    ids, position_ids, feature, hidden, fed_back = ours
    rows = len(ids)
    assert served["input_ids"][:rows].tolist() == ids.tolist()
    assert served["positions"][:rows].tolist() == position_ids.tolist()
    close = {"atol": TOLERANCE, "rtol": TOLERANCE}
    torch.testing.assert_close(served["hidden_states"][:rows], feature, **close)
    torch.testing.assert_close(served["out"][read][:rows], hidden, **close)
    torch.testing.assert_close(served["out"][-1][:rows], fed_back, **close)


def test_eagle1(tmp_path: Path) -> None:
    model = make_engine_target()
    model.save_pretrained(tmp_path / "target")
    head = make_random(eagle1.Eagle1(eagle1.Config(), Target.of(model)))
    head.export(tmp_path / "draft")
    dump = run_engine(tmp_path, tmp_path / "target", {"method": "eagle", "model": str(tmp_path / "draft")})
    assert_recurrent_head_serves_as_it_trains(head, model, dump)


EAGLE3 = {
    "two layers, reduced vocabulary, vllm": ({"aux_layer_ids": (1, 4)}, torch.arange(1, 256, 2), "vllm"),
    "four layers, 3.1, shared head, vllm": (
        {"aux_layer_ids": (0, 2, 3, 5), "fc_norm": True, "norm_output": True, "own_head": False},
        None,
        "vllm",
    ),
    "two layers, norm before residual, speculators": (
        {"aux_layer_ids": (2, 3), "norm_before_residual": True},
        torch.arange(0, 256, 2),
        "speculators",
    ),
}


@pytest.mark.parametrize("variant", EAGLE3)
def test_eagle3(variant: str, tmp_path: Path) -> None:
    options, draft_ids, layout = EAGLE3[variant]
    model = make_engine_target()
    model.save_pretrained(tmp_path / "target")
    head = make_random(eagle3.Eagle3(eagle3.Config(**options), Target.of(model), draft_ids))
    head.export(tmp_path / "draft", layout=layout, target_name=str(tmp_path / "target"))
    dump = run_engine(tmp_path, tmp_path / "target", {"method": "eagle3", "model": str(tmp_path / "draft")})
    assert_recurrent_head_serves_as_it_trains(head, model, dump)


def test_medusa(tmp_path: Path) -> None:
    model = make_engine_target()
    model.save_pretrained(tmp_path / "target")
    head = make_random(medusa.Medusa(medusa.Config(num_layers=2), Target.of(model)))
    head.export(tmp_path / "draft")
    dump = run_engine(tmp_path, tmp_path / "target", {"method": "medusa", "model": str(tmp_path / "draft")})
    for block in usable_blocks(dump):
        prefix = prefix_of(dump, block)
        signal = signal_of_prefix(head, model, prefix)
        assert [token for token, _ in head.propose(prefix, signal, NUM_TOKENS)] == block["drafted"]
        (served,) = block["passes"]
        hidden_1D = signal.distribution.hidden_BTD[0, -1:]
        torch.testing.assert_close(served["args"][0], hidden_1D, atol=TOLERANCE, rtol=TOLERANCE)
        for out, residual_block in zip(served["out"], head.blocks, strict=True):
            torch.testing.assert_close(out, residual_block(hidden_1D), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("alone", [False, True], ids=["stitched into the target", "in a folder of its own"])
def test_mimo_mtp(alone: bool, tmp_path: Path) -> None:
    make_engine_target(num_key_value_heads=1).save_pretrained(tmp_path / "llama")
    as_mimo(tmp_path / "llama", tmp_path / "mimo")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mimo").eval()
    head = make_random(mtp.Mtp(mtp.Config(), Target.of(model)))
    if alone:
        head.export(tmp_path / "draft")
        target, draft = tmp_path / "mimo", {"model": str(tmp_path / "draft")}
    else:
        stitch(tmp_path / "mimo", head.checkpoint_tensors(), tmp_path / "stitched", {})
        target, draft = tmp_path / "stitched", {}
    dump = run_engine(tmp_path, target, {"method": "mtp", **draft})
    assert_recurrent_head_serves_as_it_trains(head, model, dump)


def make_native_target(layout: str) -> Any:
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "initializer_range": 0.2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(0)
    if layout == "qwen3_next":
        # full attention throughout: the linear layers need kernels that this CPU build lacks, and MTP layers have none
        sparse = {"num_experts": 4, "shared_expert_intermediate_size": 64, "layer_types": ["full_attention"] * 3}
        return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **sparse, num_key_value_heads=1, head_dim=64)).eval()
    # the only latent size that vLLM's CPU kernel has
    latent = {
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    sparse = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
    sparse |= {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }  # as published; transformers takes them for granted
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **latent, **sparse, num_key_value_heads=2)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["qwen3_next", "deepseek"])
def test_native_mtp(layout: str, tmp_path: Path) -> None:
    model = make_native_target(layout)
    model.save_pretrained(tmp_path / "target")
    head = make_random(mtp.Mtp(mtp.Config(), Target.of(model)))
    stitch(tmp_path / "target", head.checkpoint_tensors(), tmp_path / "stitched", {"num_nextn_predict_layers": 1})
    options: dict[str, Any] = {}
    if layout == "deepseek":
        # The backend for AMX has bfloat16 only. The CPU kernel of vLLM 0.32 misplaces the rotation where the rotated
        # part of a query is a slice of it, as here: without it, and with none in our layer, rows agree to 1e-6.
        options = {"engine": {"attention_backend": "CPU_MLA"}, "native_rotary": True}
    dump = run_engine(tmp_path, tmp_path / "stitched", {"method": "mtp"}, **options)
    # DeepSeek's drafter also puts out what comes before its final norm
    assert_recurrent_head_serves_as_it_trains(head, model, dump, read=1 if layout == "deepseek" else 0)
