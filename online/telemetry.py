"""What watches the learner from outside: Prometheus metrics and Weights & Biases, both fed by the journal's writes.

    metrics = Telemetry()
    journal = Journal(folder, observers=[to_stderr, metrics.observe])
    page(folder, metrics.registry)                     # serves them under /metrics

Every label is bounded: servers by the fleet, the rest by tables here or by MAX_VALUES. Tokens per target step are two
counters and not a gauge, so that any window and any sum over servers is right:
`1 + rate(redraft_accepted_tokens_total[5m]) / rate(redraft_drafts_total[5m])`.
"""

from __future__ import annotations

import math
from functools import singledispatchmethod
from pathlib import Path
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from online.fleet import LOSSES
from online.journal import (
    AcceptanceEntry,
    BufferEntry,
    Entry,
    FaultEntry,
    GateEntry,
    Observer,
    Phase,
    ServerEntry,
    StateEntry,
    SwapEntry,
    SwapOutcome,
    TrainingEntry,
    Verdict,
)

MAX_VALUES = 64
"""Of one label: domains are what clients call them. What comes later is counted as `other`."""

DROP_REASONS = (
    *(
        "corrupt",
        "corrupt_on_disk",
        "damaged_files",
        "deleted",
        "duplicate",
        "evicted",
        "expired",
        "foreign",
        "forgotten",
        "other_domain",
        "stateless",
    ),
    *LOSSES.values(),
)
"""The buffer's, and the servers'."""

SWAP_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Telemetry:
    """The metrics of one learner, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._totals: dict[str, float] = {}
        self._values: dict[str, set[str]] = {}
        self._versions: dict[str, str] = {}
        self._drafts = self._counter("drafts", "Target steps that verified a draft", "server")
        self._accepted = self._counter("accepted_tokens", "Draft tokens accepted", "server")
        self._accepted_at = self._counter(
            "accepted_tokens_at_position", "Draft tokens accepted, by position from 1", "server", "position"
        )
        self._domain_drafts = self._counter("domain_drafts", "Target steps in captured requests", "domain")
        self._domain_accepted = self._counter("domain_accepted_tokens", "As many in captured requests", "domain")
        self._version = self._gauge("server_draft_info", "1 for the version a server has", "server", "version")
        self._records = self._gauge("buffer_records", "Records to train on")
        self._bytes = self._gauge("buffer_bytes", "Size of the buffer")
        self._max_bytes = self._gauge("buffer_max_bytes", "Size at which the buffer's oldest records go")
        self._held_out = self._gauge("buffer_held_out_records", "Records to judge by")
        self._oldest_s = self._gauge("buffer_oldest_age_seconds", "Age of the oldest record")
        self._lag_s = self._gauge("lag_seconds", "Age of the oldest record that was not trained yet")
        self._lag_records = self._gauge("lag_records", "Records that were not trained yet")
        self._dropped = self._counter("dropped_records", "Records that are gone or were never taken", "reason")
        self._step = self._gauge("train_step", "Optimizer steps of this draft")
        self._loss = self._gauge("train_loss_nats", "Loss of the last step, per position; NaN where it was not finite")
        self._alpha = self._gauge("train_alpha_ratio", "sum_v min(p, q) on the records of the last step")
        self._alpha_greedy = self._gauge("train_alpha_greedy_ratio", "p(argmax q) on the records of the last step")
        self._speed = self._gauge("train_tokens_per_second", "Speed of training")
        self._seen = self._counter("trained_records", "Fresh records trained")
        self._skipped = self._counter("skipped_records", "Fresh records passed over: training is slower than traffic")
        self._verdicts = self._counter("gate_verdicts", "Verdicts of the gate", "verdict")
        self._gain = self._gauge("gate_gain_tokens", "The last verdict's gain in tokens per target step", "bound")
        self._swaps = self._counter("swaps", "Swaps asked of servers", "outcome")
        self._swap_s = Histogram(
            "redraft_swap_duration_seconds", "Of successful swaps", buckets=SWAP_BUCKETS_S, registry=self.registry
        )
        self._phase = self._gauge("phase", "1 for the phase the learner is in", "phase")
        self._faults = self._counter("faults", "Faults that were survived", "what")
        self._last_s = self._gauge("last_entry_timestamp_seconds", "When the learner last said anything")
        # A counter that appears with its first event has no increase.
        for verdict in get_args(Verdict):
            self._verdicts.labels(verdict)
        for outcome in get_args(SwapOutcome):
            self._swaps.labels(outcome)
        for reason in DROP_REASONS:
            self._dropped.labels(self._bounded("reason", reason))

    def observe(self, entry: Entry) -> None:
        """Take up one entry of the journal."""
        self._last_s.set(entry.time_s)
        self._take(entry)

    @singledispatchmethod
    def _take(self, entry: Entry) -> None:
        raise TypeError(f"no metrics of {type(entry).__name__}")

    @_take.register
    def _(self, entry: AcceptanceEntry) -> None:
        if entry.domain is not None:
            domain = self._bounded("domain", entry.domain)
            self._domain_drafts.labels(domain).inc(entry.drafts)
            self._domain_accepted.labels(domain).inc(entry.accepted)
            return
        server = entry.server or ""
        self._drafts.labels(server).inc(entry.drafts)
        self._accepted.labels(server).inc(entry.accepted)
        for position, accepted in enumerate(entry.accepted_at, 1):
            self._accepted_at.labels(server, position).inc(accepted)
        if self._versions.get(server, entry.draft_version) != entry.draft_version:
            self._version.remove(server, self._versions[server])
        self._versions[server] = entry.draft_version
        self._version.labels(server, entry.draft_version).set(1)

    @_take.register
    def _(self, entry: BufferEntry) -> None:
        self._records.set(entry.records)
        self._bytes.set(entry.bytes)
        self._max_bytes.set(_number(entry.max_bytes))
        self._held_out.set(entry.held_out)
        self._oldest_s.set(entry.oldest_s or 0)
        self._lag_s.set(_number(entry.lag_s) if entry.lag_records else 0)
        self._lag_records.set(entry.lag_records)
        for reason, total in entry.dropped.items():
            self._advance(self._dropped.labels(self._bounded("reason", reason)), f"dropped {reason}", total)

    @_take.register
    def _(self, entry: TrainingEntry) -> None:
        self._step.set(entry.step)
        self._loss.set(_number(entry.loss))
        self._alpha.set(_number(entry.alpha))
        self._alpha_greedy.set(_number(entry.alpha_greedy))
        self._speed.set(_number(entry.tokens_per_s))
        self._advance(self._seen, "seen", entry.records_seen)
        self._advance(self._skipped, "skipped", entry.skipped)

    @_take.register
    def _(self, entry: GateEntry) -> None:
        self._verdicts.labels(entry.verdict).inc()
        for bound, value in (("low", entry.low), ("mean", entry.gain), ("high", entry.high)):
            self._gain.labels(bound).set(_number(value))

    @_take.register
    def _(self, entry: SwapEntry) -> None:
        self._swaps.labels(entry.outcome).inc()
        if entry.duration_ms is not None and entry.outcome in ("swapped", "rolled_back"):
            self._swap_s.observe(entry.duration_ms / 1e3)

    @_take.register
    def _(self, entry: ServerEntry) -> None:
        if entry.change == "left":  # its address may never be used again, and its version holds up no rollout
            for metric in (self._drafts, self._accepted, self._accepted_at, self._version):
                metric.remove_by_labels({"server": entry.server})
            self._versions.pop(entry.server, None)

    @_take.register
    def _(self, entry: StateEntry) -> None:
        for phase in get_args(Phase):
            self._phase.labels(phase).set(phase == entry.phase)

    @_take.register
    def _(self, entry: FaultEntry) -> None:
        self._faults.labels(self._bounded("what", entry.what)).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"redraft_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        gauge = Gauge(f"redraft_{name}", text, labels, registry=self.registry)
        if not labels:
            gauge.set(math.nan)  # not known yet, which is not 0
        return gauge

    def _bounded(self, label: str, value: str) -> str:
        values = self._values.setdefault(label, set())
        if len(values) < MAX_VALUES:
            values.add(value)
        return value if value in values else "other"

    def _advance(self, counter: Counter, key: str, total: float) -> None:
        """Bring a counter up to a total that the journal keeps. One that fell began anew."""
        before = self._totals.get(key, 0)
        counter.inc(total - before if total >= before else total)
        self._totals[key] = total


def to_wandb(project: str, folder: Path) -> Observer:
    """An observer of every number for Weights & Biases, by kind, server and domain; where nobody is logged in they are
    kept below `folder`.

    Raises: ModuleNotFoundError where wandb is not installed.
    """
    import wandb  # slow to import, and an extra

    from distill.loop import write_offline_unless_logged_in  # loads torch

    write_offline_unless_logged_in()
    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project=project, dir=folder, settings=wandb.Settings(console="off"))

    def observe(entry: Entry) -> None:
        run.log(_numbers(entry))

    return observe


def _numbers(entry: Entry) -> dict[str, float]:
    """The numbers of an entry by name, as `acceptance/http://a:1/tau`."""
    fields = msgspec.to_builtins(entry)
    path = [str(fields[name]) for name in ("kind", "server", "domain") if fields.get(name)]
    return {"/".join([*path, name]): value for name, value in fields.items() if isinstance(value, int | float)}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
