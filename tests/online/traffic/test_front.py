"""The sockets of the tap.

What a client can occupy, what it is shown, and how much it can send.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import psutil
import pytest
from fake_completions import Upstream as Server
from test_proxy import PATH
from waiting import in_event_loop, until, wait_until

from redraft.online.records.record import read_frames
from redraft.online.records.spool import spool_files
from redraft.online.traffic import front, sockets
from redraft.online.traffic.front import FrontConfig, FrontServer
from redraft.online.traffic.proxy import Proxy
from redraft.online.traffic.sockets import BoundedProtocol, OperatorServer
from redraft.online.traffic.tap import Tap, TapConfig
from redraft.online.traffic.upstream import Upstream


class Front(FrontServer):
    """The clients' server, which leaves signals to the test.

    It looks at connections only when told to.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.num_sent = self.num_read = 0
        """Bytes sent by `send`, and those of them that have been read."""

        server = self

        class Counting(BoundedProtocol):
            def data_received(self, data):
                super().data_received(data)
                server.num_read += len(data)

        self.config.http = Counting

    @contextlib.contextmanager
    def capture_signals(self):
        yield

    async def main_loop(self):
        while not self.should_exit:
            await asyncio.sleep(0.005)

    @property
    def bound_port(self):
        return self.servers[0].sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def fronted(folder, max_body_bytes=FrontConfig.max_body_bytes):
    """A server of completions, and the tap's sockets in front of it."""
    upstream = Server("only")
    await upstream.start()
    tap = Tap(TapConfig(spool=folder / "spool", logprobs=2), "target")
    app = Proxy(Upstream(upstream.url), tap, max_body_bytes=max_body_bytes).app()
    server = Front(app, "127.0.0.1", 0)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started, serving)
    await until(lambda: tap.check.verdict)
    upstream.seen.clear()
    try:
        yield server, upstream
    finally:
        upstream.gate.set()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.should_exit = True
        await serving
        await upstream.stop()


async def connect(server, sent=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.bound_port)
    send(server, writer, sent)
    await writer.drain()
    return reader, writer


def send(server, writer, data):
    server.num_sent += len(data)
    writer.write(data)


async def settle(server, count):
    """Wait until `count` connections are open and all that was sent has been read."""
    await until(
        lambda: len(server.server_state.connections) == count and server.num_read >= server.num_sent
    )


def is_open(reader):
    return not reader.at_eof() and reader.exception() is None


async def ask(server, body=b"{}", version="1.1", method="POST", path=PATH):
    """The whole answer to a request after which the connection ends."""
    head = (
        f"{method} {path} HTTP/{version}\r\nHost: x\r\nContent-Length: "
        f"{len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await connect(server, head.encode() + body)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


# --- half a request


@in_event_loop
async def test_half_a_request_is_waited_for_only_so_long(tmp_path):
    async with fronted(tmp_path) as (server, _):
        silent, half_head = (
            await connect(server),
            await connect(server, b"POST /v1/x HTTP/1.1\r\nHost:"),
        )
        half_body = await connect(
            server, b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"
        )
        answering = asyncio.create_task(ask(server, b'{"do": "wait"}'))
        await settle(server, 4)
        now_s = time.monotonic()
        server.close_waiting(now_s)
        send(
            server, half_head[1], b" dripped"
        )  # a drop does not buy time for a head, but it does for a body
        send(server, half_body[1], b"d")
        await settle(server, 4)
        server.close_waiting(now_s + sockets.HEAD_TIMEOUT_S + 1)
        await settle(server, 2)
        assert (is_open(silent[0]), is_open(half_head[0]), is_open(half_body[0])) == (
            False,
            False,
            True,
        )
        server.close_waiting(now_s + sockets.HEAD_TIMEOUT_S + sockets.BODY_PAUSE_S + 2)
        await settle(server, 1)
        assert not is_open(half_body[0])
        assert not answering.done(), "a complete request may take any time"


UPGRADE = (
    f"%s {PATH} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n%s\r\n"
)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("extra", ["", f"X-Long: {'0' * 9000}\r\n"])
@in_event_loop
async def test_an_upgrade_is_a_request_like_any_other(tmp_path, caplog, method, extra):
    async with fronted(tmp_path) as (server, _):
        body = b"" if method == "GET" else b"{}"
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        reader, writer = await connect(server, (UPGRADE % (method, extra + length)).encode() + body)
        answering = asyncio.create_task(reader.read())
        async with asyncio.timeout(5):
            while not answering.done():
                server.close_waiting(time.monotonic())
                await asyncio.sleep(0.001)
        answer = await answering
        writer.close()
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404", b"HTTP/1.1 405")), answer[:80]
        assert not caplog.records


STREAM = b'{"prompt": "x", "stream": true}'
HALVES = (
    b"POST /v1/x HTTP/1.1\r\nHost:",
    b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\na",
    b"POST /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
)


@pytest.mark.parametrize("sent", HALVES)
@in_event_loop
async def test_half_a_request_does_not_delay_the_end(tmp_path, monkeypatch, sent):
    monkeypatch.setattr(front, "ENDING_S", 1e9)
    async with fronted(tmp_path) as (server, _):
        client = await connect(server, sent)
        await settle(server, 1)
        server.should_exit = True
        await until(lambda: not server.server_state.connections, timeout_s=300)
        await until(lambda: server.lifespan.shutdown_event.is_set(), timeout_s=300)
        assert await client[0].read() == b""


@in_event_loop
async def test_an_answer_without_an_end_is_cut_at_the_end_and_its_record_is_shipped(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(front, "ENDING_S", 0.3)
    async with fronted(tmp_path) as (server, upstream):
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(STREAM)}\r\n\r\n".encode()
        reader, _client = await connect(server, head + STREAM)
        await reader.readuntil(b"data: {")
        server.should_exit = True
        await until(lambda: server.lifespan.shutdown_event.is_set(), timeout_s=300)
        assert not upstream.gate.is_set(), "the server still answers"
    (record,) = (
        r for path in spool_files(tmp_path / "spool") for _, r in read_frames(path.read_bytes())
    )
    np.testing.assert_array_equal(record.output_ids, [7, 8])


def test_garbage_behind_a_request_leaves_nothing_in_the_log(tmp_path, caplog):
    uvloop = pytest.importorskip(
        "uvloop", reason="asyncio's own transports take what is sent after their end"
    )

    async def send_garbage():
        async with fronted(tmp_path) as (server, upstream):
            body = b'{"do": "wait"}'
            head = (
                f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            )
            reader, writer = await connect(server, head + body)
            await until(lambda: upstream.seen)
            send(server, writer, b"\x00garbage\r\n\r\n")
            upstream.gate.set()
            await reader.read()
            await until(lambda: not server.server_state.tasks)

    uvloop.run(send_garbage())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@in_event_loop
async def test_a_failing_look_at_unfinished_requests_ends_no_stream_and_is_logged_once(
    tmp_path, caplog
):
    async with fronted(tmp_path) as (server, _):
        server.close_waiting = None  # calling it raises a TypeError
        for _ in range(3):
            assert not await server.on_tick(0)
        assert server.guard.failures.total() == 3
        assert len(caplog.records) == 1
        assert b"200" in (await ask(server))[0]


STANDING_STILL = """
import asyncio, sys, time
from starlette.responses import PlainTextResponse
from redraft.online.records.record import read_frames
from redraft.online.records.spool import spool_files
from redraft.online.traffic import sockets
from redraft.online.traffic import front

async def main():
    sockets.HEAD_TIMEOUT_S, sockets.TICKS_BETWEEN_LOOKS = float(sys.argv[1]), 1
    server = front.FrontServer(PlainTextResponse("well"), "127.0.0.1", 0)
    server.config.timeout_keep_alive = float(sys.argv[2])
    look = server.close_waiting

    def look_and_tell(now_s):
        began_s = time.monotonic()
        look(now_s)
        print(began_s, flush=True)

    server.close_waiting = look_and_tell
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(f"port {server.servers[0].sockets[0].getsockname()[1]}", flush=True)
    await serving

config = front.FrontServer(None, "127.0.0.1", 0).config
# Older releases of uvicorn have no factory, and take the loop of asyncio here.
factory = config.get_loop_factory() if hasattr(config, "get_loop_factory") else None
asyncio.Runner(loop_factory=factory).run(main())
"""
REQUEST = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def read_text(answers):
    """The body of the next answer, of four bytes."""
    while (line := answers.readline()).strip():
        pass
    assert line, "the connection is closed"
    return answers.read(4)


@pytest.mark.parametrize(("head_timeout_s", "keep_alive_s"), [(1, 60), (60, 1)])
def test_a_request_sent_while_the_process_stood_still_is_answered(head_timeout_s, keep_alive_s):
    command = [sys.executable, "-c", STANDING_STILL, str(head_timeout_s), str(keep_alive_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = next(int(line[5:]) for line in server.stdout if line.startswith("port "))
            with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
                answers = client.makefile("rb")
                client.sendall(REQUEST)
                assert read_text(answers) == b"well"
                answered_s = time.monotonic()
                next(
                    line for line in server.stdout if float(line) > answered_s
                )  # it has looked at the idle connection
                server.send_signal(signal.SIGSTOP)
                wait_until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED)
                client.sendall(REQUEST)
                time.sleep(2)
                server.send_signal(signal.SIGCONT)
                assert read_text(answers) == b"well"
                with contextlib.suppress(ConnectionResetError):
                    assert answers.read() == b"", "an idle connection is still closed"
        finally:
            server.kill()


@in_event_loop
async def test_one_clients_halves_do_not_take_all_descriptors(tmp_path):
    async with fronted(tmp_path) as (server, _):
        server.max_waiting = 5
        halves = []
        for number in range(8):
            halves.append(await connect(server, b"POST / HT"))
            await settle(server, number + 1)
            server.close_waiting(0.1 * number)
        await settle(
            server, 8
        )  # a burst of honest clients looks the same, until they have had a moment
        server.close_waiting(0.7 + sockets.MIN_WAIT_S)
        await settle(server, 5)
        assert [is_open(reader) for reader, _ in halves] == [False] * 3 + [True] * 5
        assert (await ask(server))[0].startswith(b"http/1.1 200")


@in_event_loop
async def test_a_head_has_a_largest_size(tmp_path):
    async with fronted(tmp_path) as (server, upstream):
        reader, writer = await connect(server, b"POST /v1/x HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(200):
                writer.write(b"X-%d: %s\r\n" % (number, b"a" * 1000))
                await writer.drain()
                await asyncio.sleep(0)
            assert (await reader.read()).startswith(b"HTTP/1.1 431")
        await settle(server, 0)
        assert not upstream.seen


def test_as_many_descriptors_as_allowed_are_asked_for():
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, 999))\n"
        "from redraft.online.traffic.front import raise_file_limit\n"
        "raise_file_limit(); print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "(999, 999)\n"


# --- what is sent back


@in_event_loop
async def test_the_length_of_an_answer_is_kept(tmp_path):
    async with fronted(tmp_path) as (server, _):
        head, body = await ask(server)
        assert b"content-length: %d" % len(body) in head
        assert b"transfer-encoding" not in head
        head, body = await ask(server, b"", method="HEAD", path="/v1/models")
        assert (b"content-length" in head, body) == (True, b"")


@in_event_loop
@pytest.mark.parametrize(("version", "is_chunked"), [("1.0", False), ("1.1", True)])
async def test_a_client_of_http_1_0_gets_no_chunks(tmp_path, version, is_chunked):
    async with fronted(tmp_path) as (server, upstream):
        upstream.gate.set()
        head, body = await ask(server, b'{"stream": true}', version)
        assert (b"transfer-encoding: chunked" in head) is is_chunked
        assert body.startswith(b"data: ") is not is_chunked
        assert body.endswith(b"0\r\n\r\n" if is_chunked else b"data: [DONE]\n\n")
        head, body = await ask(server, b"{}", version)
        assert json.loads(body)["choices"][0]["text"] == "only"


@in_event_loop
async def test_clients_are_not_shown_the_servers(tmp_path):
    async with fronted(tmp_path) as (server, upstream):
        for path in ("/redraft/tap", "/redraft/tap/", "/redraft/%74ap"):
            head, body = await ask(server, b"", method="GET", path=path)
            assert head.startswith(b"http/1.1 404"), path
            assert str(upstream.port).encode() not in head + body


def open_operators(app, **settings):
    return OperatorServer(app, "127.0.0.1", 0, setting="admin_port", **settings)


@in_event_loop
async def test_operators_are_shown_them_on_their_own_port(tmp_path):
    upstream = Server("only")
    await upstream.start()
    proxy = Proxy(Upstream(upstream.url), Tap(TapConfig(spool=tmp_path), "target"))
    admin = open_operators(proxy.admin_app())
    server = Front(proxy.app(), "127.0.0.1", 0, admin)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started and admin.started, serving)
    host, port = admin.socket.getsockname()
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        await until(lambda: proxy.tap.check.verdict)
        shown = (await http.get("/redraft/tap")).json()
        assert (shown["is_checked"], shown["problem"], shown["requests"]) == (True, "", 0)
        assert "redraft_failed_rounds" in (await http.get("/metrics")).text
        assert (await http.post(PATH)).status_code == 404
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}\b.*\badmin_port\b"):
        OperatorServer(proxy.admin_app(), host, port, setting="admin_port")
    server.should_exit = True
    await asyncio.wait_for(serving, 120)
    await upstream.stop()


# --- bodies


async def send_pieces(size):
    for _ in range(size // 10_000):
        yield b"a" * 10_000


@in_event_loop
@pytest.mark.parametrize("size", [70_000, 1_500_000])
@pytest.mark.parametrize("has_length", [True, False])
async def test_a_body_above_the_limit_is_refused(tmp_path, size, has_length):
    async with fronted(tmp_path, max_body_bytes=size) as (server, upstream):
        url = f"http://127.0.0.1:{server.bound_port}{PATH}"
        async with httpx.AsyncClient() as http:

            async def post(num_bytes):
                body = b"a" * num_bytes if has_length else send_pieces(num_bytes)
                return await http.post(url, content=body)

            assert (await post(size)).status_code == 200
            refused = await post(size + 10_000)
            assert refused.status_code == 413
            assert "max_body_bytes" in refused.json()["error"]["message"]
            assert (await post(10_000)).status_code == 200
        assert [len(body) for _, body in upstream.seen] == [size, 10_000]
        assert upstream.seen[0][0].get("content-length") == (
            str(size) if has_length or size < 1 << 20 else None
        )


@in_event_loop
async def test_a_client_that_leaves_within_its_body_ends_the_request(tmp_path):
    async with fronted(tmp_path) as (server, upstream):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n"
        _, writer = await connect(server, head + b"a" * 2_000_000)
        await settle(server, 1)
        writer.transport.abort()
        await settle(server, 0)
        assert (await ask(server))[0].startswith(b"http/1.1 200")
        assert len(upstream.seen) == 1, "the half of the body did not reach it"
