"""Hostile spools and logs.

Whatever bytes arrive, the learner goes on, loses no good record and holds little memory.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import socket
import stat
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import msgspec
import nats
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.soak import poison
from benchmarks.soak.poison import (
    SHAPE,
    TARGET,
    VOCAB,
    frame_around,
    i32,
    make_later,
    make_record,
    pack,
)
from redraft.engine.counts import AcceptanceCounts
from redraft.heads.families.standalone import StandaloneDraft
from redraft.online.journal import AcceptanceEntry, Journal
from redraft.online.learning import quarantine as quarantine_module
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.buffer_file import BufferFullError
from redraft.online.learning.config import BufferConfig, Replay
from redraft.online.learning.intake import BATCH_BYTES, Spool, store
from redraft.online.learning.quarantine import Quarantine
from redraft.online.learning.replay import make_batches, select_texts
from redraft.online.learning.scoring import RequestScore, pair_scores, score
from redraft.online.learning.stream import StreamSource
from redraft.online.page.telemetry import DROP_REASONS
from redraft.online.records.nats_config import Nats, StreamLimits
from redraft.online.records.record import (
    CorruptRecordError,
    Record,
    Sampling,
    decode_record,
    encode_record,
    read_frames,
)
from redraft.online.records.spool import ABANDONED_S

GIB = 1 << 30
fleets = count()


@pytest.fixture
def buffer(tmp_path):
    with Buffer(BufferConfig(folder=tmp_path / "buffer", held_out_fraction=0), TARGET) as buffer:
        yield buffer


@pytest.fixture
def spool(tmp_path):
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


def put(spool, data, number=0):
    (spool / f"{number:020d}-boot-00000000.records").write_bytes(data)


def names(buffer):
    return [stored.record.request_id for stored in buffer.fresh(0, 1 << 20)]


def find_reason(frame):
    """The reason that a frame is refused for; empty if it is a record."""
    ((_, found),) = read_frames(frame)
    return found.reason if isinstance(found, CorruptRecordError) else ""


# --- one record


def test_the_record_of_these_tests_is_good():
    assert decode_record(encode_record(make_record())) == make_record()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"draft_version": "a b"}, "bad_identifier"),
        ({"draft_version": "a\u2003b"}, "bad_identifier"),
        ({"draft_version": "x" * 300}, "bad_identifier"),
        ({"draft_version": "v\x1b[2J"}, "bad_identifier"),
        ({"target_version": "v\x9b2J"}, "bad_identifier"),
        ({"server_id": "a\x7f"}, "bad_identifier"),
        ({"domain": "x" * 65}, "bad_identifier"),
        ({"tenant": "x" * 65}, "bad_identifier"),
        ({"tenant": "a\0"}, "bad_identifier"),
        ({"request_id": "x" * 5000}, "bad_identifier"),
        ({"request_id": "a\nb"}, "bad_identifier"),
        ({"server_id": "x" * 201}, "bad_identifier"),
        ({"target_fingerprint": "x" * 201}, "bad_identifier"),
        ({"sequence": -1}, "corrupt"),
        ({"time_s": float("nan")}, "corrupt"),
        ({"hidden_begin": 2**62, "hidden": b""}, "corrupt"),
        ({"hidden_shape": (2**62, 2**62), "hidden": b""}, "corrupt"),
        ({"hidden_shape": (-1, -4)}, "corrupt"),
        ({"row_topk_log_probs": np.full(16, -np.inf, "<f4").tobytes()}, "bad_probabilities"),
        ({"row_topk_log_probs": np.full(16, np.nan, "<f4").tobytes()}, "bad_probabilities"),
        ({"row_log_sum_exp": np.full(8, np.inf, "<f4").tobytes()}, "bad_probabilities"),
        ({"row_draft_probs": np.full(8, np.inf, "<f4").tobytes()}, "bad_probabilities"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else change,
)
def test_a_record_with_an_impossible_value_is_refused_with_a_reason(changes, reason):
    assert find_reason(encode_record(make_record(**changes))) == reason


@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_a_hidden_state_that_is_not_finite_is_refused(word):
    words = np.zeros(40, "<u2")
    words[17] = word
    assert find_reason(encode_record(make_record(hidden=words.tobytes()))) == "not_finite"
    words[17] = 0x7F7F  # the largest bfloat16
    assert find_reason(encode_record(make_record(hidden=words.tobytes()))) == ""


@pytest.mark.parametrize(
    ("name", "refused", "taken"),
    [
        ("temperature", (-0.1, 2.1), (0.0, 1e-40, 2.0)),
        ("top_p", (0.0, 1.1, -1.0), (1e-9, 1.0)),
        ("top_k", (-2,), (-1, 0, 1, 10**9)),
        ("min_p", (-0.1, 1.1), (0.0, 1.0)),
        ("presence_penalty", (-2.1, 2.1), (-2.0, 2.0)),
        ("frequency_penalty", (-2.1, 2.1), (-2.0, 2.0)),
        ("repetition_penalty", (0.0, -1.0), (1e-9, 1e20)),
    ],
)
def test_sampling_parameters_are_taken_as_vllm_takes_them(name, refused, taken):
    floats = (float("nan"), float("inf"), float("-inf")) if name != "top_k" else ()
    for value in (*refused, *floats):
        assert (
            find_reason(encode_record(make_record(sampling=Sampling(**{name: value}))))
            == "bad_sampling"
        ), value
    for value in taken:
        assert find_reason(encode_record(make_record(sampling=Sampling(**{name: value})))) == "", (
            value
        )


@pytest.mark.parametrize(
    "frame",
    [
        poison.make_invalid_utf8(),
        poison.make_nested(100_000),
        pack(poison.unpack(make_record()) | {"top_k": 2**62}),
        pack(poison.unpack(make_record(row_positions=b"", row_branches=b"", row_drafts=b"", row_draft_probs=b"",
             row_accepted=b"", row_topk_ids=b"", row_topk_log_probs=b"", row_log_sum_exp=b"")) | {"top_k": 2**62}),
        pack(poison.unpack(make_record()) | {"sequence": 2**64 - 1}),
        pack([]),
        frame_around(b""),
        frame_around(b"\x28\xb5\x2f\xfd"),
    ],
    ids=["utf8", "nested", "top_k", "top_k-no-rows", "sequence", "no-map", "empty", "zstd-magic"],
)  # fmt: skip
def test_a_frame_with_a_right_crc_raises_nothing_but_corrupt_record_error(frame):
    with pytest.raises(CorruptRecordError) as error:
        decode_record(frame)
    assert error.value.reason == "corrupt"


def test_every_record_that_decodes_can_be_journaled(tmp_path):
    """The learner journals the domain and the version of every record."""
    journal, rng = Journal(tmp_path), random.Random(3)
    for name in (
        *poison.STRINGS,
        *("".join(map(chr, rng.choices(range(1, 0x3000), k=5))) for _ in range(500)),
    ):
        record = make_record(draft_version=name, domain=name)
        if not find_reason(encode_record(record)):
            journal.write(
                AcceptanceEntry(
                    draft_version=name or "none", domain=name, drafts=1, accepted=1, tau=2.0
                )
            )


# --- many bytes


def measure_cpu_s(work):
    """(CPU seconds, result): the time by a clock says little on a busy machine."""
    began_s = time.process_time()
    result = work()
    return time.process_time() - began_s, result


@pytest.mark.parametrize(
    "stretch",
    [
        b"RDR1",
        b"RDR4",
        b"RDR1abc\x03",
        b"RDR1" + (50 << 20).to_bytes(4, "little") + b"abcd",
        b"RDR1" + (4 << 20).to_bytes(4, "little") + b"abcd",
        b"\0",
    ],
    ids=["magic", "other-magic", "header", "torn", "overlapping", "zeros"],
)
def test_eight_megabytes_of_anything_are_read_in_two_seconds(stretch):
    data = stretch * ((8 << 20) // len(stretch))
    seconds, found = measure_cpu_s(lambda: list(read_frames(data)))
    assert seconds < 2
    assert 1 <= len(found) <= 16
    assert all(isinstance(error, CorruptRecordError) for _, error in found)


def test_reading_takes_time_in_proportion_to_the_bytes():
    """Bytes that are looked at are counted.

    Time on a busy machine says little.
    """
    header = b"RDR1" + (1 << 18).to_bytes(4, "little") + b"abcd"
    looked_at = []
    for size in (1 << 20, 4 << 20):
        file = CountingFile(header * (size // len(header)))
        list(read_frames(file))
        looked_at.append(file.num_read)
    assert looked_at[1] < 5 * looked_at[0] < 5 * 10 * (1 << 20)


class CountingFile:
    def __init__(self, data):
        self.data, self.at, self.num_read = data, 0, 0

    def seek(self, offset, whence=0):
        self.at = offset + (len(self.data) if whence == 2 else 0)
        return self.at

    def read(self, size):
        found = self.data[self.at : self.at + size]
        self.num_read += len(found)
        return found


def test_good_records_between_any_bytes_are_all_found():
    """Records lie between garbage.

    Also where garbage, a flipped bit or half a frame lies across the pieces in which a file is
    read.
    """
    rng, parts = random.Random(1), []
    frames = [encode_record(make_record(number)) for number in range(3000)]
    for frame in frames:
        kind = rng.randrange(6)
        if kind == 0:
            parts.append(rng.randbytes(rng.randrange(2000)))
        elif kind == 1:
            parts.append(frame[: rng.randrange(len(frame))])
        elif kind == 2:
            parts.append(b"RDR1" * rng.randrange(50))
        elif kind == 3:
            parts.append(make_later(0))
        parts.append(frame)
    found = [record for _, record in read_frames(b"".join(parts))]
    assert [record.request_id for record in found if isinstance(record, Record)] == [
        f"cmpl-{n}" for n in range(3000)
    ]


def test_a_bad_frame_whose_crc_is_right_is_passed_over_as_a_whole():
    bad = encode_record(make_record(draft_version="a b"))
    inner = encode_record(make_record(7))
    hidden_inside = frame_around(inner)  # a frame in a frame is nobody's record
    found = list(read_frames(bad * 100 + hidden_inside + encode_record(make_record(1))))
    assert [error.reason for _, error in found[:-1]] == ["bad_identifier"] * 100 + ["corrupt"]
    assert found[-1][1].request_id == "cmpl-1"


# --- ten thousand


@pytest.fixture(scope="module")
def fuzzed():
    rng = random.Random(22)
    return [poison.fuzz(rng, number) for number in range(10_000)]


def test_ten_thousand_hostile_records_from_the_spool_cost_only_themselves(
    fuzzed, buffer, spool, random_target
):
    good = [encode_record(make_record(number, server_id="good")) for number in range(100)]
    for file, begin in enumerate(range(0, 10_000, 100)):
        put(spool, b"".join([*fuzzed[begin : begin + 100], good[file]]), file)
    source, counts = Spool(spool, buffer, VOCAB), Counter()
    while (taken := source.take(1.0)).counts:
        counts += taken.counts
    stored = buffer.fresh(0, 1 << 20)
    assert {one.record.request_id for one in stored if one.record.server_id == "good"} == {
        f"cmpl-{number}" for number in range(100)
    }
    assert set(counts) <= {"stored", "duplicate", "foreign", *DROP_REASONS}
    wanted = {
        "corrupt",
        "bad_identifier",
        "bad_sampling",
        "bad_probabilities",
        "not_finite",
        "outside_vocabulary",
    }
    assert wanted <= set(counts)
    assert counts.total() > 9_000, "each one is counted; adjoining fragments of frames are one"
    assert not list(spool.iterdir())
    require_trainable([one.record for one in stored], random_target)


def with_states(record):
    """The record with a state of zeros for every token but the last."""
    hidden = bytes(2 * math.prod(SHAPE) * (record.num_tokens - 1))
    states = {
        "hidden_begin": 0,
        "hidden_shape": SHAPE,
        "hidden_format": "bfloat16",
        "hidden": hidden,
    }
    return msgspec.structs.replace(record, **states)


def require_trainable(records, random_target):
    """All of what was stored can be put into batches, drafted for, and scored as finite numbers."""
    for reads in ("nothing", "last"):
        # The buffer has kept no hidden states, so every record gets some for the head.
        readable = records if reads == "nothing" else [with_states(record) for record in records]
        for begin in range(0, len(readable), 32):
            texts = select_texts(readable[begin : begin + 32])
            make_batches(texts, num_batches=1, sequence_length=64, seed=0, reads=reads)
    draft = StandaloneDraft(LlamaForCausalLM.from_pretrained(random_target)).eval()
    for method in ("greedy", "probabilistic"):
        odd = [record for record in records if record.sampling != Sampling()][:150]
        odd += random.Random(0).sample(records, 150)
        scored = score(draft, odd, num_speculative_tokens=2, method=method, sequence_length=64)
        numbers = np.array([(one.num_drafts, one.num_accepted) for one in scored])
        assert np.isfinite(numbers).all()
        assert (numbers >= 0).all()
        assert (numbers[:, 1] <= 2 * numbers[:, 0] + 1e-4).all()


class FakeMessage:
    """A message of JetStream, as far as the learner uses it."""

    def __init__(self, data, deliveries=1):
        self.data, self.metadata, self.answers = data, SimpleNamespace(num_delivered=deliveries), []

    async def ack(self):
        self.answers.append("ack")

    async def nak(self, delay=None):
        self.answers.append(f"nak {delay}")


def take_messages(messages, buffer):
    """`take` of a learner's end of the log to which these messages have arrived."""

    async def take():
        source = StreamSource(
            "nats://127.0.0.1:1", Nats(), StreamLimits(max_bytes=1 << 30), buffer, VOCAB
        )

        async def following():
            return messages

        source._pull = SimpleNamespace(next=following)
        return await source.take()

    return asyncio.run(take())


def test_ten_thousand_hostile_messages_of_the_log_cost_only_themselves(fuzzed, buffer):
    counts = Counter()
    for begin in range(0, 10_000, 250):
        good = make_record(begin, server_id="good")
        messages = [
            FakeMessage(data) for data in (*fuzzed[begin : begin + 250], encode_record(good))
        ]
        counts += take_messages(messages, buffer).counts
        assert all(message.answers == ["ack"] for message in messages)
    assert counts["stored"] >= 40
    assert counts.total() >= 10_000, "each one is counted"
    assert sum(stored.record.server_id == "good" for stored in buffer.fresh(0, 1 << 20)) == 40


def test_invented_domains_and_versions_are_counted_together_beyond_a_number(buffer):
    frames = [
        encode_record(make_record(n, domain=f"d{n % 50}", draft_version=f"v{n}"))
        for n in range(400)
    ]
    taken = store(read_frames(b"".join(frames)), buffer, VOCAB, 0.0)
    assert len(taken.accepted) == 257
    assert len((taken + taken).accepted) == 257
    assert sum(one.num_drafts for one in taken.accepted.values()) == 800


# --- memory


def peak_bytes(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_bombs_are_not_unpacked(buffer):
    bomb = poison.make_bomb()
    assert len(bomb) < 20_000
    assert find_reason(bomb) == "oversized"
    messages = [FakeMessage(bomb) for _ in range(256)]
    assert peak_bytes(lambda: take_messages(messages, buffer)) < 32 << 20
    assert buffer.counts["oversized"] == 256


def make_large(number, num_bytes=8 << 20):
    """A record with this much of hidden states, which compress to about a tenth.

    That is within the bound.
    """
    tokens = num_bytes // 2 // SHAPE[1]
    words = np.random.default_rng(number).choice(np.array([0x3F80, 0x3C00], "<u2"), num_bytes // 2)
    return make_record(number, context=i32(5, 6, number, 10) + bytes(4 * tokens), hidden=words.tobytes(),
                       hidden_begin=10, row_positions=i32(*range(tokens + 4, tokens + 10), tokens + 9, tokens + 9),
                       row_branches=bytes(32))  # fmt: skip


def test_a_batch_is_bounded_in_bytes(buffer):
    frames = [encode_record(make_large(number)) for number in range(24)]
    (_, first), *_ = read_frames(frames[0])
    assert first.num_bytes > 12_000_000, "together they would have 300 MB"
    batches = []
    append = buffer.append
    buffer.append = lambda batch, now_s: batches.append(len(batch)) or append(batch, now_s)
    peak = peak_bytes(lambda: store(read_frames(b"".join(frames)), buffer, VOCAB, 0.0))
    assert sum(batches) == 24
    assert max(batches) <= BATCH_BYTES // first.num_bytes
    assert peak < 200 << 20


def test_steps_and_the_gate_read_a_bounded_number_of_bytes_at_a_time(tmp_path):
    config = BufferConfig(folder=tmp_path / "buffer", held_out_fraction=0.5, max_read_bytes=100_000)
    states = np.random.default_rng(0).integers(0, 0x7000, 4 * 4000, "<u2").tobytes()
    records = [make_record(n, context=i32(5, 6, n) + bytes(4 * 4000), hidden=states, row_positions=i32(*range(8, 16)),
                           row_branches=bytes(32)) for n in range(60)]  # fmt: skip
    assert records[0].num_bytes > 40_000
    with Buffer(config, TARGET, SHAPE) as buffer:
        store(read_frames(b"".join(map(encode_record, records))), buffer, VOCAB, 0.0)
        first, replayed = (
            buffer.fresh(0, 32),
            buffer.replay(28, through=99, now_s=0, seed=0, policy=Replay()),
        )
        assert len(first) == len(replayed) == 2
        assert len(buffer.fresh(first[-1].seq, 32)) == 2, "the others come with the next step"
        seqs = buffer.select_held_out(200)
        assert len(seqs) > 15
        assert peak_bytes(lambda: [None for _ in buffer.read(seqs)]) < 6 * records[0].num_bytes
    with Buffer(replace(config, max_read_bytes=1), TARGET, SHAPE) as buffer:
        assert len(buffer.fresh(0, 32)) == 1, "a record above the bound is read all the same"
    with Buffer(config, TARGET) as buffer:
        assert len(buffer.fresh(0, 32)) == 6, (
            "a draft that reads no hidden states is not slowed down by them"
        )


LARGEST = """
import re, sys
from pathlib import Path
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.buffer_file import BufferFullError
from redraft.online.learning.config import BufferConfig, Replay
from redraft.online.learning.intake import Spool
folder = Path(sys.argv[1])
def print_peak():
    # Not getrusage: after a fork its maximum includes the parent's.
    print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]))
with Buffer(BufferConfig(folder=folder / "buffer", held_out_fraction=0.5), "target", (1, 4)) as buffer:
    counts = Spool(folder / "spool", buffer, 512).take(0.0).counts
    assert counts["stored"] == 12 and counts["oversized"] == 256, counts
    print_peak()
    read = [buffer.fresh(0, 4), buffer.replay(28, through=10**9, now_s=0.0, seed=0, policy=Replay())]
    assert all(read)
    del read
    assert sum(1 for _ in buffer.read(buffer.select_held_out(200))) > 1
print_peak()
"""


@pytest.mark.slow
def test_the_largest_records_and_bombs_stay_below_a_gibibyte(tmp_path, spool):
    """12 records of 60 MB each in one file, and 256 bombs of as much."""
    with (spool / f"{0:020d}-boot-00000000.records").open("wb") as file:
        for number in range(12):
            file.write(encode_record(make_large(number, 40 << 20)))
        file.write(poison.make_bomb() * 256)
    run = subprocess.run(
        [sys.executable, "-c", LARGEST, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert sum(map(int, run.stdout.split())) < GIB, (
        "intake and training may be at their peaks at the same time"
    )


def make_every_layout():
    """Frames of every layout whose memory is out of proportion to their bytes.

    Those of the server `good` can be kept.
    """
    chain = poison.make_chain(1, (16 << 20) // 4, 100, 160_000)
    assert sum(map(len, chain)) < 320_000, "joined they would have 1.6 GB"
    states = poison.make_float8(98, server_id="good")
    assert not find_reason(states), "1 MB that unpack to 60 MB, as far as is taken"
    yield encode_record(make_record(0, server_id="good"))
    yield from chain
    for number in range(2, 50):  # in each of these, 1 MiB of text is joined for 400 bytes
        yield from poison.make_chain(number, (1 << 20) // 4 - 200, 1)
    yield from poison.make_chain(
        50, (60 << 20) // 4, 3, 600_000, target_version="step-3@0123456789ab"
    )
    yield states
    yield poison.make_bomb()
    yield poison.make_nested(100_000)
    yield make_later(1)
    yield encode_record(make_record(99, server_id="good"))


WITHIN = """
import asyncio, re, resource, sys
from pathlib import Path
from types import SimpleNamespace
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.intake import Spool
from redraft.online.learning.stream import StreamSource
from redraft.online.records.nats_config import Nats, StreamLimits
folder, door = Path(sys.argv[1]), sys.argv[2]
async def answer(delay=0):
    pass
async def take(buffer, frames):
    source = StreamSource("nats://127.0.0.1:1", Nats(), StreamLimits(), buffer, 512)
    async def arrived():
        metadata = SimpleNamespace(num_delivered=1)
        return [SimpleNamespace(data=data, metadata=metadata, ack=answer, nak=answer) for data in frames]
    source._pull = SimpleNamespace(next=arrived)
    await source.take()
frames = [path.read_bytes() for path in sorted((folder / "frames").iterdir())] if door == "log" else []
used = int(re.search(r"VmSize:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
with Buffer(BufferConfig(folder=folder / door, held_out_fraction=0), "target") as buffer:
    if door == "log":
        asyncio.run(take(buffer, frames))
    else:
        Spool(folder / "spool", buffer, 512).take(0.0)
    seqs = buffer._training()["seq"].tolist()
    print(sum(stored.record.server_id == "good" for stored in buffer.read(seqs)), len(seqs))
    print(sum(path.stat().st_size for path in (folder / door).iterdir() if path.is_file()))
"""


@pytest.mark.parametrize("door", ["spool", "log"])
def test_no_frame_of_any_layout_takes_more_than_half_a_gibibyte(tmp_path, spool, door):
    frames = list(make_every_layout())
    (tmp_path / "frames").mkdir()
    for number, frame in enumerate(frames):
        (tmp_path / "frames" / f"{number:04d}").write_bytes(frame)
    put(spool, b"".join(frames))
    run = subprocess.run(
        [sys.executable, "-c", WITHIN, str(tmp_path), door], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    good, stored, num_bytes = map(int, run.stdout.split())
    assert good == 3, "large states, and what lies before and behind"
    assert stored > 90, "a text of a MiB may be continued by a few bytes"
    assert num_bytes < 80 << 20


def test_the_segments_of_a_request_are_joined_in_proportion_to_its_frames(tmp_path):
    tokens, rows = (1 << 20) // 4, 512  # as servers cut them
    rng = np.random.default_rng(0)
    served = {name: value * rows for name, value in poison.ONE_ROW.items()} | {
        "top_k": 8,
        "row_topk_ids": rng.integers(0, VOCAB, 8 * rows, "<i4").tobytes(),
        "row_topk_log_probs": (-rng.random(8 * rows, "<f4")).tobytes(),
    }
    cheap = poison.make_chain(1, 4 * tokens, 60, 60_000, domain="cheap")
    honest = poison.make_chain(2, tokens, 60, tokens, domain="honest", **served)
    config = BufferConfig(folder=tmp_path / "buffer", held_out_fraction=0)
    for begin in range(0, 61, 20):  # the room is counted over batches and a restart
        with Buffer(config, TARGET) as buffer:
            for frames in (cheap, honest):
                store(read_frames(b"".join(frames[begin : begin + 20])), buffer, VOCAB, 0.0)
    with Buffer(config, TARGET) as buffer:
        assert buffer.status().num_training == {"cheap": 2, "honest": 61}


def test_a_full_disk_takes_no_room_from_a_request(buffer, monkeypatch):
    frames = list(read_frames(b"".join(poison.make_chain(1, (512 << 10) // 4, 3, 1000))))
    buffer.append(frames[:1], 0.0)

    def refuse(*_):
        raise BufferFullError

    with monkeypatch.context() as full:
        full.setattr(buffer._files, "insert", refuse)
        for _ in range(20):
            with pytest.raises(BufferFullError):
                buffer.append(frames[1:2], 0.0)
    assert buffer.append(frames[1:2], 0.0) == {"stored": 1}


# --- the spool's files


def test_what_is_no_file_of_records_stalls_nothing(buffer, spool, tmp_path):
    os.mkfifo(spool / "00000000000000000000-pipe.records")
    (spool / "00000000000000000001-folder.records").mkdir()
    (spool / "00000000000000000002-loop.records").symlink_to("00000000000000000002-loop.records")
    (spool / "00000000000000000003-link.records").symlink_to("/dev/zero")
    put(spool, b"", 4)
    put(spool, encode_record(make_record(1)), 5)
    source = Spool(spool, buffer, VOCAB)
    taken = source.take(0.0)
    assert taken.counts == {"spool_unreadable": 4, "stored": 1, "corrupt": 1}, (
        "an empty file is told, and goes"
    )
    assert buffer.status().counts["spool_unreadable"] == 4
    assert not source.take(0.0).counts, "they are counted once"
    put(spool, encode_record(make_record(2)), 6)
    assert source.take(0.0, max_files=1).counts == {"stored": 1}, "and no file waits for them"


def test_a_file_that_cannot_be_removed_does_not_hold_up_the_next(buffer, spool, monkeypatch):
    put(spool, encode_record(make_record(1)), 1)
    put(spool, encode_record(make_record(2)), 2)
    unlink = type(spool).unlink

    def refuse_first(path, missing_ok=False):
        if path.name.startswith(f"{1:020d}"):
            raise PermissionError(1, "not yours")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(type(spool), "unlink", refuse_first)
    source = Spool(spool, buffer, VOCAB)
    with pytest.raises(PermissionError):
        source.take(0.0)
    assert source.take(0.0).counts == {"stored": 1}
    assert names(buffer) == ["cmpl-1", "cmpl-2"]


# --- other layouts, and what is no file


@pytest.mark.parametrize("name", ["9-x.records", ".9-x.records.partial"])
@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "pipe", "folder"])
def test_whatever_lies_in_the_spool_nothing_outside_of_it_is_overwritten(
    buffer, spool, tmp_path, kind, name
):
    """Who may write to the spool must not reach the other files of the learner's user."""
    precious = tmp_path / "precious.key"
    precious.write_bytes(b"secret" * 100)
    trap = spool / name
    match kind:
        case "symbolic link":
            trap.symlink_to(precious)
        case "hard link":
            trap.hardlink_to(precious)
        case "pipe":
            os.mkfifo(trap)
        case "folder":
            trap.mkdir()
            (trap / "inside").symlink_to(precious)
    old = time.time() - 10 * ABANDONED_S
    os.utime(trap, (old, old), follow_symlinks=False)
    source = Spool(spool, buffer, VOCAB)
    source.take(time.time())
    source.erase_unattributed()
    assert precious.read_bytes() == b"secret" * 100


def test_another_layout_is_corrupt_and_everything_else_is_taken(buffer, spool):
    put(spool, encode_record(make_record(3)) + make_later(4) + encode_record(make_record(5)), 2)
    assert Spool(spool, buffer, VOCAB).take(1.0).counts == {"corrupt": 1, "stored": 2}
    assert not list(spool.iterdir())


def test_unreadable_files_go_when_records_do(buffer, spool):
    (spool / f"{1:020d}-boot-00000000.records").mkdir()
    put(spool, encode_record(make_record(1)), 2)
    source = Spool(spool, buffer, VOCAB)
    assert source.take(1.0, max_files=2).counts == {"spool_unreadable": 1, "stored": 1}
    put(spool, encode_record(make_record(2)), 3)
    assert source.take(1.0, max_files=1).counts == {"stored": 1}, (
        "a file that stays takes no other's turn"
    )


# --- a real log


def publish_raw(broker, subject, header, data):
    """Publish as a client that writes the bytes itself."""
    with socket.create_connection(("127.0.0.1", broker.port)) as connection:
        connection.recv(4096)
        connection.sendall(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n')
        sizes = f"{len(header)} {len(header) + len(data)}" if header else f"{len(data)}"
        command = b"HPUB " if header else b"PUB "
        connection.sendall(
            command + subject + b" " + sizes.encode() + b"\r\n" + header + data + b"\r\nPING\r\n"
        )
        answer = connection.recv(4096)
        assert b"PONG" in answer
        assert b"-ERR" not in answer


@pytest.mark.parametrize(
    ("header", "data", "suffix"),
    [
        (b"NATS/1.0 503\r\n\r\n", b"", b""),
        (b"NATS/1.0\r\nStatus: 777\r\n\r\n", b"", b""),
        (b"NATS/1.0", b"x", b""),
        (b"NATS/1.0 \xff\xfe\xff\r\n\r\n", b"x", b""),
        (b"NATS/1.0 503 \xff\xff\r\n\r\n", b"x", b""),
        (b"NATS/1.0\r\n\xff\xff: \xff\r\n\r\n", b"x", b""),
        (b"", b"x", b".\xff\xfe"),
    ],
    ids=["status", "status-header", "no-line-end", "no-text", "description", "name", "subject"],
)
def test_a_message_that_is_no_record_does_not_end_the_connection(
    broker, buffer, header, data, suffix, monkeypatch
):
    monkeypatch.setattr("redraft.online.learning.stream.REQUEST_EXPIRES_S", 2.0)
    monkeypatch.setattr("redraft.online.learning.stream.SILENCE_S", 1.0)

    async def script():
        config = Nats(fleet=f"hostile-{next(fleets)}")
        source = StreamSource(broker.url, config, StreamLimits(max_bytes=64 << 20), buffer, VOCAB)
        await source.take()
        subject = config.subject("code").encode()
        await asyncio.to_thread(publish_raw, broker, subject + suffix, header, data)
        client = await nats.connect(broker.url)
        await client.jetstream().publish(config.subject("code"), encode_record(make_record(1)))
        counts = Counter()
        while counts["stored"] < 1:
            counts += (await source.take()).counts
        # Acknowledgements are sent, not waited for.
        while (await client.jetstream().stream_info(config.stream)).state.messages:
            await asyncio.sleep(0.05)
        await client.close()
        await source.close()
        return counts

    counts = asyncio.run(asyncio.wait_for(script(), 300))
    assert counts == Counter({"stored": 1, "corrupt": 1 if data else 0}) + Counter()


# --- the quarantine


def files_of(buffer):
    return sorted(buffer.quarantine.folder.glob("*.frame"))


def test_a_bad_record_is_set_aside_with_its_error_so_that_a_person_can_look(buffer, spool):
    bad = encode_record(make_record(draft_version="a b"))
    put(spool, bad, 1)
    Spool(spool, buffer, VOCAB).take(1.0)
    (path,) = files_of(buffer)
    assert path.name.endswith("-bad_identifier.frame")
    error, frame = path.read_bytes().split(b"\n", 1)
    assert (error, frame) == (b"draft_version contains a space or a control character", bad)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.parent.parent == buffer.config.folder


def test_the_quarantine_is_bounded_and_a_flood_of_one_reason_leaves_the_others(
    tmp_path, monkeypatch
):
    now = [1000.0]
    quarantine = Quarantine(tmp_path / "q", 3600.0, clock=lambda: now[0])
    rare = CorruptRecordError("rare", "not_finite")
    quarantine.keep(b"rare", rare)
    for number in range(500):
        quarantine.keep(b"%d" % number, CorruptRecordError("torn"))
    found = sorted((tmp_path / "q").iterdir())
    assert len(found) == 1 + quarantine_module.MAX_FILES_PER_REASON
    assert [path.read_bytes() for path in found if "not_finite" in path.name] == [b"rare\nrare"]
    now[0] += 61
    quarantine.keep(b"new", CorruptRecordError("torn"))
    contents = [path.read_bytes() for path in (tmp_path / "q").iterdir()]
    assert b"torn\nnew" in contents
    assert b"torn\n0" not in contents
    assert len(contents) == 17
    again = Quarantine(
        tmp_path / "q", 3600.0, clock=lambda: now[0]
    )  # after a restart the bounds hold too
    again.keep(b"newer", CorruptRecordError("torn"))
    assert len(list((tmp_path / "q").iterdir())) == 17
    monkeypatch.setattr(quarantine_module, "MAX_BYTES", 3_000_000)
    for reason in ("a", "b", "c", "d", "e"):
        again.keep(bytes(5 << 20), CorruptRecordError("large", reason))
    assert sum(path.stat().st_size for path in (tmp_path / "q").iterdir()) <= 3_000_000
    again.expire(now[0] + 3601)
    assert not list((tmp_path / "q").iterdir())


def test_whatever_is_forgotten_the_quarantine_is_emptied_and_old_examples_expire(buffer):
    bad = encode_record(make_record(top_k=3))
    buffer.append(read_frames(bad), time.time())
    assert len(files_of(buffer)) == 1
    buffer.delete_tenant("anybody", time.time())
    assert not files_of(buffer)
    buffer.append(read_frames(bad), time.time())
    buffer.expire(time.time() + buffer.config.max_age_s + 1)
    assert not files_of(buffer)


def test_an_example_that_could_not_be_deleted_is_deleted_later(tmp_path, monkeypatch):
    now = [1000.0]
    quarantine = Quarantine(tmp_path, 3600.0, clock=lambda: now[0])
    quarantine.keep(b"text", CorruptRecordError("torn"))
    now[0] = 5000.0

    def refuse(path):
        raise OSError(30, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(quarantine_module, "overwrite", refuse)
        quarantine.clear()
        quarantine.expire(now[0])
        patch.setattr(quarantine_module, "MAX_FILES", 1)
        quarantine.keep(b"more", CorruptRecordError("torn"))
        assert len(quarantine) == len(list(tmp_path.iterdir())) == 1, "the bounds hold all the same"
    quarantine.expire(now[0])
    assert list(tmp_path.iterdir()) == []


def test_without_retention_bad_records_are_only_counted():
    with Buffer(BufferConfig(), TARGET) as buffer:
        assert buffer.append(read_frames(b"rubbish"), 1.0) == {"corrupt": 1}
        assert buffer.quarantine is None


def test_a_quarantine_that_cannot_be_written_loses_only_the_examples(buffer):
    buffer.quarantine.folder.write_bytes(b"in the way")
    frames = encode_record(make_record(1)) + encode_record(make_record(2, top_k=3))
    assert buffer.append(read_frames(frames), 1.0) == {"stored": 1, "corrupt": 1}
    assert files_of(buffer) == []


# --- the gate


def test_a_tiny_temperature_is_scored_as_the_engine_samples_it(random_target):
    draft = StandaloneDraft(LlamaForCausalLM.from_pretrained(random_target)).eval()
    scored = []
    for temperature in (1e-40, 0.01):
        record = make_record(sampling=Sampling(temperature=temperature))
        scored += score(
            draft, [record], num_speculative_tokens=2, method="probabilistic", sequence_length=64
        )
    assert scored[0] == scored[1]
    assert all(
        torch.isfinite(torch.tensor([one.num_drafts, one.num_accepted])).all() for one in scored
    )


def test_a_request_that_is_not_finite_counts_only_against_the_candidate():
    nan, fine = (
        AcceptanceCounts(num_drafts=float("nan"), num_accepted=1),
        AcceptanceCounts(num_drafts=2, num_accepted=1),
    )
    keys = [("boot", str(number)) for number in range(4)]
    incumbent = dict(
        zip(keys, [RequestScore("code", counts) for counts in (fine, nan, nan, fine)], strict=True)
    )
    candidate = dict(
        zip(keys[:3], [RequestScore("code", counts) for counts in (nan, nan, fine)], strict=True)
    )
    assert pair_scores(candidate, incumbent, {"code": "code"}) == (
        [nan],
        [fine],
        ["code"],
        ["default mode"],
    )


def test_a_record_is_as_large_as_its_arrays():
    record = make_record()
    assert 0 < len(msgspec.msgpack.encode(record)) - record.num_bytes < 700
