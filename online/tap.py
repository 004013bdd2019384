"""Records from a vLLM that can not be touched, by a proxy in front of it (`online.proxy`).

    client ─► proxy ─► vLLM     the tap asks for token ids and log-probabilities besides what the client asked for,
    client ◄─ proxy ◄─ vLLM     and takes them out of the answer again
                └─► outlet      what they said becomes a record

A record from here has the target's top-k at every output token, and nothing of any draft: vLLM does not tell. What the
tap does not understand, and whatever goes wrong while recording, passes through as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from online.outlet import open_outlet
from online.plugin_config import Recording
from online.pools import Asked
from online.records import Record, frame_of
from online.request_origin import Origin
from online.tap_messages import Answer, is_recordable, strip, tapped

logger = logging.getLogger("redraft.tap")

MAX_WAITING_RECORDS = 1024
SHIP_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class TapConfig(Recording):
    """What the tap records, where the servers have no plugin to do it."""

    top_k: int = 20
    """Token probabilities recorded at every position; vLLM's --max-logprobs is the most that there are."""


class Tap:
    """What is recorded: counters, and the records that wait to be written."""

    def __init__(self, config: TapConfig, target_fingerprint: str) -> None:
        self.config = config
        self.target_fingerprint = target_fingerprint
        self.server_id = uuid.uuid4().hex[:16]
        self.counts: Counter[str] = Counter()
        self._outlet = open_outlet(config, self.server_id)
        self._waiting: deque[Record] = deque()

    def status(self) -> dict[str, Any]:
        return self.counts | self._outlet.status()

    def wants(self, question: Any, origin: Origin) -> bool:
        """Whether the answer to a request for text, whose JSON this is, is to be recorded. It is counted."""
        if origin.opt_out:
            reason = "opt_out"
        elif not is_recordable(question):
            reason = "unreadable" if question is None else "unfit"
        else:
            reason = self.config.skips(origin.tenant, uuid.uuid4().bytes)
        self.counts[f"skipped_requests_{reason}" if reason else "captured_requests"] += 1
        return not reason

    def wish(self, asked: Asked, question: dict[str, Any], kind: str) -> Asked:
        """The request with what the tap wants to know besides; its answer comes uncompressed, to be read here."""
        headers = [header for header in asked.headers if header[0] != b"accept-encoding"]
        body = json.dumps(tapped(question, kind, self.config.top_k)).encode()
        return replace(asked, headers=[*headers, (b"accept-encoding", b"identity")], body=body)

    async def read(
        self, reply: httpx.Response, question: dict[str, Any], origin: Origin
    ) -> AsyncGenerator[bytes, None]:
        """What the client gets of an answer; the record is kept behind it, also where the client goes away first."""
        answer = Answer()
        try:
            if question.get("stream"):
                async for event in self._events(reply, answer):
                    yield event
            else:
                yield self._read(await reply.aread(), answer)
        finally:
            self._keep(answer, question, origin)

    async def _events(self, reply: httpx.Response, answer: Answer) -> AsyncIterator[bytes]:
        """The server-sent events without what the tap asked for, each as soon as it is complete."""
        waiting = b""
        async for chunk in reply.aiter_raw():
            *events, waiting = (waiting + chunk).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    message = self._read(event.removeprefix(b"data: "), answer)
                    if message:
                        yield b"data: " + message + b"\n\n"
                else:
                    yield event + b"\n\n"
        if waiting:
            yield waiting

    def _read(self, message: bytes, answer: Answer) -> bytes:
        """The message as the client would have got it; empty where it would not have got one."""
        try:
            content = json.loads(message)
            answer.read(content)
            return json.dumps(content).encode() if strip(content) else b""
        except Exception as error:  # recording may fail, serving may not
            self._report(error)
            return message

    def _keep(self, answer: Answer, question: dict[str, Any], origin: Origin) -> None:
        try:
            record = answer.record(question, origin, self.server_id, self.target_fingerprint, self.config.top_k)
        except Exception as error:
            self._report(error)
            return
        if record is None:
            self.counts["empty_answers"] += 1
            return
        self._waiting.append(record)
        if len(self._waiting) > MAX_WAITING_RECORDS:
            self._waiting.popleft()
            self.counts["dropped_records_queue_full"] += 1

    def _report(self, error: Exception) -> None:
        self.counts["errors"] += 1
        logger.warning("not recorded: %s: %s", type(error).__name__, error)

    @contextlib.asynccontextmanager
    async def shipping(self) -> AsyncIterator[None]:
        """Records go out while the block runs, and the last of them at its end."""
        shipping = asyncio.create_task(self._ship_for_ever())
        try:
            yield
        finally:
            shipping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await shipping
            await asyncio.to_thread(self._ship)
            await asyncio.to_thread(self._outlet.close)

    async def _ship_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SHIP_INTERVAL_S)
            await asyncio.to_thread(self._ship)

    def _ship(self) -> None:
        records = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not records:
            return
        try:
            self._outlet.write([frame_of(record) for record in records])
            self.counts["shipped_records"] += len(records)
        except OSError as error:
            self.counts["dropped_records_spool"] += len(records)
            self._report(error)
