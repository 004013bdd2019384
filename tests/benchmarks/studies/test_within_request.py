"""Adaptation inside a request: the update against autograd and loops, the blocks against the forecast.

T = output tokens, K = draft tokens, N = rows, D = hidden, W = draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_heads import VOCAB, make_ids, make_random, make_target

from benchmarks.studies.within_request import (
    Adaptation,
    Adapter,
    Config,
    Continuation,
    count_blocks,
    follow,
    look_up,
    measure,
    propose,
    read,
    without_tokens,
)
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.ngram import Ngram
from redraft.eval.forecast.teacher_forced import Forecastable, Protocol, evaluate_batch
from redraft.heads.draft import ExactTarget
from redraft.heads.families.eagle3 import Eagle3
from redraft.heads.options import Eagle3 as Options
from redraft.heads.target import Target

K = 3
BIAS = Adaptation(rule="bias", rate=3.0, every=4)
LOW_RANK = Adaptation(rule="low_rank", rate=0.3, rank=4, every=4)


def make_world(draft_ids: torch.Tensor | None = None) -> tuple[Eagle3, InProcessTarget]:
    model = make_target()
    head = Eagle3(
        Options(aux_layer_ids=(1, 2, 4), num_steps=K), Target.from_model(model), draft_ids
    )
    return make_random(head).eval(), InProcessTarget(model, (1, 2, 4))


def make_text(num_output: int = 22) -> Continuation:
    # Of two tokens, so that n-grams and a head with few tokens are right now and then.
    ids = [10 + number % 2 for number in make_ids(5 + num_output + K - 1)]
    return Continuation(
        prompt=Prompt(token_ids=ids[:5]),
        output_ids=ids[5 : 5 + num_output],
        beyond_ids=ids[5 + num_output :],
    )


@pytest.mark.parametrize("way", [BIAS, LOW_RANK])
def test_an_update_is_a_gradient_step_of_the_cross_entropy(way: Adaptation) -> None:
    torch.manual_seed(0)
    head_WD, states_ND = torch.randn(11, 6).double(), torch.randn(5, 6).double()
    p_NW = 0.8 * torch.randn(5, 11).double().softmax(-1)  # the rest is outside of the vocabulary
    adapter = Adapter(head_WD, way, torch.float64)
    adapter.update(states_ND, p_NW)  # away from zero
    moved = (adapter.bias_W, adapter.up_RD)[way.rule == "low_rank"]
    before = moved.clone()
    moved.requires_grad_()
    loss = -(p_NW * adapter.logits(states_ND).log_softmax(-1)).sum()
    (gradient,) = torch.autograd.grad(loss, moved)
    moved.requires_grad_(False)
    adapter.update(states_ND, p_NW)
    torch.testing.assert_close(moved, before - way.rate * gradient)


@torch.no_grad()
def loop(
    head: Eagle3, signal: InProcessTarget, text: Continuation, way: Adaptation
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`propose` token by token in float64, as an engine would: draft, verify, learn."""
    known, steps = read(head, signal, text, K)
    assert isinstance(known.distribution, ExactTarget)
    first, head_WD = len(text.prompt.token_ids), head.head.double()
    adapter = Adapter(head_WD, way, torch.float64)
    tokens, learned = np.zeros((len(text.output_ids) - 1, K), int), 0
    for t in range(len(text.output_ids) - 1):
        if t + 1 - learned >= way.every:
            for_token = range(learned, learned + way.every)
            states, ps = [], []
            for i in for_token:
                position = first + i  # of the token; its distribution is one row before
                p_V = (
                    known.distribution.logits(torch.tensor([position - 1])).double().softmax(-1)[0]
                )
                ids_W = steps[0].draft_ids_W
                ps.append(p_V if ids_W is None else p_V[ids_W])
                states.append(steps[0].hidden_BTD[0, position - 2].double())
            adapter.update(torch.stack(states), torch.stack(ps))
            learned += way.every
        for j, step in enumerate(steps):
            logits_W = adapter.logits(step.hidden_BTD[0, first + t - 1].double()[None])[0]
            token = int(logits_W.argmax())
            if step.draft_ids_W is not None:
                token = int(step.draft_ids_W[token])
            tokens[t, j] = token
    return tokens


@pytest.mark.parametrize("way", [BIAS, LOW_RANK, replace(BIAS, every=7), replace(BIAS, every=3)])
@pytest.mark.parametrize("draft_ids", [None, torch.arange(1, VOCAB, 2)])
def test_blocks_use_what_was_verified_before_them(
    way: Adaptation, draft_ids: torch.Tensor | None
) -> None:
    head, signal = make_world(draft_ids)
    text = make_text()
    known, steps = read(head, signal, text, K)
    with torch.no_grad():
        found = propose(head, steps, known, text, way)
        plain = propose(head, steps, known, text, Adaptation(every=way.every))
    np.testing.assert_array_equal(found, loop(head, signal, text, way))
    assert (found != plain).any(), "the adaptation changes something here"


def test_without_adaptation_the_counts_are_those_of_the_forecast() -> None:
    head, signal = make_world(torch.tensor([10, 11]))
    text, cfg = make_text(), Config(num_speculative_tokens=K, bin_tokens=8)
    counts = measure(head, signal, text, {"none": Adaptation()}, cfg)
    forecastable = Forecastable(
        fingerprint="head", steps=lambda b, s, k: head.draft_steps(b, s, k), is_autoregressive=False,
        is_block=False, aux_layer_ids=head.aux_layer_ids,
    )  # fmt: skip
    protocol = Protocol(
        temperatures=(0.0,), num_speculative_tokens=(K,), max_tokens=64, end_ids=(), seed=0,
        batch_size=1,
    )  # fmt: skip
    drafts = {"none": forecastable, "lookup, none": replace(forecastable, first=Ngram())}
    (rows,) = evaluate_batch([text], signal, drafts, 0.0, protocol)
    for name, row in rows.items():
        accepted, blocks = np.sum(counts[name], axis=0)
        assert blocks == row.counts[K].num_steps, name
        assert accepted == row.counts[K].num_accepted > 0, name
    assert len(counts["none"]) == 3, "21 rows in ranges of 8"


def test_lookups_begin_after_the_first_output_token() -> None:
    text = Continuation(
        prompt=Prompt(token_ids=[1, 2, 3, 4]), output_ids=[1, 2, 3, 9], beyond_ids=[9, 8]
    )
    cfg = Config(ngram=Ngram(min=2, max=3), num_speculative_tokens=2)
    # After 1: the pair 4, 1 is new. After 1, 2: 3, 4 followed. After 2, 3: 4, 1.
    assert look_up(text, cfg).tolist() == [[-1, -1], [3, 4], [4, 1]]
    assert follow(text, 2).tolist() == [[2, 3], [3, 9], [9, 9]]


def test_drafts_are_counted_where_their_block_begins() -> None:
    matches = np.array([[True, True], [False, False], [False, False], [True, False]])
    # Blocks begin after tokens 0 (accepts 2) and 3 (accepts 1).
    assert count_blocks(matches, 2) == [[2.0, 1.0], [1.0, 1.0]]


def test_an_end_token_is_never_chosen() -> None:
    model = make_target()
    ids = torch.tensor([make_ids(6)])
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
        with without_tokens(model, [best]):
            assert int(model(ids).logits[0, -1].argmax()) != best
        assert int(model(ids).logits[0, -1].argmax()) == best


def test_too_few_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num-tuning"):
        Config(num_requests=8, num_tuning=7, output=tmp_path)
