from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_families import DRAFT_IDS, make_variant
from make_heads import (
    HIDDEN,
    VOCAB,
    make_batch,
    make_ids,
    make_signal,
    make_target,
    signal_of_prefix,
)
from reference_decoder import propose
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from redraft.files.foreign import nested_layers
from redraft.heads.catalog import find_family
from redraft.heads.doctor.described import describe_draft
from redraft.heads.families.eagle3 import Config, Eagle3, has_qk_norm
from redraft.heads.shape import llama_rope
from redraft.heads.target import Target


def make_head(variant: str = "plain", **options: Any) -> tuple[Eagle3, Any]:
    return make_variant("eagle3", variant, **options)


def test_the_number_of_steps_can_be_chosen_for_evaluation() -> None:
    head, model = make_head(num_steps=2)
    batch = make_batch([[make_ids(9)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    assert [step.shift for step in head.draft_steps(batch, signal)] == [1, 2]
    assert [step.shift for step in head.draft_steps(batch, signal, num_steps=4)] == [1, 2, 3, 4]


def test_steps_that_are_computed_again_have_the_same_gradients() -> None:
    head, model = make_head(num_steps=3)
    batch = make_batch([[make_ids(9), make_ids(5)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    results = []
    for recompute in (False, True):
        head.recomputes = recompute
        head.zero_grad()
        hidden = [step.hidden_BTD for step in head.draft_steps(batch, signal)]
        torch.stack(hidden).square().sum().backward()
        results.append([*hidden, *(p.grad for p in head.parameters() if p.grad is not None)])
    assert len(results[0]) > 3 + 5
    for kept, again in zip(*results, strict=True):
        torch.testing.assert_close(kept, again)


def test_steps_shift_mask_and_weigh_as_written_by_hand() -> None:
    head, model = make_head(num_steps=3, step_decay=0.5)
    batch = make_batch([[make_ids(7), make_ids(4)]], loss_from=3)
    steps = head.draft_steps(batch, make_signal(model, batch, head.aux_layer_ids))
    # labels are tokens 3..6 of the first document and token 3 of the second, which lies at 10; row
    # = label - 1 - shift
    assert [step.mask_BT[0].nonzero().flatten().tolist() for step in steps] == [
        [1, 2, 3, 4, 8],
        [0, 1, 2, 3, 7],
        [0, 1, 2],
    ]
    assert [step.weight for step in steps] == [1.0, 0.5, 0.25]


def test_a_reduced_vocabulary_is_written_as_offsets_and_mask(tmp_path: Path) -> None:
    head, _ = make_head("reduced vocabulary")
    head.export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["d2t"].tolist() == [3 + 3 * i for i in range(len(DRAFT_IDS))]
    assert tensors["t2d"].nonzero().flatten().tolist() == DRAFT_IDS.tolist()
    assert tensors["lm_head.weight"].shape == (len(DRAFT_IDS), HIDDEN)


def test_a_draft_never_proposes_an_id_outside_its_vocabulary() -> None:
    head, model = make_head("reduced vocabulary")
    prefix = make_ids(8)
    for token, q_V in propose(
        head, prefix, signal_of_prefix(head, model, prefix), 5, temperature=1.0
    ):
        assert token in DRAFT_IDS.tolist()
        assert q_V.nonzero().flatten().tolist() == DRAFT_IDS.tolist()


def test_the_shared_head_is_not_exported_and_an_own_one_is(tmp_path: Path) -> None:
    make_head("the target's head")[0].export(tmp_path / "shared")
    make_head("plain")[0].export(tmp_path / "own")
    assert "lm_head.weight" not in load_file(tmp_path / "shared" / "model.safetensors")
    assert "lm_head.weight" in load_file(tmp_path / "own" / "model.safetensors")


def test_engines_find_their_keys_where_they_look(tmp_path: Path) -> None:
    head, _ = make_head("four layers from the embeddings on")
    head.export(tmp_path / "vllm")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3, 4]
    assert config["num_aux_hidden_states"] == 4
    head.export(
        tmp_path / "speculators",
        layout="speculators",
        target_name="org/target",
        num_speculative_tokens=5,
    )
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3, 4]
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert config["norm_before_residual"] is False
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"


def test_a_longrope_for_a_part_of_each_head_is_left_to_the_target() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * 6,
    }
    assert llama_rope(rope) == {"rope_type": "default", "rope_theta": 1e4}


def test_a_targets_partial_rotary_is_not_the_heads(tmp_path: Path) -> None:
    model = make_target()
    model.config.rope_parameters = {**model.config.rope_parameters, "partial_rotary_factor": 0.25}
    Eagle3(Config(aux_layer_ids=(1, 2, 4)), Target.from_model(model)).export(tmp_path)
    assert (
        "partial_rotary_factor"
        not in json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    )


def test_the_head_of_others_is_what_its_own_config_says(tmp_path: Path) -> None:
    head, model = make_head()
    head.export(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in ("redraft", "rope_parameters", "rope_theta", "eagle_aux_hidden_state_layer_ids"):
        config.pop(name)
    nested = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.aux_layer_ids]}
    path.write_text(
        json.dumps(config | {"rms_norm_eps": 1e-2, "rope_theta": 4321.0, "eagle_config": nested})
    )
    theirs = Eagle3.load(tmp_path, Target.from_model(model))
    theirs.export(tmp_path / "trained-further")
    for loaded in (theirs, Eagle3.load(tmp_path / "trained-further", Target.from_model(model))):
        assert (loaded.shape.rms_norm_eps, loaded.shape.rope_parameters["rope_theta"]) == (
            1e-2,
            4321.0,
        )
        assert loaded.aux_layer_ids == head.aux_layer_ids


def test_begun_from_the_last_layer_the_head_holds_that_layer() -> None:
    model = make_target()
    head = Eagle3(Config(aux_layer_ids=(1, 2, 4)), Target.from_model(model))
    random_half = head.midlayer.self_attn.q_proj.weight[:, :HIDDEN].clone()
    last = model.model.layers[-1]
    head.init_from_layers([last], model.model.norm)
    torch.testing.assert_close(head.midlayer.mlp.down_proj.weight, last.mlp.down_proj.weight)
    torch.testing.assert_close(
        head.midlayer.self_attn.q_proj.weight[:, HIDDEN:], last.self_attn.q_proj.weight
    )
    torch.testing.assert_close(head.midlayer.self_attn.q_proj.weight[:, :HIDDEN], random_half)
    batch = make_batch([[make_ids(6)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    torch.testing.assert_close(head.feature(signal), signal.aux_BTLD[:, :, -1])


def test_begun_from_a_layer_with_a_narrower_mlp_the_head_keeps_its_own_mlp() -> None:
    model = make_target()
    config = Config(aux_layer_ids=(1, 2, 4), intermediate_size=2 * HIDDEN)
    head = Eagle3(config, Target.from_model(model))
    random = head.midlayer.mlp.down_proj.weight.clone()
    last = model.model.layers[-1]
    head.init_from_layers([last], model.model.norm)
    assert torch.equal(head.midlayer.mlp.down_proj.weight, random)
    q_proj = head.midlayer.self_attn.q_proj
    torch.testing.assert_close(q_proj.weight[:, HIDDEN:], last.self_attn.q_proj.weight)


def other_layer(name: str) -> tuple[Any, Any]:
    """The last layer and the final norm of a tiny Gemma 3 or OLMo 2, with norms of random factors."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), HIDDEN) | dict.fromkeys(
        ("eos_token_id",), 1
    )
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // 4,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(name, vocab_size=64, num_hidden_layers=1, **sizes, **heads)
    model: Any = AutoModelForCausalLM.from_config(config).model
    for name_of, parameter in model.named_parameters():
        if "norm" in name_of:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.layers[-1], model.norm


def test_begun_from_a_gemma_the_head_has_the_factors_of_its_norms() -> None:
    head = Eagle3(Config(aux_layer_ids=(1, 2, 4)), Target.from_model(make_target()))
    layer, final = other_layer("gemma3_text")
    head.init_from_layers([layer], final)
    x = torch.randn(3, HIDDEN)
    block = head.midlayer
    torch.testing.assert_close(block.hidden_norm(x), layer.input_layernorm(x), rtol=1e-4, atol=1e-4)
    before_mlp = layer.pre_feedforward_layernorm(x)
    torch.testing.assert_close(block.post_attention_layernorm(x), before_mlp, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.norm(x), final(x), rtol=1e-4, atol=1e-4)


def test_begun_from_an_olmo_2_the_head_keeps_the_norms_that_it_does_not_have() -> None:
    head = Eagle3(Config(aux_layer_ids=(1, 2, 4)), Target.from_model(make_target()))
    layer, final = other_layer("olmo2")
    layer.mlp.down_proj.weight.data.fill_(2.0)
    head.init_from_layers([layer], final)
    for norm in (head.midlayer.hidden_norm, head.midlayer.post_attention_layernorm):
        assert norm.weight.unique().tolist() == [1.0]
    assert torch.equal(head.norm.weight, final.weight)


@pytest.mark.parametrize(
    ("options", "draft_ids", "message"),
    [
        ({"aux_layer_ids": (1, 2, 6)}, None, r"\(1, 2, 6\).*layers 0 to 5\b"),
        ({"aux_layer_ids": (2, 1)}, None, r"\(2, 1\).*ascending"),
        ({}, None, r"\b5 layers\b.*\(2, 2, 2\)"),
        ({"aux_layer_ids": (1,)}, torch.arange(VOCAB + 1), r"\b97\b.*\b96\b"),
        ({"aux_layer_ids": (1,)}, torch.tensor([3, 3]), r"ascend.*\b0\.\.95\b"),
        ({"aux_layer_ids": (1,)}, torch.tensor([3, 200]), r"ascend.*\b0\.\.95\b"),
    ],
)
def test_what_the_target_does_not_have_is_refused(
    options: dict[str, Any], draft_ids: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Eagle3(Config(**options), Target.from_model(make_target()), draft_ids)


def test_a_map_of_absolute_ids_is_refused(tmp_path: Path) -> None:
    head, model = make_head("reduced vocabulary")
    head.export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "d2t": DRAFT_IDS}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"d2t and t2d\b"):
        Eagle3.load(tmp_path, Target.from_model(model))
    del tensors["t2d"]
    save_file({**tensors, "d2t": DRAFT_IDS}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"\b0\.\.\d+: .*\bd2t\b"):
        Eagle3.load(tmp_path, Target.from_model(model))


def test_a_missing_map_is_refused(tmp_path: Path) -> None:
    head, model = make_head("reduced vocabulary")
    head.export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight.*\(24, 32\).*\(96, 32\)"):
        Eagle3.load(tmp_path, Target.from_model(model))


def test_embeddings_that_are_not_the_targets_are_refused(tmp_path: Path) -> None:
    head, _ = make_head()
    head.export(tmp_path, layout="speculators")
    with pytest.raises(ValueError, match=rf"{tmp_path}: embed_tokens"):
        Eagle3.load(tmp_path, Target.from_model(make_target(seed=1)))


def test_a_signal_of_other_layers_is_refused() -> None:
    head, model = make_head()
    batch = make_batch([[make_ids(4)]])
    with pytest.raises(ValueError, match=r"\(1, 2, 4\).*2"):
        head.draft_steps(batch, make_signal(model, batch, (1, 2)))


def test_a_draft_vocabulary_moves_with_its_head_and_is_no_tensor_of_it() -> None:
    head, _ = make_head("reduced vocabulary")
    assert not any("ids" in name for name in head.state_dict())
    assert head.to("meta")._draft_ids_W.device.type == "meta"


@pytest.mark.parametrize(
    ("listed", "read"),
    [
        ([1, 17, 33], [2, 18, 34]),  # SpecForge for gpt-oss-120b, ModelOpt's default
        ([1, 29, 61], [2, 30, 62]),  # SpecForge for Gemma 3 27B
        ([2, 30, 58], [2, 30, 58]),  # AQ-MedAI for Kimi K2.5, vLLM's default for 61 layers
        ([24, 30, 36], [24, 30, 36]),  # NVIDIA for gpt-oss-120b, which has 36 layers
    ],
)
@pytest.mark.parametrize("mark", [{}, {"use_aux_hidden_state": True}])
def test_a_nested_list_that_starts_at_1_names_the_layers_that_end(
    listed: list[int], read: list[int], mark: dict[str, bool]
) -> None:
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": listed, **mark}}
    assert nested_layers(config) == find_family("eagle3").read_layers(config) == read


@pytest.mark.parametrize(
    ("architecture", "model_type", "is_normed"),
    [
        ("LlamaForCausalLMEagle3", "qwen3", False),
        ("Eagle3LlamaForCausalLM", "llama", False),
        ("Eagle3Qwen3ForCausalLM", "llama", True),
        ("Qwen3ForCausalLM", "qwen3", True),
        (None, "qwen3", True),
    ],
)
@pytest.mark.vllm
def test_norms_of_queries_and_keys_are_those_of_vllms_class(
    architecture: str | None, model_type: str, is_normed: bool, tmp_path: Path
) -> None:
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.configs.eagle import EAGLEConfig

    head, model = make_head()
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    named = [architecture] if architecture else []
    config = {**config, "architectures": named, "model_type": model_type}
    assert has_qk_norm(config) == is_normed
    if architecture:
        served = EAGLEConfig(AutoConfig.for_model(**config), method="eagle3").architectures
        module = ModelRegistry.models[served[0]].module_name
        assert module.endswith("qwen3_eagle3" if is_normed else "llama_eagle3")
    if not is_normed:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert Eagle3.load(tmp_path, Target.from_model(model)).shape == head.shape


def test_a_map_of_the_whole_vocabulary_is_no_map(tmp_path: Path) -> None:
    head, model = make_head()
    head.export(tmp_path)
    path = tmp_path / "model.safetensors"
    plain = load_file(path)
    maps = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    save_file({**plain, **maps}, path, {"format": "pt"})
    loaded = Eagle3.load(tmp_path, Target.from_model(model))
    assert loaded._draft_ids_W is None
    loaded.export(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == plain.keys()  # vLLM would refuse the maps


def test_a_head_without_a_list_reads_the_default_layers(tmp_path: Path) -> None:
    """As most of SpecForge's, and those of EAGLE-3's authors."""
    model = make_target(num_hidden_layers=8)
    head = Eagle3(Config(), Target.from_model(model))
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["redraft"], config["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    family = find_family("eagle3")
    assert family.read_layers(config) == []
    assert family.states_shape(config) == (3, HIDDEN)
    assert Eagle3.load(tmp_path, Target.from_model(model)).aux_layer_ids == (2, 4, 5)
    facts, problems = describe_draft(tmp_path)
    assert problems == []
    assert "not listed" in facts["target"]
