"""The samples of the demo's answers, bit for bit, by several chat templates."""

from __future__ import annotations

import datetime

import pytest
from chat_templates import FAMILIES
from make_tokenizers import make_byte_tokenizer

from redraft.distill.data.conversations import Conversation, load_conversations
from redraft.distill.data.samples import build_samples, data_hash
from redraft.files.checkpoint import end_ids, load_tokenizer
from redraft.recipes.demo.parts import ANSWERS

TINY_TARGET = "tests/assets/tiny-target"
DAY = datetime.date(2024, 2, 29)

HASHES = {
    "Llama 3.2": "e51688aa5b7f6afa9df3eea568475929cc3e331008990f516880b5b3167b1a93",
    "Qwen3": "3765a1a8d9c5bcf49b2589cf536928c229cfd1564c31c0b45d4debd3cc6e5b9b",
    "SmolLM3": "df0d759140fcf6d49362ac1445712bbac99b4a6196884068e689cb730fffbd24",
    "gpt-oss": "5202be8947e6084de71f8ea2726ebea2c4909f1e20471520117a8a112b283899",
    "Granite 3.3": "c995219cf1884b09692f61e737c38f6d524a0561883223f2cdb9c6660af1c771",
    "Magistral": "fd62de7e89b107d8cdbece46d0aa2b4fd657c6714b375b20d20de078022b934b",
    "DeepSeek-R1": "7a7dfc57ccda753eac378ade6b7ad9cba35c592823ff92e5d2dbfa287b1a726b",
    "Gemma 3": "2f635efb6fa7d5f3a30e8265d8b6b7e7d501d6ba295e5ae9e45900b93f0d7e70",
    "Phi-4-mini": "d37392a80370d18ad61d97cb1bf88ae27aa24e99110f41fef8aa56ab61b4ffdf",
}
"""`data_hash` of the first 150 conversations."""


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return load_conversations(str(ANSWERS))


def test_the_samples_for_the_small_target_stay_the_same(conversations: list[Conversation]) -> None:
    tokenizer = load_tokenizer(TINY_TARGET)
    samples, stats = build_samples(
        conversations,
        tokenizer,
        max_length=1024,
        ends=end_ids(TINY_TARGET, tokenizer),
        progress=False,
    )
    assert data_hash(samples) == "e7400720782ec21ba5a64466731f45151f7e586cb23da6e70c5e6dac1ab5997e"
    assert (stats.samples, stats.tokens, stats.labels) == (4000, 766_029, 420_679)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_samples_by_nine_templates_stay_the_same(
    name: str, conversations: list[Conversation]
) -> None:
    family = FAMILIES[name]
    tokenizer = make_byte_tokenizer(bos_token=family.bos, eos_token=family.end)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    tokenizer.chat_template = family.template
    samples, _ = build_samples(
        conversations[:150], tokenizer, max_length=2048, day=DAY, progress=False
    )
    assert data_hash(samples) == HASHES[name]
