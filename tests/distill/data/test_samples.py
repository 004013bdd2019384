"""Loss masks against what the templates say.

There are four ways in which real ones treat an assistant turn.
"""

from __future__ import annotations

import datetime
import functools
import os
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from benchmarks.studies.tiny_target import CHAT_TEMPLATE
from redraft.distill.data.conversations import Conversation
from redraft.distill.data.samples import SampleStats, build_samples, data_hash, held_out_prompts
from redraft.eval.intervals import estimate_ratio
from redraft.files.checkpoint import load_tokenizer
from redraft.files.target_folder import writes_date

SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|start|>", "<|close|>", "<|eot|>"]

# Header and footer of special tokens, content trimmed, a system prompt of its own where none is
# given.
TRIMMING = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<|start|>system<|close|>\n\nBe "
    "brief.<|eot|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|close|>\n\n{{ m.content | trim }}<|eot|>{% "
    "endfor %}{% if add_generation_prompt %}<|start|>assistant<|close|>\n\n{% endif %}"
)
# Reasoning is dropped from all turns before the last question, and an empty block opens an answer
# that has none.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == "
    "'assistant' %}{% set thought, said = '', m.content %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = m.content.split('</think>', 1)[1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{{ said.lstrip('\n') }}{% "
    "else %}{{ said }}{% endif %}{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if not enable_thinking | default(true) %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The generation prompt opens the reasoning, and no rendering of an answer ever shows it.
REASONING_OPENED = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ "
    "m.content.split('</think>')[-1].lstrip() }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
)


REASONING_KEPT = (  # of the last turn, as Qwen3.5 does
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif "
    "%}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt "
    "%}<|start|>assistant\n<think>\n{% endif %}"
)


@functools.cache
def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    words = Regex(
        r"\p{L}+|\s*[\r\n]+|\s+|[^\s\p{L}]+"
    )  # line ends stay together, as in the tokenizers of Llama 3 and Qwen
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(
        ["Be brief.\n\n\n\nassistant\n\nuser system hello there <think>\n\n</think>\n\n"] * 3,
        trainer,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[3:],
    )
    tokenizer.chat_template = template
    return tokenizer


def make_conversation(*contents: str, system: str | None = None, cut: bool = False) -> dict:
    """User and assistant take turns, the user first."""
    roles = ["user", "assistant"] * len(contents)
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages, "domain": "all", "cut": cut}


def labelled(template: str, conversation: dict, **template_options: object) -> list[str]:
    """The labelled text of every sample."""
    tokenizer = make_tokenizer(template)
    samples, _ = build_samples(
        [conversation],
        tokenizer,
        max_length=4096,
        template_options=template_options,
        progress=False,
    )
    return [tokenizer.decode(sample.input_ids[sample.loss_mask]) for sample in samples]


def as_written(template: str, content: str) -> str:
    """An answer as the template leaves it, with its end of turn."""
    if template == CHAT_TEMPLATE:
        return content + "<|end|>"
    if template == TRIMMING:
        return content.strip() + "<|eot|>"
    if "</think>" not in content:
        return content.lstrip("\n") + "<|end|>"
    thought, said = content.split("</think>", 1)
    thought = thought.split("<think>")[-1].strip("\n")
    return f"<think>\n{thought}\n</think>\n\n" + said.lstrip("\n") + "<|end|>"


# Hypothesis also draws constants from this file. Other tests cover nested and unclosed thoughts.
plain = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=30
).filter(lambda text: "think>" not in text)
answers = st.one_of(
    plain,
    st.builds(
        "{}{}{}".format,
        st.sampled_from(["", " ", "\n", "\n\n"]),
        plain,
        st.sampled_from(["", " ", "\n\n"]),
    ),
    st.builds("<think>{}</think>{}".format, plain, plain),
    st.builds("<think>\n{}\n</think>\n\n{}".format, plain, plain),
    st.sampled_from(
        [
            "<think>",
            "end",
            "|>",
            ">",
            "assistant\n",
            "<think>\n\n</think>\n\nhello",
            "</think>",
            "think",
        ]
    ),
).filter(lambda text: text.strip() and text.split("</think>")[-1].strip())
conversations = st.builds(
    lambda turns, system: make_conversation(
        *(text for turn in turns for text in turn), system=system
    ),
    st.lists(st.tuples(plain, answers), min_size=1, max_size=3),
    st.none() | plain,
)


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, TRIMMING, THINKING], ids=["verbatim", "trimming", "thinking"]
)
@settings(max_examples=60, deadline=None)
@given(conversation=conversations)
def test_what_is_labelled_is_what_the_assistant_wrote_and_the_end_of_its_turn(
    template: str, conversation: dict
) -> None:
    spoken = [m["content"] for m in conversation["messages"] if m["role"] == "assistant"]
    assert "".join(labelled(template, conversation)) == "".join(
        as_written(template, content) for content in spoken
    )


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, TRIMMING, THINKING], ids=["verbatim", "trimming", "thinking"]
)
@settings(max_examples=40, deadline=None)
@given(conversation=conversations)
def test_every_answer_follows_its_prompt_token_by_token_as_served(
    template: str, conversation: dict
) -> None:
    tokenizer = make_tokenizer(template)
    samples, _ = build_samples([conversation], tokenizer, max_length=4096, progress=False)
    messages = conversation["messages"]
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(
            messages[:i], tokenize=False, add_generation_prompt=True
        )
        if template == THINKING and "</think>" not in message["content"]:
            prompt += "<think>\n\n</think>\n\n"
        served = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert any(
            s.input_ids[: len(served)].tolist() == served
            and s.loss_mask[len(served)]
            and not s.loss_mask[len(served) - 1]
            for s in samples
        )


def test_turns_of_a_stable_template_share_one_sample() -> None:
    assert labelled(CHAT_TEMPLATE, make_conversation("a", "one", "b", "two")) == [
        "one<|end|>two<|end|>"
    ]
    assert labelled(TRIMMING, make_conversation("a", " one ", "b", "two", system="s")) == [
        "one<|eot|>two<|eot|>"
    ]


def test_an_answer_that_begins_with_a_newline_does_not_merge_with_its_prompt() -> None:
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    conversation = make_conversation("a", "\nassistant", "b", "two")
    samples, _ = build_samples([conversation], tokenizer, max_length=64, progress=False)
    newline, double = tokenizer("\n")["input_ids"], tokenizer("\n\n")["input_ids"]
    assert (
        len(double) == 1
    )  # so the served prompt of the second turn holds another token than the model wrote
    first = samples[0].loss_mask.argmax()
    assert samples[0].input_ids[first - 1 : first + 1].tolist() == newline * 2
    assert double[0] in samples[1].input_ids
    assert labelled(CHAT_TEMPLATE, conversation) == ["\nassistant<|end|>", "two<|end|>"]


def test_a_template_that_drops_reasoning_makes_a_sample_of_each_turn() -> None:
    conversation = make_conversation(
        "a", "<think>\nhm\n</think>\n\none", "b", "<think>\nso\n</think>\n\ntwo"
    )
    assert labelled(THINKING, conversation) == [
        "<think>\nhm\n</think>\n\none<|end|>",
        "<think>\nso\n</think>\n\ntwo<|end|>",
    ]


def test_an_empty_think_block_that_the_template_adds_is_no_label() -> None:
    assert labelled(THINKING, make_conversation("a", "one")) == ["one<|end|>"]
    assert labelled(THINKING, make_conversation("a", "one"), enable_thinking=False) == [
        "one<|end|>"
    ]


def test_an_empty_think_block_that_the_assistant_wrote_is_labelled() -> None:
    answer = "<think>\n\n</think>\n\none"
    assert labelled(THINKING, make_conversation("a", answer)) == [answer + "<|end|>"]


def test_reasoning_is_labelled_where_the_generation_prompt_opens_it() -> None:
    answers = ("<think>\nhm\n</think>\n\none", "hm\n</think>\n\none")
    for template in (REASONING_OPENED, REASONING_KEPT):
        for answer in answers[: 1 if template == REASONING_KEPT else 2]:
            assert labelled(template, make_conversation("a", answer)) == [
                "hm\n</think>\n\none<|end|>"
            ]


def test_an_answer_cut_at_a_length_limit_has_no_end_of_turn() -> None:
    conversation = make_conversation("a", "one", "b", "two", cut=True)
    assert labelled(CHAT_TEMPLATE, conversation) == ["one<|end|>two"]


def test_plain_texts_have_no_prompts_to_measure_on() -> None:
    texts = [{"messages": [{"role": "text", "content": "abcdefgh"}], "domain": "notes"}]
    with pytest.raises(ValueError, match=r"\bprompts FILE"):
        held_out_prompts(texts, make_tokenizer(CHAT_TEMPLATE), num_prompts=1, max_length=8)


def test_plain_text_is_all_label_and_cut_into_windows() -> None:
    document = {"messages": [{"role": "text", "content": "abcdefgh " * 20}], "domain": "notes"}
    tokenizer = make_tokenizer(None)
    samples, stats = build_samples([document], tokenizer, max_length=32, progress=False)
    assert tokenizer.decode(np.concatenate([s.input_ids for s in samples])) == "abcdefgh " * 20
    assert all(len(s.input_ids) == 32 for s in samples[:-1])
    assert all(s.loss_mask[1:].all() and not s.loss_mask[0] for s in samples)
    assert (stats.truncated, samples[0].domain) == (0, "notes")


def test_what_is_left_out_is_counted() -> None:
    conversations = [
        make_conversation("a", "one"),
        make_conversation("only a question"),
        make_conversation("b", "x " * 200),
        make_conversation("y " * 200, "too late"),
        {"messages": [], "domain": "all"},
    ]
    build = functools.partial(
        build_samples, conversations, make_tokenizer(CHAT_TEMPLATE), progress=False
    )
    samples, stats = build(max_length=64)
    whole = build(max_length=4096)[1].labels
    assert stats == SampleStats(
        conversations=5,
        samples=2,
        tokens=sum(len(s.input_ids) for s in samples),
        labels=sum(s.loss_mask.sum() for s in samples),
        truncated=1,
        without_answer=2,
        beyond_window=1,
        labels_beyond=whole - stats.labels,
        arguments=Counter({"{}": 3}),
        ends=Counter({"<|end|>": 3}),
    )
    assert max(len(s.input_ids) for s in samples) == 64
    assert str(stats).endswith(
        "2 conversations without an assistant turn; 1 conversations with no answer inside the "
        "window; 1 answers cut at the window; "
        f"{whole - stats.labels} labels beyond the window left out, "
        f"{100 * (whole - stats.labels) / whole:.1f}% of all"
    )


def test_a_long_row_is_cut_after_the_last_answer_that_fits() -> None:
    """By brute force: the sample of the longest beginning of the conversation that fits whole."""
    contents = [
        part for i in range(6) for part in (f"question {i}", f"answer {i} " * (1 + 3 * (i == 3)))
    ]
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    beginnings = []
    for turns in range(1, 7):
        beginning = [make_conversation(*contents[: 2 * turns])]
        beginnings.append(build_samples(beginning, tokenizer, max_length=4096, progress=False)[0])
    lengths = [len(sample.input_ids) for (sample,) in beginnings]
    for window in sorted({length + by for length in lengths for by in (-1, 0, 1)}):
        samples, stats = build_samples(
            [make_conversation(*contents)], tokenizer, max_length=window, progress=False
        )
        fitting = sum(length <= window for length in lengths)
        assert (stats.cut, stats.truncated) == (0 < fitting < 6, fitting == 0)
        assert stats.left_out == 6 - max(1, fitting)
        num_labels = sum(int(sample.loss_mask.sum()) for (sample,) in beginnings[-1:])
        assert stats.labels_beyond == num_labels - stats.labels
        assert stats.share_beyond == (num_labels - stats.labels) / num_labels
        if fitting:
            assert data_hash(samples) == data_hash(beginnings[fitting - 1])
            assert ("1 conversations cut at a turn" in str(stats)) == (fitting < 6)


def test_on_request_a_long_row_ends_inside_an_answer() -> None:
    """By brute force: the whole conversation's sample, up to the last label inside the window."""
    contents = [part for i in range(4) for part in (f"question {i}", f"answer {i} " * (i + 1))]
    tokenizer, conversation = make_tokenizer(CHAT_TEMPLATE), make_conversation(*contents)
    (whole,), _ = build_samples([conversation], tokenizer, max_length=4096, progress=False)
    for window in range(int(whole.loss_mask.argmax()) + 1, len(whole.input_ids) + 2):
        (sample,), stats = build_samples(
            [conversation], tokenizer, max_length=window, cuts_answers=True, progress=False
        )
        size = int(whole.loss_mask[:window].nonzero()[0][-1]) + 1
        assert sample.input_ids.tolist() == whole.input_ids[:size].tolist()
        assert sample.loss_mask.tolist() == whole.loss_mask[:size].tolist()
        assert stats.labels_beyond == whole.loss_mask[window:].sum()


def test_a_turn_of_a_rewriting_template_is_left_out_alone_if_it_does_not_fit() -> None:
    thought = "<think>\n{}\n</think>\n\n"
    contents = (
        "a",
        thought.format("hm") + "one",
        "b",
        thought.format("hm " * 99) + "two",
        "c",
        thought.format("hm") + "3",
    )
    tokenizer = make_tokenizer(THINKING)
    whole, _ = build_samples(
        [make_conversation(*contents)], tokenizer, max_length=4096, progress=False
    )
    samples, stats = build_samples(
        [make_conversation(*contents)], tokenizer, max_length=128, progress=False
    )
    assert data_hash(samples) == data_hash([whole[0], whole[2]])
    assert (stats.cut, stats.truncated, stats.left_out) == (1, 0, 1)
    assert stats.labels_beyond == whole[1].loss_mask.sum()


def test_a_conversation_that_the_template_refuses_is_counted_with_its_reason() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}" + CHAT_TEMPLATE
    )
    systems = [make_conversation(question, "one", system="s") for question in "ab"]
    conversations = [
        make_conversation("a", "one"),
        *systems,
        make_conversation("c", "one", "d", "two"),
    ]
    samples, stats = build_samples(
        conversations, make_tokenizer(template), max_length=64, progress=False
    )
    assert len(samples) == 1
    assert stats.refusals == {"no system here": 2, "too many": 1}
    assert stats.examples["by the chat template (too many)"] == "c"


STRICT = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == "
    "0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHAT_TEMPLATE
)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, STRICT], ids=["any-order", "user-first"])
def test_an_answer_to_nothing_is_not_learned_and_counted(template: str) -> None:
    opening = {"role": "assistant", "content": "to nothing"}
    (whole, alone) = make_conversation("a", "one"), {"messages": [opening], "domain": "all"}
    whole["messages"].insert(0, opening)
    tokenizer = make_tokenizer(template)
    samples, stats = build_samples([whole, alone], tokenizer, max_length=64, progress=False)
    assert [tokenizer.decode(s.input_ids[s.loss_mask]) for s in samples] == ["one<|end|>"]
    assert ("to nothing" in tokenizer.decode(samples[0].input_ids)) == (template == CHAT_TEMPLATE)
    assert (stats.unprompted, stats.refusals.total(), stats.without_answer) == (2, 0, 0)
    assert "2 opening answers with no question before them" in str(stats)
    (prompt,) = held_out_prompts([whole, alone], tokenizer, num_prompts=4, max_length=64)
    assert tokenizer.decode(prompt.token_ids).endswith("a<|end|>\n<|assistant|>\n")


def test_a_held_out_conversation_that_the_template_refuses_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    twice = make_conversation("a", "one", "b", "two")
    del twice["messages"][1]
    tokenizer = make_tokenizer(STRICT)
    (prompt,) = held_out_prompts(
        [twice, make_conversation("c", "one")], tokenizer, num_prompts=4, max_length=64
    )
    assert "c<|end|>" in tokenizer.decode(prompt.token_ids)
    said = "held-out prompts: 1; left out: 1 refused by the chat template (roles must alternate)\n"
    assert capsys.readouterr().out == said
    with pytest.raises(
        ValueError, match=r"\b64\b.*max_prompt_tokens.*\b1\b.*\(roles must alternate\)"
    ):
        held_out_prompts([twice], tokenizer, num_prompts=4, max_length=64)


DATED = "Today is {{ strftime_now('%d %b %Y') }}.\n" + CHAT_TEMPLATE
LEAP_DAY = datetime.date(2024, 2, 29)


def test_a_template_that_writes_the_date_writes_the_given_day() -> None:
    tokenizer, conversations = make_tokenizer(DATED), [make_conversation("a", "one")]
    options = {"max_length": 64, "day": LEAP_DAY}
    samples, _ = build_samples(conversations, tokenizer, progress=False, **options)
    (prompt,) = held_out_prompts(conversations, tokenizer, num_prompts=1, **options)
    for ids in (samples[0].input_ids, prompt.token_ids):
        assert tokenizer.decode(ids).startswith("Today is 29 Feb 2024.")
    later, _ = build_samples(
        conversations,
        tokenizer,
        progress=False,
        max_length=64,
        day=LEAP_DAY + datetime.timedelta(days=1),
    )
    assert data_hash(samples) != data_hash(later)
    with pytest.raises(ValueError, match="date"):
        build_samples(conversations, tokenizer, progress=False, max_length=64)
    assert writes_date(tokenizer)
    assert not writes_date(make_tokenizer(CHAT_TEMPLATE))
    assert not writes_date(make_tokenizer(None))


@pytest.mark.parametrize(
    ("template", "content", "written"),
    [
        (THINKING, "[THINK]hm[/THINK]so", "<think>\nhm\n</think>\n\nso<|end|>"),
        (THINKING, "<seed:think>hm</seed:think>so", "<think>\nhm\n</think>\n\nso<|end|>"),
        (CHAT_TEMPLATE, "<think>hm</think>so", "<think>hm</think>so<|end|>"),
        (
            CHAT_TEMPLATE,
            "an answer about <think> and </think>",
            "an answer about <think> and </think><|end|>",
        ),
    ],
)
def test_reasoning_is_labelled_in_the_tags_of_the_target(
    template: str, content: str, written: str
) -> None:
    assert labelled(template, make_conversation("a", content)) == [written]


def test_nothing_left_to_train_on_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"0 labels.*\b2 .*assistant") as error:
        build_samples(
            [make_conversation("a"), make_conversation("b")],
            make_tokenizer(CHAT_TEMPLATE),
            max_length=64,
            progress=False,
        )
    assert "\n" not in str(error.value)


def test_conversations_need_a_chat_template() -> None:
    with pytest.raises(ValueError, match="`text`"):
        build_samples(
            [make_conversation("a", "one")], make_tokenizer(None), max_length=64, progress=False
        )


def test_samples_and_their_hash_do_not_depend_on_the_order_of_the_conversations() -> None:
    conversations = [make_conversation(f"question {i}", f"answer {i}") for i in range(10)]
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    forward, _ = build_samples(conversations, tokenizer, max_length=64, progress=False)
    backward, _ = build_samples(conversations[::-1], tokenizer, max_length=64, progress=False)
    shorter, _ = build_samples(
        conversations, tokenizer, max_length=len(forward[0].input_ids) - 1, progress=False
    )
    assert data_hash(forward) == data_hash(backward) != data_hash(shorter)


def test_held_out_prompts_end_where_the_last_answer_begins() -> None:
    conversation = make_conversation("a", "one", "b", "two")
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    (prompt,) = held_out_prompts([conversation], tokenizer, num_prompts=4, max_length=64)
    assert tokenizer.decode(prompt.token_ids).endswith(
        "one<|end|>\n<|user|>\nb<|end|>\n<|assistant|>\n"
    )
    with pytest.raises(ValueError, match=r"\b3\b.*max_prompt_tokens"):
        held_out_prompts([conversation], tokenizer, num_prompts=4, max_length=3)


def test_held_out_prompts_come_from_every_domain_alike() -> None:
    conversations = [make_conversation(f"question {i}", "x") for i in range(20)]
    for i, conversation in enumerate(conversations):
        conversation["domain"] = "rare" if i < 3 else "usual"
    prompts = held_out_prompts(
        conversations, make_tokenizer(CHAT_TEMPLATE), num_prompts=8, max_length=64
    )
    assert [prompt.domain for prompt in prompts] == ["rare", "usual"] * 3 + ["usual"] * 2


def test_held_out_prompts_are_the_same_whatever_the_order() -> None:
    conversations = [make_conversation(f"question {i}", "x") for i in range(20)]
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    some = held_out_prompts(conversations, tokenizer, num_prompts=5, max_length=64)
    assert some == held_out_prompts(conversations[::-1], tokenizer, num_prompts=5, max_length=64)
    assert len(some) == 5


def test_a_prompt_that_is_asked_again_is_held_out_once(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, options = make_tokenizer(CHAT_TEMPLATE), {"num_prompts": 64, "max_length": 64}
    several = [
        make_conversation(f"question {q}", f"answer {a}") for q in range(8) for a in range(8)
    ]
    several[-1]["domain"] = "another"
    once = held_out_prompts(several[::8], tokenizer, **options)
    prompts = held_out_prompts(several, tokenizer, **options)
    assert sorted(prompt.token_ids for prompt in prompts) == sorted(
        prompt.token_ids for prompt in once
    )
    assert "held-out prompts: 8; left out: 56 repeated\n" in capsys.readouterr().out
    # An answer follows from its prompt, so the interval is that of eight prompts, not of 64.
    accepted = {tuple(prompt.token_ids): float(20 + 9 * i) for i, prompt in enumerate(once)}
    found, wanted = (
        estimate_ratio(
            np.array([accepted[tuple(prompt.token_ids)] for prompt in some]),
            np.full(len(some), 60.0),
        )
        for some in (prompts, once)
    )
    assert found.interval() == pytest.approx(wanted.interval())
    rest = held_out_prompts(several, tokenizer, beside=prompts[:3], **options)
    assert sorted(p.token_ids for p in rest) == sorted(p.token_ids for p in prompts[3:])


def test_held_out_prompts_come_from_different_sessions_as_long_as_there_are_any() -> None:
    sessions = [
        make_conversation(*(f"{session} says {turn}" for turn in range(2 * num_turns)))
        for session in range(8)
        for num_turns in range(1, 7)
    ]
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    options = {"max_length": 512}

    def count_prompts(num_prompts: int) -> list[int]:
        prompts = held_out_prompts(sessions, tokenizer, num_prompts=num_prompts, **options)
        texts = [tokenizer.decode(prompt.token_ids) for prompt in prompts]
        return sorted(Counter(text[text.index(" says 0") - 1] for text in texts).values())

    assert count_prompts(8) == [1] * 8
    assert count_prompts(12) == [1] * 4 + [2] * 4
    assert count_prompts(99) == [6] * 8


def peak_of_tokenising(num_turns: int) -> int:
    """Peak memory in bytes, as Python counts it, while some long conversations are tokenised."""
    words = " ".join(f"word{i}" for i in range(40))
    conversations = [
        make_conversation(*(f"{i} {k} {words}" for k in range(2 * num_turns))) for i in range(6)
    ]
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    tracemalloc.start()
    try:
        build_samples(conversations, tokenizer, max_length=512, progress=False)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_grows_with_the_text_and_not_with_the_square_of_the_turns() -> None:
    peak_of_tokenising(2)  # what is imported and cached once
    assert peak_of_tokenising(80) < 2.2 * peak_of_tokenising(40)


def test_a_rendered_text_has_one_first_token_and_is_counted() -> None:
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    template = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    tokenizer.backend_tokenizer.post_processor = template
    texts = ["<|bos|>once <|end|>", "plain words"]
    conversations = [
        {"messages": [{"role": "text", "content": text}], "domain": "all"} for text in texts
    ]
    samples, stats = build_samples(conversations, tokenizer, max_length=64, progress=False)
    for sample in samples:
        assert sample.input_ids.tolist().count(tokenizer.bos_token_id) == 1
        assert sample.input_ids[0] == tokenizer.bos_token_id
    assert stats.marked_texts == 1
    assert "1 plain texts with special tokens" in str(stats)


LONG_CHATS = """
import sys
from make_tokenizers import make_byte_tokenizer
from redraft.distill.data.samples import build_samples
from redraft.distill.train.loop import peak_rss_mib
tokenizer = make_byte_tokenizer()
tokenizer.chat_template = sys.argv[1]
def chat(i, turns):
    words = " ".join(f"word{n}" for n in range(64))
    said = [{"role": role, "content": f"{i} {k} {words}"} for k in range(turns) for role in ("user", "assistant")]
    return {"messages": said, "domain": "all"}
build_samples([chat(0, 2)], tokenizer, max_length=512, progress=False)
chats = [chat(i, 60) for i in range(160)]
assert sum(len(m["content"]) for c in chats for m in c["messages"]) > 8e6
before = peak_rss_mib()
build_samples(chats, tokenizer, max_length=512, progress=False)
print(peak_rss_mib() - before)
"""


@pytest.mark.slow
def test_160_conversations_of_60_turns_take_at_most_150_mib() -> None:
    environment = os.environ | {
        "PYTHONPATH": str(Path("tests/helpers").absolute()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-c", LONG_CHATS, CHAT_TEMPLATE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 150


SWITCHED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def test_samples_and_prompts_carry_the_thinking_mode_of_their_conversation() -> None:
    tokenizer = load_tokenizer("tests/assets/tiny-target")
    tokenizer.chat_template = SWITCHED
    conversations: list[Conversation] = [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": "so"},
            ],
            "domain": "agents",
            "arguments": {"enable_thinking": number % 2 == 0},
        }
        for number in range(6)
    ]
    samples, _ = build_samples(conversations, tokenizer, max_length=99, progress=False)
    assert sorted(sample.arguments for sample in samples) == [
        *['{"enable_thinking": false}'] * 3,
        *['{"enable_thinking": true}'] * 3,
    ]
    prompts = held_out_prompts(conversations, tokenizer, num_prompts=6, max_length=99)
    for prompt in prompts:
        is_off = tokenizer.decode(prompt.token_ids).endswith("<think></think>")
        assert prompt.domain == ("agents, no thinking" if is_off else "agents, thinking")
    assert len({prompt.domain for prompt in prompts}) == 2
    # Of one mode, domains stay as they are.
    ours = held_out_prompts(conversations[::2], tokenizer, num_prompts=6, max_length=99)
    assert {prompt.domain for prompt in ours} == {"agents"}
    # The usual arguments are those of conversations that record none.
    conversations[0].pop("arguments")
    conversations[2]["arguments"] = {}
    usual = held_out_prompts(
        conversations, tokenizer, num_prompts=6, max_length=99, usual={"enable_thinking": False}
    )
    assert Counter(prompt.domain for prompt in usual) == {
        "agents, no thinking": 4,
        "agents, thinking": 1,
        "agents, default mode": 1,
    }
