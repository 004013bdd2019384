"""The tap's proxy in front of a server on real sockets.

What clients receive, what the server does, and the effect of faults.
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
from fake_completions import Upstream as Server
from fake_completions import event, served
from starlette.datastructures import Headers
from waiting import in_event_loop, until

from redraft.online.records.origin import read_origin_headers
from redraft.online.records.record import Record, read_frames
from redraft.online.records.spool import spool_files
from redraft.online.traffic import tap as tap_module
from redraft.online.traffic import upstream
from redraft.online.traffic.proxy import MAX_JSON_PARTS, STARTS_PER_TURN, Proxy, Turnstile
from redraft.online.traffic.tap import Tap, TapConfig
from redraft.online.traffic.upstream import ForwardedRequest, Upstream

PATH = "/v1/completions"


class Tapped:
    """A server, and clients of the tap in front of it."""

    def __init__(self, url=""):
        self.server = Server("only")
        self.url = url
        self.http: httpx.AsyncClient
        self.admin: httpx.AsyncClient

    async def ask(self, path=PATH, headers=None, **body):
        return await self.http.post(path, json=body, headers=headers)

    async def answered_by(self, **body):
        answer = await self.ask(**body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    async def status(self):
        return (await self.admin.get("/redraft/tap")).json()


@contextlib.asynccontextmanager
async def tapped(folder, *, host="127.0.0.1", is_checked=True, **config):
    them = Tapped()
    await them.server.start()
    them.upstream = Upstream(them.server.url.replace("127.0.0.1", host))
    tap = Tap(TapConfig(spool=folder / "spool", logprobs=2, **config), "target")
    proxy = Proxy(them.upstream, tap)
    async with served(proxy.app()) as front:
        them.port = front.port
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.port}", timeout=120) as them.http,
            httpx.AsyncClient(
                transport=httpx.ASGITransport(proxy.admin_app()), base_url="http://admin"
            ) as them.admin,
        ):
            if is_checked:
                await until(lambda: tap.check.verdict)
                them.server.seen.clear()
                them.server.clients.clear()
            yield them
        them.server.gate.set()
    await them.server.stop()


@in_event_loop
async def test_a_request_and_its_answer_are_passed_on_as_they_are(tmp_path):
    body = b'{ "prompt":"\xc3\xa9",   "odd": 1.0e2}'
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer key",
        "X-Odd": b"\xe9",
        "Connection": "close",
    }
    async with tapped(tmp_path) as them:
        answer = await them.http.post(f"{PATH}?a=b%20c", content=body, headers=headers)
        seen, seen_body = them.server.seen[0]
        assert seen_body == body
        assert (seen["authorization"], seen["x-odd"]) == ("Bearer key", "é")
        assert "connection" not in seen
        assert seen["host"] == them.server.url.removeprefix("http://")
        assert answer.headers["x-own"] == "kept"
        assert (await them.http.post("/v1/anything", content=b"not JSON")).status_code == 200
        assert (await them.http.get("/v1/none")).status_code == 405


@in_event_loop
async def test_the_servers_routes_for_their_learner_are_not_passed_on(tmp_path):
    async with tapped(tmp_path) as them:
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
    async with tapped(tmp_path) as them:
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
async def test_what_is_no_request_is_the_servers_to_refuse(tmp_path, body):
    async with tapped(tmp_path) as them:
        sent = json.dumps(body).encode()
        for opt_out in "01":
            headers = {"X-Redraft-Opt-Out": opt_out}
            assert (await them.http.post(PATH, content=sent, headers=headers)).status_code == 200
        assert (await them.http.post(PATH, content=b"[" * 100_000)).status_code == 200
        assert [seen for _, seen in them.server.seen[1:]] == [sent, b"[" * 100_000]


@in_event_loop
async def test_events_arrive_as_they_are_sent(tmp_path):
    async with tapped(tmp_path) as them:
        async with them.http.stream("POST", PATH, json={"stream": True, "n": 2}) as answer:
            chunks = answer.aiter_raw()
            first = await asyncio.wait_for(
                anext(chunks), 120
            )  # the server holds back the second chunk
            assert first == event({"id": "cmpl-1", "model": None, "choices": [make_choice("only")]})
            them.server.gate.set()
            rest = b"".join([chunk async for chunk in chunks])
        assert rest == first + b"data: [DONE]\n\n"


def make_choice(name):
    return {"index": 0, "text": name, "finish_reason": None, "logprobs": None}


@in_event_loop
async def test_a_client_that_leaves_ends_its_request_at_the_server(tmp_path):
    async with tapped(tmp_path) as them:
        async with them.http.stream("POST", PATH, json={"stream": True}) as answer:
            await anext(answer.aiter_raw())
            assert (await them.status())["requests"] == 1
        await until(lambda: them.server.left == 1)
        with contextlib.suppress(httpx.ReadTimeout):
            await them.http.post(PATH, json={"do": "wait"}, timeout=0.2)
        await until(lambda: them.server.left == 2)
        assert (await them.status())["requests"] == 0


@in_event_loop
async def test_a_connection_is_kept_for_the_next_request(tmp_path):
    async with tapped(tmp_path) as them:
        them.server.gate.set()
        for number in range(100):
            answer = await them.ask(stream=bool(number % 2))
            assert answer.status_code == 200
        assert len(them.server.clients) == 1
        assert (await them.status())["requests"] == 0


@in_event_loop
async def test_a_reply_closed_twice_does_not_give_back_the_connection_of_the_next(tmp_path):
    async with tapped(tmp_path) as them:

        async def send(body):
            headers = [(b"content-type", b"application/json")]
            return await them.upstream.send(
                ForwardedRequest(method="POST", path=PATH.encode(), headers=headers, body=body)
            )

        first = await send(b"{}")
        await first.read()
        await first.aclose()
        waiting = asyncio.create_task(send(b'{"do": "wait"}'))
        await until(lambda: len(them.server.seen) == 2)
        await first.aclose()
        assert them.upstream.requests == 1
        await (await send(b"{}")).aclose()
        them.server.gate.set()
        assert b"only" in await (await waiting).read()
        assert len(them.server.clients) == 2
        await (await waiting).aclose()


@in_event_loop
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_connection_that_the_server_has_closed_is_not_used_again(tmp_path, host):
    async with tapped(tmp_path, host=host) as them:
        for _ in range(3):
            assert await them.answered_by() == "only"
            await them.server.stop()
            await them.server.start()


@in_event_loop
async def test_a_request_that_the_server_had_received_is_not_sent_again(tmp_path):
    async with tapped(tmp_path) as them:
        answer = await them.ask(do="break")
        assert answer.status_code == 502
        assert "connection" in answer.json()["error"]["message"]
        assert len(them.server.seen) == 1
        assert await them.answered_by() == "only"


@in_event_loop
async def test_a_stream_that_breaks_says_why_before_the_client_sees_it_break(tmp_path):
    async with tapped(tmp_path) as them:
        heard = b""
        body = {"do": "break within", "stream": True}
        async with them.http.stream("POST", PATH, json=body) as answer:
            with contextlib.suppress(httpx.RemoteProtocolError):
                async for chunk in answer.aiter_bytes():
                    heard += chunk
                    them.server.gate.set()  # the first part has arrived
                pytest.fail("the stream ended as if it were whole")
        whole, last = [
            json.loads(line.removeprefix(b"data: ")) for line in heard.splitlines() if line
        ]
        assert whole["choices"][0]["text"] == "only"
        assert last["error"]["code"] == 502
        assert "connection" in last["error"]["message"]
        assert (await them.status())["requests"] == 0


@in_event_loop
async def test_without_its_server_it_says_so(tmp_path):
    async with tapped(tmp_path) as them:
        await them.server.stop()
        answer = await them.ask(prompt="x")
        assert answer.status_code == 503
        assert "nothing listens" in answer.json()["error"]["message"]
        await them.server.start()
        assert await them.answered_by() == "only"


@in_event_loop
async def test_a_machine_that_does_not_answer_holds_nobody_up_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(upstream, "CONNECT_TIMEOUT_S", 0.1)
    async with tapped(tmp_path, host="192.0.2.1", is_checked=False) as them:
        began_s = time.monotonic()
        assert (await them.ask()).status_code == 503
        assert time.monotonic() - began_s < 5


@in_event_loop
async def test_a_wish_for_records_is_only_taken_back_where_it_was_refused(tmp_path):
    async with tapped(tmp_path) as them:
        assert (await them.ask(prompt="x", metadata={"do": 503})).status_code == 503
        assert len(them.server.seen) == 1, "the server had it, and may have failed by it"
        assert (await them.ask(prompt="x", metadata={"do": 400})).status_code == 400
        assert [b"return_token_ids" in body for _, body in them.server.seen] == [True, True, False]
        assert (await them.status())["requests"] == 0


@in_event_loop
async def test_what_was_added_for_the_record_is_taken_off_again(tmp_path):
    async with tapped(tmp_path) as them:
        labels = {"X-Redraft-Domain": "code", "X-Redraft-Tenant": "acme"}
        plain = (await them.ask(model="only", prompt="x", headers=labels)).json()
        asked = json.loads(them.server.seen[0][1])
        assert (asked["return_token_ids"], asked["logprobs"]) == (True, 2)
        assert plain["choices"] == [
            make_choice("only") | {"token_ids": None, "prompt_token_ids": None}
        ]
        them.server.gate.set()
        stream = (await them.ask(prompt="x", stream=True)).text
        assert stream.endswith("data: [DONE]\n\n")
        assert "token_id:" not in stream
        opted_out = {"X-Redraft-Opt-Out": "1"}
        assert (await them.ask(prompt="x", headers=opted_out)).status_code == 200
        counts = await them.status()
        assert counts["captured_requests"] == 2
        assert counts["skipped_requests_opt_out"] == 1
    records = records_in(tmp_path / "spool")
    assert [(record.domain, record.tenant) for record in records] == [("code", "acme"), ("", "")]
    np.testing.assert_array_equal(records[0].output_ids, [7, 8])
    np.testing.assert_array_equal(records[0].topk_ids, [[7, 8], [7, 8]])


def records_in(folder):
    frames = [frame for path in spool_files(folder) for frame in read_frames(path.read_bytes())]
    return [record for _, record in frames if isinstance(record, Record)]


@in_event_loop
async def test_the_end_of_a_stream_costs_the_same_however_many_there_are(tmp_path, monkeypatch):
    looks = 0
    is_idle = httpcore.AsyncHTTPConnection.is_idle

    def count(connection):
        nonlocal looks
        looks += 1
        return is_idle(connection)

    async with tapped(tmp_path) as them:
        # Bare sockets: httpx's client has the very pool that this is about.
        body = b'{"stream": true}'
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        ends = [await asyncio.open_connection("127.0.0.1", them.port) for _ in range(100)]
        for _, writer in ends:
            writer.write(head % (PATH.encode(), len(body)) + body)
        await until(lambda: len(them.server.seen) == 100)
        monkeypatch.setattr(httpcore.AsyncHTTPConnection, "is_idle", count)
        them.server.gate.set()
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
    async with tapped(tmp_path) as them:
        await them.upstream.close_idle()
        assert (await them.ask(headers={"X-Own": "1"})).status_code == 200
        assert not failures
        assert not them.upstream.is_down
        monkeypatch.setattr(upstream, "OUT_OF_FILES_TIMEOUT_S", 0)
        failures += [OSError(errno.ENFILE, "Too many open files in system")] * 9
        await them.upstream.close_idle()
        answer = await them.ask(headers={"X-Own": "1"})
        assert answer.status_code == 503
        assert "LimitNOFILE" in answer.json()["error"]["message"]
        assert not them.upstream.is_down


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
async def test_what_is_not_recorded_is_counted_in_every_api(tmp_path, path):
    async with tapped(tmp_path) as them:
        await them.http.post(path, json={"input": "x"})
        counts = await them.status()
        is_read = path in ("/v1/completions", "/v1/chat/completions")
        assert counts.get("captured_requests", 0) == 0
        assert (
            counts["skipped_requests_unknown_field" if is_read else "skipped_requests_other_api"]
            == 1
        )


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
        *("/v1/unload_lora_adapter//", "/inference/v1/abort_requests", "/v1/load%5flora_adapter"),
        *(
            "/%73leep",
            "//sleep",
            "/sleep/",
            "/docs",
            "/v1/load_lora_adapter",
            "/v1/load_lora_adapter/",
        ),
    ],
)
@in_event_loop
async def test_clients_do_not_reach_routes_for_developers(tmp_path, path):
    async with tapped(tmp_path) as them:
        reader, writer = await asyncio.open_connection("127.0.0.1", them.port)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
        )
        writer.write(head.encode())
        answer = await reader.read()
        writer.close()
        assert answer.split(b" ")[1] == b"404"
        assert not them.server.seen


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
    async with tapped(tmp_path) as them:
        assert (await them.ask(headers=headers)).status_code == 200
        seen = them.server.last()
        assert seen["x-end"] == "2"
        assert not {"connection", "x-hop", "proxy-authorization", "proxy-connection", "te"} & set(
            seen
        )


@in_event_loop
async def test_a_client_cannot_take_off_the_labels_of_a_gateway(tmp_path):
    labels = {"X-Redraft-Opt-Out": "1", "X-Redraft-Tenant": "acme"}
    named = {"Connection": "close, x-redraft-opt-out, X-Redraft-Tenant"}
    async with tapped(tmp_path) as them:
        assert (await them.ask(headers=labels | named)).status_code == 200
        seen = them.server.last()
        assert (seen["x-redraft-opt-out"], seen["x-redraft-tenant"]) == ("1", "acme")


@pytest.mark.parametrize("length", ["0" * 5000 + "5", "9" * 19])
@in_event_loop
async def test_a_length_that_no_body_has_is_the_clients_fault(tmp_path, caplog, length):
    async with tapped(tmp_path) as them:
        reader, writer = await asyncio.open_connection("127.0.0.1", them.port)
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        writer.write(head.encode() + b"abcde")
        assert (await reader.readline()).split(b" ")[1] == b"400"
        writer.close()
    assert not them.server.seen
    assert not caplog.records


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("{url}/v1/models?a=b", "/v1/models?a=b"),
        ("{url}//evil.example/", "/evil.example/"),
        ("{url}", "/"),
        ("/v1/models", "/v1/models"),
        ("{url}0/v1/models", "{url}0/v1/models"),
        ("https://elsewhere.example/x", "https://elsewhere.example/x"),
    ],
)
@in_event_loop
async def test_a_redirect_does_not_name_the_server(tmp_path, location, shown):
    async with tapped(tmp_path) as them:
        url = them.server.url
        answer = await them.ask(prompt="x", n=2, location=location.format(url=url))
        assert answer.headers["location"] == shown.format(url=url)


@pytest.mark.parametrize("stream", ["false", "no", "off", "f", "0", 0, 0.0])
@in_event_loop
async def test_every_form_of_false_that_vllm_takes_is_recorded_and_cleaned(tmp_path, stream):
    async with tapped(tmp_path) as them:
        answer = (await them.ask(prompt="x", stream=stream)).json()
        assert answer["choices"][0]["token_ids"] is None
        assert "token_id:" not in json.dumps(answer)
    assert len(records_in(tmp_path / "spool")) == 1


@in_event_loop
async def test_a_body_that_is_dear_to_parse_is_passed_on_unread(tmp_path):
    async with tapped(tmp_path) as them:
        for count, captured in ((MAX_JSON_PARTS - 9, 1), (MAX_JSON_PARTS, 1)):
            body = json.dumps({"prompt": [1] * count}).encode()
            assert (await them.http.post(PATH, content=body)).status_code == 200
            assert (await them.status())["captured_requests"] == captured
        assert them.server.seen[1][1] == body
        assert (await them.status())["skipped_requests_too_large"] == 1


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
    async with tapped(tmp_path) as them:
        reader, writer = await asyncio.open_connection("127.0.0.1", them.port)
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Odd: hunter2\x01\r\nConnection: close\r\n\r\n"
        )
        answer = await reader.read()
        assert answer.split(b" ")[1] == b"400"
        assert b"hunter2" not in answer
        assert "hunter2" not in caplog.text
        writer.close()
        assert await them.answered_by() == "only"


async def shipped(folder, them, count):
    await until(lambda: len(records_in(folder)) >= count)
    return records_in(folder)


@in_event_loop
async def test_what_cannot_be_recorded_is_counted_and_the_next_is_recorded(tmp_path, monkeypatch):
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
    async with tapped(tmp_path) as them:
        for fields in odd:
            body = json.dumps({"prompt": "x"} | fields)
            assert (await them.http.post(PATH, content=body)).status_code == 200
            assert (await them.ask(prompt="x")).status_code == 200
        records = await shipped(tmp_path / "spool", them, len(odd) + 4)
        counts = (await them.admin.get("/redraft/tap")).json()
        assert counts["errors"] == counts["errors_sampling"] == 3
        assert len({record.record_id for record in records}) == len(records) == 2 * len(odd) - 3
