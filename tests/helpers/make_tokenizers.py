"""Small real tokenizers, trained on the spot.

A byte-level one and one that spells like sentencepiece.
"""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|end|>"}
TEXT = [
    "def main(argument): return the value of the argument",
    "the theatre there, naïve café 東京 🙂\n\tindented",
] * 3


def make_byte_tokenizer(
    vocab_size: int = 320, text: list[str] = TEXT, **special: str
) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `text`, as Llama 3 and Qwen have one."""
    special = special or SPECIAL_TOKENS
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


def make_sentencepiece_tokenizer(vocab_size: int = 80) -> PreTrainedTokenizerFast:
    """A BPE that writes a space as ▁ and an unknown byte as <0xNN>, as Llama 2 and Gemma have one."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False)
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
