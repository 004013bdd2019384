"""What a person tells a running learner: one line of JSON there, one line back, over a socket in the learner's folder.

Whoever may enter the folder may ask: it belongs to the learner's user alone.
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
async def served(folder: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer requests while the block runs."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            try:
                reply = await answer(request)
            except (ValueError, OSError, KeyError) as error:
                reply = {"error": str(error)}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        except (ValueError, ConnectionError):
            pass  # it was no request, or nobody waits for the answer any more
        finally:
            writer.close()

    with _short(folder) as path:
        (folder / SOCKET).unlink(missing_ok=True)
        server = await asyncio.start_unix_server(one, path)
        (folder / SOCKET).chmod(0o600)
    try:
        yield
    finally:
        server.close()
        (folder / SOCKET).unlink(missing_ok=True)


async def ask(folder: Path, **request: Any) -> dict[str, Any]:
    """The running learner's answer.

    Raises: NoLearnerError; ValueError with the learner's own words where it refuses.
    """
    try:
        with _short(folder) as path:
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
def _short(folder: Path) -> Any:
    """The socket's path in a form that fits the 108 bytes which the kernel allows, however deep the folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        with suppress(OSError):
            os.close(descriptor)
