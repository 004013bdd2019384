"""Drafts by their names: what is parsed, recognised, and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from redraft.eval.forecast.draft_source import DraftSource, Lookups
from redraft.heads.families.retrieval import Config as Counts
from redraft.heads.families.retrieval import Retrieval

EAGLE3 = "midlayer.hidden_norm.weight"


def write_draft(folder: Path, *tensors: str, **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: torch.zeros(1) for name in tensors}, folder / "model.safetensors", {"format": "pt"}
    )
    return str(folder)


def write_answers(folder: Path) -> str:
    folder.mkdir()
    Retrieval(Counts(max_run=1), {(5,): (6, 0.9)}, [0.0, 0.1]).write(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ngram", DraftSource(source="ngram")),
        ("runs/ngram+a", DraftSource(source="runs/ngram+a")),
        ("ngram+runs/a/draft", DraftSource(source="runs/a/draft", lookup="ngram")),
        ("ngram+runs/a:b:2", DraftSource(source="runs/a:b", lookup="ngram", head_tokens=2)),
        ("live", DraftSource(source="live")),
        ("live+runs/a:2", DraftSource(source="runs/a", lookup="live", head_tokens=2)),
        ("ngram+mtp:0", DraftSource(source="mtp", lookup="ngram", head_tokens=0)),
        ("ngram+runs/lr=1/draft", DraftSource(source="runs/lr=1/draft", lookup="ngram")),
        ("runs/lr=1/draft", DraftSource(source="runs/lr=1/draft")),
    ],
)
def test_a_name_is_read_back(text: str, expected: DraftSource) -> None:
    assert DraftSource.parse(text) == expected
    assert str(expected) == text


def test_a_folder_of_counted_answers_is_a_lookup_and_a_head_is_none(tmp_path: Path) -> None:
    head, answers = write_draft(tmp_path / "head", EAGLE3), write_answers(tmp_path / "a+b")
    mixed = DraftSource.parse(f"{answers}+{head}:2")
    assert (mixed.lookup, mixed.source, mixed.head_tokens) == (answers, head, 2)
    assert mixed.has_answers
    assert not mixed.is_lookup
    assert mixed.family.name == "eagle3"
    assert DraftSource.parse(f"{head}+{head}:2").lookup is None
    assert DraftSource.parse(answers).is_lookup
    live = DraftSource.parse("live")
    assert (live.is_lookup, live.has_answers, live.folder) == (True, True, None)
    assert DraftSource.parse(f"live+{head}").has_answers


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/draft", "a"),
        ("x/a", "a"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("ngram+a/draft:2", "ngram+a:2"),
        ("v13=a/draft", "v13"),
        ("v13=ngram+a/draft:2", "v13"),
    ],
)
def test_a_draft_has_the_name_of_its_run_unless_it_is_given_one(text: str, name: str) -> None:
    assert DraftSource.parse(text).name == name
    assert str(DraftSource.parse(text)) == text.removeprefix("v13=")


def test_a_folder_with_an_equals_sign_is_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_draft(tmp_path / "lr=1", EAGLE3)
    assert DraftSource.parse("lr=1") == DraftSource(source="lr=1")


@pytest.mark.parametrize(
    "config", [{}, {"architectures": ["LlamaForCausalLM"]}, {"redraft": {"family": "medusa"}}]
)
def test_a_draft_is_served_by_what_its_tensors_say(config: dict[str, Any], tmp_path: Path) -> None:
    draft = DraftSource.parse(write_draft(tmp_path / "draft", EAGLE3, **config))
    assert draft.speculative() == {"method": "eagle3", "model": str(tmp_path / "draft")}
    sampled = {**draft.speculative(), "draft_sample_method": "probabilistic"}
    assert draft.speculative("probabilistic") == sampled
    assert draft.speculative(method="eagle")["method"] == "eagle"


def test_a_mix_is_served_as_its_head_with_the_lookup_before_it(tmp_path: Path) -> None:
    ngram = DraftSource.parse("ngram").speculative()
    assert ngram == {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert DraftSource.parse("ngram").speculative("probabilistic") == ngram, (
        "what is looked up is never sampled"
    )
    mixed = {**ngram, "method": "mtp", "disable_padded_drafter_batch": True}
    assert DraftSource.parse("ngram+mtp").speculative() == mixed
    assert DraftSource.parse("ngram+mtp:2").speculative() == {**mixed, "head_tokens": 2}
    limited = DraftSource.parse("ngram+mtp").speculative(lookups=Lookups(head_requests=5))
    assert limited == {**mixed, "head_requests": 5}
    model = write_draft(tmp_path / "model", "model.layers.0.mlp.weight")
    with pytest.raises(ValueError, match="MTP, EAGLE-3, EAGLE-1"):
        DraftSource.parse(f"ngram+{model}").speculative()


def test_a_draft_without_a_module_is_served_if_vllm_serves_it(tmp_path: Path) -> None:
    latent = DraftSource.parse(
        write_draft(tmp_path / "latent", EAGLE3, "midlayer.self_attn.kv_a_proj_with_mqa.weight")
    )
    assert latent.speculative()["method"] == "eagle3"
    with pytest.raises(ValueError, match=rf"{tmp_path}/latent .*EAGLE-3"):
        _ = latent.family
    several = DraftSource.parse(
        write_draft(tmp_path / "several", EAGLE3, "layers.1.input_layernorm.weight")
    )
    assert (several.speculative()["method"], several.family.name) == ("eagle3", "eagle3")
    hydra = DraftSource.parse(write_draft(tmp_path / "hydra", "hydra_head.0.weight"))
    with pytest.raises(ValueError, match="Hydra"):
        hydra.speculative()


def test_a_model_of_unknown_tensors_is_a_draft_model_only_if_it_is_a_causal_lm(
    tmp_path: Path,
) -> None:
    gpt2 = write_draft(
        tmp_path / "gpt2", "transformer.h.0.attn.weight", architectures=["GPT2LMHeadModel"]
    )
    assert DraftSource.parse(gpt2).speculative()["method"] == "draft_model"
    unknown = write_draft(tmp_path / "unknown", "a.weight", architectures=["MyDraft"])
    with pytest.raises(ValueError, match=r"\ba\.weight"):
        DraftSource.parse(unknown).speculative()


@pytest.mark.parametrize(
    ("config", "tensor", "method"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, EAGLE3, "eagle3"),
        ({"model_type": "medusa"}, "a.weight", "medusa"),
        ({"architectures": ["LlamaForCausalLM"]}, "model.layers.0.mlp.weight", "draft_model"),
    ],
)
def test_old_weights_are_served_by_their_tensors_and_not_forecast(
    config: dict[str, Any], tensor: str, method: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({tensor: torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    draft = DraftSource.parse(str(tmp_path))
    assert draft.speculative()["method"] == method
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin"):
        _ = draft.family


def test_an_mtp_layer_is_served_from_a_folder_of_its_own_or_from_the_target(tmp_path: Path) -> None:
    layer = DraftSource.parse(write_draft(tmp_path / "layer", "mtp.layers.0.mlp.weight"))
    assert layer.speculative() == {"method": "mtp", "model": str(tmp_path / "layer")}
    whole = write_draft(tmp_path / "whole", "mtp.layers.0.mlp.weight", "model.layers.0.mlp.weight")
    with pytest.raises(ValueError, match="--draft mtp"):
        DraftSource.parse(whole).speculative()


def test_a_link_is_followed_once(tmp_path: Path) -> None:
    write_draft(tmp_path / "v000003", EAGLE3)
    (tmp_path / "current").symlink_to("v000003")
    assert DraftSource.parse(str(tmp_path / "current")).speculative()["model"] == str(
        tmp_path / "v000003"
    )


def test_a_draft_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        DraftSource.parse("/nowhere").speculative()
    with pytest.raises(ValueError, match=r"a\.gguf"):
        DraftSource.parse("a.gguf").speculative()
    monkeypatch.setattr("redraft.files.folder._download", lambda name, *patterns: "no network")
    with pytest.raises(FileNotFoundError, match="owner/name"):
        DraftSource.parse("owner/name").speculative()
