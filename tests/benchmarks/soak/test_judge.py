"""The judge of a soak.

Everything that was not survived becomes a failure, and nothing else does.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest

from benchmarks.soak.judge import FaultSeen, LifeSeen, RecordsSeen, Seen, judge, write_table
from benchmarks.soak.poison import TARGET, make_record
from benchmarks.soak.soak import read_stored_ids, sum_dropped
from redraft.online.journal import BufferEntry, Journal
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.records.record import encode_record, read_frames

IDS = [f"boot/cmpl-{number}/0" for number in range(100)]


def life(*, grown=0.0, descriptors=0, seconds=400.0, name="tap-1", **changes):
    """A process of 100 MiB and 50 descriptors that grows steadily.

    It grows by this share, and by so many descriptors.
    """
    count = int(seconds // 5)
    samples = [
        (5.0 * i, int((100 << 20) * (1 + grown * i / count)), 50 + descriptors * i // count)
        for i in range(count)
    ]
    return LifeSeen(name=name, samples=samples, **changes)


SURVIVED = Seen(
    faults=[
        FaultSeen(name="kill learner", seconds=3.0),
        FaultSeen(name="kill tap-1", seconds=2.0),
    ],
    num_planned=3,
    records={
        "log": RecordsSeen(acked=IDS, stored=IDS),
        "spool": RecordsSeen(acked=IDS[:50], stored=IDS[:50]),
    },
    served={"server-1": "v000002", "server-2": "v000002"},
    current="v000002",
    requests={"answered": 90, "left": 5, "told": 5},
    attack={"requests": 500, "ended": 0, "honest_streams_cut": 0, "problems": []},
    must_attack=500,
    lives=[life(), life(seconds=20, grown=10)],
)


def test_a_soak_that_survived_everything_has_no_failure():
    report = judge(SURVIVED)
    assert report["failures"] == []
    assert report["faults"]["injected"] == report["faults"]["survived"] == 2
    assert report["records"]["acked"] == 150
    assert report["records"]["lost"] == report["requests"]["failed_untold"] == 0
    assert report["memory"]["growth"] == pytest.approx(0, abs=1e-6)
    assert "NOT SURVIVED" not in write_table(report)
    assert "faults: 2 of 3 injected" in write_table(report)


@pytest.mark.parametrize(
    ("planted", "failure"),
    [
        (
            {"faults": [FaultSeen(name="kill tap-1", problem="it is still down")]},
            "kill tap-1: it is still down",
        ),
        ({"faults": []}, "no fault was injected"),
        (
            {"records": {"log": RecordsSeen(acked=IDS, stored=IDS[1:])}},
            "1 of 100 acknowledged records of the log are lost",
        ),
        (
            {
                "records": {
                    "log": RecordsSeen(
                        acked=IDS, stored=IDS[3:], dropped={"expired": 3, "corrupt": 50}
                    )
                }
            },
            "3 of 100 acknowledged records of the log are lost",
        ),
        (
            {"records": {"spool": RecordsSeen(acked=[], stored=[])}},
            "no record came through the spool",
        ),
        ({"served": {"server-1": "v000001", "server-2": "v000002"}}, "server-1 serves v000001"),
        ({"served": {"server-1": "", "server-2": "v000002"}}, "server-1 serves nothing"),
        (
            {"requests": {"answered": 9, "untold": 1}, "untold": ["silence"]},
            "1 requests failed untold.*silence",
        ),
        ({"requests": {"told": 9}}, "no request was answered"),
        ({"must_promote": True}, "no version was promoted, so no rollout was under fire"),
        ({"must_attack": 501}, "500 requests of the attacker, 501 are needed"),
        (
            {"attack": SURVIVED.attack | {"problems": ["tap-1 exited during a burst"]}},
            "attack: tap-1 exited during a burst",
        ),
        ({"lives": [life(grown=2.0)]}, "tap-1 grew"),
        ({"lives": [life(descriptors=200)]}, r"tap-1 grew.*\+1\d\d descriptors"),
        ({"lives": [life(unwanted_exit="status 1")]}, "tap-1 exited by itself: status 1"),
    ],
)
def test_each_planted_loss_is_found(planted, failure):
    report = judge(replace(SURVIVED, **planted))
    assert len(report["failures"]) == 1
    assert re.search(failure, report["failures"][0]), report["failures"]
    assert f"NOT SURVIVED: {report['failures'][0]}" in write_table(report)


def test_all_records_in_a_buffers_files_count_and_those_that_cannot_be_read_do_not(tmp_path):
    """Of the same prompt and tenant, held out, foreign.

    `Buffer` would hand out one request of each prompt.
    """
    records = [make_record(7, request_id=f"cmpl-{number}") for number in range(20)]
    records += [make_record(8, target_fingerprint="another")]
    frames = [encode_record(record) for record in records]
    config = BufferConfig(folder=tmp_path, held_out_fraction=0.999999)
    with Buffer(config, TARGET) as buffer:
        buffer.append(read_frames(b"".join(frames)), now_s=1.0)
        assert len(buffer.select_held_out(1 << 30)) + len(buffer.fresh(0, 99)) < 20
    assert read_stored_ids(tmp_path) == {record.record_id for record in records}
    with closing(sqlite3.connect(next(tmp_path.glob("records-*.db")))) as file, file:
        file.execute("UPDATE frames SET frame = substr(frame, 1, 40) WHERE seq = 3")
    assert read_stored_ids(tmp_path) == {record.record_id for record in records} - {
        records[2].record_id
    }


def test_growth_is_measured_after_the_warm_up_and_over_the_life():
    loading = [(5.0 * i, min(i, 20) * (100 << 20), 10 * min(i, 20)) for i in range(80)]
    growth = LifeSeen(name="server", samples=loading).find_growth()
    assert growth is not None
    assert growth.share == 0
    assert growth.descriptors == 0
    assert growth.by_minute == {0: 1100, **dict.fromkeys(range(1, 7), 2000)}
    assert LifeSeen(name="server", samples=loading[:40]).find_growth() is None
    assert LifeSeen(name="server").find_growth() is None


def test_a_learner_that_tells_its_memory_is_judged_by_that():
    swinging = [(1100 + 200 * (i % 3)) << 20 for i in range(24)]
    busy = life(grown=0.5, name="learner", settled=swinging)
    assert busy.find_growth().share == 0, "it is larger while it trains, and does not keep it"
    leaking = [size + (15 << 20) * i for i, size in enumerate(swinging)]
    growth = life(name="learner", settled=leaking).find_growth()
    assert growth.share > 0.1
    assert life(grown=0.5, name="learner", settled=swinging[:6]).find_growth().is_flat
    assert life(grown=0.5, name="learner", settled=swinging[:5]).find_growth() is None
    assert life(grown=0.5, name="learner").find_growth().share > 0.1, "it never trained"


def test_a_learner_that_begins_to_train_has_not_grown_but_one_whose_idle_size_rises_has():
    def grow(size_at):
        return LifeSeen(
            name="learner", samples=[(5.0 * i, size_at(i) << 20, 50) for i in range(120)]
        ).find_growth()

    assert grow(lambda i: 580 if i < 40 else 860).is_flat
    assert grow(lambda i: 580 + 380 * (i % 10 > 2)).is_flat  # trains and waits in turn
    assert not grow(lambda i: 580 + 3 * i + 380 * (i % 10 > 2)).is_flat


def test_the_counts_of_all_lives_of_a_learner_are_added(tmp_path):
    journal = Journal(tmp_path)
    for dropped in (
        {"corrupt": 1},
        {"corrupt": 5, "expired": 2},
        {"corrupt": 2},
        {"corrupt": 2, "foreign": 1},
    ):
        journal.write(BufferEntry(records=0, bytes=0, held_out=0, dropped=dropped))
    assert sum_dropped(tmp_path) == Counter({"corrupt": 7, "expired": 2, "foreign": 1})
