"""Servers that come, go and lag, found in a file or by a name, and the learner's reaction."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket

import httpx
import pytest
from fake_fleet import TOKEN, FakeServer, running
from learner_world import World, make_draft
from waiting import until

from redraft.engine.process import free_port
from redraft.files.folder import fingerprint
from redraft.online.fleet.discovery import (
    FleetConfig,
    Members,
    discover,
    read_fleet,
    resolve_addresses,
)
from redraft.online.fleet.server import FleetServer
from redraft.online.page.config import Page


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)


def write_fleet(path, *urls):
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f'[[servers]]\nurl = "{url}"\n' for url in urls))
    os.replace(partial, path)


def test_a_file_lists_the_servers(tmp_path):
    (tmp_path / "special").write_text("a token of one server\n")
    (tmp_path / "special").chmod(0o600)
    path = tmp_path / "fleet.toml"
    write_fleet(path, "http://a:8000/", "http://b:8000")
    with path.open("a") as file:
        file.write('[[servers]]\nurl = "http://c:8000"\ntoken_file = "special"\n')
    assert read_fleet(path, "t") == {
        "http://a:8000": "t",
        "http://b:8000": "t",
        "http://c:8000": "a token of one server",
    }


@pytest.mark.parametrize(
    "url", ["http://10.0.0.5:80OO", "http://10.0.0.5:80000", "10.0.0.5:8000", "ftp://a", "http://"]
)
def test_what_can_be_no_servers_address_is_told_before_it_is_asked(tmp_path, url):
    write_fleet(tmp_path / "fleet.toml", "http://fine:8000", url)
    with pytest.raises(ValueError, match=re.escape(repr(url))):
        read_fleet(tmp_path / "fleet.toml", "t")
    with pytest.raises(ValueError, match=re.escape(repr(url))):
        FleetConfig(servers=("http://fine:8000", url))


@pytest.mark.parametrize(
    "text",
    [
        "[[server]]\nurl = 'x'",
        "[[servers]]\nurl = 'http://a:1'\ndomain = 'code'",
        "[[servers]]\nurl = 1",
        "=",
    ],
)
def test_a_file_that_lists_no_servers_is_told_by_name(tmp_path, text):
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(ValueError, match=r"fleet\.toml"):
        read_fleet(tmp_path / "fleet.toml", "t")


@pytest.mark.parametrize("has_ipv4", [True, False])
def test_every_address_of_one_family_behind_a_name_is_a_server(has_ipv4, monkeypatch):
    addresses = {
        socket.AF_INET: ["10.0.0.7", "10.0.0.5", "10.0.0.5"] if has_ipv4 else [],
        socket.AF_INET6: ["fd00::7", "fd00::5"],  # of the same pods
    }

    def resolve(host, port, *args, **kwargs):
        assert (host, port) == ("vllm.default.svc", 8000)
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, port))
            for family, found in addresses.items()
            for address in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    found = asyncio.run(
        discover(FleetConfig(servers=("http://fixed:1/",), name="http://vllm.default.svc:8000"))
    )
    pods = (
        ["http://10.0.0.5:8000", "http://10.0.0.7:8000"]
        if has_ipv4
        else ["http://[fd00::5]:8000", "http://[fd00::7]:8000"]
    )
    assert list(found) == ["http://fixed:1", *pods]
    assert set(found.values()) == {TOKEN}


def test_a_name_that_nobody_knows_is_an_error_and_localhost_is_not():
    with pytest.raises(OSError, match=r"."):
        asyncio.run(resolve_addresses("http://no-such-name.invalid:8000"))
    assert "http://127.0.0.1:8000" in asyncio.run(resolve_addresses("http://localhost:8000"))


@pytest.mark.parametrize(
    "name", ["vllm.default.svc:8000", "http://vllm:80OO", "http://vllm", "http://:8000"]
)
def test_a_name_without_host_or_port_is_refused(name):
    with pytest.raises(ValueError, match="name is"):
        FleetConfig(name=name)


def test_members_come_and_go_in_one_list():
    async def main():
        members = Members(FleetServer)
        servers = members.servers
        assert members.update({"http://a:1": "t", "http://b:1": "t"}) == []
        a, b = servers
        assert members.update({"http://b:1": "t", "http://c:1": "t"}) == [a]
        assert [server.url for server in servers] == ["http://b:1", "http://c:1"]
        assert servers[0] is b, "its connections are kept"
        assert members.update({"http://b:1": "a new token", "http://c:1": "t"}) == []
        assert servers[0] is b, "its swaps and requests go on"
        assert {server.url: server.token for server in servers} == {
            "http://b:1": "a new token",
            "http://c:1": "t",
        }
        await members.aclose()
        assert not servers

    asyncio.run(main())


@pytest.fixture
def world(random_target, tmp_path):
    return World.make(
        tmp_path, random_target, make_draft(random_target, tmp_path / "draft"), servers=2
    )


def test_a_learner_brings_late_joiners_along_reports_laggards_and_leaves_others_alone(
    world, tmp_path
):
    late = FakeServer(
        world.traffic, started_with="start", target_fingerprint=fingerprint(world.target)
    )
    other = FakeServer(
        world.traffic, started_with="start", target_fingerprint=fingerprint(world.target)
    )
    path = tmp_path / "fleet.toml"

    def listed(*servers):
        write_fleet(path, *(server.url for server in servers))

    async def main():
        async with running(*world.fakes, late, other):
            listed(*world.fakes)
            async with world.learner(fleet=FleetConfig(file=path, poll_s=0.1)) as task:
                await until(lambda: {fake.version for fake in world.fakes} == {"v000001"}, task)
                listed(*world.fakes, late)
                await until(lambda: late.version == "v000001", task)

                late.refuses, late.version = {"v000001"}, "start"
                await until(lambda: faults(world, "server_behind") == [late.url], task)
                late.refuses = set()
                await until(lambda: late.version == "v000001", task)

                path.write_text("not TOML")
                await until(lambda: faults(world, "fleet_unknown"), task)
                late.version = "start"
                await until(lambda: late.version == "v000001", task)  # the known ones still are

                listed(*world.fakes)  # it has left: its version no longer concerns the learner
                await until(lambda: late.url not in looked_at(world), task)
                late.version = "start"
                await until(lambda: len(looks(world)) > 30, task)
                assert late.version == "start"
                changes = [(entry.server, entry.change) for entry in world.entries("server")]
                known = [(fake.url, "joined") for fake in world.fakes]
                assert changes == [*known, (late.url, "joined"), (late.url, "left")]
        assert (other.version, other.swaps) == ("start", [])

    asyncio.run(main())


def test_the_faults_of_a_server_that_has_left_end(world, tmp_path):
    """A restarted pod has a new address, so nobody could end those of the old one."""
    path, port = tmp_path / "fleet.toml", free_port()
    its = {"capture_off", "swap_off", "server_note"}
    world.fakes[1].drafting = {"capture_off": "no room", "swap_off": "no draft", "notes": ["flag"]}

    async def main():
        async with world.fleet(), httpx.AsyncClient() as http:
            write_fleet(path, *(fake.url for fake in world.fakes))
            fleet, page = FleetConfig(file=path, poll_s=0.1), Page(port=port)
            async with world.learner(fleet=fleet, page=page) as task:

                async def current():
                    metrics = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
                    return set(re.findall(r'redraft_current_faults\{what="(\w+)"\} 1\.0', metrics))

                await until(lambda: faults(world, "server_note"), task)
                assert await current() >= its
                write_fleet(path, world.fakes[0].url)
                await until(lambda: world.entries("server")[-1].change == "left", task)
                assert not await current() & its

    asyncio.run(main())


def faults(world, what):
    return [entry.detail for entry in world.entries("fault") if entry.what == what]


def looks(world):
    return [entry for entry in world.entries("acceptance") if entry.server is not None]


def looked_at(world):
    """The servers found in the last looks."""
    return {entry.server for entry in looks(world)[-4:]}


def test_recipes_find_the_servers_of_the_file_too(world, tmp_path, capsys):
    from redraft.recipes.operate.versions import live_lines

    async def main():
        async with running(*world.fakes):
            write_fleet(tmp_path / "fleet.toml", *(fake.url for fake in world.fakes))
            config = world.config(fleet=FleetConfig(file=tmp_path / "fleet.toml"))
            shutil.rmtree(config.folder, ignore_errors=True)
            lines = await live_lines(config)
        assert lines[1:] == [f"{fake.url}: start" for fake in world.fakes]

    asyncio.run(main())
