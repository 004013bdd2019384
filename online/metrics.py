"""What vLLM counts of speculative decoding, read from its Prometheus text."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

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


def _combine(a: Acceptance, b: Acceptance, sign: int) -> Acceptance:
    positions = max(len(a.accepted_at), len(b.accepted_at))
    first, second = ((*x.accepted_at, *(0,) * (positions - len(x.accepted_at))) for x in (a, b))
    return Acceptance(
        drafts=a.drafts + sign * b.drafts,
        accepted=a.accepted + sign * b.accepted,
        drafted=a.drafted + sign * b.drafted,
        accepted_at=tuple(x + sign * y for x, y in zip(first, second, strict=True)),
    )
