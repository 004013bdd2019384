"""Moves records from the ingest log into the buffer.

A record is acknowledged, and leaves the log, once it is on the buffer's disk.

    JetStream ─► Pull ─► read_frames ─► mark_unfit ─► Buffer.append (commits) ─► overwrite, acknowledge
                                                              │ disk full
                                                              └─► closed; all are delivered again, in order

The log delivers at least once: after a kill between commit and acknowledgement a record is
delivered again, and the buffer recognises it by id.

An acknowledged message leaves the stream, but its bytes stay in the broker's file until that file
is deleted, and one unread message keeps the file. So every message is overwritten in the file
before it is acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

from nats.errors import Error as NatsError
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, NotFoundError

from redraft.online.learning.buffer import Buffer
from redraft.online.learning.intake import Taken, store
from redraft.online.records.nats_config import Nats, StreamLimits
from redraft.online.records.nats_link import BrokerError, connect, wrap_broker_errors
from redraft.online.records.record import read_frames

CONSUMER = "learner"
REGISTRY_ID = "redraft_registry"  # Key in the consumer's metadata.
REQUEST_RECORDS = 256
# Bytes per request; up to twice this is in memory, because one batch is stored while the next
# arrives.
REQUEST_BYTES = 16 << 20
REQUEST_EXPIRES_S = 20.0
SILENCE_S = 5.0  # Seconds after a request has expired before the log counts as gone.
WAIT_S = 1.0  # Seconds to wait for the first record before `take` returns with nothing.
# Seconds until an unacknowledged record is delivered again. Slow disks need less.
ACK_WAIT_S = 60.0
# The log drops duplicates within this time; the buffer drops later ones.
DUPLICATES_S = 120.0

ERASE_TIMEOUT_S = 10.0
# How long overwriting stops after a failure, so that a slow broker takes at most half of the
# learner's time.
ERASE_PAUSE_S = 10.0
NO_MESSAGE = 10037  # NATS's error code for a message that is not in the stream, or no longer.
OVERLAPPING = (10099, 10100)  # NATS's error codes for a second consumer of a work queue's subjects
SAFE_BROKER = (2, 14)  # no acknowledged message was lost in tests with full disks; 2.12 lost some
ACK_PREFIX = "$JS.ACK."
REQUEST_OVER = ("404", "408", "409")  # no messages, request expired, byte limit reached


class StreamSource:
    """The learner's end of a fleet's log."""

    def __init__(
        self,
        ingest: str,
        config: Nats,
        limits: StreamLimits,
        buffer: Buffer,
        vocab_size: int,
        now_s: Callable[[], float] = time.time,
        registry_id: str = "",
    ) -> None:
        """Store the settings; the connection is opened later.

        `now_s` returns the current time, which is stored with arriving records. It is called on
        the event loop's thread. `registry_id` distinguishes learners of different registries.
        """
        self.ingest, self.config, self.limits, self.registry_id = (
            ingest,
            config,
            limits,
            registry_id,
        )
        self.buffer, self.vocab_size, self._now_s = buffer, vocab_size, now_s
        self._client: Any = None
        self._pull: Pull | None = None
        # Monotonic time when overwriting messages resumes; infinite if it is not permitted.
        self._erase_from_s = 0.0
        self._risk = ""  # why this broker may lose records
        self.faults: list[
            tuple[str, str]
            # Faults of the broker as (name, reason), with an empty reason when the fault ends. The
            # reporter clears the list.
        ] = []

    async def take(self) -> Taken:
        """Move the arrived records into the buffer.

        The result is empty if no record arrived for a moment.

        Raises:
            BufferFullError: the buffer's disk is full; no record is lost.
            BrokerError: NATS does not answer; no record is lost.
        """
        try:
            with wrap_broker_errors(self.ingest):
                self._pull = self._pull or await self._open()
                messages = await self._pull.next()
            # A lazy iterable, so that `store` decodes the frames in its thread and not on the event
            # loop.
            frames = chain.from_iterable(read_frames(message.data) for message in messages)
            # If this task is cancelled, the thread continues. The messages are then delivered
            # again, and recognised by id.
            taken = await asyncio.to_thread(
                store, frames, self.buffer, self.vocab_size, self._now_s()
            )
        except BaseException:
            # The messages are not returned, even if the disk is full, because a returned segment
            # would arrive after the next one, which needs its text.
            await self.close()
            raise
        await self._release(messages)
        return taken

    async def _release(self, messages: list[Any]) -> None:
        """Overwrite the messages in the broker's files, then acknowledge them."""
        if messages and self._client is not None and time.monotonic() >= self._erase_from_s:
            try:
                with wrap_broker_errors(self.ingest):
                    await asyncio.gather(*(self._erase(message) for message in messages))
                if self._erase_from_s:
                    self._erase_from_s, self.faults = 0.0, [*self.faults, ("log_not_erased", "")]
            except BrokerError as error:
                # Without the permission, a request is not answered, and only the client's last
                # error names the subject.
                is_forbidden = "stream.msg.delete" in str(self._client.last_error).lower()
                self._erase_from_s = math.inf if is_forbidden else time.monotonic() + ERASE_PAUSE_S
                reason = f"text stays in the broker's files: {error}"
                cure = "; the learner needs $JS.API.STREAM.>" if is_forbidden else ""
                self.faults.append(("log_not_erased", f"{reason}{cure}"))
        with suppress(
            NatsError, OSError
        ):  # if the connection is lost in between, the messages are delivered again
            for message in messages:
                await message.ack()

    async def _erase(self, message: Any) -> None:
        """Overwrite a message in the broker's files.

        Raises:
            BrokerError: the broker refuses or does not answer.
        """
        request = json.dumps({"seq": message.metadata.sequence.stream}).encode()
        subject = f"$JS.API.STREAM.MSG.DELETE.{self.config.stream}"
        answer = json.loads(
            (await self._client.request(subject, request, timeout=ERASE_TIMEOUT_S)).data
        )
        if not answer.get("success") and answer.get("error", {}).get("err_code") != NO_MESSAGE:
            raise BrokerError(f"a message could not be overwritten: {answer.get('error')}")

    async def close(self) -> None:
        """Return unacknowledged messages to the log, so that the next `take` receives them at once."""
        client, self._client, self._pull = self._client, None, None
        if client is not None:
            with suppress(NatsError, OSError):
                await client.close()

    async def _open(self) -> Pull:
        self._client = await connect(self.ingest, self.config, "learner")
        self._erase_from_s = min(self._erase_from_s, time.monotonic())
        version = self._client.connected_server_version
        risk = ""
        if (version.major, version.minor) < SAFE_BROKER:
            risk = (
                f"NATS {version.major}.{version.minor} may lose records that it acknowledged when its "
                f"disk fills up: install {'.'.join(map(str, SAFE_BROKER))} or later"
            )
        if risk != self._risk:  # otherwise, the fault would outlast an upgrade of the broker
            self._risk = risk
            self.faults.append(("log_may_lose_records", risk))
        await provide_stream(self._client.jetstream(), self.config, self.limits, self.registry_id)
        pull = Pull(self._client, self.config.stream, CONSUMER)
        await pull.open()
        return pull


class Pull:
    """Sends requests to a consumer, one at a time, and collects messages as they arrive.

    The `fetch` of nats-py would delay every record in light traffic.
    """

    def __init__(self, client: Any, stream: str, consumer: str) -> None:
        self.client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = client.new_inbox()
        self._arrived: list[Any] = []
        self._outstanding = 0
        self._requested_s = time.monotonic()
        self._problem = ""
        self._something = asyncio.Event()

    async def open(self) -> None:
        await self.client.subscribe(self._inbox, cb=self._on_message)

    async def next(self) -> list[Any]:
        """Return all messages that have arrived; empty if none arrives within WAIT_S.

        Raises:
            BrokerError, nats.errors.Error: the log or the connection fails.
        """
        await self._request_more()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._something.wait(), WAIT_S)
        self._check()
        # The next messages arrive while the caller stores these messages.
        messages, self._arrived = self._arrived, []
        self._something.clear()
        await self._request_more()
        return messages

    async def _request_more(self) -> None:
        """Send the next request, unless one is running or messages are waiting.

        Raises:
            nats.errors.ConnectionClosedError: if the connection was lost.
        """
        if self._outstanding or self._arrived:
            return
        self._outstanding, self._requested_s = REQUEST_RECORDS, time.monotonic()
        # Always more than the largest message, because a message too large for the request would
        # never be delivered.
        most_bytes = max(REQUEST_BYTES, 2 * self.client.max_payload)
        request = {
            "batch": REQUEST_RECORDS,
            "max_bytes": most_bytes,
            "expires": int(1e9 * REQUEST_EXPIRES_S),
        }
        await self.client.publish(self._subject, json.dumps(request).encode(), reply=self._inbox)

    def _check(self) -> None:
        if self.client.is_closed:
            raise BrokerError("the connection was lost")
        if self._problem:
            raise BrokerError(self._problem)
        if (
            not self._arrived
            and time.monotonic() > self._requested_s + REQUEST_EXPIRES_S + SILENCE_S
        ):
            # For example, the log's disk is full. The connection itself may be fine.
            raise BrokerError("the log does not answer")

    async def _on_message(self, message: Any) -> None:
        # A message of the stream has a subject for its acknowledgement. Everything else about it is
        # chosen by its publisher: a message with a Status header and no data would otherwise end
        # every connection, forever.
        headers = message.headers or {}
        if message.reply.startswith(ACK_PREFIX):
            self._arrived.append(message)
            self._outstanding -= 1
        elif status := headers.get("Status"):
            self._outstanding = 0
            description = headers.get("Description", "")
            # 409 may also mean "Consumer Deleted", and 503 means that there is no responder, so
            # further requests would fail too.
            if status not in REQUEST_OVER or "Deleted" in description:
                self._problem = f"the log's consumer is gone: {status} {description}"
        self._something.set()


async def provide_stream(
    stream: Any, config: Nats, limits: StreamLimits, registry_id: str = ""
) -> None:
    """Create or update the stream and our consumer.

    Each record has one consumer.

    Raises:
        BrokerError: a running learner already consumes the records.
    """
    wanted = {
        "subjects": [config.subjects],
        "max_bytes": limits.max_bytes,
        "max_age": limits.max_age_s,
        "duplicate_window": min(DUPLICATES_S, limits.max_age_s),  # NATS rejects a longer window
        "num_replicas": limits.replicas,
    }
    try:
        found = (await stream.stream_info(config.stream)).config
        if any(getattr(found, name) != value for name, value in wanted.items()):
            await stream.update_stream(found.evolve(**wanted))
    except NotFoundError:
        # The stream is a work queue: text leaves the log when it is acknowledged, so a text deleted
        # from the buffer is gone.
        kept = {
            "storage": StorageType.FILE,
            "retention": RetentionPolicy.WORK_QUEUE,
            "discard": DiscardPolicy.OLD,
        }
        await stream.add_stream(StreamConfig(name=config.stream, **kept, **wanted))
    with suppress(NotFoundError):
        former = await stream.consumer_info(config.stream, CONSUMER)
        # A restarted learner finds its registry's id and starts at once, although a request of its
        # previous process may still be waiting.
        if (
            former.num_waiting
            and (former.config.metadata or {}).get(REGISTRY_ID, registry_id) != registry_id
        ):
            raise BrokerError(
                f"a learner of a different registry already reads the records of "
                f"{config.stream}: give "
                "each learner a different nats.fleet"
            )
        # If the stream lost its newest messages with a disk, an old consumer has a later position
        # and would skip as many new messages as were lost. A new consumer delivers every
        # unacknowledged message at once.
        await stream.delete_consumer(config.stream, former.name)
    consumer = ConsumerConfig(
        durable_name=CONSUMER,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_ack_pending=-1,  # no limit here, because each request has one
        metadata={REGISTRY_ID: registry_id} if registry_id else None,
    )
    try:
        await stream.add_consumer(config.stream, consumer)
    except APIError as error:
        if error.err_code not in OVERLAPPING:
            raise
        await _make_way(stream, config)
        await stream.add_consumer(config.stream, consumer)


async def _make_way(stream: Any, config: Nats) -> None:
    """Delete former learners' consumers of these records.

    Raises:
        BrokerError: one of them is running.
    """
    for found in await stream.consumers_info(config.stream):
        # A running learner nearly always has a pending request at the broker; a former learner
        # never does.
        if found.num_waiting or not found.name.startswith(CONSUMER):
            raise BrokerError(
                f"{found.name} of {config.stream} is a running learner that already reads its "
                f"records: give each learner a "
                "different nats.fleet"
            )
        await stream.delete_consumer(config.stream, found.name)
