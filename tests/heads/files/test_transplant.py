"""Tokenizers compared by the bytes of their tokens, and vocabularies moved from one to the other."""

import pytest
import torch
from make_tokenizers import make_byte_tokenizer, make_sentencepiece_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from redraft.heads.families.standalone import Init, StandaloneDraft, make_draft
from redraft.heads.files.tokenizers import (
    check_same_tokenizer,
    fit_vocabulary,
    mean_rows,
    token_sources,
    transplant_vocabulary,
)


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
    assert "transplant" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_tokens_more_is_another(byte_tokenizer):
    longer = make_byte_tokenizer()
    longer.add_tokens(["<think>"])
    last = len(byte_tokenizer)
    with pytest.raises(ValueError, match=f"token {last} is absent in the target and '<think>' in the draft"):
        check_same_tokenizer(byte_tokenizer, longer)
    with pytest.raises(ValueError, match=f"token {last} is '<think>' in the target and absent in the draft"):
        check_same_tokenizer(longer, byte_tokenizer)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_transplant_from_a_permuted_vocabulary_permutes_the_logits(tied):
    draft_tokenizer = make_byte_tokenizer()
    target_tokenizer = make_byte_tokenizer(eos_token="<|end|>", pad_token="<|pad|>", bos_token="<|bos|>")
    assert draft_tokenizer.get_vocab() != target_tokenizer.get_vocab()
    draft, size = make_lm(len(draft_tokenizer), tied=tied), len(target_tokenizer)
    text = "def main(argument): naïve 🙂"
    before = draft(torch.tensor([draft_tokenizer.encode(text)])).logits

    report = transplant_vocabulary(draft, draft_tokenizer, target_tokenizer, size)
    assert (report.matched, report.by_role, report.averaged, report.left) == (size, 0, 0, 0)
    after = draft(torch.tensor([target_tokenizer.encode(text)])).logits
    tokens = draft_tokenizer.convert_ids_to_tokens(range(size))
    assert torch.equal(after[..., target_tokenizer.convert_tokens_to_ids(tokens)], before)
    assert draft.config.eos_token_id == target_tokenizer.eos_token_id == 0
    assert draft.get_input_embeddings().padding_idx == target_tokenizer.pad_token_id


@pytest.mark.parametrize("byte_level_is_target", [True, False])
def test_spellings_of_two_families_meet_in_their_bytes(byte_tokenizer, byte_level_is_target):
    sentencepiece = make_sentencepiece_tokenizer()
    pair = (byte_tokenizer, sentencepiece) if byte_level_is_target else (sentencepiece, byte_tokenizer)
    matched, by_role, averaged = token_sources(*pair)
    target, draft = (tokenizer.convert_ids_to_tokens for tokenizer in pair)
    spelled = {(target(ours), draft(theirs)) for ours, theirs in matched.items()}
    expected = {("Ġthe", "▁the"), ("Ċ", "\n"), ("!", "<0x21>"), ("ð", "<0xF0>"), ("e", "e")}
    assert expected <= (spelled if byte_level_is_target else {pair[::-1] for pair in spelled})
    roles = {(target(ours), draft(theirs)) for ours, theirs in by_role.items()}
    assert roles == (
        {("<|bos|>", "<s>"), ("<|end|>", "</s>")} if byte_level_is_target else {("<s>", "<|bos|>"), ("</s>", "<|end|>")}
    )
    assert averaged, "both trained their own merges"


def test_bytes_of_no_whole_character_are_cut_too(byte_tokenizer):
    """The first two bytes of the emoji are one token here, and no text that a tokenizer could be asked for."""
    half = make_byte_tokenizer(700, ["🙂🙃 🙄🙅"] * 9)
    partial = next(token for token in half.get_vocab() if token in ("ðŁ", "ðŁĻ"))
    _, _, averaged = token_sources(half, byte_tokenizer)
    pieces = averaged.get(half.convert_tokens_to_ids(partial))
    if pieces is None:  # the other tokenizer knows it as well
        assert partial in byte_tokenizer.get_vocab()
    else:
        assert "".join(byte_tokenizer.convert_ids_to_tokens(pieces)) == partial


def test_a_new_row_is_the_mean_of_the_pieces_its_text_is_cut_into():
    target_tokenizer, draft_tokenizer = make_byte_tokenizer(400), make_byte_tokenizer(264)
    draft = make_lm(len(draft_tokenizer))
    old_embedding, old_head = draft.model.embed_tokens.weight.clone(), draft.lm_head.weight.clone()
    report = transplant_vocabulary(draft, draft_tokenizer, target_tokenizer, 512)

    token = target_tokenizer.convert_tokens_to_ids("Ġtheatre")
    assert token != target_tokenizer.unk_token_id
    pieces = draft_tokenizer.encode(" theatre")
    assert len(pieces) > 1
    torch.testing.assert_close(draft.model.embed_tokens.weight[token], old_embedding[pieces].mean(0))
    torch.testing.assert_close(draft.lm_head.weight[token], old_head[pieces].mean(0))
    torch.testing.assert_close(draft.lm_head.weight[511], old_head.mean(0))
    assert report.matched + report.by_role + report.averaged == len(target_tokenizer)
    assert report.left == 512 - len(target_tokenizer)


def test_special_tokens_are_not_spelled_out_of_letters(byte_tokenizer):
    target_tokenizer = make_byte_tokenizer()
    target_tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    matched, by_role, averaged = token_sources(target_tokenizer, byte_tokenizer)
    tool = target_tokenizer.convert_tokens_to_ids("<|tool|>")
    assert tool not in matched | by_role | averaged


def test_a_transplanted_draft_has_the_targets_tokenizer_and_survives_export(tmp_path, byte_tokenizer):
    draft = make_lm(len(make_sentencepiece_tokenizer()), tied=True)
    transplant_vocabulary(draft, make_sentencepiece_tokenizer(), byte_tokenizer, 384)
    StandaloneDraft(draft).export(tmp_path, tokenizer=byte_tokenizer)
    loaded = StandaloneDraft.load(tmp_path)
    check_same_tokenizer(byte_tokenizer, PreTrainedTokenizerFast.from_pretrained(tmp_path))
    ids_BT = torch.tensor([byte_tokenizer.encode("the value")])
    assert loaded.model.config.vocab_size == 384
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert torch.equal(loaded.model(ids_BT).logits, draft(ids_BT).logits)


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(byte_tokenizer):
    with pytest.raises(ValueError, match="vocab_size 200"):
        transplant_vocabulary(make_lm(len(byte_tokenizer)), byte_tokenizer, byte_tokenizer, 200)


def test_a_checkpoint_of_another_tokenizer_needs_the_transplant_to_be_asked_for(tmp_path, byte_tokenizer, capsys):
    sentencepiece = make_sentencepiece_tokenizer()
    StandaloneDraft(make_lm(len(sentencepiece))).export(tmp_path, tokenizer=sentencepiece)
    target = make_lm(384)
    with pytest.raises(ValueError, match=r"token 0 is '<\|pad\|>' in the target and '<unk>' in the draft"):
        make_draft(Init(checkpoint=str(tmp_path)), target, byte_tokenizer)
    draft = make_draft(Init(checkpoint=str(tmp_path), transplant=True), target, byte_tokenizer)
    assert draft.model.config.vocab_size == 384
    assert "tokens copied" in capsys.readouterr().out


def test_mean_rows_by_hand():
    weight_VD = torch.tensor([[0.0, 2.0], [4.0, 6.0], [8.0, 1.0]], dtype=torch.bfloat16)
    rows_ND = mean_rows(weight_VD, [[2], [], [0, 1], [1, 1, 2, 2]])
    assert rows_ND.tolist() == [[8, 1], [4, 3], [2, 4], [6, 3.5]]
    assert rows_ND.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_padding_rows_never_win_and_hold_no_more_than_their_share(tied, dtype):
    """The worst case over hidden states is zero, where all logits are equal; both real and hostile states are tried."""
    vocab_size, padding = 97, 31
    draft = make_lm(vocab_size, tied=tied).to(dtype)
    ids_BT = torch.arange(90).view(3, 30)
    before = draft(ids_BT).logits
    fit_vocabulary(draft, vocab_size + padding)
    after = draft(ids_BT).logits
    assert torch.equal(after[..., :vocab_size], before)
    assert draft.config.vocab_size == vocab_size + padding

    head_VD = draft.lm_head.weight.float()
    negative_D = -head_VD[:vocab_size].mean(0)  # makes the mean of all logits negative, where a row of zeros would win
    hidden_ND = torch.cat([torch.randn(500, 32), 30 * torch.randn(500, 32), negative_D[None] * 100, torch.zeros(1, 32)])
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
