"""Counts of drafts and accepted tokens, measured or expected, and the rates derived from them.

This module imports no torch.

T = output tokens, K = num_speculative_tokens.

    c_j    acceptance per position: fraction of drafts whose tokens 1..j were all accepted
    tau    tokens emitted per target step, including the target's ("bonus") token:
           1 + accepted / drafts
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Count = int | float
"""A count is an int if measured, and a float if expected. JSON preserves the difference."""


def tau(acceptance_per_position: Sequence[float]) -> float:
    """1 + sum_j c_j, in tokens per target step."""
    return 1.0 + sum(acceptance_per_position)


@dataclass(frozen=True, kw_only=True)
class AcceptanceCounts:
    """Drafts and accepted tokens over some requests. All rates follow from these counts."""

    num_drafts: Count
    """Number of target steps with a draft to verify."""
    num_accepted: Count
    """Accepted draft tokens."""
    num_draft_tokens: Count = 0
    """Number of proposed draft tokens. 0 if they were not counted."""
    accepted_per_position: tuple[Count, ...] = ()
    """Number of drafts whose j-th token was accepted, for j = 0..K-1. Empty if not counted by
    position.
    """
    tried_per_position: tuple[Count, ...] = ()
    """Number of drafts that had a j-th token and in which all earlier tokens were accepted. Empty
    if not counted.
    """

    @staticmethod
    def zero(num_speculative_tokens: int = 0) -> AcceptanceCounts:
        return AcceptanceCounts(
            num_drafts=0, num_accepted=0, accepted_per_position=(0,) * num_speculative_tokens
        )

    @staticmethod
    def from_blocks(accepted: Sequence[int], num_speculative_tokens: int) -> AcceptanceCounts:
        """Counts for full blocks, given the number of accepted tokens in each.

        A full block has `num_speculative_tokens` draft tokens.
        """
        return AcceptanceCounts(
            num_drafts=len(accepted),
            num_accepted=sum(accepted),
            num_draft_tokens=len(accepted) * num_speculative_tokens,
            # E.g. [2, 0, 1] accepted tokens in blocks of 2 give (2, 1) by position.
            accepted_per_position=tuple(
                sum(a > j for a in accepted) for j in range(num_speculative_tokens)
            ),
        )

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return _combine(self, other, 1)

    def since(self, earlier: AcceptanceCounts) -> AcceptanceCounts | None:
        """Return the counts added after `earlier`.

        Return None if a counter decreased because the engine restarted in between.
        """
        more = _combine(self, earlier, -1)
        counts = (more.num_drafts, more.num_accepted, more.num_draft_tokens)
        # A restart is not detected if all counters have already exceeded their earlier values.
        return (
            more
            if min(*counts, *more.accepted_per_position, *more.tried_per_position) >= 0
            else None
        )

    @property
    def acceptance_per_position(self) -> list[float]:
        """c_j for j = 1..K."""
        return [accepted / max(self.num_drafts, 1) for accepted in self.accepted_per_position]

    @property
    def tau(self) -> float:
        """1 + accepted / drafts, in tokens per target step. 1.0 if nothing was drafted."""
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens / drafted tokens. This is neither alpha nor tau."""
        return self.num_accepted / max(self.num_draft_tokens, 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_drafts": self.num_drafts,
            "tau": self.tau,
            "acceptance_per_position": self.acceptance_per_position,
            "draft_acceptance_rate": self.draft_acceptance_rate,
        }


def _combine(a: AcceptanceCounts, b: AcceptanceCounts, sign: int) -> AcceptanceCounts:
    """a + sign * b. Missing positions count as 0."""

    def add(x: Sequence[Count], y: Sequence[Count]) -> tuple[Count, ...]:
        return tuple(one + sign * other for one, other in zip_longest(x, y, fillvalue=0))

    return AcceptanceCounts(
        num_drafts=a.num_drafts + sign * b.num_drafts,
        num_accepted=a.num_accepted + sign * b.num_accepted,
        num_draft_tokens=a.num_draft_tokens + sign * b.num_draft_tokens,
        accepted_per_position=add(a.accepted_per_position, b.accepted_per_position),
        tried_per_position=add(a.tried_per_position, b.tried_per_position),
    )


@dataclass(frozen=True, kw_only=True)
class ExpectedCounts(AcceptanceCounts):
    """Expected counts, given the text. The expectation is over proposals and verification."""

    num_steps: float
    """Number of target steps after the prefill. It exceeds `num_drafts` if some steps have no draft
    (n-grams).
    """


def expected_blocks(
    accept_TK: NDArray[np.float64],
    num_output_tokens: int,
    drafted_T: NDArray[np.float64] | None = None,
) -> ExpectedCounts:
    """Expected counts for the blocks of speculative decoding over one output, at any temperature.

    `accept_TK[t, j]` is the probability of drafting and accepting the text's token at j + 1 after
    output token t, given that the earlier tokens of the block were accepted. `drafted_T[t]` is the
    probability that there is a draft after token t; None means 1. The prefill produces output token
    0. After that, every step emits the accepted tokens and one more. Verification preserves the
    target's distribution over texts, so for texts from the target, the result is exactly the
    engine's expectation. An engine counts accepted tokens *before* it truncates the output (at the
    end token or the maximum length), so the last block counts in full: rows must also be correct
    for tokens beyond the end, and there must be at least `num_output_tokens - 1` rows.
    """
    assert len(accept_TK) >= num_output_tokens - 1, (
        "there must be a row for every output token but the last"
    )
    begins_T, reach_TK = walk_blocks(accept_TK[: max(num_output_tokens - 1, 0)])
    return _sum_blocks(begins_T, reach_TK, drafted_T)


def split_by_context(
    accept_TK: NDArray[np.float64],
    num_output_tokens: int,
    num_prompt_tokens: int,
    drafted_T: NDArray[np.float64] | None = None,
) -> dict[int, ExpectedCounts]:
    """Split `expected_blocks` by the length of the context in which a block begins.

    The key is the largest power of two that is not greater than this length, which is the number of
    tokens in the prompt and the output so far. For example, key 1024 contains the blocks in
    contexts of 1,024 to 2,047 tokens.
    """
    begins_T, reach_TK = walk_blocks(accept_TK[: max(num_output_tokens - 1, 0)])
    # The first block begins after the prompt and output token 0.
    lengths_T = num_prompt_tokens + 1 + np.arange(len(begins_T))
    powers_T = 2 ** np.floor(np.log2(lengths_T)).astype(int)
    return {
        int(power): _sum_blocks(begins_T * (powers_T == power), reach_TK, drafted_T)
        for power in np.unique(powers_T[begins_T != 0])  # NaN counts as well
    }


def _sum_blocks(
    begins_T: NDArray[np.float64],
    reach_TK: NDArray[np.float64],
    drafted_T: NDArray[np.float64] | None,
) -> ExpectedCounts:
    num_steps = float(begins_T.sum())
    # [T] @ [T, K]: a row at which no block begins adds nothing.
    accepted_per_position = tuple((begins_T @ reach_TK).tolist())
    return ExpectedCounts(
        num_steps=num_steps,
        num_drafts=num_steps if drafted_T is None else float(begins_T @ drafted_T[: len(begins_T)]),
        num_accepted=sum(accepted_per_position),
        accepted_per_position=accepted_per_position,
    )


def describe_contexts(by_context: Mapping[int, AcceptanceCounts]) -> list[dict[str, Any]]:
    """Return a report row for each range of context lengths."""
    return [
        {
            "from_tokens": power,
            "to_tokens": 2 * power - 1,
            "num_drafts": round(counts.num_drafts, 6),
            "tau": round(counts.tau, 6),
        }
        for power, counts in by_context.items()
    ]


def name_context(power: int) -> str:
    """Name the range of context lengths for a key of `split_by_context`."""
    return f"{power:,} to {2 * power - 1:,} tokens"


def format_contexts(by_context: Mapping[int, AcceptanceCounts]) -> str:
    parts = [
        f"{counts.tau:.2f} at {name_context(power)} ({counts.num_drafts:,.0f} drafts)"
        for power, counts in by_context.items()
    ]
    return f"tau {', '.join(parts)}"


def add_by_context(
    counts: Iterable[Mapping[int, AcceptanceCounts]],
) -> dict[int, AcceptanceCounts]:
    """Sum the counts of several texts by context length, in ascending order."""
    total: dict[int, AcceptanceCounts] = {}
    for by_context in counts:
        for power, more in by_context.items():
            total[power] = total.get(power, AcceptanceCounts.zero()) + more
    return dict(sorted(total.items()))


THRESHOLDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1)
"""Thresholds on the survival probability. With the first, all tokens are verified; with the last,
none.
"""


@dataclass(frozen=True, kw_only=True)
class AdaptivePoint:
    """Expected counts if only tokens whose survival reaches a threshold are verified."""

    threshold: float
    num_steps: float
    num_accepted: float
    num_rows: float
    """Number of verified rows: one per step, and one per admitted token."""


def walk_adaptive(
    accept_TK: NDArray[np.float64], confidence_TK: NDArray[np.float64]
) -> list[AdaptivePoint]:
    """Expected counts for one output under adaptive verification, by survival threshold.

    Survival is the product of the draft's confidences up to and including a token. Over all
    requests in a step, vLLM admits the tokens with the highest survival: those above some
    threshold, which depends on the load. `accept_TK` is the same as in `walk_blocks`.
    `confidence_TK[t, j]` belongs to the token at j + 1 after output token t. For a block that
    departs from the text, the text's confidences are used. This affects the number of rows, but not
    the accepted tokens.
    """
    survival_TK = np.cumprod(confidence_TK, axis=1)
    points = []
    for threshold in THRESHOLDS:
        is_admitted_TK = survival_TK >= threshold
        begins_T, reach_TK = walk_blocks(accept_TK * is_admitted_TK)
        num_steps = float(begins_T.sum())
        points.append(
            AdaptivePoint(
                threshold=threshold,
                num_steps=num_steps,
                num_accepted=float((begins_T @ reach_TK).sum()),
                num_rows=num_steps + float(begins_T @ is_admitted_TK.sum(1)),
            )
        )
    return points


def verify_as_block(ratio_TK: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `accept_TK` under block verification (Sun et al., arXiv 2403.10444).

    `ratio_TK[t, j]` is r / p for the text's token at j + 1 after output token t, where r is the
    draft's distribution and p is the target's. See `eval.forecast.verification`.
    """
    accept_TK, joint_T = np.empty_like(ratio_TK), np.ones(len(ratio_TK))
    for j, ratio_T in enumerate(ratio_TK.T):
        accept_TK[:, j] = np.minimum(1, ratio_T / joint_T)
        # After a ratio of 0, no token is accepted, so the joint ratio is not used.
        joint_T = np.minimum(1, joint_T / np.maximum(ratio_T, np.finfo(float).tiny))
    return accept_TK


def walk_blocks(accept_TK: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (probability that a block begins, probability that it accepts at least j + 1 tokens).

    The first is [T], for a block that begins after output token t. The second is [T, K], for j =
    0..K-1. `accept_TK` is the same as in `expected_blocks`, without rows at which no block begins.
    """
    num_rows, k = accept_TK.shape
    reach_TK = np.cumprod(accept_TK, axis=1, dtype=np.float64)
    # Given the text, blocks are a Markov chain: a block that begins at t accepts exactly n tokens
    # with probability ends[t, n] = reach[t, n] - reach[t, n + 1] (reach = 1 for n = 0), and the
    # next block begins at t + n + 1. E.g. K = 2 and accept [0.8, 0.5] give reach [0.8, 0.4] and
    # edges [1, 0.8, 0.4, 0], so a block accepts 0, 1 or 2 tokens with probability 0.2, 0.4 or 0.4.
    edges = np.concatenate([np.ones((num_rows, 1)), reach_TK, np.zeros((num_rows, 1))], axis=1)
    ends_TN = edges[:, :-1] - edges[:, 1:]
    # The last row's block may end k + 1 rows later; the return statement removes these rows.
    begins_T = np.zeros(num_rows + k + 1)
    begins_T[:1] = 1.0
    for row in range(num_rows):
        # The prefill gives token 0, so the first block begins at row 0. Rows affect only later
        # rows, so one sweep is enough.
        begins_T[row + 1 : row + k + 2] += begins_T[row] * ends_TN[row]
    return begins_T[:num_rows], reach_TK


def cut_blocks(
    match_TK: ArrayLike, num_output_tokens: int, max_tokens: int | None
) -> tuple[NDArray[np.float64], NDArray[np.int_]]:
    """(acceptance of each drafted token, [T, K]; number of tokens drafted after row t, [T]).

    The arguments are as in `simulate_blocks`.
    """
    accept_TK = np.asarray(match_TK, np.float64)
    num_rows, k = accept_TK.shape
    rows_T, room_T = np.arange(num_rows), np.full(num_rows, k)
    if max_tokens is not None:
        room_T = np.clip(max_tokens - 2 - rows_T, 0, k)
        accept_TK = accept_TK * (np.arange(k) < num_output_tokens - 2 - rows_T[:, None])
    return accept_TK, room_T


def simulate_blocks(
    match_TK: ArrayLike, num_output_tokens: int, max_tokens: int | None = None
) -> AcceptanceCounts:
    """Counts for the blocks of greedy speculative decoding over one output.

    `match_TK[t, j]` is true if the j-th token drafted after output token t is the target's greedy
    token, given that the earlier ones match. This is `expected_blocks` with probabilities 0 and 1,
    whose counts are integers. With `max_tokens`, the maximum length of an answer, it counts like
    llama.cpp, which drafts only up to the second-last token of such an answer, and does not count
    the end token or anything after it. vLLM drafts and counts beyond the end.
    """
    accept_TK, room_T = cut_blocks(match_TK, num_output_tokens, max_tokens)
    walked = expected_blocks(accept_TK, num_output_tokens, (room_T > 0).astype(np.float64))
    begins_T, _ = walk_blocks(accept_TK[: max(num_output_tokens - 1, 0)])
    # Zeros and ones are exact in float64, so `round` changes only the type.
    return AcceptanceCounts(
        num_drafts=round(walked.num_drafts),
        num_accepted=round(walked.num_accepted),
        num_draft_tokens=round(float(begins_T @ room_T[: len(begins_T)])),
        accepted_per_position=tuple(round(count) for count in walked.accepted_per_position),
    )
