"""A wall clock that jumps deletes no record and makes none younger.

One that stays is believed after 10 minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_buffer import fill, make_record
from test_poison import FakeMessage

from redraft.online.fleet.registry import Registry
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.clock import BELIEVED_AFTER_S, SLACK_S, SteadyClock
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.forget import Reach
from redraft.online.learning.intake import Spool
from redraft.online.learning.stream import StreamSource
from redraft.online.records.nats_config import Nats, StreamLimits
from redraft.online.records.record import encode_record, read_frames

DAY_S = 86400.0
START_S = 20_000 * DAY_S
MAX_AGE_S = BufferConfig().max_age_s


class Machine:
    """A machine's clocks: time passes, and the wall clock can be shifted."""

    def __init__(self) -> None:
        self.passed_s, self.shift_s = 0.0, 0.0

    def start(self, last_s: float | None = None) -> SteadyClock:
        """The clock of a process that begins now."""
        return SteadyClock(
            lambda: START_S + self.passed_s + self.shift_s,
            lambda: 77 + self.passed_s,
            last_s,
            MAX_AGE_S / 2,
        )

    def look(self, clock: SteadyClock, seconds: float) -> None:
        """Let time pass, with a look at the clock every 10 seconds."""
        until_s = self.passed_s + seconds
        while self.passed_s < until_s:
            self.passed_s = min(self.passed_s + 10, until_s)
            clock.now_s()

    @property
    def true_s(self) -> float:
        return START_S + self.passed_s


@pytest.fixture
def machine() -> Machine:
    return Machine()


@contextlib.contextmanager
def opened(folder: Path | None = None) -> Iterator[Buffer]:
    with Buffer(BufferConfig(folder=folder, held_out_fraction=0.0), "target") as buffer:
        yield buffer


def count(buffer: Buffer) -> int:
    return len(buffer.fresh(0, 999))


@pytest.mark.parametrize("shift_s", [8 * DAY_S, -DAY_S])
def test_a_jump_and_back_within_a_minute_changes_no_time(machine: Machine, shift_s: float) -> None:
    clock = machine.start()
    machine.look(clock, 60)
    machine.shift_s = shift_s
    for _ in range(6):
        machine.look(clock, 10)
        assert clock.now_s() == machine.true_s
        assert "ahead" in clock.problem or "behind" in clock.problem
    machine.shift_s = 0
    assert clock.now_s() == machine.true_s
    assert clock.problem == ""


@pytest.mark.parametrize("shift_s", [8 * DAY_S, -DAY_S])
def test_a_jump_that_stays_is_believed_after_ten_minutes(machine: Machine, shift_s: float) -> None:
    clock = machine.start()
    machine.shift_s = shift_s
    clock.now_s()
    machine.look(clock, BELIEVED_AFTER_S - 1)
    assert clock.now_s() == machine.true_s
    machine.look(clock, 1)
    assert clock.now_s() == machine.true_s + shift_s
    assert clock.problem == ""


def test_a_clock_that_jumps_again_begins_the_ten_minutes_again(machine: Machine) -> None:
    clock = machine.start()
    for days in range(2, 12):
        machine.shift_s = days * DAY_S
        machine.look(clock, BELIEVED_AFTER_S / 2)
        assert clock.now_s() == machine.true_s
    machine.look(clock, BELIEVED_AFTER_S / 2 + 10)
    assert clock.now_s() == machine.true_s + machine.shift_s


def test_small_corrections_are_followed_at_once(machine: Machine) -> None:
    clock = machine.start()
    for _ in range(10):  # together far more than the slack
        machine.shift_s += SLACK_S - 1
        machine.look(clock, 1)
        assert clock.now_s() == machine.true_s + machine.shift_s
        assert clock.problem == ""


@pytest.mark.parametrize("shift_s", [8 * DAY_S, -DAY_S])
def test_a_process_that_starts_with_a_wrong_clock_goes_on_from_the_last_record(
    machine: Machine, shift_s: float
) -> None:
    last_s = machine.true_s
    machine.shift_s = shift_s
    clock = machine.start(last_s)
    assert clock.problem
    machine.look(clock, 60)
    assert clock.now_s() == last_s + 60
    machine.look(clock, BELIEVED_AFTER_S)
    assert clock.now_s() == machine.true_s + shift_s


def test_a_process_that_starts_after_a_pause_believes_the_clock(machine: Machine) -> None:
    assert machine.start(machine.true_s - 3 * DAY_S).now_s() == machine.true_s
    assert machine.start(machine.true_s + SLACK_S / 2).now_s() == machine.true_s
    assert machine.start().problem == ""


# --- with a buffer


def test_eight_days_ahead_for_a_minute_delete_nothing_and_for_ten_minutes_they_do(
    machine: Machine,
) -> None:
    clock = machine.start()
    with opened() as buffer:
        fill(buffer, 5, clock.now_s())
        machine.shift_s = 8 * DAY_S
        buffer.expire(clock.now_s())
        machine.look(clock, 60)
        buffer.expire(clock.now_s())
        machine.shift_s = 0
        buffer.expire(clock.now_s())
        assert count(buffer) == 5
        machine.shift_s = 8 * DAY_S
        clock.now_s()
        machine.look(clock, BELIEVED_AFTER_S)
        buffer.expire(clock.now_s())
        assert count(buffer) == 0


def test_records_that_arrive_while_the_clock_is_a_day_behind_get_their_full_age(
    machine: Machine,
) -> None:
    clock = machine.start()
    with opened() as buffer:
        machine.shift_s = -DAY_S
        fill(buffer, 5, clock.now_s())
        machine.shift_s = 0
        buffer.expire(clock.now_s() + MAX_AGE_S - 1)
        assert count(buffer) == 5
        buffer.expire(clock.now_s() + MAX_AGE_S)
        assert count(buffer) == 0


def test_a_tenant_forgotten_while_the_clock_is_ahead_is_not_forgotten_for_days(
    machine: Machine, tmp_path: Path
) -> None:
    clock = machine.start()
    with opened() as buffer:
        fill(buffer, 5, clock.now_s())
        machine.shift_s = 8 * DAY_S
        (tmp_path / "spool").mkdir(mode=0o700)
        reach = Reach(
            buffer=buffer,
            registry=Registry(tmp_path),
            spool=Spool(tmp_path / "spool", buffer, 100),
            now_s=clock.now_s,
        )
        asyncio.run(reach.forget("globex"))
        machine.shift_s = 0
        assert count(buffer) == 5
        later = make_record(9, tenant="globex", time_s=machine.true_s + 2 * SLACK_S)
        assert buffer.append(read_frames(encode_record(later)), clock.now_s()) == {"stored": 1}


def test_a_restart_with_a_clock_eight_days_ahead_deletes_nothing_at_once(
    machine: Machine, tmp_path: Path
) -> None:
    with opened(tmp_path) as buffer:
        assert buffer.last_arrival_s() is None
        fill(buffer, 5, machine.start().now_s())
    machine.shift_s = 8 * DAY_S
    with opened(tmp_path) as buffer:
        clock = machine.start(buffer.last_arrival_s())
        buffer.expire(clock.now_s())
        assert count(buffer) == 5
        machine.look(clock, BELIEVED_AFTER_S)
        buffer.expire(clock.now_s())
        assert count(buffer) == 0


def test_the_last_arrival_is_that_of_the_last_record_and_not_the_latest_time() -> None:
    with opened() as buffer:
        for number, time_s in enumerate((10.0, 5000.0, 20.0)):
            buffer.append([(encode_record(make_record(number)), make_record(number))], time_s)
        assert buffer.last_arrival_s() == 20.0


def test_examples_in_the_quarantine_age_by_the_same_clock(machine: Machine, tmp_path: Path) -> None:
    clock = machine.start()
    machine.shift_s = -8 * DAY_S
    with opened(tmp_path) as buffer:
        assert buffer.quarantine is not None
        bad = make_record(1, top_k=3)
        buffer.append(read_frames(encode_record(bad)), clock.now_s())
        assert len(buffer.quarantine) == 1
        buffer.expire(machine.true_s + MAX_AGE_S - 1)
        assert len(buffer.quarantine) == 1
        buffer.expire(machine.true_s + MAX_AGE_S)
        assert len(buffer.quarantine) == 0


def test_records_of_the_log_arrive_by_the_given_clock() -> None:
    async def take(buffer: Buffer) -> None:
        limits = StreamLimits(max_bytes=1 << 30)
        source = StreamSource(
            "nats://127.0.0.1:1", Nats(), limits, buffer, 512, now_s=lambda: 1234.0
        )

        async def following() -> list[Any]:
            return [FakeMessage(encode_record(make_record(1)))]

        pull: Any = SimpleNamespace(next=following)
        source._pull = pull
        await source.take()

    with opened() as buffer:
        asyncio.run(take(buffer))
        assert buffer.last_arrival_s() == 1234.0
