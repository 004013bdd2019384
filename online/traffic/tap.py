"""The tap: a proxy that records the traffic of an unmodified vLLM server.

`online.traffic.proxy` is the proxy itself.

    client ─► proxy ─► vLLM     the tap asks for token ids and log-probabilities in addition to the client's request,
    client ◄─ proxy ◄─ vLLM     and removes them from the answer
                └─► outlet      the answer becomes a record

The records contain the target's top-k at every output token but nothing about a draft, which vLLM
does not report. If the tap cannot parse an answer, or recording fails, the client still gets the
answer. Only the kind of failure is logged, because an error's message may quote the user.
"""

import asyncio
import contextlib
import json
import logging
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from redraft.online.records.guard import Guard
from redraft.online.records.origin import Origin
from redraft.online.records.outlet import Recording, open_outlet
from redraft.online.records.record import Record, encode_frame
from redraft.online.tokens import read_key
from redraft.online.traffic.dialects import DIALECTS
from redraft.online.traffic.server_check import CHECKS
from redraft.online.traffic.tap_messages import Answer, AnswerError
from redraft.online.traffic.upstream import ForwardedRequest, Reply, Upstream

logger = logging.getLogger("redraft.tap")

MAX_WAITING_RECORDS = 1024
SHIP_INTERVAL_S = 1.0
COMPLETE_S = 5.0  # time limit for answers in progress at shutdown
MAX_INLINE_BYTES = 1 << 20  # larger answers are parsed in a thread, so that other streams continue


@dataclass(frozen=True, kw_only=True)
class TapConfig(Recording):
    """Settings for recording in front of a server without the plugin."""

    engine: Literal["vllm", "sglang", "llama.cpp", "tensorrt-llm"] = "vllm"
    """Engine of the server. For SGLang and llama.cpp, records contain only token ids; process them
    with `redraft data score`.
    """
    logprobs: int = 20
    """Number of token probabilities recorded per position. vLLM allows at most --max-logprobs, 20
    by default.
    """
    key_file: Path | None = None
    """File with an API key of the server (vLLM's --api-key). The tap uses it for its own check: up
    to 1,026 answers of one token after each start of the server, at most once a minute. If the
    server requires a key and none is given, the tap uses the key of the first client that received
    an answer.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == "tensorrt-llm":
            raise ValueError(
                "TensorRT-LLM does not return the token ids of a prompt, and refuses requests with a field "
                "that it does not support: train on regenerated answers (redraft regenerate)"
            )


class Tap:
    """Decides which answers are recorded, reads them, and sends the records."""

    def __init__(
        self,
        config: TapConfig,
        target_fingerprint: str,
        defaults: Mapping[str, float] = MappingProxyType({}),
        guard: Guard | None = None,
    ) -> None:
        """`defaults` are the sampling parameters in the target's generation_config.json."""
        self.config, self.guard = config, guard or Guard()
        self.target_fingerprint = target_fingerprint
        self.server_id = uuid.uuid4().hex[:16]
        self.counts: Counter[str] = Counter()
        key = read_key(config.key_file) if config.key_file else ""
        assert config.engine != "tensorrt-llm"
        self.dialect = DIALECTS[config.engine]
        self.check = CHECKS[config.engine](config.logprobs, self.guard, defaults, key)
        self._outlet = open_outlet(config, self.server_id, self.guard)
        self._waiting: deque[Record] = deque()
        self._upstream: Upstream | None = None
        self._completing: set[asyncio.Task[None]] = set()

    def status(self) -> dict[str, Any]:
        return {
            **self.counts,
            **self._outlet.status(),
            "is_checked": self.check.verdict is not None,
            "problem": self.check.verdict.problem if self.check.verdict else self.check.problem,
            "failed_rounds": self.guard.failures,
        }

    def should_record(
        self, payload: Any, origin: Origin, *, is_read: bool = True, is_known: bool = True
    ) -> bool:
        """Decide whether to record the answer to this request, and count it if it is skipped.

        `is_read` is False for a large body, and `is_known` is False for an API that the tap cannot
        read.
        """
        if origin.opt_out:
            reason = "opt_out"
        elif not is_read:
            reason = "too_large"
        elif not is_known:
            reason = "other_api"
        elif not (
            reason := self.dialect.find_skip_reason(payload)
            or self.check.find_skip_reason(payload.get("model"))
        ):
            # Drawn at random, because the tap decides only once per request, and several calls may
            # share a request id.
            reason = self.config.find_skip_reason(origin.tenant, uuid.uuid4().bytes)
        if reason:
            self.counts[f"skipped_requests_{reason}"] += 1
        return not reason

    def ask_for_logprobs(
        self, forwarded: ForwardedRequest, payload: dict[str, Any], kind: str
    ) -> ForwardedRequest:
        """Add the tap's fields to the request.

        The answer must be uncompressed, because the tap reads it.
        """
        headers = [header for header in forwarded.headers if header[0] != b"accept-encoding"]
        body = json.dumps(self.dialect.ask(payload, kind, self.config.logprobs)).encode()
        return replace(forwarded, headers=[*headers, (b"accept-encoding", b"identity")], body=body)

    async def relay_answer(self, reply: Reply, payload: dict[str, Any], origin: Origin) -> bytes:
        """Record a complete answer, and return the client's part of it."""
        answer, message = self._begin(payload), await reply.read()
        if len(message) > MAX_INLINE_BYTES:
            cleaned = await asyncio.to_thread(self._clean, message, answer)
        else:
            cleaned = self._clean(message, answer)
        if self.dialect.has_probabilities:
            self._keep(answer, payload, origin)
        else:  # in a task, so that the client's answer does not wait for the prompt's ids
            task = asyncio.create_task(self._complete(answer, payload, origin))
            self._completing.add(task)
            task.add_done_callback(self._completing.discard)
        return cleaned

    async def _complete(self, answer: Answer, payload: dict[str, Any], origin: Origin) -> None:
        if answer.failure is None and self._upstream is not None:
            ask = partial(self.check.ask, self._upstream)
            try:
                await self.dialect.complete(answer, ask)
            except Exception as error:  # recording may fail, but serving must not
                answer.failure = error
        self._keep(answer, payload, origin)

    async def relay_stream(
        self, reply: Reply, payload: dict[str, Any], origin: Origin
    ) -> AsyncGenerator[bytes, None]:
        """Yield the client's part of a streamed answer.

        The answer is recorded at the end, even if the client disconnects first.
        """
        answer = self._begin(payload)
        chunks = reply.chunks()
        try:
            async for event in self._clean_events(chunks, answer):
                yield event
        finally:
            await chunks.aclose()
            self._keep(answer, payload, origin)

    def _begin(self, payload: dict[str, Any]) -> Answer:
        """Create an answer that is still to be read."""
        # Since the check, the server may have restarted with different flags.
        if self.check.find_skip_reason(payload.get("model")) or self.check.verdict is None:
            failure = AnswerError("unfit_server", "the server is unchecked or unsuitable")
            return self.dialect.answer(failure=failure)
        return self.dialect.answer(defaults=self.check.verdict.defaults)

    async def _clean_events(
        self, chunks: AsyncIterator[bytes], answer: Answer
    ) -> AsyncIterator[bytes]:
        waiting = b""
        async for chunk in chunks:
            # A chunk may end anywhere, so the last piece is kept until the rest of its event
            # arrives. E.g. b'data: {1}\n\ndata: {2' gives one event, and b'data: {2' waits.
            *events, waiting = (waiting + chunk).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    message = self._clean(event.removeprefix(b"data: "), answer)
                    if message:
                        yield b"data: " + message + b"\n\n"
                else:
                    yield event + b"\n\n"
        if waiting:
            yield waiting

    def _clean(self, message: bytes, answer: Answer) -> bytes:
        """Read the message, and return it without the tap's fields.

        The result is empty if the client would not have received the message without the tap.
        """
        try:
            content = json.loads(message)
        except (ValueError, RecursionError) as error:
            answer.failure = answer.failure or error
            return message
        if answer.failure is None:
            try:
                answer.read(content)
            except Exception as error:  # recording may fail, but serving must not
                answer.failure = error
        # Removed whether or not the message could be read, because the client did not ask for these
        # fields.
        return json.dumps(content).encode() if self.dialect.strip(content) else b""

    def _keep(self, answer: Answer, payload: dict[str, Any], origin: Origin) -> None:
        try:
            # vLLM treats null like a parameter that is not set.
            payload = {**answer.defaults} | {
                name: value for name, value in payload.items() if value is not None
            }
            record = answer.record(
                payload, origin, self.server_id, self.target_fingerprint, self.config.logprobs
            )
        except Exception as error:
            self._count_failure(error)
            return
        if record is None:
            self.counts["empty_answers"] += 1
            return
        self._waiting.append(record)
        if len(self._waiting) > MAX_WAITING_RECORDS:
            self._waiting.popleft()
            self.counts["dropped_records_queue_full"] += 1

    def _count_failure(self, error: Exception) -> None:
        """Count an unrecorded answer under its reason, and log the first one for each reason.

        The message of an error that is not ours is not logged, because it may quote the user's
        words.
        """
        reason = error.reason if isinstance(error, AnswerError) else type(error).__name__
        self.counts["errors"] += 1
        self.counts[f"errors_{reason}"] += 1
        if self.counts[f"errors_{reason}"] == 1:
            explained = str(error) if isinstance(error, AnswerError) else reason
            logger.warning(
                "an answer was not recorded: %s (further ones are only counted)", explained
            )

    @contextlib.asynccontextmanager
    async def running(self, upstream: Upstream) -> AsyncIterator[None]:
        """Check the server and send records while the block runs; send the remaining ones at the end."""
        self._upstream = upstream
        checking = asyncio.create_task(self.check.run_forever(upstream))
        shipping = asyncio.create_task(self._ship_periodically())
        try:
            yield
        finally:
            checking.cancel()
            shipping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await shipping
            if self._completing:
                await asyncio.wait(self._completing, timeout=COMPLETE_S)
            await asyncio.to_thread(self._ship, self._take_waiting())
            await asyncio.to_thread(self._outlet.close)

    async def _ship_periodically(self) -> None:
        while True:
            await asyncio.sleep(SHIP_INTERVAL_S)
            with self.guard.round("shipping"):
                await asyncio.to_thread(self._ship, self._take_waiting())

    def _take_waiting(self) -> deque[Record]:
        # This runs in the event loop, which alone appends, because a thread could conflict with
        # `_keep` at a full queue.
        records, self._waiting = self._waiting, deque()
        return records

    def _ship(self, records: Iterable[Record]) -> None:
        """Write records to the outlet.

        Any failure is counted rather than raised, because an exception would end all recording.
        """
        frames = []
        for record in records:
            try:
                frames.append(encode_frame(record))
            except Exception as error:  # e.g. a number out of range, or a lone surrogate
                self._count_failure(error)
        if not frames:
            return
        try:
            self._outlet.write(frames)
            self.counts["shipped_records"] += len(frames)
        except Exception as error:
            self.counts["dropped_records_spool"] += len(frames)
            self._count_failure(error)
