"""A defect in a periodic task of tap, learner or plugin.

It ends neither the task nor the process.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from fake_fleet import TOKEN
from learner_world import World
from run_stream import TARGET, VOCAB, make_record
from starlette.testclient import TestClient
from waiting import in_event_loop, until, wait_until

from redraft.engine.process import free_port
from redraft.online.daemon import alarm, control, learner
from redraft.online.daemon.alarm import Alarm
from redraft.online.daemon.learner import Learner
from redraft.online.engine.capture import Capture
from redraft.online.engine.config import CaptureConfig
from redraft.online.engine.steps import StepQueue
from redraft.online.fleet.watch import Watch
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.intake import Spool
from redraft.online.learning.stream import StreamSource
from redraft.online.page.config import Page
from redraft.online.records.guard import Guard
from redraft.online.records.nats_config import Nats, StreamLimits
from redraft.online.records.publisher import Publisher
from redraft.online.records.record import encode_frame
from redraft.online.traffic import server_check, tap, upstream
from redraft.online.traffic.proxy import Proxy
from redraft.online.traffic.server_check import ServerCheck
from redraft.online.traffic.tap import Tap, TapConfig
from redraft.online.traffic.upstream import Upstream

SECRET = "a user's words"


class Fault:
    """Raises an error with a user's words, `times` times; then passes every call to `work`."""

    def __init__(self, work, times=3):
        self.work, self.times, self.num_calls = work, times, 0

    def __get__(self, instance, _):
        return lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        self.num_calls += 1
        if self.num_calls <= self.times:
            raise AttributeError(SECRET)
        return self.work(*args, **kwargs)


def test_failed_rounds_are_counted_and_the_first_of_each_type_is_logged_without_its_words(caplog):
    reported = []
    guard = Guard(lambda task, reason: reported.append(task))
    for error in (KeyError(SECRET), KeyError(SECRET), RuntimeError(SECRET)):
        with guard.round("checks"):
            raise error
    with guard.round("checks"):
        pass
    with pytest.raises(KeyboardInterrupt), guard.round("checks"):
        raise KeyboardInterrupt
    assert guard.failures == {"checks": 3}
    assert reported == ["checks", "checks"]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["checks", "checks"]
    assert SECRET not in caplog.text
    assert "test_guard.py" in caplog.text


def test_a_failure_that_cannot_be_reported_ends_nothing():
    guard = Guard(lambda task, reason: 1 / 0)
    with guard.round("checks"):
        raise KeyError
    assert guard.failures == {"checks": 1}


@in_event_loop
async def test_the_tap_checks_its_server_and_tidies_after_a_defect(tmp_path, monkeypatch):
    monkeypatch.setattr(server_check, "CHECK_S", 0.01)
    monkeypatch.setattr(upstream, "TIDY_S", 0.01)
    checks, tidies = Fault(ServerCheck._look), Fault(Upstream.close_idle)
    monkeypatch.setattr(ServerCheck, "_look", checks)
    monkeypatch.setattr(Upstream, "close_idle", tidies)
    guard = Guard()
    recording = Tap(TapConfig(spool=tmp_path), "target", guard=guard)
    proxy = Proxy(Upstream("http://127.0.0.1:1", guard), recording)
    app = proxy.app()
    async with app.lifespan_context(app):
        await until(lambda: checks.num_calls > 4 and tidies.num_calls > 4)
    with TestClient(proxy.admin_app()) as operator:
        failed = operator.get("/redraft/tap").json()["failed_rounds"]
        assert failed == {"tap-check": 3, "idle-connections": 3}
        assert 'redraft_failed_rounds_total{task="tap-check"} 3.0' in operator.get("/metrics").text


@in_event_loop
async def test_the_tap_ships_after_a_defect(tmp_path, monkeypatch):
    monkeypatch.setattr(tap, "SHIP_INTERVAL_S", 0.01)
    shipping = Fault(Tap._ship)
    monkeypatch.setattr(Tap, "_ship", shipping)
    recording = Tap(TapConfig(spool=tmp_path), "target")
    server = Upstream("http://127.0.0.1:1")
    proxy = Proxy(server, recording)
    async with recording.running(server):
        await until(lambda: shipping.num_calls > 4)
    with TestClient(proxy.admin_app()) as operator:
        assert operator.get("/redraft/tap").json()["failed_rounds"] == {"shipping": 3}
        assert 'task="shipping"} 3.0' in operator.get("/metrics").text


def test_capture_goes_on_after_a_defect(tmp_path, monkeypatch):
    looks = Fault(StepQueue.take)
    monkeypatch.setattr(StepQueue, "take", looks)
    capture = Capture(CaptureConfig(spool=tmp_path), "boot", "target", "draft")
    capture.start()
    wait_until(lambda: looks.num_calls > 4)
    assert capture.status()["failed_rounds_capture"] == 3
    capture.stop()
    assert not capture._thread.is_alive()


@in_event_loop
async def test_the_publisher_sends_every_record_after_a_defect(broker, monkeypatch):
    config = Nats(fleet="guarded")
    with Buffer(BufferConfig(), TARGET) as buffer:
        source = StreamSource(broker.url, config, StreamLimits(max_bytes=64 << 20), buffer, VOCAB)
        await source.take()
        sending = Fault(Publisher._send, times=2)
        monkeypatch.setattr(Publisher, "_send", sending)
        publisher = Publisher(broker.url, config)
        publisher.write([encode_frame(make_record(number)) for number in range(5)])
        await until(lambda: publisher.counts["published_records"] == 5, about=publisher.status)
        assert publisher.guard.failures == {"publisher": 2}
        await asyncio.to_thread(publisher.close)
        await source.close()


@pytest.fixture
def world(random_target, noisy_draft, tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    return World.make(tmp_path, random_target, noisy_draft)


def test_the_learner_looks_takes_and_expires_after_a_defect(world, monkeypatch):
    monkeypatch.setattr(learner, "FULL_DISK_RETRY_S", 0.01)
    takes, expiries = Fault(Spool.take), Fault(Buffer.expire)
    looks = Fault(Watch.look, times=0)
    monkeypatch.setattr(Watch, "look", looks)
    monkeypatch.setattr(Spool, "take", takes)
    monkeypatch.setattr(Buffer, "expire", expiries)

    async def main():
        port = free_port()
        async with world.fleet(), world.learner(page=Page(port=port)) as task:
            await until(
                lambda: looks.num_calls, task
            )  # without a first look nothing may be trained
            looks.times = looks.num_calls + 3
            counts = {"ingest": 3, "watch": 3, "expiry": 3}

            async def failed():
                standing = await control.ask(world.root / "learner", control.Standing, do="status")
                return standing.failed_rounds

            await until(lambda: min(looks.num_calls, takes.num_calls, expiries.num_calls) > 8, task)
            assert await failed() == counts
            faults = [
                entry.detail for entry in world.entries("fault") if entry.what == "task_failed"
            ]
            assert sorted(faults) == sorted(counts)
            async with httpx.AsyncClient() as http:
                metrics = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
            assert 'redraft_failed_rounds_total{task="ingest"} 3.0' in metrics
            assert 'redraft_faults_total{what="task_failed"} 3.0' in metrics

    asyncio.run(main())


@in_event_loop
async def test_the_alarm_and_the_orders_to_other_ranks_survive_a_defect(monkeypatch):
    guard = Guard()
    monkeypatch.setattr(alarm, "REST_S", 0.0)
    monkeypatch.setattr(learner, "REST_S", 0.0)
    answers = Fault(lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(Alarm, "_answer", answers)
    orders = Fault(lambda *_: asyncio.sleep(0))
    ringing = Alarm(None, None, guard)
    awake = SimpleNamespace(
        guard=guard,
        cycle=SimpleNamespace(in_thread=orders),
        trainer=SimpleNamespace(ranks=SimpleNamespace(do=None)),
    )
    tasks = [
        asyncio.create_task(ringing.run()),
        asyncio.create_task(Learner._keep_ranks_awake(awake)),
    ]

    def ring():
        ringing.report("server", "v000001")
        return answers.num_calls > 4 and orders.num_calls > 4

    await until(ring)
    assert guard.failures == {"alarm": 3, "rank-orders": 3}
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()


def test_a_request_that_no_learner_can_answer_is_answered(world):
    async def main():
        async with world.fleet(), world.learner() as task:
            await until(lambda: (world.root / "learner" / control.SOCKET).exists(), task)
            with pytest.raises(ValueError, match="judge"):
                await control.ask(world.root / "learner", control.Judged, do="judge", draft=1)
            assert not task.done()

    asyncio.run(main())
