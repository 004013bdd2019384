"""A target whose chat template writes today's date, on two days: the clock is set, nothing else is replaced."""

from __future__ import annotations

import datetime
import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import LlamaForCausalLM
from transformers.utils import chat_template_utils

from redraft.distill.data import rendering
from redraft.distill.inputs import Data, Signal, load_data, target_signal
from redraft.distill.prove import Prove, publish_draft
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train import run as run_module
from redraft.distill.train.loop import LoadedData, Loop
from redraft.distill.train.run import Run
from redraft.eval.forecast.greedy import Forecast, forecast, greedy_continuations
from redraft.heads.families import eagle1
from redraft.heads.files.checkpoint import load_tokenizer
from redraft.heads.target import Target
from redraft.recipes.cli import dispatch
from redraft.recipes.decide import evaluate

FIRST, SECOND = datetime.date(2024, 2, 29), datetime.date(2024, 3, 1)


def set_day(monkeypatch: pytest.MonkeyPatch, day: datetime.date) -> None:
    """Let every reader of the date see `day`, the global of transformers' templates too."""

    class Date(datetime.date):
        @classmethod
        def today(cls) -> Date:
            return cls(day.year, day.month, day.day)

    class Now(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Now:
            return cls(day.year, day.month, day.day, tzinfo=tz)

    clock = types.SimpleNamespace(**{**vars(datetime), "date": Date, "datetime": Now})
    for module in (run_module, rendering, evaluate):
        monkeypatch.setattr(module, "datetime", clock)
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

    def start(self, *, resume: bool = False) -> tuple[Run, LoadedData]:
        run = Run.open(self.folder, {"data": self.source}, Accelerator(cpu=True), resume=resume, overwrite=False)
        tokenizer = load_tokenizer(str(self.target))
        data = Data(source=self.source, held_out=0.3, num_prompts=4)
        return run, load_data(data, str(self.target), tokenizer, self.loop, run.date)

    def read_cache(self, data: LoadedData) -> None:
        model = LlamaForCausalLM.from_pretrained(self.target)
        signal = Signal(kind="cache", k=4, cache=self.folder.parent / "cache")
        target_signal(signal, model, str(self.target), data, self.folder, Accelerator(cpu=True))


def test_a_resumed_run_trains_on_the_same_tokens_and_reads_its_cache(
    target: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(target, source, tmp_path / "run")
    set_day(monkeypatch, FIRST)
    _, before = training.start()
    training.read_cache(before)
    set_day(monkeypatch, SECOND)
    run, after = training.start(resume=True)
    assert run.date == after.date == FIRST
    assert after.hash == before.hash
    assert after.prompts == before.prompts
    training.read_cache(after)

    _, another = Training(target, source, tmp_path / "another").start()
    assert another.hash != before.hash  # the date does stand in the tokens
    with pytest.raises(ValueError, match="other"):
        training.read_cache(another)


def test_the_doctor_takes_the_day_of_the_run_whenever_the_draft_is_published(
    target: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(target, source, tmp_path / "run")
    set_day(monkeypatch, FIRST)
    training.start()
    set_day(monkeypatch, SECOND)  # killed, and resumed after midnight
    run, data = training.start(resume=True)
    model, proof = LlamaForCausalLM.from_pretrained(target), Prove(num_speculative_tokens=2, max_tokens=4)
    head = eagle1.Eagle1(eagle1.Config(num_steps=2), Target.from_model(model))

    def make_forecast(_: Path) -> Forecast:
        texts = greedy_continuations(model, data.prompts, max_tokens=4, num_speculative_tokens=2, end_ids=data.end_ids)
        return forecast(head, InProcessTarget(model), texts, 2)

    draft, _ = publish_draft(proof, run, data, str(target), head.export, make_forecast)
    set_day(monkeypatch, SECOND + datetime.timedelta(days=30))
    assert dispatch(["doctor", "--target", str(target), "--draft", str(draft), "--no-engine"]) == 0
    assert "Everything fits." in capsys.readouterr().out


def test_a_baseline_of_another_day_is_of_the_same_prompts(
    target: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(output: str, *flags: str) -> dict[str, Any]:
        given = ["--target", str(target), "--data", source, "--draft", f"copy={target}", "--max-tokens", "4"]
        few = ["--num-prompts", "4", "--num-speculative-tokens", "1", "--temperature", "0", "--no-engine"]
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
