"""A server that cannot be reached is named with the reason and the cure.

Learner, proxy and tap name it alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import stat
import subprocess

import httpx
import pytest
from waiting import in_event_loop, until

from redraft.online.fleet import reach
from redraft.online.fleet.discovery import FleetConfig, list_servers
from redraft.online.fleet.server import (
    FleetServer,
    RefusedError,
    UnreachableError,
    make_client,
)
from redraft.online.page.config import Page
from redraft.online.records.guard import Guard
from redraft.online.traffic import upstream
from redraft.online.traffic.server_check import ServerCheck
from redraft.online.traffic.upstream import ForwardedRequest, Upstream
from redraft.recipes.serve import tap

HEALTH = ForwardedRequest(method="GET", path=b"/health", headers=[], body=b"")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@contextlib.asynccontextmanager
async def listening(context=None, head="204 No Content"):
    """A server that answers every request so; its port."""

    async def handle(reader, writer):
        with contextlib.suppress(OSError):
            await reader.read(1 << 16)
            writer.write(f"HTTP/1.1 {head}\r\n\r\n".encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def ask_all(url):
    """Return the messages of learner, proxy and tap about a server."""
    async with make_client(url) as http:
        with pytest.raises((UnreachableError, RefusedError)) as by_learner:
            await FleetServer(url, "token", http).status()
    server = Upstream(url)
    check = ServerCheck(5, Guard(), {})
    checking = asyncio.create_task(check.run_forever(server))
    await until(lambda: check.problem)
    checking.cancel()
    with contextlib.suppress(upstream.RefusedError, upstream.BrokenError):
        await (await server.send(HEALTH)).aclose()
    return str(by_learner.value), server.problem, check.problem


def reserve_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@in_event_loop
async def test_a_port_without_a_server_and_an_unknown_name_are_told_apart():
    assert all(
        reach.REFUSED in said for said in await ask_all(f"http://127.0.0.1:{reserve_port()}")
    )
    assert all(reach.UNKNOWN_NAME in said for said in await ask_all("http://nobody.invalid:8000"))


@in_event_loop
async def test_the_wrong_scheme_is_told_with_the_right_one(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    async with listening() as port:
        assert all(reach.IS_PLAIN in said for said in await ask_all(f"https://127.0.0.1:{port}"))
    async with listening(context) as port:
        assert all(reach.UNTRUSTED in said for said in await ask_all(f"https://127.0.0.1:{port}"))


@pytest.mark.parametrize(
    "head",
    [
        "302 Found\r\nLocation: https://login.example/?back=x\r\nContent-Length: 0",
        "401 Unauthorized\r\nWWW-Authenticate: Basic realm=models\r\nContent-Length: 0",
        "200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: 0",
    ],
)
@in_event_loop
async def test_a_log_in_before_the_server_is_told(head, caplog):
    async with listening(head=head) as port:
        assert all(reach.FOREIGN in said for said in await ask_all(f"http://127.0.0.1:{port}"))
    assert caplog.text.count(f"127.0.0.1:{port}: {reach.FOREIGN}") == 1, "once by the proxy"


@pytest.mark.parametrize(
    "url", ["unix:/run/vllm.sock", "/run/vllm.sock", "http+unix://%2Frun%2Fvllm.sock"]
)
def test_a_unix_socket_is_refused_with_the_cure_by_all(url, tmp_path):
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(f'[[servers]]\nurl = "{url}"\n')
    ask = [
        lambda: FleetConfig(servers=(url,)),
        lambda: list_servers(fleet),
        lambda: tap.main(tap.TapCommandConfig(upstream=url, target=tmp_path, spool=tmp_path)),
    ]
    for each in ask:
        with pytest.raises(ValueError, match="--uds"):
            each()


@pytest.mark.parametrize("port", [-1, 1 << 16, 99999])
def test_a_port_that_no_server_can_have_is_refused_by_its_setting(port, tmp_path):
    given = {"upstream": "http://a:1", "target": tmp_path, "spool": tmp_path}
    with pytest.raises(ValueError, match=f"^port is {port}"):
        tap.TapCommandConfig(**given, port=port)
    with pytest.raises(ValueError, match=f"admin_port is {port}"):
        tap.TapCommandConfig(**given, admin_port=port)
    with pytest.raises(ValueError, match=f"^port is {port}"):
        Page(port=port)


def test_a_spool_that_cannot_be_made_is_refused_before_anything_is_served(tmp_path):
    (tmp_path / "file").write_text("")
    spool = tmp_path / "file" / "spool"
    with pytest.raises(NotADirectoryError, match=str(spool)):
        tap.main(tap.TapCommandConfig(upstream="http://a:1", target=tmp_path, spool=spool))
    made = tap.TapCommandConfig(upstream="http://a:1", target=tmp_path, spool=tmp_path / "a" / "b")
    made.make_spool()
    assert stat.S_IMODE(made.spool.stat().st_mode) == 0o700


@in_event_loop
async def test_a_certificate_of_ssl_cert_file_is_trusted_by_all(certificate, monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    async with listening(context) as port:
        url = f"https://127.0.0.1:{port}"
        reply = await Upstream(url).send(HEALTH)
        assert reply.status == 204
        await reply.aclose()
        async with make_client(url) as http:
            assert (await http.get(url)).status_code == 204


@in_event_loop
async def test_no_proxy_of_the_environment_sees_a_request_or_the_token(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{reserve_port()}")
    async with listening() as port, make_client(f"http://127.0.0.1:{port}") as http:
        assert (await http.get(f"http://127.0.0.1:{port}")).status_code == 204


def make_tls_error(kind, **fields):
    error = kind(1, "a line of OpenSSL")
    for name, value in fields.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (make_tls_error(ssl.SSLCertVerificationError, verify_code=62), reach.OTHER_NAME),
        (make_tls_error(ssl.SSLCertVerificationError, verify_code=10), reach.EXPIRED),
        (make_tls_error(ssl.SSLCertVerificationError, verify_code=18), reach.UNTRUSTED),
        (
            make_tls_error(ssl.SSLError, reason="TLSV13_ALERT_CERTIFICATE_REQUIRED"),
            reach.WANTS_CERTIFICATE,
        ),
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
