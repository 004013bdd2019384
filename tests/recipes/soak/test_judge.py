"""The judge of a soak: everything that was not survived becomes a failure, and nothing else does."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from redraft.online.journal import Journal
from redraft.recipes.soak.judge import FaultSeen, LifeSeen, RecordsSeen, Seen, judge, write_table
from redraft.recipes.soak.soak import sum_dropped

IDS = [f"boot/cmpl-{number}/0" for number in range(100)]


def life(*, grown=0.0, descriptors=0, seconds=400.0, name="router", **changes):
    """A process of 100 MiB and 50 descriptors that grows steadily, by this share and so many descriptors."""
    count = int(seconds // 5)
    samples = [
        (5.0 * i, int((100 << 20) * (1 + grown * i / count)), 50 + descriptors * i // count) for i in range(count)
    ]
    return LifeSeen(name=name, samples=samples, **changes)


SURVIVED = Seen(
    faults=[FaultSeen(name="kill learner", seconds=3.0), FaultSeen(name="kill router", seconds=2.0)],
    records={"log": RecordsSeen(acked=IDS, stored=IDS), "spool": RecordsSeen(acked=IDS[:50], stored=IDS[:50])},
    served={"server-1": "v000002", "server-2": "v000002"},
    current="v000002",
    requests={"answered": 90, "left": 5, "told": 5},
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


@pytest.mark.parametrize(
    ("planted", "failure"),
    [
        ({"faults": [FaultSeen(name="kill router", problem="it is still down")]}, "kill router: it is still down"),
        ({"faults": []}, "no fault was injected"),
        (
            {"records": {"log": RecordsSeen(acked=IDS, stored=IDS[1:])}},
            "1 of 100 acknowledged records of the log are lost",
        ),
        (
            {"records": {"log": RecordsSeen(acked=IDS, stored=IDS[3:], dropped={"expired": 2, "corrupt": 50})}},
            "1 of 100 acknowledged records of the log are lost",
        ),
        ({"records": {"spool": RecordsSeen(acked=[], stored=[])}}, "no record came through the spool"),
        ({"served": {"server-1": "v000001", "server-2": "v000002"}}, "server-1 serves v000001"),
        ({"served": {"server-1": "", "server-2": "v000002"}}, "server-1 serves nothing"),
        ({"requests": {"answered": 9, "untold": 1}, "untold": ["silence"]}, "1 requests failed untold.*silence"),
        ({"requests": {"told": 9}}, "no request was answered"),
        ({"lives": [life(grown=2.0)]}, "router grew"),
        ({"lives": [life(descriptors=200)]}, r"router grew.*\+1\d\d descriptors"),
        ({"lives": [life(unwanted_exit="status 1")]}, "router ended by itself: status 1"),
    ],
)
def test_each_planted_loss_is_found(planted, failure):
    report = judge(replace(SURVIVED, **planted))
    assert len(report["failures"]) == 1
    assert re.search(failure, report["failures"][0]), report["failures"]
    assert f"NOT SURVIVED: {report['failures'][0]}" in write_table(report)


def test_a_reason_explains_only_as_many_records_as_it_counts():
    way = RecordsSeen(acked=IDS, stored=IDS[10:], dropped={"expired": 4, "evicted": 3, "stored": 99, "corrupt": 99})
    assert way.num_lost == 3
    assert RecordsSeen(acked=IDS, stored=IDS[10:], dropped={"expired": 99}).num_lost == 0


def test_growth_is_measured_after_the_warm_up_and_over_the_life():
    loading = [(5.0 * i, min(i, 20) * (100 << 20), 10 * min(i, 20)) for i in range(80)]
    growth = LifeSeen(name="server", samples=loading).find_growth()
    assert growth is not None
    assert growth.share == 0
    assert growth.descriptors == 0
    assert LifeSeen(name="server", samples=loading[:40]).find_growth() is None
    assert LifeSeen(name="server").find_growth() is None


def test_the_counts_of_all_lives_of_a_learner_are_added(tmp_path):
    journal = Journal(tmp_path)
    for dropped in ({"corrupt": 1}, {"corrupt": 5, "expired": 2}, {"corrupt": 2}, {"corrupt": 2, "foreign": 1}):
        journal.write("buffer", records=0, bytes=0, held_out=0, dropped=dropped)
    assert sum_dropped(tmp_path) == Counter({"corrupt": 7, "expired": 2, "foreign": 1})
