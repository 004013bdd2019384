"""The record's frames, and the training rows extracted from a record."""

import re
import zlib

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from redraft.heads.nn import float8
from redraft.heads.nn.float8 import encode_float8
from redraft.online.learning.replay import training_sequence
from redraft.online.records.record import (
    MAGIC,
    MAX_RECORD_BYTES,
    CorruptRecordError,
    Record,
    Sampling,
    decode_record,
    encode_record,
    join_text,
    name_base,
    read_frames,
)
from redraft.online.records.states import SCALE_BYTES, decode_float8


def i32(*values):
    return np.array(values, "<i4").tobytes()


def f32(*values):
    return np.array(values, "<f4").tobytes()


def make_record(**changes):
    """Context 10 11 12, then two steps of 2 draft tokens.

    The first rejects its first, the second accepts both.

    Step 1 begins after 12 with drafts 90 91: target says 20 at position 3. Step 2: drafts 21 22
    accepted, bonus 23.
    """
    fields = {
        "server_id": "boot",
        "request_id": "cmpl-1",
        "sequence": 0,
        "time_s": 1.5,
        "domain": "code",
        "tenant": "acme",
        "target_fingerprint": "t",
        "draft_version": "v000001",
        "sampling": Sampling(temperature=0.7),
        "num_prompt_tokens": 2,
        "top_k": 2,
        "context": i32(10, 11, 12),
        "output": i32(20, 21, 22, 23),
        "row_positions": i32(3, 4, 5, 4, 5, 6),
        "row_branches": i32(0, 1, 2, 0, 0, 0),
        "row_drafts": i32(90, 91, -1, 21, 22, -1),
        "row_draft_probs": f32(1, 1, np.nan, 1, 1, np.nan),
        "row_accepted": bytes([0, 0, 0, 1, 1, 0]),
        "row_topk_ids": i32(20, 1, 2, 3, 4, 5, 21, 6, 22, 7, 23, 8),
        "row_topk_log_probs": f32(*(-0.1 * i for i in range(12))),
        "row_log_sum_exp": f32(1, 2, 3, 4, 5, 6),
    }
    return Record(**(fields | changes))


def test_a_record_survives_its_frame():
    record = make_record()
    again = decode_record(encode_record(record))
    assert again == record
    assert again.record_id == record.record_id
    np.testing.assert_array_equal(again.context_ids, [10, 11, 12])
    np.testing.assert_array_equal(again.accepted, [False, False, False, True, True, False])
    assert again.topk_log_probs.shape == (6, 2)


def test_the_id_follows_from_server_request_and_sequence_alone():
    record = make_record()
    assert record.record_id == make_record(time_s=9.0, domain="other").record_id
    others = [make_record(server_id="b"), make_record(request_id="b"), make_record(sequence=1)]
    assert len({record.record_id, *(other.record_id for other in others)}) == 4
    # The parts are kept apart, not concatenated.
    assert (
        make_record(server_id="ab", request_id="c").record_id
        != make_record(server_id="a", request_id="bc").record_id
    )


@given(st.data())
def test_a_flipped_bit_anywhere_is_rejected(data):
    frame = bytearray(encode_record(make_record()))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(CorruptRecordError):
        decode_record(bytes(frame))


def test_a_frame_torn_anywhere_is_rejected():
    frame = encode_record(make_record())
    for size in range(len(frame)):
        with pytest.raises(CorruptRecordError):
            decode_record(frame[:size])
    with pytest.raises(CorruptRecordError, match="torn"):
        decode_record(frame + b"x")


@pytest.mark.parametrize(
    "change",
    [
        {"row_drafts": i32(1)},
        {"row_accepted": b""},
        {"row_log_sum_exp": f32(1)},
        {"top_k": 0},
        {"top_k": 3},
        {"context": b"abc"},
        {"num_prompt_tokens": 4},
        {"row_branches": i32(1, 2, 3, 0, 0, 0)},
        {"row_branches": i32(0, 2, 3, 0, 0, 0)},
        {"row_positions": i32(3, 4, 5, 4, 5, 8)},
        {"row_positions": i32(0, 4, 5, 4, 5, 6)},
        {"row_branches": i32(0, 0, 0, 1, 2, 0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_record_that_disagrees_with_itself_is_rejected_though_its_crc_is_right(change):
    with pytest.raises(CorruptRecordError, match="inconsistent"):
        decode_record(encode_record(make_record(**change)))


def frame_around(payload):
    return (
        MAGIC
        + len(payload).to_bytes(4, "little")
        + zlib.crc32(payload).to_bytes(4, "little")
        + payload
    )


def test_a_payload_that_is_no_record_is_rejected():
    with pytest.raises(CorruptRecordError, match="unreadable"):
        decode_record(frame_around(zstandard.compress(msgspec.msgpack.encode({"server_id": "x"}))))


@pytest.mark.parametrize("is_size_written", [True, False])
def test_a_small_frame_that_would_fill_the_memory_is_rejected(is_size_written):
    compressor = zstandard.ZstdCompressor(write_content_size=is_size_written).compressobj(
        size=MAX_RECORD_BYTES + 1 if is_size_written else -1
    )
    payload = compressor.compress(bytes(MAX_RECORD_BYTES + 1)) + compressor.flush()
    assert len(payload) < 10_000
    with pytest.raises(CorruptRecordError, match="oversized" if is_size_written else "unreadable"):
        decode_record(frame_around(payload))


def test_a_bad_frame_costs_itself_only():
    frames = [encode_record(make_record(sequence=i)) for i in range(3)]
    for position in (20, 5):  # in the payload, and in the length
        flipped = bytearray(frames[1])
        flipped[position] ^= 0x40
        found = [record for _, record in read_frames(frames[0] + bytes(flipped) + frames[2])]
        assert [r.sequence for r in found if isinstance(r, Record)] == [0, 2]
        assert sum(isinstance(r, CorruptRecordError) for r in found) == 1


def test_a_torn_tail_leaves_the_records_before_it():
    found = [
        record
        for _, record in read_frames(
            encode_record(make_record()) + encode_record(make_record(sequence=1))[:-3]
        )
    ]
    assert isinstance(found[0], Record)
    assert isinstance(found[1], CorruptRecordError)
    assert len(found) == 2


def test_frames_come_back_as_they_were_written():
    frames = [encode_record(make_record(sequence=i)) for i in range(3)]
    assert [frame for frame, _ in read_frames(b"".join(frames))] == frames


def test_training_rows_are_those_of_the_text():
    text = training_sequence(make_record())
    np.testing.assert_array_equal(text.input_ids_T, [10, 11, 12, 20, 21, 22, 23])
    np.testing.assert_array_equal(
        text.rows_R, [2, 3, 4, 5]
    )  # the row after 12 predicts 20, and so on
    np.testing.assert_array_equal(text.topk_ids_RK[:, 0], text.input_ids_T[text.rows_R + 1])


# --- states in float8, and texts that travel once


def test_float8_is_that_of_torch_and_no_state_is_farther_off_than_a_sixteenth():
    codes = np.arange(256, dtype=np.uint8)
    one = np.frombuffer(np.float32(1).tobytes(), np.uint8)
    found = decode_float8(np.concatenate([codes, one])[None, None]).flatten()
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().bfloat16()
    expected[expected.isnan()] = torch.nan
    np.testing.assert_array_equal(found, expected.view(torch.int16).numpy().view(np.uint16))
    generator = torch.Generator().manual_seed(0)
    states_HLD = (
        torch.randn(50, 3, 64, generator=generator) * 10.0 ** torch.arange(-2, 1)[:, None]
    ).bfloat16()
    states_HLD[:, :, 5] *= 30  # channels that stand out, as in large models
    states_HLD[7] = 0
    codes_HLX = encode_float8(states_HLD)
    assert (codes_HLX.shape, codes_HLX.dtype) == ((50, 3, 64 + SCALE_BYTES), torch.uint8)
    again = torch.from_numpy(decode_float8(codes_HLX.numpy()).view(np.int16)).view(torch.bfloat16)
    codes, scale = (
        codes_HLX[..., :64].view(torch.float8_e4m3fn),
        codes_HLX[..., 64:].contiguous().view(torch.float32),
    )
    assert torch.equal(again, (codes.float() * scale).bfloat16())
    assert torch.equal(again, float8.decode_float8(codes_HLX, torch.bfloat16)), (
        "the trainer reads the same"
    )
    largest = states_HLD.float().abs().amax(-1, keepdim=True)
    error = (again.float() - states_HLD.float()).abs()
    assert (error <= states_HLD.float().abs() / 15 + largest / 2**17).all()
    assert torch.equal(again[7], states_HLD[7])


def test_states_in_float8_survive_the_wire_and_what_is_not_finite_does_not():
    states_HLD = torch.randn(5, 2, 8)
    fields = {"hidden_begin": 1, "hidden_shape": (2, 8), "hidden_format": "float8"}
    record = make_record(**fields, hidden=encode_float8(states_HLD).numpy().tobytes())
    again = decode_record(encode_record(record))
    assert (again, again.num_hidden, again.hidden_words.shape) == (record, 5, (5, 2, 8))
    with pytest.raises(CorruptRecordError, match="hidden"):
        decode_record(encode_record(msgspec.structs.replace(record, hidden=record.hidden[:-1])))
    for place, byte in (
        (3, 0x7F),
        (8 + 2, 0x80),
        (8 + 3, 0x7F),
    ):  # a code of NaN; an infinite scale, byte by byte
        hidden = bytearray(record.hidden)
        hidden[place] = byte
        if place > 8:
            hidden[8:12] = np.float32(np.inf).tobytes()
        with pytest.raises(CorruptRecordError, match="finite"):
            decode_record(encode_record(msgspec.structs.replace(record, hidden=bytes(hidden))))


def test_a_record_has_no_other_field():
    """The fields that docs/privacy.md lists: no address of a client, and no further header."""
    known = """
        server_id request_id sequence time_s domain tenant target_fingerprint target_version
        draft_version sampling constraints adapter template_arguments num_prompt_tokens top_k context
        output row_positions row_branches row_drafts row_draft_probs row_accepted row_proposers
        row_topk_ids row_topk_log_probs row_log_sum_exp context_begin hidden_begin hidden_shape
        hidden_format hidden
    """
    assert set(Record.__struct_fields__) == set(known.split())
    numbers = msgspec.structs.fields(Sampling)
    assert {field.type for field in numbers} == {int, float}


def test_a_record_names_its_weights_and_its_adapter():
    plain, moved = make_record(), make_record(target_version="step_17@0123456789ab")
    assert decode_record(encode_record(moved)) == moved
    assert (plain.target, moved.target) == (
        plain.target_fingerprint,
        f"{plain.target_fingerprint}@0123456789ab",
    )
    adapted = make_record(adapter="sql@1#", target_version="step_17@0123456789ab")
    assert decode_record(encode_record(adapted)) == adapted
    assert adapted.base == name_base(plain.target_fingerprint, "sql@1#") != plain.base
    assert re.fullmatch(f"{plain.target_fingerprint}#[0-9a-f]{{12}}@0123456789ab", adapted.target)
    with pytest.raises(CorruptRecordError) as error:
        decode_record(encode_record(make_record(target_version="step 17@0123456789ab")))
    assert error.value.reason == "bad_identifier"


def test_a_text_that_travels_once_is_checked_as_a_whole_one():
    whole = make_record(sequence=1)
    record = msgspec.structs.replace(whole, context=i32(12), context_begin=2)
    assert decode_record(encode_record(record)) == record
    assert join_text(record, i32(10, 11)) == whole
    assert join_text(record, i32(10, 11, 99)) == whole, "the rest of that text was thrown away"
    for change in (
        {"sequence": 0},
        {"context_begin": -1},
        {"num_prompt_tokens": 4},
        {"context_begin": 2**31},
    ):
        with pytest.raises(CorruptRecordError, match="inconsistent"):
            decode_record(encode_record(msgspec.structs.replace(record, **change)))
    with pytest.raises(CorruptRecordError, match="oversized") as error:
        join_text(
            msgspec.structs.replace(record, context_begin=MAX_RECORD_BYTES // 4),
            bytes(MAX_RECORD_BYTES),
        )
    assert error.value.reason == "oversized"
