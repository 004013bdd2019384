"""Compute the target's distribution from which a server samples.

It applies the temperature, then min_p, top_k and top_p, as vLLM does.

The filters change only p. vLLM samples draft tokens from the draft's unfiltered q at the request's
temperature (`compute_probs_and_sample_next_token` in its v1/spec_decode/llm_base_proposer.py), and
verifies them against the filtered p. A sampled draft then loses the tokens that it proposes outside
the filters. A greedy draft gains, because its token nearly always passes them.

N = rows, V = vocabulary, M = most probable tokens of a row, in descending order, K = kept top-k
ids.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redraft.engine.sampling import Sampling
from redraft.eval.acceptance import probabilities

# Number of most probable tokens to filter first, because sorting a vocabulary takes longer than a
# small target's pass.
PREFIX = 1024
LOG_ZERO = -1e30  # Logarithm of a probability that counts as 0.


def sampled_probabilities(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """p after temperature and filters, over the whole vocabulary, float32 or wider, [N, V]."""
    p_NV = probabilities(logits_NV, sampling.temperature)
    if not sampling.has_filter:
        return p_NV
    num_tokens = p_NV.shape[-1]
    # Take twice top_k, so that the tokens after the last one kept show whether there is a tie.
    size = min(num_tokens, 2 * sampling.top_k or PREFIX)
    top_NM, ids_NM = p_NV.topk(size)
    rest_N = 1 - top_NM.sum(-1)
    if size < num_tokens and not _decides(top_NM, rest_N, sampling):
        (top_NM, ids_NM), rest_N = p_NV.sort(descending=True), torch.zeros_like(rest_N)
    return torch.zeros_like(p_NV).scatter(-1, ids_NM, filter_sorted(top_NM, rest_N, sampling))


def sampled_topk(log_probs_NK: Tensor, sampling: Sampling) -> Tensor:
    """p after temperature and filters over the K most probable tokens, [N, K].

    The input is log-probabilities at temperature 1.

    Of the other tokens, only the total mass at temperature 1 is known:

    top_k up to K                       exact, at every temperature
    temperature 1                       exact if the filters end within the K tokens. If top_p does
                                        not, the tokens that it keeps are assumed to add up to
                                        top_p: off by less than one token's mass.
    any other case                      the others are taken as 0. Below 1, their mass is less than
                                        p_K^(1/T - 1) times that at temperature 1, where p_K is the
                                        smallest of the K; above 1, p is too high.
    """
    if sampling.temperature == 0:
        return F.one_hot(
            torch.zeros(len(log_probs_NK), dtype=torch.int64), log_probs_NK.shape[1]
        ).to(log_probs_NK)
    # Clamp, because the division by 0.01 may overflow, and the softmax of a row of -inf is NaN.
    log_probs_NK = log_probs_NK.clamp_min(LOG_ZERO)
    if sampling.temperature == 1:
        p_NK = log_probs_NK.exp()
        rest_N = (1 - p_NK.sum(-1)).clamp_min(0)
    else:
        p_NK = (log_probs_NK / sampling.temperature).softmax(-1)
        rest_N = p_NK.new_zeros(len(p_NK))
    return filter_sorted(p_NK, rest_N, sampling) if sampling.has_filter else p_NK


def filter_sorted(p_NM: Tensor, rest_N: Tensor, sampling: Sampling) -> Tensor:
    """p after the filters, [N, M].

    `rest_N` is the total mass of the less probable tokens, whose individual masses are unknown.
    """
    # This is vLLM's order: min_p, top_k, top_p. Each filter uses the probabilities that the
    # previous one leaves.
    if sampling.min_p:
        cut_N1 = sampling.min_p * p_NM[:, :1]
        p_NM, rest_N = _renormalise(p_NM * (p_NM >= cut_N1), rest_N * (p_NM[:, -1] >= cut_N1[:, 0]))
    if 0 < sampling.top_k <= p_NM.shape[-1]:
        # Ties with the last kept token are kept too.
        p_NM, rest_N = _renormalise(
            p_NM * (p_NM >= p_NM[:, sampling.top_k - 1, None]), torch.zeros_like(rest_N)
        )
    if sampling.top_p < 1:
        # A token is kept if the mass before it has not reached top_p, so the first token is always
        # kept.
        kept_NM = p_NM * (p_NM.cumsum(-1) - p_NM < sampling.top_p)
        # If the known tokens do not reach top_p, the filter ends among the unknown ones and keeps
        # about this much of their mass.
        missing_N = torch.minimum((sampling.top_p - kept_NM.sum(-1)).clamp_min(0), rest_N)
        p_NM, _ = _renormalise(kept_NM, missing_N)
    return p_NM


def _decides(top_NM: Tensor, rest_N: Tensor, sampling: Sampling) -> bool:
    """Whether, in every row, no token beyond the M most probable ones can pass the filters."""
    outside_N = torch.zeros_like(rest_N, dtype=torch.bool)
    if sampling.min_p:
        outside_N |= top_NM[:, -1] < sampling.min_p * top_NM[:, 0]
    if sampling.top_k:
        # It must be strictly smaller, so that no token ties with the last one kept. top_p is
        # applied later and cannot add tokens.
        outside_N |= top_NM[:, -1] < top_NM[:, sampling.top_k - 1]
    elif not sampling.min_p:  # min_p would renormalise first
        outside_N |= rest_N < 1 - sampling.top_p
    return bool(outside_N.all())


def _renormalise(kept_NM: Tensor, rest_N: Tensor) -> tuple[Tensor, Tensor]:
    """Divide both by their common sum.

    The sum is clamped, because all tokens of a synthetic row may have probability 0.
    """
    sum_N = (kept_NM.sum(-1) + rest_N).clamp_min(torch.finfo(kept_NM.dtype).tiny)
    return kept_NM / sum_N[:, None], rest_N / sum_N
