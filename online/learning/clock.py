"""A clock for record ages that does not follow the wall clock's jumps at once.

    wall clock agrees with the elapsed time     it is used
    it jumped                                   time continues at the expected rate
    it was consistent for 10 minutes            it is used again

Without this, a wall clock that is 8 days ahead for a few seconds would cause every record to be
deleted as too old.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

SLACK_S = 3600.0  # the wall clock is accepted up to this far from the expected time
# Seconds for which a clock that jumped must be consistent before it is used again.
BELIEVED_AFTER_S = 600.0


class _Reading(NamedTuple):
    wall_s: float
    elapsed_s: float

    def expect(self, elapsed_s: float) -> float:
        """Return the time that the wall clock shows at `elapsed_s` if it does not jump."""
        return self.wall_s + elapsed_s - self.elapsed_s


class SteadyClock:
    """A clock that does not follow the wall clock's jumps at once. Not thread-safe."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
        last_s: float | None = None,
        max_gap_s: float = math.inf,
    ) -> None:
        """Start from the current time of the wall clock if it is plausible.

        `wall` is in seconds since the epoch and may jump. `elapsed` is in seconds since an
        arbitrary moment and may not jump. The wall clock is not used at first if it is earlier than
        `last_s`, the last time known from before this process, or more than `max_gap_s` after it.
        """
        self._wall, self._elapsed = wall, elapsed
        now = _Reading(wall(), elapsed())
        gap_s = 0.0 if last_s is None else now.wall_s - last_s
        is_likely = -SLACK_S <= gap_s <= max_gap_s
        # If the wall clock is not used, time continues from `last_s`, which is `wall_s` minus the
        # gap.
        self._believed = now if is_likely else _Reading(now.wall_s - gap_s, now.elapsed_s)
        self._doubted: _Reading | None = None  # wall clock at the last jump; None while it is used
        self.problem = ""  # message from `now_s` while the wall clock is not used
        self.now_s()

    def now_s(self) -> float:
        """Return the wall clock's time since the epoch, or the expected one if that is implausible."""
        now = _Reading(self._wall(), self._elapsed())
        expected_s = self._believed.expect(now.elapsed_s)
        if abs(now.wall_s - expected_s) <= SLACK_S:
            return self._believe(now)
        if self._doubted is None or abs(now.wall_s - self._doubted.expect(now.elapsed_s)) > SLACK_S:
            # Time of the first reading after a jump. Another jump in the meantime restarts the ten
            # minutes.
            self._doubted = now
        if now.elapsed_s - self._doubted.elapsed_s >= BELIEVED_AFTER_S:
            return self._believe(now)
        self.problem = _describe(now.wall_s - expected_s)
        return expected_s

    def _believe(self, now: _Reading) -> float:
        self._believed, self._doubted, self.problem = now, None, ""
        return now.wall_s


def _describe(ahead_s: float) -> str:
    way = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"the clock is {abs(ahead_s) / 3600:.1f} hours {way} the expected time: if it "
        f"stays there for {BELIEVED_AFTER_S / 60:.0f} minutes, it will be used; until then, "
        "records age by the expected time"
    )
