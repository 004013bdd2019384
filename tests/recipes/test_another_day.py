"""A target whose chat template writes today's date, on two days.

The clock is set, nothing else is replaced.

Nothing else reads the clock: a template that writes the date is not rendered without a day.
"""

from __future__ import annotations

import datetime
import json
import shutil
import types
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import LlamaForCausalLM
from transformers.utils import chat_template_utils

from benchmarks.demo import fleet, online
from benchmarks.soak.stage import make_draft_and_prompts
from redraft.distill.data import day as template_day
from redraft.distill.data.rendering import Renderer
from redraft.distill.doctor.in_engine import ask_fallback
from redraft.distill.run.inputs import load_data, target_signal
from redraft.distill.run.start import start
from redraft.distill.run.training_run import Run
from redraft.distill.train.loop import LoadedData
from redraft.distill.train.run_config import Data, Loop, Prove, Signal, make_config
from redraft.distill.train.run_folder import RunFolder
from redraft.files.checkpoint import load_tokenizer
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.families import eagle1
from redraft.heads.target import LoadedTarget
from redraft.recipes.cli.run import dispatch

FIRST, SECOND = datetime.date(2024, 2, 29), datetime.date(2024, 3, 1)


def set_day(monkeypatch: pytest.MonkeyPatch, day: datetime.date) -> None:
    """Let redraft's one reader of the date see `day`, and the global of transformers' templates."""

    class Date(datetime.date):
        @classmethod
        def today(cls) -> Date:
            return cls(day.year, day.month, day.day)

    class Now(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Now:
            return cls(day.year, day.month, day.day, tzinfo=tz)

    clock = types.SimpleNamespace(**{**vars(datetime), "date": Date, "datetime": Now})
    monkeypatch.setattr(template_day, "datetime", clock)
    monkeypatch.setattr(chat_template_utils, "datetime", Now)


@pytest.fixture
def target(random_target: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(random_target, tmp_path / "target"))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "Today is {{ strftime_now('%d %b %Y') }}.\n" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "chat.jsonl"
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Training:
    """The first steps of a training recipe, in one folder."""

    def __init__(self, target: Path, source: str, folder: Path) -> None:
        self.target, self.source, self.folder = target, source, folder
        self.loop = Loop(sequence_length=128, steps=1, batch_size=1)

    def start(self) -> tuple[RunFolder, LoadedData]:
        run = RunFolder.open(
            self.folder, {"data": self.source}, Accelerator(cpu=True), overwrite=False
        )
        data = Data(source=self.source, held_out=0.3, num_prompts=4)
        return run, load_data(data, TargetFolder.open(self.target), self.loop, run)

    def read_cache(self, data: LoadedData) -> None:
        files = TargetFolder.open(self.target)
        target = LoadedTarget(files=files, model=LlamaForCausalLM.from_pretrained(self.target))
        signal = Signal(kind="cache", k=4, cache=self.folder.parent / "cache")
        target_signal(signal, target, data, self.folder, Accelerator(cpu=True))


def test_a_resumed_run_trains_on_the_same_tokens_and_reads_its_cache(
    target: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(target, source, tmp_path / "run")
    set_day(monkeypatch, FIRST)
    _, before = training.start()
    training.read_cache(before)
    set_day(monkeypatch, SECOND)
    run, after = training.start()
    assert run.date == after.date == FIRST
    assert after.hash == before.hash
    assert after.prompts == before.prompts
    training.read_cache(after)

    _, another = Training(target, source, tmp_path / "another").start()
    assert another.hash != before.hash  # the date does stand in the tokens
    with pytest.raises(ValueError, match=r"written with data .* but this run has"):
        training.read_cache(another)


def test_the_doctor_takes_the_day_of_the_run_whenever_the_draft_is_published(
    target: Path,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    family = find_family("eagle1")
    cfg = replace(
        make_config(family),
        target=str(target),
        head=eagle1.Config(num_steps=2),
        data=Data(source=source, held_out=0.3, num_prompts=3, max_prompt_tokens=64),
        loop=Loop(sequence_length=64, batch_size=2),
        prove=Prove(num_speculative_tokens=2, max_tokens=4),
        output=tmp_path / "run",
    )
    set_day(monkeypatch, FIRST)
    Run(family, cfg)
    set_day(monkeypatch, SECOND)  # killed, and resumed after midnight
    run = Run(family, cfg)
    draft = run.publish(start(run))
    published = json.loads((draft / "provenance.json").read_text())["forecast"]
    assert published["dtype"] == "float32", "the doctor's engine computes in it too"
    set_day(monkeypatch, SECOND + datetime.timedelta(days=30))
    assert (
        dispatch(["doctor", "--target", str(target), "--draft", str(draft), "--engine", "none"])
        == 0
    )
    assert "Everything fits." in capsys.readouterr().out


def test_a_date_given_to_a_resumed_run_is_that_of_the_run_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(folder: Path, date: str | None) -> datetime.date:
        config = {"data": asdict(Data(date=date))}
        day = template_day.choose_day(date)
        run = RunFolder.open(folder, config, Accelerator(cpu=True), overwrite=False, date=day)
        (folder / "checkpoints").mkdir(exist_ok=True)  # work that would be lost
        return run.date

    for first, then in (
        (None, None),
        (None, str(FIRST)),
        (str(FIRST), None),
        (str(FIRST), str(FIRST)),
    ):
        folder = tmp_path / f"{first}-{then}"
        set_day(monkeypatch, FIRST)
        start(folder, first)
        set_day(monkeypatch, SECOND)
        assert start(folder, then) == FIRST
        with pytest.raises(ValueError, match=rf"--data\.date was '{FIRST}', but is now '{SECOND}'"):
            start(folder, str(SECOND))


def test_a_baseline_of_another_day_is_of_the_same_prompts(
    target: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(output: str, *flags: str) -> dict[str, Any]:
        given = [
            "--target",
            str(target),
            "--prompts",
            source,
            "--draft",
            f"copy={target}",
            "--max-tokens",
            "4",
        ]
        few = [
            "--num-prompts",
            "4",
            "--num-speculative-tokens",
            "1",
            "--temperature",
            "0",
            "--no-engine",
        ]
        assert dispatch(["eval", *given, *few, "--output", str(tmp_path / output), *flags]) == 0
        report: dict[str, Any] = json.loads((tmp_path / output / "report.json").read_text())
        return report

    set_day(monkeypatch, FIRST)
    before = evaluated("before")
    set_day(monkeypatch, SECOND)
    after = evaluated("after", "--baseline", str(tmp_path / "before/report.json"))
    assert after["settings"]["date"] == before["settings"]["date"] == FIRST.isoformat()
    assert after["prompts"] == before["prompts"]
    alone = evaluated("alone")
    assert alone["settings"]["date"] == SECOND.isoformat()
    assert alone["prompts"] != before["prompts"]


def test_a_template_with_a_date_is_not_rendered_without_one(target: Path) -> None:
    with pytest.raises(ValueError, match="date"):
        Renderer(load_tokenizer(str(target)), {})


@pytest.mark.slow
def test_the_prompts_of_a_soak_and_the_data_of_a_demo_are_of_one_day(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_day(monkeypatch, SECOND)
    _, prompts = make_draft_and_prompts(target, tmp_path, FIRST)
    tokenizer = load_tokenizer(str(target))
    assert all(
        "Today is 29 Feb 2024." in tokenizer.decode(prompt.token_ids) for prompt in prompts[:8]
    )

    cfg = online.Config(target=target, output=tmp_path / "demo")
    assert fleet.begin_report(cfg, FIRST)["date"] == "2024-02-29"


def test_a_demo_continued_on_another_day_keeps_its_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_day(monkeypatch, FIRST)
    assert template_day.keep_day(tmp_path / "date") == FIRST
    set_day(monkeypatch, SECOND)
    assert template_day.keep_day(tmp_path / "date") == FIRST


def test_the_doctors_own_questions_are_of_the_day_of_training(target: Path) -> None:
    tokenizer = load_tokenizer(str(target))
    (ids,) = ask_fallback(tokenizer, 1, FIRST)
    assert tokenizer.decode(ids).startswith("Today is 29 Feb 2024.")
