"""The calibration of a draft's estimates of acceptance: measured, and corrected by two numbers.

A confidence head gives a logit z for every draft token. An engine takes sigmoid(z) for the chance that the token is
accepted, if all before it were, and verifies fewer tokens where the product of these chances is low. Estimates are
calibrated if, of the tokens with the estimate c, a share c is accepted.

    corrected estimate           sigmoid(scale * z + shift)                                  (Platt, 1999)
    fit of scale and shift       the most likely ones, under a prior at scale 1 and shift 0
    expected calibration error   sum over bins of the bin's share * |mean estimate - acceptance|  (Guo et al., 2017)

Every token counts as often as an engine reaches it: once for each block that it is drafted in, if all tokens of the
block before it are accepted. A confidence head is one linear layer for all positions of a block, so the correction goes
into its weights exactly, and cannot differ by position. The error is told by position.

T = rows at which a block can begin, K = draft tokens of a block, N = draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.eval.counts import walk_blocks

Array = NDArray[np.float64]

NUM_BINS = 10
"""Bins of equal width for the estimates between 0 and 1."""

MAX_STEPS = 50
"""Steps of Newton's method. The likelihood is concave, and a handful is enough."""


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Draft tokens with estimates."""

    logit_N: Array
    accepted_N: Array
    """Chance that the token is accepted, if all before it were; 0 or 1 if that is known."""
    weight_N: Array
    """How often an engine reaches the token, in expectation."""
    position_N: NDArray[np.int64]
    """Place in the block, from 0."""

    @staticmethod
    def from_blocks(logit_TK: Array, accept_TK: Array) -> Outcomes:
        """The outcomes over one text. Both arguments are by row and position, as in `eval.counts.expected_blocks`."""
        begins_T, reach_TK = walk_blocks(accept_TK)
        # a token is reached if all before it are accepted; the first one always is
        before_TK = np.concatenate([np.ones((len(reach_TK), 1)), reach_TK[:, :-1]], axis=1)
        positions_TK = np.broadcast_to(np.arange(accept_TK.shape[1]), accept_TK.shape)
        return Outcomes(
            logit_N=logit_TK.ravel(),
            accepted_N=accept_TK.ravel(),
            weight_N=(begins_T[:, None] * before_TK).ravel(),
            position_N=positions_TK.ravel(),
        )

    @staticmethod
    def join(parts: Sequence[Outcomes]) -> Outcomes:
        """All outcomes of one or more texts."""
        names = ("logit_N", "accepted_N", "weight_N", "position_N")
        return Outcomes(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def at(self, position: int) -> Outcomes:
        """The outcomes at one position."""
        kept_N = self.position_N == position
        return Outcomes(**{name: values[kept_N] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Correction:
    """z becomes scale * z + shift."""

    scale: float
    shift: float

    def estimate(self, logit_N: Array) -> Array:
        """The corrected estimates of the acceptance, [N]."""
        return _sigmoid(self.scale * logit_N + self.shift)


AS_IS = Correction(1.0, 0.0)


def calibration_error(estimate_N: Array, outcomes: Outcomes) -> float:
    """The expected calibration error of estimates, between 0 and 1; 0 if no token is reached."""
    # An estimate of 1 belongs to the last bin.
    bin_N = np.minimum((estimate_N * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    missed_N = outcomes.weight_N * (estimate_N - outcomes.accepted_N)
    whole = outcomes.weight_N.sum()
    # |sum of missed| in a bin is the bin's weight times |mean estimate - acceptance|, also in an empty one.
    return float(np.abs(np.bincount(bin_N, missed_N, NUM_BINS)).sum() / whole) if whole > 0 else 0.0


def fit_correction(outcomes: Outcomes) -> Correction:
    """The most likely correction, by Newton's method.

    A normal prior of standard deviation 1 at no correction keeps it finite, e.g. if everything is accepted. It weighs
    as much as a token or two.
    """
    z_N2 = np.stack([outcomes.logit_N, np.ones_like(outcomes.logit_N)], axis=1)
    start = np.array([AS_IS.scale, AS_IS.shift])

    def cost(at: Array) -> float:
        logit_N = z_N2 @ at
        # -log likelihood of a token accepted with chance y: softplus(logit) - y * logit
        each_N = np.logaddexp(0, logit_N) - outcomes.accepted_N * logit_N
        return float(outcomes.weight_N @ each_N + 0.5 * ((at - start) ** 2).sum())

    found = start
    for _ in range(MAX_STEPS):
        estimate_N = _sigmoid(z_N2 @ found)
        slope = z_N2.T @ (outcomes.weight_N * (estimate_N - outcomes.accepted_N)) + found - start
        # The identity is the prior's part. It keeps the matrix regular even if all logits are equal.
        bend = (z_N2.T * (outcomes.weight_N * estimate_N * (1 - estimate_N))) @ z_N2 + np.eye(2)
        step = np.linalg.solve(bend, slope)
        # far from the optimum a whole step may climb; half of it, or of that, goes down
        length = next((2.0**-i for i in range(30) if cost(found - 2.0**-i * step) <= cost(found)), 0.0)
        found = found - length * step
        if np.abs(length * step).max() < 1e-9:
            break
    return Correction(float(found[0]), float(found[1]))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A correction and its effect on texts that it was not fitted on."""

    correction: Correction
    measured: Outcomes

    @property
    def error_before(self) -> float:
        return calibration_error(AS_IS.estimate(self.measured.logit_N), self.measured)

    @property
    def error_after(self) -> float:
        return calibration_error(self.correction.estimate(self.measured.logit_N), self.measured)

    def to_json(self) -> dict[str, Any]:
        """The correction, the errors before and after, and both by position, with mean estimates and acceptance."""
        return {
            "scale": self.correction.scale,
            "shift": self.correction.shift,
            "num_tokens": float(self.measured.weight_N.sum()),
            "error_before": self.error_before,
            "error_after": self.error_after,
            "by_position": [
                self._describe(self.measured.at(k)) for k in range(int(self.measured.position_N.max()) + 1)
            ],
        }

    def _describe(self, here: Outcomes) -> dict[str, float]:
        whole = max(float(here.weight_N.sum()), 1e-12)
        before_N, after_N = AS_IS.estimate(here.logit_N), self.correction.estimate(here.logit_N)
        return {
            "num_tokens": float(here.weight_N.sum()),
            "acceptance": float(here.weight_N @ here.accepted_N) / whole,
            "estimate_before": float(here.weight_N @ before_N) / whole,
            "estimate_after": float(here.weight_N @ after_N) / whole,
            "error_before": calibration_error(before_N, here),
            "error_after": calibration_error(after_N, here),
        }


def calibrate(texts: Sequence[Outcomes]) -> Calibration | None:
    """A correction fitted on every other text, and measured on the rest.

    None if a half has no draft token, or a number is not finite.
    """
    if len(texts) < 2:
        return None
    # Alternate texts: both halves get the same mix, however the texts are ordered.
    fitted, measured = Outcomes.join(texts[::2]), Outcomes.join(texts[1::2])
    for half in (fitted, measured):
        if not (np.isfinite([half.logit_N, half.accepted_N]).all() and half.weight_N.sum() > 0):
            return None
    return Calibration(correction=fit_correction(fitted), measured=measured)


def _sigmoid(logit_N: Array) -> Array:
    # by tanh, which overflows for no logit
    return 0.5 * (1 + np.tanh(0.5 * logit_N))
