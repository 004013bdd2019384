"""Tokenised data on disk.

The samples that memory would hold, and made again if anything behind them changed.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast

from redraft.distill.data import packing, samples, tokens
from redraft.distill.data.conversations import load_conversations, remove_overlap, split_held_out
from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.processes import map_in_processes
from redraft.distill.data.samples import (
    Sample,
    SampleStats,
    build_samples,
    data_hash,
)
from redraft.distill.data.tokens import Content, MappedSamples, keep_tokens, read_tokens
from redraft.distill.data.vocabulary import frequent_ids
from redraft.distill.run.inputs import load_data
from redraft.distill.train.loop import LoadedData
from redraft.distill.train.run_config import Data, Loop
from redraft.distill.train.run_folder import RunFolder
from redraft.files.checkpoint import load_tokenizer
from redraft.files.target_folder import TargetFolder

DAY = datetime.date(2024, 2, 29)


def write_rows(path: Path, num: int = 40) -> Path:
    rows: list[dict[str, Any]] = [
        {
            "prompt": f"question {i}",
            "completion": f"answer {i} " * (i % 5 + 1),
            "domain": "ab"[i % 2],
        }
        for i in range(num)
    ]
    rows += [{"text": f"plain text {i} " * 30} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class World:
    """A target, its data, and the folder of a run."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.target, self.folder, self.source = target, folder, write_rows(folder / "chat.jsonl")
        self.opened = TargetFolder.open(target)
        self.tokenizer = self.opened.tokenizer
        self.day, self.length, self.cache = DAY, 96, None

    def load(self) -> LoadedData:
        run = RunFolder(self.folder / "run", Accelerator(cpu=True))
        run.date = self.day
        data = Data(source=str(self.source), held_out=0.3, num_prompts=3, cache=self.cache)
        return load_data(data, self.opened, Loop(sequence_length=self.length), run)

    def folders(self) -> list[Path]:
        return sorted((self.cache or self.folder / "run/tokens").iterdir())


@pytest.fixture
def world(random_target: Path, tmp_path: Path) -> World:
    return World(random_target, tmp_path)


def equal(one: Sample, other: Sample) -> bool:
    arrays = zip((one.input_ids, one.loss_mask), (other.input_ids, other.loss_mask), strict=True)
    same = all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in arrays)
    return same and (one.conversation, one.domain) == (other.conversation, other.domain)


def test_what_is_mapped_is_what_was_built(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    data = world.load()
    train, held_out = split_held_out(load_conversations(str(world.source)), 0.3)
    train, _ = remove_overlap(train, held_out)
    for packed, conversations in ((data.train, train), (data.held_out, held_out)):
        built, _ = build_samples(conversations, world.tokenizer, max_length=96, progress=False)
        assert isinstance(packed.samples, MappedSamples)
        assert len(packed.samples) == len(built)
        assert all(equal(one, other) for one, other in zip(packed.samples, built, strict=True))
        assert packed.rows == PackedDataset(built, sequence_length=96).rows
        assert equal(packed.samples[-1], built[-1])
        assert all(
            equal(one, other) for one, other in zip(packed.samples[1:3], built[1:3], strict=True)
        )
    size = len(world.tokenizer)
    monkeypatch.setattr(tokens, "BLOCK", 7)
    mapped, listed = (
        frequent_ids(some, 20, size) for some in (data.train.samples, list(data.train.samples))
    )
    assert mapped is not None
    assert listed is not None
    assert mapped.tolist() == listed.tolist()
    assert data.hash == data_hash(
        build_samples(train, world.tokenizer, max_length=96, progress=False)[0]
    )


def test_domains_may_be_as_many_as_hosts(tmp_path: Path) -> None:
    """As many as 16 bits cannot number."""
    one = Sample(
        input_ids=np.arange(2, dtype=np.int32),
        loss_mask=np.arange(2) > 0,
        conversation="00" * 32,
        domain="",
    )
    hosts = [f"host{number}" for number in range(70_000)]
    content = Content(
        train=(replace(one, domain=host) for host in hosts),
        held_out=[one],
        prompts=list,
        stats=SampleStats(),
        say=list,
    )
    found = read_tokens(keep_tokens(tmp_path, {}, lambda: content, shared=False))
    assert [found.train[number].domain for number in range(0, 70_000, 999)] == hosts[::999]
    assert found.held_out[0].domain == ""


def test_a_resumed_run_reads_what_was_written(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = world.load()
    said = capsys.readouterr().out
    monkeypatch.setattr(samples, "_chunk_samples", None)  # nothing is tokenised
    after = world.load()
    assert capsys.readouterr().out == said.replace(said[: said.index("training:")], "")
    assert (after.hash, after.prompts, after.stats) == (before.hash, before.prompts, before.stats)
    assert all(
        equal(one, other)
        for one, other in zip(after.train.samples, before.train.samples, strict=True)
    )


THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>{% "
    "endif %}{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
    "{% if enable_thinking is false %}<think></think>{% else %}<think>\n{% endif %}{% endif %}"
)


def test_template_arguments_and_refused_answers_survive_and_prompts_begin_with_the_arguments(
    world: World,
) -> None:
    world.tokenizer.chat_template = THINKING
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    with world.source.open("a") as file:
        for i in range(9):
            called = {"role": "assistant", "content": "", "tool_calls": [call]}
            file.write(
                json.dumps({"messages": [{"role": "user", "content": f"call {i}"}, called]}) + "\n"
            )
    before, after = world.load(), world.load()
    assert after.stats == before.stats
    assert before.stats.refused_answers.keys() == {
        "with tool calls that the chat template leaves out"
    }
    assert before.stats.chosen_arguments() == {"enable_thinking": False}
    for prompt in before.prompts:
        assert world.tokenizer.decode(prompt.token_ids).endswith("<|assistant|>\n<think></think>")


def test_the_prompts_of_a_training_keep_the_thinking_modes_of_their_rows(world: World) -> None:
    world.tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n"
        "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    )
    rows = [
        {
            "prompt": f"question {i}",
            "completion": f"answer {i}",
            "domain": "ab"[i % 2],
            "chat_template_kwargs": {"enable_thinking": bool(i % 2)},
        }
        for i in range(40)
    ]
    world.source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = world.load().prompts
    assert {prompt.domain for prompt in prompts} == {"a, no thinking", "b, thinking"}
    for prompt in prompts:
        is_off = world.tokenizer.decode(prompt.token_ids).endswith("<think></think>")
        assert is_off == (prompt.domain == "a, no thinking")


def other_template(world: World) -> None:
    world.tokenizer.chat_template = world.tokenizer.chat_template.replace("assistant", "helper")


def other_tokenizer(world: World) -> None:
    world.tokenizer.add_tokens(["answer"])


def other_rows(world: World) -> None:
    stamp = world.source.stat()
    world.source.write_text(world.source.read_text().replace("question 7", "question 8"))
    assert world.source.stat().st_size == stamp.st_size


def other_length(world: World) -> None:
    world.length = 64


CHANGES: dict[str, Callable[[World], None]] = {
    "the chat template": other_template,
    "the tokenizer": other_tokenizer,
    "the data": other_rows,
    "the settings": other_length,
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_is_noticed_and_named(
    name: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.load()
    before = world.folders()
    CHANGES[name](world)
    capsys.readouterr()
    data = world.load()
    assert f"the data is tokenised again, because this changed: {name}\n" in capsys.readouterr().out
    assert len(world.folders()) == 1
    assert world.folders() != before
    train, held_out = split_held_out(load_conversations(str(world.source)), 0.3)
    train, _ = remove_overlap(train, held_out)
    built, _ = build_samples(train, world.tokenizer, max_length=world.length, progress=False)
    assert data.hash == data_hash(built)


def test_a_date_counts_if_the_template_writes_it(world: World) -> None:
    world.load()
    before = world.folders()
    world.day = DAY + datetime.timedelta(days=1)
    world.load()
    assert world.folders() == before
    world.tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + world.tokenizer.chat_template
    first = world.load()
    world.day = DAY
    assert world.load().hash != first.hash


def test_runs_that_share_a_folder_keep_each_others_tokens(world: World, tmp_path: Path) -> None:
    world.cache = tmp_path / "shared"
    first = world.load()
    other_length(world)
    world.load()
    world.length = 96
    assert world.load().hash == first.hash
    assert len(world.folders()) == 2


def test_tokens_that_are_not_whole_are_made_again(world: World) -> None:
    before = world.load()
    (folder,) = world.folders()
    labels = folder / "train.labels"
    labels.write_bytes(labels.read_bytes()[:-1])
    assert world.load().hash == before.hash
    (folder / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match=re.escape(str(folder))):
        world.load()


def test_the_order_of_an_epoch_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Sample(
        input_ids=np.arange(8, dtype=np.int32),
        loss_mask=np.ones(8, bool),
        conversation="",
        domain="",
    )
    data, drawn = PackedDataset([one] * 24, sequence_length=8), list[object]()
    make = np.random.default_rng
    monkeypatch.setattr(
        packing.np.random, "default_rng", lambda seed: drawn.append(seed) or make(seed)
    )
    for index in range(7):
        data.batch(index, batch_size=8)
    assert drawn == [[0, 0], [0, 1], [0, 2]]


def spell(tool: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tool(text)["input_ids"]
    return ids


@pytest.mark.slow  # two processes that import transformers
def test_chunks_in_processes_come_in_order(random_target: Path) -> None:
    texts = [f"answer {i} " * (i % 7) for i in range(64)]
    tokenizer = load_tokenizer(str(random_target))
    make = functools.partial(load_tokenizer, str(random_target))
    assert list(map_in_processes(spell, make, texts, cores=2)) == [
        spell(tokenizer, text) for text in texts
    ]


def test_runs_that_share_a_cache_tokenise_once(tmp_path: Path) -> None:
    made: list[str] = []
    folders: list[Path] = []
    one = Sample(
        input_ids=np.arange(2, dtype=np.int32),
        loss_mask=np.arange(2) > 0,
        conversation="00" * 32,
        domain="",
    )

    def keep(name: str, before: Callable[[], None] = lambda: None) -> None:
        def make() -> Content:
            made.append(name)
            before()
            return Content(train=[one], held_out=[one], prompts=list, stats=SampleStats(), say=list)

        folders.append(keep_tokens(tmp_path, {"data": 1}, make, shared=True))

    other = threading.Thread(target=keep, args=("other",))
    keep("one", other.start)  # the other begins while this one tokenises
    other.join()
    assert made == ["one"]
    assert folders == [folders[0]] * 2
