"""The forecast at any temperature against the reference sampler, on Markov models with known rows.

S = state (a token), V = vocabulary, T = output tokens, K = num_speculative_tokens.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from autoregressive import token_by_token
from hypothesis import given, settings
from hypothesis import strategies as st
from positions import cumulative
from reference_decoder import draw
from reference_sampler import Propose, sample
from torch import Tensor

from redraft.engine.counts import ExpectedCounts, expected_blocks, simulate_blocks
from redraft.engine.counts import tau as tau_of
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import Sampling
from redraft.eval.acceptance import alpha, alpha_greedy, probabilities
from redraft.eval.forecast.greedy import Continuation
from redraft.eval.forecast.ngram import Ngram, propose_ngrams
from redraft.eval.forecast.sampled import sampled_probabilities
from redraft.eval.forecast.teacher_forced import Forecastable, PromptRows, Protocol, evaluate_batch
from redraft.heads.draft import Batch, DraftStep, ExactTarget, TargetSignal, label_rows

VOCAB, K, MAX_TOKENS = 5, 3, 24
PROMPT = [0, 1]


def make_table(seed: int, *, memoryless: bool = False) -> Tensor:
    """Logits [S, V] of the next token after each token; if memoryless, all rows are the same."""
    table_SV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return table_SV[:1].expand(VOCAB, VOCAB).clone() if memoryless else table_SV


def states(batch: Batch) -> Tensor:
    return torch.nn.functional.one_hot(batch.input_ids_BT, VOCAB).float()


def signal_of(table_SV: Tensor) -> Callable[[Batch], TargetSignal]:
    return lambda batch: TargetSignal(
        distribution=ExactTarget(hidden_BTD=states(batch), head_VD=table_SV.T)
    )


def step_of(table_SV: Tensor, batch: Batch, shift: int, ids_W: Tensor | None = None) -> DraftStep:
    head_WD = table_SV.T if ids_W is None else table_SV.T[ids_W]
    mask_BT = label_rows(batch, shift)
    return DraftStep(
        hidden_BTD=states(batch), head_WD=head_WD, shift=shift, mask_BT=mask_BT, draft_ids_W=ids_W
    )


def make_draft(table_SV: Tensor, *, is_sampled: bool, ids_W: Tensor | None = None) -> Forecastable:
    return Forecastable(
        fingerprint="a draft",
        steps=lambda batch, _, __: [step_of(table_SV, batch, 0, ids_W)],
        is_autoregressive=True,
        is_sampled=is_sampled,
    )


def make_heads(tables: Sequence[Tensor], *, is_sampled: bool) -> Forecastable:
    """Like Medusa: each token of a block comes from the state of the token before the last.

    What was drafted makes no difference.
    """
    return Forecastable(
        fingerprint="heads",
        steps=lambda batch, _, __: [
            step_of(table_SV, batch, i + 1) for i, table_SV in enumerate(tables)
        ],
        is_sampled=is_sampled,
        max_tokens=len(tables),
    )


def make_protocol(**changes: Any) -> Protocol:
    defaults: dict[str, Any] = {
        "temperatures": (1.0,),
        "num_speculative_tokens": (1, 2, K),
        "max_tokens": MAX_TOKENS,
    }
    return Protocol(**{**defaults, "end_ids": (), "seed": 0, "batch_size": 4, **changes})


def write_text(
    table_SV: Tensor,
    temperature: float,
    generator: torch.Generator,
    filters: Sampling | None = None,
) -> Continuation:
    """A text sampled from the target alone."""
    p_SV, ids = (
        sampled_probabilities(table_SV, (filters or Sampling()).at(temperature)),
        list(PROMPT),
    )
    for _ in range(MAX_TOKENS + K - 1):
        ids.append(int(torch.multinomial(p_SV[ids[-1]], 1, generator=generator)))
    output = ids[len(PROMPT) :]
    return Continuation(
        prompt=Prompt(token_ids=PROMPT),
        output_ids=output[:MAX_TOKENS],
        beyond_ids=output[MAX_TOKENS:],
    )


def forecast_of(
    draft: Forecastable,
    target_SV: Tensor,
    text: Continuation,
    temperature: float,
    filters: Sampling | None = None,
) -> PromptRows:
    protocol = make_protocol(filters=filters or Sampling())
    (rows,) = evaluate_batch([text], signal_of(target_SV), {"it": draft}, temperature, protocol)
    return rows["it"]


def within_three_standard_errors(errors: Sequence[float]) -> bool:
    return abs(statistics.mean(errors)) <= 3 * statistics.stdev(errors) / len(errors) ** 0.5


@pytest.mark.parametrize("temperature", [pytest.param(0.6, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("kind", ["sampled", "greedy", "sampled heads", "greedy heads"])
def test_the_reference_sampler_counts_what_is_forecast_over_200_seeds(
    kind: str, temperature: float
) -> None:
    errors: list[list[float]] = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(10**6 + seed)
        target_SV, tables = make_table(seed), [make_table(1000 + 10 * seed + i) for i in range(K)]
        is_sampled = kind.startswith("sampled")
        if "heads" in kind:
            draft, propose = make_heads(tables, is_sampled=is_sampled), propose_by_heads(tables)
        else:
            draft = make_draft(tables[0], is_sampled=is_sampled)
            propose = token_by_token(lambda tokens, table_SV=tables[0]: table_SV[tokens[-1]])
        _, counted = sample(
            lambda tokens, table_SV=target_SV: table_SV[tokens[-1]],
            propose,
            PROMPT,
            num_speculative_tokens=K,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            greedy_draft=not is_sampled,
            generator=generator,
        )
        told = forecast_of(
            draft, target_SV, write_text(target_SV, temperature, generator), temperature
        ).counts[K]
        pairs = zip(counted.accepted_per_position, told.accepted_per_position, strict=True)
        errors.append([counted.num_drafts - told.num_steps, *(mine - its for mine, its in pairs)])
    for column in zip(*errors, strict=True):
        assert within_three_standard_errors(column)


SEEN = Ngram(min=2, max=3)
"""Of the five tokens of a text here, two in a row have often occurred before."""


def mix_in(draft: Forecastable, head_tokens: int | None) -> Forecastable:
    return replace(draft, first=SEEN, head_tokens=head_tokens)


def ngrams_before(propose: Propose, head_tokens: int) -> Propose:
    """The tokens looked up; `head_tokens` of `propose` if there are none."""

    def mixed(
        prefix: Sequence[int],
        num_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> list[tuple[int, Tensor]]:
        (found,) = propose_ngrams(prefix, len(prefix), 1, SEEN, num_tokens)
        one_hot = torch.eye(VOCAB)
        return [(token, one_hot[token]) for token in found] or propose(
            prefix, head_tokens, temperature, generator
        )

    return mixed


@pytest.mark.parametrize("head_tokens", [0, 1, 2, K])
def test_ngrams_before_heads_are_counted_block_by_block(head_tokens: int) -> None:
    taken: set[tuple[float, ...]] = set()
    for seed in range(20):
        target_SV, tables = (
            make_table(seed),
            [make_table(seed) + make_table(500 + 10 * seed + i) for i in range(K)],
        )
        text = write_text(target_SV, 1.0, torch.Generator().manual_seed(seed))
        # a model that says this text by heart; the last block may end one token behind it
        by_heart = torch.eye(VOCAB)[torch.tensor([*text.output_ids, *text.beyond_ids, 0])] * 9
        _, counted = sample(
            lambda tokens, rows=by_heart: rows[len(tokens) - len(PROMPT)],
            ngrams_before(propose_by_heads(tables), head_tokens),
            PROMPT,
            num_speculative_tokens=K,
            max_tokens=MAX_TOKENS,
            temperature=0,
            greedy_draft=True,
        )
        told = forecast_of(
            mix_in(make_heads(tables, is_sampled=False), head_tokens), target_SV, text, 0.0
        ).counts[K]
        assert told.num_steps == pytest.approx(counted.num_drafts)
        assert told.accepted_per_position == pytest.approx(counted.accepted_per_position)
        assert told.num_drafts == pytest.approx(told.num_steps) or head_tokens == 0
        taken.add(counted.accepted_per_position)
    assert len(taken) > 10, "the texts differ"


@pytest.mark.parametrize(
    "filters",
    [
        pytest.param(Sampling(top_p=0.7), marks=pytest.mark.slow),
        pytest.param(Sampling(top_k=2), marks=pytest.mark.slow),
        Sampling(top_p=0.8, top_k=3, min_p=0.1),
    ],
)
@pytest.mark.parametrize("is_sampled", [False, True])
def test_filters_of_the_target_are_forecast_exactly_though_drafts_ignore_them(
    filters: Sampling, is_sampled: bool
) -> None:
    temperature, errors, unfiltered = 0.8, [], []
    for seed in range(200):
        generator = torch.Generator().manual_seed(10**6 + seed)
        target_SV = make_table(seed)
        draft_SV = target_SV + 0.7 * make_table(
            1000 + seed
        )  # a draft of this target, else filters change nothing
        # logits whose softmax at the temperature is the filtered distribution
        filtered_SV = sampled_probabilities(target_SV, filters.at(temperature)).log() * temperature
        _, counted = sample(
            lambda tokens, table_SV=filtered_SV: table_SV[tokens[-1]],
            token_by_token(lambda tokens, table_SV=draft_SV: table_SV[tokens[-1]]),
            PROMPT,
            num_speculative_tokens=K,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            greedy_draft=not is_sampled,
            generator=generator,
        )
        draft, text = (
            make_draft(draft_SV, is_sampled=is_sampled),
            write_text(target_SV, temperature, generator, filters),
        )
        told = forecast_of(draft, target_SV, text, temperature, filters).counts[K]
        plain = forecast_of(
            draft, target_SV, write_text(target_SV, temperature, generator), temperature
        ).counts[K]
        pairs = zip(counted.accepted_per_position, told.accepted_per_position, strict=True)
        errors.append([counted.num_drafts - told.num_steps, *(mine - its for mine, its in pairs)])
        unfiltered.append(counted.num_accepted - plain.num_accepted)
    for column in zip(*errors, strict=True):
        assert within_three_standard_errors(column)
    assert not within_three_standard_errors(unfiltered), "ignoring the filters would be noticed"


def test_the_other_way_to_draft_is_counted_beside_the_served_one() -> None:
    target_SV, draft_SV = make_table(4), make_table(5)
    text = write_text(target_SV, 1.0, torch.Generator().manual_seed(0))
    greedy, sampled = (
        forecast_of(
            replace(make_draft(draft_SV, is_sampled=s), can_sample=True), target_SV, text, 1.0
        )
        for s in (False, True)
    )
    assert greedy.other_counts == sampled.counts != greedy.counts == sampled.other_counts
    unable = forecast_of(make_draft(draft_SV, is_sampled=False), target_SV, text, 1.0)
    assert (unable.counts, unable.other_counts) == (greedy.counts, {})
    cold = write_text(target_SV, 0.0, torch.Generator())
    able = replace(make_draft(draft_SV, is_sampled=False), can_sample=True)
    assert forecast_of(able, target_SV, cold, 0.0).other_counts == {}, (
        "at temperature 0 they are the same"
    )


def propose_by_heads(tables: Sequence[Tensor]) -> Any:
    def propose(
        prefix: Sequence[int], num_tokens: int, temperature: float, generator: Any
    ) -> list[tuple[int, Tensor]]:
        return [
            draw(table_SV[prefix[-2]], temperature, generator) for table_SV in tables[:num_tokens]
        ]

    return propose


def test_a_forecast_of_greedy_drafts_does_not_fit_sampled_ones() -> None:
    # The mistake to fear: 200 seeds must be enough to catch it.
    errors = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(10**6 + seed)
        target_SV, draft_SV = make_table(seed), make_table(1000 + seed)
        text = write_text(target_SV, 1.0, generator)
        told = [
            forecast_of(make_draft(draft_SV, is_sampled=s), target_SV, text, 1.0).counts[K]
            for s in (True, False)
        ]
        errors.append(told[0].num_accepted - told[1].num_accepted)
    assert not within_three_standard_errors(errors)


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_draft_that_remembers_nothing_gets_leviathans_formula(is_sampled: bool) -> None:
    errors: dict[int, list[float]] = {1: [], 2: [], K: []}
    for seed in range(200):
        target_SV, draft_SV = (
            make_table(seed, memoryless=True),
            make_table(1000 + seed, memoryless=True),
        )
        p_SV, q_SV = probabilities(target_SV, 1.0), probabilities(draft_SV, 1.0)
        rate = float((alpha if is_sampled else alpha_greedy)(p_SV, q_SV)[0])
        text = write_text(target_SV, 1.0, torch.Generator().manual_seed(seed))
        rows = forecast_of(make_draft(draft_SV, is_sampled=is_sampled), target_SV, text, 1.0)
        assert (rows.alpha_sum if is_sampled else rows.alpha_greedy_sum) == pytest.approx(
            rate * MAX_TOKENS, rel=1e-5
        )
        for k, counts in rows.counts.items():
            # A sum, not a ratio: the end of the text is a stopping time, so by Wald's identity its
            # mean is zero.
            errors[k].append(
                counts.num_accepted - (tau_of(cumulative([rate] * k)) - 1) * counts.num_steps
            )
    for column in errors.values():
        assert within_three_standard_errors(column)


@pytest.mark.parametrize(("temperature", "is_sampled"), [(0.0, False), (0.0, True), (1.0, True)])
def test_a_copy_of_the_target_is_always_accepted(temperature: float, is_sampled: bool) -> None:
    target_SV = make_table(3)
    text = write_text(target_SV, temperature, torch.Generator().manual_seed(0))
    rows = forecast_of(make_draft(target_SV, is_sampled=is_sampled), target_SV, text, temperature)
    assert rows.alpha_sum == pytest.approx(MAX_TOKENS, rel=1e-6)
    for k, counts in rows.counts.items():
        assert counts.num_accepted == pytest.approx(k * counts.num_steps, rel=1e-5)


def test_at_temperature_zero_sampled_drafts_are_greedy_too() -> None:
    target_SV, draft_SV = make_table(4), make_table(5)
    text = write_text(target_SV, 0.0, torch.Generator())
    one, other = (
        forecast_of(make_draft(draft_SV, is_sampled=s), target_SV, text, 0.0) for s in (False, True)
    )
    assert one == other
    assert one.alpha_sum == one.alpha_greedy_sum == sum(draft_agrees(target_SV, draft_SV, text))


def draft_agrees(target_SV: Tensor, draft_SV: Tensor, text: Continuation) -> list[bool]:
    known = [*text.prompt.token_ids, *text.output_ids][len(PROMPT) - 1 : -1]
    return [bool(target_SV[t].argmax() == draft_SV[t].argmax()) for t in known]


def test_a_reduced_vocabulary_never_proposes_a_missing_token() -> None:
    target_SV, ids_W = make_table(6), torch.tensor([0, 2, 3])
    text = write_text(target_SV, 1.0, torch.Generator().manual_seed(1))
    rows = forecast_of(make_draft(target_SV, is_sampled=True, ids_W=ids_W), target_SV, text, 1.0)
    p_SV, known = probabilities(target_SV, 1.0), [*PROMPT, *text.output_ids][len(PROMPT) - 1 : -1]
    q_SW = probabilities(target_SV[:, ids_W], 1.0)
    expected = sum(float(torch.minimum(p_SV[t, ids_W], q_SW[t]).sum()) for t in known)
    assert rows.alpha_sum == pytest.approx(expected, rel=1e-5)
    q_of = [
        [float(q_SW[s, list(ids_W).index(x)]) if x in ids_W else 0.0 for x in range(VOCAB)]
        for s in range(VOCAB)
    ]
    ids = [*PROMPT, *text.output_ids, *text.beyond_ids]
    accept = [min(1.0, q_of[s][x] / float(p_SV[s, x])) for s, x in itertools.pairwise(ids[1:])]
    told = expected_blocks(
        np.array([accept[1 + t : 1 + t + K] for t in range(MAX_TOKENS - 1)]), MAX_TOKENS
    )
    assert rows.counts[K].accepted_per_position == pytest.approx(
        told.accepted_per_position, rel=1e-5
    )


def test_a_draft_of_two_heads_is_measured_with_two_tokens_at_most() -> None:
    draft = make_heads([make_table(1), make_table(2)], is_sampled=False)
    text = write_text(make_table(3), 1.0, torch.Generator().manual_seed(0))
    assert list(forecast_of(draft, make_table(3), text, 1.0).counts) == [1, 2]


def test_an_ngram_draft_counts_steps_without_a_proposal() -> None:
    text = Continuation(
        prompt=Prompt(token_ids=[1, 2, 3, 4]), output_ids=[1, 2, 3, 0, 4, 4], beyond_ids=[1, 2]
    )
    rows = forecast_of(
        Forecastable(fingerprint="n", steps=Ngram(min=2, max=2)), make_table(0), text, 0.0
    )
    counts = rows.counts[K]
    # [1] nothing; [1, 2] proposes 3, 4, 1: one accepted, then 0 by the target; [3, 0] and [0, 4]
    # are new; 4 4 ends it
    assert (counts.num_steps, counts.num_drafts) == (4, 1)
    assert counts.accepted_per_position == (1, 0, 0)
    # Contexts of 5 and 6 tokens, then of 8 and 9.
    by_context = {at: (one.num_steps, one.num_drafts) for at, one in rows.by_context.items()}
    assert by_context == {4: (2, 1), 8: (2, 0)}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_certain_acceptance_is_walked_as_greedy_decoding_is(data: st.DataObject) -> None:
    length, k = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    matches = data.draw(
        st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=length, max_size=length)
    )
    walked = simulate_blocks(torch.tensor(matches), length)
    expected = expected_blocks(np.array(matches, dtype=float), length)
    assert expected == ExpectedCounts(
        num_steps=walked.num_drafts,
        num_drafts=walked.num_drafts,
        num_accepted=walked.num_accepted,
        accepted_per_position=walked.accepted_per_position,
    )


def test_expected_blocks_of_two_rows_by_hand() -> None:
    # 3 tokens: with probability 1/2 the first block (row 0) accepts none, and then row 1 begins
    # another
    counts = expected_blocks(np.array([[0.5, 0.4], [0.25, 1.0]]), 3)
    assert counts.num_steps == pytest.approx(1 + 0.5)
    assert counts.accepted_per_position == pytest.approx((0.5 + 0.5 * 0.25, 0.5 * 0.4 + 0.5 * 0.25))
    assert tau_of([a / counts.num_steps for a in counts.accepted_per_position]) == pytest.approx(
        1 + 0.95 / 1.5
    )


def test_an_answer_of_one_token_has_no_block() -> None:
    assert expected_blocks(np.zeros((0, 2)), 1) == ExpectedCounts(
        num_steps=0, num_drafts=0, num_accepted=0, accepted_per_position=(0.0, 0.0)
    )
