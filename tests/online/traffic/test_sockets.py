"""What one client can occupy of a listening process, on real sockets, with both of uvicorn's parsers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tracemalloc
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol
from waiting import in_event_loop, until

from redraft.online.traffic import sockets
from redraft.online.traffic.sockets import BoundedServer, OperatorServer, Sparing, is_private_name

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


class Answering:
    """An application that answers with what it has seen, once the gate is open."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.gate.set()
        self.answer = b""
        self.seen = []
        self.left = 0

    async def __call__(self, scope, receive, send):
        request = Request(scope, receive)
        body = await request.body()
        self.seen.append((scope["headers"], body))
        gate = asyncio.create_task(self.gate.wait())
        leaving = asyncio.create_task(receive())
        await asyncio.wait([gate, leaving], return_when=asyncio.FIRST_COMPLETED)
        for task in (gate, leaving):
            task.cancel()
        if not self.gate.is_set():
            self.left += 1
            return
        await Response(self.answer or body)(scope, receive, send)


class Quiet(BoundedServer):
    """Looks at connections only when told to."""

    async def main_loop(self):
        while not self.should_exit:
            await asyncio.sleep(0.005)

    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def serving(server):
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started, task)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def listening(parser=AutoHTTPProtocol):
    app = Answering()
    server = Quiet(app, host="127.0.0.1", port=0, lifespan="off")
    server.config.http = type("Bounded", (sockets._Bounded, parser), {})
    async with serving(server) as port:
        yield server, app, port
        app.gate.set()


async def open_connection(port, sent):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


async def send_until_closed(port, begin, piece, most_bytes):
    """Send pieces until the connection ends: the bytes sent, and what was answered."""
    reader, writer = await open_connection(port, begin)
    num_sent, answer = 0, asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        while num_sent < most_bytes and not answer.done():
            writer.write(piece)
            await writer.drain()
            num_sent += len(piece)
    writer.close()
    with contextlib.suppress(ConnectionError):
        return num_sent, await answer
    return num_sent, b""


either_parser = pytest.mark.parametrize("parser", [AutoHTTPProtocol, H11Protocol])


# --- fields


@either_parser
@in_event_loop
async def test_trailers_do_not_become_headers(parser):
    async with listening(parser) as (_, app, port):
        trailers = b"X-Redraft-Tenant: evil\r\nAuthorization: Bearer x\r\nConnection: close\r\n"
        close = HEAD.replace(b"Host: x", b"Host: x\r\nConnection: close\r\nX-Redraft-Tenant: a")
        reader, _writer = await open_connection(
            port, close + b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n"
        )
        assert (await reader.read()).endswith(b"{}")
        ((headers, _),) = app.seen
        assert [value for name, value in headers if name == b"x-redraft-tenant"] == [b"a"]
        assert b"authorization" not in dict(headers)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (HEAD + b"2\r\n{}\r\n0\r\n", b"a:b\r\n" * 1000),
        (HEAD + b"2\r\n{}\r\n0\r\nX: ", b"a" * 5000),
        (HEAD + b"2;", b"a" * 5000),
        (HEAD + b"2\r\n{}\r\n2", b";a=b" * 1000),
    ],
    ids=["trailers", "a trailer", "an extension", "extensions"],
)
@either_parser
@in_event_loop
async def test_what_frames_a_body_is_bounded(begin, piece, parser):
    async with listening(parser) as (_, app, port):
        tracemalloc.start()
        num_sent, answer = await send_until_closed(port, begin, piece, 32 << 20)
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert num_sent < 8 << 20, "the rest of it is in the buffers of both sockets"
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")) or not answer
        assert grown < 4 << 20
        assert not app.seen


@either_parser
@in_event_loop
async def test_a_long_body_in_small_chunks_with_extensions_is_taken(parser):
    async with listening(parser) as (_, app, port):
        chunk = b"400;name=value\r\n" + b"a" * 1024 + b"\r\n"
        reader, writer = await open_connection(port, HEAD)
        for _ in range(300):
            writer.write(chunk)
            await writer.drain()
        writer.write(b"0\r\nX-Checksum: 1\r\n\r\n")
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        assert len(app.seen[0][1]) == 300 * 1024


@in_event_loop
async def test_a_body_that_goes_on_behind_its_answer_is_taken():
    async with listening() as (server, _, port):
        head = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
        server.config.loaded_app = PlainTextResponse("too large", 413)
        reader, writer = await open_connection(port, head)
        assert (await reader.readline()).split()[1] == b"413"
        for _ in range(90):
            writer.write(100_000 * b"a")
            await writer.drain()
        writer.write(WHOLE)
        async with asyncio.timeout(30):
            await reader.readuntil(b"HTTP/1.1 413")


@in_event_loop
async def test_a_head_has_a_most_number_of_fields():
    async with listening() as (_, app, port):
        for count, status in ((250, b"200"), (300, b"431")):
            fields = b"".join(b"X-%d: a\r\n" % number for number in range(count))
            head = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + fields + b"\r\n"
            reader, _writer = await open_connection(port, head)
            assert (await reader.readline()).split()[1] == status
        assert len(app.seen) == 1


# --- requests behind others, and clients that leave


@in_event_loop
async def test_few_requests_wait_behind_another():
    async with listening() as (server, app, port):
        app.gate.clear()
        reader, _writer = await open_connection(port, WHOLE * (1 + sockets.MAX_PIPELINED))
        await until(lambda: app.seen)
        (connection,) = server.server_state.connections
        await until(lambda: len(connection.pipeline) == sockets.MAX_PIPELINED)
        app.gate.set()
        async with asyncio.timeout(30):
            for _ in range(1 + sockets.MAX_PIPELINED):
                await reader.readuntil(b"{}")
        app.gate.clear()
        refused, _writer = await open_connection(port, WHOLE * 1000)
        await until(lambda: len(server.server_state.connections) == 1)
        assert b"400" in await refused.read()
        await until(lambda: app.left == 1)


@in_event_loop
async def test_a_client_that_leaves_ends_the_request_before_the_ones_behind_it(caplog):
    async with listening() as (server, app, port):
        app.gate.clear()
        _, writer = await open_connection(port, WHOLE * 3)
        await until(lambda: app.seen)
        (connection,) = server.server_state.connections
        await until(lambda: len(connection.pipeline) == 2)
        writer.close()
        await until(lambda: app.left == 1 and not server.server_state.tasks)
        assert len(app.seen) == 1
        assert not caplog.records


@either_parser
@in_event_loop
async def test_half_a_close_ends_the_request_without_a_line_in_the_log(caplog, parser):
    async with listening(parser) as (server, app, port):
        app.gate.clear()
        _, writer = await open_connection(port, WHOLE)
        await until(lambda: app.seen)
        writer.write_eof()
        await until(lambda: app.left == 1 and not server.server_state.connections)
        assert not caplog.records


# --- patience


@either_parser
@in_event_loop
async def test_a_client_that_does_not_read_is_waited_for_only_so_long(parser):
    async with listening(parser) as (server, app, port):
        app.answer = b"a" * (32 << 20)
        stuck, reading = await open_connection(port, WHOLE), await open_connection(port, WHOLE)
        await until(lambda: len(app.seen) == 2)

        def buffered():
            return [
                one.transport.get_write_buffer_size() for one in server.server_state.connections
            ]

        await until(lambda: len([size for size in buffered() if size]) == 2)
        server.close_waiting(0.0)
        before = sum(buffered())
        await reading[0].readexactly(16 << 20)
        await until(lambda: sum(buffered()) < before)
        server.close_waiting(sockets.READ_PAUSE_S + 1)
        await until(lambda: len(server.server_state.connections) == 1)
        await reading[0].readexactly(16 << 20)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await stuck[0].readexactly(32 << 20)


@either_parser
@in_event_loop
async def test_unfinished_bodies_have_a_most_number_of_bytes_together(monkeypatch, parser):
    monkeypatch.setattr(sockets, "MAX_BODY_BYTES", 250_000)
    async with listening(parser) as (server, _, port):
        head = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n"
        halves = []
        for number in range(4):
            halves.append(await open_connection(port, head + b"a" * 100_000))

            def have_arrived(count=number + 1):
                sizes = [one.body_bytes for one in server.server_state.connections]
                return sizes == [100_000] * count

            await until(have_arrived)
            server.close_waiting(0.1 * number)
        for _, writer in halves:
            writer.write(b"a")  # a drop does not buy time here
        await until(
            lambda: all(one.body_bytes == 100_001 for one in server.server_state.connections)
        )
        server.close_waiting(sockets.MIN_WAIT_S + 0.35)
        await until(lambda: len(server.server_state.connections) == 2)
        assert [reader.at_eof() or bool(reader.exception()) for reader, _ in halves] == [
            *(True, True),
            *(False, False),
        ]


# --- names


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1:8400",
            "[::1]:8400",
            "10.1.2.3",
            "localhost:8400",
            "LOCALHOST",
            "learner:8400",
        ),
        *("learner.default.svc:8400", "a.b.svc.cluster.local", "vm.internal", "mine.example:1"),
        *("mine.example.", ""),
    ],
)
def test_names_that_no_web_site_has_are_served(host):
    assert is_private_name(host, {"mine.example"})


@pytest.mark.parametrize(
    "host",
    [
        *("rebound.example", "rebound.example:8400", "127.0.0.1.nip.io", "localhost.example"),
        *("a.svc.example", "mine.example.evil.example", "[::1", "xn--internal.com"),
    ],
)
def test_names_that_a_web_site_can_have_are_not(host):
    assert not is_private_name(host, {"mine.example"})


@in_event_loop
async def test_a_page_for_operators_answers_no_rebound_name():
    server = OperatorServer(
        PlainTextResponse("secret"), "127.0.0.1", 0, setting="page.port", hosts=["mine.example"]
    )
    task = asyncio.create_task(server.serve([server.socket]))
    await until(lambda: server.started, task)
    port = server.socket.getsockname()[1]

    async def ask(*hosts):
        lines = "".join(f"Host: {host}\r\n" for host in hosts)
        head = f"GET / HTTP/1.1\r\n{lines}Connection: close\r\n\r\n"
        reader, _writer = await open_connection(port, head.encode())
        return await reader.read()

    for host in (f"127.0.0.1:{port}", "learner:9", "mine.example"):
        assert (await ask(host)).endswith(b"secret")
    for hosts in (["rebound.example"], ["127.0.0.1", "rebound.example"]):
        answer = await ask(*hosts)
        assert b" 421 " in answer
        assert b"page.hosts" in answer
        assert b"secret" not in answer
    server.should_exit = True
    await task


# --- the log


def test_a_kind_of_message_is_logged_once_a_minute(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: now_s))
    sparing = Sparing()

    def log(message, *args):
        record = logging.LogRecord("a", logging.ERROR, "", 0, message, args, None)
        return record.getMessage() if sparing.filter(record) else None

    assert [log("refused: %s", number) for number in range(3)] == ["refused: 0", None, None]
    assert log("closed") == "closed"
    now_s += sockets.LOG_PAUSE_S + 1
    assert log("refused: %s", 3) == "refused: 3 (2 more since the last such line)"
    assert log("closed") == "closed"
