"""Whether a server can have vLLM's adaptive verification, before it starts, and vLLM's own words."""

import json
from pathlib import Path

import pytest

from redraft.engine import adaptive
from redraft.engine.adaptive import explain_refusal, find_obstacle, is_expected
from redraft.engine.server import vllm_keys

HEAD = {"method": "eagle3", "model": "head"}


def find(flags=None, draft=None, target="owner/absent", environment=None, on_cpu=False):
    return find_obstacle(
        flags or {}, target, draft or HEAD, environment=environment or {}, on_cpu=on_cpu
    )


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setattr(adaptive, "open_folder", Path)


@pytest.mark.parametrize(
    ("asked", "condition"),
    [
        ({}, ""),
        ({"draft": {"method": "draft_model", "model": "small"}}, ""),
        ({"on_cpu": True}, "full CUDA graphs, which do not exist on a CPU"),
        ({"flags": {"enforce_eager": ""}}, adaptive.GRAPHS),
        ({"flags": {"enforce_eager": "False"}}, ""),
        ({"flags": {"compilation_config": "PIECEWISE"}}, adaptive.GRAPHS),
        ({"flags": {"compilation_config": '{"cudagraph_mode": "none"}'}}, adaptive.GRAPHS),
        ({"flags": {"compilation_config": "FULL_AND_PIECEWISE", "O0": ""}}, ""),
        ({"flags": {"O1": ""}}, adaptive.GRAPHS),
        ({"flags": {"optimization_level": "0"}}, adaptive.GRAPHS),
        ({"flags": {"optimization_level": "3"}}, ""),
        ({"flags": {"enable_lora": ""}}, adaptive.LORA),
        ({"flags": {"pipeline_parallel_size": "2"}}, adaptive.STAGES),
        ({"flags": {"pipeline_parallel_size": "1"}}, ""),
        ({"flags": {"return_sampling_mask": ""}}, "sampling masks"),
        ({"draft": {"method": "ngram"}}, adaptive.UNSURE),
        ({"draft": {"method": "suffix"}}, adaptive.UNSURE),
        ({"draft": {"method": "unheard_of"}}, adaptive.UNSURE),
        ({"draft": {"method": "medusa"}}, adaptive.V1),
        ({"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, adaptive.V1),
    ],
)
def test_a_broken_condition_of_adaptive_verification_is_found_before_the_start(asked, condition):
    found = find(**asked)
    assert condition in found
    assert bool(found) is bool(condition)


@pytest.mark.parametrize(
    ("config", "is_hybrid"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "granitemoehybrid", "mamba_d_conv": 4}, True),
        ({"model_type": "qwen3_next", "linear_conv_kernel_dim": 4}, True),
        ({"model_type": "wrapper", "text_config": {"ssm_state_size": 16}}, True),
    ],
)
def test_adaptive_verification_needs_a_target_of_attention_alone(config, is_hybrid, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find(target=str(tmp_path)) == (adaptive.HYBRID if is_hybrid else "")


@pytest.mark.parametrize(
    ("backend", "capability", "is_known"),
    [
        ("", "9.0", True),
        ("FLASH_ATTN", "9.0", True),
        ("FLASHINFER", "9.0", False),
        ("", "8.0", False),
        ("", "10.0", False),
        ("", None, False),
        ("TRITON_ATTN", "8.0", True),
        ("triton_attn", None, True),
    ],
)
def test_auto_takes_adaptive_verification_only_with_a_backend_that_is_known(
    backend, capability, is_known, tmp_path
):
    flags = {"attention_backend": backend} if backend else {}
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert is_expected(flags, str(tmp_path), capability) is is_known
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    assert not is_expected(flags, str(tmp_path), capability)


@pytest.mark.parametrize(
    ("said", "condition"),
    [
        ("Adaptive verification is not currently compatible with LoRA", adaptive.LORA),
        ("Adaptive verification requires full CUDA graphs. Use cudagraph mode", adaptive.GRAPHS),
        (
            "Adaptive verification is not currently compatible with pipeline parallelism",
            adaptive.STAGES,
        ),
        (
            "Adaptive verification trims verification requests on device, which the FLASHINFER "
            "attention backend does not support.",
            adaptive.BACKEND,
        ),
        (
            "Adaptive verification replays decode cudagraphs whose per-request query lengths vary up "
            "to 4, but FLASH_ATTN allows none.",
            adaptive.BACKEND,
        ),
    ],
)
def test_an_error_of_vllm_about_adaptive_verification_is_the_same_line(said, condition):
    assert condition in explain_refusal(f"ValueError: {said}")


def test_other_errors_than_those_of_adaptive_verification_stay_as_they_are():
    for said in ("ValueError: LoRA rank 64 is too high", "RuntimeError: CUDA out of memory"):
        assert explain_refusal(said) == said


def test_adaptive_verification_reads_the_logits_of_a_greedy_head(tmp_path):
    chosen = "use_local_argmax_reduction"
    assert vllm_keys(HEAD)[chosen]
    assert chosen not in vllm_keys(HEAD | {adaptive.KEY: True})
