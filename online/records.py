"""The record: what one server saw the target say about one segment of one request, and its wire format.

C = context tokens, N = output tokens of the segment, R = rows, K = kept top-k ids, H = tokens with hidden states,
L = hidden states of one token, D = their size.

A row is one distribution of the target: what it says about the token at `positions[r]`, an index into context + output.
A verification step of k draft tokens gives k + 1 rows: one for every draft token, and one for the bonus token behind
them (no draft token: -1). Rows after a rejection hang on draft tokens that were thrown away; they are as true as the
others, only on another text. A record stands alone: a later segment of a long answer carries all text before it.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import DTypeLike, NDArray

MAGIC = b"RDR1"
"""Opens every frame; the digit is the version of the layout."""

MAX_RECORD_BYTES = 64 << 20
"""Bound of a decompressed record, so that a damaged or hostile frame can not fill the memory."""

NO_HIDDEN = np.empty((0, 0, 0), np.uint16)

_HEADER = struct.Struct("<4sII")


class CorruptRecordError(ValueError):
    """A frame that is torn, bit-flipped, of another version, or inconsistent in itself."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the request was sampled. The distributions of a record are those *before* all of this."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of one request. Fields of type bytes are little-endian arrays: read them through the properties."""

    server_id: str
    """Of one boot of one server."""
    request_id: str
    sequence: int
    """Which segment of the request, from 0."""
    time_s: float
    """When the segment ended, seconds since the epoch."""
    domain: str = ""
    tenant: str = ""
    target_fingerprint: str
    draft_version: str = ""
    """Version that proposed the draft tokens."""
    sampling: Sampling
    num_prompt_tokens: int
    """The first tokens of the context are the prompt, the same in every segment of a request."""
    top_k: int
    context: bytes
    """int32 [C], everything before the segment's output."""
    output: bytes
    """int32 [N]."""
    row_positions: bytes
    """int32 [R], index into context + output of the token that the row predicts."""
    row_branches: bytes
    """int32 [R], how many rejected draft tokens the row's context ends with: those of as many rows before it."""
    row_drafts: bytes
    """int32 [R], the draft's token, -1 where there was none (bonus token; a server without speculation)."""
    row_draft_probs: bytes
    """float32 [R], probability with which it was proposed: 1 where drafting is greedy, NaN where there was none."""
    row_accepted: bytes
    """uint8 [R], 1 where the draft token was accepted."""
    row_topk_ids: bytes
    """int32 [R, K], by falling probability."""
    row_topk_log_probs: bytes
    """float32 [R, K], natural logarithms under the full softmax at temperature 1."""
    row_log_sum_exp: bytes
    """float32 [R], of the logits, so that logit = log-probability + this; NaN where the server does not tell."""
    hidden_begin: int = 0
    """Index of the first token that has hidden states; those behind it have them without a gap. What was cached of the
    text before, or shipped with an earlier segment, has none."""
    hidden_shape: tuple[int, int] = (0, 0)
    """L and D. What the served draft reads of the target: EAGLE-3 the streams after layers, others the last, normed."""
    hidden: bytes = b""
    """bfloat16 [H, L, D]; empty where none were captured."""

    @property
    def record_id(self) -> str:
        """32 hex digits that follow from server, request and sequence number: a second delivery has the same."""
        name = msgspec.msgpack.encode((self.server_id, self.request_id, self.sequence))
        return hashlib.sha256(name).hexdigest()[:32]

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
    def topk_ids(self) -> NDArray[np.int32]:
        return _array(self.row_topk_ids, np.int32).reshape(-1, self.top_k)

    @property
    def topk_log_probs(self) -> NDArray[np.float32]:
        return _array(self.row_topk_log_probs, np.float32).reshape(-1, self.top_k)

    @property
    def log_sum_exp(self) -> NDArray[np.float32]:
        return _array(self.row_log_sum_exp, np.float32)

    @property
    def hidden_words(self) -> NDArray[np.uint16]:
        """The bits of the hidden states: numpy knows no bfloat16. [H, L, D]."""
        return _array(self.hidden, np.uint16).reshape(-1, *self.hidden_shape) if self.hidden else NO_HIDDEN


def encode(record: Record) -> bytes:
    """One frame: magic, length and CRC-32 of the payload, payload = zstd(msgpack)."""
    payload = zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(record))
    return _HEADER.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


class Frame(bytes):
    """An encoded record that says what its way to the learner has to know of it."""

    record_id: str
    domain: str


def frame_of(record: Record) -> Frame:
    frame = Frame(encode(record))
    frame.record_id, frame.domain = record.record_id, record.domain
    return frame


def decode(frame: bytes) -> Record:
    """The record in one frame.

    Raises:
        CorruptRecordError: torn, bit-flipped, of another version, or inconsistent in itself.
    """
    if len(frame) < _HEADER.size or frame[:4] != MAGIC:
        raise CorruptRecordError(f"not a record of version {MAGIC.decode()}: it begins with {frame[:4]!r}")
    _, length, crc = _HEADER.unpack_from(frame)
    payload = frame[_HEADER.size :]
    if len(payload) != length:
        raise CorruptRecordError(f"torn record: {len(payload)} of {length} payload bytes")
    if zlib.crc32(payload) != crc:
        raise CorruptRecordError("bit-flipped record: its CRC does not agree")
    try:
        record = msgspec.msgpack.decode(_decompressed(payload), type=Record)
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise CorruptRecordError(f"unreadable record: {error}") from error
    _check(record)
    return record


class _Decompressors(threading.local):
    """One a thread: making it costs a quarter of using it."""

    def __init__(self) -> None:
        self.own = zstandard.ZstdDecompressor()


_decompressors = _Decompressors()


def _decompressed(payload: bytes) -> bytes:
    """Raises: CorruptRecordError; zstandard.ZstdError."""
    if zstandard.frame_content_size(payload) > MAX_RECORD_BYTES:  # a size that is written there wins over the bound
        raise CorruptRecordError(f"oversized record: more than {MAX_RECORD_BYTES} bytes")
    content: bytes = _decompressors.own.decompress(payload, max_output_size=MAX_RECORD_BYTES)
    return content


def read_frames(data: bytes) -> Iterator[tuple[bytes, Record | CorruptRecordError]]:
    """Every frame of concatenated frames with its record, or with what is wrong with it; goes on at the next magic."""
    begin = 0
    while begin < len(data):
        end = _frame_end(data, begin)
        frame = data[begin:end]
        try:
            yield frame, decode(frame)
        except CorruptRecordError as error:
            # The length itself may be what is damaged.
            end = data.find(MAGIC, begin + 1)
            end = len(data) if end < 0 else end
            yield data[begin:end], error
        begin = end


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """A text and the rows of it that the target labelled. T = tokens, R = rows, K = top-k."""

    input_ids_T: NDArray[np.int32]
    rows_R: NDArray[np.int64]
    """Index into the text: row t holds what the target says about token t + 1, having read tokens 0..t."""
    topk_ids_RK: NDArray[np.int32]
    topk_log_probs_RK: NDArray[np.float32]
    draft_ids_R: NDArray[np.int32]
    accepted_R: NDArray[np.bool_]
    is_branch: bool
    hidden_begin: int = 0
    hidden_HLD: NDArray[np.uint16] = field(default_factory=lambda: NO_HIDDEN)
    """bfloat16, of the tokens from `hidden_begin` on; a branch has none."""


def training_sequences(record: Record, *, branches: bool = True) -> list[TrainingSequence]:
    """The segment's own text with its rows first, then one sequence for every rejected branch.

    A step that rejects draft token a of 0..k-1 leaves its rows a+1..k hanging on rejected tokens. Together they are
    one further text: all tokens before the rejection, then the draft tokens a..k-1. Its rows are those k - a rows.
    """
    text_T = np.concatenate([record.context_ids, record.output_ids])
    hanging_R = record.branches
    whole = _sequence(record, text_T, np.flatnonzero(hanging_R == 0), is_branch=False)
    sequences = [replace(whole, hidden_begin=record.hidden_begin, hidden_HLD=record.hidden_words)]
    if branches:
        for begin in np.flatnonzero(hanging_R == 1):
            end = begin + 1
            while end < len(hanging_R) and hanging_R[end] == hanging_R[end - 1] + 1:
                end += 1
            rejected_at = record.positions[begin] - 1
            branch_T = np.concatenate([text_T[:rejected_at], record.draft_ids[begin - 1 : end - 1]])
            sequences.append(_sequence(record, branch_T, np.arange(begin, end), is_branch=True))
    return sequences


def _sequence(record: Record, text_T: NDArray[np.int32], rows: NDArray[Any], *, is_branch: bool) -> TrainingSequence:
    return TrainingSequence(
        input_ids_T=text_T,
        rows_R=record.positions[rows].astype(np.int64) - 1,
        topk_ids_RK=record.topk_ids[rows],
        topk_log_probs_RK=record.topk_log_probs[rows],
        draft_ids_R=record.draft_ids[rows],
        accepted_R=record.accepted[rows],
        is_branch=is_branch,
    )


def _array(data: bytes, dtype: DTypeLike) -> NDArray[Any]:
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def _frame_end(data: bytes, begin: int) -> int:
    if len(data) - begin < _HEADER.size:
        return len(data)
    return min(len(data), begin + _HEADER.size + int(_HEADER.unpack_from(data, begin)[1]))


def _check(record: Record) -> None:
    """What CRC and types can not see: lengths that agree, and rows that lie in the text."""
    rows = len(record.row_positions) // 4
    wanted = {
        "row_positions": 4 * rows,
        "row_branches": 4 * rows,
        "row_drafts": 4 * rows,
        "row_draft_probs": 4 * rows,
        "row_accepted": rows,
        "row_topk_ids": 4 * rows * record.top_k,
        "row_topk_log_probs": 4 * rows * record.top_k,
        "row_log_sum_exp": 4 * rows,
    }
    for name, size in wanted.items():
        if len(getattr(record, name)) != size:
            raise CorruptRecordError(f"inconsistent record: {name} has {len(getattr(record, name))} bytes, not {size}")
    if record.top_k < 1 or len(record.context) % 4 or len(record.output) % 4:
        raise CorruptRecordError("inconsistent record: top_k below 1, or a text that is not whole int32")
    context_tokens, tokens = len(record.context) // 4, (len(record.context) + len(record.output)) // 4
    if not 0 <= record.num_prompt_tokens <= context_tokens:
        raise CorruptRecordError(f"inconsistent record: {record.num_prompt_tokens} of {context_tokens} are the prompt")
    num_hidden, rest = divmod(len(record.hidden), max(1, 2 * math.prod(record.hidden_shape)))
    if record.hidden and (min(record.hidden_shape) < 1 or rest or not 0 <= record.hidden_begin <= tokens - num_hidden):
        raise CorruptRecordError("inconsistent record: its hidden states are not those of its tokens")
    hanging_R = record.branches
    follows_R = np.concatenate([[0], hanging_R[:-1] + 1])
    is_next_R = (np.diff(record.positions) == 1) & (record.draft_ids[:-1] != -1)
    is_behind_draft_R = np.concatenate([[False], is_next_R])[:rows]
    if ((hanging_R != 0) & ((hanging_R != follows_R) | ~is_behind_draft_R)).any():
        raise CorruptRecordError("inconsistent record: a row hangs on draft tokens that are not before it")
    known_R = record.positions - hanging_R
    if ((known_R < 1) | (known_R > tokens)).any():
        raise CorruptRecordError(f"inconsistent record: a row outside its text of {tokens} tokens")
