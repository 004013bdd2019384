"""Plain asyncio sockets for httpcore: half the work per chunk of its default, which serves every event loop there is.

For addresses only, without TLS: for a name, httpcore's default tries all addresses at once."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterable, Iterator
from typing import Any

import httpcore


class PlainBackend(httpcore.AsyncNetworkBackend):
    """Opens TCP connections to IP addresses."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> PlainStream:
        with _named_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
            async with asyncio.timeout(timeout):
                return PlainStream(*await asyncio.open_connection(host, port))


class PlainStream(httpcore.AsyncNetworkStream):
    """One connection. There are no timeouts on it: an answer may take any time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _named_errors(httpcore.ReadTimeout, httpcore.ReadError):
            return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _named_errors(httpcore.WriteTimeout, httpcore.WriteError):
            self._writer.write(buffer)
            await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.transport.abort()  # nothing is left to send once a request is over or given up

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> PlainStream:
        raise NotImplementedError("plain sockets have no TLS")

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # asked of an idle connection: the server has closed it
            return self._reader.at_eof() or self._reader.exception() is not None or self._writer.is_closing()
        # E.g. `ssl_object`: without one httpcore speaks HTTP/1.1.
        return None


@contextlib.contextmanager
def _named_errors(timeout: type[Exception], failure: type[Exception]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise timeout from error
    except (OSError, RuntimeError) as error:  # RuntimeError: uvloop, if the connection is already closed
        raise failure(str(error)) from error
