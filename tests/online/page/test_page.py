"""The live page: data computed from a journal, shown in a real browser while the learner lives."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from make_journal import SERVERS, Clock, make_journal
from prometheus_client import CollectorRegistry, Gauge
from starlette.testclient import TestClient
from waiting import until

from redraft.engine.process import free_port
from redraft.online.journal import (
    AcceptanceEntry,
    BufferEntry,
    FaultEntry,
    Journal,
    StateEntry,
    SwapEntry,
)
from redraft.online.page.app import build_app, serve_in_background
from redraft.online.page.config import Page
from redraft.online.page.headline import Headline, format_duration, shorten_version
from redraft.online.page.history import History
from redraft.online.page.overview import MAX_CURVES, Overview, build_overview

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"
)

NOW_S = 1_800_000_000.0
TIMEOUT_S = 180
"""Timeout of every wait, in seconds: a busy machine is slow, not wrong."""


def look(journal: Journal, now_s: float = NOW_S, range_s: float = 0) -> Overview:
    history = History()
    history.extend(journal.read().entries)
    return build_overview(history, now_s, range_s)


def make_empty(folder: Path, now_s: float = NOW_S) -> tuple[Journal, Clock]:
    clock = Clock(now_s)
    return Journal(folder, clock=clock), clock


def accept(
    journal: Journal,
    version: str,
    drafts: float,
    tau: float,
    server: str | None = SERVERS[0],
    **fields: Any,
):
    accepted = drafts * (tau - 1)
    counts = {"drafts": drafts, "accepted": accepted, "tau": tau if drafts else None}
    journal.write(AcceptanceEntry(server=server, draft_version=version, **counts, **fields))


def swap(
    journal: Journal, version: str, before: str, outcome: str = "swapped", server: str = SERVERS[0]
):
    journal.write(SwapEntry(server=server, version=version, from_version=before, outcome=outcome))


def sentence(headline: Headline) -> str:
    return " ".join(
        filter(None, (headline.before, headline.number, headline.after, headline.change))
    )


def test_the_answer_comes_first(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    accept(journal, "v000011", 100, 2.6)
    clock.now_s += 60
    swap(journal, "v000012", "v000011")
    journal.write(StateEntry(phase="judging", candidate="step-7"))
    accept(journal, "v000012", 300, 2.8)
    accept(journal, "v000012", 100, 3.2)
    headline = look(journal, clock.now_s).headline
    assert sentence(headline) == "Draft v12 emits 2.90 tokens per drafted step, +0.30 since v11."
    assert headline.tone == "good"
    assert (
        headline.below
        == "Learner: judging step-7. Its server runs it; measured over 400 drafted steps."
    )


def test_nothing_measured_is_said(tmp_path: Path):
    view = look(Journal(tmp_path / "absent"))
    assert sentence(view.headline) == "Nothing has been measured yet."
    assert (view.servers, view.domains, view.marks, view.positions, view.state) == (
        [],
        [],
        [],
        [],
        None,
    )
    journal, _ = make_empty(tmp_path)
    accept(journal, "v000001", 0, 1.0)
    assert sentence(look(journal).headline) == "Nothing has been measured yet.", (
        "a window without drafts measures nothing"
    )


def test_a_draft_that_is_hardly_accepted_is_said_in_red(tmp_path: Path):
    journal, _ = make_empty(tmp_path)
    accept(journal, "v000003", 500, 1.02)
    headline = look(journal).headline
    assert sentence(headline) == "Draft v3 is hardly accepted: 1.02 tokens per drafted step."
    assert headline.tone == "bad"


def test_a_first_draft_that_a_paced_server_leaves_off_is_no_fault(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    accept(journal, "v000001", 500, 1.02, pace="pace auto: 0 tokens at 1")
    headline = look(journal).headline
    assert sentence(headline) == "Draft v1 emits 1.02 tokens per drafted step."
    assert headline.tone == "plain"
    clock.now_s += 60
    swap(journal, "v000002", "v000001")
    accept(journal, "v000002", 500, 1.01, pace="pace auto: 0 tokens at 1")
    assert look(journal, clock.now_s).headline.tone == "bad"


def test_lookups_count_as_on_the_screen_of_the_server(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    for server, tokens in ((SERVERS[0], 900.0), (SERVERS[1], 300.0)):
        served = {"served_drafts": 400, "served_accepted": 316, "served_tokens": tokens}
        accept(journal, "v000001", 100, 1.02, server, pace="pace auto: 0", **served, served_s=10.0)
        accept(journal, "v000001", 0, 1.0, server, served_drafts=0, served_accepted=0,
               served_tokens=0, served_s=10.0)  # fmt: skip
    view = look(journal, clock.now_s)
    assert sentence(view.headline) == "Draft v1 emits 1.79 tokens per drafted step."
    shares = "52% of them drafted by lookups and 0% by the draft"  # 632 - 4 and 4 of 1,200
    assert f"; 60.0 tokens/s, {shares}; measured over 800 drafted steps." in view.headline.below
    assert [round(curve.tau, 2) for curve in view.servers] == [1.79, 1.79]


@pytest.mark.parametrize(
    ("promoted", "told"),
    [
        (0, "No version was promoted yet."),
        (1, "1 version was promoted."),
        (3, "3 versions were promoted."),
    ],
)
def test_the_number_of_promoted_versions_is_said(tmp_path: Path, promoted: int, told: str):
    journal, clock = make_empty(tmp_path)
    journal.write(StateEntry(phase="training", promoted=promoted))
    journal.write(StateEntry(phase="training", reason="counts no versions"))
    accept(journal, "v000001", 100, 2.0)
    assert look(journal, clock.now_s).headline.below.startswith(f"Learner: training. {told} ")


def test_a_draft_that_only_looks_things_up_well_is_still_said_in_red(tmp_path: Path):
    journal, _ = make_empty(tmp_path)
    accept(journal, "v000003", 500, 1.02, served_drafts=600, served_accepted=500)
    headline = look(journal).headline
    assert sentence(headline) == "Draft v3 is hardly accepted: 1.02 tokens per drafted step."
    assert headline.tone == "bad"


def test_of_one_fault_of_one_server_the_present_reason_is_shown(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    for server, what, reason in (
        ("a:1", "server_unreachable", "nothing listens"),
        ("b:1", "server_unreachable", "nothing listens"),
        ("a:1", "server_refuses", "403"),
        ("a:1", "server_refuses", "401"),
    ):
        clock.now_s += 60
        journal.write(FaultEntry(what=what, detail=server, reason=reason))
    faults = look(journal, clock.now_s).faults
    assert [(fault.detail, fault.reason) for fault in faults] == [
        ("a:1", "401"),
        ("b:1", "nothing listens"),
    ]


def test_old_numbers_are_said_to_be_old(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    accept(journal, "v000001", 100, 2.0)
    assert "no traffic" not in look(journal, clock.now_s + 59).headline.below
    assert "no traffic for 10 min" in look(journal, clock.now_s + 600).headline.below


def test_a_version_that_came_back_is_compared_with_what_it_replaced(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    for version, before, outcome, tau in [
        ("v000002", "v000001", "swapped", 2.5),
        ("v000003", "v000002", "swapped", 1.5),
        ("v000002", "v000003", "rolled_back", 2.5),
    ]:
        accept(journal, before, 100, 2.0)
        clock.now_s += 400
        accept(journal, before, 100, 2.0)
        swap(journal, version, before, outcome)
        accept(journal, version, 100, tau)
    assert sentence(look(journal, clock.now_s).headline).endswith("+0.50 since v1.")


def test_the_fleets_version_is_what_most_servers_have(tmp_path: Path):
    journal, _ = make_empty(tmp_path)
    for server, version, tau in (
        ("http://a", "v000002", 1.5),
        ("http://b", "v000001", 2.0),
        ("http://c", "v000001", 3.0),
    ):
        accept(journal, version, 100, tau, server)
    headline = look(journal).headline
    assert sentence(headline) == "Draft v1 emits 2.50 tokens per drafted step."
    assert "2 of 3 servers run it" in headline.below


def test_in_a_tie_the_version_seen_last_is_the_fleets(tmp_path: Path):
    journal, _ = make_empty(tmp_path)
    accept(journal, "v000001", 100, 2.0, "http://a")
    accept(journal, "v000001", 100, 2.0, "http://b")
    accept(journal, "v000002", 100, 3.0, "http://a")  # a is heard of first, and last
    assert sentence(look(journal).headline).startswith(
        "Draft v2 emits 3.00 tokens per drafted step"
    )


def test_domains_do_not_count_twice(tmp_path: Path):
    journal, _ = make_empty(tmp_path)
    accept(journal, "v000001", 100, 2.0)
    accept(journal, "v000001", 900, 4.0, None, domain="code")
    accept(journal, "v000001", 900, 3.0, None, domain="")
    view = look(journal)
    assert view.headline.number == "2.00 tokens"
    assert [curve.name for curve in view.servers] == [SERVERS[0]]
    assert {curve.name: curve.tau for curve in view.domains} == {"code": 4.0, "no domain": 3.0}


def test_each_server_names_the_weights_of_its_target(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    for version in ("17@0123456789ab", "18@123456789abc"):
        clock.now_s += 5
        accept(journal, "v000001", 100, 2.0, "http://moves", target_version=version)
        accept(journal, "v000001", 100, 2.0, "http://stays")
    servers = {curve.name: curve.target_version for curve in look(journal, clock.now_s).servers}
    assert servers == {"http://moves": "18@123456789abc", "http://stays": ""}


def test_the_newest_pace_of_each_server_is_shown_also_while_it_drafts_nothing(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    for pace in ("pace auto: 3 tokens at 1", "pace auto: 0 tokens at 1"):
        clock.now_s += 5
        accept(journal, "v000001", 0, 1.0, "http://paced", pace=pace)
        accept(journal, "v000001", 100, 2.0, "http://fixed")
    assert look(journal, clock.now_s).paces == {"http://paced": "pace auto: 0 tokens at 1"}


def test_a_point_sums_counts_and_is_no_mean_of_means(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    accept(journal, "v000001", 100, 2.0)
    clock.now_s += 86400 / 2  # buckets of 5 minutes
    accept(journal, "v000001", 300, 2.0)
    clock.now_s += 60
    accept(journal, "v000001", 100, 4.0)
    first, last = look(journal, clock.now_s).servers[0].points
    assert (first.tau, first.drafts) == (2.0, 100)
    assert (last.tau, last.drafts, last.time_s) == (2.5, 400, clock.now_s)


def test_curves_stay_few_and_short(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    for _ in range(2000):
        clock.now_s += 7
        accept(journal, "v000001", 10, 2.0)
    for number in range(50):
        accept(journal, "v000001", 10, 1.9 - number / 100, f"http://s{number}")
    servers = look(journal, clock.now_s).servers
    assert max(len(curve.points) for curve in servers) <= 240
    names = [curve.name for curve in servers]
    assert names == [f"http://s{number}" for number in range(43, 50)] + ["44 others"], (
        "the worst are shown"
    )
    assert len(names) == MAX_CURVES
    assert sum(point.drafts for point in servers[-1].points) == 20000 + 430


def test_of_many_domains_the_busiest_are_shown(tmp_path: Path):
    journal, _ = make_empty(tmp_path)
    for number in range(20):
        accept(journal, "v000001", 10 + number, 2.0, None, domain=f"d{number:02d}")
    names = [curve.name for curve in look(journal).domains]
    assert names == [f"d{number}" for number in range(13, 20)] + ["13 others"]


def test_a_range_leaves_out_what_is_older(tmp_path: Path):
    journal = make_journal(tmp_path, NOW_S)
    view = look(journal, range_s=900)
    assert view.begin_s == NOW_S - 900
    assert min(point.time_s for curve in view.servers for point in curve.points) >= NOW_S - 900
    assert len(view.gates) == 4, "verdicts and swaps are lists of the newest"
    assert look(journal).begin_s == NOW_S - 3595


def test_marks_are_one_for_every_rollout_and_way_back(tmp_path: Path):
    marks = look(make_journal(tmp_path, NOW_S)).marks
    assert [(mark.version, mark.is_rollback) for mark in marks] == [
        ("v000012", False),
        ("v000013", False),
        ("v000012", True),
    ]


def test_attempts_that_fail_again_and_again_are_one_line(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    for outcome in (
        "unreachable",
        "unreachable",
        "refused",
        "unreachable",
        "swapped",
        "unreachable",
    ):
        clock.now_s += 1
        swap(journal, "v000002", "v000001", outcome)
    shown = look(journal, clock.now_s).swaps
    assert [(entry.outcome, entry.time_s - NOW_S) for entry in shown] == [
        ("unreachable", 6), ("swapped", 5), ("unreachable", 4), ("refused", 3),
    ]  # fmt: skip


def test_a_server_that_refuses_for_days_displaces_no_other_swap_or_fault(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    accept(journal, "v000001", 1000, 2.0)
    swap(journal, "v000002", "v000001")
    accept(journal, "v000002", 1000, 1.02, pace="pace auto: 3 tokens at 1")
    for _ in range(6000):
        swap(journal, "v000002", "v000001", "refused", SERVERS[1])
    journal.write(FaultEntry(what="registry_damaged", reason="v000003 is damaged"))
    for number in range(300):
        reason = f"status 503, request {number}"
        journal.write(FaultEntry(what="server_refuses", detail=SERVERS[1], reason=reason))
    found = look(journal, clock.now_s)
    assert [entry.outcome for entry in found.swaps] == ["refused", "swapped"]
    assert [mark.version for mark in found.marks] == ["v000002"]
    assert found.headline.tone == "bad", "a version that replaced another one is no new head"
    assert [fault.what for fault in found.faults] == ["server_refuses", "registry_damaged"]


def test_positions_show_the_version_served_and_the_one_before(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    accept(journal, "v000001", 10, 1.9, accepted_at=[6, 3])
    swap(journal, "v000002", "v000001")
    clock.now_s += 10
    accept(journal, "v000002", 20, 2.2, accepted_at=[16, 8])
    accept(journal, "v000002", 20, 2.2, accepted_at=[12, 8])
    positions = look(journal, clock.now_s).positions
    assert [(shown.version, shown.shares) for shown in positions] == [
        ("v000002", [0.7, 0.4]),
        ("v000001", [0.6, 0.3]),
    ]


def test_drops_are_differences_and_a_restart_is_no_drop(tmp_path: Path):
    journal, clock = make_empty(tmp_path)
    for counts in (
        {"evicted": 5},
        {"evicted": 8, "corrupt": 1},
        {"evicted": 8, "corrupt": 1},
        {},
        {"evicted": 2},
    ):
        journal.write(BufferEntry(records=1, bytes=1, held_out=0, dropped=counts))
        clock.now_s += 5
    drops = [counts for _, counts in look(journal, clock.now_s).drops]
    assert drops == [{"evicted": 3, "corrupt": 1}, {"evicted": 2}]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (5400, "2 h"), (180000, "2 days")],
)
def test_durations_are_in_the_largest_unit_that_fits(seconds: float, said: str):
    assert format_duration(seconds) == said


def test_only_versions_are_shortened():
    assert [shorten_version(name) for name in ("v000012", "v000000", "step-7", "vanilla", "v")] == [
        "v12", "v0", "step-7", "vanilla", "v",
    ]  # fmt: skip


def test_the_application_serves_the_page_the_numbers_and_the_metrics(tmp_path: Path):
    registry = CollectorRegistry()
    Gauge("redraft_test", "a test", registry=registry).set(7)
    journal = make_journal(tmp_path, NOW_S, minutes=5)
    client = TestClient(build_app(tmp_path, registry, clock=lambda: NOW_S))
    index = client.get("/")
    assert "script-src 'self'" in index.headers["content-security-policy"]
    for name in re.findall(r'(?:src|href)="([^":]+)"', index.text):
        assert client.get(f"/{name}").status_code == 200, name
    first = client.get("/overview.json").json()
    accept(journal, "v000099", 1e9, 2.0)
    assert client.get("/overview.json").json()["headline"] != first["headline"], (
        "later entries are seen"
    )
    assert client.get("/overview.json?range_s=soon").status_code == 400
    assert "redraft_test 7.0" in client.get("/metrics").text
    assert client.get("/page.py").status_code == client.get("/..%2fpage.py").status_code == 404
    assert TestClient(build_app(tmp_path)).get("/metrics").status_code == 404


def test_a_new_journal_under_an_open_page_starts_over(tmp_path: Path):
    make_journal(tmp_path, NOW_S, minutes=5)
    client = TestClient(build_app(tmp_path, clock=lambda: NOW_S))
    assert client.get("/overview.json").json()["servers"]
    for path in tmp_path.iterdir():
        path.unlink()
    assert client.get("/overview.json").json()["servers"] == []


def test_a_long_journal_is_answered_at_once(tmp_path: Path):
    make_journal(tmp_path, NOW_S, minutes=600)
    client = TestClient(build_app(tmp_path, clock=lambda: NOW_S))
    client.get("/overview.json")
    begin_s = time.process_time()  # excludes the work of other processes on the machine
    answer = client.get("/overview.json?range_s=0")
    assert time.process_time() - begin_s < 2
    assert len(answer.content) < 200_000


def test_the_daemon_keeps_its_signals_and_its_life(tmp_path: Path):
    async def daemon() -> list[str]:
        said: list[str] = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, said.append, "terminated")
        async with serve_in_background(build_app(tmp_path), Page(port=0)) as url:
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}overview.json")).status_code == 200
            taken = Page(port=int(url.split(":")[-1].strip("/")))
            with pytest.raises(OSError, match=r"127.0.0.1.*\d+.*page.port"):
                async with serve_in_background(build_app(tmp_path), taken):
                    pass
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: said)
            async with httpx.AsyncClient() as client:
                assert (await client.get(url)).status_code == 200, "only the daemon ends its page"
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
        return said

    assert asyncio.run(daemon()) == ["terminated"]


def test_an_upgrade_is_answered_as_plain_http(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    upgrade = b"GET /overview.json HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"

    async def ask() -> bytes:
        async with serve_in_background(build_app(tmp_path), Page(port=0)) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
            writer.write(upgrade + b"X-Long: " + 9000 * b"0" + b"\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
            writer.close()
            return answer

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 200")
    assert not caplog.records


def test_the_page_is_bounded_and_answers_under_names_of_its_own_only(tmp_path: Path):
    async def main() -> None:
        page = Page(port=0, hosts=("redraft.example",))
        async with (
            serve_in_background(build_app(tmp_path, CollectorRegistry()), page) as url,
            httpx.AsyncClient(base_url=url) as client,
        ):
            for path in ("/", "/overview.json", "/metrics"):
                for host, status in (
                    *(("rebound.example", 421), ("127.0.0.1.nip.io", 421)),
                    *(("redraft.example", 200), ("10.0.0.7:8400", 200), ("learner:8400", 200)),
                ):
                    answer = await client.get(path, headers={"Host": host})
                    assert answer.status_code == status, (path, host)
            reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
            head = b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
            with suppress(ConnectionError):
                for _ in range(100):
                    writer.write(head + 10_000 * b"a:b\r\n")
                    await writer.drain()
                    head = b""
                assert b"431" in await reader.read()
            writer.close()

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


# ---------------------------------------------------------------- in a browser
@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[str]:
    """The page's address, served from an event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = serve_in_background(build_app(folder), Page(port=port))

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout=TIMEOUT_S)

    try:
        yield run(context.__aenter__())
    finally:
        run(context.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


HURRY = """{
  const timeout = setTimeout, interval = setInterval, now = performance.now.bind(performance);
  window.setTimeout = (work, ms) => timeout(work, ms / 5);
  window.setInterval = (work, ms) => interval(work, ms / 5);
  performance.now = () => 5 * now();
}"""
"""The clock of a page goes five times as fast, so that a test waits less for its polls."""


class Tab:
    """A headless Chromium with one page, driven over the debugging port."""

    def __init__(self, folder: Path, *flags: str) -> None:
        assert CHROMIUM is not None
        command = [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
        ]
        command += [
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ]
        command += [
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={folder / 'profile'}",
        ]
        command += [
            "--remote-debugging-port=0",
            f"--log-net-log={folder / 'net.json'}",
            *flags,
            "about:blank",
        ]
        self._net_log = folder / "net.json"
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        address = next(
            line for line in self._process.stderr if "DevTools listening on" in line
        ).split()[-1]
        port = int(re.findall(r":(\d+)/", address)[0])
        pages = httpx.get(f"http://127.0.0.1:{port}/json").json()
        from websockets.sync.client import connect

        target = next(entry for entry in pages if entry["type"] == "page")
        self._socket = connect(target["webSocketDebuggerUrl"], max_size=None)
        self._number = 0
        self.console: list[str] = []
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=HURRY)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=TIMEOUT_S))
            if message.get("method") in (
                "Runtime.exceptionThrown",
                "Runtime.consoleAPICalled",
                "Log.entryAdded",
            ):
                self.console.append(json.dumps(message["params"]))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def value(self, expression: str) -> Any:
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.value(expression):
            assert time.monotonic() < deadline, (
                f"{expression} did not become true; console: {self.console}"
            )
            time.sleep(0.1)

    def open(self, url: str, width: int = 1400, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=1000,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=url)
        self.wait_for("document.body?.dataset.ready === 'yes'")

    def close(self) -> list[str]:
        """The addresses requested by pages."""
        self.call("Browser.close")
        self._process.wait(timeout=TIMEOUT_S)
        events = (
            event.get("params", {}) for event in json.loads(self._net_log.read_text())["events"]
        )
        return [
            e["url"]
            for e in events
            if "url" in e and e.get("initiator", "not an origin") != "not an origin"
        ]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    tab = Tab(tmp_path)
    yield tab
    tab.kill()


@browser
def test_every_chart_is_drawn_in_both_colours_and_widths(tmp_path: Path, tab: Tab):
    make_journal(tmp_path / "journal", time.time())
    with serving(tmp_path / "journal") as url:
        for dark, width in ((False, 1400), (True, 1400), (False, 420), (True, 420)):
            tab.open(url, width, dark)
            for chart, lines in (("servers", 2), ("domains", 3), ("buffer", 1), ("training", 2)):
                assert (
                    tab.value(f"document.querySelectorAll('#{chart} path.line').length") == lines
                ), chart
                assert (
                    tab.value(f"document.querySelector('#{chart} path.line').getBBox().width")
                    > width / 8
                )
            assert tab.value("document.querySelectorAll('#servers .mark').length") == 3
            assert tab.value("document.querySelectorAll('#positions .bar').length") == 8
            assert tab.value("document.querySelectorAll('#gates tbody tr').length") == 4
            assert tab.value("document.querySelectorAll('#swaps tbody tr').length") == 4
            assert "v12 emits" in tab.value("document.getElementById('headline').textContent")
            background = tab.value("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", background))) < 150) == dark
            assert tab.value("document.documentElement.scrollWidth <= innerWidth"), (
                "nothing is wider than the window"
            )
        asked = tab.close()
    assert tab.console == []
    assert {address.startswith(url) for address in asked} == {True}
    assert len(asked) >= 16


@browser
def test_the_page_follows_the_journal_and_outlives_the_learner(tmp_path: Path, tab: Tab):
    folder, port = tmp_path / "journal", free_port()
    with serving(folder, port) as url:
        tab.open(url)
        assert tab.value("document.getElementById('headline').textContent").startswith(
            "Nothing has been measured yet."
        )
        assert tab.value("document.querySelectorAll('.none').length") == 7
        tab.value("window.neverReloaded = true")
        journal = Journal(folder)
        accept(journal, "v000001", 100, 2.5, domain=None)
        accept(journal, "v000001", 100, 2.5, None, domain="<img src=x onerror=alert(1)>")
        tab.wait_for(
            "document.getElementById('headline').textContent.startsWith('Draft v1 emits 2.50 "
            "tokens')"
        )
        assert "<img" in tab.value("document.getElementById('domains').textContent"), (
            "a label is text, never markup"
        )
        assert tab.value("document.querySelectorAll('img').length") == 0
    assert tab.console == []
    tab.wait_for("document.getElementById('live').textContent.includes('no answer')")
    assert "2.50" in tab.value("document.getElementById('headline').textContent"), (
        "what was shown stays"
    )
    with serving(folder, port):
        journal.write(StateEntry(phase="halted", reason="the disk is full"))
        tab.wait_for("document.getElementById('live').textContent === 'live'")
        tab.wait_for("document.querySelector('.phases .now').textContent === 'halted'")
        assert tab.value("window.neverReloaded")


@browser
def test_a_pointer_reads_every_curve_and_stays_over_an_update(tmp_path: Path, tab: Tab):
    make_journal(tmp_path / "journal", time.time())
    with serving(tmp_path / "journal") as url:
        tab.open(url)
        x, y = tab.value(
            "(b => [b.left + b.width / 2, b.top + 99])(document.querySelector('#servers "
            "svg').getBoundingClientRect())"
        )
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        shown = tab.value("document.getElementById('tooltip').textContent")
        assert all(server.removeprefix("http://") in shown for server in SERVERS)
        tab.value("window.drawing = document.querySelector('#servers svg')")
        tab.wait_for("document.querySelector('#servers svg') !== window.drawing")
        assert tab.value("document.querySelectorAll('#servers .cross').length") == 1
        tab.value("document.querySelectorAll('.ranges button')[0].click()")
        tab.wait_for("document.querySelectorAll('#servers .mark').length === 2")
        assert tab.value("location.hash") == "#15%20min"
    assert tab.console == []


@pytest.mark.parametrize(
    "sent", [b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc", b""]
)
def test_a_client_that_keeps_its_connection_does_not_keep_the_page(tmp_path: Path, sent: bytes):
    async def main() -> None:
        app = build_app(make_journal(tmp_path, NOW_S, minutes=1).folder)
        async with serve_in_background(app, Page(port=0)) as url:
            _, client = await asyncio.open_connection(
                "127.0.0.1", int(url.split(":")[-1].strip("/"))
            )
            client.write(sent)
            await client.drain()
        client.close()

    asyncio.run(asyncio.wait_for(main(), 300))
