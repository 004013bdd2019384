"""Counted answers in the engine: the config, the proposer, and refusals. `test_evaluate` has a real engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from redraft.eval.engine.lookup_first import HeadLimits, mix
from redraft.eval.engine.lookups import VARIABLES, Counted, install, lookup_env, needs_plugin
from redraft.eval.engine.server import vllm_keys
from redraft.eval.forecast.ngram import Ngram
from redraft.heads.families.retrieval import Config, Retrieval

DRAFT = Retrieval(Config(max_run=1, verify_cost=0.2), {(5,): (6, 0.9), (6,): (7, 0.5), (7,): (8, 0.9)}, [0.0, 0.1])


def make_runner(*rows: list[int], length: int = 8) -> Any:
    """A runner with these requests, in a batch of rows of `length` tokens."""
    ids = np.zeros((len(rows), length), np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    batch = SimpleNamespace(
        req_ids=[str(number) for number in range(len(rows))],
        token_ids_cpu=ids,
        num_tokens_no_spec=np.array([len(row) for row in rows]),
    )
    return SimpleNamespace(input_batch=batch, drafter=None)


def test_vllm_gets_its_ngrams_and_the_plugin_the_folder(tmp_path: Path) -> None:
    config = {**Retrieval.speculative_config(tmp_path), "num_speculative_tokens": 6}
    assert "retrieval" not in vllm_keys(config)
    assert vllm_keys(config)["method"] == "ngram"
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0", "REDRAFT_RETRIEVAL": str(tmp_path)}
    assert lookup_env(config) == variables
    dear = Retrieval.speculative_config(tmp_path, verify_cost=0.5)
    assert "verify_cost" not in vllm_keys(dear)
    assert lookup_env(dear) == {**variables, "REDRAFT_VERIFY_COST": "0.5"}
    assert needs_plugin(config)
    assert not needs_plugin(Ngram().speculative_config)


def test_each_request_gets_tokens_worth_verifying_in_its_step() -> None:
    scheduled = SimpleNamespace(num_spec_tokens_to_schedule=6)
    alone = Counted(make_runner([1, 5]), DRAFT)
    assert alone.propose(scheduled, [[5]], "the rest") == [[6, 7, 8]]
    busy = Counted(make_runner([1, 5], [2, 7], [5]), DRAFT)
    assert busy.propose(scheduled, [[5], [7], []]) == [[6], [8], []], "one whose prompt is not read gets none"
    full = Counted(make_runner([1, 5], length=3), DRAFT)
    assert full.propose(scheduled, [[5]]) == [[6]], "no draft reaches beyond the longest request"
    assert alone.propose(SimpleNamespace(num_spec_tokens_to_schedule=0), [[5]]) == [[]]


class Head:
    """A head that proposes 9 as often as it is asked, and notes how often that is."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, scheduled: Any, sampled: list[list[int]], *_: Any) -> Any:
        self.asked.append(scheduled.num_spec_tokens_to_schedule)
        return np.full((len(sampled), self.asked[-1]), 9)


@dataclass
class Scheduled:
    num_spec_tokens_to_schedule: int = 6


def test_a_head_drafts_if_nothing_probable_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DRAFT.write(tmp_path)
    answers = Retrieval.speculative_config(tmp_path, least_first=0.6)
    for name, value in lookup_env(mix(answers, {"method": "eagle3"}, HeadLimits(tokens=2))).items():
        monkeypatch.setenv(name, value)

    def propose(*rows: list[int]) -> tuple[list[list[int]], list[int], frozenset[str]]:
        runner, head = make_runner(*rows), Head()
        runner.propose_draft_token_ids = head.propose
        settings = {"method": "eagle3", "disable_padded_drafter_batch": True}
        runner.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(**settings))
        install(runner)
        proposer = runner.propose_draft_token_ids
        drafts = proposer(Scheduled(), [[row[-1]] for row in rows], "the rest")
        return drafts, head.asked, proposer.__self__.looked_up

    assert propose([1, 5]) == ([[6, 7, 8]], [0], {"0"}), "the head reads the step, and drafts nothing"
    assert propose([1, 6]) == ([[9, 9]], [2], set()), "7 follows 6 with a probability of 0.5 only"
    assert propose([1, 5], [1, 6]) == ([[6, 7, 8], [9, 9]], [2], {"0"}), "the head drafts for both, one takes it"
    assert propose([1, 5], [1, 5], [1, 6]) == ([[6], [6], [9, 9]], [2], {"0", "1"}), "0.9 pays, 0.9 * 0.5 does not"


def test_a_runner_takes_the_folder_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner([1, 5])
    install(runner)
    assert not hasattr(runner, "propose_draft_token_ids"), "without the variable it is left alone"
    monkeypatch.setenv(VARIABLES["retrieval"], str(tmp_path))
    with pytest.raises(FileNotFoundError):
        install(runner)
    DRAFT.write(tmp_path)
    install(runner)
    proposed = runner.propose_draft_token_ids
    assert proposed(SimpleNamespace(num_spec_tokens_to_schedule=1), [[5]]) == [[6]]
    install(runner)
    assert runner.propose_draft_token_ids == proposed, "once"
    monkeypatch.setenv(VARIABLES["verify_cost"], "0.95")
    dear = make_runner([1, 5])
    install(dear)
    assert dear.propose_draft_token_ids(SimpleNamespace(num_spec_tokens_to_schedule=1), [[5]]) == [[]]
    monkeypatch.setenv(VARIABLES["verify_cost"], "2")
    with pytest.raises(ValueError, match=r"2\.0"):
        install(make_runner([1, 5]))
    monkeypatch.delenv(VARIABLES["verify_cost"])
    v2 = make_runner([1, 5])
    del v2.drafter
    with pytest.raises(ValueError, match="only vLLM's V1 model runner looks tokens up"):
        install(v2)
