from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_families import make_variant
from make_heads import (
    HIDDEN,
    make_batch,
    make_ids,
    make_random,
    make_signal,
    make_target,
    signal_of_prefix,
)
from make_native import make_native_target
from reference_decoder import KeyCache
from safetensors.torch import load_file
from torch.nn.functional import embedding
from transformers import AutoConfig, AutoModelForCausalLM

from redraft.files.artifact import MANIFEST
from redraft.files.checkpoint import load_causal_lm
from redraft.files.folder import tensor_files
from redraft.files.tensors import read_tensors
from redraft.heads.families.mtp import Config, Mtp
from redraft.heads.families.mtp_folder import as_mimo, stitch
from redraft.heads.families.mtp_layouts import detect_layout, join_experts, split_experts
from redraft.heads.target import Target

LAYOUTS = ["mimo", "qwen3_next", "qwen3_5", "deepseek"]


def make_head(layout: str, folder: Path, **options: Any) -> tuple[Mtp, Any]:
    return make_variant("mtp", layout, folder, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_step_computes_its_layouts_formula(layout: str, tmp_path: Path) -> None:
    head, model = make_head(layout, tmp_path)
    ids = make_ids(6)
    batch = make_batch([[ids]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    before, after = (
        make_signal(model, batch, (model.config.num_hidden_layers,)).aux_BTLD[0, :, 0],
        None,
    )
    after = signal.distribution.hidden_BTD[0]
    embed = embedding(torch.tensor(ids[1:]), model.get_input_embeddings().weight)
    if layout in ("mimo", "deepseek"):
        embed = torch.cat([torch.zeros(1, HIDDEN), embed[1:]])
    feature = (before if layout == "mimo" else after)[:-1]
    e, h = head.embed_norm(embed), head.hidden_norm(feature)
    x = head.combine(torch.cat([h, e] if layout == "mimo" else [e, h], dim=-1))[None]
    positions = torch.arange(5)[None]
    cos_sin = head._rotary(positions, x)
    # the layer by transformers' own attention
    head.block.self_attn.config._attn_implementation = "eager"
    mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    wanted = head.final_norm(head.block(x, position_embeddings=cos_sin, attention_mask=mask))
    head.block.self_attn.config._attn_implementation = "redraft_memory"
    hidden, fed_back = head.step(batch.input_ids_BT[:, 1:], feature[None], positions, KeyCache())
    torch.testing.assert_close(hidden, wanted, atol=1e-5, rtol=1e-4)
    assert fed_back is hidden


def test_a_mimo_target_computes_what_its_llama_does(tmp_path: Path) -> None:
    mimo, llama = make_native_target("mimo", tmp_path), make_target()
    ids = torch.tensor([make_ids(20)])
    assert torch.equal(mimo(ids).logits, llama(ids).logits)
    assert mimo.config.num_nextn_predict_layers == 1


@pytest.mark.parametrize("overrides", [{"attention_bias": True}, {"head_dim": 16}])
def test_a_llama_that_mimo_cannot_equal_is_refused(
    overrides: dict[str, Any], tmp_path: Path
) -> None:
    make_target(**overrides).save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="MiMo"):
        as_mimo(tmp_path / "llama", tmp_path / "mimo")


def test_a_layer_stitched_in_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    head, model = make_head("mimo", tmp_path)
    stitch(tmp_path / "mimo", head.checkpoint_tensors(), tmp_path / "first", {})
    tuned = make_random(Mtp.load(tmp_path / "first", Target.from_model(model)), seed=9)
    # one shard with tensors of both kinds, as native targets ship them
    mixed = read_tensors(tmp_path / "first", tensor_files(tmp_path / "first"))
    write_one_shard(tmp_path / "first", tmp_path / "native", mixed)
    stitch(tmp_path / "native", tuned.checkpoint_tensors(), tmp_path / "second", {})
    files = sorted((tmp_path / "second").glob("*.safetensors"))
    everything = [name for file in files for name in load_file(file)]
    assert sorted(everything) == sorted(mixed)  # each tensor once: engines read all files
    again = Mtp.load(tmp_path / "second", Target.from_model(model))
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in tuned.state_dict().items())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "second").eval()
    ids = torch.tensor([make_ids(20)])
    assert torch.equal(reloaded(ids).logits, model(ids).logits)


def test_the_bias_that_chooses_experts_is_not_rounded(tmp_path: Path) -> None:
    """Around 5, the numbers of bfloat16 are 1/32 apart."""
    head, model = make_head("deepseek", tmp_path)
    bias_E = head.block.mlp.gate.e_score_correction_bias
    bias_E.copy_(5 + torch.arange(len(bias_E)) / 1000)
    name = f"model.layers.{model.config.num_hidden_layers}.mlp.gate.e_score_correction_bias"
    head.export(tmp_path / "alone", torch.bfloat16)
    stitched = head.checkpoint_tensors(dtype=torch.bfloat16)
    for tensors in (load_file(tmp_path / "alone/model.safetensors"), stitched):
        assert torch.equal(tensors[name], bias_E)
        assert all(
            tensor.dtype == torch.bfloat16 for other, tensor in tensors.items() if other != name
        )
    served = copy.deepcopy(head).to(torch.bfloat16)
    assert torch.equal(served.block.mlp.gate.e_score_correction_bias, bias_E)
    assert served.combine.weight.dtype == torch.bfloat16


def write_one_shard(like: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((like / "config.json").read_text())
    (folder / MANIFEST).write_text("{}")


def test_untouched_shards_are_linked_and_the_targets_manifest_is_not(tmp_path: Path) -> None:
    head, _ = make_head("mimo", tmp_path)
    (tmp_path / "mimo" / MANIFEST).write_text("{}")
    stitch(tmp_path / "mimo", head.checkpoint_tensors(), tmp_path / "out", {"note": 1})
    shard = tmp_path / "mimo" / "model-target.safetensors"
    assert (tmp_path / "out" / "model-target.safetensors").samefile(shard)
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == 1


def test_stitching_over_the_target_is_refused(tmp_path: Path) -> None:
    head, _ = make_head("mimo", tmp_path)
    with pytest.raises(FileExistsError, match=r"mimo\b.*a different output folder"):
        stitch(tmp_path / "mimo", head.checkpoint_tensors(), tmp_path / "mimo", {})


def test_a_target_without_mtp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MTP"):
        Mtp(Config(), Target.from_model(make_target()))
    model = make_native_target("mimo", tmp_path)
    with pytest.raises(ValueError, match="MTP"):
        Mtp.load(tmp_path / "mimo", Target.from_model(model))


def test_begun_from_the_last_layer_the_head_first_passes_the_feature_on(tmp_path: Path) -> None:
    model = make_native_target("mimo", tmp_path)
    head = Mtp(Config(), Target.from_model(model))
    head.init_from_layers([model.model.layers[-1]], model.model.norm)
    with torch.no_grad():
        head.combine.weight[:, HIDDEN:].zero_()
    prefix = make_ids(6)
    signal = signal_of_prefix(head, model, prefix)
    feature_BTD = signal.aux_BTLD[:, :, 0]
    torch.testing.assert_close(
        head.combine(torch.cat([feature_BTD, feature_BTD], -1)), feature_BTD, atol=1e-6, rtol=1e-5
    )
    last = model.model.layers[-1].state_dict()
    assert all(torch.equal(t, last[name]) for name, t in head.block.state_dict().items())


def test_experts_split_and_join_back() -> None:
    stacked = {
        "mlp.experts.gate_up_proj": torch.randn(3, 8, 5),
        "mlp.experts.down_proj": torch.randn(3, 5, 4),
    }
    split = split_experts(stacked)
    assert split["mlp.experts.2.up_proj.weight"].equal(stacked["mlp.experts.gate_up_proj"][2, 4:])
    joined = join_experts(split)
    assert joined.keys() == stacked.keys()
    assert all(torch.equal(joined[name], stacked[name]) for name in stacked)


def test_a_mimo_opens_as_it_was_released_without_its_own_code(tmp_path: Path) -> None:
    expected = make_native_target("mimo", tmp_path)
    path = tmp_path / "mimo/config.json"
    code = {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    }
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"model_type": "mimo", "auto_map": code})
    )
    model = load_causal_lm(tmp_path / "mimo", torch.float32)
    ids_BT = torch.arange(3, 20)[None]
    assert torch.equal(model(ids_BT).logits, expected.float()(ids_BT).logits)
    assert detect_layout(AutoConfig.from_pretrained(tmp_path / "mimo")) is detect_layout(
        expected.config
    )
