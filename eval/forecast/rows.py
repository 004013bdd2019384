"""Acceptance of one draft step, row by row.

Training metrics, the forecast, `redraft eval` and the gate all use this.

B = batch, T = tokens, N = rows, V = target vocabulary, W = draft vocabulary, M = tokens whose p is
known, K = num_speculative_tokens. p = target, q = draft.

    draft step ── logits ──► q [N, W] ─┐
                                       ├─► StepRates: alpha, alpha_greedy, accept, agree
    target ────────────────► p [N, M] ─┘   (M = V, or the top-k ids kept)
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redraft.engine.sampling import Sampling
from redraft.eval.acceptance import alpha, probabilities
from redraft.eval.forecast.sampled import sampled_probabilities, sampled_topk
from redraft.heads.draft import Batch, Draft, DraftStep, ExactTarget, TargetSignal, TopKTarget

MOST_ODDS = 40.0  # vLLM clips log odds at this value.
# Number of rows whose distributions are in memory at once; a larger number is no faster.
ROWS_A_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """The target's distribution in N rows."""

    p_NM: Tensor
    ids_NM: Tensor | None = None
    """Token id of each column, distinct within a row. None if the columns are the vocabulary."""

    def probability(self, token_N: Tensor) -> Tensor:
        """Return p(token), [N]; 0 if the token was not kept."""
        if self.ids_NM is None:
            return self.p_NM.gather(-1, token_N[:, None]).squeeze(-1)
        # Ids are distinct within a row, so the sum has at most one term.
        return torch.where(self.ids_NM == token_N[:, None], self.p_NM, 0).sum(-1)

    @property
    def best(self) -> Tensor:
        """Return argmax p as a token id, [N]. On a tie, it is the lowest id."""
        if self.ids_NM is None:
            return self.p_NM.argmax(-1)
        # argmax over columns would break ties by their order. Over a vocabulary, ties go to the
        # lowest token id.
        is_best_NM = self.p_NM == self.p_NM.amax(-1, keepdim=True)
        return self.ids_NM.masked_fill(~is_best_NM, torch.iinfo(self.ids_NM.dtype).max).amin(-1)


def target_rows(
    distribution: ExactTarget | TopKTarget, rows_N: Tensor, sampling: Sampling
) -> TargetRows:
    """The target's distribution, as served, in `rows_N` of the flattened batch."""
    if isinstance(distribution, TopKTarget):
        p_NM = sampled_topk(distribution.log_probs_BTK.flatten(0, 1)[rows_N], sampling)
        return TargetRows(p_NM=p_NM, ids_NM=distribution.ids_BTK.flatten(0, 1)[rows_N])
    return TargetRows(p_NM=sampled_probabilities(distribution.logits(rows_N), sampling))


@dataclass(frozen=True, kw_only=True)
class StepRates:
    """A draft step compared with the target in N rows.

    Each rate is computed on access. A reduced draft vocabulary is mapped here: tokens outside it
    have q = 0 and are never drafted. If only the target's top-k ids are known, alpha and
    alpha_greedy are lower bounds, because p is taken as 0 in the tail.
    """

    target: TargetRows
    q_NW: Tensor
    draft_ids_W: Tensor | None
    """int64, target ids by draft id, ascending. None if both vocabularies are equal."""

    @functools.cached_property
    def token(self) -> Tensor:
        """argmax q as a token id, [N]."""
        best_N = self.q_NW.argmax(-1)
        return best_N if self.draft_ids_W is None else self.draft_ids_W[best_N]

    @property
    def alpha(self) -> Tensor:
        """sum_v min(p, q), [N]: the acceptance probability of a token drawn from q."""
        target = self.target
        if target.ids_NM is not None:
            return alpha(target.p_NM, self._look_up_q(target.ids_NM))
        # Outside the draft's vocabulary, q and therefore min(p, q) are 0, so those columns can be
        # omitted.
        p_NW = target.p_NM if self.draft_ids_W is None else target.p_NM[:, self.draft_ids_W]
        return alpha(p_NW, self.q_NW)

    @property
    def alpha_greedy(self) -> Tensor:
        """p(argmax q), [N]: the acceptance probability of the draft's most probable token."""
        return self.target.probability(self.token)

    @property
    def agree(self) -> Tensor:
        """Whether argmax q = argmax p, bool [N]."""
        return self.token == self.target.best

    def accept(self, label_N: Tensor, *, is_sampled: bool) -> Tensor:
        """P(label drafted and accepted) given the text, [N]; see `eval.forecast.verification`."""
        if not is_sampled:
            return (self.token == label_N).float()
        return self.ratio(label_N).clamp(max=1)

    def ratio(self, label_N: Tensor) -> Tensor:
        """Return q(label) / p(label), [N]. It is always finite."""
        q_N = self._look_up_q(label_N[:, None]).squeeze(-1)
        # 0 / 0 is NaN: a label that has probability 0 under both counts as 0. x / 0 becomes a very
        # large number.
        return (q_N / self.target.probability(label_N)).nan_to_num(0)

    def _look_up_q(self, ids_NM: Tensor) -> Tensor:
        """q at these token ids, [N, M]."""
        if self.draft_ids_W is None:
            return self.q_NW.gather(-1, ids_NM)
        # For an id that the draft does not have, this is a neighbour's column, which the comparison
        # masks.
        at_NM = torch.searchsorted(self.draft_ids_W, ids_NM).clamp(max=len(self.draft_ids_W) - 1)
        return self.q_NW.gather(-1, at_NM) * (self.draft_ids_W[at_NM] == ids_NM)


def step_rates(
    step: DraftStep, rows_N: Tensor, target: TargetRows, temperature: float
) -> StepRates:
    """The rates of a draft step in `rows_N` of the flattened batch.

    `target` contains the rows that correspond to `rows_N`. Of the sampling parameters, only the
    temperature changes q.
    """
    q_NW = probabilities(step.logits(rows_N), temperature)
    return StepRates(target=target, q_NW=q_NW, draft_ids_W=step.draft_ids_W)


def read_log_odds(logits_NW: Tensor, temperature: float) -> Tensor:
    """log(q / (1 - q)) of the most probable token, [N], as used by vLLM's estimator.

    At temperature 0, the estimator uses q at temperature 1.
    """
    warm_NW = logits_NW.float() / (temperature or 1.0)
    others_N = (warm_NW - warm_NW.amax(-1, keepdim=True)).exp().sum(-1) - 1
    return -others_N.clamp_min(0).log().clamp(-MOST_ODDS, MOST_ODDS)


@dataclass(frozen=True, kw_only=True)
class ComparedRows:
    """A draft step compared with the target, by draft row.

    Outside the step's mask, values are 0 and False.
    """

    mask_BT: Tensor
    alpha_BT: Tensor
    alpha_greedy_BT: Tensor
    agree_BT: Tensor
    """bool, whether argmax q = argmax p."""
    token_BT: Tensor
    """int64, argmax q as a token id."""


def compare_rows(step: DraftStep, distribution: ExactTarget | TopKTarget) -> ComparedRows:
    """Return alpha, alpha_greedy and agreement of one draft step at temperature 1.

    They are computed for every row in the step's mask.
    """
    rows_N = step.mask_BT.flatten().nonzero().squeeze(-1)
    # Rows outside the mask stay 0.
    results_3N = torch.zeros(3, step.mask_BT.numel(), device=rows_N.device)
    token_N = torch.zeros(step.mask_BT.numel(), dtype=torch.int64, device=rows_N.device)
    for chunk_N in torch.split(rows_N, ROWS_A_CHUNK):
        # In the flattened batch, the row `shift` later belongs to the same text, which the step's
        # mask ensures.
        rates = step_rates(
            step, chunk_N, target_rows(distribution, chunk_N + step.shift, Sampling()), 1.0
        )
        rates_3C = torch.stack([rates.alpha, rates.alpha_greedy, rates.agree.float()])
        results_3N[:, chunk_N] = rates_3C.float()
        token_N[chunk_N] = rates.token
    alpha_BT, alpha_greedy_BT, agree_BT = results_3N.view(3, *step.mask_BT.shape)
    return ComparedRows(
        mask_BT=step.mask_BT,
        alpha_BT=alpha_BT,
        alpha_greedy_BT=alpha_greedy_BT,
        agree_BT=agree_BT.bool(),
        token_BT=token_N.view_as(step.mask_BT),
    )


def take_draft_steps(
    draft: Draft, batch: Batch, signal: TargetSignal, num_speculative_tokens: int
) -> list[DraftStep]:
    """Return the draft steps for K = `num_speculative_tokens`: one if autoregressive, else K.

    Raises:
        ValueError: the draft has too few draft steps.
    """
    steps = draft.draft_steps(batch, signal, num_speculative_tokens)
    needed = 1 if draft.is_autoregressive else num_speculative_tokens
    if len(steps) < needed:
        raise ValueError(
            f"the draft has {len(steps)} draft steps, so num_speculative_tokens can be at most "
            f"that, not {num_speculative_tokens}"
        )
    return steps[:needed]


def block_matches(
    compared: Sequence[ComparedRows], num_speculative_tokens: int, is_autoregressive: bool
) -> tuple[Tensor, Tensor]:
    """Return whether each drafted token matches, and whether it has a label, bool [B, T, K] each.

    The j-th token drafted in a row matches if it is the target's greedy token. Both results are
    teacher-forced, so they assume that all earlier tokens match.
    """
    if not is_autoregressive:
        return (
            torch.stack([rows.agree_BT for rows in compared], dim=-1),
            torch.stack([rows.mask_BT for rows in compared], dim=-1),
        )
    # The j-th token of a block that starts at row t is this draft's proposal at row t + j.
    ahead = (0, num_speculative_tokens - 1)
    agree_BT = torch.nn.functional.pad(compared[0].agree_BT, ahead)
    mask_BT = torch.nn.functional.pad(compared[0].mask_BT, ahead)
    # [B, T + K - 1] is split into windows of K: [B, T, K]. The padding is False, so no block
    # extends past the row's end.
    return agree_BT.unfold(1, num_speculative_tokens, 1), mask_BT.unfold(
        1, num_speculative_tokens, 1
    )
