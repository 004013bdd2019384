"""Acceptance at every token of the target's text, which is the basis of the forecast.

N = labels, V = target vocabulary. p = target, q = draft, x = the text's token.

Speculative sampling (Leviathan et al., arXiv 2211.17192) draws v from the proposal r and accepts it
with probability min(1, p(v) / r(v)). So the drafted token is x *and* accepted with probability
min(p(x), r(x)), and the text has x there with probability p(x). Given the text,

    P(x was drafted and accepted) = min(1, r(x) / p(x))

r is the distribution of the engine's draws:

    q at the request's temperature    drafts are sampled (vLLM's `draft_sample_method: probabilistic`)
    all mass on argmax q              drafts are greedy (vLLM's default, and always at temperature 0)
    all mass on the token looked up   n-grams

Block verification (Sun et al., arXiv 2403.10444) keeps a joint ratio for a block, w_0 = 1 and w_j =
min(1, w_(j-1) p_j / r_j), and accepts at least j tokens of a drafted block with probability w_j.
Given the text and j - 1 accepted tokens,

    P(x was drafted and accepted) = min(1, r(x) / (w_(j-1) p(x)))

This is never less than the value above, and gives the same counts if all mass is on one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redraft.engine.sampling import Sampling
from redraft.eval.forecast.rows import (
    ROWS_A_CHUNK,
    TargetRows,
    read_log_odds,
    step_rates,
    target_rows,
)
from redraft.heads.draft import DraftStep, ExactTarget

ESTIMATOR_SLOPE, ESTIMATOR_BIAS = 0.5, -0.2
"""Initial coefficients of vLLM's estimator for the log odds of a draft's most probable token. vLLM
fits both to the traffic. The fit changes the threshold, but hardly changes the order of the tokens.
"""

NOTHING = -1  # stands for the proposed token if there is none


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Tokens of a text, and the rows of a flattened [B, T] batch that predict them."""

    target_rows_N: Tensor
    ids_N: Tensor
    length: int
    """T, the number of rows per sequence of the batch."""


@dataclass(frozen=True, kw_only=True)
class VerifiedLabels:
    """The rates of one draft step at every label: each [N], float32 on the CPU."""

    accept_greedy_N: Tensor
    """P(label drafted and accepted) if the draft proposes its most probable token."""
    ratio_sampled_N: Tensor
    """r(label) / p(label) for a token sampled from q. At temperature 0 and for lookups, it equals
    `accept_greedy_N`, which gives the same counts.
    """
    alpha_N: Tensor
    """sum_v min(p, q), with the p and q from which the text was sampled."""
    alpha_greedy_N: Tensor
    """p(argmax q), with the p and q from which the text was sampled."""
    confidence_N: Tensor
    """The draft's confidence in its token, as adaptive verification uses it. It is 1 for a lookup."""


Proposals = DraftStep | Tensor  # a draft step, or the looked-up token for each label, int64 [N]


def verify_labels(
    proposals: Sequence[Proposals], distribution: ExactTarget, labels: Labels, sampling: Sampling
) -> list[VerifiedLabels]:
    """Verify every proposal at every label of a text that was sampled with `sampling`.

    The target's logits are computed once per row, for at most ROWS_A_CHUNK rows at a time.
    """
    results_S5N = torch.zeros(len(proposals), 5, len(labels.ids_N))
    for chunk_N in torch.split(
        torch.arange(len(labels.ids_N), device=labels.ids_N.device), ROWS_A_CHUNK
    ):
        rows_N, ids_N = labels.target_rows_N[chunk_N], labels.ids_N[chunk_N]
        target = target_rows(distribution, rows_N, sampling)
        for number, proposed in enumerate(proposals):
            # A looked-up token is a draft with all its mass on one token, so alpha = alpha_greedy =
            # p(token).
            if isinstance(proposed, Tensor):
                rates_5N = _verify_lookup(proposed[chunk_N], target, ids_N)
            else:
                rates_5N = _verify_step(
                    proposed, target, rows_N, ids_N, labels.length, sampling.temperature
                )
            results_S5N[number][:, chunk_N.cpu()] = rates_5N.cpu()
    return [
        VerifiedLabels(
            accept_greedy_N=a, ratio_sampled_N=b, alpha_N=c, alpha_greedy_N=d, confidence_N=e
        )
        for a, b, c, d, e in results_S5N
    ]


def _verify_lookup(token_N: Tensor, target: TargetRows, ids_N: Tensor) -> Tensor:
    """Return the five rates (`VerifiedLabels`) of one proposed token per row, [5, N]."""
    # NOTHING is -1, for which there is no column. Token 0 is read instead, and the rate is set to
    # 0.
    rate_N = target.probability(token_N.clamp(min=0)).masked_fill(token_N == NOTHING, 0)
    accept_N = (token_N == ids_N).float()
    return torch.stack([accept_N, accept_N, rate_N, rate_N, torch.ones_like(rate_N)])


def _verify_step(
    step: DraftStep,
    target: TargetRows,
    rows_N: Tensor,
    ids_N: Tensor,
    length: int,
    temperature: float,
) -> Tensor:
    """Return the five rates of a draft step, [5, N]; 0 where a draft row precedes the text."""
    # Flat rows: the remainder is the row within a text. The label of row 4 was drafted in row 4 -
    # shift.
    has_row_N = rows_N % length >= step.shift
    # Without a draft row, any row is read, and its rates are set to 0 below.
    draft_rows_N = rows_N - step.shift * has_row_N
    rates = step_rates(step, draft_rows_N, target, temperature)
    greedy_N = rates.accept(ids_N, is_sampled=False)
    ratio_N = rates.ratio(ids_N) if temperature > 0 else greedy_N
    if step.confidence_BT is None:
        odds_N = read_log_odds(step.logits(draft_rows_N), temperature)
        logit_N = ESTIMATOR_SLOPE * odds_N + ESTIMATOR_BIAS
    else:
        logit_N = step.confidence_BT.flatten()[step.places(draft_rows_N)]
    found = (greedy_N, ratio_N, rates.alpha, rates.alpha_greedy, logit_N.float().sigmoid())
    return torch.stack(found) * has_row_N
