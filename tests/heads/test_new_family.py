"""A family is one file and one row.

`tiny_family` goes through everything with nothing else patched.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from learner_world import make_records
from make_heads import (
    assert_every_parameter_learns,
    assert_packed_equals_unpacked,
    assert_round_trip,
    assert_training_equals_decoding,
    make_batch,
    make_random,
    make_signal,
    make_target,
)
from tiny_family import ROW, Config, Tiny

from redraft.distill.loss.choice import Divergence
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.draft_source import DraftSource
from redraft.eval.forecast.drafts import load_drafts
from redraft.eval.forecast.greedy import greedy_continuations
from redraft.eval.forecast.teacher_forced import Protocol, evaluate_batch
from redraft.files.target_folder import TargetFolder
from redraft.heads import catalog
from redraft.heads.catalog import detect_family, find_family
from redraft.heads.doctor.checks import notes, static_findings
from redraft.heads.doctor.pair import Pair
from redraft.heads.target import LoadedTarget, Target
from redraft.online.learning.candidate import DRAFT, Candidate, read_hidden_shape
from redraft.online.learning.config import Training
from redraft.online.learning.scoring import score
from redraft.online.records.record import Record
from redraft.recipes.cli.run import dispatch
from redraft.recipes.plan.count import report
from redraft.recipes.plan.plan import PlanConfig

K = 3


@pytest.fixture(autouse=True)
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "FAMILIES", (ROW, *catalog.FAMILIES))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_target(vocab_size=512)


@pytest.fixture(scope="module")
def target_folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("new-family") / "target"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def records(model: Any, target_folder: Path) -> list[Record]:
    return [with_states(record, model) for record in make_records(target_folder, 8)]


def make_head(model: Any) -> Tiny:
    torch.manual_seed(0)
    return Tiny(Config(), Target.from_model(model))


def with_states(record: Record, model: Any) -> Record:
    """The record with the states of the head's layers at all tokens but the last.

    A server captures them so.
    """
    ids = [*record.context_ids.tolist(), *record.output_ids.tolist()]
    aux_BTLD = make_signal(model, make_batch([[ids]]), Config().aux_layer_ids).aux_BTLD
    assert aux_BTLD is not None
    words = aux_BTLD[0, :-1].bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)
    return msgspec.structs.replace(
        record, hidden_begin=0, hidden_shape=words.shape[1:], hidden=words.tobytes()
    )


def test_it_keeps_the_promises_that_every_head_makes(model: Any, tmp_path: Path) -> None:
    head = make_random(make_head(model))
    assert_training_equals_decoding(head, model, K)
    assert_packed_equals_unpacked(head, model)
    assert_every_parameter_learns(head, model)
    assert_round_trip(head, model, tmp_path)


def test_it_trains(model: Any) -> None:
    batch = make_batch([[torch.arange(20, 60).tolist()]])
    signal = make_signal(model, batch, Config().aux_layer_ids)
    accelerator = make_accelerator(1, "no", None)
    optim = Optim(lr=1e-2, warmup_fraction=0.01, schedule="constant")
    distillation = Distillation(
        make_head(model), lambda _: signal, Divergence(), optim, 40, accelerator
    )
    losses = [distillation.step([batch]).loss for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.usefixtures("fresh_accelerator")
def test_it_has_a_command(random_target: Path, tmp_path: Path) -> None:
    data = tmp_path / "chat.jsonl"
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (
        f"--target {random_target} --data.source {data} --data.held-out 0.2 --data.num-prompts "
        "2 --prove.no-engine"
    )
    flags += (
        " --head.aux-layer-ids 1 2 --prove.num-speculative-tokens 3 --prove.max-tokens 4 "
        f"--output {tmp_path}/run"
    )
    assert dispatch(["train", "tiny", *flags.split()]) == 0
    head = find_family("tiny").load(
        tmp_path / "run/draft", lambda: Target.from_folder(random_target)
    )
    assert isinstance(head, Tiny)
    assert head.aux_layer_ids == (1, 2)
    assert json.loads((tmp_path / "run/report.json").read_text())["offline"]["tau_forecast"] >= 1


def test_the_cost_of_its_training_is_counted() -> None:
    for num_steps, num_tokens in ((None, 3), (6, 5)):
        cfg = PlanConfig(family="tiny", target="llama-3.2-1b", num_steps=num_steps)  # type: ignore[arg-type]
        _, numbers = report(cfg)
        hidden = 2048
        weights = 4 * (len(Config().aux_layer_ids) * hidden * hidden + hidden + num_tokens * hidden)
        assert numbers["memory"]["draft's weights"] == weights
        # AdamW keeps two values a weight, and a step count for each of the three tensors.
        assert numbers["memory"]["optimizer state"] == 2 * weights + 3 * 4


def test_its_export_is_recognised_loaded_and_checked(
    model: Any, target_folder: Path, tmp_path: Path
) -> None:
    make_random(make_head(model)).export(tmp_path)
    assert detect_family(tmp_path) is find_family("tiny") is ROW
    assert DraftSource.parse(str(tmp_path)).speculative() == {
        "method": "tiny",
        "model": str(tmp_path),
    }
    pair = Pair.read(TargetFolder.open(target_folder), tmp_path)
    assert pair.family is ROW
    assert static_findings(pair, method="tiny", num_speculative_tokens=K) == []
    assert not any("Tiny" in note for note in notes(pair))

    def problems(method: str | None, num_tokens: int) -> list[str]:
        found = static_findings(
            Pair.read(TargetFolder.open(target_folder), tmp_path),
            method=method,
            num_speculative_tokens=num_tokens,
        )
        return [finding.problem for finding in found]

    (problem,) = problems("eagle3", K)
    assert re.search(r'"eagle3".*\btiny drafts$', problem)
    assert re.search(r"\b4\b.*\b3\b", problems(None, K + 1)[0])
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "tiny_config": {"target_layer_ids": [1, 9]}})
    )
    (problem,) = problems(None, K)
    assert "layer 9" in problem


def test_it_is_forecast(model: Any, target_folder: Path, tmp_path: Path) -> None:
    make_random(make_head(model)).export(tmp_path / "head")
    target = LoadedTarget(files=TargetFolder.open(target_folder), model=model)
    (draft,) = load_drafts([f"mine={tmp_path / 'head'}"], target, "probabilistic")
    assert (draft.family, draft.serves(K), draft.serves(K + 1)) == ("tiny", True, False)
    assert draft.speculative == {
        "method": "tiny", "model": str(tmp_path / "head"), "draft_sample_method": "probabilistic"
    }  # fmt: skip
    assert draft.forecast is not None
    protocol = Protocol(
        temperatures=(0.0,),
        num_speculative_tokens=(K,),
        max_tokens=12,
        end_ids=(),
        seed=0,
        batch_size=2,
    )
    texts = greedy_continuations(
        model,
        [Prompt(token_ids=[30, 40, 50, 60])],
        max_tokens=12,
        num_speculative_tokens=K,
        end_ids=(),
    )
    (rows,) = evaluate_batch(
        texts,
        lambda batch: make_signal(model, batch, Config().aux_layer_ids),
        {"mine": draft.forecast},
        0.0,
        protocol,
    )
    assert rows["mine"].num_output_tokens == 12
    assert rows["mine"].counts[K].num_steps > 0


def test_it_learns_online_and_is_scored(
    model: Any, target_folder: Path, records: list[Record], tmp_path: Path
) -> None:
    version = tmp_path / "v000001"
    make_head(model).export(version)
    assert read_hidden_shape("tiny", version) == (2, 32)
    candidate = Candidate(
        Training(lr=1e-2, warmup_steps=1, sequence_length=64), "tiny", target_folder
    )
    candidate.begin(version)
    losses = [candidate.step(records, seed).loss for seed in range(15)]
    assert losses[-1] < losses[0]
    candidate.write(tmp_path / "checkpoint")
    learned = candidate.load(tmp_path / "checkpoint" / DRAFT)
    assert torch.equal(learned.fc.weight, candidate.distillation.weights()["fc.weight"])

    def count(head: Any) -> float:
        scored = score(
            head,
            records,
            num_speculative_tokens=K,
            method="greedy",
            sequence_length=64,
            reads=ROW.reads,
        )
        return sum(one.num_accepted for one in scored)

    assert count(learned.eval()) > count(candidate.load(version).eval())
