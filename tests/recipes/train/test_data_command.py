"""`redraft data`: what a draft would learn from a data set, shown without training."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trl_templates import make_tokenizer

from redraft.distill.data.messages import conversation_hash
from redraft.distill.data.samples import Sample, build_samples
from redraft.recipes.cli.run import dispatch
from redraft.recipes.data.show import (
    GREEN,
    PLAIN,
    choose_samples,
    describe_held_out,
    describe_vocabulary,
    find_kinds,
    held_out_part,
    measure_answers,
    paint,
    possible_kinds,
)

TARGET = "tests/assets/tiny-target"


def make_sample(ids: list[int], mask: list[bool] | None = None, domain: str = "all") -> Sample:
    return Sample(
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask or [True] * len(ids), np.bool_),
        conversation="",
        domain=domain,
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """40 good rows of two domains, one of them a copy, and four that cannot be learned from."""
    rows: list[dict[str, Any]] = []
    for i in range(40):
        chat = [
            {"role": "user", "content": f"question {i}"},
            {"role": "assistant", "content": f"answer {i}"},
        ]
        rows.append({"messages": chat * (1 + i % 2), "domain": ("chat", "law")[i % 4 == 0]})
    bad = [
        {"messages": []},
        {"title": "none"},
        {"conversations": [{"from": "gpt", "value": "an opening"}]},
    ]
    path = tmp_path / "data.json"
    path.write_text(json.dumps([*rows, {**rows[0]}, *bad, {"prompt": "a question only"}]))
    return path


def test_the_summary_counts_what_is_learned_and_what_is_not(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        dispatch(
            [
                "data",
                str(source),
                "--target",
                TARGET,
                "--held-out",
                "0.3",
                "--sequence-length",
                "64",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "data.json: 45 rows read, 43 used, 2 skipped: 1 without messages (first: row 42), 1 "
        "without a" in out
    )
    first, contents, turns, tokens = out.splitlines()[2:6]
    num_train, num_held_out = (int(first.split(": ")[1].split(", ")[i].split()[0]) for i in (0, 1))
    assert num_train + num_held_out == 43 - (out.count(" 1 repeated conversations"))
    assert num_held_out > 2
    assert contents.split(", ") == [
        "  20 with several turns",
        "0 with a system prompt",
        "0 with reasoning",
        "0 with tool calls",
        "0 of plain text",
    ]
    assert turns.startswith("turns: ")
    assert " of them labels" in tokens
    assert "domains: 3\n  chat: 30 (69.8%)\n  law: 11 (25.6%)\n  all: 2 (4.7%)" in out
    assert "vocabulary: 4,096 ids; smaller than any draft vocabulary" in out
    assert out.count("--- sample ") == 3
    assert "<|assistant|>\n「answer " in out
    assert "\x1b" not in out


def test_everything_cut_or_refused_is_told_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    chats = [
        [user("long"), say("one"), user("b"), say("two " * 99), user("c"), say("three")],
        [user("longer"), say("word " * 99)],
        [user("too long " * 99), say("one")],
        [user("reasoned"), say("so", reasoning="hm")],
        [user("called"), say("", tool_calls=[call]), {"role": "tool", "content": "5"}, say("5")],
        [user("question only")],
        [say("to nothing"), user("a"), say("one")],
    ]
    # the same conversations in both parts, told apart by a word
    rows = [
        {"messages": [{**m, "content": f"{m['content']} {i}"} for m in chat]}
        for i in range(12)
        for chat in chats
    ]
    rows += [{"prompt": f"answered {i}", "completion": "one", "cut": True} for i in range(9)]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(rows))
    assert (
        dispatch(
            ["data", str(path), "--target", TARGET, "--held-out", "0.5", "--sequence-length", "96"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "  12 with several turns, 0 with a system prompt, 12 with reasoning, 12 with tool calls, 0 "
        "of plain text" in out
    )
    training, held_out = (
        out.split("held out: ")[0],
        out.split("held out: ")[1].split("duplicates: ")[0],
    )
    reasons = {
        "conversations without an assistant turn": 12,
        "opening answers with no question before them": 12,
        "answers not learned, with reasoning, but the chat template has no tags for it": 12,
        "answers not learned, with tool calls that the chat template leaves out": 12,
        "conversations with no answer inside the window": 12,
        "conversations cut at a turn to fit the window": 12,
        "answers cut at the window": 12,
        "later answers beyond the window left out": 24,
    }
    for reason, total in reasons.items():
        counts = [re.search(rf"  (\d+) {reason}", part) for part in (training, held_out)]
        assert [bool(count) for count in counts] == [True, True], reason
        assert sum(int(count[1]) for count in counts if count) == total, reason
    assert "conversations with an answer that the server truncated" in training
    arguments = ["data", str(path), "--target", TARGET, "--held-out", "0.5"]
    assert dispatch([*arguments, "--sequence-length", "96", "--cut-answers"]) == 0
    assert "cut at a turn" not in capsys.readouterr().out


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def say(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def test_a_held_out_part_with_nothing_to_judge_on_is_no_error(small_tokenizer: Any) -> None:
    """All of it may be refused by the template, or too long."""
    samples, reason = held_out_part(
        [], functools.partial(build_samples, tokenizer=small_tokenizer, max_length=64)
    )
    assert samples == []
    assert list(describe_held_out(reason)) == [
        "held out: no usable text (0 conversations: 0 samples, 0 tokens (0 labels))"
    ]


def test_strict_ends_at_the_first_row_that_cannot_be_used(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["data", str(source), "--target", TARGET, "--strict"]) == 2
    assert "row 42: " in capsys.readouterr().err


def test_labels_are_green_on_a_terminal_unless_told_otherwise(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    command = ["data", str(source), "--target", TARGET, "--held-out", "0.3"]
    assert dispatch(command) == 0
    assert f"{GREEN}answer " in capsys.readouterr().out
    assert dispatch([*command, "--no-color"]) == 0
    assert GREEN not in capsys.readouterr().out


def test_the_painted_labels_are_the_loss_mask(small_tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "x\x1b[2Jy"}] * 2
    (sample,), _ = build_samples(
        [{"messages": chat, "domain": "all"}], small_tokenizer, max_length=256, progress=False
    )
    shown = paint(sample, small_tokenizer, 256, in_color=True)
    assert [part.split(PLAIN)[0] for part in shown.split(GREEN)[1:]] == ["x�[2Jy<|end|>"] * 2
    plain = paint(sample, small_tokenizer, 256, in_color=False)
    assert plain == shown.replace(GREEN, "「").replace(PLAIN, "」")
    assert paint(sample, small_tokenizer, 2, in_color=False).endswith(" ...")
    assert measure_answers(sample) == [int(sample.loss_mask.sum()) // 2] * 2


def test_coverage_is_judged_on_held_out_text() -> None:
    """Training shows ids 0 to 4,999 once, the upper ones twice: 4,096 ids keep 904 to 4,999."""
    train = [make_sample(list(range(5000))), make_sample(list(range(904, 5000)))]
    held_out = [
        make_sample(
            [0, 903, 904, 4999, 9000, 1000, 7], [True, True, True, True, True, False, False]
        )
    ]
    first, small, large = describe_vocabulary(train, held_out, 9192)
    assert first.startswith("draft vocabulary, of the target's 9,192 ids")
    assert small.strip() == f"4,096  40.00% of held-out text, {8192 / 9096:.2%} of training text"
    assert large.strip() == "8,192  80.00% of held-out text, 100.00% of training text"


def test_samples_come_from_every_domain() -> None:
    samples = [make_sample([1, 2], domain=domain) for domain in ("a", "a", "a", "b")]
    chosen = choose_samples(samples, {"": {"plain"}}, lambda _: {"plain"}, 3)
    assert [sample.domain for sample in chosen] == ["a", "b", "a"]


def test_samples_show_the_kinds_of_turn_among_the_labels() -> None:
    """Of a template that drops thoughts, each turn has a sample of its own.

    And a call follows a page of tools.
    """
    tokenizer = make_tokenizer("qwen3")
    end_ids = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    call = {"type": "function", "function": {"name": "weigh", "arguments": {"thing": "cup"}}}
    tool = {"type": "function", "function": {"name": "weigh", "description": "Weighs. " * 200}}
    conversations: list[Any] = [
        {
            "messages": [
                user("a"),
                say("one"),
                user("b"),
                say("two", reasoning="hm hm"),
                user("c"),
                say("three"),
            ]
        },
        {"messages": [user("d"), say("", tool_calls=[call])], "tools": [tool]},
        {"messages": [user("e"), say("half")], "cut": True},
    ]
    conversations = [{**conversation, "domain": "all"} for conversation in conversations]
    samples, _ = build_samples(
        conversations, tokenizer, max_length=4096, ends=end_ids, progress=False
    )
    by_hash = {conversation_hash(c["messages"]): c for c in conversations}
    possible = {key: possible_kinds(conversation) for key, conversation in by_hash.items()}

    def kinds_of(sample: Sample) -> set[str]:
        return find_kinds(sample, by_hash[sample.conversation], tokenizer, end_ids)

    chosen = choose_samples(samples, possible, kinds_of, 1)
    assert [kinds_of(sample) for sample in chosen] == [{"cut"}, {"tools"}, {"reasoning"}, {"plain"}]
    half, called, thought, plain = (
        paint(sample, tokenizer, 160, in_color=False) for sample in chosen
    )
    assert half.endswith("half」")
    assert '{"name": "weigh", "arguments": {"thing": "cup"}}' in called.split("「")[1]
    assert " ... " in called
    assert "hm hm" in thought.split("「")[1]
    assert "hm" not in plain


def test_every_kind_of_turn_is_shown_and_all_counts_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    rows: list[dict[str, Any]] = [
        {"prompt": f"plain {i}", "completion": f"answer {i}", "id": i} for i in range(40)
    ]
    rows += [{"prompt": f"cut {i}", "completion": f"half {i}", "cut": True} for i in range(4)]
    rows += [
        {"messages": [user(f"call {i}"), say("", tool_calls=[call]), user("b"), say(f"so {i}")]}
        for i in range(4)
    ]
    rows += [{"text": f"a document of words {i}"} for i in range(4)]
    rows += [{"prompt": "a", "completion": "b", "label": False}, {"prompt": "a", "image": "x.jpg"}]
    source, report = tmp_path / "data.json", tmp_path / "report.json"
    source.write_text(json.dumps(rows))
    arguments = [
        "--target",
        TARGET,
        "--held-out",
        "0.3",
        "--num-samples",
        "1",
        "--json",
        str(report),
    ]
    assert dispatch(["data", str(source), *arguments]) == 0
    out = capsys.readouterr().out
    for kind in ("plain", "cut", "text"):
        assert re.search(rf"--- sample \d, {kind}, domain all", out), kind
    assert "columns read: completion, cut, messages, prompt, text; not read: id" in out
    assert re.search(r"ends of turns: <\|end\|> \(id 2\) \d+, none, as cut \d", out)
    assert "template arguments: none" in out
    assert (
        "not trained on: an answer with tool calls that the chat template leaves out, e.g. the answer to 'call"
        in out
    )
    written = json.loads(report.read_text())
    assert written["columns"]["unread"] == {"id": 40}
    assert {reason: skipped["rows"] for reason, skipped in written["skipped"].items()} == {
        "with a label of false": 1,
        "with images or audio, which are not read": 1,
    }
    assert written["training"]["ends"].keys() == {"<|end|>", ""}
    assert written["training"]["refused_answers"].keys() == {
        "with tool calls that the chat template leaves out"
    }
    assert written["template_arguments"] == {}
    assert written["end_ids"] == [2]
    assert [sample["kinds"] for sample in written["samples"]] == [["cut"], ["plain"], ["text"]]
    assert all(sample["text"] in out for sample in written["samples"])
