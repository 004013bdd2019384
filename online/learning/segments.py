"""Joins later segments of a request with the text of earlier ones.

A segment contains only the new part of its text. A few hundred bytes can thus become a record with
the whole text, in memory and in the buffer. The total size of the records joined from one request
is therefore limited in proportion to the size of its frames, as the content of a frame is limited
in proportion to its payload.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from redraft.online.records.record import (
    FREE_BYTES,
    MAX_RATIO,
    CorruptRecordError,
    Record,
    encode_record,
    join_text,
)

Frames = Iterable[tuple[bytes, Record | CorruptRecordError]]  # as `read_frames` yields them

MAX_REQUESTS = 4096
"""Maximum number of requests whose remaining size is tracked. The request that has had no segment
for the longest time is dropped, and starts again from its stored segment.
"""


class Text(NamedTuple):
    ids: bytes
    """int32 ids of context and output."""
    frame_bytes: int
    """Size of the frame that contained the segment."""


class Segments:
    def __init__(self, find_text: Callable[[str], Text | None]) -> None:
        """`find_text` returns the text of a stored record, given its id."""
        self._find_text = find_text
        # Number of bytes that may still be joined, by hash of the request.
        self._room: dict[int, int] = {}

    def reset(self) -> None:
        """Make every request start again from its stored segment."""
        self._room.clear()

    def join(
        self, frames: Frames, known: Collection[str]
    ) -> Iterator[tuple[bytes, Record | CorruptRecordError]]:
        """Yield the frames; records that continue an earlier one are replaced by self-contained ones.

        The earlier record is among the frames or already stored. Records with `known` ids are
        unchanged.
        """
        texts: dict[str, Text] = {}
        for frame, record in frames:
            if isinstance(record, Record) and record.record_id not in known:
                try:
                    if record.context_begin:
                        # A segment has only one successor, so `pop` frees the text once it is used.
                        record = self._join(record, frame, texts.pop(record.previous_id, None))
                        # It is stored self-contained too, because the segment before it may expire
                        # first.
                        frame = frame if record.context_begin else encode_record(record)
                    if not record.context_begin:
                        text = record.context + record.output
                        texts[record.record_id] = Text(text, len(frame))
                except CorruptRecordError as error:
                    record = error
            yield frame, record

    def _join(self, record: Record, frame: bytes, before: Text | None) -> Record:
        """Return the self-contained record, or the record unchanged if the preceding text was lost.

        Raises:
            CorruptRecordError: the preceding text ends too early, or the request has reached its
                size limit.
        """
        request = hash((record.server_id, record.request_id))
        if request not in self._room:
            before = before or self._find_text(record.previous_id)
            if before is None:
                return record
            self._room[request] = FREE_BYTES + MAX_RATIO * before.frame_bytes
        room = self._room.pop(request) + MAX_RATIO * len(frame)
        self._room[request] = room  # move it to the end, as the most recently used
        if len(self._room) > MAX_REQUESTS:
            del self._room[next(iter(self._room))]
        # Checked before the text is read, which takes as long as reading the record itself.
        size = record.num_bytes + 4 * record.context_begin
        if size > room:
            raise CorruptRecordError(
                f"oversized record: {len(frame)} bytes continue a text of {record.context_begin} tokens, "
                f"but at most {max(0, room)} more bytes are allowed for their request",
                "oversized",
            )
        before = before or self._find_text(record.previous_id)
        if before is None:
            return record
        self._room[request] = room - max(size, len(before.ids))
        return join_text(record, before.ids)
