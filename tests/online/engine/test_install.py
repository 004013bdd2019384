"""The plugin never stops a server.

Whatever fails when a worker is set up, the engine starts and answers.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from redraft.engine import hooks
from redraft.engine.hooks import RunnerState
from redraft.files.folder import fingerprint
from redraft.online.engine import plugin
from redraft.online.engine import worker as engine_worker
from redraft.online.engine.config import CaptureConfig
from redraft.online.engine.feed import find_owner, name_owner
from redraft.online.records.origin import Origin, read_origin_arguments


def run_install(target, draft, spool, *failures):
    spec = {"target": str(target), "draft": str(draft), "spool": str(spool), "failures": failures}
    script = Path(__file__).parents[2] / "helpers/run_install.py"
    result = subprocess.run(
        [sys.executable, script, json.dumps(spec)], capture_output=True, text=True, timeout=1500
    )
    line = next((line for line in result.stdout.splitlines() if line.startswith("REPORT")), None)
    assert line, result.stderr[-3000:]
    return json.loads(line.removeprefix("REPORT"))


@pytest.mark.slow
@pytest.mark.vllm
def test_whatever_fails_the_engine_starts_answers_and_says_what_is_off(
    random_target, registry, tmp_path
):
    failures = {
        "fingerprint": ("fingerprint is broken", "fingerprint is broken"),
        "unknown runner": ("V1 and V2 model runners can be recorded, not", ""),
        "install_capture": ("install_capture is broken", ""),
        "Capture": ("Capture is broken", ""),
        "checksum": ("", "checksum is broken"),
        "remote target": ("no model folder", "no model folder"),
        "setting": ("between 0 and 1", "between 0 and 1"),
        "model_folder": ("model_folder is broken", "model_folder is broken"),
    }
    answer = run_install(random_target, registry / "v000002", tmp_path / "spool", *failures)
    *failed, well = answer["reports"]
    for name, report in zip(failures, failed, strict=True):
        for kind, told in zip(("capture", "swap"), failures[name], strict=True):
            found = report["status"][f"{kind}_off"]
            assert (told in found, bool(found)) == (True, bool(told)), (name, kind, found)
        is_recording = not failures[name][0]
        assert (report["status"]["capture"] is not None) is is_recording, name
        assert report["output"] == well["output"], name
    assert len(well["output"]) == 32
    assert (well["status"]["capture_off"], well["status"]["swap_off"]) == ("", "")
    assert well["status"]["target_fingerprint"] == fingerprint(random_target)
    # Once, although the worker of "checksum" had begun to record: a hook replaces the one before it.
    assert answer["recorded"] == [25], (
        "the other request had no mark: whether its client opted out is not known"
    )
    assert answer["counts"]["skipped_requests_unmarked"] >= 1


def make_experts(kind, small_tokenizer, folder):
    """A random mixture of experts; the DeepSeek one also has latent attention."""
    torch.manual_seed(0)
    shared = {
        "vocab_size": len(small_tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 512, "moe_intermediate_size": 32,
        "num_experts_per_tok": 2, "initializer_range": 0.3, "tie_word_embeddings": False,
    }  # fmt: skip
    if kind == "qwen":
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**shared, num_experts=4, num_key_value_heads=1, head_dim=32)
        )
    else:
        latent = {
            "kv_lora_rank": 512,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 16,
        }
        routed = {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
        }
        config = DeepseekV3Config(
            **shared, **latent, **routed, v_head_dim=32, num_key_value_heads=2
        )
        model = DeepseekV3ForCausalLM(config)
    model.save_pretrained(folder)
    small_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen", "deepseek"])
def test_a_mixture_of_experts_is_recorded_like_any_other_target(
    kind, small_tokenizer, registry, tmp_path
):
    target = make_experts(kind, small_tokenizer, tmp_path / "target")
    # On a CPU latent attention and the usual one have no block size in common, so that target has
    # no draft model.
    answer = run_install(
        target, "ngram" if kind == "deepseek" else registry / "v000002", tmp_path / "spool"
    )
    (report,) = answer["reports"]
    assert (report["status"]["capture_off"], report["status"]["swap_off"]) == ("", "")
    assert len(report["status"]["target_checksum"]) == 64
    assert answer["recorded"] == [25]


def test_a_feature_of_the_plugin_that_fails_leaves_the_others(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_PLUGINS", "redraft")
    installed = []
    monkeypatch.setattr(hooks, "install", installed.append)
    broken = hooks.Feature(name="broken", asked="engine.wait:has_no_such_name")
    monkeypatch.setattr(hooks, "FEATURES", (broken, hooks.Feature(name="worker")))
    plugin.register()
    assert installed == ["worker"]
    assert "redraft: broken failed, serving continues without it" in caplog.text


def test_a_lookup_before_a_head_learns_of_another_one():
    swaps = []
    lookup = SimpleNamespace(swapped=lambda: swaps.append(1))
    worker = SimpleNamespace(model_runner=SimpleNamespace(redraft=RunnerState(lookup=lookup)))
    engine_worker.install(worker)  # the rest of this worker is missing, which raises nothing
    worker.redraft.name_draft("pushed-1")
    assert swaps == [1]


@pytest.mark.parametrize(
    ("origin", "config", "is_counted"),
    [
        (Origin("a"), CaptureConfig(), True),
        (None, CaptureConfig(), False),  # nobody has read its headers
        (Origin("a", opt_out=True), CaptureConfig(), False),
        (Origin("a"), CaptureConfig(tenants=("a",)), True),
        (Origin("b"), CaptureConfig(tenants=("a",)), False),
        (Origin("a"), CaptureConfig(fraction=0.1), True),
        (Origin("a"), CaptureConfig(fraction=0), False),
    ],
)
def test_live_counts_learn_from_no_request_that_opts_out(origin, config, is_counted):
    arguments = {"redraft": origin._asdict()} if origin else None
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args=arguments), lora_request=None
    )
    owner = find_owner(config, request)
    assert (owner is not None) == is_counted
    if owner is not None:
        assert owner.startswith(name_owner("a"))
        request.lora_request = SimpleNamespace(lora_name="an adapter is another target")
        assert find_owner(config, request) != owner


def test_tenants_salts_and_adapters_have_live_counts_of_their_own():
    owners = [
        find_owner(
            CaptureConfig(),
            SimpleNamespace(
                sampling_params=SimpleNamespace(
                    extra_args={"redraft": Origin(tenant, cache_salt=salt)._asdict()}
                ),
                lora_request=SimpleNamespace(lora_name=adapter) if adapter else None,
            ),
        )
        for tenant in ("", "a", "b")
        for salt in ("", "x", "a")
        for adapter in ("", "x")
    ]
    assert len(set(owners)) == 18
    assert len({len(owner) for owner in owners}) == 1
    assert sum(owner.startswith(name_owner("a")) for owner in owners) == 6


@pytest.mark.parametrize(
    ("written", "origin"),
    [
        (None, None),
        ({}, None),
        ({"redraft": "nonsense"}, None),
        ({"redraft": {}}, None),
        ({"redraft": {"tenant": "a", "domain": "", "opt_out": False, "more": 1}}, None),
        (
            {"redraft": Origin("a", "code", opt_out=True)._asdict()},
            Origin("a", "code", opt_out=True),
        ),
    ],
)
def test_only_what_the_front_end_wrote_is_an_origin(written, origin):
    assert read_origin_arguments(written) == origin
