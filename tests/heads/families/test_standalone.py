"""The standalone draft.

Its steps equal the model's own logits, and every way to begin one keeps what it should.
"""

import copy
import math
import re

import pytest
import torch
import transformers
from reference_decoder import propose
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2MoeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
)

from redraft.files.checkpoint import new_model
from redraft.heads.draft import Batch
from redraft.heads.families import standalone
from redraft.heads.families.standalone import (
    Init,
    StandaloneDraft,
    from_config,
    make_draft,
    prune_layers,
)
from redraft.heads.nn.causal_lm import PLAIN_ATTENTION
from tests.helpers.target_families import FAMILIES, TINY, make_config, make_model

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
SIZES |= {
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_llama(**config: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | config)).eval()


def make_qwen(**config: object) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | config)).eval()


def make_mistral(**config: object) -> MistralForCausalLM:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES | config)).eval()


def make_batch(*lengths: int, padding: int = 0) -> Batch:
    """One row of documents of the given lengths; all but their first two tokens are labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = sum(lengths) + padding
    positions = [position for length in lengths for position in range(length)]
    documents = [index for index, length in enumerate(lengths) for _ in range(length)]
    return Batch(
        input_ids_BT=torch.randint(3, 97, (1, tokens), generator=generator),
        loss_mask_BT=torch.tensor([[position >= 2 for position in positions] + [False] * padding]),
        document_BT=torch.tensor([documents + [-1] * padding]),
        position_ids_BT=torch.tensor([positions + [0] * padding]),
    )


def step_logits(draft: StandaloneDraft, batch: Batch) -> torch.Tensor:
    (step,) = draft.draft_steps(batch)
    return step.hidden_BTD @ step.head_WD.T


def alone(model: torch.nn.Module, batch: Batch, lengths: tuple[int, ...]) -> torch.Tensor:
    """The logits of every document fed by itself, end to end."""
    parts = batch.input_ids_BT[:, : sum(lengths)].split(lengths, dim=1)
    return torch.cat([model(part).logits for part in parts], dim=1)


@pytest.mark.parametrize(
    "model",
    [
        make_llama(),
        make_llama(tie_word_embeddings=True),
        make_qwen(),
        make_qwen(use_sliding_window=True, sliding_window=5, max_window_layers=2),
        make_mistral(sliding_window=4),
    ],
    ids=["llama", "llama-tied", "qwen2", "qwen2-two-sliding-layers", "mistral-all-sliding"],
)
@torch.no_grad()
def test_packed_documents_get_the_logits_they_have_alone(model):
    lengths = (12, 3, 9)
    batch = make_batch(*lengths, padding=4)
    logits = step_logits(StandaloneDraft(model), batch)
    torch.testing.assert_close(logits[:, :24], alone(model, batch, lengths), rtol=1e-4, atol=1e-5)
    assert logits.isfinite().all(), "padding looks at itself"


@torch.no_grad()
def test_the_sliding_window_matters_in_this_test():
    wide, narrow = make_mistral(sliding_window=None), make_mistral(sliding_window=4)
    ids_BT = make_batch(12).input_ids_BT
    difference_T = (wide(ids_BT).logits - narrow(ids_BT).logits).abs().amax((0, 2))
    assert difference_T[:4].max() < 1e-5 < difference_T[4:].min()


def test_the_step_trains_exactly_the_rows_before_a_label():
    (step,) = StandaloneDraft(make_llama()).draft_steps(make_batch(4, 3, padding=1))
    assert step.shift == 0
    assert step.mask_BT.int().tolist() == [[0, 1, 1, 0, 0, 1, 0, 0]]


def test_a_cross_entropy_over_the_steps_has_the_models_own_gradient():
    model, batch = make_llama().double(), make_batch(10)
    reference = copy.deepcopy(model)
    labels_BT = torch.where(batch.loss_mask_BT, batch.input_ids_BT, -100)
    reference(batch.input_ids_BT, labels=labels_BT).loss.backward()
    (step,) = StandaloneDraft(model).draft_steps(batch)
    logits_NV = (step.hidden_BTD @ step.head_WD.T)[step.mask_BT]
    targets_N = batch.input_ids_BT.roll(-1, 1)[step.mask_BT]
    torch.nn.functional.cross_entropy(logits_NV, targets_N).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("model_type", PLAIN_ATTENTION)
def test_ranges_of_keys_equal_a_mask_and_make_none(model_type):
    torch.manual_seed(0)
    dropout = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    sizes = {**FAMILIES[model_type][1], **SIZES, **dropout, "head_dim": 8, "sliding_window": None}
    config = AutoConfig.for_model(model_type, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    draft, batch = StandaloneDraft(model).train(), make_batch(40, 30, 5, padding=9)
    results = []
    for takes_prefixes in (False, True):
        draft._takes_prefixes = takes_prefixes
        draft.zero_grad()
        with MasksSeen() as seen:
            logits = step_logits(draft, batch)[:75]
            logits.square().mean().backward()
        assert (seen.count == 0) == takes_prefixes
        # An expert that no token chose has no gradient.
        results.append(
            [logits, *(p.grad.clone() for p in draft.parameters() if p.grad is not None)]
        )
    for masked, ranged in zip(*results, strict=True):
        torch.testing.assert_close(masked, ranged, rtol=1e-5, atol=1e-5)


class MasksSeen(TorchDispatchMode):
    """Counts tensors of tokens by tokens."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            self.count += isinstance(made, torch.Tensor) and made.shape[-2:] == (84, 84)
        return result


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3"])
def test_every_trained_weight_of_a_draft_with_an_image_encoder_gets_a_gradient(
    model_type: str,
) -> None:
    """DDP stops at the second step otherwise."""
    draft = StandaloneDraft(make_model(model_type))
    step_logits(draft, make_batch(9, 7)).logsumexp(-1).sum().backward()
    trained = {name: weight for name, weight in draft.named_parameters() if weight.requires_grad}
    assert [name for name, weight in trained.items() if weight.grad is None] == []
    assert len(trained) > 10
    assert len(trained) < len(list(draft.parameters()))


def test_gradient_checkpointing_changes_no_gradient_and_switches_off():
    draft, batch = StandaloneDraft(make_llama()).train(), make_batch(10)
    grads = []
    for enabled in (False, True):
        draft.recomputes = enabled
        assert draft.model.is_gradient_checkpointing == enabled
        draft.zero_grad()
        step_logits(draft, batch).square().mean().backward()
        grads.append([parameter.grad.clone() for parameter in draft.parameters()])
    draft.recomputes = False
    assert not draft.model.is_gradient_checkpointing
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_greedy_proposals_are_what_transformers_generates():
    draft = StandaloneDraft(make_qwen())
    prefix = [5, 6, 7, 8]
    generated = draft.model.generate(
        torch.tensor([prefix]), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    drafted = propose(draft, prefix, None, 6)
    assert [token for token, _ in drafted] == generated[0, 4:].tolist()
    assert all(q_V[token] == 1 and q_V.sum() == 1 for token, q_V in drafted)


@torch.no_grad()
def test_sampled_proposals_come_with_the_distribution_they_were_drawn_from():
    draft = StandaloneDraft(make_llama())
    drafted = propose(
        draft, [5, 6, 7], None, 4, temperature=0.7, generator=torch.Generator().manual_seed(3)
    )
    text = [5, 6, 7]
    for token, q_V in drafted:
        expected_V = (draft.model(torch.tensor([text])).logits[0, -1] / 0.7).softmax(-1)
        torch.testing.assert_close(q_V, expected_V, rtol=1e-4, atol=1e-6)
        text.append(token)
    again = propose(
        draft, [5, 6, 7], None, 4, temperature=0.7, generator=torch.Generator().manual_seed(3)
    )
    assert [token for token, _ in again] == text[3:]


def test_a_head_with_a_bias_is_refused():
    model = PhiForCausalLM(PhiConfig(**SIZES | {"num_key_value_heads": 4}))
    with pytest.raises(ValueError, match=r"PhiForCausalLM.*\bbias\b"):
        StandaloneDraft(model)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Granite", {"logits_scaling": 8.0}),
        ("Gemma2", {"final_logit_softcapping": 20.0, "sliding_window": 4}),
    ],
)
def test_a_draft_with_scaled_or_capped_logits_says_in_packed_rows_what_its_class_says(
    kind, options
):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, initializer_range=0.5, **options)
    draft = StandaloneDraft(new_model(config, torch.float32).eval())
    rows = [[(torch.arange(3, 12), torch.ones(9)), (torch.arange(20, 32), torch.ones(12))]]
    batch = Batch.packed(rows, width=24)
    (step,) = draft.draft_steps(batch)
    for first, last in ((0, 9), (9, 21)):
        mine = step.logits(torch.arange(first, last))
        theirs = draft.model(input_ids=batch.input_ids_BT[:, first:last]).logits[0]
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_attention_that_cannot_read_the_document_mask_is_refused(monkeypatch):
    model = make_llama()
    model.set_attn_implementation("eager")
    monkeypatch.setattr(standalone, "_make_initial", lambda *_: StandaloneDraft(model))
    with pytest.raises(ValueError, match="sdpa"):
        make_draft(Init(num_layers=2), make_llama(), None)


@pytest.mark.parametrize("make", [make_llama, make_qwen])
@torch.no_grad()
def test_a_pruned_target_is_the_target_with_the_other_layers_taken_out(make):
    target, ids_BT = make(), make_batch(8).input_ids_BT
    draft = prune_layers(target, [0, 3])
    shortened = copy.deepcopy(target)
    shortened.model.layers = torch.nn.ModuleList([target.model.layers[0], target.model.layers[3]])
    shortened.config.num_hidden_layers = 2
    expected = shortened(ids_BT, use_cache=False).logits
    assert torch.equal(draft.model(ids_BT, use_cache=False).logits, expected)
    assert not torch.equal(draft.model(ids_BT).logits, target(ids_BT).logits)
    assert [layer.self_attn.layer_idx for layer in draft.model.model.layers] == [0, 1]
    assert (
        draft.model.get_input_embeddings().weight.data_ptr()
        != target.get_input_embeddings().weight.data_ptr()
    )


MOE = {
    **SIZES,
    "num_hidden_layers": 6,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}
GLM = {**MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
QWEN = {**MOE, "num_experts": 4, "decoder_sparse_step": 1}


@pytest.mark.parametrize("layers", [[0, 3, 5], [1, 3], [2, 4, 5], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize(
    "config",
    [
        Glm4MoeConfig(**GLM, first_k_dense_replace=2),
        Qwen3MoeConfig(**QWEN, mlp_only_layers=[0, 1]),
        Qwen3MoeConfig(**QWEN, mlp_only_layers=[0, 1, 2, 3, 4, 5]),
        Lfm2MoeConfig(**MOE, num_experts=4, num_dense_layers=2, layer_types=["full_attention"] * 6),
    ],
    ids=["GLM", "Qwen", "dense", "LFM2"],
)
@torch.no_grad()
def test_dense_layers_of_a_pruned_moe_target_stay_dense(
    config: transformers.PreTrainedConfig, layers: list[int]
):
    torch.manual_seed(0)
    target, ids_BT = (
        AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval(),
        make_batch(8).input_ids_BT,
    )
    draft = prune_layers(target, layers)
    target.model.layers = torch.nn.ModuleList([target.model.layers[layer] for layer in layers])
    target.config.num_hidden_layers = len(layers)
    assert torch.equal(
        draft.model(ids_BT, use_cache=False).logits, target(ids_BT, use_cache=False).logits
    )


@torch.no_grad()
def test_keeping_every_layer_keeps_the_target():
    for target in (
        make_llama(),
        make_qwen(tie_word_embeddings=True),
        make_mistral(sliding_window=4),
    ):
        ids_BT = make_batch(8).input_ids_BT
        assert torch.equal(
            prune_layers(target, [0, 1, 2, 3]).model(ids_BT).logits, target(ids_BT).logits
        )


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "gemma4_text"])
def test_layers_that_would_change_their_kind_are_refused_in_a_line(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **{**TINY, **FAMILIES[model_type][1]})
    with pytest.raises(ValueError, match=r"\[7\].*draft\.num_layers") as refused:
        prune_layers(AutoModelForCausalLM.from_config(config), [7])
    assert "\n" not in str(refused.value)


def test_layer_types_follow_the_layers_that_stay():
    target = make_qwen(use_sliding_window=True, sliding_window=5, max_window_layers=2)
    assert target.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    draft = prune_layers(target, [1, 3])
    assert draft.model.config.layer_types == ["full_attention", "sliding_attention"]
    assert target.config.num_hidden_layers == 4, "the target's config is its own"


@torch.no_grad()
def test_pruning_finds_layers_by_another_name():
    torch.manual_seed(0)
    target = GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=2, n_positions=64)
    ).eval()
    draft, ids_BT = prune_layers(target, [0, 1, 2]), make_batch(8).input_ids_BT
    assert torch.equal(draft.model(ids_BT).logits, target(ids_BT).logits)


@pytest.mark.parametrize("layers", [[], [0, 4], [-1, 2], [2, 1], [1, 1]])
def test_impossible_layers_are_refused(layers):
    with pytest.raises(ValueError, match=rf"\b0 to 3\b.*{re.escape(str(layers))}"):
        prune_layers(make_llama(), layers)


def test_a_new_config_takes_the_targets_vocabulary_and_special_ids():
    target = make_qwen(max_position_embeddings=512, vocab_size=101)
    draft = from_config(target.config, num_layers=2, hidden_size=128)
    config = draft.model.config
    assert (config.vocab_size, config.max_position_embeddings, config.eos_token_id) == (101, 512, 2)
    assert (config.num_attention_heads, config.head_dim, config.intermediate_size) == (2, 64, 384)
    logits = step_logits(draft, make_batch(6))
    uniform_nats = math.log(101)
    assert logits.shape == (1, 6, 101)
    assert abs(-logits.log_softmax(-1).mean().item() - uniform_nats) < 0.1, "it knows nothing yet"
    with pytest.raises(ValueError, match="head_dim"):
        from_config(target.config, num_layers=2, hidden_size=100)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [make_llama, make_qwen])
@torch.no_grad()
def test_an_exported_draft_loads_with_equal_logits(tmp_path, byte_tokenizer, make, tied):
    draft, ids_BT = prune_layers(make(tie_word_embeddings=tied), [1, 2]), make_batch(8).input_ids_BT
    draft.export(tmp_path, tokenizer=byte_tokenizer)
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        StandaloneDraft.load(tmp_path).model,
    ):
        assert torch.equal(loaded(ids_BT).logits, draft.model(ids_BT).logits)
    assert (
        PreTrainedTokenizerFast.from_pretrained(tmp_path).get_vocab() == byte_tokenizer.get_vocab()
    )


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_in_bf16_leaves_the_training_weights_alone(tmp_path, byte_tokenizer, tied):
    draft = StandaloneDraft(make_llama(tie_word_embeddings=tied))
    draft.export(tmp_path, tokenizer=byte_tokenizer, dtype=torch.bfloat16)
    loaded = StandaloneDraft.load(tmp_path)
    assert loaded.model.dtype == torch.bfloat16, "the config says what the file holds"
    assert draft.model.dtype == torch.float32
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in draft.parameters())
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert stored < 1.2 * 2 * sum(p.numel() for p in draft.parameters()) + 4096, (
        "tied weights are stored once"
    )
    for ours, theirs in zip(draft.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours.bfloat16(), theirs)


def test_an_export_does_not_round_what_transformers_keeps_in_float32(tmp_path, byte_tokenizer):
    config = make_config("deepseek_v3", vocab_size=len(byte_tokenizer))
    draft = StandaloneDraft(new_model(config, torch.float32).eval())
    choices = [tensor for name, tensor in draft.named_buffers() if "e_score" in name]
    assert choices
    for number, bias_E in enumerate(choices):
        bias_E.copy_(5 + number + torch.arange(len(bias_E)) / 1000)
    draft.export(tmp_path, tokenizer=byte_tokenizer, dtype=torch.bfloat16)
    loaded = dict(StandaloneDraft.load(tmp_path).named_buffers())
    for name, tensor in draft.named_buffers():
        if "e_score" in name:
            assert torch.equal(loaded[name], tensor), name


def test_weights_gathered_elsewhere_are_the_ones_exported(tmp_path, byte_tokenizer):
    draft = StandaloneDraft(make_llama())
    gathered = {name: tensor + 1 for name, tensor in draft.state_dict().items()}
    draft.export(tmp_path, tokenizer=byte_tokenizer, weights=gathered)
    assert torch.equal(
        StandaloneDraft.load(tmp_path).model.lm_head.weight, draft.model.lm_head.weight + 1
    )


def test_a_draft_begins_as_its_init_says(tmp_path, byte_tokenizer):
    target = make_llama(vocab_size=384).bfloat16()
    StandaloneDraft(make_llama(vocab_size=len(byte_tokenizer))).export(
        tmp_path, tokenizer=byte_tokenizer
    )
    for init, num_layers, hidden_size in [
        (Init(checkpoint=str(tmp_path)), 4, 32),
        (Init(checkpoint="unused/default", layers=(0, 3)), 2, 32),
        (Init(checkpoint="unused/default", num_layers=1, hidden_size=64), 1, 64),
    ]:
        draft = make_draft(init, target, byte_tokenizer)
        assert (draft.model.config.num_hidden_layers, draft.model.config.hidden_size) == (
            num_layers,
            hidden_size,
        )
        assert draft.model.config.vocab_size == 384, "a checkpoint with fewer rows is padded"
        assert draft.model.dtype == torch.float32


@pytest.mark.parametrize("wrong", [{}, {"layers": (0,), "num_layers": 2}])
def test_a_draft_begins_one_way(wrong):
    with pytest.raises(ValueError, match=r"layers.*num_layers"):
        Init(**wrong)


def test_layers_of_a_target_whose_weights_are_elsewhere_are_refused():
    target = make_llama()
    target.model.layers.to("meta")  # behind a server: only embeddings and head are here
    with pytest.raises(ValueError, match=r"draft\.checkpoint.*draft\.num_layers"):
        make_draft(Init(layers=(0,)), target, None)


def test_a_recurrent_draft_is_refused(monkeypatch):
    recurrent = StandaloneDraft(make_llama())
    recurrent.model.config.layer_types = ["linear_attention", "full_attention"]
    monkeypatch.setattr(standalone, "_make_initial", lambda *_: recurrent)
    with pytest.raises(ValueError, match="linear_attention"):
        make_draft(Init(num_layers=2), make_llama(), None)


def test_a_draft_that_begins_at_random_is_the_same_at_every_call():
    target = make_llama(vocab_size=384)
    torch.manual_seed(5)
    one = make_draft(Init(num_layers=1, hidden_size=64), target, None)
    again, other = (
        make_draft(Init(num_layers=1, hidden_size=64), target, None, seed) for seed in (0, 1)
    )
    weights, its, others = (draft.state_dict() for draft in (one, again, other))
    assert all(torch.equal(weight, its[name]) for name, weight in weights.items())
    assert not all(torch.equal(weight, others[name]) for name, weight in weights.items())
