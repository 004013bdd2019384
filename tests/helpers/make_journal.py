"""A journal as a learner writes it over an hour.

Traffic shifts to another domain, and the draft follows.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from redraft.online.journal import (
    AcceptanceEntry,
    BufferEntry,
    FaultEntry,
    GateEntry,
    Journal,
    StalenessEntry,
    StateEntry,
    SwapEntry,
    TrainingEntry,
)

SERVERS = ("http://10.0.0.11:8000", "http://10.0.0.12:8000")
SECOND_DRAFTS = 400


class Clock:
    """A clock that stands still at the given time."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def make_journal(folder: Path, end_s: float, minutes: int = 60) -> Journal:
    """Two servers, three domains.

    V000011 is good on code, v000012 follows the shift, v000013 is rolled back.
    """
    clock, rng = Clock(end_s), random.Random(0)
    journal = Journal(folder, clock=clock)
    steps = minutes * 12
    swap, bad, back = round(0.55 * steps), round(0.80 * steps), round(0.84 * steps)
    for i in range(steps):
        clock.now_s = end_s - 5 * (steps - 1 - i)
        # The second server follows a wave later.
        versions = [_version(i, swap, bad, back), _version(i, swap + 14, 10**9, 0)]
        _write_acceptance(journal, rng, i / steps, versions)
        if i % 2 == 0:
            _write_learning(journal, rng, i, steps)
        _write_events(journal, i, steps, swap, bad, back)
    return journal


def _version(i: int, swap: int, bad: int, back: int) -> str:
    return "v000013" if bad <= i < back else "v000012" if i >= swap else "v000011"


def _tau(version: str, domain: str, at: float) -> float:
    quality = {
        "v000011": (3.25, 2.2, 2.05),
        "v000012": (3.15, 3.0, 2.7),
        "v000013": (2.4, 2.5, 1.9),
    }[version]
    return quality[("code", "prose", "chat").index(domain)] + 0.05 * math.sin(12 * at)


def _write_acceptance(journal: Journal, rng: random.Random, at: float, versions: list[str]) -> None:
    shift = 1 / (1 + math.exp(-18 * (at - 0.3)))
    share = {"code": 0.75 - 0.5 * shift, "prose": 0.15 + 0.45 * shift, "chat": 0.1 + 0.05 * shift}
    for server, version in zip(SERVERS, versions, strict=True):
        drafts = SECOND_DRAFTS * rng.uniform(0.8, 1.2)
        tau = sum(part * _tau(version, domain, at) for domain, part in share.items()) + rng.gauss(
            0, 0.04
        )
        journal.write(
            AcceptanceEntry(server=server, draft_version=version, **_counts(round(drafts), tau))
        )
    for domain, part in share.items():
        drafts = round(0.1 * SECOND_DRAFTS * part * rng.uniform(0.7, 1.3)) + 1
        tau = _tau(versions[0], domain, at) + rng.gauss(0, 0.09)
        counts = _counts(drafts, tau)
        journal.write(
            AcceptanceEntry(server=None, draft_version=versions[0], domain=domain, **counts)
        )


def _counts(drafts: int, tau: float) -> dict[str, object]:
    accepted = round(drafts * (tau - 1))
    kept = 0.5 * (tau - 1) / 1.2
    shape = [kept**position for position in range(1, 5)]
    accepted_at = [round(accepted * part / sum(shape)) for part in shape]
    return {
        "drafts": drafts, "accepted": sum(accepted_at), "accepted_at": accepted_at,
        "tau": 1 + sum(accepted_at) / drafts,
    }  # fmt: skip


def _write_learning(journal: Journal, rng: random.Random, i: int, steps: int) -> None:
    at = i / steps
    stored, room = 40 * i, 24_000
    evicted = max(0, stored - room)
    journal.write(
        BufferEntry(
        records=min(stored, room), bytes=min(stored, room) * 41_000, max_bytes=1 << 30,
        held_out=min(stored, room) // 20,
        dropped={"evicted": evicted, "corrupt": int(at > 0.4) + int(at > 0.62), "duplicate": int(at > 0.5) * 12},
        oldest_s=5.0 * min(i, 600), lag_s=2.5 + 4 * abs(math.sin(9 * at)),
        lag_records=round(30 + 25 * math.sin(9 * at)),
    ))  # fmt: skip
    if at > 0.12:
        alpha = (
            0.74 - 0.12 * math.exp(-((at - 0.36) ** 2) / 0.012) + 0.05 * at + rng.gauss(0, 0.006)
        )
        journal.write(
            TrainingEntry(step=4200 + i, loss=2.2 - 1.9 * alpha + rng.gauss(0, 0.01), alpha=alpha,
            alpha_greedy=alpha - 0.13 + rng.gauss(0, 0.006), tokens_per_s=3590 + rng.gauss(0, 90), records_seen=38 * i,
        ))  # fmt: skip


def _write_events(journal: Journal, i: int, steps: int, swap: int, bad: int, back: int) -> None:
    def gate(
        verdict: str,
        candidate: str,
        incumbent: str,
        gain: float,
        half: float,
        code: float,
        reason: str,
    ) -> None:
        journal.write(
            GateEntry(verdict=verdict, candidate=candidate, incumbent=incumbent, gain=gain, low=gain - half,
            high=gain + half, tau_incumbent=2.4, tau_candidate=2.4 + gain, requests=180, reason=reason,
            domains={
                "code": {"gain": code, "low": code - 2 * half, "high": code + 2 * half, "requests": 60},
                "prose": {"gain": 1.4 * gain, "low": gain - half, "high": 1.8 * gain + half, "requests": 90},
            },
        ))  # fmt: skip

    def took(server: int, version: str, before: str, outcome: str, reason: str = "") -> None:
        journal.write(
            SwapEntry(server=SERVERS[server], version=version, from_version=before, outcome=outcome,
            duration_ms=None if outcome == "unreachable" else 81.0 + 7 * server + i % 9, reason=reason,
        ))  # fmt: skip

    if i == round(0.7 * steps):
        journal.write(
            StalenessEntry(version="v000012", tau_then=2.82, tau_now=2.79, loss=0.03, low=-0.04, high=0.1, requests=140,
            is_asleep=False, steps_saved=320,
        ))  # fmt: skip
    if i == 0:
        journal.write(StateEntry(phase="idle"))
    elif i == round(0.12 * steps):
        journal.write(StateEntry(phase="training"))
    elif i == round(0.35 * steps):
        gate("inconclusive", "step-4452", "v000011", 0.04, 0.09, -0.03, "gain is not proven to be above 0.02: "
             "tau 2.400 -> 2.440, gain +0.040 [-0.050, +0.130] over 180 requests")  # fmt: skip
    elif i == round(0.42 * steps):
        gate("reject", "step-4502", "v000011", 0.12, 0.06, -0.31, "domain code loses more than " "0.1: "
             "tau 3.250 -> 2.940, gain -0.310 [-0.430, -0.190] over 60 requests")  # fmt: skip
    elif i == swap - 8:
        gate("promote", "step-4580", "v000011", 0.42, 0.07, -0.05, "tau 2.400 -> 2.820, gain " "+0.420 "
             "[+0.350, +0.490] over 180 requests")  # fmt: skip
    elif i == swap:
        took(0, "v000012", "v000011", "swapped", "canary")
    elif i == swap + 14:
        took(1, "v000012", "v000011", "swapped", "wave 1 of 1")
    elif i == bad - 4:
        gate("promote", "step-4790", "v000012", 0.08, 0.05, 0.02, "tau 2.820 -> 2.900, gain +0.080 "
             "[+0.030, +0.130] over 180 requests")  # fmt: skip
    elif i == bad:
        took(0, "v000013", "v000012", "swapped", "canary")
    elif i == back:
        took(
            0,
            "v000012",
            "v000013",
            "rolled_back",
            "canary is 0.52 below the control group over 4,100 drafts",
        )
        journal.write(StateEntry(phase="idle", reason="canary v000013 was rolled back"))
    elif i == round(0.9 * steps):
        journal.write(FaultEntry(what="server_unreachable", detail="10.0.0.12:8000"))
        journal.write(StateEntry(phase="training"))
