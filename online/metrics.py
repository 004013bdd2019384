"""Prometheus text, both ways: vLLM's speculative-decoding counters read, the learner's own state written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from online.buffer import BufferStatus
from online.state import Phase

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What the engine counted since it started, or between two readings."""

    drafts: float = 0
    """Target steps that verified a draft."""
    accepted: float = 0
    """Draft tokens accepted."""
    drafted: float = 0
    """Draft tokens proposed."""
    accepted_at: tuple[float, ...] = ()
    """Accepted tokens by draft position."""

    @property
    def tau(self) -> float | None:
        """Mean acceptance length, 1 + accepted / drafts, bonus token included; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    def __add__(self, other: Acceptance) -> Acceptance:
        """Both together, as of two servers of a group."""
        return _combine(self, other, 1)

    def since(self, earlier: Acceptance) -> Acceptance | None:
        """What was counted after `earlier`; None where a counter fell, because the engine has started anew."""
        difference = _combine(self, earlier, -1)
        counts = (difference.drafts, difference.accepted, difference.drafted, *difference.accepted_at)
        return difference if min(counts) >= 0 else None


def read_acceptance(text: str) -> Acceptance:
    """Sums over all engines of a server, from its /metrics.

    Raises: ValueError where the text is no Prometheus text, or the server does not speculate.
    """
    sums: dict[str, float] = {}
    accepted_at: dict[int, float] = {}
    # Only these lines: a busy server's page has thousands of others.
    lines = "\n".join(line for line in text.splitlines() if line.startswith(_PREFIX))
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX)
            sums[name] = sums.get(name, 0) + sample.value
            if name == "accepted_tokens_per_pos_total":
                position = int(sample.labels["position"])
                accepted_at[position] = accepted_at.get(position, 0) + sample.value
    if not {"drafts_total", "accepted_tokens_total", "draft_tokens_total"} <= sums.keys():
        raise ValueError(f"no {_PREFIX}* counters: the server runs without a draft, or without its /metrics")
    return Acceptance(
        drafts=sums["drafts_total"],
        accepted=sums["accepted_tokens_total"],
        drafted=sums["draft_tokens_total"],
        accepted_at=tuple(accepted_at[position] for position in sorted(accepted_at)),
    )


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """One server as the learner last saw it."""

    url: str
    draft_version: str | None
    """None: it did not answer."""
    is_alarming: bool = False
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Since the reading before."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that is shown of a learner."""

    phase: Phase
    version: str | None
    """The version that the fleet should serve."""
    buffer: BufferStatus
    lag_records: int
    """Training records that arrived and were not trained yet."""
    steps: int = 0
    """Optimizer steps since the process began."""
    loss: float | None = None
    servers: tuple[ServerState, ...] = ()
    verdicts: Mapping[str, int] = field(default_factory=dict)
    """Of the gate, by decision."""
    rollouts: Mapping[str, int] = field(default_factory=dict)
    """By what they ended in."""


def render(snapshot: Snapshot) -> bytes:
    """The learner's /metrics, of type CONTENT_TYPE."""
    registry = CollectorRegistry()
    registry.register(_Families(list(_families(snapshot))))
    return generate_latest(registry)


@dataclass(eq=False)  # a registry hashes its collectors
class _Families:
    """What prometheus-client takes for a collector."""

    families: list[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _families(snapshot: Snapshot) -> Iterator[Metric]:
    buffer = snapshot.buffer
    yield _gauge("redraft_phase", "1 for the phase the learner is in", "phase", {
        phase.value: float(phase is snapshot.phase) for phase in Phase
    })  # fmt: skip
    yield _gauge("redraft_buffer_bytes", "Size of the buffer", value=buffer.num_bytes)
    yield _gauge("redraft_buffer_training_records", "Records to train on", "domain", buffer.num_training)
    yield _gauge("redraft_buffer_held_out_records", "Records to judge by", "domain", buffer.num_held_out)
    yield _gauge("redraft_buffer_foreign_records", "Records of another target", value=buffer.num_foreign)
    yield _gauge("redraft_lag_records", "Training records not trained yet", value=snapshot.lag_records)
    yield _counter("redraft_records", "Records by what became of them", "outcome", buffer.counts)
    yield _counter("redraft_verdicts", "Verdicts of the gate", "decision", snapshot.verdicts)
    yield _counter("redraft_rollouts", "Rollouts by what they ended in", "outcome", snapshot.rollouts)
    yield CounterMetricFamily("redraft_train_steps", "Optimizer steps", value=snapshot.steps)
    if snapshot.loss is not None:
        yield _gauge("redraft_train_loss", "Loss of the last step, nats per position", value=snapshot.loss)
    yield from _server_families(snapshot)


def _server_families(snapshot: Snapshot) -> Iterator[Metric]:
    version = GaugeMetricFamily("redraft_server_draft", "1 for the version a server has", labels=["server", "version"])
    for server in snapshot.servers:
        if server.draft_version is not None:
            version.add_metric([server.url, server.draft_version], 1)
    yield version
    yield _gauge("redraft_server_up", "Whether the server answered", "server", {
        server.url: float(server.draft_version is not None) for server in snapshot.servers
    })  # fmt: skip
    yield _gauge("redraft_server_in_step", "Whether the server has the version it should have", "server", {
        server.url: float(server.draft_version == snapshot.version) for server in snapshot.servers
    })  # fmt: skip
    yield _gauge("redraft_server_acceptance_length", "Tokens per target step, bonus included", "server", {
        server.url: server.acceptance.tau for server in snapshot.servers if server.acceptance.tau is not None
    })  # fmt: skip
    yield _gauge("redraft_server_alarm", "Whether the draft is hardly accepted at all", "server", {
        server.url: float(server.is_alarming) for server in snapshot.servers
    })  # fmt: skip


def _gauge(
    name: str, text: str, label: str = "", values: Mapping[str, float] | None = None, *, value: float | None = None
) -> Metric:
    if values is None:
        return GaugeMetricFamily(name, text, value=value)
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, number in values.items():
        family.add_metric([key], number)
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, number in values.items():
        family.add_metric([key], number)
    return family


def _combine(a: Acceptance, b: Acceptance, sign: int) -> Acceptance:
    positions = max(len(a.accepted_at), len(b.accepted_at))
    first, second = ((*x.accepted_at, *(0,) * (positions - len(x.accepted_at))) for x in (a, b))
    return Acceptance(
        drafts=a.drafts + sign * b.drafts,
        accepted=a.accepted + sign * b.accepted,
        drafted=a.drafted + sign * b.drafted,
        accepted_at=tuple(x + sign * y for x, y in zip(first, second, strict=True)),
    )
