"""A learner of one domain.

The traffic it learns from, the servers it looks after, and the place it publishes to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import pytest
from fake_fleet import TOKEN
from learner_world import World, make_draft, make_records, ship
from run_stream import TARGET, VOCAB, make_record
from waiting import until

from redraft.online.daemon.config import load_config
from redraft.online.fleet.discovery import FleetConfig
from redraft.online.fleet.registry import Registry
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig, Replay
from redraft.online.learning.stream import StreamSource
from redraft.online.records.nats_config import Nats, StreamLimits
from redraft.online.records.publisher import Publisher
from redraft.online.records.record import encode_frame, encode_record, read_frames


def frames_of(*records):
    return list(read_frames(b"".join(map(encode_record, records))))


def domains_of(stored):
    return {getattr(one, "record", one).domain for one in stored}


def used(buffer):
    """The domains of all records a learner takes from the buffer."""
    replayed = buffer.replay(100, [], through=10**9, now_s=0, seed=0, policy=Replay())
    return (
        domains_of(buffer.fresh(0, 100))
        | domains_of(replayed)
        | domains_of(buffer.read(buffer.select_held_out(100)))
    )


def make_mixed(count):
    return [
        make_record(number, rows=4, domain=["code", "prose", ""][number % 3])
        for number in range(count)
    ]


def test_only_records_of_its_domain_are_kept_and_the_others_are_counted():
    with Buffer(BufferConfig(held_out_fraction=0.3), TARGET, domain="code") as buffer:
        counts = buffer.append(frames_of(*make_mixed(30)), 0.0)
        assert counts == {"stored": 10, "other_domain": 20}
        assert used(buffer) == {"code"}
        assert buffer.status().counts["other_domain"] == 20


def test_what_was_kept_for_all_domains_is_not_used_for_one(tmp_path):
    config = BufferConfig(folder=tmp_path, held_out_fraction=0.3)
    with Buffer(config, TARGET) as buffer:
        buffer.append(frames_of(*make_mixed(30)), 0.0)
        assert used(buffer) == {"code", "prose", ""}
    with Buffer(config, TARGET, domain="prose") as buffer:
        assert used(buffer) == {"prose"}
        assert buffer.status().num_foreign == 20
        assert set(buffer.status().num_held_out) == {"prose"}


def test_a_domain_that_could_not_travel_is_refused(tmp_path):
    (tmp_path / "learner.toml").write_text(
        'target = "t"\nregistry = "r"\nspool = "s"\ndomain = "códe"'
    )
    with pytest.raises(ValueError, match="'códe'"):
        load_config(tmp_path / "learner.toml")


def test_learners_of_two_domains_share_a_log(broker):
    """Each learner takes the records of one domain, whoever comes first, and leaves the others."""
    nats = Nats(fleet="by-domain")

    def source(buffer):
        return StreamSource(broker.url, nats, StreamLimits(max_bytes=64 << 20), buffer, VOCAB)

    async def take(buffer):
        taken, its = Counter(), source(buffer)
        while taken.total() < 10:
            taken += (await its.take()).counts
        await its.close()
        return taken

    async def main(code, prose):
        publisher = Publisher(broker.url, nats)
        publisher.write([encode_frame(record) for record in make_mixed(30)])
        async with asyncio.timeout(30):
            assert await take(code) == {"stored": 10}
            assert await take(prose) == {"stored": 10}
        await asyncio.to_thread(publisher.close)

    config = BufferConfig(held_out_fraction=0)
    with (
        Buffer(config, TARGET, domain="code") as code,
        Buffer(config, TARGET, domain="prose") as prose,
    ):
        asyncio.run(main(code, prose))
        assert (used(code), used(prose)) == ({"code"}, {"prose"})


def test_every_domain_has_its_own_gate_registry_and_rollout(random_target, tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    draft = make_draft(random_target, tmp_path / "draft")
    fleet = tmp_path / "fleet.toml"
    worlds = {}
    for domain in ("code", "prose"):
        (tmp_path / domain).mkdir()
        worlds[domain] = World.make(tmp_path / domain, random_target, draft, servers=2)
    mixed = [
        r
        for d, seed in (("code", 1), ("prose", 2))
        for r in make_records(random_target, 120, seed=seed, domain=d)
    ]

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            for world in worlds.values():
                await stack.enter_async_context(world.fleet())
            servers = [
                (fake.url, domain) for domain, world in worlds.items() for fake in world.fakes
            ]
            fleet.write_text(
                "".join(
                    f'[[servers]]\nurl = "{url}"\ndomain = "{domain}"\n' for url, domain in servers
                )
            )
            for domain, world in worlds.items():
                gate = replace(
                    world.config().gate, min_gain=-1, max_domain_loss=1
                )  # the gain does not matter here
                learner = world.learner(
                    fleet=FleetConfig(file=fleet, poll_s=0.1), domain=domain, gate=gate
                )
                task = await stack.enter_async_context(learner)
                ship(
                    world.spool, mixed
                )  # some requests of the other domain came here while their servers were down
                await until(
                    lambda world=world: world.registry.current() not in (None, "v000001"), task
                )
                version = world.registry.current()
                await until(
                    lambda world=world, v=version: all(fake.version == v for fake in world.fakes),
                    task,
                )

    asyncio.run(main())
    for domain, world in worlds.items():
        verdicts = [entry for entry in world.entries("gate") if entry.verdict == "promote"]
        assert [set(verdict.domains) for verdict in verdicts] == [{domain}] * len(verdicts)
        assert verdicts
        assert world.entries("buffer")[-1].dropped["other_domain"] == 120
        assert Registry(world.root / "registry").current() != "v000001"
    servers = {fake.url for world in worlds.values() for fake in world.fakes}
    for world in worlds.values():
        looked_at = {entry.server for entry in world.entries("acceptance") if entry.server}
        assert looked_at == {fake.url for fake in world.fakes} < servers
