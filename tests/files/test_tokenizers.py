"""Tokenizers compared token by token, and vocabularies padded or cut to the size of another."""

import pytest
import torch
from make_tokenizers import make_byte_tokenizer, make_sentencepiece_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from redraft.files.checkpoint import load_causal_lm
from redraft.files.tokenizers import (
    check_same_tokenizer,
    fit_vocabulary,
    mean_rows,
)
from redraft.heads.families.standalone import Init, StandaloneDraft, make_draft
from tests.helpers.target_families import make_model


def make_lm(vocab_size: int, *, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def test_a_tokenizer_is_the_same_as_itself_saved_and_loaded(tmp_path, byte_tokenizer):
    byte_tokenizer.save_pretrained(tmp_path)
    check_same_tokenizer(byte_tokenizer, PreTrainedTokenizerFast.from_pretrained(tmp_path))


def test_the_first_token_that_differs_is_named(byte_tokenizer):
    other = make_byte_tokenizer(pad_token="<|pad|>", bos_token="<|start|>", eos_token="<|stop|>")
    with pytest.raises(ValueError, match=r"1.*'<\|bos\|>'.*'<\|start\|>'") as error:
        check_same_tokenizer(byte_tokenizer, other)
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_tokens_more_is_another(byte_tokenizer):
    longer = make_byte_tokenizer()
    longer.add_tokens(["<think>"])
    last = len(byte_tokenizer)
    with pytest.raises(ValueError, match=rf"token {last} .*\babsent\b.*'<think>'"):
        check_same_tokenizer(byte_tokenizer, longer)
    with pytest.raises(ValueError, match=rf"token {last} .*'<think>'.*\babsent\b"):
        check_same_tokenizer(longer, byte_tokenizer)


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path, byte_tokenizer):
    sentencepiece = make_sentencepiece_tokenizer()
    StandaloneDraft(make_lm(len(sentencepiece))).export(tmp_path, tokenizer=sentencepiece)
    target = make_lm(384)
    with pytest.raises(ValueError, match=r"token 0 .*'<\|pad\|>'.*target.*'<unk>'.*draft"):
        make_draft(Init(checkpoint=str(tmp_path)), target, byte_tokenizer)


def test_mean_rows_by_hand():
    weight_VD = torch.tensor([[0.0, 2.0], [4.0, 6.0], [8.0, 1.0]], dtype=torch.bfloat16)
    rows_ND = mean_rows(weight_VD, [[2], [], [0, 1], [1, 1, 2, 2]])
    assert rows_ND.tolist() == [[8, 1], [4, 3], [2, 4], [6, 3.5]]
    assert rows_ND.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_padding_rows_never_win_and_hold_no_more_than_their_share(tied, dtype):
    """The worst case over hidden states is zero, where all logits are equal.

    Both real and hostile states are tried.
    """
    vocab_size, padding = 97, 31
    draft = make_lm(vocab_size, tied=tied).to(dtype)
    ids_BT = torch.arange(90).view(3, 30)
    before = draft(ids_BT).logits
    fit_vocabulary(draft, vocab_size + padding)
    after = draft(ids_BT).logits
    assert torch.equal(after[..., :vocab_size], before)
    assert draft.config.vocab_size == vocab_size + padding

    head_VD = draft.lm_head.weight.float()
    negative_D = -head_VD[:vocab_size].mean(
        0
    )  # makes the mean of all logits negative, where a row of zeros would win
    hidden_ND = torch.cat(
        [
            torch.randn(500, 32),
            30 * torch.randn(500, 32),
            negative_D[None] * 100,
            torch.zeros(1, 32),
        ]
    )
    for logits in (after.float(), hidden_ND @ head_VD.T):
        mass = logits.double().softmax(-1)[..., vocab_size:].sum(-1)
        assert mass.max() <= padding / (vocab_size + padding) + 1e-3
    informed = torch.cat([after.float().flatten(0, 1), (hidden_ND @ head_VD.T)[:-1]])
    assert (informed.argmax(-1) < vocab_size).all()
    assert after.float().softmax(-1)[..., vocab_size:].sum(-1).mean() < 0.02


def test_a_row_of_zeros_would_win_where_the_mean_row_does_not():
    torch.manual_seed(0)
    head_VD = torch.randn(50, 8) - 3.0
    hidden_D = torch.ones(8)
    logits_V = head_VD @ hidden_D
    assert logits_V.max() < 0, "a row of zeros has logit 0"
    assert head_VD.mean(0) @ hidden_D < logits_V.max()


def test_cutting_keeps_the_rows_that_are_left():
    draft = make_lm(97)
    before = draft.lm_head.weight.clone()
    fit_vocabulary(draft, 80)
    assert torch.equal(draft.lm_head.weight, before[:80])
    assert draft.model.embed_tokens.weight.shape == (80, 32)
    fit_vocabulary(draft, 80)
    assert draft.config.vocab_size == 80


def test_a_vocabulary_is_fitted_in_the_section_of_a_model_that_also_reads_images(tmp_path):
    draft = make_model("qwen2_5_vl")
    fit_vocabulary(draft, 104)
    draft.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path)
    assert loaded.get_input_embeddings().weight.shape[0] == 104
    assert loaded.config.get_text_config().vocab_size == 104
