"""The journal: entries read back as written, through kills, full disks and rotation.

Nothing else gets in.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from redraft.online import journal as journal_module
from redraft.online.daemon.state import Phase as LearnerPhase
from redraft.online.journal import (
    AcceptanceEntry,
    BufferEntry,
    Entry,
    FaultEntry,
    GateEntry,
    Journal,
    Phase,
    StateEntry,
    TrainingEntry,
    to_stderr,
)

EXAMPLES: dict[str, dict[str, Any]] = {
    "acceptance": {"server": "http://a:1", "draft_version": "v000002", "domain": None, "drafts": 10, "accepted": 19,
                   "accepted_at": (10, 9), "tau": 2.9},
    "buffer": {"records": 5, "bytes": 1000, "held_out": 1, "dropped": {"evicted": 2}, "oldest_s": 3.0, "lag_s": 1.5},
    "training": {"step": 3, "loss": 0.5, "alpha": 0.6, "alpha_greedy": 0.5, "tokens_per_s": 100.0, "records_seen": 8},
    "gate": {"verdict": "promote", "candidate": "step-3", "incumbent": "v000002", "gain": 0.3, "low": 0.2, "high": 0.4,
             "domains": {"my code": {"gain": 0.3, "low": 0.1, "high": 0.5, "requests": 30}},
             "contexts": {"64 to 127 tokens": {"gain": 0.3, "low": 0.1, "high": 0.5, "requests": 30}},
             "reason": "promote: a, b"},
    "swap": {"server": "http://a:1", "version": "v000003", "from_version": "v000002", "outcome": "swapped",
             "duration_ms": 81.5},
    "state": {"phase": "canary", "candidate": "v000003", "reason": "why"},
    "fault": {"what": "disk_full", "detail": "ENOSPC"},
    "server": {"server": "http://a:8000", "change": "joined"},
}  # fmt: skip


ENTRIES = {entry.__struct_config__.tag: entry for entry in get_args(Entry)}


def make_fault(journal: Journal, number: int) -> None:
    journal.write(FaultEntry(what="test", detail=str(number)))


def details(journal: Journal, after: int = 0) -> list[int]:
    return [
        int(entry.detail or "")
        for entry in journal.read(after).entries
        if isinstance(entry, FaultEntry)
    ]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_kind_reads_back_as_it_was_written(tmp_path: Path, kind: Any):
    journal = Journal(tmp_path / "not there yet", clock=lambda: 12.5)
    written = journal.write(ENTRIES[kind](**EXAMPLES[kind]))
    assert journal.read().entries == [written]
    assert written.time_s == 12.5
    for name, value in EXAMPLES[kind].items():
        got = getattr(written, name)
        assert got == value or name in ("domains", "contexts")


def test_the_phases_are_the_learners():
    assert list(get_args(Phase)) == [phase.value for phase in LearnerPhase]


def test_a_line_is_json_with_kind_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Journal(tmp_path, [to_stderr], clock=lambda: 1.0).write(FaultEntry(what="disk_full"))
    (line,) = next(tmp_path.iterdir()).read_text().splitlines()
    logged = capsys.readouterr().err.rstrip("\n")
    fields = {"kind": "fault", "time_s": 1.0, "what": "disk_full", "detail": None, "reason": ""}
    assert json.loads(logged) == fields
    assert json.loads(line) == {**fields, "crc32": f"{zlib.crc32(logged.encode()):08x}"}


def test_no_flipped_bit_makes_another_entry(tmp_path: Path):
    journal = Journal(tmp_path)
    written = journal.write(
        BufferEntry(records=120, bytes=3_000_000, held_out=7, dropped={"corrupt": 2}, lag_s=1.5)
    )
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    for number in random.Random(0).sample(range(8 * (len(whole) - 1)), 200):
        at, bit = divmod(number, 8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        assert [entry for entry in journal.read().entries if entry != written] == []


def test_a_line_of_an_earlier_release_and_a_file_of_another_name_are_no_obstacle(tmp_path: Path):
    (tmp_path / "journal-0000000000000000.jsonl").write_text(
        '{"kind":"fault","time_s":1.0,"what":"x","detail":"7"}\n'
    )
    (tmp_path / "journal-copy.jsonl").write_text("{}\n")
    journal = Journal(tmp_path)
    make_fault(journal, 8)
    assert details(journal) == [7, 8]


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("fault", {"what": "x", "prompt": "Dear doctor"}, "prompt"),
        ("fault", {"what": "Dear doctor, my knee hurts"}, "what"),
        ("fault", {"what": "x", "detail": "x" * 201}, "detail"),
        ("fault", {"what": "x", "detail": object()}, "object"),
        ("training", {"step": 1, "loss": [1, 2, 3], "records_seen": 1}, "loss"),
        ("acceptance", {**EXAMPLES["acceptance"], "domain": "d" * 65}, "domain"),
        ("gate", {**EXAMPLES["gate"], "verdict": "perhaps"}, "verdict"),
        ("state", {}, "phase"),
    ],
)
def test_what_is_neither_number_nor_identifier_is_refused(
    tmp_path: Path, kind: Any, fields: dict[str, Any], named: str
):
    journal = Journal(tmp_path)
    with pytest.raises((TypeError, ValueError), match=named):
        journal.write(ENTRIES[kind](**fields))
    assert journal.read().entries == []


def test_numpy_numbers_are_numbers_and_infinite_ones_are_none(tmp_path: Path):
    entry = Journal(tmp_path).write(
        TrainingEntry(step=np.int64(3), loss=np.float32("nan"), records_seen=np.int32(1))
    )
    assert isinstance(entry, TrainingEntry)
    assert (entry.step, entry.loss, entry.records_seen) == (3, None, 1)


def test_a_long_reason_is_one_line_and_cut(tmp_path: Path):
    entry = Journal(tmp_path).write(StateEntry(phase="halted", reason="a\nb  c" + "x" * 1000))
    assert entry.reason.startswith("a b cxx")
    assert len(entry.reason) == journal_module.MAX_REASON_CHARS


def test_no_word_of_others_reaches_a_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    journal = Journal(tmp_path, observers=[to_stderr])
    written = journal.write(FaultEntry(what="x", reason="a \x1b[2J\r\n{} \x9b\u202e"))
    assert written.reason == r"a \x1b[2J {} \x9b\u202e"
    label = "Zürich \x1b[2J\x9b\u202e\U000e0001"
    journal.write(AcceptanceEntry(domain=label, draft_version="v1", drafts=1, accepted=1, tau=2.0))
    log = capsys.readouterr().err
    assert all(line.isascii() and line.isprintable() for line in log.splitlines())
    assert json.loads(log.splitlines()[1])["domain"] == label
    for name in ("v\x1b[2J", "v\x9b", "v1\n", "v\x7f"):
        with pytest.raises(ValueError, match="what"):
            journal.write(FaultEntry(what=name))


def test_reading_goes_on_behind_the_offset(tmp_path: Path):
    journal = Journal(tmp_path)
    make_fault(journal, 0)
    _, offset = journal.read()
    assert journal.read(offset) == ([], offset)
    make_fault(journal, 1)
    assert details(journal, offset) == [1]
    assert details(Journal(tmp_path)) == [0, 1], "a reader of its own sees the same"


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_waits_and_is_then_passed_over(tmp_path: Path, cut: int):
    journal = Journal(tmp_path)
    make_fault(journal, 0)
    _, offset = journal.read()
    make_fault(journal, 1)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-cut])
    assert journal.read(offset) == ([], offset)
    restarted = Journal(tmp_path)
    make_fault(restarted, 2)
    assert details(journal, offset) in ([2], [1, 2])  # cut = 1 loses only the end of the line
    assert details(journal) == [0, *details(journal, offset)]


@pytest.mark.parametrize(
    "damage", [b"\x00\xff\xfe garbage\r\n", b'{"kind":"dance","time_s":1}\n', b"\n\n", b"[]\n"]
)
def test_a_damaged_or_foreign_line_is_passed_over(tmp_path: Path, damage: bytes):
    journal = Journal(tmp_path)
    make_fault(journal, 0)
    with next(tmp_path.iterdir()).open("ab") as file:
        file.write(damage)
    make_fault(journal, 1)
    assert details(journal) == [0, 1]


def test_rotation_bounds_the_bytes_and_keeps_the_newest(tmp_path: Path):
    journal = Journal(tmp_path, max_bytes=8000)
    offset, seen = 0, []
    for number in range(500):
        make_fault(journal, number)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 8000 + 8 * 100
        if number % 3 == 0:  # a reader that keeps up sees every entry once, over all rotations
            entries, offset = journal.read(offset)
            seen += [int(entry.detail) for entry in entries]
    assert seen == list(range(499))[: len(seen)]
    kept = details(journal)
    assert kept == list(range(kept[0], 500))
    assert len(kept) > 60
    assert len(list(tmp_path.iterdir())) == journal_module.NUM_FILES


def test_a_reader_left_behind_goes_on_at_the_oldest_that_is_kept(tmp_path: Path):
    journal = Journal(tmp_path, max_bytes=800)
    make_fault(journal, 0)
    _, offset = journal.read()
    for number in range(1, 100):
        make_fault(journal, number)
    assert details(journal, offset) == details(journal)


def test_a_journal_that_was_removed_is_read_from_its_new_beginning(tmp_path: Path):
    journal = Journal(tmp_path)
    for number in range(10):
        make_fault(journal, number)
    _, offset = journal.read()
    for path in tmp_path.iterdir():
        path.unlink()
    assert journal.read(offset) == ([], 0)
    make_fault(journal, 7)
    assert details(journal, offset) == [7]


def test_threads_never_tear_each_others_lines(tmp_path: Path):
    journal = Journal(tmp_path, max_bytes=1 << 20)
    numbers = itertools.count()
    threads = [
        threading.Thread(target=lambda: [make_fault(journal, next(numbers)) for _ in range(100)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(details(journal)) == list(range(400))


def test_kill_9_loses_no_entry_that_was_written(tmp_path: Path):
    code = (
        "import sys, pathlib; from online.journal import FaultEntry, Journal\n"
        "journal = Journal(pathlib.Path(sys.argv[1]))\n"
        "for n in range(10**9): journal.write(FaultEntry(what='test', detail=str(n))); print(n, "
        "flush=True)"
    )
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(50)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
        process.wait()
        acknowledged = [int(line) for line in lines if line.endswith(b"\n")]
        found = details(Journal(tmp_path))
        last = found[len(found) - found[::-1].index(0) - 1 :]
        assert set(acknowledged) <= set(last)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_loses_entries_and_nothing_else(tmp_path: Path):
    seen: list[object] = []
    journal = Journal(tmp_path, [seen.append])
    full = tmp_path / "journal-0000000000000000.jsonl"
    full.symlink_to("/dev/full")
    make_fault(journal, 0)
    make_fault(journal, 1)
    assert journal.num_lost == 2
    assert len(seen) == 2, "the log and the metrics still say it"
    full.unlink()
    make_fault(journal, 2)
    assert (details(journal), journal.num_lost) == ([2], 2)


def test_an_observer_that_fails_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def fail(entry: object) -> None:
        raise RuntimeError("a secret")

    seen: list[object] = []
    journal = Journal(tmp_path, [fail, seen.append])
    make_fault(journal, 0)
    assert len(seen) == 1
    assert details(journal) == [0]
    assert "RuntimeError" in caplog.text
    assert "a secret" not in caplog.text


def test_the_gates_numbers_come_back_by_domain(tmp_path: Path):
    entry = Journal(tmp_path).write(GateEntry(**EXAMPLES["gate"]))
    assert isinstance(entry, GateEntry)
    assert entry.domains["my code"].low == 0.1
    assert entry.contexts["64 to 127 tokens"].requests == 30
