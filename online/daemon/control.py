"""Requests of a person to a running learner: a line of JSON there and one back, over a socket in the learner's folder.

The right to enter the folder is the right to ask. Only the learner's user has it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

SOCKET = "control.sock"

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class NoLearnerError(ConnectionError):
    """No learner runs on this folder."""


@asynccontextmanager
async def serve(folder: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer requests with `answer` while the block runs."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            try:
                reply = await answer(request)
            except (ValueError, OSError, KeyError) as error:
                reply = {"error": str(error)}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        except (ValueError, ConnectionError):
            pass  # the line was not a request, or nobody waits for the answer any more
        finally:
            writer.close()

    with _short_path(folder) as path:
        (folder / SOCKET).unlink(missing_ok=True)  # of a learner that was killed
        # The path is needed to bind only: the socket stays after the descriptor of the folder is closed.
        server = await asyncio.start_unix_server(handle, path)
        (folder / SOCKET).chmod(0o600)
    try:
        yield
    finally:
        server.close()
        (folder / SOCKET).unlink(missing_ok=True)


async def ask(folder: Path, **request: Any) -> dict[str, Any]:
    """Ask the running learner and return the answer.

    Raises:
        NoLearnerError: if no learner runs on this folder, or it ends before it answers.
        ValueError: if the learner refuses; the message is the learner's.
    """
    try:
        with _short_path(folder) as path:
            reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise NoLearnerError(f"no learner runs on {folder}") from error
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise NoLearnerError(f"the learner on {folder} ended before it answered")
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply


@contextmanager
def _short_path(folder: Path) -> Any:
    """A short path of the socket. The kernel allows 108 bytes, and the folder may be deeper."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        with suppress(OSError):
            os.close(descriptor)
