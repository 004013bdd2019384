"""Evaluate the acceptance measured in an engine.

It is compared with the published forecast or with the acceptance on training's held-out text, or
evaluated by itself.
"""

import math
from collections.abc import Iterator, Sequence

from redraft.engine.counts import AcceptanceCounts
from redraft.eval.intervals import estimate_tau_gain
from redraft.heads.doctor.pair import Finding

MIN_DIFFERENCE = 0.02
"""Minimum difference from the forecast that is reported, as a share of its accepted tokens. In the
forecast's own dtype, an engine's counts differ by at most 0.05%. With a different dtype, ties in
the target's greedy choice are broken differently.
"""

# In float32, maximum share of prompts whose counts differ from the forecast, because of ties.
MAX_APART = 0.25

MIN_SHARE = 0.75
"""Minimum acceptable share of the acceptance that training measured on held-out text. A different
kind of text costs some acceptance, but a wrong input costs far more.
"""

NUM_SIGMAS = 3.0  # Number of standard errors allowed for chance.
# A draft with a lower tau is useless: it costs a pass in every step and saves at most one step in
# ten.
MIN_TAU = 1.1
MIN_DRAFTS = 100  # number of drafts needed to evaluate the acceptance by itself or against training
TOO_GOOD = 0.97  # share of accepted tokens that no trained draft reaches on unseen text


PUBLISHED = "the forecast published with the draft"
OTHER_WEIGHTS = (
    "these are not the published weights, or the engine gives them different inputs: compare "
    "model.safetensors and config.json with the run's draft folder"
)


def find_missed_forecast(
    served: Sequence[AcceptanceCounts],
    expected: Sequence[AcceptanceCounts],
    *,
    is_exact: bool,
    source: str = PUBLISHED,
    cure: str = OTHER_WEIGHTS,
) -> Iterator[Finding]:
    """Yield a finding if the counts in serving do not match the published forecast.

    Both cover the same prompts. `is_exact` means that both computed in float32: their counts are
    then equal on nearly every prompt, so even a small fault is visible. If one of them used
    bfloat16, some ties are broken differently, so only a difference in the mean is evidence.
    """
    num_apart = sum(
        (s.num_accepted, s.num_drafts) != (e.num_accepted, e.num_drafts)
        for s, e in zip(served, expected, strict=True)
    )
    difference = estimate_tau_gain(served, expected)
    low, high = difference.interval()
    forecast = sum(expected, AcceptanceCounts.zero()).tau - 1
    # The difference exceeds chance, and is large enough to matter.
    in_mean = not low <= 0 <= high and abs(difference.value) >= MIN_DIFFERENCE * forecast
    # A single prompt may always be a tie.
    if not in_mean and not (is_exact and num_apart > max(1, MAX_APART * len(served))):
        return
    yield Finding(
        f"{source} is tau {1 + forecast:.3f} on these {len(served)} "
        "prompts, but serving measures "
        f"{1 + forecast + difference.value:.3f} (95% interval of the difference {low:+.3f} to "
        f"{high:+.3f}), and the counts of {num_apart} prompts differ",
        cure,
    )


def find_lost_acceptance(counts: AcceptanceCounts, trained_tau: float) -> Iterator[Finding]:
    """Yield a finding if serving accepts clearly less than training measured on held-out text.

    Use this for a draft without a forecast. Greedy answers are more predictable than held-out text.
    If no token is accepted, the standard error is 0, so a few drafts are not evidence.
    """
    served, expected = counts.tau - 1, trained_tau - 1
    if counts.num_drafts < MIN_DRAFTS:
        return
    if served + NUM_SIGMAS * _standard_error(counts) < MIN_SHARE * expected:
        yield Finding(
            f"training measured tau {trained_tau:.2f}, but serving measures {counts.tau:.2f} "
            f"({counts.num_drafts} drafts): {served / expected:.0%} of the expected accepted "
            "tokens",
            "the draft does not receive the same inputs as in training: check aux layer ids, norms, chat "
            "template and loss mask",
        )


def find_dead(counts: AcceptanceCounts) -> Iterator[Finding]:
    """Yield a finding if almost no draft token is accepted. No reference is needed."""
    if counts.num_drafts >= MIN_DRAFTS and counts.tau < MIN_TAU:
        yield Finding(
            f"the draft is useless: its tau is {counts.tau:.2f} over {counts.num_drafts} "
            "drafts, so it slows "
            "the server down",
            "it is untrained, damaged, or for a different target: train one for this target, or export "
            "it again",
        )


def find_too_good(counts: AcceptanceCounts) -> Iterator[Finding]:
    """Yield a finding if almost every draft token is accepted, on prompts without a forecast."""
    share = counts.num_accepted / max(counts.num_draft_tokens, 1)
    if counts.num_draft_tokens >= MIN_DRAFTS and share > TOO_GOOD:
        yield Finding(
            f"{share:.1%} of the draft tokens are accepted: the draft is a copy of the target, or "
            "it was trained on these prompts and answers",
            "serve a smaller draft than the target, or use --prompts that it was not trained on",
        )


def _standard_error(counts: AcceptanceCounts) -> float:
    c = counts.acceptance_per_position
    mean = sum(c)
    # E[n^2] = sum_j (2j + 1) c_j for a block with n accepted tokens: n = 2 has c = (1, 1), and 1 +
    # 3 = 4.
    variance = sum((2 * j + 1) * share for j, share in enumerate(c)) - mean**2
    return math.sqrt(max(variance, 0.0) / max(counts.num_drafts, 1))
