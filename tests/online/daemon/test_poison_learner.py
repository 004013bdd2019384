"""A learner among ten thousand hostile records.

It neither ends nor stalls, and its memory stays bounded.
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest
from fake_fleet import TOKEN
from learner_world import ANYTHING, World, make_draft, make_records, ship
from run_learner import start
from waiting import until

from benchmarks.soak import poison
from redraft.files.folder import fingerprint
from redraft.online.daemon.memory import CACHES
from redraft.online.records.spool import spool_files

GIB = 1 << 30


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return 1024 * int(found[1])


@pytest.mark.slow
def test_a_learner_trains_on_what_is_good_among_ten_thousand_hostile_records(
    random_target, tmp_path, monkeypatch
):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    for name, capacity in CACHES.items():  # as `redraft learner` sets them
        monkeypatch.setenv(name, capacity)
    world = World.make(tmp_path, random_target, make_draft(random_target, tmp_path / "draft"))
    rng, target = random.Random(22), fingerprint(random_target)
    hostile = [poison.fuzz(rng, number, target) for number in range(10_000)]
    honest = make_records(random_target, 300)

    async def main():
        async with world.fleet():
            process = start(world.config(gate=ANYTHING))
            for part in range(100):
                # file names sort by time, so the learner meets an honest file after each hostile
                # one
                (world.spool / f"{part:020d}-hostile-0.records").write_bytes(
                    b"".join(hostile[100 * part : 100 * part + 100])
                )
                ship(world.spool, honest[3 * part : 3 * part + 3])
            await until(lambda: not process.is_alive() or not spool_files(world.spool))
            await until(
                lambda: not process.is_alive() or world.registry.current() not in (None, "v000001")
            )
            assert process.is_alive()
            peak = peak_bytes(process.pid)
            print(f"the learner held {peak >> 20} MiB at most")
            assert peak < GIB
            process.terminate()
            await until(lambda: not process.is_alive())
            assert process.exitcode == 0

    world.spool.mkdir(exist_ok=True)
    asyncio.run(main())
    stored = world.entries("buffer")[-1]
    assert stored.held_out > 40
    assert sum(stored.dropped.values()) > 7_500
    assert {
        "corrupt",
        "bad_identifier",
        "bad_sampling",
        "bad_probabilities",
        "not_finite",
    } <= stored.dropped.keys()
