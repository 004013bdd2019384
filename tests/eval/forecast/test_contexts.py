"""Acceptance by the length of the context in which a block begins, against a walk by hand.

K = draft tokens
"""

from __future__ import annotations

import numpy as np
import pytest

from redraft.engine.counts import (
    AcceptanceCounts,
    add_by_context,
    cut_blocks,
    describe_contexts,
    expected_blocks,
    format_contexts,
    simulate_blocks,
    split_by_context,
)
from redraft.engine.parity.run import Block, Dump, EngineRun

K = 3


def walk(matches_TK: np.ndarray, num_output: int, num_prompt: int) -> dict[int, list[int]]:
    """The accepted tokens of each block, by the power of two below its context."""
    found: dict[int, list[int]] = {}
    at = 0
    while at < num_output - 1:
        accepted = next((j for j, fits in enumerate(matches_TK[at]) if not fits), K)
        length = num_prompt + at + 1
        found.setdefault(max(2**i for i in range(20) if 2**i <= length), []).append(accepted)
        at += accepted + 1
    return found


def draw_matches(seed: int) -> tuple[np.ndarray, int, int]:
    rng = np.random.default_rng(seed)
    num_output, num_prompt = int(rng.integers(1, 90)), int(rng.integers(1, 70))
    return rng.random((num_output, K)) < 0.6, num_output, num_prompt


def summarise(by_context: dict[int, AcceptanceCounts]) -> dict[int, tuple[float, float]]:
    return {power: (one.num_drafts, one.num_accepted) for power, one in by_context.items()}


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_a_long_row_are_counted_where_they_begin(seed: int) -> None:
    matches_TK, num_output, num_prompt = draw_matches(seed)
    split = split_by_context(matches_TK.astype(float), num_output, num_prompt)
    walked = walk(matches_TK, num_output, num_prompt)
    assert summarise(dict(split)) == {
        power: (len(accepted), sum(accepted)) for power, accepted in walked.items()
    }


def test_contexts_add_up_to_the_forecast_of_a_long_row() -> None:
    rng = np.random.default_rng(0)
    accept_TK, drafted_T = rng.random((200, K)), rng.random(199)
    whole = expected_blocks(accept_TK, 200, drafted_T)
    parts = split_by_context(accept_TK, 200, 100, drafted_T).values()
    for name in ("num_steps", "num_drafts", "num_accepted"):
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name))


@pytest.mark.parametrize("max_tokens", [None, 90, 200])
def test_contexts_of_an_engine_that_drafts_to_the_end_have_its_accepted_tokens(
    max_tokens: int | None,
) -> None:
    for seed in range(20):
        matches_TK, num_output, num_prompt = draw_matches(seed)
        whole = simulate_blocks(matches_TK, num_output, max_tokens)
        accept_TK, room_T = cut_blocks(matches_TK, num_output, max_tokens)
        parts = split_by_context(accept_TK, num_output, num_prompt).values()
        assert sum(part.num_accepted for part in parts) == whole.num_accepted
        steps = sum(part.num_steps for part in parts)
        assert steps == max(num_output - 1 - whole.num_accepted, 0) or max_tokens is None
        assert (room_T[: num_output - 1] > 0).all() or max_tokens == 90


def test_the_engines_blocks_are_counted_in_the_same_contexts() -> None:
    texts = [draw_matches(seed) for seed in range(6)]
    blocks, expected = [], []
    for request, (matches_TK, num_output, num_prompt) in enumerate(texts):
        at = 0
        while at < num_output - 1:
            blocks.append(Block(request=request, num_output=at + 1, drafted=[0] * K, passes=[]))
            accepted = next((j for j, fits in enumerate(matches_TK[at]) if not fits), K)
            at += accepted + 1
        # The last block is drafted, and never verified.
        blocks.append(Block(request=request, num_output=at + 1, drafted=[0] * K, passes=[]))
        expected.append(dict(split_by_context(matches_TK.astype(float), num_output, num_prompt)))
    run = EngineRun(
        target="target",
        speculative_config={"num_speculative_tokens": K},
        prompts=[[1] * num_prompt for *_, num_prompt in texts],
    )
    outputs = [[2] * (num_output + K) for _, num_output, _ in texts]
    dump = Dump(run=run, outputs=outputs, blocks=blocks)
    for first in (0, 2):
        counted = dump.counts_by_context(first)
        assert summarise(counted) == summarise(add_by_context(expected[first:]))


def test_contexts_are_shown_with_their_number_of_drafts() -> None:
    counts = {
        1024: AcceptanceCounts.from_blocks([3, 3], K),
        32768: AcceptanceCounts.from_blocks([1, 0, 0], K),
    }
    assert describe_contexts(counts) == [
        {"from_tokens": 1024, "to_tokens": 2047, "num_drafts": 2, "tau": 4.0},
        {"from_tokens": 32768, "to_tokens": 65535, "num_drafts": 3, "tau": 1.333333},
    ]
    assert format_contexts(counts) == (
        "tau 4.00 at 1,024 to 2,047 tokens (2 drafts), 1.33 at 32,768 to 65,535 tokens (3 drafts)"
    )
