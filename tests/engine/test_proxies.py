"""A proxy of the environment is never between redraft and a server on this machine."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.request import getproxies_environment, proxy_bypass_environment

import httpx
import pytest
from teachers import Teacher, teaching

from redraft.distill.signal.endpoint import Endpoint
from redraft.engine.proxies import (
    describe_proxy,
    is_local,
    is_local_url,
    load_certificates,
    reach_loopback,
)
from redraft.engine.server import wait_until_healthy

DEAD = "http://user:secret@127.0.0.1:9"


@pytest.fixture(params=["http_proxy", "HTTP_PROXY", "all_proxy"])
def variable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(request.param, DEAD)
    return request.param


def test_a_server_on_this_machine_is_asked_past_the_proxy(variable: str) -> None:
    with teaching(Teacher()) as teacher:
        assert asyncio.run(Endpoint(teacher.url, attempts=1).model()) == "the-target"
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            wait_until_healthy(teacher.url, process, log=Path("none"), name="the teacher")
        finally:
            process.communicate(b"\n")


def test_an_error_names_the_proxy_and_not_its_password(variable: str) -> None:
    endpoint = Endpoint("http://teacher.invalid:8000", attempts=1)
    with pytest.raises(ConnectionError, match=rf"\b{variable}\b.*\bno_proxy\b") as error:
        asyncio.run(endpoint.model())
    assert "secret" not in str(error.value)


def test_hosts_of_no_proxy_are_not_said_to_be_behind_one(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert variable in describe_proxy("http://teacher.invalid:8000")
    monkeypatch.setenv("no_proxy", "teacher.invalid")
    assert describe_proxy("http://teacher.invalid:8000") == ""


@pytest.mark.parametrize("names", [{}, {"NO_PROXY": "a.example, b.example"}, {"no_proxy": "*"}])
def test_every_client_reaches_this_machine_past_the_proxy(
    variable: str, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    environment = {variable: DEAD, **names}
    reach_loopback(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = getproxies_environment()
    for host in ("localhost", "127.0.0.1", "a.example"):
        is_past = host != "a.example" or bool(names)
        assert bool(proxy_bypass_environment(host, found)) == is_past
    with teaching(Teacher()) as teacher:
        assert httpx.get(f"{teacher.url}/v1/models").is_success


def test_an_environment_without_a_proxy_stays_as_it_is() -> None:
    environment = {"PATH": "/bin"}
    reach_loopback(environment)
    assert environment == {"PATH": "/bin"}


def test_addresses_of_this_machine_are_recognised() -> None:
    local = ("localhost", "127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1")
    assert all(map(is_local, local))
    assert not any(map(is_local, ("", "10.0.0.1", "::ffff:10.0.0.1", "localhost.example")))
    assert is_local_url("http://[::1]:8000/v1")
    assert not is_local_url("http://[::1:8000")


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
def test_a_certificate_is_verified_in_any_spelling_of_the_scheme(scheme: str) -> None:
    assert isinstance(load_certificates(f"{scheme}://teacher.invalid"), ssl.SSLContext)
    assert load_certificates("http://teacher.invalid") is False


def test_no_password_is_shown_of_an_address_that_is_refused() -> None:
    with pytest.raises(ValueError, match="address of a server") as error:
        Endpoint("http://user:secret@teacher.invalid:99999")
    assert "secret" not in str(error.value)
