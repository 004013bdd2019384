"""Which servers there are: a list in the configuration, a file that learners share, or the addresses behind a name.

    fleet.toml      [[servers]]                              the name      vllm-code.default.svc, a headless service:
                    url = "http://10.0.0.5:8000"                           every address it has is a server
                    domain = "code"

Servers come and go. Those that come are brought to the current draft like one that has restarted; those that go are
forgotten. What can not be read leaves the servers that are known.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from online.config import FleetConfig
from online.fleet import Server, require_address
from online.request_origin import require_label

AnyServer = TypeVar("AnyServer", bound=Server)


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server of fleet.toml."""

    url: str
    domain: str = ""
    token_file: str = ""
    """File with its bearer token, from fleet.toml's folder; without one it has the learner's."""

    def __post_init__(self) -> None:
        require_label(self.domain)
        require_address(self.url)


class FleetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    servers: list[Listed]


async def discover(cfg: FleetConfig, domain: str = "") -> dict[str, str]:
    """The bearer token of every server, by address, as of now; of the file those of one domain, or all.

    Raises: ValueError without a token or any place to find servers in, or for a file that is none; OSError where the
    file or the name can not be read.
    """
    token = cfg.token()
    found = dict.fromkeys((server.rstrip("/") for server in cfg.servers), token)
    if cfg.file is not None:
        found |= read_fleet(cfg.file, domain, token)
    if cfg.name:
        found |= dict.fromkeys(await addresses_behind(cfg.name), token)
    return found


def read_fleet(path: Path, domain: str, token: str) -> dict[str, str]:
    """The file's servers of one domain (all of them where it is empty).

    Raises: ValueError, OSError.
    """
    return {
        server.url.rstrip("/"): (path.parent / server.token_file).read_text().strip() if server.token_file else token
        for server in listed(path)
        if domain in ("", server.domain)
    }


def listed(path: Path) -> list[Listed]:
    """The servers of fleet.toml. Raises: ValueError, OSError."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), FleetFile).servers
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} lists no servers ({error}); each begins with [[servers]] and has a url") from error


async def addresses_behind(url: str) -> list[str]:
    """The URL with every address that its host's name has, in order.

    Raises: OSError where the name can not be resolved.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}" for host in hosts]


class Members(Generic[AnyServer]):
    """The servers of a fleet. `servers` is one list for all who look at it, and changes only in `update`."""

    def __init__(self, make: Callable[[str, str, httpx.AsyncClient], AnyServer]) -> None:
        self.servers: list[AnyServer] = []
        self._make = make
        self._certificates = ssl.create_default_context()  # 20 ms each time: shared

    def update(self, tokens: Mapping[str, str]) -> list[AnyServer]:
        """Take up the servers that are new; those that are gone, whose `http` the caller closes."""
        gone = [server for server in self.servers if tokens.get(server.url) != server.token]
        known = {server.url for server in self.servers if server not in gone}
        self.servers[:] = [server for server in self.servers if server not in gone]
        for url, token in tokens.items():
            if url not in known:
                self.servers.append(self._make(url, token, httpx.AsyncClient(verify=self._certificates)))
        return gone

    async def aclose(self) -> None:
        await asyncio.gather(*(server.http.aclose() for server in self.update({})))
