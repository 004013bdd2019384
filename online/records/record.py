"""The record of one segment of one request, from one server, and its wire format.

C = context tokens, N = output tokens of the segment, R = rows, K = kept top-k ids, H = tokens with
hidden states, L = hidden states of one token, D = size of each hidden state.

A row is one distribution of the target: the prediction of the token at `positions[r]`, an index
into context + output. A step with k draft tokens (k may be 0) produces k + 1 rows: one per draft
token, and one for the bonus token (draft -1). Rows after a rejection follow discarded draft tokens.
They are equally valid, but belong to a different text. Each part of the text is sent once: a later
segment of a long answer contains only the new part, and the receiver appends it to the text of the
previous segment, which makes the record self-contained.
"""

import hashlib
import io
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
import zstandard
from numpy.typing import DTypeLike, NDArray

from redraft.engine import sampling
from redraft.online.records.checks import find_fault
from redraft.online.records.states import HiddenFormat, decode_float8, state_bytes

MAGIC = b"RDR1"
"""First bytes of every frame."""

MAX_RECORD_BYTES = 64 << 20
"""Maximum size of a decompressed record, in bytes. It prevents a damaged or malicious frame from
exhausting the memory.
"""

FREE_BYTES, MAX_RATIO = 1 << 20, 64
"""A payload may decompress to at most FREE_BYTES plus MAX_RATIO times its size. Records are mostly
probabilities, which compress to half at best; only a long, repetitive prompt compresses more.
"""

KEPT_BYTES = 1 << 20
"""Maximum number of bytes kept for inspection from an unreadable stretch."""

MAX_BAD_IN_A_ROW = 16
"""Number of unreadable stretches that are reported one by one before the next good frame. Further
stretches before it are not reported.
"""

MAX_WASTE = 4
"""Number of bytes that may be read without finding a record, as a multiple of all bytes, before the
rest is skipped. This bounds the work on frames whose lengths overlap, for which reading would
otherwise be quadratic.
"""

LOOKUP, PADDING = 1, 2
"""Values of `row_proposers` for draft tokens that are not from the named version: they are from a
lookup, or padding near the end of the context.
"""

Constraint = Literal[
    "structured_output", "min_tokens", "bad_words", "allowed_tokens", "thinking_budget"
]
"""Rules of a request that forbid tokens, or force one."""

NO_HIDDEN = np.empty((0, 0, 0), np.uint16)
_HEADER = struct.Struct("<4sII")
_HEADER_START = re.compile(MAGIC + rb"...[\x00-\x04]", re.DOTALL)
"""Magic and length. The last byte of the length is at most 4, because no frame is longer than about
64 MiB.
"""


class CorruptRecordError(ValueError):
    """A frame is torn, bit-flipped or inconsistent, or contains unusable values."""

    def __init__(self, message: str, reason: str = "corrupt") -> None:
        super().__init__(message)
        self.reason = reason
        """The record is counted under this reason, which is used as a metric label."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The request's sampling parameters.

    A record's distributions are those *before* all of them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Top-k filter; 0 and -1 keep all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def served(self) -> sampling.Sampling:
        """The temperature and filters that the engine samples with, after the penalties."""
        filters = sampling.Sampling(top_p=self.top_p, top_k=max(self.top_k, 0), min_p=self.min_p)
        return filters.at(self.temperature)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of one request.

    Fields of type bytes are little-endian arrays: read them through the properties.
    """

    server_id: str
    """Id of the server process; changes at every start."""
    request_id: str
    sequence: int
    """Number of the segment within the request, from 0."""
    time_s: float
    """End of the segment, in seconds since the epoch."""
    domain: str = ""
    tenant: str = ""
    target_fingerprint: str
    target_version: str = ""
    """LABEL@DIGEST of the weights that verified the draft tokens: the trainer's name for the
    weights, which may be empty, and 12 hex digits of their checksum. Empty for the weights in the
    target's folder, whose fingerprint is given.
    """
    draft_version: str = ""
    """Version that proposed the draft tokens, except those marked in `row_proposers`."""
    sampling: Sampling
    constraints: tuple[Constraint, ...] = ()
    """Rules with which the engine changed the target's logits after recording. The rows contain the
    distributions before these changes; `output` and `row_accepted` are the result after them.
    """
    adapter: str = ""
    """Name of the LoRA adapter that produced rows and states; empty if none."""
    template_arguments: str = ""
    """Arguments of the chat template, as JSON; empty if none. See `origin.pack_arguments`."""
    num_prompt_tokens: int
    """Length of the prompt at the start of the context; it is the same in every segment of a
    request.
    """
    top_k: int
    context: bytes
    """int32 [C], all tokens before the segment's output, from `context_begin` on."""
    output: bytes
    """int32 [N]."""
    row_positions: bytes
    """int32 [R], index into context + output of the token predicted by the row."""
    row_branches: bytes
    """int32 [R], number of rejected draft tokens at the end of the row's context. These are the
    draft tokens of the same number of preceding rows.
    """
    row_drafts: bytes
    """int32 [R], the draft's token, or -1 for none (bonus token, or a server without speculation).
    """
    row_draft_probs: bytes
    """float32 [R], probability with which the draft token was proposed: 1 for greedy drafting, NaN
    if there is no draft token.
    """
    row_accepted: bytes
    """uint8 [R], 1 if the draft token was accepted."""
    row_proposers: bytes = b""
    """uint8 [R], LOOKUP or PADDING for rows drafted by a different proposer, otherwise 0. Empty if
    all are 0.
    """
    row_topk_ids: bytes
    """int32 [R, K], in order of descending probability."""
    row_topk_log_probs: bytes
    """float32 [R, K], natural logarithms under the full softmax at temperature 1."""
    row_log_sum_exp: bytes
    """float32 [R], log-sum-exp of the logits, so that logit = log-probability + row_log_sum_exp.
    NaN if the server does not report it.
    """
    context_begin: int = 0
    """Number of tokens left out of `context` because the previous segment contains them
    (`join_text`).
    """
    hidden_begin: int = 0
    """Index of the first token with hidden states; all later tokens have them. Earlier tokens were
    read from the prefix cache or sent with an earlier segment.
    """
    hidden_shape: tuple[int, int] = (0, 0)
    """L and D of the states that the served draft reads: streams after layers for EAGLE-3,
    otherwise the last, normed state or, for the MTP layers of some targets, the state before the
    norm.
    """
    hidden_format: HiddenFormat = "bfloat16"
    hidden: bytes = b""
    """Hidden states, [H, L, D] in this format; empty if none were captured."""

    @property
    def num_bytes(self) -> int:
        """Total size of the arrays in bytes, which is nearly all of the record's memory."""
        return sum(
            len(value) for value in msgspec.structs.astuple(self) if isinstance(value, bytes)
        )

    @property
    def target(self) -> str:
        """Identifies the weights that verified the draft tokens, by content.

        It consists of the fingerprint of their folder, #HASH of an adapter's name, and @DIGEST of
        weights that a trainer has changed.
        """
        return self.base + "".join(self.target_version.rpartition("@")[1:])

    @property
    def base(self) -> str:
        """`name_base` of the target's folder and the adapter."""
        return name_base(self.target_fingerprint, self.adapter)

    @property
    def record_id(self) -> str:
        """32 hex digits, a hash of server, request and sequence number.

        A record that is delivered twice has the same id both times.
        """
        return _make_id(self.server_id, self.request_id, self.sequence)

    @property
    def previous_id(self) -> str:
        """`record_id` of the previous segment."""
        return _make_id(self.server_id, self.request_id, self.sequence - 1)

    @property
    def num_tokens(self) -> int:
        """Length of the whole text in tokens, including those left out of `context`."""
        return self.context_begin + (len(self.context) + len(self.output)) // 4

    @property
    def prompt(self) -> bytes:
        """int32 ids of the prompt of a self-contained record."""
        return self.context[: 4 * self.num_prompt_tokens]

    @property
    def context_ids(self) -> NDArray[np.int32]:
        return _array(self.context, np.int32)

    @property
    def output_ids(self) -> NDArray[np.int32]:
        return _array(self.output, np.int32)

    @property
    def positions(self) -> NDArray[np.int32]:
        return _array(self.row_positions, np.int32)

    @property
    def branches(self) -> NDArray[np.int32]:
        return _array(self.row_branches, np.int32)

    @property
    def draft_ids(self) -> NDArray[np.int32]:
        return _array(self.row_drafts, np.int32)

    @property
    def draft_probs(self) -> NDArray[np.float32]:
        return _array(self.row_draft_probs, np.float32)

    @property
    def accepted(self) -> NDArray[np.bool_]:
        return _array(self.row_accepted, np.uint8).astype(bool)

    @property
    def is_own(self) -> NDArray[np.bool_]:
        """[R], whether the row belongs to a draft by the named version.

        A bonus row belongs to the draft before it.
        """
        if not self.row_proposers:
            return np.ones(len(self.positions), bool)
        return ~_array(self.row_proposers, np.uint8).astype(bool)

    @property
    def topk_ids(self) -> NDArray[np.int32]:
        return _array(self.row_topk_ids, np.int32).reshape(-1, self.top_k)

    @property
    def topk_log_probs(self) -> NDArray[np.float32]:
        return _array(self.row_topk_log_probs, np.float32).reshape(-1, self.top_k)

    @property
    def log_sum_exp(self) -> NDArray[np.float32]:
        return _array(self.row_log_sum_exp, np.float32)

    @property
    def num_hidden(self) -> int:
        """H, the number of tokens with hidden states."""
        num_states, size = self.hidden_shape
        # Without states, the shape is (0, 0).
        return len(self.hidden) // max(1, num_states * state_bytes(self.hidden_format, size))

    @property
    def hidden_words(self) -> NDArray[np.uint16]:
        """Hidden states as the bits of bfloat16 numbers, [H, L, D], because numpy has no bfloat16."""
        if not self.hidden:
            return NO_HIDDEN
        if self.hidden_format == "float8":
            num_states, size = self.hidden_shape
            return decode_float8(
                _array(self.hidden, np.uint8).reshape(-1, num_states, state_bytes("float8", size))
            )
        return _array(self.hidden, np.uint16).reshape(-1, *self.hidden_shape)


def text_rows(
    positions_N: NDArray[Any], ids_NK: NDArray[Any], log_probs_NK: NDArray[Any]
) -> dict[str, Any]:
    """Return a record's columns for rows on the text itself, for which no draft proposed a token.

    Row n contains the K most probable tokens at the text's token `positions_N[n]`.
    """
    count = len(positions_N)
    unknown = np.full(count, np.nan, "<f4").tobytes()
    return {
        "row_positions": positions_N.astype("<i4").tobytes(),
        "row_branches": bytes(4 * count),  # int32 zeros
        "row_drafts": np.full(count, -1, "<i4").tobytes(),
        "row_draft_probs": unknown,
        "row_accepted": bytes(count),
        "row_proposers": b"",
        "row_topk_ids": ids_NK.astype("<i4").tobytes(),
        "row_topk_log_probs": log_probs_NK.astype("<f4").tobytes(),
        "row_log_sum_exp": unknown,
    }


def name_base(target_fingerprint: str, adapter: str) -> str:
    """Name the target that a draft is trained for: folder fingerprint and adapter #HASH."""
    # This is a hash, because the name may contain any character.
    return target_fingerprint + (
        f"#{hashlib.sha256(adapter.encode()).hexdigest()[:12]}" if adapter else ""
    )


def join_text(record: Record, text: bytes) -> Record:
    """Make a later segment's record self-contained, given the previous segment's text, int32.

    Raises:
        CorruptRecordError: the previous text ends too early, or the record would be too large.
    """
    if len(text) < 4 * record.context_begin:
        raise CorruptRecordError(
            f"a segment continues a text of {record.context_begin} tokens, but the text has "
            f"{len(text) // 4}"
        )
    whole = text[: 4 * record.context_begin] + record.context
    if len(whole) + record.num_bytes > MAX_RECORD_BYTES:
        raise CorruptRecordError(
            f"oversized record: the text has {len(whole) // 4} tokens", "oversized"
        )
    return msgspec.structs.replace(record, context=whole, context_begin=0)


def _make_id(server_id: str, request_id: str, sequence: int) -> str:
    # msgpack keeps the fields apart, whereas joined strings would be equal for ("ab", "c") and
    # ("a", "bc").
    return hashlib.sha256(msgspec.msgpack.encode((server_id, request_id, sequence))).hexdigest()[
        :32
    ]


def encode_record(record: Record) -> bytes:
    """Encode one frame: magic, the payload's length and CRC-32, and the payload, zstd(msgpack)."""
    payload = zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(record))
    return _HEADER.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


class Frame(bytes):
    """An encoded record, with the fields needed to route, deduplicate and order it."""

    record_id: str
    previous_id: str = ""
    domain: str


def encode_frame(record: Record) -> Frame:
    frame = Frame(encode_record(record))
    frame.record_id, frame.domain = record.record_id, record.domain
    frame.previous_id = record.previous_id
    return frame


def decode_record(frame: bytes) -> Record:
    """Decode the record in one frame.

    Raises:
        CorruptRecordError: the frame is torn, bit-flipped, or inconsistent; `reason` names the
            kind.
    """
    return _decode_payload(_unframe(frame))


def _unframe(frame: bytes) -> bytes:
    """Return the payload, after checking its length and CRC against the header.

    Raises:
        CorruptRecordError: the same as in `decode_record`.
    """
    if len(frame) < _HEADER.size or not _HEADER_START.match(frame):
        raise CorruptRecordError(f"not a record: it starts with {frame[:4]!r}")
    _, length, crc = _HEADER.unpack_from(frame)
    payload = frame[_HEADER.size :]
    if len(payload) != length:
        raise CorruptRecordError(f"torn record: {len(payload)} of {length} payload bytes arrived")
    if zlib.crc32(payload) != crc:
        raise CorruptRecordError("bit-flipped record: the CRC does not match")
    return payload


def _decode_payload(payload: bytes) -> Record:
    """Decode the record in a payload.

    Raises:
        CorruptRecordError: the payload is not a valid record. No other error is raised, whatever
            the bytes are.
    """
    try:
        record = msgspec.msgpack.decode(_decompress(payload), type=Record)
        fault = find_fault(record)
    except CorruptRecordError:
        raise
    # Catch every error, because malicious bytes can also cause a RecursionError, a
    # UnicodeDecodeError or an OverflowError. A record that raises such an error would stop the
    # learner at every start.
    except Exception as error:
        raise CorruptRecordError(f"unreadable record: {type(error).__name__}: {error}") from error
    if fault is not None:
        raise CorruptRecordError(fault.sentence, fault.reason)
    return record


class _Decompressors(threading.local):
    """One decompressor per thread, because creating one takes a quarter as long as using it."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_decompressors = _Decompressors()


def _decompress(payload: bytes) -> bytes:
    """Decompress a payload.

    Raises:
        CorruptRecordError: the record is too large.
        zstandard.ZstdError: if it cannot be decompressed.
    """
    # E.g. a payload of 1 MiB may decompress to 64 MiB, and a payload of 1 KiB to 1 MiB and 64 KiB.
    most = min(MAX_RECORD_BYTES, FREE_BYTES + MAX_RATIO * len(payload))
    # The size given in the frame overrides max_output_size. It is -1 if the frame gives none.
    if zstandard.frame_content_size(payload) > most:
        raise CorruptRecordError(
            f"oversized record: {len(payload)} bytes decompress to more than {most}", "oversized"
        )
    content: bytes = _decompressors.decompressor.decompress(payload, max_output_size=most)
    return content


def read_frames(data: bytes | BinaryIO) -> Iterator[tuple[bytes, Record | CorruptRecordError]]:
    """Split concatenated frames, yielding each with its record or its error.

    After an error, reading resumes at the next magic. A file is read in pieces, so memory is
    bounded by one frame and one record. The time is linear in the number of bytes, whatever they
    are. Only the first KEPT_BYTES of an unreadable stretch are yielded.
    """
    source = _Source(io.BytesIO(data) if isinstance(data, bytes) else data)
    begin = num_bad = num_wasted = 0
    while begin < source.size and num_wasted <= MAX_WASTE * source.size:
        # If the frame would extend beyond the file, only its header is returned, and `_unframe`
        # rejects the frame as truncated.
        frame = source.read_frame(begin)
        try:
            payload = _unframe(frame)
        except CorruptRecordError as error:
            # The length itself may be damaged, so search for the next frame from the start of this
            # one.
            num_wasted += len(frame)
            num_bad += 1
            end = source.find_frame(begin + 1, only_whole=num_bad >= MAX_BAD_IN_A_ROW)
            if num_bad <= MAX_BAD_IN_A_ROW:
                yield source.read(begin, min(end, begin + KEPT_BYTES)), error
        else:
            # The CRC proves where the next frame begins, even if this frame is unusable.
            end, num_bad = begin + len(frame), 0
            try:
                yield frame, _decode_payload(payload)
            except CorruptRecordError as error:
                yield frame, error
        begin = end


def count_tenant(data: bytes | BinaryIO, name: str) -> int:
    """Count a tenant's records among concatenated frames."""
    records = (record for _, record in read_frames(data) if isinstance(record, Record))
    return sum(record.tenant == name for record in records)


class _Source:
    """A file of frames, read in pieces of PIECE_BYTES or one frame, whichever is larger."""

    PIECE_BYTES = 1 << 20
    START_BYTES = 8
    """Number of bytes that `_HEADER_START` matches."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, io.SEEK_END)
        self._piece, self._piece_begin = b"", 0
        # Lengths that exceed the file's are skipped, because checking each of them would take
        # seconds.
        last_byte = b"%02x" % min(4, self.size >> 24)
        self._whole_start = re.compile(MAGIC + rb"...[\x00-\x" + last_byte + b"]", re.DOTALL)

    def read(self, begin: int, end: int) -> bytes:
        at = begin - self._piece_begin
        if at >= 0 and end <= self._piece_begin + len(self._piece):
            return self._piece[at : at + end - begin]
        self._file.seek(begin)
        # A server may be truncating the file, so fewer bytes than requested may arrive.
        self._piece, self._piece_begin = self._file.read(max(end - begin, self.PIECE_BYTES)), begin
        return self._piece[: end - begin]

    def read_frame(self, begin: int) -> bytes:
        """Return the frame that begins at `begin`, or only its header if the frame is incomplete."""
        header = self.read(begin, min(self.size, begin + _HEADER.size))
        if len(header) < _HEADER.size or not _HEADER_START.match(header):
            return header
        end = begin + _HEADER.size + int(_HEADER.unpack_from(header)[1])
        return self.read(begin, end) if end <= self.size else header

    def find_frame(self, begin: int, *, only_whole: bool) -> int:
        """Return the first offset from `begin` on where a frame may begin, or the file's size.

        With `only_whole`, an offset does not count if its header declares more bytes than the file
        has.
        """
        while begin < self.size:
            self.read(begin, min(self.size, begin + self.START_BYTES))
            pattern = self._whole_start if only_whole else _HEADER_START
            for found in pattern.finditer(self._piece, begin - self._piece_begin):
                place = self._piece_begin + found.start()
                length = int.from_bytes(
                    self._piece[found.start() + 4 : found.start() + 8], "little"
                )
                if not only_whole or place + _HEADER.size + length <= self.size:
                    return place
            piece_end = self._piece_begin + len(self._piece)
            if piece_end >= self.size or not self._piece:
                return self.size
            begin = max(
                begin + 1, piece_end - self.START_BYTES + 1
            )  # a header may span the end of the piece
        return self.size


def _array(data: bytes, dtype: DTypeLike) -> NDArray[Any]:
    # A read-only view of the bytes, without a copy. All dtypes are little-endian on every machine.
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
