"""Whole fleets over real HTTP.

Servers of two domains that fail, restart, vanish and join while drafts change.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field, replace

import pytest
from fake_fleet import TOKEN, FakeServer, Traffic
from test_fleet import QUICK, roll_out
from waiting import in_event_loop

from redraft.online.fleet import rollout
from redraft.online.fleet.discovery import Members
from redraft.online.fleet.rollout import Outcome
from redraft.online.fleet.server import FleetServer, converge

pytestmark = pytest.mark.usefixtures("two_polls")

FAULTS = ("500", "cut before", "cut after", "restart")
RESTART_S = 0.05
POLICY = replace(
    QUICK, min_drafts=500, waves=(0.1, 0.5, 1.0), swap_timeout_s=0.5, rollback_timeout_s=2
)


@pytest.fixture
def two_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake servers count without noise, and hundreds of canaries of 16 polls would take minutes."""
    monkeypatch.setattr(rollout, "MIN_POLLS", 2)


@dataclass
class Fleet:
    """The servers of one domain, and the draft they should have."""

    name: str
    fakes: list[FakeServer]
    rng: random.Random
    members: Members[FleetServer] = field(default_factory=lambda: Members(FleetServer))
    published: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    current: str = ""

    @property
    def up(self) -> list[FakeServer]:
        return [fake for fake in self.fakes if fake.port]

    def publish(self) -> str:
        version = f"{self.name}-{len(self.published):06d}"
        self.published.append(version)
        for fake in self.fakes:
            fake.traffic.registry.add(version)
        self.fakes[0].traffic.tau[version] = 2.0
        return version

    async def open(self, share: float) -> None:
        """Start with this share of the servers; the others join later."""
        self.current = self.publish()
        for fake in self.fakes:
            fake.started_with = self.current
        for fake in self.fakes[: round(share * len(self.fakes))]:
            await fake.start()
        self.look_around()

    def look_around(self) -> None:
        assert not self.members.update({fake.url: TOKEN for fake in self.up})

    async def swap_under_fire(self) -> None:
        """One rollout while servers fail at random.

        Sometimes one is away, sometimes some refuse the candidate.
        """
        candidate = self.publish()
        is_refused = self.rng.random() < 0.3
        away = [self.rng.choice(self.up)] if self.rng.random() < 0.2 else []
        for fake in away:
            fake.stop()
        for fake in self.up:
            fake.failure_rate, fake.faults = 0.05, FAULTS[not is_refused :]
            fake.refuses = (
                {candidate} if is_refused and self.rng.random() < 3 / len(self.up) else set()
            )
        outcome = await roll_out(self.members.servers, candidate, POLICY, incumbent=self.current)
        assert outcome.version == (candidate if outcome.passed else self.current)
        for fake in self.up:
            fake.failure_rate, fake.refuses = 0.0, set()
        await asyncio.gather(*(fake.until_back() for fake in self.fakes))
        for fake in away:
            await fake.start()
        self.outcomes.append(outcome)
        self.current = outcome.version

    async def come_together(self) -> None:
        """Do the work of the learner's watch.

        Find all servers, and push to the servers with a different draft.
        """
        self.look_around()
        assert (await converge(self.members.servers, self.current, 30)).is_complete
        assert {fake.version for fake in self.up} == {self.current}

    async def close(self) -> None:
        await self.members.aclose()
        for fake in self.up:
            fake.stop()


async def simulate(num_servers: int, num_swaps: int) -> list[Fleet]:
    fleets = [
        make_fleet(name, num_servers // 2, seed) for seed, name in enumerate(("code", "prose"))
    ]
    for fleet in fleets:
        await fleet.open(share=0.8)
    try:
        await asyncio.gather(*(live(fleet, num_swaps // 2) for fleet in fleets))
    finally:
        for fleet in fleets:
            await fleet.close()
    return fleets


def make_fleet(name: str, size: int, seed: int) -> Fleet:
    traffic = Traffic(tau={}, registry=set())
    fakes = [
        FakeServer(traffic, rng=random.Random(100 * seed + i), down_s=RESTART_S)
        for i in range(size)
    ]
    return Fleet(name, fakes, random.Random(seed))


async def live(fleet: Fleet, num_swaps: int) -> None:
    for number in range(num_swaps):
        late = next((fake for fake in fleet.fakes if not fake.port), None)
        if late is not None and number >= 2:
            await late.start()
        await fleet.swap_under_fire()
        await fleet.come_together()


@pytest.mark.parametrize(
    ("num_servers", "num_swaps"),
    [(20, 20), pytest.param(200, 500, marks=[pytest.mark.slow, pytest.mark.timeout(5400)])],
)
@in_event_loop
async def test_every_domain_is_on_one_version_after_every_swap(num_servers, num_swaps):
    fleets = await simulate(num_servers, num_swaps)
    for fleet in fleets:
        assert len(fleet.up) == len(fleet.fakes), "all have joined"
        assert len(fleet.outcomes) == num_swaps // 2
        assert {outcome.passed for outcome in fleet.outcomes} == {True, False}, (
            "some went through, some were taken back"
        )
        served = {version for fake in fleet.fakes for version in fake.swaps}
        assert served <= set(fleet.published), "nothing of another domain, and nothing unknown"
        assert sum(fake.boot for fake in fleet.fakes) > len(fleet.fakes), "servers restarted"


@in_event_loop
async def test_a_version_that_is_not_in_the_registry_is_refused_by_every_server():
    fleet = make_fleet("code", 8, 0)
    await fleet.open(share=1.0)
    try:
        outcome = await roll_out(
            fleet.members.servers, "prose-000001", POLICY, incumbent=fleet.current
        )
        assert not outcome.passed
        assert "404" in outcome.reason
        assert {fake.version for fake in fleet.fakes} == {fleet.current}
    finally:
        await fleet.close()


@pytest.mark.slow
@in_event_loop
async def test_the_time_of_a_swap_grows_no_faster_than_its_waves():
    fleet = make_fleet("code", 40, 0)
    await fleet.open(share=1.0)
    took_s = {}
    try:
        for num_waves in (2, 8):
            waves = tuple((wave + 1) / num_waves for wave in range(num_waves))
            policy = replace(POLICY, waves=waves, watch_s=0.05)
            took_s[num_waves] = min([await timed_swap(fleet, policy) for _ in range(3)])
    finally:
        await fleet.close()
    assert took_s[8] <= 1.25 * 8 / 2 * took_s[2], took_s


async def timed_swap(fleet: Fleet, policy) -> float:
    candidate = fleet.publish()
    began_s = time.monotonic()
    outcome = await roll_out(fleet.members.servers, candidate, policy, incumbent=fleet.current)
    assert outcome.passed, outcome.reason
    fleet.current = candidate
    return time.monotonic() - began_s
