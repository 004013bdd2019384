"""Find the servers.

They come from a list in the settings, a file, or all addresses of a host name.

    fleet.toml      [[servers]]                              the name      vllm-code.default.svc, a headless service:
                    url = "http://10.0.0.5:8000"                           each of its addresses is a server

Servers come and go. A new server is swapped to the current draft as if it had restarted, and a
server that is gone is removed. If the file cannot be read or the name cannot be resolved, the known
servers are kept.
"""

import asyncio
import socket
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from redraft.files.setting_error import SettingError
from redraft.online.fleet.server import FleetServer, make_client, require_address
from redraft.online.tokens import find_token, read_token

AnyServer = TypeVar("AnyServer", bound=FleetServer)


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    servers: tuple[str, ...] = ()
    """Addresses of the vLLM servers, e.g. ["http://10.0.0.5:8000"]. The first one that answers is
    the canary.
    """
    file: Path | None = None
    """Path of fleet.toml, a list of servers. Changes are picked up while the learner runs."""
    name: str = ""
    """Host name with port, e.g. http://vllm.default.svc:8000. Every IPv4 address to which it resolves is
    a server, as with a headless Kubernetes service. If it has no IPv4 address, every IPv6 address is.
    """
    token_file: Path | None = None
    """File with the bearer token for the servers' /redraft/ routes. Alternatively, set the
    environment variable REDRAFT_TOKEN.
    """
    poll_s: float = 10
    """Seconds between polls of every server for its version, target and acceptance."""
    shares_device: bool = False
    """Set this if the servers compute on the learner's device: the same GPU, or this machine's CPU.
    The learner then pauses before each micro-batch while a server has running requests, for at most
    three times as long as it has computed since the last pause. The servers need
    --enable-server-load-tracking.
    """

    def __post_init__(self) -> None:
        for server in self.servers:
            require_address(server)
        if self.name and not _has_port(self.name):
            raise SettingError(
                f"{{name}} is {self.name!r}: it must have the form http://vllm.default.svc:8000"
            )

    def token(self) -> str:
        """Return the bearer token for the servers.

        Raises:
            ValueError: there is no token, or no server is configured.
            FileNotFoundError: the token's file is missing.
        """
        if not (self.servers or self.file or self.name):
            raise ValueError(
                "no servers are configured: set fleet.servers, fleet.file or fleet.name in "
                "learner.toml (--config)"
            )
        if (token := find_token(self.token_file)) is None:
            raise ValueError(
                "there is no token for the servers: set fleet.token_file in learner.toml "
                "(--config), or the environment variable REDRAFT_TOKEN"
            )
        return token


def _has_port(url: str) -> bool:
    with suppress(ValueError):
        require_address(url)
        return urlsplit(url).port is not None
    return False


class ListedServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    token_file: str = ""
    """File with the bearer token, relative to fleet.toml; empty: the learner's token."""

    def __post_init__(self) -> None:
        require_address(self.url)


class FleetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    servers: list[ListedServer]


async def discover(cfg: FleetConfig) -> dict[str, str]:
    """Return the current bearer token for each server, keyed by address.

    Raises:
        ValueError: there is no token, no server is configured, or the file is not a valid
            fleet.toml.
        OSError: the file or the name cannot be resolved.
    """
    token = cfg.token()
    # The order is kept, because the first server to answer becomes the canary.
    found = dict.fromkeys((server.rstrip("/") for server in cfg.servers), token)
    if cfg.file is not None:
        found |= read_fleet(cfg.file, token)
    if cfg.name:
        found |= dict.fromkeys(await resolve_addresses(cfg.name), token)
    return found


def read_fleet(path: Path, token: str) -> dict[str, str]:
    """Return the token for each server in fleet.toml, keyed by address.

    Raises:
        ValueError: the file is not a valid fleet.toml.
        OSError: the file, or a token's file, cannot be read.
    """
    return {
        server.url.rstrip("/"): read_token(path.parent / server.token_file)
        if server.token_file
        else token
        for server in list_servers(path)
    }


def list_servers(path: Path) -> list[ListedServer]:
    """List the servers in fleet.toml.

    Raises:
        ValueError: the file is not a valid fleet.toml.
        OSError: it cannot be read.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8-sig")), FleetFile).servers
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ValueError(
            f"{path} lists no servers ({error}); each server needs a [[servers]] table with a url"
        ) from error


async def resolve_addresses(url: str) -> list[str]:
    """Resolve the host name in `url` to one URL per IPv4 address, sorted.

    Without an IPv4 address, return one URL per IPv6 address.

    Raises:
        OSError: the name does not resolve to any address.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    found = await asyncio.get_running_loop().getaddrinfo(
        parts.hostname, parts.port, type=socket.SOCK_STREAM
    )
    # A pod of a dual-stack service has an address of each kind, and would count as two servers.
    # vLLM listens on IPv4 unless --host is an IPv6 address.
    ipv4 = [one for one in found if one[0] == socket.AF_INET]
    hosts = sorted({str(address[0]) for *_, address in ipv4 or found})
    return [
        f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}" for host in hosts
    ]


class Members(Generic[AnyServer]):
    """The servers of a fleet.

    `servers` is a single list that is shared by all its users and changes only in `update`.
    """

    def __init__(self, make: Callable[[str, str, httpx.AsyncClient], AnyServer]) -> None:
        self.servers: list[AnyServer] = []
        self._make = make

    def update(self, tokens: Mapping[str, str]) -> list[AnyServer]:
        """Add new servers, and remove those that are no longer listed. The others are renewed.

        Return the removed servers; the caller must close the `http` client of each.
        """
        self.renew(tokens)
        gone = [server for server in self.servers if server.url not in tokens]
        known = {server.url for server in self.servers}
        # Changed in place, because the watch and the cycle share this list.
        self.servers[:] = [server for server in self.servers if server.url in tokens]
        for url, token in tokens.items():
            if url not in known:
                self.servers.append(self._make(url, token, make_client(url)))
        return gone

    def renew(self, tokens: Mapping[str, str]) -> None:
        """Give each server its current token."""
        for server in self.servers:
            server.token = tokens.get(server.url, server.token)

    async def aclose(self) -> None:
        await asyncio.gather(*(server.http.aclose() for server in self.update({})))
