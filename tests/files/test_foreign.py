"""Drafts of other trainers.

Those that redraft has no module for are told what they are, and the others open.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_heads import make_random, make_target
from safetensors.torch import load_file, save_file

from redraft.files.foreign import FOREIGN, find_foreign
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import detect_family_by_tensors
from redraft.heads.doctor.checks import static_findings
from redraft.heads.doctor.pair import Pair
from redraft.heads.families import eagle3, medusa
from redraft.heads.target import Target

EAGLE3_NAMES = (
    "midlayer.hidden_norm.weight",
    "midlayer.self_attn.q_proj.weight",
    "fc.weight",
    "norm.weight",
    "d2t",
)

# (config.json, names of tensors, what is said), as the trainers write them
KNOWN: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "speculators XPress": (
        {"architectures": ["Qwen3XPressModel"], "speculators_model_type": "xpress"},
        ("fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"),
        "an XPress draft (DFlash with a refiner, for vLLM 0.33 and later): vLLM serves it with "
        '"method": "dflash"',
    ),
    "LiLiCorr": (
        {"architectures": ["LiLiCorrDraftModel"]},
        ("fc.weight", "hidden_norm.weight"),
        "a LiLiCorr draft",
    ),
    "EAGLE-4": (
        {"architectures": ["LlamaForCausalLMEagle4"]},
        EAGLE3_NAMES,
        "an EAGLE-4 draft (a tree draft, for its own vLLM plugin): vLLM has no method to serve it",
    ),
    "z-lab, quantized": (
        {"architectures": ["DFlashDraftModel"], "quantization_config": {"quant_method": "fp8"}},
        ("fc.weight", "hidden_norm.weight"),
        "a quantized head (fp8), which vLLM serves; give redraft the unquantized weights",
    ),
    "MiMo": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"use_swa": True}},
        ("hidden_norm.weight", "layers.0.self_attn.attention_sink_bias"),
        'a DFlash draft with attention sinks: vLLM serves it with "method": "dflash"',
    ),
    "MiMo, scaled values": (
        {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {"attention_value_scale": 0.612},
        },
        ("fc.weight", "hidden_norm.weight"),
        "a DFlash draft with scaled attention values (attention_value_scale): vLLM serves it with "
        '"method": "dflash"',
    ),
    "Alpamayo": (
        {"architectures": ["DFlashDraftModel"]},
        ("fc.weight", "hidden_norm.weight", "mask_embedding.pt"),
        "a DFlash draft with its own embedding of the mask token (mask_embedding.pt)",
    ),
    "Laguna": (
        {"architectures": ["LagunaForCausalLM"]},
        ("fc.weight", "hidden_norm.weight", "aux_hidden_norms.0.weight"),
        "a DFlash draft with a norm for each target layer (Laguna)",
    ),
    "Muse Glimmer": (
        {"architectures": ["MuseGlimmerAssistantModel"]},
        ("encoder.fc.weight", "layers.0.input_layernorm.weight"),
        "a DFlash draft of Muse Glimmer",
    ),
    "Gemma 4": (
        {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"},
        ("model.layers.0.self_attn.q_proj.weight", "pre_projection.weight"),
        'a Gemma 4 assistant (a draft that reads the target\'s KV cache): vLLM serves it with "method": '
        '"mtp"',
    ),
    "ModelOpt DSpark": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}},
        ("fc.weight", "hidden_norm.weight", "markov_w1.weight"),
        "a DSpark draft in ModelOpt's layout: vLLM has no method to serve it",
    ),
    "ModelOpt Domino": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
        ("fc.weight", "hidden_norm.weight"),
        "a Domino draft (DFlash with a recurrent layer): vLLM has no method to serve it",
    ),
    "speculators DFlash, narrow": (
        {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "target_hidden_size": 8192,
            "transformer_layer_config": {"hidden_size": 4096},
        },
        ("fc.weight", "hidden_norm.weight"),
        "a DFlash draft narrower or wider than its target",
    ),
    "z-lab DFlash2": (
        {"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_rank": 256}},
        ("fc.weight", "layers.0.input_layernorm.weight"),
        "a DFlash2 draft",
    ),
    "speculators DSpark of Qwen3-Omni": (
        {"architectures": ["Qwen3OmniDSparkModel"], "speculators_model_type": "dspark"},
        ("fc.weight", "markov_head.markov_w1.weight"),
        "a DSpark draft of layers other than Qwen3's",
    ),
    "speculators, recurrent DSpark": (
        {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "markov_head_type": "rnn",
        },
        ("fc.weight", "markov_head.markov_w1.weight"),
        "a DSpark draft with a Markov head of a type other than vanilla: vLLM has no method to serve it",
    ),
    "DSpark of Gemma 4": (
        {"architectures": ["Gemma4DSparkModel"], "markov_rank": 256},
        ("fc.weight", "markov_head.markov_w1.weight"),
        "a DSpark draft of layers other than Qwen3's",
    ),
    "DSpark of DeepSeek-V4": (
        {"architectures": ["DSparkDraftModel"], "model_type": "deepseek_v4"},
        ("mtp.0.markov_head.markov_w1.weight",),
        "a DSpark draft of layers other than Qwen3's",
    ),
    "SpecForge, gated DSpark": (
        {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "gated"},
        ("fc.weight", "markov_head.markov_w1.weight"),
        "a DSpark draft with a Markov head of a type other than vanilla: vLLM has no method to serve it",
    ),
    "SpecForge Domino": (
        {"architectures": ["DominoDraftModel"]},
        ("fc.weight",),
        "a Domino draft (DFlash with a recurrent layer): vLLM has no method to serve it",
    ),
    "ModelOpt, Kimi K2": (
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        ("layers.0.hidden_norm.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight"),
        "an EAGLE-3 head with latent attention (MLA)",
    ),
    "SpecForge, mixture of experts": (
        {"architectures": ["LlamaForCausalLMEagle3"]},
        ("midlayer.hidden_norm.weight", "midlayer.mlp.experts.0.up_proj.weight"),
        "an EAGLE-3 head with a mixture of experts",
    ),
    "ModelOpt, last hidden state": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"use_aux_hidden_state": False},
        },
        ("layers.0.self_attn.q_proj.weight", "norm.weight"),
        "an EAGLE-3 head that uses only the target's last hidden state",
    ),
    "speculators, narrow": (
        {
            "speculators_model_type": "eagle3",
            "target_hidden_size": 8192,
            "transformer_layer_config": {"hidden_size": 4096},
        },
        ("layers.0.hidden_norm.weight",),
        "an EAGLE-3 head narrower or wider than its target",
    ),
    "MLPSpeculator": (
        {"architectures": ["MLPSpeculatorPreTrainedModel"]},
        ("speculator.emb.0.weight",),
        "an MLPSpeculator: vLLM has no method to serve it",
    ),
    "Hydra": ({"architectures": ["HydraModel"]}, ("hydra_head.0.weight",), "a Hydra head"),
    "ModelOpt, quantized": (
        {"architectures": ["LlamaForCausalLMEagle3"], "quantization_config": {"quant_algo": "FP8"}},
        EAGLE3_NAMES,
        "a quantized head (FP8), which vLLM serves; give redraft the unquantized weights",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_draft_without_a_module_here_is_told_what_it_is(name: str, tmp_path: Path) -> None:
    config, names, said = KNOWN[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    if "mask_embedding.pt" in names:
        (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match=str(tmp_path)) as refused:
        detect_family_by_tensors([n for n in names if not n.endswith(".pt")], tmp_path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_head_that_only_modelopts_own_file_calls_quantized_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"]}))
    names = ("fc.weight", "hidden_norm.weight")
    assert detect_family_by_tensors(names, tmp_path).name == "dflash"
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(ValueError, match=r"quantized head \(NVFP4\)"):
        detect_family_by_tensors(names, tmp_path)


def test_every_row_of_the_table_has_an_example() -> None:
    said = [find_foreign(config, names) or "" for config, names, _ in KNOWN.values()]
    assert [
        kind.name for kind in FOREIGN if not any(text.startswith(kind.name) for text in said)
    ] == []


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},  # SpecForge
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"use_aux_hidden_state": True},
        },  # ModelOpt
        {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {"hidden_size": 64},
            "target_hidden_size": 64,
        },
    ],
)
def test_eagle3_heads_of_other_trainers_are_ours_to_open(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_foreign(config, EAGLE3_NAMES) is None
    assert detect_family_by_tensors(EAGLE3_NAMES, tmp_path).name == "eagle3"


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "DSparkDraftModel"])
def test_dspark_heads_of_other_trainers_are_ours_to_open(architecture: str, tmp_path: Path) -> None:
    config = {"architectures": [architecture], "model_type": "qwen3", "markov_head_type": "vanilla"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = ("fc.weight", "hidden_norm.weight", "markov_head.markov_w1.weight")
    assert detect_family_by_tensors(names, tmp_path).name == "dspark"


@pytest.mark.parametrize("end", ["DraftModel", "Speculator"])
@pytest.mark.parametrize(("name", "start"), [("dflash", "DFlash"), ("dspark", "DSpark")])
def test_blocks_of_speculators_without_windows_are_ours_to_open(
    name: str, start: str, end: str, tmp_path: Path
) -> None:
    config = {
        "architectures": [start + end],
        "speculators_model_type": name,
        "transformer_layer_config": {"layer_types": ["full_attention"], "model_type": "qwen3"},
        "sliding_window_non_causal": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [
        "fc.weight",
        "hidden_norm.weight",
        *(["markov_head.markov_w1.weight"] if name == "dspark" else []),
    ]
    assert detect_family_by_tensors(names, tmp_path).name == name


def test_a_medusa_checkpoint_in_the_layout_of_its_authors_opens(tmp_path: Path) -> None:
    model = make_target()
    model.save_pretrained(tmp_path / "target")
    head = make_random(medusa.Medusa(medusa.Config(num_heads=2), Target.from_model(model)))
    head.export(tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(path).items():
        kind, index, *rest = name.split(".")
        part = f"0.linear.{rest[-1]}" if kind == "blocks" else "1.weight"
        renamed[f"medusa_heads.{index}.{part}"] = tensor
    save_file(renamed, path, {"format": "pt"})
    config = {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
        "hidden_size": 32,
    }
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    pair = Pair.read(TargetFolder.open(tmp_path / "target"), tmp_path / "draft")
    assert static_findings(pair, method=None, num_speculative_tokens=2) == []
    loaded = medusa.Medusa.load(tmp_path / "draft", Target.from_model(model))
    assert all(
        torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in head.state_dict().items()
    )


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
@pytest.mark.parametrize(
    "options",
    [{"qk_norm": True}, {"attention_bias": True}, {"qk_norm": True, "attention_bias": True}],
)
def test_a_head_with_norms_or_biases_of_attention_is_written_and_read_back(
    options: dict[str, bool], layout: Any, tmp_path: Path
) -> None:
    from dataclasses import replace

    from redraft.heads.shape import LlamaShape

    model = make_target()
    model.save_pretrained(tmp_path / "target")
    target = Target.from_model(model)
    shape = replace(LlamaShape.from_config(model.config), **options)
    chosen = eagle3.Config(aux_layer_ids=(1, 2, 4), norm_before_fc=True)
    head = make_random(eagle3.Eagle3(chosen, target, torch.arange(3, 90, 2), shape))
    head.export(tmp_path / "draft", layout=layout)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    inner = config.get("transformer_layer_config", config)
    assert inner["model_type"] == ("qwen3" if options.get("qk_norm") else "llama")
    loaded = eagle3.Eagle3.load(tmp_path / "draft", target)
    assert loaded.shape == shape
    assert all(
        torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in head.state_dict().items()
    )
    pair = Pair.read(TargetFolder.open(tmp_path / "target"), tmp_path / "draft")
    assert static_findings(pair, method=None, num_speculative_tokens=3) == []
