"""A guard for periodic tasks: an exception ends one round of a task, but not the task.

while True:
    await asyncio.sleep(pause_s)
    with guard.round("server-checks"):
        check_servers()
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger("redraft.guard")


def describe(error: Exception) -> str:
    """Return an error's type and place, and the system's words for an OSError.

    The message is left out, because it may quote a user's words, or name a different file each time.
    """
    frame = extract_tb(error.__traceback__)[-1]
    words = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
    return f"{type(error).__name__}{words} in {frame.name}, {frame.filename}:{frame.lineno}"


class Guard:
    def __init__(self, report: Callable[[str, str], None] | None = None) -> None:
        """Create a guard that also passes a task and its first failure of each type to `report`."""
        self.failures: Counter[str] = Counter()  # number of failed rounds, by task
        self._report = report
        self._logged: set[tuple[str, str]] = set()

    @contextmanager
    def round(self, task: str) -> Iterator[None]:
        """Count an exception raised in the block instead of propagating it.

        For each task, the first exception of each type is logged.
        """
        try:
            yield
        except Exception as error:
            self.failures[task] += 1
            kind = type(error).__name__
            if (task, kind) in self._logged:
                return
            self._logged.add((task, kind))
            reason = describe(error)
            logger.error("%s: failure %d, it continues: %s", task, self.failures[task], reason)
            if self._report is not None:
                try:
                    self._report(task, reason)
                except Exception:  # e.g. the journal's disk is full
                    logger.exception("%s: the failure could not be reported", task)

    def collect(self) -> list[Metric]:
        """Return the Prometheus counter of failed rounds, for `CollectorRegistry.register`."""
        # Imported here, because every worker loads this module for the plugin, which has no
        # metrics.
        from prometheus_client.core import CounterMetricFamily

        failed = CounterMetricFamily(
            "redraft_failed_rounds", "Rounds of periodic tasks that failed", labels=["task"]
        )
        for task, count in self.failures.copy().items():
            failed.add_metric([task], count)
        return [failed]
