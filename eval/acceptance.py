"""The definitions of acceptance. Everything else in the project that says alpha or tau calls these.

N = rows, V = vocabulary, T = output tokens, K = num_speculative_tokens. p = target, q = draft.

`alpha`          probability that a draft token drawn from q is accepted: sum_v min(p, q) = 1 - TV(p, q)
`alpha_greedy`   the same for a draft that proposes its most probable token: p(argmax q)
`tau`            tokens emitted per target step, the target's own ("bonus") token included: 1 + accepted / drafts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def probabilities(logits_NV: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature), float32 or wider, [N, V]; one-hot at the first maximum for temperature 0."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits_NV.argmax(-1), logits_NV.shape[-1]).to(torch.float32)
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return (wide_NV / temperature).softmax(-1)


def alpha(p_NV: Tensor, q_NV: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_v min(p, q), [N]: the acceptance rate of speculative sampling (Leviathan et al., arXiv 2211.17192).

    `out`, [N, V], is memory to compute in, for a caller that does so many times.
    """
    return torch.minimum(p_NV, q_NV, out=out).sum(-1)


def alpha_greedy(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """p(argmax q), [N]: the acceptance rate of a draft that proposes its most probable token."""
    return p_NV.gather(-1, q_NV.argmax(-1, keepdim=True)).squeeze(-1)


def cumulative(conditional: Sequence[float]) -> list[float]:
    """Acceptance per position c_j = prod_{i<=j} a_i from a_j = P(token j accepted | the earlier ones were)."""
    products, product = [], 1.0
    for rate in conditional:
        product *= rate
        products.append(product)
    return products


def conditional(acceptance_per_position: Sequence[float]) -> list[float]:
    """a_j = c_j / c_{j-1}, the inverse of `cumulative`; 0 where nothing got that far."""
    before = [1.0, *acceptance_per_position[:-1]]
    return [now / earlier if earlier else 0.0 for now, earlier in zip(acceptance_per_position, before, strict=True)]


def tau(acceptance_per_position: Sequence[float]) -> float:
    """1 + sum_j c_j, in tokens per target step, from the acceptance per position (the share of drafts that reach j)."""
    return 1.0 + sum(acceptance_per_position)


def tau_independent(alpha: float, num_speculative_tokens: int) -> float:
    """(1 - alpha^(k+1)) / (1 - alpha): tau where every token is accepted with the same, independent alpha.

    Leviathan et al., arXiv 2211.17192, equation 1.
    """
    return tau(cumulative([alpha] * num_speculative_tokens))


@dataclass(frozen=True, kw_only=True)
class AcceptanceCounts:
    """What an engine counts about its drafts; all rates follow from it."""

    num_drafts: int
    """Blocks proposed, one per target step that had a draft."""
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]
    """Blocks whose j-th draft token was accepted, for j = 0..K-1."""

    @staticmethod
    def zero(num_speculative_tokens: int) -> AcceptanceCounts:
        return AcceptanceCounts(num_drafts=0, num_draft_tokens=0, accepted_per_position=(0,) * num_speculative_tokens)

    @staticmethod
    def of_blocks(accepted: Sequence[int], num_speculative_tokens: int) -> AcceptanceCounts:
        """Counts of full blocks of `num_speculative_tokens`, from the accepted draft tokens of each."""
        return AcceptanceCounts(
            num_drafts=len(accepted),
            num_draft_tokens=len(accepted) * num_speculative_tokens,
            accepted_per_position=tuple(sum(a > j for a in accepted) for j in range(num_speculative_tokens)),
        )

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        pairs = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return AcceptanceCounts(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            accepted_per_position=tuple(mine + its for mine, its in pairs),
        )

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_per_position(self) -> list[float]:
        """c_j, the share of drafts whose first j + 1 tokens were accepted."""
        return [accepted / max(self.num_drafts, 1) for accepted in self.accepted_per_position]

    @property
    def tau(self) -> float:
        """1 + accepted / drafts, tokens per target step; 1.0 where nothing was drafted."""
        return tau(self.acceptance_per_position)

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted tokens, which is neither alpha nor tau."""
        return self.num_accepted / max(self.num_draft_tokens, 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_drafts": self.num_drafts,
            "tau": self.tau,
            "acceptance_per_position": self.acceptance_per_position,
            "draft_acceptance_rate": self.draft_acceptance_rate,
        }


def simulate_blocks(match_TK: Tensor, num_output_tokens: int) -> AcceptanceCounts:
    """Counts of the blocks that greedy speculative decoding takes over one output, walked as vLLM walks it.

    `match_TK[t, j]` is true where the j-th token drafted after output token t is the target's greedy token, given that
    the earlier ones were. The prefill gives output token 0; then every step emits its accepted tokens and one more.
    vLLM counts accepted tokens *before* it cuts the output at its end (end token or length), so the last block counts
    in full: `match_TK` must be right for targets beyond the end too, and needs `num_output_tokens - 1` rows.
    """
    assert match_TK.shape[0] >= num_output_tokens - 1, "a match row for every output token but the last"
    runs = match_TK.long().cumprod(-1).sum(-1).tolist()
    accepted: list[int] = []
    emitted = 1
    while emitted < num_output_tokens:
        accepted.append(runs[emitted - 1])
        emitted += accepted[-1] + 1
    return AcceptanceCounts.of_blocks(accepted, match_TK.shape[1])


@dataclass(frozen=True, kw_only=True)
class ExpectedCounts:
    """`AcceptanceCounts` in expectation over what the draft proposes and what is accepted of it, given the text."""

    num_steps: float
    """Target steps after the prefill."""
    num_drafts: float
    """Those that had a draft to verify: all, but where the draft proposes only now and then (n-grams)."""
    accepted_per_position: tuple[float, ...]

    @property
    def num_accepted(self) -> float:
        return sum(self.accepted_per_position)


def expected_blocks(
    accept_TK: NDArray[np.float64], num_output_tokens: int, drafted_T: NDArray[np.float64] | None = None
) -> ExpectedCounts:
    """Expected counts of the blocks that speculative decoding takes over one output, at any temperature.

    `accept_TK[t, j]` is the probability that the token which stands j + 1 after output token t was drafted there and
    accepted, given that it stands there and that the earlier ones of the block were accepted. Verification leaves the
    text the target's own, and given the text it is a chain: a block that begins after token t ends after n accepted
    tokens with a probability of the row alone, and the next one begins n + 1 tokens on. Over texts of the target's this
    is the engine's expectation exactly. With entries 0 and 1 it is `simulate_blocks`, whose last block also counts in
    full. `drafted_T[t]`: the chance that anything is drafted after token t.
    """
    assert len(accept_TK) >= num_output_tokens - 1, "a row for every output token but the last"
    num_rows, k = max(num_output_tokens - 1, 0), accept_TK.shape[1]
    reach_TK = np.cumprod(accept_TK[:num_rows], axis=1)
    edges = np.concatenate([np.ones((num_rows, 1)), reach_TK, np.zeros((num_rows, 1))], axis=1)
    ends_TN = edges[:, :-1] - edges[:, 1:]
    begins_T = np.zeros(num_rows + k + 1)
    begins_T[:1] = 1.0
    for row in range(num_rows):
        begins_T[row + 1 : row + k + 2] += begins_T[row] * ends_TN[row]
    begins_T = begins_T[:num_rows]
    return ExpectedCounts(
        num_steps=float(begins_T.sum()),
        num_drafts=float(begins_T.sum() if drafted_T is None else begins_T @ drafted_T[:num_rows]),
        accepted_per_position=tuple((begins_T @ reach_TK).tolist()),
    )
