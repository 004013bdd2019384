"""Hostile records.

They are frames with a correct CRC and invalid content, and bytes that are not frames.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

import msgspec
import numpy as np
import zstandard

from redraft.online.records.record import MAGIC, Record, Sampling, encode_record

VOCAB, TARGET = 512, "target"

SHAPE = (1, 4)
"""Shape of a token's hidden states in these records: one state of 4 numbers."""


def i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def make_record(number: int = 0, **changes: Any) -> Record:
    """Return a record with 3 prompt tokens and 6 output tokens.

    The first step rejects its second draft token; the second step accepts all.
    """
    rows = 8
    fields: dict[str, Any] = {
        "server_id": "boot",
        "request_id": f"cmpl-{number}",
        "sequence": 0,
        "time_s": 0.0,
        "domain": "code",
        "tenant": "acme",
        "target_fingerprint": TARGET,
        "draft_version": "v000001",
        "sampling": Sampling(),
        "num_prompt_tokens": 3,
        "top_k": 2,
        # The text is 5 6 n | 10 | 11 20 21 22 23 24: prompt, first generated token, output. Step 1
        # starts after 10 (position 3) and drafts 11 12 13: 11 is accepted, and 20 replaces 12. Step
        # 2 drafts 21 22 23, which are all accepted, and 24 is the bonus token.
        "context": i32(5, 6, number % VOCAB, 10),
        "output": i32(11, 20, 21, 22, 23, 24),
        # Each step has 4 rows: 3 draft tokens and the bonus token. In step 1, rows 2 and 3 follow
        # one and two rejected tokens.
        "row_positions": i32(4, 5, 6, 7, 6, 7, 8, 9),
        "row_branches": i32(0, 0, 1, 2, 0, 0, 0, 0),
        "row_drafts": i32(11, 12, 13, -1, 21, 22, 23, -1),
        "row_draft_probs": np.ones(rows, "<f4").tobytes(),
        "row_accepted": bytes([1, 0, 0, 0, 1, 1, 1, 0]),
        "row_topk_ids": i32(11, 1, 20, 2, 30, 3, 31, 4, 21, 5, 22, 6, 23, 7, 24, 8),
        "row_topk_log_probs": np.log(np.tile([0.6, 0.3], rows)).astype("<f4").tobytes(),
        "row_log_sum_exp": np.zeros(rows, "<f4").tobytes(),
        "hidden_shape": SHAPE,
        "hidden": bytes(10 * 2 * SHAPE[0] * SHAPE[1]),
    }
    return Record(**(fields | changes))


def unpack(record: Record) -> dict[str, Any]:
    """Return the record's fields as a map."""
    found: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    return found


def frame_around(payload: bytes, magic: bytes = MAGIC) -> bytes:
    """Return a frame with the correct length and CRC for any payload."""
    return (
        magic
        + len(payload).to_bytes(4, "little")
        + zlib.crc32(payload).to_bytes(4, "little")
        + payload
    )


def pack(fields: Any) -> bytes:
    """Return a frame with any map, compressed like a record."""
    return frame_around(zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(fields)))


def make_later(number: int) -> bytes:
    """Return a frame of a future layout."""
    return frame_around(
        zstandard.compress(msgspec.msgpack.encode({"request": f"cmpl-{number}"})), b"RDR4"
    )


ONE_ROW: dict[str, Any] = {
    "row_branches": i32(0),
    "row_drafts": i32(-1),
    "row_draft_probs": np.ones(1, "<f4").tobytes(),
    "row_accepted": b"\0",
    "row_topk_ids": i32(1, 2),
    "row_topk_log_probs": np.log([0.5, 0.4]).astype("<f4").tobytes(),
    "row_log_sum_exp": i32(0),
}


def make_bomb(number: int = 0) -> bytes:
    """Return about 2 kB that unpack to 60 MB of an otherwise valid record."""
    tokens = 60_000_000 // (4 + 2 * SHAPE[1])  # an id and a hidden state each
    return encode_record(
        make_record(number, context=bytes(4 * tokens), output=i32(1), row_positions=i32(tokens),
                    hidden=bytes(2 * SHAPE[1] * tokens), **ONE_ROW)
    )  # fmt: skip


def make_chain(
    number: int, num_tokens: int, num_segments: int, num_random: int = 0, **changes: Any
) -> list[bytes]:
    """Return a long text, and segments of one token that continue it.

    The text's first ids are random. A segment takes about 400 bytes, and the reader rebuilds it as
    a record of the whole text.
    """
    rest: dict[str, Any] = ONE_ROW | {"hidden": b"", "hidden_shape": (0, 0), "output": i32(5)}
    rest |= changes
    rows = len(rest["row_accepted"])
    ids = np.zeros(num_tokens, "<i4")
    ids[:num_random] = np.random.default_rng(number).integers(0, VOCAB, num_random)
    first = make_record(
        number, context=ids.tobytes(), row_positions=i32(*[num_tokens] * rows), **rest
    )
    later = (
        make_record(number, sequence=sequence, context=b"", context_begin=num_tokens + sequence,
                    row_positions=i32(*[num_tokens + sequence] * rows), **rest)
        for sequence in range(1, num_segments + 1)
    )  # fmt: skip
    return [encode_record(record) for record in (first, *later)]


def make_float8(number: int = 0, num_bytes: int = 60 << 20, **changes: Any) -> bytes:
    """Return a record with float8 hidden states, compressed as far as the reader accepts."""
    size = 4096
    tokens = num_bytes // (size + 4)
    hidden = np.zeros((tokens, size + 4), np.uint8)
    # A payload may unpack to at most 1 MiB plus 64 times its size, so this share is random.
    num_random = tokens // 48
    hidden[:num_random, :size] = np.random.default_rng(number).integers(0, 0x70, (num_random, size))
    return encode_record(
        make_record(number, context=bytes(4 * tokens), output=i32(5), row_positions=i32(tokens),
                    hidden=hidden.tobytes(), hidden_shape=(1, size), hidden_format="float8", **ONE_ROW | changes)
    )  # fmt: skip


def make_flood(first: int, count: int, target: str) -> bytes:
    """Return valid records of one tenant, each of about 30 kB."""
    flood = {"tenant": "flood", "target_fingerprint": target}
    numbers = range(first, first + count)
    return b"".join(make_chain(number, 10_000, 0, 10_000, **flood)[0] for number in numbers)


def make_nested(depth: int) -> bytes:
    """Return a record with an unknown field of nested arrays, `depth` levels deep."""
    plain = msgspec.msgpack.encode(unpack(make_record()) | {"zzz": 0})
    assert plain.endswith(b"\xa3zzz\x00")
    # In msgpack, 0x91 is an array of one element, and 0xc0 is nil.
    return frame_around(zstandard.compress(plain[:-1] + b"\x91" * depth + b"\xc0"))


def make_invalid_utf8() -> bytes:
    plain = msgspec.msgpack.encode(make_record(tenant="acmeacme"))
    return frame_around(zstandard.compress(plain.replace(b"acmeacme", b"acme\xff\xfe\xfdx")))


NUMBERS = (-1, 0, 1, 2, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 0.5)
FLOATS = (
    0.0,
    -0.0,
    1e-40,
    1e-300,
    2.0,
    2.1,
    -1.0,
    1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
)
STRINGS = (
    "",
    "a b",
    "a\nb",
    "\0",
    "x" * 300,
    "x" * 5000,
    "Zürich",
    "\u2028",
    "\U0001f600" * 64,
    "-",
    "../..",
    "NaN",
    "float8",
)


def fuzz(rng: random.Random, number: int, target: str = TARGET) -> bytes:
    """Return one frame, or bytes that are not a frame.

    Most are mutations of a valid frame, usually with a correct CRC.
    """
    fields = unpack(make_record(number, sequence=number, target_fingerprint=target))
    kind = rng.randrange(8)
    if kind < 4:
        for _ in range(rng.choice((1, 1, 2))):
            _mutate(rng, fields)
        return pack(fields)
    plain = bytearray(msgspec.msgpack.encode(fields))
    if kind == 4:  # in the msgpack
        for _ in range(rng.randrange(1, 4)):
            plain[rng.randrange(len(plain))] = rng.randrange(256)
        return frame_around(zstandard.compress(bytes(plain)))
    if kind == 5:  # in the compressed bytes
        payload = bytearray(zstandard.compress(bytes(plain)))
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        return frame_around(bytes(payload))
    frame = pack(fields)
    if kind == 6:
        return frame[: rng.randrange(1, len(frame))]
    return rng.choice(
        (
            rng.randbytes(rng.randrange(1, 400)),
            frame_around(rng.randbytes(rng.randrange(60))),
            MAGIC * 9,
        )
    )


def _mutate(rng: random.Random, fields: dict[str, Any]) -> None:
    name = rng.choice(list(fields))
    value = fields[name]
    if isinstance(value, bytes) and rng.random() < 0.8:
        fields[name] = _mutate_array(rng, name, value)
    elif isinstance(value, dict):
        fields[name] = value | {rng.choice(list(value)): rng.choice((*FLOATS, *NUMBERS, "x", None))}
    elif isinstance(value, list):
        fields[name] = [rng.choice(NUMBERS) for _ in range(rng.choice((2, 2, 2, 1, 3)))]
    elif rng.random() < 0.1:
        del fields[name]
    else:
        same = (
            STRINGS if isinstance(value, str) else FLOATS if isinstance(value, float) else NUMBERS
        )
        fields[name] = rng.choice(
            rng.choice((same, same, same, (*STRINGS, *FLOATS, *NUMBERS, None, [], {}, b"x")))
        )


def _mutate_array(rng: random.Random, name: str, data: bytes) -> bytes:
    """Change the values of an array, in all places or in one, or change its length."""
    if rng.random() < 0.2:
        return (
            data * rng.choice((0, 2))
            if rng.random() < 0.5
            else data[: rng.randrange(len(data) + 1)]
        )
    if name in ("row_draft_probs", "row_topk_log_probs", "row_log_sum_exp"):
        values = np.frombuffer(
            data[: len(data) // 4 * 4], "<f4"
        ).copy()  # it may have been cut off before
        values[_some(rng, values)] = rng.choice(
            (*FLOATS[:-4], -3e38, 3e38, 1e-3, -1e4, *FLOATS[-3:])
        )
        return values.tobytes()
    if name == "hidden":
        words = np.frombuffer(data[: len(data) // 2 * 2], "<u2").copy()
        words[_some(rng, words)] = rng.choice((0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 1, 0x3F80))
        return words.tobytes()
    if name == "row_accepted":
        return rng.randbytes(len(data))
    ids = np.frombuffer(data[: len(data) // 4 * 4], "<i4").copy()
    ids[_some(rng, ids)] = rng.choice((-2, -1, 0, 1, 5, 9, 10, 511, 512, 2**31 - 1, -(2**31)))
    return ids.tobytes()


def _some(rng: random.Random, values: np.ndarray[Any, Any]) -> Any:
    return slice(None) if rng.random() < 0.3 or not len(values) else rng.randrange(len(values))
