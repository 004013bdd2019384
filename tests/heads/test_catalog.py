from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from make_heads import make_target
from safetensors.torch import save_file

from redraft.heads.catalog import (
    FAMILIES,
    detect_family,
    detect_family_by_tensors,
    find_family,
    find_method,
    list_methods,
)
from redraft.heads.draft import Draft
from redraft.heads.family import Family
from redraft.heads.target import Target

WITH_WEIGHTS = [family for family in FAMILIES if not family.is_lookup]


def family_name(family: Family) -> str:
    return family.name


@pytest.mark.parametrize("name", sorted({f.name for f in WITH_WEIGHTS if f.is_head} - {"mtp"}))
def test_a_family_makes_exports_and_recognises_its_heads(name: str, tmp_path: Path) -> None:
    model = make_target(num_hidden_layers=7)
    chosen = find_family(name)
    head = chosen.draft_class()(chosen.options_class()(), Target.from_model(model))
    assert isinstance(head, torch.nn.Module)
    assert head.is_autoregressive is False
    head.export(tmp_path)
    assert detect_family(tmp_path) is chosen
    assert (
        type(detect_family(tmp_path).load(tmp_path, lambda: Target.from_model(model)))
        is chosen.draft_class()
    )


@pytest.mark.parametrize("family", WITH_WEIGHTS, ids=family_name)
def test_a_family_has_every_member_of_the_protocol_with_the_same_parameters(family: Family) -> None:
    draft = family.draft_class()
    for name in ("draft_steps", "feature", "export", "load"):
        wanted = list(inspect.signature(getattr(Draft, name)).parameters)
        mine = dict(inspect.signature(getattr(draft, name)).parameters)
        shared = [
            "self" if parameter == "head" else parameter for parameter in mine
        ]  # a function that a class took over
        assert [parameter for parameter in shared if parameter in wanted] == wanted
        further = [
            value
            for parameter, value in zip(shared, mine.values(), strict=True)
            if parameter not in wanted
        ]
        assert all(value.default is not value.empty for value in further), (
            f"{name} needs nothing else"
        )
    assert {"is_autoregressive", "is_block", "max_tokens", "engine_output"} <= set(dir(draft))
    assert family.parity is None or {"v1", "v2"} & set(family.decoders)


def test_the_table_is_read_without_torch() -> None:
    code = "import sys, redraft.heads.catalog, redraft.heads.doctor.pair\n"
    code += "assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_methods_are_those_of_vllm_and_lead_back_to_their_family() -> None:
    assert list_methods() == ["dflash", "draft_model", "dspark", "eagle", "eagle3", "medusa", "mtp"]
    assert [getattr(find_method(method), "name", None) for method in ("eagle", "suffix")] == [
        "eagle1",
        "suffix",
    ]
    assert find_method(None) is None
    assert find_method("eagle3") is find_family("eagle3")
    assert find_method("eagle3", parallel_drafting=True) is find_family("peagle")
    # vLLM sets the flag itself.
    assert find_method("dflash", parallel_drafting=True) is find_family("dflash")
    assert find_method("dspark") is find_family("dspark")
    assert find_method("dflash2") is None


@pytest.mark.parametrize(
    ("config", "most"),
    [({}, 7), ({"sample_from_anchor": True}, 7), ({"sample_from_anchor": False}, 6)],
)
def test_the_anchor_of_a_dspark_block_proposes_unless_the_config_says_no(
    config: dict[str, bool], most: int
) -> None:
    assert find_family("dspark").max_tokens({"block_size": 7, **config}) == most
    assert find_family("dflash").max_tokens({"block_size": 7, **config}) == 6


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_layers_are_counted_alike_in_every_layout(name: str) -> None:
    section = {"target_layer_ids": [0, 1, 3]}
    family = find_family(name)
    for config in ({"dflash_config": section}, section):
        assert family.read_layers(config) == [1, 2, 4]
    assert family.read_layers({}) == []
    of_speculators = {
        "speculators_model_type": name,
        "aux_hidden_state_layer_ids": [1, 2, 4],
        "block_size": 7,
    }
    assert family.read_layers(of_speculators) == [1, 2, 4]
    assert family.max_tokens(of_speculators) == {"dflash": 6, "dspark": 7}[name]


def test_an_eagle_3_head_that_lists_no_layers_reads_as_many_as_vllm_by_default() -> None:
    eagle3, config = find_family("eagle3"), {"hidden_size": 8}
    assert eagle3.states_shape(config) == (3, 8)
    assert eagle3.states_shape(config | {"num_aux_hidden_states": 2}) == (2, 8)


def test_a_head_is_recognised_by_its_tensors_whatever_its_config_says(tmp_path: Path) -> None:
    save_file(
        {"midlayer.hidden_norm.weight": torch.zeros(1)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    for config in ({"architectures": ["LlamaForCausalLM"]}, {"redraft": {"family": "medusa"}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert detect_family(tmp_path).name == "eagle3"
    save_file({"a.weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"\ba\.weight$"):
        detect_family(tmp_path)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match=r"egale3.*eagle1, eagle3"):
        find_family("egale3")


@pytest.mark.parametrize("prefix", ["model", "module.draft_model"])
def test_a_prefix_before_all_names_is_named(prefix: str, tmp_path: Path) -> None:
    names = [f"{prefix}.midlayer.self_attn.q_proj.weight", f"{prefix}.fc.weight", "d2t"]
    with pytest.raises(ValueError, match=rf"begin with {prefix}\."):
        detect_family_by_tensors(names, tmp_path)
