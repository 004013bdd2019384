"""The publisher of a server's records.

Records wait in a bounded queue until JetStream acknowledges them.

    capture's thread ─ write ─► queue ─────────────────► this thread (asyncio) ─► JetStream
                                beyond its size the        ▲                        │ acknowledged: removed
                                oldest are dropped         └─ not acknowledged ─────┘
                                and counted                   back to the front of the queue

A lost broker, a missing stream and a full disk look the same to the publisher: nothing is
acknowledged. (On a full disk, NATS may not answer while its health page reports ok, so only
publishing shows the problem.) In that case, one record is sent per second until one is
acknowledged. Each record carries an id, so JetStream recognises a record that it has already
stored.
"""

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from redraft.online.records.guard import Guard
from redraft.online.records.nats_config import Nats
from redraft.online.records.nats_link import BrokerError, connect, wrap_broker_errors
from redraft.online.records.record import Frame

# Maximum bytes of unacknowledged records: about a minute of a busy server's traffic.
MAX_WAITING_BYTES = 256 << 20
WINDOW_BYTES = 8 << 20
WINDOW_RECORDS = 1024  # Maximum number of records sent before waiting for acknowledgements.
ACK_TIMEOUT_S = 5.0
RETRY_S = 1.0
POLL_S = 0.1
CLOSE_TIMEOUT_S = 5.0
MESSAGE_ID = "Nats-Msg-Id"
# Maximum size of a record's headers, which count towards the broker's limit. The broker disconnects
# clients that exceed the limit.
HEADER_BYTES = 256


class Publisher:
    """One server's connection to the log.

    `write` never waits, and must be called from one thread only.
    """

    def __init__(
        self,
        ingest: str,
        config: Nats,
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        guard: Guard | None = None,
    ) -> None:
        self.ingest, self.config, self.max_waiting_bytes = ingest, config, max_waiting_bytes
        self.guard = guard or Guard()
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self._waiting: deque[Frame] = deque()
        self._num_bytes = 0  # waiting or in flight
        self._lock = threading.Lock()
        self._closing_at_s = math.inf
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="redraft-publish", daemon=True
        )

    def write(self, frames: Sequence[Frame]) -> None:
        """Queue these frames. If there is no room, the oldest are dropped and counted."""
        with self._lock:
            self._waiting.extend(frames)
            self._num_bytes += sum(map(len, frames))
            self._make_room()
        if not self._thread.ident:
            # The thread is started by the first writer, so that it inherits capture's cores, which
            # exclude the engine's.
            self._thread.start()

    def status(self) -> dict[str, Any]:
        with self._lock:
            waiting_bytes = self._num_bytes
        return {**self.counts, "waiting_bytes": waiting_bytes, "broker_error": self.last_error}

    def close(self) -> None:
        """Send the waiting frames for a few seconds at most, then drop and count the rest."""
        self._closing_at_s = time.monotonic()
        if self._thread.ident:
            self._thread.join(CLOSE_TIMEOUT_S + ACK_TIMEOUT_S)
        # With a bound of 0, `_put_back` drops and counts all frames that are still waiting.
        self.max_waiting_bytes = 0
        self._put_back([])

    # -----------------------------------------------------------------------------------------------
    # its thread

    async def _run(self) -> None:
        while not self._is_done():
            with self.guard.round("publisher"):
                try:
                    await self._connect_and_publish()
                    continue
                except BrokerError as error:
                    self.last_error = str(error)
            await asyncio.sleep(RETRY_S)

    async def _connect_and_publish(self) -> None:
        with wrap_broker_errors(self.ingest):
            client = await connect(self.ingest, self.config)
            try:
                await self._publish(client)
            finally:
                await client.close()

    async def _publish(self, client: Any) -> None:
        """Publish until the connection is lost or nothing is left to do."""
        stream = client.jetstream()
        window_bytes = 1  # send one record, until the broker has proven that it stores records
        while not (client.is_closed or self._is_done()):
            frames = self._take(window_bytes)
            if not frames:
                await asyncio.sleep(POLL_S)
                continue
            try:
                refused = await self._send(client, stream, frames)
            except Exception:
                self._put_back(frames)  # the broker recognises records that it has already stored
                raise
            self._put_back(refused)
            # Frames in flight cannot be dropped. If they filled a small queue, new records would
            # have to be dropped.
            window_bytes = 1 if refused else min(WINDOW_BYTES, self.max_waiting_bytes // 4)
            if refused:
                await asyncio.sleep(RETRY_S)

    async def _send(
        self, client: Any, stream: JetStreamContext, frames: list[Frame]
    ) -> list[Frame]:
        """Send the frames, and return those not acknowledged.

        Acknowledged frames are removed from the queue.
        """
        answers: dict[asyncio.Future[Any], Frame] = {}
        for number, frame in enumerate(frames):
            subject, headers = self.config.subject(frame.domain), {MESSAGE_ID: frame.record_id}
            if (
                len(frame) + HEADER_BYTES > client.max_payload
            ):  # checked here, because nats-py checks the size without the headers
                self._forget(frame, "dropped_records_too_large")
                continue
            try:
                answers[await stream.publish_async(subject, frame, headers=headers)] = frame
            except (NatsError, OSError) as error:
                self.last_error = str(error) or type(error).__name__
                # Frames sent before the error may still be acknowledged. This frame and the
                # remaining ones go back to the queue.
                return [*await self._unanswered(client, answers), *frames[number:]]
        return await self._unanswered(client, answers)

    async def _unanswered(
        self, client: Any, answers: dict[asyncio.Future[Any], Frame]
    ) -> list[Frame]:
        deadline_s = time.monotonic() + ACK_TIMEOUT_S
        pending = set(answers)
        while pending and time.monotonic() < deadline_s and not client.is_closed:
            # Wait in short steps, to notice soon that the connection was closed.
            _, pending = await asyncio.wait(pending, timeout=POLL_S)
        refused = []
        for answer, frame in answers.items():
            if answer in pending:
                answer.cancel()
                self.last_error = "not acknowledged"
                refused.append(frame)
            elif error := answer.exception():
                self.last_error = str(error) or type(error).__name__
                refused.append(frame)
            else:
                self.acknowledged(frame)
        return refused

    def acknowledged(self, frame: Frame) -> None:
        """Remove a frame that the broker has stored on disk."""
        self._forget(frame, "published_records")
        self.last_error = ""

    # -----------------------------------------------------------------------------------------------
    # the queue

    def _take(self, num_bytes: int) -> list[Frame]:
        """Take the oldest frames, up to `num_bytes` but at least one; empty if none is waiting.

        Of the segments of one request, only the first is taken: the next one waits until it is
        acknowledged. If both were sent and only the first were refused, it would be stored after
        the next one, which cannot be used without the text before it.
        """
        taken: list[Frame] = []
        ids = set[str]()
        with self._lock:
            while self._waiting and num_bytes > 0 and len(taken) < WINDOW_RECORDS:
                if self._waiting[0].previous_id in ids:
                    break
                taken.append(self._waiting.popleft())
                ids.add(taken[-1].record_id)
                num_bytes -= len(taken[-1])
        return taken

    def _put_back(self, frames: list[Frame]) -> None:
        with self._lock:
            # `extendleft` reverses the order, so it gets the newest frame first, and the oldest
            # ends up at the front.
            self._waiting.extendleft(reversed(frames))
            self._make_room()

    def _make_room(self) -> None:
        while self._num_bytes > self.max_waiting_bytes and self._waiting:
            self._num_bytes -= len(self._waiting.popleft())
            self.counts["dropped_records_broker"] += 1

    def _forget(self, frame: Frame, reason: str) -> None:
        with self._lock:
            self._num_bytes -= len(frame)
        self.counts[reason] += 1

    def _is_done(self) -> bool:
        now_s = time.monotonic()
        return now_s > self._closing_at_s + CLOSE_TIMEOUT_S or (
            now_s >= self._closing_at_s and not self._waiting
        )
