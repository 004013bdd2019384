"""Telemetry of the learner.

Prometheus metrics and Weights & Biases, both updated by the journal's writes.

    metrics = Telemetry()
    journal = Journal(folder, observers=[to_stderr, metrics.observe])
    build_app(folder, metrics.registry)                # serves them under /metrics

Every label is bounded: servers by the fleet, and all other labels by tables in this module or by
MAX_VALUES. Tokens per target step are two counters and not a gauge, so they are correct for any
window and any sum over servers: `1 + rate(redraft_accepted_tokens_total[5m]) /
rate(redraft_drafts_total[5m])`.
"""

import math
from functools import singledispatchmethod
from pathlib import Path
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from redraft.online.fleet.server import CAPTURE_DROP_REASONS
from redraft.online.journal import (
    AcceptanceEntry,
    BufferEntry,
    Entry,
    FaultEntry,
    GateEntry,
    Observer,
    Phase,
    ServerEntry,
    StalenessEntry,
    StateEntry,
    SwapEntry,
    SwapOutcome,
    TrainingEntry,
    Verdict,
)

# Maximum number of values per label, because clients choose domain names; all others count as
# `other`.
MAX_VALUES = 64

DROP_REASONS = (
    *("bad_identifier", "bad_probabilities", "bad_sampling", "corrupt", "corrupt_on_disk"),
    *("damaged_files", "deleted", "duplicate", "evicted", "expired", "foreign", "forgotten"),
    *("no_rows", "not_finite", "other_adapter", "outside_vocabulary", "oversized", "past_target"),
    *("short_states", "spool_unreadable", "stateless", "textless", "unknown_penalty"),
    *CAPTURE_DROP_REASONS.values(),
)
"""Reasons reported by the buffer, then those reported by the servers."""

SWAP_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Telemetry:
    """Metrics for one learner, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._totals: dict[str, float] = {}
        self._values: dict[str, set[str]] = {}
        self._versions: dict[str, str] = {}
        self._drafts = self._counter("drafts", "Target steps that verified draft tokens", "server")
        self._accepted = self._counter("accepted_tokens", "Draft tokens accepted", "server")
        self._accepted_at = self._counter(
            "accepted_tokens_at_position",
            "Draft tokens accepted, by position from 1",
            "server",
            "position",
        )
        self._domain_drafts = self._counter(
            "domain_drafts",
            "Target steps of captured requests that verified draft tokens, by domain and thinking mode",
            "domain",
        )
        self._domain_accepted = self._counter(
            "domain_accepted_tokens", "Draft tokens accepted in captured requests", "domain"
        )
        self._version = self._gauge(
            "server_draft_info", "1 for the draft version a server runs", "server", "version"
        )
        self._make_of_buffer()
        self._make_of_training()
        # Created with 0, because a counter that appears with the first event shows no increase.
        for verdict in get_args(Verdict):
            self._verdicts.labels(verdict)
        for outcome in get_args(SwapOutcome):
            self._swaps.labels(outcome)
        for reason in DROP_REASONS:
            self._dropped.labels(self._bounded("reason", reason))

    def _make_of_buffer(self) -> None:
        self._records = self._gauge("buffer_records", "Records in the buffer")
        self._bytes = self._gauge("buffer_bytes", "Size of the buffer, in bytes")
        self._max_bytes = self._gauge("buffer_max_bytes", "Maximum size of the buffer, in bytes")
        self._held_out = self._gauge(
            "buffer_held_out_records", "Records held out from training, for the gate"
        )
        self._oldest_s = self._gauge(
            "buffer_oldest_age_seconds", "Age of the oldest record in the buffer, in seconds"
        )
        self._lag_s = self._gauge(
            "lag_seconds", "Age of the oldest record not trained on yet, in seconds"
        )
        self._lag_records = self._gauge("lag_records", "Records not trained on yet")
        self._dropped = self._counter("dropped_records", "Records dropped, by reason", "reason")

    def _make_of_training(self) -> None:
        self._step = self._gauge("train_step", "Optimizer steps of the draft in training")
        self._loss = self._gauge(
            "train_loss_nats", "Loss of the last step, in nats per position; NaN if not finite"
        )
        self._alpha = self._gauge(
            "train_alpha_ratio", "Acceptance sum_v min(p, q) on the records of the last step"
        )
        self._alpha_greedy = self._gauge(
            "train_alpha_greedy_ratio", "p(argmax q) on the records of the last step"
        )
        self._speed = self._gauge("train_tokens_per_second", "Training speed, in tokens per second")
        self._seen = self._counter("trained_records", "Fresh records trained on")
        self._skipped = self._counter(
            "skipped_records", "Fresh records skipped because training is slower than traffic"
        )
        self._verdicts = self._counter(
            "gate_verdicts", "Verdicts of the gate, by outcome", "verdict"
        )
        self._gain = self._gauge(
            "gate_gain_tokens",
            "Gain of the last verdict, in tokens per target step, and its confidence bounds",
            "bound",
        )
        self._staleness = self._gauge(
            "staleness_tokens",
            "tau of the served draft at its promotion less tau now, on held-out requests, "
            "and the 95% interval",
            "bound",
        )
        self._asleep = self._gauge(
            "asleep", "1 while the learner sleeps, because training is not worth it"
        )
        self._saved = self._gauge(
            "saved_steps", "Optimizer steps skipped because the learner slept"
        )
        self._swaps = self._counter("swaps", "Swaps requested of servers, by outcome", "outcome")
        self._swap_s = Histogram(
            "redraft_swap_duration_seconds",
            "Duration of successful swaps, in seconds",
            buckets=SWAP_BUCKETS_S,
            registry=self.registry,
        )
        self._phase = self._gauge(
            "phase", "1 for the current phase of the learner, 0 for the others", "phase"
        )
        self._faults = self._counter("faults", "Faults the learner recovered from, by kind", "what")
        self._last_s = self._gauge(
            "last_entry_timestamp_seconds",
            "Time of the last journal entry, in seconds since the epoch",
        )

    def observe(self, entry: Entry) -> None:
        self._last_s.set(entry.time_s)
        self._take(entry)

    @singledispatchmethod
    # Call the method below that is registered for the entry's type. These methods are all named
    # `_`, because they are never called by name.
    def _take(self, entry: Entry) -> None:
        raise TypeError(f"no metrics are defined for {type(entry).__name__}")

    @_take.register
    def _(self, entry: AcceptanceEntry) -> None:
        if entry.domain is not None:
            domain = self._bounded("domain", entry.domain)
            self._domain_drafts.labels(domain).inc(entry.drafts)
            self._domain_accepted.labels(domain).inc(entry.accepted)
            return
        server = entry.server or ""
        # This entry contains the counts since the previous entry, so they are added. Totals go
        # through `_advance`.
        self._drafts.labels(server).inc(entry.drafts)
        self._accepted.labels(server).inc(entry.accepted)
        for position, accepted in enumerate(entry.accepted_at, 1):
            self._accepted_at.labels(server, position).inc(accepted)
        if self._versions.get(server, entry.draft_version) != entry.draft_version:
            # A series is exported until it is removed, so otherwise both versions would be 1.
            self._version.remove(server, self._versions[server])
        self._versions[server] = entry.draft_version
        self._version.labels(server, entry.draft_version).set(1)

    @_take.register
    def _(self, entry: BufferEntry) -> None:
        self._records.set(entry.records)
        self._bytes.set(entry.bytes)
        self._max_bytes.set(_to_number(entry.max_bytes))
        self._held_out.set(entry.held_out)
        self._oldest_s.set(entry.oldest_s or 0)
        # If no record is waiting, the lag is 0 and not unknown.
        self._lag_s.set(_to_number(entry.lag_s) if entry.lag_records else 0)
        self._lag_records.set(entry.lag_records)
        for reason, total in entry.dropped.items():
            self._advance(
                self._dropped.labels(self._bounded("reason", reason)), f"dropped {reason}", total
            )

    @_take.register
    def _(self, entry: TrainingEntry) -> None:
        self._step.set(entry.step)
        self._loss.set(_to_number(entry.loss))
        self._alpha.set(_to_number(entry.alpha))
        self._alpha_greedy.set(_to_number(entry.alpha_greedy))
        self._speed.set(_to_number(entry.tokens_per_s))
        self._advance(self._seen, "seen", entry.records_seen, is_saved=True)
        self._advance(self._skipped, "skipped", entry.skipped, is_saved=True)

    @_take.register
    def _(self, entry: GateEntry) -> None:
        self._verdicts.labels(entry.verdict).inc()
        for bound, value in (("low", entry.low), ("mean", entry.gain), ("high", entry.high)):
            self._gain.labels(bound).set(_to_number(value))

    @_take.register
    def _(self, entry: StalenessEntry) -> None:
        for bound, value in (("low", entry.low), ("mean", entry.loss), ("high", entry.high)):
            self._staleness.labels(bound).set(_to_number(value))
        self._asleep.set(entry.is_asleep)
        self._saved.set(entry.steps_saved)

    @_take.register
    def _(self, entry: SwapEntry) -> None:
        self._swaps.labels(entry.outcome).inc()
        if entry.duration_ms is not None and entry.outcome in ("swapped", "rolled_back"):
            self._swap_s.observe(entry.duration_ms / 1e3)

    @_take.register
    def _(self, entry: ServerEntry) -> None:
        if entry.change == "left":
            # The address may never return, and its stale version would look like a stuck rollout.
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
            gauge.set(math.nan)  # an unknown value, which must not be shown as 0
        return gauge

    def _bounded(self, label: str, value: str) -> str:
        values = self._values.setdefault(label, set())
        if len(values) < MAX_VALUES:
            values.add(value)
        return value if value in values else "other"

    def _advance(self, counter: Counter, key: str, total: float, *, is_saved: bool = False) -> None:
        """Raise a counter to the journal's total. A lower total means a restart from 0.

        Checkpoints contain a total that `is_saved`. Its first value counts as 0, because Prometheus
        would otherwise see a jump from 0 to this value at each start of the learner.
        """
        before = self._totals.get(key, total if is_saved else 0)
        counter.inc(total - before if total >= before else total)
        self._totals[key] = total


def to_wandb(project: str, folder: Path) -> Observer:
    """Return an observer that sends every number to Weights & Biases.

    Without a login, the run is written offline. Its files are below `folder`.

    Raises:
        ModuleNotFoundError
    """
    import wandb  # imported here, because wandb is optional and slow to import

    from redraft.distill.train.loop import write_offline_unless_logged_in  # imports torch

    write_offline_unless_logged_in()
    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project=project, dir=folder, settings=wandb.Settings(console="off"))

    def observe(entry: Entry) -> None:
        run.log(_flatten_numbers(entry))

    return observe


def _flatten_numbers(entry: Entry) -> dict[str, float]:
    """Collect an entry's numbers by name, e.g. `acceptance/http://a:1/tau`."""
    fields = msgspec.to_builtins(entry)
    path = [str(fields[name]) for name in ("kind", "server", "domain") if fields.get(name)]
    # Only numbers at the top level are collected, so a gate's gains by domain are left out.
    return {
        "/".join([*path, name]): value
        for name, value in fields.items()
        if isinstance(value, int | float)
    }


def _to_number(value: float | None) -> float:
    return math.nan if value is None else value
