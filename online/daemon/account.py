"""Typed journal entries that report the learner's state."""

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric

from redraft.distill.train.step import StepStats
from redraft.engine.counts import AcceptanceCounts
from redraft.files.artifact import is_full
from redraft.files.sealed import DamagedError, set_aside
from redraft.online.daemon.state import State
from redraft.online.fleet.server import Served
from redraft.online.journal import (
    MAX_LABEL_CHARS,
    AcceptanceEntry,
    DomainGain,
    FaultEntry,
    GateEntry,
    Journal,
    StalenessEntry,
    StateEntry,
    TrainingEntry,
)
from redraft.online.learning.gate import Verdict
from redraft.online.learning.staleness import Staleness
from redraft.online.learning.trainer import Trainer

T = TypeVar("T")

OTHER_REASON_S = 60.0
"""Minimum time in seconds between two reports of the reason for a fault, because a server may give
a different reason at every poll.
"""

REMIND_S = 6 * 3600.0
"""A fault that lasts is written again after this many seconds, because the page shows the faults of
the last day.
"""


def name_disk_fault(error: OSError) -> str:
    return "disk_full" if is_full(error) else "disk_unwritable"


class Account:
    def __init__(self, journal: Journal, now_s: Callable[[], float] = time.monotonic) -> None:
        self.journal, self._now_s = journal, now_s
        self._faults: dict[tuple[str, str], tuple[str, float]] = {}
        """Reason for each current fault and the time at which it was written, by name and detail.
        """

    def state(
        self,
        state: State,
        reason: str,
        resident_bytes: int | None = None,
        promoted: int | None = None,
    ) -> None:
        self.journal.write(
            StateEntry(
                phase=state.phase.value,
                candidate=state.candidate,
                reason=reason,
                resident_bytes=resident_bytes,
                promoted=promoted,
            )
        )

    def fault(self, what: str, reason: str = "", detail: str | None = None) -> None:
        self.journal.write(FaultEntry(what=what, detail=detail, reason=reason))

    def disk_fault(self, error: OSError) -> None:
        self.fault(name_disk_fault(error), str(error), f"errno-{error.errno}")

    def begin_fault(self, what: str, detail: str, reason: str = "") -> None:
        """Report a lasting fault when it begins, again if its reason changes, and every REMIND_S.

        Changed reasons are written at least OTHER_REASON_S apart.
        """
        now_s = self._now_s()
        known, written_s = self._faults.get((what, detail), (None, -math.inf))
        pause_s = REMIND_S if reason == known else OTHER_REASON_S
        if now_s - written_s >= pause_s:
            self._faults[what, detail] = (reason, now_s)
            self.fault(what, reason, detail)

    def end_faults(self, *names: str, detail: str | None = None) -> None:
        """Clear the named faults, so that they are reported again if they recur.

        Without names, all faults with this detail are cleared.
        """
        for what, its in list(self._faults):
            if (not names or what in names) and detail in (None, its):
                del self._faults[what, its]

    def remind(self) -> None:
        """Report faults that have lasted for REMIND_S, also those that are reported only once."""
        for (what, detail), (reason, _) in list(self._faults.items()):
            self.begin_fault(what, detail, reason)

    def collect(self) -> list[Metric]:
        """Return the Prometheus gauge of current faults, for `CollectorRegistry.register`."""
        current = GaugeMetricFamily(
            "redraft_current_faults", "Faults that last, by kind", labels=["what"]
        )
        # Copied first, because the metrics are read on a different thread.
        for what, count in Counter(what for what, _ in list(self._faults)).items():
            current.add_metric([what], count)
        return [current]

    def load_or_set_aside(
        self, load: Callable[[Path], T], path: Path, otherwise: T, consequence: str
    ) -> T:
        """Load the value from the file.

        If the file is damaged, set it aside, report a fault that names the `consequence`, and
        return `otherwise` instead.
        """
        try:
            return load(path)
        except DamagedError as error:
            aside = set_aside(path)
            self.fault(
                "state_damaged", f"{error}: it was renamed to {aside.name}, and {consequence}"
            )
            return otherwise

    def step(self, stats: StepStats, trainer: Trainer, duration_s: float) -> None:
        self.journal.write(
            TrainingEntry(
                step=trainer.candidate.distillation.step_index,
                loss=None if stats.skipped else stats.loss,
                alpha=stats.alpha[0],
                alpha_greedy=stats.alpha_greedy[0],
                grad_norm=None if stats.skipped else stats.grad_norm,
                lr=stats.lr,
                tokens_per_s=stats.tokens / duration_s,
                records_seen=trainer.progress.records,
                waited_s=trainer.waited_s,
                step_s=trainer.step_s,
                paused_s=trainer.paused_s,
                skipped=trainer.progress.skipped,
            )
        )

    def verdict(self, verdict: Verdict, candidate: str, incumbent: str, paused_s: float) -> None:
        gain = verdict.overall
        domains, contexts = (
            {
                name[:MAX_LABEL_CHARS]: DomainGain(
                    gain=one.value, low=one.lower, high=one.upper, requests=one.num_requests
                )
                for name, one in parts.items()
            }
            for parts in (verdict.domains, verdict.contexts)
        )
        self.journal.write(
            GateEntry(
                verdict=verdict.decision.value,
                candidate=candidate,
                incumbent=incumbent,
                gain=gain.value if gain else None,
                low=gain.lower if gain else None,
                high=gain.upper if gain else None,
                tau_candidate=gain.tau_candidate if gain else None,
                tau_incumbent=gain.tau_incumbent if gain else None,
                requests=gain.num_requests if gain else 0,
                paused_s=paused_s,
                domains=domains,
                contexts=contexts,
                reason=verdict.reason,
            )
        )

    def staleness(
        self,
        version: str,
        staleness: Staleness | None,
        *,
        is_asleep: bool,
        steps_saved: int,
        reason: str,
    ) -> None:
        """Record how the served draft now compares with its own results at its promotion.

        `staleness` is None if there is nothing to compare.
        """
        names = ("tau_then", "tau_now", "loss", "low", "high")
        found: dict[str, Any] = {name: getattr(staleness, name, None) for name in names}
        self.journal.write(
            StalenessEntry(
                version=version,
                **found,
                requests=staleness.num_requests if staleness else 0,
                is_asleep=is_asleep,
                steps_saved=steps_saved,
                reason=reason or str(staleness or ""),
            )
        )

    def acceptance(
        self,
        accepted: AcceptanceCounts,
        version: str,
        *,
        server: str | None = None,
        target_version: str | None = None,
        pace: str = "",
        domain: str | None = None,
        served: Served | None = None,
    ) -> None:
        self.journal.write(
            AcceptanceEntry(
                server=server,
                target_version=target_version or None,
                pace=pace,
                draft_version=version or "none",
                domain=domain and domain[:MAX_LABEL_CHARS],
                drafts=accepted.num_drafts,
                accepted=accepted.num_accepted,
                accepted_at=tuple(accepted.accepted_per_position),
                tau=accepted.tau if accepted.num_drafts else None,
                served_drafts=served and served.counts.num_drafts,
                served_accepted=served and served.counts.num_accepted,
                served_tokens=served and served.tokens,
                served_s=served and served.time_s,
            )
        )
