"""One server that hangs, drips, lies or belongs to another registry.

The tests look at what it does to the looks at the others.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import asynccontextmanager

import httpx
import pytest
from fake_fleet import TOKEN, FakeServer, Traffic, running
from test_fleet import NEW, OLD
from waiting import in_event_loop, until

from redraft.online.fleet import reconciler, server
from redraft.online.fleet.reconciler import Reconciler
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.server import (
    FleetServer,
    NonsenseError,
    RefusedError,
    UnreachableError,
    Window,
    connected,
    converge,
)
from redraft.online.fleet.watch import JournaledServer, Watch
from redraft.online.journal import AcceptanceEntry, FaultEntry, Journal
from redraft.recipes.serve.up_parts import Meter

STATUS, SWAP = "/redraft/status", "/redraft/swap"


@pytest.fixture
def deadlines(monkeypatch):
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(server, "STATUS_TIMEOUT_S", 0.5)
    monkeypatch.setattr(server, "SWAP_TIMEOUT_S", 1.0)


# --- deadlines


@pytest.mark.parametrize("trouble", ["hang", "drip"])
@pytest.mark.parametrize("path", [STATUS, SWAP])
@in_event_loop
async def test_every_request_has_a_deadline_as_a_whole(deadlines, path, trouble):
    fake = FakeServer(Traffic(), trouble={path: trouble})
    async with running(fake) as (one,):
        ask = {STATUS: one.status, SWAP: lambda: one.swap(NEW)}[path]
        began_s = time.monotonic()
        with pytest.raises(UnreachableError, match=rf"{fake.url} .*{path} .*\d s$"):
            await ask()
        assert time.monotonic() - began_s < 5


@in_event_loop
async def test_an_answer_without_end_is_nonsense():
    fake = FakeServer(Traffic(), trouble={STATUS: "pour"})
    async with running(fake) as (one,):
        with pytest.raises(NonsenseError, match=rf"{fake.url} .*\b8 MiB\b"):
            await one.status()


@pytest.mark.parametrize("trouble", [{STATUS: "hang"}, {STATUS: "drip"}])
@in_event_loop
async def test_looks_at_the_others_return_after_the_patience_and_count_every_draft(trouble):
    fakes = [FakeServer(Traffic()), FakeServer(Traffic(), trouble=trouble), FakeServer(Traffic())]
    async with running(*fakes) as servers:
        watch = Watch(servers, patience_s=1)
        for number in range(2):
            began_s = time.monotonic()
            looked = await watch.look()
            assert time.monotonic() - began_s < server.STATUS_TIMEOUT_S
            assert [one.fault for one in looked] == ["", "server_unreachable", ""]
            assert [one.since_last.num_drafts for one in looked] == [
                500 * (number > 0),
                0,
                500 * (number > 0),
            ]
        fakes[1].trouble.clear()
        fakes[1].stop()
        await fakes[1].start()

        async def is_well():
            return not (await watch.look())[1].fault

        await until(is_well)
        await watch.aclose()


@in_event_loop
async def test_a_connection_that_the_server_may_be_closing_is_not_used_again(monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.05)
    fake = FakeServer(Traffic())
    async with running(fake) as servers:
        await servers[0].status()
        (first,) = fake._connections
        await asyncio.sleep(0.1)
        await servers[0].status()
        assert any(one is not first for one in fake._connections)


@in_event_loop
async def test_another_draft_ends_an_alarm_also_where_the_server_drafts_no_more():
    fake = FakeServer(Traffic(), started_with="bad")
    async with running(fake) as servers:
        watch = Watch(servers)

        async def alarm():
            (observation,) = await watch.look()
            return observation.is_alarming

        assert [await alarm(), await alarm()] == [None, True]
        fake.version, fake.drafting = OLD, {"pace": {"line": "pace 0"}}
        assert [await alarm(), await alarm()] == [False, None]
        await watch.aclose()


@in_event_loop
async def test_a_server_that_hangs_on_has_one_reason(deadlines):
    fake = FakeServer(Traffic(), trouble={STATUS: "hang"})
    async with running(fake) as servers:
        watch = Watch(servers, patience_s=0.05)
        first = (await watch.look())[0]
        found = first
        while found.reason == first.reason:  # until its deadline
            (found,) = await watch.look()
        assert {(await watch.look())[0].reason for _ in range(5)} == {found.reason}
        await watch.aclose()


@pytest.mark.parametrize(("code", "cure"), [(401, "token"), (403, "forbidden"), (404, "serve")])
@in_event_loop
async def test_a_server_that_refuses_is_told_from_one_that_is_away(code, cure):
    async with answering(code, b"forbidden") as server:
        watch = Watch([server])
        (found,) = await watch.look()
    assert found.fault == "server_refuses"
    assert str(code) in found.reason
    assert cure in found.reason


@in_event_loop
async def test_the_words_of_a_server_reach_no_terminal_as_they_are(tmp_path):
    words = b"\x1b]0;owned\x07 \x1b[2J\r\nredraft: all is well \xc2\x9b"
    async with answering(503, words) as server:
        with pytest.raises(RefusedError) as refusal:
            await server.status()
    assert str(refusal.value).isprintable()
    fake = FakeServer(Traffic())
    async with running(fake) as (one,):
        status = json.loads((await one._request("GET", STATUS, 5)).decode())
        odd = {"capture_off": "a\x1b[2J", "swap_off": "b\nc", "notes": ["\x9b"]}
        fake.answers = {STATUS: json.dumps(status | odd).encode()}
        found = await one.status()
    assert all(map(str.isprintable, [found.capture_off, found.swap_off, *found.notes]))


def metrics(drafts, accepted, tokens):
    """A page of vLLM's counters, of two engines."""
    lines = [
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {value}'
        for engine in range(2)
        for name, value in (
            ("drafts", drafts),
            ("draft_tokens", 3 * drafts),
            ("accepted_tokens", accepted),
        )
    ]
    lines.append(f'vllm:generation_tokens_total{{engine="0"}} {tokens}')
    return "\n".join([*lines, "vllm:other 1"]).encode()


@in_event_loop
async def test_the_engines_own_counters_are_read_as_the_screen_of_the_server_reads_them():
    fake = FakeServer(Traffic())
    async with running(fake) as servers:
        watch = Watch(servers)
        first, second = metrics(100, 20, 500), metrics(500, 336, 1300)
        fake.answers["/metrics"] = first
        assert (await watch.look())[0].served is None
        fake.answers["/metrics"] = second
        (found,) = await watch.look()
        meter = Meter(fake.url)
        meter.describe(first.decode(), 0.0)
        assert f"{found.served.counts.tau:.2f} tokens per" in meter.describe(second.decode(), 1.0)
        assert found.served.counts.tau == 1 + 632 / 800
        assert found.served.tokens == 800
        assert found.served.time_s > 0
        fake.answers["/metrics"] = first
        assert (await watch.look())[0].served is None, "counters that fell"
        assert found.fault == ""


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\xff\xfe",
        metrics("NaN", 1, 1),
        metrics("1e400", 1, 1),
        metrics(1, 1, "Inf"),
        metrics(1, 1, -1),
        metrics(1, 1, "x"),
        b"vllm:spec_decode_num_drafts_total 1\n" * 200_000,
        b"vllm:spec_decode_num_accepted_tokens_per_pos_total 1\n" + metrics(1, 1, 1),
        b'vllm:spec_decode_num_drafts_total{a="' + b"x" * (7 << 20) + b'"} 1\n',
    ],
    ids=range(10),
)
@in_event_loop
async def test_counters_that_are_none_are_no_fault_and_cost_little(page):
    fake = FakeServer(Traffic(), answers={"/metrics": page})
    async with running(fake) as servers:
        watch = Watch(servers)
        await watch.look()
        began_s = time.process_time()
        (found,) = await watch.look()
        assert time.process_time() - began_s < 1
        assert (found.fault, found.served) == ("", None)
        assert found.since_last.num_drafts == 500


@in_event_loop
async def test_counters_that_hang_hold_up_no_look(monkeypatch):
    monkeypatch.setattr(server, "METRICS_TIMEOUT_S", 0.2)
    fake = FakeServer(Traffic(), trouble={"/metrics": "hang"})
    async with running(fake) as servers:
        (found,) = await Watch(servers, patience_s=5).look()
        assert (found.fault, found.served) == ("", None)


@asynccontextmanager
async def answering(code, content):
    """A server that answers everything so."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        writer.write(head % (code, len(content)) + content)
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener, httpx.AsyncClient() as http:
        port = listener.sockets[0].getsockname()[1]
        yield FleetServer(f"http://127.0.0.1:{port}", TOKEN, http)


@in_event_loop
async def test_a_window_is_read_over_the_same_time_also_beside_a_server_that_hangs(deadlines):
    fakes = [FakeServer(Traffic()), FakeServer(Traffic())]
    async with running(*fakes) as servers:
        window = await Window.open(servers)
        fakes[1].trouble = {STATUS: "drip"}
        began_s = time.monotonic()
        assert list(await window.read()) == [servers[0]]
        assert time.monotonic() - began_s < 3


# --- pushes


@pytest.mark.parametrize("trouble", ["hang", pytest.param("drip", marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", [STATUS, SWAP])
@in_event_loop
async def test_a_push_to_all_waits_for_no_minority_and_ends_at_once_when_told(
    path, trouble, monkeypatch
):
    monkeypatch.setattr(reconciler, "PATIENCE_S", 0.5)
    fakes = [
        FakeServer(Traffic()),
        FakeServer(Traffic(), trouble={path: trouble}),
        FakeServer(Traffic()),
    ]
    async with running(*fakes) as servers:
        pushes = Reconciler()
        began_s = time.monotonic()
        convergence = await pushes.bring_all(servers, NEW, 300)
        assert time.monotonic() - began_s < 5
        assert list(convergence.absent) == [fakes[1].url]
        assert (fakes[0].version, fakes[2].version) == (NEW, NEW)
        await asyncio.wait_for(pushes.stop(), 1)


@in_event_loop
async def test_a_push_to_all_waits_for_a_fleet_that_is_slow_as_a_whole(monkeypatch):
    monkeypatch.setattr(reconciler, "PATIENCE_S", 0.0)
    fakes = [FakeServer(Traffic(), trouble={SWAP: "drip"}) for _ in range(3)]
    monkeypatch.setattr(FakeServer, "_swap", lambda fake, version: asyncio.sleep(0, (500, b"")))
    async with running(*fakes) as servers:
        began_s = time.monotonic()
        convergence = await Reconciler().bring_all(servers, NEW, 1.0)
        assert time.monotonic() - began_s >= 1.0
        assert len(convergence.absent) + len(convergence.refused) == 3


@in_event_loop
async def test_a_push_is_not_begun_twice_and_one_that_fails_is_told():
    fakes = [FakeServer(Traffic(), trouble={SWAP: "hang"}), FakeServer(Traffic(), refuses={NEW})]
    async with running(*fakes) as servers:
        pushes = Reconciler()
        for _ in range(3):
            pushes.push(servers, NEW)
            await until(lambda: pushes.is_failing(servers[1]) and SWAP in fakes[0].asked)
        assert fakes[1].asked.count(SWAP) == 3
        assert not pushes.is_failing(servers[0])
        assert (fakes[0].asked.count(SWAP), fakes[0].swaps) == (1, [])
        pushes.forget(servers[1])
        assert not pushes.is_failing(servers[1])
        await pushes.stop()


@in_event_loop
async def test_a_swap_that_is_given_up_is_not_journaled_as_done(tmp_path):
    fake = FakeServer(Traffic(), trouble={SWAP: "hang"})
    async with running(fake) as (one,):
        journal = Journal(tmp_path)
        swap = asyncio.create_task(JournaledServer(one.url, one.token, one.http, journal).swap(NEW))
        await until(lambda: SWAP in fake.asked)
        swap.cancel()
        await asyncio.wait([swap])
    assert [entry.outcome for entry in journal.read().entries] == ["unreachable"]


# --- nonsense


GOOD = {
    "server_id": "boot", "draft_version": OLD, "draft_intact": True, "target_intact": True,
    "target_fingerprint": "target", "capture": {"dropped_steps_queue_full": 1}, "more": [1],
}  # fmt: skip


def status(**changes):
    return json.dumps(GOOD | changes).encode()


STATUSES = {
    "a blank in the version": status(draft_version="v 1"),
    "a number as version": status(draft_version=3),
    "a list as version": status(draft_version=["v000001"]),
    "no version": status(draft_version=None),
    "a version of 5,000 characters": status(draft_version="v" * 5000),
    "a line break in the version": status(draft_version="v000001\n"),
    "a terminal's escape in the version": status(draft_version="\x1b[2J"),
    "a lone surrogate": b'{"draft_version": "\\ud800"}',
    "no fingerprint": status(target_fingerprint=None),
    "a blank fingerprint": status(target_fingerprint=" "),
    "an id that is a number": status(server_id=7),
    "intact as a word": status(draft_intact="yes"),
    "capture as a list": status(capture=[]),
    "capture as a word": status(capture="none"),
    "a counter that is a word": status(capture={"dropped_steps_queue_full": "many"}),
    "a negative counter": status(capture={"dropped_steps_queue_full": -1}),
    "a counter that is a fraction": status(capture={"dropped_steps_queue_full": 0.5}),
    "a counter above all": status(capture={"dropped_steps_queue_full": 10**30}),
    "a counter that is no number": status(capture={"dropped_steps_queue_full": float("nan")}),
    "a hash that is a list": status(manifest_sha256=["a"]),
    "a domain with a negative count": status(positions={"code": [[-1, 0]]}),
    "a position with one count": status(positions={"code": [[1]]}),
    "a domain with a word": status(positions={"code": [["many", 1]]}),
    "a domain with a long name": status(positions={"c" * 65: [[1, 1]]}),
    "a domain with too many positions": status(positions={"code": [[1, 1]] * 257}),
    "drafts as a word": status(drafts="many"),
    "drafts that are no number": status(drafts=[float("nan"), 3]),
    "a negative count of drafts": status(drafts=[-1, 3]),
    "a count of drafts above all": status(drafts=[10**30, 3]),
    "a fraction of a draft": status(drafts=[0.5, 3]),
    "too many positions": status(drafts=[1] * 300),
    "too many domains": status(positions={str(i): [[1, 1]] for i in range(65)}),
    "a load with a negative count": status(loads={"code": {"5": [-1]}}),
    "a load with no count": status(loads={"code": {"5": []}}),
    "a load of another name": status(loads={"code": {"busy": [1]}}),
    "too many loads": status(loads={"code": {str(i): [1] for i in range(41)}}),
    "a list": b"[]",
    "nothing": b"",
    "half a status": status()[:40],
    "bytes": bytes(range(256)),
    "a deep nest": b'{"capture": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("answer", STATUSES.values(), ids=STATUSES)
@in_event_loop
async def test_nonsense_is_the_fault_of_its_server_alone(answer, tmp_path):
    fakes = [FakeServer(Traffic(), answers={STATUS: answer}), FakeServer(Traffic())]
    async with running(*fakes) as servers:
        lying, other = await Watch(servers).look()
        assert (lying.fault, other.fault) == ("server_nonsense", "")
        Journal(tmp_path).write(
            FaultEntry(what=lying.fault, detail=servers[0].url, reason=lying.reason)
        )
        assert lying.status is None
        assert list((await converge(servers, OLD, 0)).refused) == [servers[0].url]
        assert not (await converge([servers[1]], OLD, 0)).refused


@in_event_loop
async def test_fuzzed_answers_are_counts_or_a_fault(tmp_path):
    rng = random.Random(7)
    page, found, journal = (
        status(drafts=[500, 1500, 300, 150, 50]),
        {"counts": 0, "fault": 0},
        Journal(tmp_path),
    )
    counts_at = page.index(b"[500")

    def answer(request):
        fuzzed = bytearray(page)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(counts_at, len(fuzzed))
            fuzzed[at : at + rng.randrange(4)] = rng.choice(
                [b"\n", b'"', b"{", b"}", b"\\", b"-", b"e9", b"\xff", b"", b"7", b"0"]
            )
        return httpx.Response(200, stream=httpx.ByteStream(bytes(fuzzed)))

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        one = FleetServer("http://fuzzed:1", TOKEN, http)
        for _ in range(2000):
            try:
                total = (await one.status()).total
            except RefusedError:
                found["fault"] += 1
                continue
            if total is None:  # the name of the field or of the draft was hit
                continue
            found["counts"] += 1
            entry = {"drafts": total.num_drafts, "accepted": total.num_accepted, "tau": total.tau}
            journal.write(
                AcceptanceEntry(draft_version=OLD, accepted_at=total.accepted_per_position, **entry)
            )
    assert min(found.values()) > 100, found


# --- the same version


def make_registry(folder, *contents):
    registry = Registry(folder)
    with registry.owned():
        for content in contents:
            registry.publish(
                lambda partial, content=content: (partial / "weights").write_bytes(content),
                target_fingerprint="target", provenance={}, evaluation={},
            )  # fmt: skip
    return registry


@in_event_loop
async def test_a_version_is_known_by_name_and_bytes(tmp_path):
    ours, theirs = (
        make_registry(tmp_path / "ours", b"1", b"2"),
        make_registry(tmp_path / "theirs", b"1", b"two"),
    )
    manifests = {version: ours.identify(version).manifest_sha256 for version in ours.versions()}
    fake = FakeServer(
        Traffic(), manifests=manifests, registry_id=ours.identify(OLD).registry, started_with=NEW
    )
    async with running(fake) as ([plain]):
        async with connected({fake.url: TOKEN}, ours) as (one,):
            assert (await converge([one], NEW, 0)).is_complete
            assert fake.swaps == [], "it serves it already"
            assert (await converge([one], OLD, 0)).is_complete
            assert fake.bodies == [{"version": OLD, **vars(ours.identify(OLD))}]
        async with connected({fake.url: TOKEN}, theirs) as (one,):
            assert (await converge([one], OLD, 0)).is_complete, (
                "the same bytes are the same version"
            )
            refused = (await converge([one], NEW, 0)).refused
            assert "registry" in refused[fake.url]
        assert fake.swaps == [OLD], "the second learner swaps nothing"
        assert (await converge([plain], NEW, 0)).refused, (
            "a learner of an earlier release says no hash"
        )


@in_event_loop
async def test_a_server_with_other_bytes_of_the_same_name_is_pushed_again(tmp_path):
    ours = make_registry(tmp_path / "ours", b"1")
    fake = FakeServer(Traffic(), manifests={OLD: "0" * 64})
    async with running(fake), connected({fake.url: TOKEN}, ours) as (one,):
        assert not one.serves(await one.status(), OLD)
        assert "409" in str(await converge([one], OLD, 0))


@in_event_loop
async def test_a_server_of_an_earlier_release_is_known_by_the_name_alone(tmp_path):
    ours = make_registry(tmp_path / "ours", b"1", b"2")
    fake = FakeServer(Traffic())
    async with running(fake), connected({fake.url: TOKEN}, ours) as (one,):
        assert (await converge([one], NEW, 0)).is_complete
        assert one.serves(await one.status(), NEW)
        assert fake.swaps == [NEW]
