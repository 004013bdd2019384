"""Chains on the device against the lookup on the host, token by token, in Triton's interpreter.

`test_lookup_on_device.py` runs this file in a process that has Triton.

B = requests of a step, S = slots of the runner, T = tokens of the longest request, K = most draft
tokens.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stand_in_ahead import RunnerAhead
from test_lookup_on_v2 import MOST, RunnerV1, make_answers, stream

from redraft.engine import device_runs
from redraft.engine.device_runs import DeviceRuns
from redraft.engine.lookup_first import HeadLimits, mix
from redraft.engine.lookup_hooks import install
from redraft.engine.lookups import lookup_env, on_device
from redraft.engine.server import vllm_keys
from redraft.heads.families.retrieval import Config, Live, Retrieval, Text, count_answers

S, T, K = 6, 40, 4
ALPHABET = 4
"""Few tokens: runs, ties, collisions and repetitions are many."""

OWNERS = [b"acme", b"zeta", b"none", None]
SAMPLED = [1, 2, 0, 3]
"""New tokens of a request; one has none, because its prompt is not read completely."""


def make_text(rng: np.random.Generator, length: int, owner: bytes = b"") -> Text:
    ids = rng.integers(0, ALPHABET, length).astype(np.int32)
    return Text(ids=ids, is_label=np.ones(length, bool), owner=owner)


def learn(draft: Live, text: Text) -> None:
    deque(draft.learn(text), maxlen=0)


def compare(draft: Retrieval, runs: DeviceRuns, rng: np.random.Generator, owners: list) -> int:
    """The number of draft tokens of one step, which are those of the host."""
    texts_ST = torch.from_numpy(rng.integers(0, ALPHABET, (S, T)).astype(np.int32))
    lengths_S = torch.from_numpy(rng.integers(1, T + 1, S).astype(np.int32))
    slots_B = torch.from_numpy(rng.permutation(S)[: len(owners)])
    newest_S1 = texts_ST.long().gather(1, lengths_S.long()[:, None] - 1)
    most, num_sampled = int(rng.integers(1, K + 1)), SAMPLED[: len(owners)]
    found = runs.follow(
        texts_ST, lengths_S, slots_B, torch.tensor(num_sampled), newest_S1, owners, most, K
    )
    for row, (slot, owner) in enumerate(zip(slots_B.tolist(), owners, strict=True)):
        length, count = int(lengths_S[slot]), int(found.counts_B[row])
        wanted = (
            draft.propose(
                texts_ST[slot, :length].numpy(), min(most, T - length), len(owners), owner
            )
            if num_sampled[row]
            else []
        )
        assert found.tokens_BK[row, :count].tolist() == wanted
        assert set(found.tokens_BK[row, count:].tolist()) <= {int(newest_S1[slot])}
        assert (found.confidences_BK[row, :count] > 0).all()
        assert (found.confidences_BK[row, count:] == 0).all()
    return int(found.counts_B.sum())


@pytest.mark.parametrize("shares", [False, True], ids=["by tenant", "shared"])
def test_live_counts_on_the_device_draft_what_the_host_drafts(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_runs, "BLOCK", 16)  # a text has several
    rng = np.random.default_rng(int(shares))
    draft = Live(Config(verify_cost=0.02, max_entries=128), window=8, shares=shares)
    runs, total = DeviceRuns(draft, torch.device("cpu")), 0
    for step in range(8):
        for owner in OWNERS[:2]:
            learn(draft, make_text(rng, 16, owner))
        if step == 4:
            draft.runs.forget(b"zeta")
        total += compare(draft, runs, rng, list(rng.permutation(OWNERS)))
        assert np.array_equal(runs.rows.numpy(), draft.runs.view()[0].view(np.int64))
        assert np.array_equal(runs.hashes.numpy(), draft.runs.view()[1].view(np.int64))
    assert total > 20


@pytest.mark.parametrize("least_first", [0.0, 0.5], ids=["alone", "before a head"])
def test_counted_answers_on_the_device_draft_what_the_host_drafts(
    least_first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_runs, "BLOCK", 16)
    rng = np.random.default_rng(7)
    draft = count_answers([make_text(rng, 300)], Config(verify_cost=0.02))
    draft.least_first = least_first
    runs = DeviceRuns(draft, torch.device("cpu"))
    total = sum(compare(draft, runs, rng, [b""] * 3) for _ in range(5))
    assert total > 10


def test_a_chain_reads_the_slot_that_a_run_took_from_another() -> None:
    rng = np.random.default_rng(3)
    draft = Live(Config(verify_cost=0.02, max_entries=8), window=8)  # one bucket
    runs = DeviceRuns(draft, torch.device("cpu"))
    for _ in range(3):
        learn(draft, make_text(rng, 16, b"acme"))
        compare(draft, runs, rng, [b"acme", b"acme"])


def test_all_counted_runs_are_found_in_the_spread_table() -> None:
    rng = np.random.default_rng(0)
    draft = count_answers([make_text(rng, 3000)], Config())
    rows, hashes, probabilities, num_probes = draft.entries.spread()
    assert len(np.unique(hashes[hashes != 0])) == len(draft.entries)
    assert len(hashes) <= 2 * len(draft.entries) + 8
    assert num_probes <= 4
    assert len(probabilities) < 40
    assert (rows[hashes == 0] == 0).all()


@pytest.mark.parametrize("head", [None, "eagle3"], ids=["alone", "before a head"])
def test_a_runner_that_schedules_ahead_proposes_what_v1_does_token_by_token(
    head: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Retrieval.speculative_config(make_answers(tmp_path / "answers"))
    config = mix(config, {"method": head}, HeadLimits(tokens=2)) if head else config
    found = []
    for version, chosen in ((RunnerV1, config), (RunnerAhead, on_device(config))):
        for name, value in lookup_env(chosen).items():
            monkeypatch.setenv(name, value)
        settings = {"num_speculative_tokens": MOST} | vllm_keys(chosen)
        runner = version(SimpleNamespace(**settings))
        install(runner)
        if version is RunnerAhead:
            runner.keep_counts(2 if head else 0)
        found.append([drafts for drafts, _ in stream(runner, seed=3, num_steps=18)])
    for one, other in zip(*found, strict=True):
        assert one == other
    assert sum(len(drafts) for drafts in found[0]) > 20
