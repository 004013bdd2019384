"""Constrained requests are recorded with the target's distributions before the constraint.

R = rows, K = kept top-k ids, V = vocabulary, T = tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_capture import make_request
from test_runners import run_capture
from transformers import AutoModelForCausalLM

from redraft.files.checkpoint import load_tokenizer
from redraft.online.engine.capture import Capture
from redraft.online.engine.config import CaptureConfig
from redraft.online.engine.feed import Feed
from redraft.online.engine.runner_v1 import install_capture
from redraft.online.records.record import Record

TARGET, DRAFT = "tests/assets/tiny-target", "tests/assets/tiny-eagle3"
NATURAL = (13, 70, 320)  # Tokens of the answer without constraints.
TOLERANCE = 1e-3
"""Of log-probabilities in float32, between the engine's kernels and transformers'."""


def make_feed(folder: Path) -> Feed:
    return Feed(Capture(CaptureConfig(spool=folder), "boot", "target", "v000001"), 100)


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ({"structured_outputs": object()}, "structured_output"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"bad_words": ["so"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_tokens"),
        ({"thinking_token_budget": 0}, "thinking_budget"),
    ],
)
def test_a_structured_or_otherwise_constrained_request_is_recorded_and_says_so(
    changes: dict[str, Any], constraint: str, tmp_path: Path
) -> None:
    feed = make_feed(tmp_path)
    info = feed.add(make_request(**changes))
    assert info is not None
    assert info.constraints == (constraint,)
    assert feed.capture.counts == {"captured_requests": 1}


def test_the_name_of_an_adapter_is_recorded(tmp_path: Path) -> None:
    feed, request = make_feed(tmp_path), make_request()
    request.lora_request = SimpleNamespace(lora_name="sql")
    info = feed.add(request)
    assert info is not None
    assert info.adapter == "sql"


def test_structured_logits_are_kept_from_before_the_mask_once(tmp_path: Path) -> None:
    feed = make_feed(tmp_path)
    feed.add(make_request("a"))
    logits_RV = torch.arange(6.0).view(2, 3)
    before_RV = logits_RV.clone()
    feed.keep_unmasked(logits_RV, ["a", "unknown"])
    logits_RV[:, 0] = -torch.inf
    assert torch.equal(feed.take_unmasked(logits_RV), before_RV)
    assert feed.take_unmasked(logits_RV) is logits_RV
    feed.keep_unmasked(logits_RV, ["unknown"])  # not recorded: no copy
    assert feed.take_unmasked(logits_RV) is logits_RV


def test_structured_logits_without_memory_for_a_copy_are_not_recorded(tmp_path: Path) -> None:
    class Full:
        def clone(self) -> None:
            raise MemoryError

    feed = make_feed(tmp_path)
    feed.add(make_request("a"))
    with pytest.raises(MemoryError):
        feed.keep_unmasked(Full(), ["a"])
    assert feed.take_unmasked(torch.zeros(1, 3)) is None


def test_structured_logits_of_a_v1_step_are_recorded_as_they_were_before_the_mask(
    tmp_path: Path,
) -> None:
    """From the first step of the request on, which is decided only then."""
    logits_RV = torch.randn(1, 8)
    before_RV = logits_RV.clone()
    runner = SimpleNamespace(
        execute_model_state=SimpleNamespace(logits=logits_RV),
        requests={"a": make_request(structured_outputs=object())},
        query_start_loc=SimpleNamespace(np=np.array([0, 3])),
        input_batch=SimpleNamespace(
            req_ids=["a"], num_reqs=1, num_computed_tokens_cpu=np.array([0])
        ),
        discard_request_mask=SimpleNamespace(np=np.array([False])),
        max_model_len=100,
        _sample=lambda *_: SimpleNamespace(sampled_token_ids=torch.tensor([[7]])),
        _get_spec_decode_draft_probs=None,
        _on_request_state_removed=None,
        propose_draft_token_ids=None,
    )

    def sample_tokens(grammar_output: Any) -> None:
        if grammar_output is not None:
            logits_RV[:, :7] = -torch.inf
        runner._sample(logits_RV, None)

    runner.sample_tokens = sample_tokens
    capture = Capture(CaptureConfig(spool=tmp_path), "boot", "target", "v000001")
    install_capture(runner, capture)
    runner.sample_tokens(SimpleNamespace(structured_output_request_ids=["a"]))
    runner.sample_tokens(None)
    masked, after = capture.queue.take()
    assert torch.equal(masked.logits_RV, before_RV)  # type: ignore[arg-type]
    assert torch.equal(after.logits_RV, logits_RV)  # type: ignore[arg-type]
    assert masked.parts[0].request.constraints == ("structured_output",)


# --- the engine


@pytest.fixture(scope="module", params=["v1", "v2"])
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Record], dict[str, list[int]], Any]:
    """(records, answers, tokenizer) of an engine, by the constraint of each request."""
    tokenizer = load_tokenizer(TARGET)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    prompt = tokenizer("<|user|>\ndef add(a, b):<|end|>\n<|assistant|>\n")["input_ids"]
    free = {"max_tokens": 16}
    asked = {
        "": free,
        "structured_output": free | {"structured_outputs": {"regex": "[xyz]{8}"}},
        "min_tokens": free | {"min_tokens": 12, "stop_token_ids": [*NATURAL, end]},
        "bad_words": free | {"bad_words": ["(", "return", ":", "def"]},
        "allowed_tokens": free | {"allowed_token_ids": [*range(30, 60)]},
    }
    answers, _, records = run_capture(
        request.param,
        tmp_path_factory.mktemp(request.param),
        target=TARGET,
        draft=DRAFT,
        method="eagle3",
        engine={"skip_tokenizer_init": False, "max_num_seqs": 8},
        rounds=[{"prompts": [prompt] * len(asked), "sampling": [*asked.values()]}],
    )
    by_place = {int(re.search(r"round0-(\d+)", r.request_id)[1]): r for r in records}  # type: ignore[index]
    names = [*asked]
    return (
        {names[place]: record for place, record in by_place.items()},
        {name: answer[0] for name, answer in zip(names, answers[0], strict=True)},
        tokenizer,
    )


@pytest.mark.slow
@pytest.mark.vllm
def test_structured_records_hold_the_targets_distribution_before_the_change(
    recorded: tuple[dict[str, Record], dict[str, list[int]], Any],
) -> None:
    records, answers, tokenizer = recorded
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for name, record in records.items():
        assert record.constraints == ((name,) if name else ())
        np.testing.assert_array_equal(record.output_ids, answers[name])
        text = torch.from_numpy(np.concatenate([record.context_ids, record.output_ids]).astype(int))
        with torch.no_grad():  # an unconstrained forward pass over the constrained text
            log_probs_TV = model(text[None]).logits[0].log_softmax(-1)
        rows = np.flatnonzero((record.branches == 0) & (record.positions <= len(text)))
        ours_RV = log_probs_TV[record.positions[rows] - 1]
        ours_RK = ours_RV.gather(1, torch.from_numpy(record.topk_ids[rows].astype(int)))
        np.testing.assert_allclose(ours_RK, record.topk_log_probs[rows], atol=TOLERANCE)
        assert (record.topk_ids[rows, 0] == ours_RV.argmax(-1).numpy()).all()
        # The tokens are those of the changed distribution.
        known = rows[record.positions[rows] < len(text)]
        written = text.numpy()[record.positions[known]]
        is_best = record.topk_ids[known, 0] == written
        assert is_best.all() if not name else not is_best.all()
    said = tokenizer.decode(answers["structured_output"], skip_special_tokens=True)
    assert re.match("[xyz]{8}", said)
    assert set(answers["allowed_tokens"]) <= {*range(30, 60)}
    assert records.keys() == answers.keys()


@pytest.mark.slow
@pytest.mark.vllm
def test_structured_records_count_the_acceptance_of_the_changed_distribution(
    recorded: tuple[dict[str, Record], dict[str, list[int]], Any],
) -> None:
    records, _, _ = recorded
    for record in records.values():
        text = np.concatenate([record.context_ids, record.output_ids])
        rows = np.flatnonzero(record.accepted & (record.positions < len(text)))
        np.testing.assert_array_equal(record.draft_ids[rows], text[record.positions[rows]])


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_an_adapters_record_holds_the_distribution_of_the_adapted_target(
    runner: str, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    make_adapter(model, tmp_path / "sql")
    prompt = load_tokenizer(TARGET)("def add(a, b):")["input_ids"]
    _, _, records = run_capture(
        runner,
        tmp_path / "spool",
        target=TARGET,
        draft=DRAFT,
        method="eagle3",
        engine={"enable_lora": True, "max_lora_rank": RANK} | ON_CPU,
        rounds=[{"prompts": [prompt] * 2, "sampling": [{}, {"adapter": str(tmp_path / "sql")}]}],
    )
    by_adapter = {record.adapter: record for record in records}
    assert by_adapter.keys() == {"", "sql"}
    apply_adapter(model, tmp_path / "sql")
    for adapter, record in by_adapter.items():
        text = torch.from_numpy(np.concatenate([record.context_ids, record.output_ids]).astype(int))
        with torch.no_grad():
            log_probs_TV = model(text[None]).logits[0].log_softmax(-1)
        rows = np.flatnonzero((record.branches == 0) & (record.positions <= len(text)))
        ours_RK = log_probs_TV[record.positions[rows] - 1].gather(
            1, torch.from_numpy(record.topk_ids[rows].astype(int))
        )
        gap = float(np.abs(ours_RK.numpy() - record.topk_log_probs[rows]).max())
        assert (gap < TOLERANCE) is (adapter == "sql"), gap


RANK = 8
ON_CPU = {"lora_target_modules": ["qkv_proj"], "max_loras": 2}
"""What adapters need on a CPU. Without the first setting, vLLM 0.32 fails in the draft's shared
embeddings (V1) or in the logits of the draft tokens (V2). Requests without an adapter get the last
slot's adapter if they are in a batch with one, so the last slot is left empty.
"""


def make_adapter(model: Any, folder: Path) -> None:
    """A LoRA adapter of random weights, as PEFT writes it."""
    torch.manual_seed(1)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            out, size = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, size) / size**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, RANK) / 4
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
        "base_model_name_or_path": TARGET,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def apply_adapter(model: Any, folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            a, b = (tensors[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
            module.weight.data += b @ a
