"""The router in front of servers on real sockets: where requests go, what clients get, and what a fault does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time

import httpx
import numpy as np
import pytest
from fake_completions import Upstream, event, served

from heads.artifact import fingerprint, publish
from online import pools
from online.domains import Clusters
from online.records import Record, read_frames
from online.router import RouterConfig, router
from online.spool import spool_files
from online.tap import TapConfig

PATH = "/v1/completions"
CODE, TALE = "def f(self): return self.value", "Tell me a tale of bears in the woods."


class Routed:
    """Servers of code, prose and no domain, and a client of the router in front of them."""

    def __init__(self, folder):
        self.folder = folder
        self.code, self.prose, self.general = Upstream("code"), Upstream("prose"), Upstream("general")
        self.servers = [(self.code, "code"), (self.prose, "prose"), (self.general, "")]
        self.http: httpx.AsyncClient

    def write_fleet(self):
        lines = (f'[[servers]]\nurl = "{server.url}"\ndomain = "{domain}"\n' for server, domain in self.servers)
        (self.folder / "fleet.toml").write_text("".join(lines))

    async def ask(self, domain="", path=PATH, headers=None, **body):
        label = {"X-Redraft-Domain": domain} if domain else {}
        return await self.http.post(path, json=body, headers=label | (headers or {}))

    async def answered_by(self, domain="", **body):
        answer = await self.ask(domain, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    async def metric(self, name, **labels):
        wanted = "{" + ",".join(f'{label}="{value}"' for label, value in sorted(labels.items())) + "}"
        lines = (await self.http.get("/metrics")).text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name}{wanted} ")), None)

    async def under_way(self):
        servers = (await self.http.get("/redraft/router")).json()["servers"]
        return {server["domain"]: server["requests"] for server in servers}


@contextlib.asynccontextmanager
async def routed(folder, **config):
    them = Routed(folder)
    for server, _ in them.servers:
        await server.start()
    them.write_fleet()
    config = RouterConfig(fleet=folder / "fleet.toml", **({"poll_s": 0.05} | config))
    async with served(router(config)) as front:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.port}", timeout=20) as them.http:
            yield them
        for server, _ in them.servers:
            server.gate.set()
    await asyncio.gather(*(server.stop() for server, _ in them.servers))


def in_event_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        return asyncio.run(test(*args, **kwargs))

    return run


async def until(condition, timeout_s=10):
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.01)
    assert found


async def until_answered_by(them, domain, name, timeout_s=10):
    deadline_s = time.monotonic() + timeout_s
    while await them.answered_by(domain) != name:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    texts = [f"def f{n}(self): return self.value_{n}" for n in range(9)] + [
        f"Tell me a tale of {n} bears in the woods." for n in range(6)
    ]
    folder = tmp_path_factory.mktemp("clusters") / "domains"
    publish(folder, Clusters.fit(texts, 2).named_after(texts, ["code"] * 9 + ["prose"] * 6).write, {})
    return folder


# --- where requests go


@in_event_loop
async def test_a_request_goes_to_the_servers_of_its_domain_which_learn_its_domain(tmp_path, clusters):
    async with routed(tmp_path, clusters=clusters, aliases={"m-prose": "prose"}) as them:
        assert await them.answered_by("prose", prompt=CODE) == "prose"
        assert them.prose.last()["x-redraft-domain"] == "prose"
        assert await them.answered_by(model="m-prose", prompt=CODE) == "prose"
        assert them.prose.last()["x-redraft-domain"] == "prose"
        assert await them.answered_by(prompt=CODE) == "code"
        assert them.code.last()["x-redraft-domain"] == "code"
        answer = await them.ask(path="/v1/chat/completions", messages=[{"role": "user", "content": TALE}])
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
        busy, free = (them.code, "code-2") if any(b"wait" in body for _, body in them.code.seen) else (second, "code")
        assert [await them.answered_by("code") for _ in range(4)] == [free] * 4
        busy.gate.set()
        await asyncio.gather(*waiting)
        assert {await them.answered_by("code") for _ in range(4)} == {"code", "code-2"}  # equal ones take turns


@in_event_loop
async def test_the_servers_routes_for_their_learner_are_not_passed_on(tmp_path):
    async with routed(tmp_path) as them:
        assert (await them.http.post("/redraft/swap", json={"version": "v000001"})).status_code == 404
        assert (await them.http.get("/redraft/tap")).status_code == 404


@in_event_loop
@pytest.mark.parametrize(
    "path", ["/v1/../redraft/swap", "/./redraft/swap", "/v1/%2e%2e/redraft/swap", "/%3f/../redraft/swap"]
)
async def test_no_detour_leads_to_them(tmp_path, path):
    async with routed(tmp_path) as them:
        front = them.http.base_url
        reader, writer = await asyncio.open_connection(front.host, front.port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
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
            first = await asyncio.wait_for(anext(chunks), 5)  # the server waits with the second
            assert first == event({"id": "cmpl-1", "model": None, "choices": [make_choice("general")]})
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
        # passed over: not asked again for every request
        assert await them.metric("redraft_router_refused_connections_total", server=them.code.url) <= 2
        await them.code.start()
        await until_answered_by(them, "code", "code")
        assert await them.metric("redraft_router_server_up", server=them.code.url, pool="code") == 1
        await them.general.start()


@in_event_loop
async def test_a_request_that_a_server_had_received_is_not_sent_to_another(tmp_path):
    async with routed(tmp_path) as them:
        answer = await them.ask("code", do="break")
        assert answer.status_code == 502
        assert "broke off" in answer.json()["error"]["message"]
        assert len(them.code.seen) == 1
        assert not them.general.seen
        assert not them.prose.seen
        assert await them.answered_by("code") == "code"


@in_event_loop
async def test_a_break_within_an_answer_is_the_clients_to_see(tmp_path):
    async with routed(tmp_path) as them:
        with pytest.raises(httpx.RemoteProtocolError):
            await them.ask("code", do="break within", stream=True)
        assert await them.under_way() == {"code": 0, "prose": 0, "": 0}


@in_event_loop
async def test_without_any_server_it_says_so(tmp_path):
    async with routed(tmp_path) as them:
        for server, _ in them.servers:
            await server.stop()
        answer = await them.ask("code", prompt=CODE)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "none of 3 servers can be reached"
        for server, _ in them.servers:
            await server.start()
        await until_answered_by(them, "code", "code")


@in_event_loop
async def test_a_machine_that_does_not_answer_holds_nobody_up_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "CONNECT_TIMEOUT_S", 0.1)
    async with routed(tmp_path) as them:
        text = (tmp_path / "fleet.toml").read_text()
        (tmp_path / "fleet.toml").write_text(text + '[[servers]]\nurl = "http://192.0.2.1:9"\ndomain = "far"\n')
        await asyncio.sleep(0.2)
        began_s = time.monotonic()
        assert await them.answered_by("far") == "general"
        assert time.monotonic() - began_s < 5


@in_event_loop
async def test_servers_come_and_go_with_the_file(tmp_path):
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
            assert b"[DONE]" in b"".join([chunk async for chunk in chunks]), "it ends what it had begun"
        (tmp_path / "fleet.toml").write_text("not TOML")
        await asyncio.sleep(0.15)
        assert await them.answered_by("prose") == "prose"
        them.servers = [code, *others]
        them.write_fleet()
        await until_answered_by(them, "code", "code")


# --- records


@in_event_loop
async def test_a_wish_for_records_is_only_taken_back_where_it_was_refused(tmp_path, random_target):
    async with routed(tmp_path, tap=TapConfig(spool=tmp_path / "spool"), target=random_target) as them:
        assert (await them.ask("code", prompt="x", do=503)).status_code == 503
        assert len(them.code.seen) == 1
        assert not them.general.seen, "a server had it, and may have failed by it"
        assert (await them.ask("code", prompt="x", do=400)).status_code == 400
        assert [b"return_token_ids" in body for _, body in them.code.seen] == [True, True, False]
        assert await them.under_way() == {"code": 0, "prose": 0, "": 0}


@in_event_loop
async def test_it_is_itself_the_tap(tmp_path, random_target):
    tap = TapConfig(spool=tmp_path / "spool", top_k=2)
    async with routed(tmp_path, tap=tap, target=random_target) as them:
        plain = (await them.ask("code", model="m", prompt="x")).json()
        asked = json.loads(them.code.seen[0][1])
        assert (asked["return_token_ids"], asked["logprobs"]) == (True, 2)
        assert plain["choices"] == [make_choice("code") | {"token_ids": None, "prompt_token_ids": None}]
        them.prose.gate.set()
        stream = (await them.ask("prose", prompt="x", stream=True)).text
        assert stream.endswith("data: [DONE]\n\n")
        assert "token_id:" not in stream
        assert (await them.ask("code", prompt="x", headers={"X-Redraft-Opt-Out": "1"})).status_code == 200
        counts = (await them.http.get("/redraft/tap")).json()
        assert counts["captured_requests"] == 2
        assert counts["skipped_requests_opt_out"] == 1
    frames = [frame for path in spool_files(tmp_path / "spool") for frame in read_frames(path.read_bytes())]
    records = [record for _, record in frames if isinstance(record, Record)]
    assert sorted(record.domain for record in records) == ["code", "prose"]
    assert {record.target_fingerprint for record in records} == {fingerprint(random_target)}
    np.testing.assert_array_equal(records[0].output_ids, [7, 8])
    np.testing.assert_array_equal(records[0].topk_ids, [[7, 8], [7, 8]])
