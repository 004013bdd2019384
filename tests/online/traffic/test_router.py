"""The router in front of servers on real sockets.

Where requests go, what clients receive, and the effect of faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import time

import httpcore
import httpx
import numpy as np
import pytest
from fake_completions import Upstream, event, served
from starlette.datastructures import Headers
from waiting import in_event_loop, until

from redraft.heads.files.artifact import publish
from redraft.heads.files.folder import fingerprint
from redraft.online.records.origin import read_origin_headers
from redraft.online.records.record import Record, read_frames
from redraft.online.records.spool import spool_files
from redraft.online.traffic import pools, upstream
from redraft.online.traffic import tap as tap_module
from redraft.online.traffic.domains import Clusters
from redraft.online.traffic.proxy import STARTS_PER_TURN, Turnstile
from redraft.online.traffic.router import RouterConfig, build_router
from redraft.online.traffic.tap import TapConfig

PATH = "/v1/completions"
CODE, TALE = "def f(self): return self.value", "Tell me a tale of bears in the woods."


class Routed:
    """Servers of code, prose and no domain, and a client of the router in front of them."""

    def __init__(self, folder):
        self.folder = folder
        self.code, self.prose, self.general = (
            Upstream("code"),
            Upstream("prose"),
            Upstream("general"),
        )
        self.servers = [(self.code, "code"), (self.prose, "prose"), (self.general, "")]
        self.http: httpx.AsyncClient
        self.admin: httpx.AsyncClient

    def write_fleet(self):
        lines = (
            f'[[servers]]\nurl = "{server.url}"\ndomain = "{domain}"\n'
            for server, domain in self.servers
        )
        (self.folder / "fleet.toml").write_text("".join(lines))

    async def ask(self, domain="", path=PATH, headers=None, **body):
        label = {"X-Redraft-Domain": domain} if domain else {}
        return await self.http.post(path, json=body, headers=label | (headers or {}))

    async def answered_by(self, domain="", **body):
        answer = await self.ask(domain, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    async def metric(self, name, **labels):
        wanted = (
            "{" + ",".join(f'{label}="{value}"' for label, value in sorted(labels.items())) + "}"
        )
        lines = (await self.admin.get("/metrics")).text.splitlines()
        return next(
            (float(line.split()[-1]) for line in lines if line.startswith(f"{name}{wanted} ")), None
        )

    async def shown(self):
        return (await self.admin.get("/redraft/router")).json()["servers"]

    async def under_way(self):
        return {server["domain"]: server["requests"] for server in await self.shown()}

    async def until_checked(self):
        """Wait until the tap has checked every server, and forget its questions."""

        async def are_checked():
            return len((await self.admin.get("/redraft/tap")).json()["checked_servers"]) == len(
                self.servers
            )

        await until(are_checked)
        for server, _ in self.servers:
            server.seen.clear()

    async def until_known(self, *urls):
        async def are_known():
            return set(urls) <= {server["url"] for server in await self.shown()}

        await until(are_known)


@contextlib.asynccontextmanager
async def routed(folder, **config):
    them = Routed(folder)
    for server, _ in them.servers:
        await server.start()
    them.write_fleet()
    config = RouterConfig(fleet=folder / "fleet.toml", **({"poll_s": 0.05} | config))
    app, admin_app = build_router(config)
    async with served(app) as front:
        them.port = front.port
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.port}", timeout=120) as them.http,
            httpx.AsyncClient(
                transport=httpx.ASGITransport(admin_app), base_url="http://admin"
            ) as them.admin,
        ):
            if config.tap.is_on:
                await them.until_checked()
            yield them
        for server, _ in them.servers:
            server.gate.set()
    await asyncio.gather(*(server.stop() for server, _ in them.servers))


async def until_answered_by(them, domain, name):
    async def is_answered():
        return await them.answered_by(domain) == name

    await until(is_answered)


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    texts = [f"def f{n}(self): return self.value_{n}" for n in range(9)] + [
        f"Tell me a tale of {n} bears in the woods." for n in range(6)
    ]
    folder = tmp_path_factory.mktemp("clusters") / "domains"
    publish(
        folder, Clusters.fit(texts, 2).named_after(texts, ["code"] * 9 + ["prose"] * 6).write, {}
    )
    return folder


# --- where requests go


@in_event_loop
async def test_a_request_goes_to_the_servers_of_its_domain_which_learn_its_domain(
    tmp_path, clusters
):
    async with routed(tmp_path, clusters=clusters, aliases={"m-prose": "prose"}) as them:
        assert await them.answered_by("prose", prompt=CODE) == "prose"
        assert them.prose.last()["x-redraft-domain"] == "prose"
        assert await them.answered_by(model="m-prose", prompt=CODE) == "prose"
        assert them.prose.last()["x-redraft-domain"] == "prose"
        assert await them.answered_by(prompt=CODE) == "code"
        assert them.code.last()["x-redraft-domain"] == "code"
        answer = await them.ask(
            path="/v1/chat/completions", messages=[{"role": "user", "content": TALE}]
        )
        assert answer.headers["x-redraft-pool"] == "prose"
        assert await them.metric("redraft_router_requests_total", domain="prose", pool="prose") == 3


@in_event_loop
async def test_what_has_no_pool_goes_to_servers_without_a_domain(tmp_path):
    async with routed(tmp_path) as them:
        assert await them.answered_by("maths") == "general"
        assert them.general.last()["x-redraft-domain"] == "maths"
        assert await them.answered_by() == "general"
        assert "x-redraft-domain" not in them.general.last()
        assert (await them.http.get("/v1/models")).json()["data"][0]["id"] == "general"
        assert await them.metric("redraft_router_requests_total", domain="other", pool="") == 1
        assert await them.metric("redraft_router_fallbacks_total", domain="code") == 0


@in_event_loop
async def test_a_request_and_its_answer_are_passed_on_as_they_are(tmp_path):
    body = b'{ "prompt":"\xc3\xa9",   "odd": 1.0e2}'
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer key",
        "X-Odd": b"\xe9",
        "Connection": "close",
    }
    async with routed(tmp_path) as them:
        answer = await them.http.post(f"{PATH}?a=b%20c", content=body, headers=headers)
        seen, seen_body = them.general.seen[0]
        assert seen_body == body
        assert (seen["authorization"], seen["x-odd"]) == ("Bearer key", "é")
        assert "connection" not in seen
        assert seen["host"] == them.general.url.removeprefix("http://")
        assert answer.headers["x-own"] == "kept"
        assert (await them.http.post("/v1/anything", content=b"not JSON")).status_code == 200
        assert (await them.http.get("/v1/none")).status_code == 405


@in_event_loop
async def test_the_server_with_the_fewest_requests_under_way_is_asked(tmp_path):
    async with routed(tmp_path) as them:
        second = Upstream("code-2")
        await second.start()
        them.servers.append((second, "code"))
        them.write_fleet()
        await until_answered_by(them, "code", "code-2")
        waiting = [asyncio.create_task(them.ask("code", do="wait"))]
        await until(lambda: any(b"wait" in body for _, body in them.code.seen + second.seen))
        busy, free = (
            (them.code, "code-2")
            if any(b"wait" in body for _, body in them.code.seen)
            else (second, "code")
        )
        assert [await them.answered_by("code") for _ in range(4)] == [free] * 4
        busy.gate.set()
        await asyncio.gather(*waiting)
        # Equally busy servers take turns.
        assert {await them.answered_by("code") for _ in range(4)} == {"code", "code-2"}


@in_event_loop
async def test_the_servers_routes_for_their_learner_are_not_passed_on(tmp_path):
    async with routed(tmp_path) as them:
        assert (
            await them.http.post("/redraft/swap", json={"version": "v000001"})
        ).status_code == 404
        assert (await them.http.get("/redraft/tap")).status_code == 404


@in_event_loop
@pytest.mark.parametrize(
    "path",
    ["/v1/../redraft/swap", "/./redraft/swap", "/v1/%2e%2e/redraft/swap", "/%3f/../redraft/swap"],
)
async def test_no_detour_leads_to_them(tmp_path, path):
    async with routed(tmp_path) as them:
        front = them.http.base_url
        reader, writer = await asyncio.open_connection(front.host, front.port)
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        assert (await reader.read()).startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))
        writer.close()


@in_event_loop
@pytest.mark.parametrize(
    "body",
    [
        {"messages": 5}, {"messages": [5, {"role": "user", "content": 5}]}, {"messages": [{"content": [{"text": 5}]}]},
        {"prompt": [-1, 1 << 40]}, {"prompt": {"a": 1}}, [1], "text",
    ],
)  # fmt: skip
async def test_what_is_no_request_is_the_servers_to_refuse(tmp_path, clusters, random_target, body):
    async with routed(tmp_path, clusters=clusters, target=random_target) as them:
        sent = json.dumps(body).encode()
        assert (await them.http.post(PATH, content=sent)).status_code == 200
        assert (await them.http.post(PATH, content=b"[" * 100_000)).status_code == 200
        assert [seen for _, seen in them.general.seen] == [sent, b"[" * 100_000]


# --- streams


@in_event_loop
async def test_events_arrive_as_they_are_sent(tmp_path):
    async with routed(tmp_path) as them:
        async with them.http.stream("POST", PATH, json={"stream": True}) as answer:
            chunks = answer.aiter_raw()
            first = await asyncio.wait_for(
                anext(chunks), 120
            )  # the server holds back the second chunk
            assert first == event(
                {"id": "cmpl-1", "model": None, "choices": [make_choice("general")]}
            )
            them.general.gate.set()
            rest = b"".join([chunk async for chunk in chunks])
        assert rest == first + b"data: [DONE]\n\n"


def make_choice(name):
    return {"index": 0, "text": name, "finish_reason": None, "logprobs": None}


@in_event_loop
async def test_a_client_that_leaves_ends_its_request_at_the_server(tmp_path):
    async with routed(tmp_path) as them:
        async with them.http.stream("POST", PATH, json={"stream": True}) as answer:
            await anext(answer.aiter_raw())
            assert (await them.under_way())[""] == 1
        await until(lambda: them.general.left == 1)
        with contextlib.suppress(httpx.ReadTimeout):
            await them.http.post(PATH, json={"do": "wait"}, timeout=0.2)
        await until(lambda: them.general.left == 2)
        assert (await them.under_way())[""] == 0


@in_event_loop
async def test_a_connection_is_kept_for_the_next_request(tmp_path):
    async with routed(tmp_path) as them:
        them.general.gate.set()
        for number in range(100):
            answer = await them.ask(stream=bool(number % 2))
            assert answer.status_code == 200
        assert len(them.general.clients) == 1
        assert await them.under_way() == {"code": 0, "prose": 0, "": 0}


@in_event_loop
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_connection_that_the_server_has_closed_is_not_used_again(tmp_path, host):
    async with routed(tmp_path) as them:
        text = (tmp_path / "fleet.toml").read_text().replace("127.0.0.1", host)
        (tmp_path / "fleet.toml").write_text(text)
        await them.until_known(them.code.url.replace("127.0.0.1", host))
        for _ in range(3):
            assert await them.answered_by("code") == "code"
            await them.code.stop()
            await them.code.start()


# --- faults


@in_event_loop
async def test_a_pool_that_is_down_is_stood_in_for_until_it_is_back(tmp_path):
    async with routed(tmp_path) as them:
        await them.code.stop()
        assert [await them.answered_by("code") for _ in range(3)] == ["general"] * 3
        assert them.general.last()["x-redraft-domain"] == "code"
        await them.general.stop()
        assert await them.answered_by("code") == "prose"
        assert await them.metric("redraft_router_fallbacks_total", domain="code") == 4
        assert await them.metric("redraft_router_server_up", server=them.code.url, pool="code") == 0
        # passed over, not tried for every request
        assert (
            await them.metric("redraft_router_refused_connections_total", server=them.code.url) <= 2
        )
        await them.code.start()
        await until_answered_by(them, "code", "code")
        assert await them.metric("redraft_router_server_up", server=them.code.url, pool="code") == 1
        await them.general.start()


@in_event_loop
async def test_a_request_that_a_server_had_received_is_not_sent_to_another(tmp_path):
    async with routed(tmp_path) as them:
        answer = await them.ask("code", do="break")
        assert answer.status_code == 502
        assert "connection" in answer.json()["error"]["message"]
        assert len(them.code.seen) == 1
        assert not them.general.seen
        assert not them.prose.seen
        assert await them.answered_by("code") == "code"


@in_event_loop
async def test_a_stream_that_breaks_says_why_before_the_client_sees_it_break(tmp_path):
    async with routed(tmp_path) as them:
        heard = b""
        body = {"do": "break within", "stream": True}
        async with them.http.stream(
            "POST", PATH, json=body, headers={"X-Redraft-Domain": "code"}
        ) as answer:
            with contextlib.suppress(httpx.RemoteProtocolError):
                async for chunk in answer.aiter_bytes():
                    heard += chunk
                    them.code.gate.set()  # the first part has arrived
                pytest.fail("the stream ended as if it were whole")
        whole, last = [
            json.loads(line.removeprefix(b"data: ")) for line in heard.splitlines() if line
        ]
        assert whole["choices"][0]["text"] == "code"
        assert last["error"]["code"] == 502
        assert "connection" in last["error"]["message"]
        assert await them.under_way() == {"code": 0, "prose": 0, "": 0}


@in_event_loop
async def test_without_any_server_it_says_so(tmp_path):
    async with routed(tmp_path) as them:
        for server, _ in them.servers:
            await server.stop()
        answer = await them.ask("code", prompt=CODE)
        assert answer.status_code == 503
        assert "3 servers" in answer.json()["error"]["message"]
        for server, _ in them.servers:
            await server.start()
        await until_answered_by(them, "code", "code")


@in_event_loop
async def test_a_machine_that_does_not_answer_holds_nobody_up_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(upstream, "CONNECT_TIMEOUT_S", 0.1)
    async with routed(tmp_path) as them:
        text = (tmp_path / "fleet.toml").read_text()
        (tmp_path / "fleet.toml").write_text(
            text + '[[servers]]\nurl = "http://192.0.2.1:9"\ndomain = "far"\n'
        )
        await them.until_known("http://192.0.2.1:9")
        began_s = time.monotonic()
        assert await them.answered_by("far") == "general"
        assert time.monotonic() - began_s < 5


@in_event_loop
async def test_servers_come_and_go_with_the_file(tmp_path, caplog):
    async with routed(tmp_path) as them:
        async with them.http.stream(
            "POST", PATH, json={"stream": True}, headers={"X-Redraft-Domain": "code"}
        ) as answer:
            chunks = answer.aiter_raw()
            await anext(chunks)
            (code, *others), them.servers = them.servers, them.servers[1:]
            them.write_fleet()
            await until_answered_by(them, "code", "general")
            them.code.gate.set()
            assert b"[DONE]" in b"".join([chunk async for chunk in chunks]), (
                "it ends what it had begun"
            )
        (tmp_path / "fleet.toml").write_text("not TOML")
        await until(lambda: caplog.records)
        assert await them.answered_by("prose") == "prose"
        them.servers = [code, *others]
        them.write_fleet()
        await until_answered_by(them, "code", "code")


# --- records


@in_event_loop
async def test_a_wish_for_records_is_only_taken_back_where_it_was_refused(tmp_path, random_target):
    async with routed(
        tmp_path, tap=TapConfig(spool=tmp_path / "spool"), target=random_target
    ) as them:
        assert (await them.ask("code", prompt="x", metadata={"do": 503})).status_code == 503
        assert len(them.code.seen) == 1
        assert not them.general.seen, "a server had it, and may have failed by it"
        assert (await them.ask("code", prompt="x", metadata={"do": 400})).status_code == 400
        assert [b"return_token_ids" in body for _, body in them.code.seen] == [True, True, False]
        assert await them.under_way() == {"code": 0, "prose": 0, "": 0}


@in_event_loop
async def test_it_is_itself_the_tap(tmp_path, random_target):
    tap = TapConfig(spool=tmp_path / "spool", logprobs=2)
    async with routed(tmp_path, tap=tap, target=random_target) as them:
        plain = (await them.ask("code", model="code", prompt="x")).json()
        asked = json.loads(them.code.seen[0][1])
        assert (asked["return_token_ids"], asked["logprobs"]) == (True, 2)
        assert plain["choices"] == [
            make_choice("code") | {"token_ids": None, "prompt_token_ids": None}
        ]
        them.prose.gate.set()
        stream = (await them.ask("prose", prompt="x", stream=True)).text
        assert stream.endswith("data: [DONE]\n\n")
        assert "token_id:" not in stream
        assert (
            await them.ask("code", prompt="x", headers={"X-Redraft-Opt-Out": "1"})
        ).status_code == 200
        counts = (await them.admin.get("/redraft/tap")).json()
        assert counts["captured_requests"] == 2
        assert counts["skipped_requests_opt_out"] == 1
    frames = [
        frame
        for path in spool_files(tmp_path / "spool")
        for frame in read_frames(path.read_bytes())
    ]
    records = [record for _, record in frames if isinstance(record, Record)]
    assert sorted(record.domain for record in records) == ["code", "prose"]
    assert {record.target_fingerprint for record in records} == {fingerprint(random_target)}
    np.testing.assert_array_equal(records[0].output_ids, [7, 8])
    np.testing.assert_array_equal(records[0].topk_ids, [[7, 8], [7, 8]])


# --- load, and our own limits


@in_event_loop
async def test_the_end_of_a_stream_costs_the_same_however_many_there_are(tmp_path, monkeypatch):
    looks = 0
    is_idle = httpcore.AsyncHTTPConnection.is_idle

    def count(connection):
        nonlocal looks
        looks += 1
        return is_idle(connection)

    async with routed(tmp_path) as them:
        # Bare sockets: httpx's client has the very pool that this is about.
        body = b'{"stream": true}'
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        ends = [await asyncio.open_connection("127.0.0.1", them.port) for _ in range(100)]
        for _, writer in ends:
            writer.write(head % (PATH.encode(), len(body)) + body)
        await until(lambda: len(them.general.seen) == 100)
        monkeypatch.setattr(httpcore.AsyncHTTPConnection, "is_idle", count)
        them.general.gate.set()
        for reader, writer in ends:
            assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            writer.close()
        # A pool that looks at all connections at every end would look thousands of times.
        assert looks == 100


@in_event_loop
async def test_a_request_without_a_free_descriptor_waits_and_no_server_is_blamed(
    tmp_path, monkeypatch
):
    connect, failures = (
        httpcore.AsyncHTTPConnection._connect,
        [OSError(errno.EMFILE, "Too many open files")] * 3,
    )

    async def connect_if_it_can(connection, request):
        if failures and request.headers and (b"x-own", b"1") in request.headers:
            raise httpcore.ConnectError("All connection attempts failed") from ExceptionGroup(
                "", [failures.pop()]
            )
        return await connect(connection, request)

    monkeypatch.setattr(httpcore.AsyncHTTPConnection, "_connect", connect_if_it_can)
    async with routed(tmp_path) as them:
        assert (await them.ask(headers={"X-Own": "1"})).status_code == 200
        assert not failures
        assert await them.metric("redraft_router_server_up", server=them.general.url, pool="") == 1
        assert (
            await them.metric("redraft_router_refused_connections_total", server=them.general.url)
            == 0
        )
        monkeypatch.setattr(pools, "OUT_OF_FILES_TIMEOUT_S", 0)
        failures += [OSError(errno.ENFILE, "Too many open files in system")] * 9
        for upstream_ in them.general, them.code, them.prose:
            upstream_.clients.clear()
        answer = await them.ask("prose", headers={"X-Own": "1"})
        assert answer.status_code == 503
        assert "LimitNOFILE" in answer.json()["error"]["message"]
        assert (
            await them.metric("redraft_router_server_up", server=them.prose.url, pool="prose") == 1
        )


@in_event_loop
async def test_a_server_that_refuses_at_once_gets_no_more_requests_until_it_is_healthy(tmp_path):
    """It has fewer requests under way than any other, so that it would get nearly all."""
    async with routed(tmp_path) as them:

        async def is_up(server):
            return (
                await them.metric("redraft_router_server_up", server=server.url, pool=server.name)
                == 1
            )

        async def prose_is_down():
            return not await is_up(them.prose)

        them.prose.health = 503
        assert (await them.ask("prose", do=503)).status_code == 503
        await until(prose_is_down)
        assert [await them.answered_by("prose") for _ in range(5)] == ["general"] * 5
        them.prose.health = 200
        await until_answered_by(them, "prose", "prose")
        # an error of a server that is healthy
        checks = them.code.checks
        assert (await them.ask("code", do=500)).status_code == 500

        async def code_is_checked():
            return them.code.checks > checks

        await until(code_is_checked)
        assert await them.answered_by("code") == "code"
        assert await is_up(them.code)


@in_event_loop
@pytest.mark.parametrize("is_patient", [True, False])
async def test_a_server_that_takes_requests_and_never_answers_is_passed_over(
    tmp_path, monkeypatch, is_patient
):
    monkeypatch.setattr(upstream, "SILENT_S", 0.05)
    monkeypatch.setattr(upstream, "HEALTH_TIMEOUT_S", 1.0)
    async with routed(tmp_path) as them:
        hung = await asyncio.start_server(
            lambda reader, writer: asyncio.sleep(3600), "127.0.0.1", 0
        )
        port = hung.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        text = (tmp_path / "fleet.toml").read_text()
        (tmp_path / "fleet.toml").write_text(f'{text}[[servers]]\nurl = "{url}"\ndomain = "hung"\n')
        waits = asyncio.create_task(
            them.ask("code", do="wait")
        )  # a long answer of a healthy server

        async def until_up_is(value):
            async def is_so():
                return (
                    await them.metric("redraft_router_server_up", server=url, pool="hung") == value
                )

            await until(is_so)

        await until_up_is(1)
        if is_patient:
            held = asyncio.create_task(them.ask("hung"))
        else:
            with pytest.raises(httpx.ReadTimeout):
                await them.http.post(
                    PATH,
                    json={},
                    headers={"X-Redraft-Domain": "hung"},
                    timeout=httpx.Timeout(10, read=0.03),
                )
        await until_up_is(0)
        assert [await them.answered_by("hung") for _ in range(5)] == ["general"] * 5
        assert await them.metric("redraft_router_server_up", server=them.code.url, pool="code") == 1
        them.code.gate.set()
        assert (await waits).status_code == 200
        if is_patient:
            held.cancel()
        hung.close()


def test_a_few_requests_start_in_each_turn_of_the_loop():
    async def main():
        turnstile, started, turns = Turnstile(), [], []

        async def start(number):
            await turnstile.enter()
            started.append(number)

        loop = asyncio.get_running_loop()

        def note():
            turns.append(len(started))
            if len(started) < 10:
                loop.call_soon(note)

        starts = [asyncio.create_task(start(number)) for number in range(10)]
        starts[5].cancel()
        note()
        await asyncio.gather(*starts, return_exceptions=True)
        assert started == [0, 1, 2, 3, 4, 6, 7, 8, 9]
        assert max(after - before for before, after in itertools.pairwise(turns)) <= STARTS_PER_TURN

    asyncio.run(main())


APIS = [
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/chat/completions/batch", "/inference/v1/generate", "/v1/completions/", "/v1/responses/"),
]


@pytest.mark.parametrize("path", APIS)
@in_event_loop
async def test_an_alias_counts_in_every_api_and_what_is_not_recorded_is_counted(
    tmp_path, path, random_target
):
    tap = TapConfig(spool=tmp_path / "spool", logprobs=2)
    config = {"aliases": {"llama-code": "code"}, "tap": tap, "target": random_target}
    async with routed(tmp_path, **config) as them:
        answer = await them.http.post(path, json={"model": "llama-code", "input": "x"})
        assert answer.headers["x-redraft-pool"] == "code"
        counts = (await them.admin.get("/redraft/tap")).json()
        is_read = path in ("/v1/completions", "/v1/chat/completions")
        assert counts.get("captured_requests", 0) == 0
        assert (
            counts["skipped_requests_unknown_field" if is_read else "skipped_requests_other_api"]
            == 1
        )


@in_event_loop
async def test_text_of_every_api_has_a_domain(tmp_path, clusters):
    async with routed(tmp_path, clusters=clusters) as them:
        for content in (
            TALE,
            [{"role": "user", "content": [{"type": "input_text", "text": TALE}]}],
        ):
            answer = await them.http.post("/v1/responses", json={"input": content})
            assert answer.headers["x-redraft-pool"] == "prose"


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/sleep",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/pause",
            "/server_info",
            "/start_profile",
        ),
        *("/%73leep", "//sleep", "/sleep/", "/v1/load_lora_adapter", "/docs"),
    ],
)
@in_event_loop
async def test_clients_do_not_reach_routes_for_developers(tmp_path, path):
    async with routed(tmp_path) as them:
        reader, writer = await asyncio.open_connection("127.0.0.1", them.port)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
        )
        writer.write(head.encode())
        answer = await reader.read()
        writer.close()
        assert answer.split(b" ")[1] == b"404"
        assert not them.general.seen


# --- headers


@in_event_loop
async def test_headers_of_a_single_connection_are_not_passed_on(tmp_path):
    headers = {
        "Connection": "close, X-Hop",
        "X-Hop": "1",
        "Proxy-Authorization": "Basic c2VjcmV0",
        "Proxy-Connection": "keep-alive",
        "TE": "trailers",
        "X-End": "2",
    }
    async with routed(tmp_path) as them:
        assert (await them.ask(headers=headers)).status_code == 200
        seen = them.general.last()
        assert seen["x-end"] == "2"
        assert not {"connection", "x-hop", "proxy-authorization", "proxy-connection", "te"} & set(
            seen
        )


@in_event_loop
async def test_a_client_cannot_take_off_the_labels_of_a_gateway(tmp_path):
    labels = {"X-Redraft-Opt-Out": "1", "X-Redraft-Tenant": "acme"}
    named = {"Connection": "close, x-redraft-opt-out, X-Redraft-Tenant"}
    async with routed(tmp_path) as them:
        assert (await them.ask(headers=labels | named)).status_code == 200
        seen = them.general.last()
        assert (seen["x-redraft-opt-out"], seen["x-redraft-tenant"]) == ("1", "acme")


@pytest.mark.parametrize("values", [("0", "1"), ("1", "0"), ("0, 1",), ("", "yes")])
def test_one_opt_out_of_several_is_enough(values):
    raw = [(b"x-redraft-opt-out", value.encode()) for value in values]
    assert read_origin_headers(Headers(raw=raw)).opt_out
    assert not read_origin_headers(Headers(raw=[(b"x-redraft-opt-out", b"0, no")])).opt_out


@in_event_loop
async def test_a_header_that_http_forbids_is_the_clients_fault_and_not_quoted(tmp_path, caplog):
    pytest.importorskip(
        "httptools", reason="h11, which uvicorn takes in its place, lets this one pass"
    )
    async with routed(tmp_path) as them:
        reader, writer = await asyncio.open_connection("127.0.0.1", them.port)
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Odd: hunter2\x01\r\nConnection: close\r\n\r\n"
        )
        answer = await reader.read()
        assert answer.split(b" ")[1] == b"400"
        assert b"hunter2" not in answer
        assert "hunter2" not in caplog.text
        writer.close()
        assert await them.answered_by() == "general"


# --- nothing a client sends ends recording


async def shipped(folder, them, count):
    def records():
        frames = [frame for path in spool_files(folder) for frame in read_frames(path.read_bytes())]
        return [record for _, record in frames]

    await until(lambda: len(records()) >= count)
    return records()


@in_event_loop
async def test_what_cannot_be_recorded_is_counted_and_the_next_is_recorded(
    tmp_path, random_target, monkeypatch
):
    monkeypatch.setattr(tap_module, "SHIP_INTERVAL_S", 0.02)
    odd = [
        {"repetition_penalty": 10**20},
        {"temperature": 1e-40},
        {"temperature": 10**400},
        {"top_k": 10**20},
        {"top_p": float("nan")},
        {"min_p": [1]},
        {"seed": "\ud800"},
    ]
    async with routed(
        tmp_path, tap=TapConfig(spool=tmp_path / "spool"), target=random_target
    ) as them:
        for fields in odd:
            body = json.dumps({"prompt": "x"} | fields)
            assert (await them.http.post(PATH, content=body)).status_code == 200
            assert (await them.ask(prompt="x")).status_code == 200
        records = await shipped(tmp_path / "spool", them, len(odd) + 4)
        counts = (await them.admin.get("/redraft/tap")).json()
        assert counts["errors"] == counts["errors_sampling"] == 3
        assert len({record.record_id for record in records}) == len(records) == 2 * len(odd) - 3
