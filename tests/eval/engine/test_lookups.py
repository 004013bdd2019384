"""Counted answers in the engine: the config, the proposer, and refusals. `test_evaluate` has a real engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

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
    batch = SimpleNamespace(token_ids_cpu=ids, num_tokens_no_spec=np.array([len(row) for row in rows]))
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
    with pytest.raises(ValueError, match=r"costs 2\.0 steps to verify"):
        install(make_runner([1, 5]))
    v2 = make_runner([1, 5])
    del v2.drafter
    with pytest.raises(ValueError, match="only vLLM's V1 model runner drafts from counted answers"):
        install(v2)
