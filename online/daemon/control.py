"""Requests from a user to a running learner.

They are lines of JSON in both directions, over a socket in the learner's folder.

Whoever can enter the folder can send requests; only the learner's user can.
"""

import asyncio
import json
import os
import reprlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from redraft.files.printable import printable
from redraft.online.learning.gate import Decision

SOCKET = "control.sock"

MAX_REPLY_BYTES = 16 << 20
"""Maximum size of a reply. It may quote an error of every server of a large fleet."""

Answer = Callable[[dict[str, Any]], Awaitable[object]]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The answer to `status`."""

    phase: str
    candidate: str | None
    current: str
    is_asleep: bool
    steps_saved: int
    failed_rounds: dict[str, int]
    """Number of failures of background tasks, by task."""


@dataclass(frozen=True, kw_only=True)
class WentBack:
    """The answer to `rollback`."""

    version: str
    behind: str = ""
    """Message that lists the servers that have not swapped yet; empty if all have."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The answer to `judge`."""

    decision: Decision
    reason: str


class NoLearnerError(ConnectionError):
    """No learner is running on this folder."""


@asynccontextmanager
async def serve(folder: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer requests with `answer` while the block runs."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                request = json.loads(await reader.readline())
            except RecursionError as error:
                raise ValueError("nested too deep") from error
            reply: object
            try:
                reply = await answer(request)
            except (ValueError, OSError, KeyError) as error:
                reply = {"error": str(error)}
            except Exception as error:  # otherwise, the client would wait for a reply
                reply = {"error": f"the request {reprlib.repr(request)} failed: {error!r:.400}"}
            writer.write(msgspec.json.encode(reply) + b"\n")
            await writer.drain()
        except (ValueError, ConnectionError):
            pass  # the line was not a request, or the client has disconnected
        finally:
            writer.close()

    with _short_path(folder) as path:
        (folder / SOCKET).unlink(missing_ok=True)  # left by a learner that was killed
        # The path is needed only for binding: the socket stays open after the descriptor is closed.
        server = await asyncio.start_unix_server(handle, path)
        (folder / SOCKET).chmod(0o600)
    try:
        yield
    finally:
        server.close()
        (folder / SOCKET).unlink(missing_ok=True)


async def ask(folder: Path, answer: type[T], **request: Any) -> T:
    """Send a request to the running learner and return its reply, converted to type `answer`.

    Raises:
        NoLearnerError: no learner is running on this folder, or it exits before it answers.
        ValueError: the learner rejects the request; the message is the learner's.
    """
    try:
        with _short_path(folder) as path:
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_REPLY_BYTES)
    except OSError as error:
        raise NoLearnerError(f"no learner runs on {folder}") from error
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise NoLearnerError(f"the learner on {folder} exited before it answered")
    reply = _make_printable(json.loads(line))
    if "error" in reply:
        raise ValueError(reply["error"])
    return msgspec.convert(reply, answer)


def _make_printable(value: Any) -> Any:
    """Make a reply safe to print in a terminal: it may quote text from servers and clients."""
    if isinstance(value, dict):
        return {key: _make_printable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_make_printable(one) for one in value]
    return printable(value) if isinstance(value, str) else value


@contextmanager
def _short_path(folder: Path) -> Any:
    """Return a short path to the socket.

    The kernel limits such a path to 108 bytes, and the path of the folder may be longer.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        with suppress(OSError):
            os.close(descriptor)
