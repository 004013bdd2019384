"""From the ingest log into the buffer: a record is acknowledged, and leaves the log, when it is on the buffer's disk.

    JetStream ─► Pull ─► read_frames ─► fitting ─► Buffer.append (commits) ─► acknowledge
                  └ more arrive meanwhile                  │ disk full
                                                           └─► given back, and comes again

The log delivers at least once: after a kill between commit and acknowledgement a record comes again, and the buffer
knows it by its id. In whatever way the connection breaks, `take` raises and the next `take` begins with a new one.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from itertools import chain
from typing import Any

from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError

from online.buffer import Buffer
from online.ingest import Taken, store
from online.nats_config import Nats, StreamLimits, subject_part
from online.nats_link import BrokerError, connect, named_broker_errors
from online.records import read_frames

CONSUMER = "learner"
"""Of all domains; that of one has its name behind it."""

REQUEST_RECORDS = 256
REQUEST_BYTES = 16 << 20
"""Asked for at once. Twice this may lie in memory: what is stored now, and what arrives meanwhile."""

REQUEST_EXPIRES_S = 20.0
SILENCE_S = 5.0
"""Behind a request's end, before the log counts as gone."""

WAIT_S = 1.0
"""For the first record, before `take` comes back with nothing."""

ACK_WAIT_S = 60.0
"""After which the log gives a record out again: longer than a slow disk takes for a batch."""

DUPLICATES_S = 120.0
"""For so long the log itself knows a record that a server sends again; later the buffer does."""

OVERLAPPING = (10099, 10100)
"""NATS's codes where another consumer of a work queue takes the same."""

REQUEST_OVER = ("404", "408", "409")
"""NATS's status of a request without messages, out of time, or at its bytes: all that it had has arrived."""


class StreamSource:
    """The learner's end of a fleet's log."""

    def __init__(self, ingest: str, config: Nats, limits: StreamLimits, buffer: Buffer, vocab_size: int) -> None:
        self.ingest, self.config, self.limits = ingest, config, limits
        self.buffer, self.vocab_size = buffer, vocab_size
        self._client: Any = None
        self._pull: Pull | None = None

    async def take(self) -> Taken:
        """Move what has arrived into the buffer; empty where nothing did for a moment.

        Raises: BufferFullError where the buffer's disk is full; BrokerError where NATS does not answer. None is lost.
        """
        try:
            with named_broker_errors(self.ingest):
                self._pull = self._pull or await self._open()
                messages = await self._pull.next()
        except BaseException:
            await self.close()
            raise
        frames = chain.from_iterable(read_frames(message.data) for message in messages)
        try:
            taken = await asyncio.to_thread(store, frames, self.buffer, self.vocab_size, time.time())
        except OSError:
            await _answer(messages, "nak")
            raise
        await _answer(messages, "ack")
        return taken

    async def purge_unread(self) -> None:
        """Delete what no learner takes: records of domains that none is for. Raises: BrokerError."""
        with named_broker_errors(self.ingest):
            client = await connect(self.ingest, self.config)
            try:
                stream = client.jetstream()
                read = {found.config.filter_subject for found in await stream.consumers_info(self.config.stream)}
                info = await stream.stream_info(self.config.stream, subjects_filter=">")
                for subject in () if None in read else set(info.state.subjects or ()) - read:
                    await stream.purge_stream(self.config.stream, subject=subject)
            finally:
                await client.close()

    async def close(self) -> None:
        client, self._client, self._pull = self._client, None, None
        if client is not None:
            with suppress(NatsError, OSError):
                await client.close()

    async def _open(self) -> Pull:
        self._client = await connect(self.ingest, self.config)
        await provide_stream(self._client.jetstream(), self.config, self.limits, self.buffer.domain)
        pull = Pull(self._client, self.config.stream, consumer_of(self.buffer.domain))
        await pull.open()
        return pull


class Pull:
    """Requests to a consumer, one at a time, and what has arrived of them. (nats-py's own `fetch` waits until a request
    is complete or its time is over, which delays every record of light traffic.)"""

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
        """All messages that have arrived; none where none came within WAIT_S. Raises: BrokerError, or NATS's errors."""
        await self._request_more()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._something.wait(), WAIT_S)
        self._check()
        messages, self._arrived = self._arrived, []
        self._something.clear()
        await self._request_more()
        return messages

    async def _request_more(self) -> None:
        """Raises: nats.errors.ConnectionClosedError."""
        if self._outstanding or self._arrived:
            return
        self._outstanding, self._requested_s = REQUEST_RECORDS, time.monotonic()
        # Above the largest message in any case: one that does not fit into a request would never come.
        most_bytes = max(REQUEST_BYTES, 2 * self.client.max_payload)
        request = {"batch": REQUEST_RECORDS, "max_bytes": most_bytes, "expires": int(1e9 * REQUEST_EXPIRES_S)}
        await self.client.publish(self._subject, json.dumps(request).encode(), reply=self._inbox)

    def _check(self) -> None:
        if self.client.is_closed:
            raise BrokerError("the connection was lost")
        if self._problem:
            raise BrokerError(self._problem)
        if not self._arrived and time.monotonic() > self._requested_s + REQUEST_EXPIRES_S + SILENCE_S:
            raise BrokerError("the log does not answer")  # as on a full disk, with the connection in order

    async def _on_message(self, message: Any) -> None:
        status = message.headers and not message.data and message.headers.get("Status")
        if not status:
            self._arrived.append(message)
            self._outstanding -= 1
        else:
            self._outstanding = 0
            description = message.headers.get("Description", "")
            if status not in REQUEST_OVER or "Deleted" in description:
                self._problem = f"the log's consumer is gone: {status} {description}"
        self._something.set()


def consumer_of(domain: str) -> str:
    return f"{CONSUMER}-{subject_part(domain)}" if domain else CONSUMER


async def provide_stream(stream: Any, config: Nats, limits: StreamLimits, domain: str = "") -> None:
    """Make stream and consumer, or bring them to these settings. A record has one consumer: its domain's, or all's."""
    wanted = {
        "subjects": [config.subjects],
        "max_bytes": limits.max_bytes,
        "max_age": limits.max_age_s,
        "duplicate_window": min(DUPLICATES_S, limits.max_age_s),  # NATS refuses a longer one
        "num_replicas": limits.replicas,
    }
    try:
        found = (await stream.stream_info(config.stream)).config
        if any(getattr(found, name) != value for name, value in wanted.items()):
            await stream.update_stream(found.evolve(**wanted))
    except NotFoundError:
        # A work queue: text leaves the log when it is acknowledged, and what the buffer forgets is then nowhere.
        kept = {"storage": StorageType.FILE, "retention": RetentionPolicy.WORK_QUEUE, "discard": DiscardPolicy.OLD}
        await stream.add_stream(StreamConfig(name=config.stream, **kept, **wanted))
    with suppress(NotFoundError):
        # What it remembers may be ahead of a stream that lost its newest messages with its disk, and would pass over as
        # many that come then. A new one gives out at once whatever is not acknowledged.
        await stream.delete_consumer(config.stream, consumer_of(domain))
    consumer = ConsumerConfig(
        durable_name=consumer_of(domain),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        filter_subject=config.subject(domain) if domain else None,
    )
    try:
        await stream.add_consumer(config.stream, consumer)
    except APIError as error:
        if error.err_code not in OVERLAPPING:
            raise
        await _make_way(stream, config, consumer)
        await stream.add_consumer(config.stream, consumer)


async def _make_way(stream: Any, config: Nats, wanted: ConsumerConfig) -> None:
    """Delete consumers that took the same records for learners that are gone. Raises: BrokerError where one runs."""
    for found in await stream.consumers_info(config.stream):
        subjects = (found.config.filter_subject, wanted.filter_subject)
        if all(subjects) and subjects[0] != subjects[1]:
            continue
        if found.num_waiting or not found.name.startswith(CONSUMER):
            raise BrokerError(
                f"{found.name} of {config.stream} takes {subjects[0] or 'all records'} already: where one learner of a "
                "log has a domain every one needs a domain, and another"
            )
        await stream.delete_consumer(config.stream, found.name)


async def _answer(messages: list[Any], what: str) -> None:
    """Where the connection is lost meanwhile, they come again."""
    with suppress(NatsError, OSError):
        for message in messages:
            await getattr(message, what)()
