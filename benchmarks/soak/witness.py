"""A witness of the ingest log, which notes the records that the broker acknowledges.

    server ── record, id in a header, answer to _INBOX.servers.X ──► broker ── stored as number N ──► _INBOX.servers.X
                └────────────────────────► witness ◄───────────────────────────┘

It only listens, so it is independent of the counts of servers and learner. While the broker is
down, it receives nothing: it may miss acknowledgements, but never invents one. It passes every
acknowledged record on, e.g. to a second learner that reads a spool.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from nats.errors import Error as NatsError

from redraft.online.records.nats_config import Nats
from redraft.online.records.nats_link import BrokerError, connect
from redraft.online.records.publisher import MESSAGE_ID
from redraft.online.records.record import Record, read_frames

RECONNECT_S = 0.3
MAX_OPEN = 4096
"""Maximum number of records without an acknowledgement, and of acknowledgements without their
record. The oldest are forgotten, because they will not find a match.
"""


class Witness:
    def __init__(self, ingest: str, config: Nats, hand_on: Callable[[bytes], None]) -> None:
        self.ingest, self.config, self.hand_on = ingest, config, hand_on
        self.acked: dict[str, str] = {}
        """Domain of every acknowledged record, by id."""
        self.is_listening = False
        self._records: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        """Both by the subject of the answer. The broker may deliver the answer before the record.
        """

    async def listen(self) -> None:
        """Listen until the task is cancelled, and reconnect as often as necessary."""
        while True:
            with contextlib.suppress(BrokerError, NatsError, OSError):
                client = await connect(self.ingest, self.config)
                try:
                    await client.subscribe(self.config.subjects, cb=self._on_record)
                    await client.subscribe("_INBOX.servers.>", cb=self._on_answer)
                    await client.flush()
                    self.is_listening = True
                    while not client.is_closed:
                        await asyncio.sleep(RECONNECT_S)
                finally:
                    self.is_listening = False
                    await client.close()
            await asyncio.sleep(RECONNECT_S)

    async def _on_record(self, message: Any) -> None:
        record_id = (message.headers or {}).get(MESSAGE_ID)
        if record_id and message.reply:
            put(self._records, message.reply, (record_id, message.data))
            self._match(message.reply)

    async def _on_answer(self, message: Any) -> None:
        put(self._answers, message.subject, message.data)
        self._match(message.subject)

    def _match(self, subject: str) -> None:
        if subject not in self._records or subject not in self._answers:
            return
        record_id, data = self._records.pop(subject)
        if not is_acknowledgement(self._answers.pop(subject)):
            return
        record = next(iter(read_frames(data)), (b"", None))[1]
        # A hostile message may carry any id, so a record counts only under its own id.
        if (
            isinstance(record, Record)
            and record.record_id == record_id
            and record_id not in self.acked
        ):
            self.acked[record_id] = record.domain
            self.hand_on(data)


def put(recent: OrderedDict[str, Any], key: str, value: Any) -> None:
    recent[key] = value
    while len(recent) > MAX_OPEN:
        recent.popitem(last=False)


def is_acknowledgement(data: bytes) -> bool:
    """Whether JetStream's answer says that the message is stored."""
    try:
        answer = json.loads(data)
    except ValueError:
        return False
    return isinstance(answer, dict) and "error" not in answer and bool(answer.get("seq"))
