"""The buffer with real files.

What is kept and forgotten, and the effect of a crash, a full disk and damage.
"""

import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from redraft.files.lock import AlreadyOwnedError
from redraft.online.learning.buffer import CLOCK_SLACK_S, Buffer
from redraft.online.learning.buffer_file import PAGE_BYTES, BufferFullError
from redraft.online.learning.config import BufferConfig, Replay
from redraft.online.learning.cursor import Cursor
from redraft.online.records.record import Record, Sampling, encode_record, read_frames

NOISE = random.Random(0).randbytes(1 << 20)


def i32(*values):
    return np.array(values, "<i4").tobytes()


def make_record(number, *, wrong=0, drafted=4, prompt=None, size_bytes=0, **changes):
    """A record of `drafted` verified draft tokens, of which the last `wrong` are refused.

    About `size_bytes` as a frame.
    """
    rows = max(drafted, 1)
    begin = random.Random(number).randrange(len(NOISE) - size_bytes)
    context = (prompt if prompt is not None else i32(7, number)) + NOISE[
        begin : begin + size_bytes // 4 * 4
    ]
    fields = {
        "server_id": "boot",
        "request_id": f"cmpl-{number}",
        "sequence": 0,
        "time_s": 0.0,
        "domain": "code",
        "tenant": "acme",
        "target_fingerprint": "target",
        "draft_version": "v000001",
        "sampling": Sampling(),
        "num_prompt_tokens": 2,
        "top_k": 1,
        "context": context,
        "output": i32(*range(rows)),
        "row_positions": i32(*(len(context) // 4 + row for row in range(rows))),
        "row_branches": i32(*[0] * rows),
        "row_drafts": i32(*[5 if row < drafted else -1 for row in range(rows)]),
        "row_draft_probs": np.ones(rows, "<f4").tobytes(),
        "row_accepted": bytes([1] * (rows - wrong) + [0] * wrong),
        "row_topk_ids": i32(*[5] * rows),
        "row_topk_log_probs": np.zeros(rows, "<f4").tobytes(),
        "row_log_sum_exp": np.zeros(rows, "<f4").tobytes(),
    }
    return Record(**(fields | changes))


def frames_of(*records):
    return list(read_frames(b"".join(encode_record(record) for record in records)))


def open_buffer(folder, **config):
    return Buffer(BufferConfig(folder=folder, **({"held_out_fraction": 0.0} | config)), "target")


def numbers_of(records):
    return [
        int(getattr(stored, "record", stored).request_id.removeprefix("cmpl-"))
        for stored in records
    ]


def make_segment(sequence, tokens, context_begin=0, **changes):
    """A segment of request 1 that samples `tokens`.

    The text before it is i32(7, 1) and the numbers from 100 on.
    """
    begin = 2 if not sequence else context_begin
    rows = {
        "row_positions": i32(begin),
        "output": i32(*tokens),
        "sequence": sequence,
        "context_begin": context_begin,
    }
    context = b"" if sequence else i32(7, 1)
    return make_record(1, drafted=1, context=context, **rows, **changes)


def fill(buffer, count, now_s=0.0, **changes):
    buffer.append(frames_of(*(make_record(number, **changes) for number in range(count))), now_s)


@pytest.fixture(params=["on disk", "in memory"])
def folder(request, tmp_path):
    return tmp_path / "buffer" if request.param == "on disk" else None


def test_records_come_back_in_order_of_arrival_and_only_behind_the_cursor(folder):
    with open_buffer(folder) as buffer:
        assert buffer.append(frames_of(make_record(3), make_record(1), make_record(2)), 0.0) == {
            "stored": 3
        }
        first = buffer.fresh(0, 2)
        assert numbers_of(first) == [3, 1]
        assert first[0].record == make_record(3)
        assert numbers_of(buffer.fresh(first[-1].seq, 8)) == [2]


def test_a_second_delivery_is_stored_once_also_across_files_and_within_a_batch(folder):
    with open_buffer(folder, max_bytes=4 << 20) as buffer:
        fill(buffer, 40, size_bytes=40_000)
        assert buffer.status().num_files == 1
        fill(buffer, 41, size_bytes=40_000)
        assert buffer.status().num_files == 2
        assert buffer.append(
            frames_of(make_record(0), make_record(40), make_record(41), make_record(41)), 0.0
        ) == {
            "stored": 1,
            "duplicate": 3,
        }
        assert sorted(numbers_of(buffer.fresh(0, 99))) == list(range(42))


def test_what_a_file_knows_of_its_records_is_what_it_reads_after_a_restart(tmp_path):
    """While records arrive, are asked for and deleted, nothing is read from the file again."""
    with open_buffer(tmp_path, held_out_fraction=0.3) as buffer:
        for number in range(60):
            tenant, domain = f"tenant-{number % 7}", f"domain-{number % 3}"
            record = make_record(number, wrong=number % 5, tenant=tenant, domain=domain)
            buffer.append(frames_of(record), 100.0 - number)
            if number % 11 == 0:
                buffer.fresh(0, 99)
            if number == 40:
                assert buffer.delete_tenant("tenant-3", -CLOCK_SLACK_S - 1) == 6
        kept, oldest_s = buffer._files.index(), [file.oldest_s() for file in buffer._files.files]
    with open_buffer(tmp_path, held_out_fraction=0.3) as buffer:
        assert kept.tolist() == buffer._files.index().tolist()
        assert oldest_s == [file.oldest_s() for file in buffer._files.files] == [41.0]


def test_an_idle_buffer_copies_no_index(folder):
    with open_buffer(folder, held_out_fraction=0.3) as buffer:
        fill(buffer, 20)
        index, training, usable = buffer._files.index(), buffer._training(), buffer._usable()
        buffer.bound_lag(0, 0)
        buffer.read(buffer.select_held_out(9))
        assert buffer.status().num_training == {"code": len(training)}
        assert buffer._files.index() is index
        assert buffer._training() is training
        assert buffer._usable() is usable
        buffer.leave_behind(["target"])
        assert len(buffer._training()) == 0
        buffer.leave_behind([])
        buffer.append(frames_of(make_record(20)), 0.0)
        assert len(buffer._files.index()) == 21


def test_records_survive_a_restart(tmp_path):
    with open_buffer(tmp_path) as buffer:
        fill(buffer, 5)
    with open_buffer(tmp_path) as buffer:
        assert numbers_of(buffer.fresh(0, 9)) == [0, 1, 2, 3, 4]
        assert buffer.append(frames_of(make_record(4)), 0.0) == {"duplicate": 1}


def test_torn_and_flipped_frames_are_counted_and_never_stored(folder):
    whole = encode_record(make_record(1))
    flipped = bytearray(encode_record(make_record(2)))
    flipped[-5] ^= 0x10
    with open_buffer(folder) as buffer:
        data = whole + bytes(flipped) + encode_record(make_record(3))[:-7]
        assert buffer.append(read_frames(data), 0.0) == {"stored": 1, "corrupt": 2}
        assert numbers_of(buffer.fresh(0, 9)) == [1]
        assert buffer.status().counts["corrupt"] == 2


def test_a_bit_flipped_on_the_disk_is_found_on_reading_and_never_trained(tmp_path):
    with open_buffer(tmp_path) as buffer:
        fill(buffer, 3, size_bytes=2_000)
    (path,) = tmp_path.glob("records-*.db")
    frame = encode_record(make_record(1, size_bytes=2_000))
    data = bytearray(path.read_bytes())
    data[data.index(frame[:200]) + 100] ^= 1
    path.write_bytes(data)
    with open_buffer(tmp_path) as buffer:
        assert numbers_of(buffer.fresh(0, 9)) == [0, 2]
        assert buffer.status().counts == {"corrupt_on_disk": 1}
        assert numbers_of(buffer.fresh(0, 9)) == [0, 2]
        assert buffer.append(frames_of(make_record(1)), 0.0) == {"stored": 1}, (
            "a sender may deliver it again"
        )


@pytest.mark.parametrize(
    "where", [0, PAGE_BYTES, 6 * PAGE_BYTES], ids=["header", "root of a table", "frame"]
)
def test_a_damaged_file_costs_its_own_records_and_no_others(tmp_path, where):
    with open_buffer(tmp_path, max_bytes=2 << 20) as buffer:
        for number in range(8):
            buffer.append(frames_of(make_record(number, size_bytes=60_000)), 0.0)
        num_files = buffer.status().num_files
    path = sorted(tmp_path.glob("records-*.db"))[1]
    with path.open("r+b") as file:
        file.seek(where)
        file.write(b"\xa5" * 3000)
    with open_buffer(tmp_path, max_bytes=2 << 20) as buffer:
        left = numbers_of(buffer.fresh(0, 99))
        assert 4 <= len(left) < 8
        assert sum(buffer.status().counts.values()) >= 1
        assert buffer.append(frames_of(make_record(99)), 0.0) == {"stored": 1}
        assert num_files >= 3


def test_a_corrupt_record_in_a_file_from_which_it_cannot_be_deleted_costs_this_file(tmp_path):
    with open_buffer(tmp_path, max_bytes=4 << 20) as buffer:
        fill(buffer, 8, size_bytes=40_000)
    (path,) = tmp_path.glob("records-*.db")
    with closing(sqlite3.connect(path)) as file:
        (page,) = file.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_records_1'"
        ).fetchone()
    data = bytearray(path.read_bytes())
    data[data.index(encode_record(make_record(3, size_bytes=40_000))[:200]) + 100] ^= 1
    data[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = b"\xa5" * PAGE_BYTES
    path.write_bytes(data)
    with open_buffer(tmp_path) as buffer:
        assert numbers_of(buffer.fresh(0, 9)) == [0, 1, 2], "the others were read before"
        assert buffer.status().counts == {"corrupt_on_disk": 1, "damaged_files": 1}
        assert "lost" in buffer.damage[0]
        assert buffer.append(frames_of(make_record(9)), 0.0) == {"stored": 1}


def test_records_of_another_target_are_kept_aside_and_counted(folder):
    with open_buffer(folder) as buffer:
        foreign = make_record(1, target_fingerprint="other")
        assert buffer.append(frames_of(make_record(0), foreign), 0.0) == {"stored": 1, "foreign": 1}
        assert numbers_of(buffer.fresh(0, 9)) == [0]
        assert buffer.replay(9, through=9, now_s=0.0, seed=0, policy=Replay()) == [make_record(0)]
        assert (buffer.status().num_foreign, buffer.status().num_training) == (1, {"code": 1})


def test_after_an_upgrade_of_the_target_the_old_records_are_the_foreign_ones(tmp_path):
    with open_buffer(tmp_path) as buffer:
        buffer.append(frames_of(make_record(0), make_record(1, target_fingerprint="upgraded")), 0.0)
    with Buffer(BufferConfig(folder=tmp_path, held_out_fraction=0.0), "upgraded") as buffer:
        assert numbers_of(buffer.fresh(0, 9)) == [1]


OLD, NEW = "@0123456789ab", "17@ba9876543210"


def test_records_of_weights_that_are_left_behind_count_no_longer_until_these_are_served_again(
    folder,
):
    def seqs(buffer):
        fresh, replayed = (
            buffer.fresh(0, 99),
            buffer.replay(99, through=99, now_s=0.0, seed=0, policy=Replay()),
        )
        assert Counter(numbers_of(fresh)) == Counter(
            int(one.request_id.removeprefix("cmpl-")) for one in replayed
        )
        return numbers_of(fresh)

    with open_buffer(folder) as buffer:
        records = [make_record(number) for number in range(4)]
        records += [make_record(number, target_version=NEW) for number in range(4, 24)]
        assert buffer.append(frames_of(*records), 0.0) == {"stored": 24}
        assert seqs(buffer) == list(range(24)), "small moves change nothing"
        assert buffer.served_target() == "target@ba9876543210", "whatever its label"
        buffer.leave_behind(["target"])
        assert seqs(buffer) == list(range(4, 24))
        assert (buffer.status().num_foreign, buffer.status().counts["past_target"]) == (4, 4)
        buffer.leave_behind(["target"])
        assert buffer.status().counts["past_target"] == 4, "counted once"
    with open_buffer(folder) as buffer:
        if folder is None:
            return
        assert seqs(buffer) == list(range(4, 24)), "over a restart"
        late = [make_record(number) for number in range(24, 30)]
        buffer.append(frames_of(*late), 0.0)
        assert seqs(buffer) == list(range(4, 24)), "a server that lags behind does not decide"
        buffer.append(frames_of(*(make_record(number) for number in range(30, 50))), 0.0)
        assert seqs(buffer) == list(range(50)), "the old weights are back"


def test_held_out_requests_of_weights_that_are_left_behind_judge_nobody(folder):
    with open_buffer(folder, held_out_fraction=0.99) as buffer:
        versions = ["", OLD, NEW]
        buffer.append(
            frames_of(*(make_record(n, target_version=versions[n // 20]) for n in range(60))), 0.0
        )
        whole = buffer.select_held_out(99)
        buffer.leave_behind(["target", "target@0123456789ab"])
        assert buffer.select_held_out(99) == [seq for seq in whole if seq > 40]


def test_to_a_release_without_versions_other_weights_are_another_target(tmp_path):
    with open_buffer(tmp_path) as buffer:
        buffer.append(frames_of(make_record(0), make_record(1, target_version=NEW)), 0.0)
    (path,) = (
        path
        for path in tmp_path.iterdir()
        if path.suffix not in (".key", ".json") and b"records" in path.read_bytes()
    )
    with closing(sqlite3.connect(path)) as file:
        found = [
            target
            for (target,) in file.execute("SELECT target_fingerprint FROM records ORDER BY seq")
        ]
    assert found == ["target", "target@ba9876543210"]


def test_a_full_buffer_forgets_the_oldest_file_and_stays_within_its_bytes(folder):
    with open_buffer(folder, max_bytes=16 << 20) as buffer:
        for number in range(400):
            buffer.append(frames_of(make_record(number, size_bytes=50_000)), float(number))
            assert buffer.status().num_bytes <= 16 << 20
        left = numbers_of(buffer.fresh(0, 999))
        assert left == list(range(left[0], 400)), "the oldest go, the rest is whole"
        assert len(left) * 50_000 > 8 << 20
        assert buffer.status().counts["evicted"] == left[0]
        if folder is not None:
            assert sum(path.stat().st_size for path in folder.iterdir()) <= (16 << 20) + (1 << 18)


def test_no_record_gets_older_than_its_retention(folder):
    with open_buffer(folder, max_age_s=160.0) as buffer:
        for now_s in range(0, 400, 4):
            buffer.append(frames_of(*(make_record(now_s + n) for n in range(4))), float(now_s))
            oldest_s = buffer.status().oldest_s
            assert oldest_s is not None
            assert now_s - oldest_s < 160
        assert len(buffer.fresh(0, 999)) >= 140, "at most a sixteenth goes early"
        buffer.expire(1000.0)
        assert buffer.status().num_training == {}
        assert folder is None or not list(folder.glob("records-*"))


def test_a_sequence_number_is_never_used_again_even_after_everything_expired(tmp_path):
    with open_buffer(tmp_path, max_age_s=10.0) as buffer:
        fill(buffer, 4)
        through = buffer.fresh(0, 9)[-1].seq
        buffer.commit_trained("step-4", through)
    with open_buffer(tmp_path, max_age_s=10.0) as buffer:
        buffer.expire(100.0)
    with open_buffer(tmp_path, max_age_s=10.0) as buffer:
        buffer.append(frames_of(make_record(9)), 100.0)
        assert numbers_of(buffer.fresh(through, 9)) == [9]


def test_held_out_prompts_never_train_whatever_the_segment(folder):
    with open_buffer(folder, held_out_fraction=0.3) as buffer:
        records = [
            make_record(number, sequence=segment) for number in range(200) for segment in range(2)
        ]
        buffer.append(frames_of(*records), 0.0)
        trained, judged = buffer.fresh(0, 999), [*buffer.read(buffer.select_held_out(999))]
        assert len(trained) + len(judged) == 400
        assert not set(numbers_of(trained)) & set(numbers_of(judged))
        assert 0.2 < len(judged) / 400 < 0.4
        replayed = buffer.replay(999, through=10**6, now_s=0.0, seed=0, policy=Replay())
        assert sorted(numbers_of(replayed)) == sorted(numbers_of(trained))


@pytest.mark.parametrize(("before", "after"), [(0.2, 0.1), (0.1, 0.3)])
def test_after_a_change_of_the_fraction_no_prompt_that_trains_judges(folder, before, after):
    with open_buffer(folder, held_out_fraction=before) as buffer:
        fill(buffer, 200)
        judged_before = set(numbers_of(buffer.read(buffer.select_held_out(999))))
        buffer.config = replace(buffer.config, held_out_fraction=after)
        buffer.append(frames_of(*(make_record(number, sequence=1) for number in range(200))), 1.0)
        trained, judged = (
            set(numbers_of(records))
            for records in (buffer.fresh(0, 999), buffer.read(buffer.select_held_out(999)))
        )
        assert not trained & judged
        # a prompt that was held out before and is now, or, with a larger fraction, was and still is
        assert judged == judged_before - trained
        assert len(judged) > 200 * min(before, after) / 2


def test_held_out_keeps_every_domain_in_view(folder):
    with open_buffer(folder, held_out_fraction=0.999) as buffer:
        buffer.append(frames_of(*(make_record(n, domain="code") for n in range(5))), 0.0)
        buffer.append(frames_of(*(make_record(n, domain="prose") for n in range(5, 20))), 1.0)
        assert numbers_of(buffer.read(buffer.select_held_out(3))) == [2, 3, 4, 17, 18, 19]
        assert buffer.status().num_held_out == {"code": 5, "prose": 15}


def test_deleting_a_tenant_leaves_none_of_its_bytes_on_the_disk(tmp_path):
    record = make_record(1, tenant="acme", size_bytes=5_000)
    with open_buffer(tmp_path) as buffer:
        buffer.append(
            frames_of(make_record(0, tenant="other"), record, make_record(2, tenant="acme")), 0.0
        )
        buffer.append(frames_of(make_record(3, tenant="acme", target_fingerprint="foreign")), 0.0)
        needle = encode_record(record)[1000:1100]
        assert any(needle in path.read_bytes() for path in tmp_path.iterdir())
        assert buffer.delete_tenant("acme", 0.0) == 3
        assert not any(needle in path.read_bytes() for path in tmp_path.iterdir())
        assert numbers_of(buffer.fresh(0, 9)) == [0]


def test_what_was_recorded_of_a_forgotten_tenant_is_not_stored_later_either(tmp_path):
    before, after = (
        make_record(n, tenant="acme", time_s=100 + n * (CLOCK_SLACK_S + 1)) for n in range(2)
    )
    with open_buffer(tmp_path) as buffer:
        assert buffer.delete_tenant("acme", 100.0) == 0
    with open_buffer(tmp_path) as buffer:
        for name in ("cursor.json", "forgotten.json"):
            assert b"acme" not in (tmp_path / name).read_bytes()
        assert buffer.append(frames_of(before, after, make_record(2, tenant="other")), 101.0) == {
            "forgotten": 1, "stored": 2,
        }  # fmt: skip
        assert numbers_of(buffer.fresh(0, 9)) == [1, 2]


def test_a_damaged_file_does_not_keep_a_tenant_from_being_forgotten(tmp_path):
    with open_buffer(tmp_path) as buffer:
        for number in range(4):
            buffer.append(frames_of(make_record(number, tenant="acme", size_bytes=40_000)), 0.0)
    (path,) = tmp_path.glob("records-*.db")
    with path.open("r+b") as file:  # the metadata of the records stays whole, the records do not
        file.seek(4 * PAGE_BYTES)
        file.write(os.urandom(path.stat().st_size - 4 * PAGE_BYTES))
    with open_buffer(tmp_path) as buffer:
        assert not buffer.counts["damaged_files"]
        buffer.delete_tenant("acme", 0.0)
        assert buffer.counts["damaged_files"] == 1
        assert buffer.fresh(0, 9) == []


def test_zero_retention_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_buffer(None) as buffer:
        fill(buffer, 50, size_bytes=10_000)
        assert len(buffer.fresh(0, 99)) == 50
        open_files = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if fd_exists(fd)
        ]
        assert not [name for name in open_files if "records" in name or "cursor" in name]
    assert list(tmp_path.iterdir()) == []


def fd_exists(descriptor):
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_replay_draws_by_the_documented_weights(folder):
    """Oracle: weights computed by hand, draws counted over many seeds."""
    with open_buffer(folder) as buffer:
        buffer.append(
            frames_of(make_record(0, wrong=0, drafted=8), make_record(1, wrong=8, drafted=8)), 0.0
        )
        buffer.append(
            frames_of(make_record(2, wrong=0, drafted=8), make_record(3, drafted=0)), 100.0
        )
        policy = Replay(half_life_s=100, surprise=4)
        weights = np.array([0.5 * (1 + 4 * 0.1), 0.5 * (1 + 4 * 0.9), 1 + 4 * 0.1, 1 + 4 * 0.5])
        draws = Counter(
            numbers_of(buffer.replay(1, through=99, now_s=100.0, seed=seed, policy=policy))[0]
            for seed in range(3000)
        )
        shares = np.array([draws[number] for number in range(4)]) / 3000
        assert shares == pytest.approx(weights / weights.sum(), abs=0.03)


def test_surprise_counts_verified_positions_not_those_behind_a_rejection(folder):
    """One of the four rows is a refused draft token and three follow it.

    One wrong of one, not four of four.
    """
    record = make_record(0, wrong=4, row_branches=i32(0, 1, 2, 3))
    with open_buffer(folder) as buffer:
        buffer.append(frames_of(record), 0.0)
        (file,) = buffer._files.files
        assert file.index()[["num_drafted", "num_wrong"]].tolist() == [(1, 1)]


def test_replay_is_repeatable_distinct_and_never_runs_ahead_of_training(folder):
    with open_buffer(folder) as buffer:
        fill(buffer, 100)
        through = buffer.fresh(0, 60)[-1].seq
        draw = [
            buffer.replay(30, through=through, now_s=0.0, seed=s, policy=Replay())
            for s in (1, 1, 2)
        ]
        assert draw[0] == draw[1] != draw[2]
        assert len(set(numbers_of(draw[0]))) == 30
        assert max(numbers_of(draw[0])) < 60


def test_very_old_records_still_have_weights(folder):
    with open_buffer(folder, max_age_s=1e12) as buffer:
        fill(buffer, 10)
        assert (
            len(buffer.replay(10, through=99, now_s=1e9, seed=0, policy=Replay(half_life_s=1)))
            == 10
        )


def test_a_slow_learner_skips_to_a_bounded_lag(folder):
    with open_buffer(folder) as buffer:
        fill(buffer, 100)
        after, num_skipped = buffer.bound_lag(0, 30)
        assert num_skipped == 70
        assert numbers_of(buffer.fresh(after, 99)) == list(range(70, 100))
        assert buffer.bound_lag(after, 30) == (after, 0)


def test_what_counts_as_trained_is_committed_together_with_its_checkpoint(folder):
    with open_buffer(folder) as buffer:
        assert buffer.commits() == []
        buffer.commit_trained("step-1", 10)
        buffer.commit_trained("step-2", 20)
        assert [(t.checkpoint_id, t.through) for t in buffer.commits()] == [
            ("step-2", 20),
            ("step-1", 10),
        ]


def test_a_second_process_is_refused_by_name(tmp_path):
    with open_buffer(tmp_path), pytest.raises(AlreadyOwnedError, match=f"process {os.getpid()} on"):
        open_buffer(tmp_path)
    open_buffer(tmp_path).close()


def test_ingest_and_training_may_run_in_two_threads(tmp_path):
    with open_buffer(tmp_path, max_bytes=3 << 20) as buffer:
        writer = threading.Thread(
            target=lambda: [
                buffer.append(frames_of(make_record(n, size_bytes=20_000)), time.time())
                for n in range(150)
            ]
        )
        writer.start()
        after, trained = 0, []
        while writer.is_alive() or buffer.fresh(after, 1):
            for stored in buffer.fresh(after, 8):
                trained.append(stored.seq)
                after = stored.seq
            buffer.replay(4, through=after, now_s=time.time(), seed=after, policy=Replay())
        writer.join()
        assert trained == sorted(set(trained))
        assert numbers_of(buffer.fresh(0, 999))[-1] == 149


def write_until_killed(folder, number, acknowledge):
    buffer = open_buffer(folder, max_bytes=16 << 20)
    while True:
        buffer.append(
            frames_of(*(make_record(n, size_bytes=2_000) for n in range(number, number + 4))), 0.0
        )
        if number % 40 == 0:
            buffer.commit_trained(f"step-{number}", number)
        number += 4
        acknowledge.send(number)  # everything below it has been stored


def test_no_acknowledged_record_is_lost_when_the_writer_is_killed(tmp_path):
    acknowledged, cursor = 0, []
    rng = random.Random(1)
    fork = multiprocessing.get_context("fork")
    for _ in range(20):
        receiver, sender = fork.Pipe(duplex=False)
        writer = fork.Process(target=write_until_killed, args=(tmp_path, acknowledged, sender))
        writer.start()
        sender.close()
        acknowledged = receiver.recv()
        time.sleep(rng.uniform(0, 0.1))
        writer.kill()
        with suppress(EOFError, OSError):
            while True:
                acknowledged = receiver.recv()
        writer.join()
        with open_buffer(tmp_path) as buffer:
            stored = numbers_of(buffer.fresh(0, 10**6))
            assert stored == list(range(len(stored))), "nothing missing, nothing twice, in order"
            assert len(stored) >= acknowledged
            assert buffer.status().counts == {}, "nothing damaged"
            assert [t.through for t in reversed(buffer.commits())][: len(cursor)] == cursor
            cursor = [t.through for t in reversed(buffer.commits())]


def test_a_full_disk_has_a_name_and_passes_by_itself(small_disk):
    with open_buffer(small_disk / "buffer", max_bytes=1 << 30) as buffer:
        number, error = 0, None
        while error is None:
            try:
                buffer.append(frames_of(make_record(number, size_bytes=20_000)), 0.0)
                number += 1
            except BufferFullError as full:
                error = full
        assert "disk" in str(error)
        assert number > 20
        stored = buffer.fresh(0, 9999)
        assert numbers_of(stored) == list(range(number)), "reading goes on"
        with pytest.raises(BufferFullError):
            buffer.append(frames_of(make_record(number, size_bytes=20_000)), 0.0)
        (small_disk / "ballast").unlink()
        assert buffer.append(frames_of(make_record(number, size_bytes=20_000)), 0.0) == {
            "stored": 1
        }
        buffer.commit_trained("step", stored[-1].seq)
        assert numbers_of(buffer.fresh(0, 9999)) == list(range(number + 1))


def test_a_full_disk_at_start_has_a_name_too(small_disk):
    ballast = small_disk / "more"
    with suppress(OSError):
        ballast.write_bytes(bytes(8 << 20))
    with pytest.raises(BufferFullError):
        open_buffer(small_disk / "buffer")
    ballast.unlink()
    open_buffer(small_disk / "buffer").close()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MB, half of it taken by a file `ballast`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    (disk / "ballast").write_bytes(bytes(2 << 20))
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_config_refuses_invalid_values():
    with pytest.raises(ValueError, match="held_out_fraction"):
        BufferConfig(held_out_fraction=1.0)
    with pytest.raises(ValueError, match="max_bytes"):
        BufferConfig(max_bytes=0)


def test_the_control_plane_imports_no_torch():
    modules = (
        "records.record learning.buffer learning.gate fleet.registry daemon.state fleet.server"
    )
    code = (
        f"import sys\nfor m in {modules.split()}: __import__('redraft.online.' + m)\nassert "
        "'torch' not in sys.modules"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0
    )


# --- segments


def texts_of(buffer):
    return [[*one.record.context_ids, *one.record.output_ids] for one in buffer.fresh(0, 99)]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_later_segment_is_stored_with_the_text_of_those_before(tmp_path, is_restarted):
    first, second = make_segment(0, [100, 101]), make_segment(1, [102], 4)
    third = make_segment(2, [103, 104], 5, tenant="other")
    after_preemption = make_segment(3, [200], 6)  # token 104 was thrown away, and sampled anew
    with open_buffer(tmp_path) as buffer:
        assert buffer.append(frames_of(first, second), 0.0) == {"stored": 2}
        if not is_restarted:
            assert buffer.append(frames_of(third, second, after_preemption), 0.0) == {
                "stored": 2,
                "duplicate": 1,
            }
    with open_buffer(tmp_path) as buffer:
        if is_restarted:
            assert buffer.append(frames_of(third, second, after_preemption), 0.0) == {
                "stored": 2,
                "duplicate": 1,
            }
        text = [7, 1, 100, 101]
        assert texts_of(buffer) == [
            text,
            [*text, 102],
            [*text, 102, 103, 104],
            [*text, 102, 103, 200],
        ]
        assert [one.record.context_begin for one in buffer.fresh(0, 99)] == [0] * 4
        assert len(set(buffer._training()["prompt"].tolist())) == 1, "one prompt, held out or not"


def test_a_segment_whose_text_was_lost_is_counted_and_not_stored():
    first, second, third = (
        make_segment(0, [100, 101]),
        make_segment(1, [102], 4),
        make_segment(2, [103], 5),
    )
    with open_buffer(None) as buffer:
        assert buffer.append(frames_of(second, third), 0.0) == {"textless": 2}
        assert buffer.append(frames_of(first), 0.0) == {"stored": 1}
        assert buffer.append(frames_of(third), 0.0) == {"textless": 1}, "the second is not there"
        assert buffer.append(frames_of(second, third), 0.0) == {"stored": 2}, "sent again"
        assert texts_of(buffer)[-1] == [7, 1, 100, 101, 102, 103]
        wrong = make_segment(3, [104], 99)
        assert buffer.append(frames_of(wrong), 0.0) == {"corrupt": 1}
        buffer.delete_tenant("acme", 0.0)
        later = make_segment(4, [104], 6, time_s=CLOCK_SLACK_S + 1)
        assert buffer.append(frames_of(later, make_segment(4, [104], 6)), 0.0) == {
            "textless": 1,
            "forgotten": 1,
        }


def test_a_learner_that_ended_while_it_began_has_damaged_nothing(tmp_path):
    Cursor(tmp_path)
    (tmp_path / "cursor.json").unlink()  # written after forgotten.json
    assert Cursor(tmp_path).damage == []
    Cursor(tmp_path).forget("a" * 64, 1.0)
    (tmp_path / "cursor.json").unlink()
    assert "cursor.json" in Cursor(tmp_path).damage[0]
