"""A server that cannot be reached is named with the reason and the cure, by the learner, the router and `watch`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess

import httpx
import pytest
from waiting import in_event_loop

from redraft.online.fleet import reach
from redraft.online.fleet.server import FleetServer, UnreachableError, make_client, trusted_certificates
from redraft.online.traffic.pools import NoServerError, Pools
from redraft.online.traffic.upstream import BrokenError, ForwardedRequest
from redraft.recipes.operate.watch import read_counts


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@contextlib.asynccontextmanager
async def listening(context=None):
    """A server that answers every request with status 204; its port."""

    async def handle(reader, writer):
        with contextlib.suppress(OSError):
            await reader.read(1 << 16)
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def ask_all(url):
    """What learner, router and `watch` say about a server."""
    async with make_client(trusted_certificates()) as http:
        with pytest.raises(UnreachableError) as by_learner:
            await FleetServer(url, "token", http).status()
    pools = Pools(lambda: [(url, "")])
    with contextlib.suppress(NoServerError, BrokenError):
        await pools.send(ForwardedRequest(method="GET", path=b"/health", headers=[], body=b""), "")
    with pytest.raises(ConnectionError) as by_watch:
        await asyncio.to_thread(read_counts, url)
    return str(by_learner.value), pools.upstreams[0].problem, str(by_watch.value)


def reserve_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@in_event_loop
async def test_a_port_without_a_server_and_an_unknown_name_are_told_apart():
    assert all(reach.REFUSED in said for said in await ask_all(f"http://127.0.0.1:{reserve_port()}"))
    assert all(reach.UNKNOWN_NAME in said for said in await ask_all("http://nobody.invalid:8000"))


@in_event_loop
async def test_the_wrong_scheme_is_told_with_the_right_one(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    async with listening() as port:
        assert all(reach.IS_PLAIN in said for said in await ask_all(f"https://127.0.0.1:{port}"))
    async with listening(context) as port:
        assert all(reach.UNTRUSTED in said for said in await ask_all(f"https://127.0.0.1:{port}"))


@in_event_loop
async def test_a_certificate_of_ssl_cert_file_is_trusted_by_all(certificate, monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    async with listening(context) as port:
        url = f"https://127.0.0.1:{port}"
        pools = Pools(lambda: [(url, "")])
        reply = await pools.send(ForwardedRequest(method="GET", path=b"/health", headers=[], body=b""), "")
        assert reply.status == 204
        await reply.aclose()
        async with make_client(trusted_certificates()) as http:
            assert (await http.get(url)).status_code == 204


@in_event_loop
async def test_no_proxy_of_the_environment_sees_a_request_or_the_token(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{reserve_port()}")
    async with listening() as port, make_client(trusted_certificates()) as http:
        assert (await http.get(f"http://127.0.0.1:{port}")).status_code == 204


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), reach.SILENT),
        (httpx.ReadTimeout(""), reach.SILENT),
        (OSError(113, "No route to host"), reach.NO_ROUTE),
        (ExceptionGroup("all", [ValueError(), ConnectionRefusedError()]), reach.REFUSED),
        (httpx.RemoteProtocolError("illegal status line: bytearray(b'\\x15')"), reach.IS_TLS),
        (ValueError("a\nb"), "a"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_reason_is_a_line(error, said):
    assert reach.explain(error) == said
