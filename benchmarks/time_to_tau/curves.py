"""Curves of tau over minutes and over labels, and statistics derived from them, with intervals.

The value of a statistic is its mean over the seeds. Its error combines the error over questions (a
jackknife) and the error over seeds. All sides of a statistic share the questions and the seeds, so
the difficulty of a question cancels out. With one seed, there is no spread over seeds, and the
interval is only over questions.

M = marks, Q = questions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from redraft.eval.intervals import Estimate, sum_weighted

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """The results of one course at its marks."""

    minutes_M: Array
    labels_M: Array
    accepted_MQ: Array
    drafts_MQ: Array

    @property
    def taus(self) -> Array:
        """Return tau at every mark, [M]."""
        return np.asarray(1 + self.accepted_MQ.sum(1) / self.drafts_MQ.sum(1))

    def without(self, question: int) -> Curve:
        left_out = (np.delete(each, question, 1) for each in (self.accepted_MQ, self.drafts_MQ))
        return Curve(self.minutes_M, self.labels_M, *left_out)

    @property
    def last_minute(self) -> float:
        return float(self.minutes_M[-1])

    @property
    def last_label(self) -> float:
        return float(self.labels_M[-1])

    def at_minute(self, minute: float) -> float:
        """Return tau at this minute, interpolated linearly between two marks.

        Before the first mark and after the last one, tau is constant.
        """
        return float(np.interp(minute, self.minutes_M, self.taus))

    def at_label(self, label: float) -> float:
        return float(np.interp(label, self.labels_M, self.taus))

    def first_minute(self, tau: float) -> float:
        """Return the first minute at which tau is reached; infinite if it is never reached."""
        taus = self.taus.tolist()
        minutes = self.minutes_M.tolist()
        if taus[0] >= tau:
            return float(minutes[0])
        for i in range(1, len(taus)):
            if taus[i] >= tau:
                share = (tau - taus[i - 1]) / (taus[i] - taus[i - 1])
                return float(minutes[i - 1] + share * (minutes[i] - minutes[i - 1]))
        return math.inf


Statistic = Callable[..., float]
"""A function of one curve per side, all with the same seed."""


def estimate(statistic: Statistic, *sides: Sequence[Curve]) -> Estimate:
    """Estimate the statistic over all questions and seeds; `sides` have a curve for each seed.

    Raises:
        ValueError: the sides have different seeds or questions.
    """
    if len({len(side) for side in sides}) != 1 or not sides[0]:
        raise ValueError(f"each side needs the same seeds, got {[len(side) for side in sides]}")
    if len({curve.drafts_MQ.shape[1] for side in sides for curve in side}) != 1:
        raise ValueError("the curves are of different questions")
    by_seed = [statistic(*curves) for curves in zip(*sides, strict=True)]
    value = statistics.fmean(by_seed)
    over_seeds = Estimate(0.0, 0.0, 1.0)
    if len(by_seed) > 1:
        error = statistics.stdev(by_seed) / math.sqrt(len(by_seed))
        over_seeds = Estimate(0.0, error, len(by_seed) - 1.0)
    return sum_weighted([_over_questions(statistic, value, sides), over_seeds], [1, 1])


def _over_questions(
    statistic: Statistic, value: float, sides: Sequence[Sequence[Curve]]
) -> Estimate:
    drafts_Q = sum(curve.drafts_MQ.sum(0) for side in sides for curve in side)
    num_questions = len(drafts_Q)
    if num_questions == 1:
        return Estimate(value, math.inf, 1.0)
    left_out = [
        statistics.fmean(
            statistic(*(curve.without(question) for curve in curves))
            for curves in zip(*sides, strict=True)
        )
        for question in range(num_questions)
    ]
    squares = float(np.square(np.subtract(left_out, value)).sum())
    error = math.sqrt((num_questions - 1) / num_questions * squares)
    # This is Kish's effective number of questions, as in `eval.intervals`.
    effective = float(drafts_Q.sum() ** 2 / np.square(drafts_Q).sum())
    return Estimate(value, error, max(1.0, effective - 1))


def minutes_to_reach(ours: Curve, theirs: Curve) -> float:
    """Return our minutes to the peer's last tau; if we never reach it, all our minutes."""
    return min(ours.first_minute(theirs.at_minute(theirs.last_minute)), ours.last_minute)


def reaches(ours: Curve, theirs: Curve) -> bool:
    return math.isfinite(ours.first_minute(theirs.at_minute(theirs.last_minute)))


def ratio(ours: Curve, theirs: Curve) -> float:
    """Return our minutes to the peer's last tau, over the peer's minutes."""
    return minutes_to_reach(ours, theirs) / theirs.last_minute


def gain_at_equal_time(ours: Curve, theirs: Curve) -> float:
    """Return our tau minus the peer's, in the last minute that both have."""
    minute = min(ours.last_minute, theirs.last_minute)
    return ours.at_minute(minute) - theirs.at_minute(minute)


def gain_at_equal_labels(ours: Curve, theirs: Curve) -> float:
    """Return our tau minus the peer's, after the same number of answer tokens."""
    label = min(ours.last_label, theirs.last_label)
    return ours.at_label(label) - theirs.at_label(label)


def last_tau(curve: Curve) -> float:
    return float(curve.taus[-1])


def gain_in_tau(ours: Curve, theirs: Curve) -> float:
    return last_tau(ours) - last_tau(theirs)
