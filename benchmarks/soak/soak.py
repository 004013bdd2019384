"""Run the whole online service under traffic and random faults.

At the end, judge whether it survived all faults.

    $ make soak                                              # 30 minutes on two cores: outputs/soak/report.json
    $ python -m benchmarks.soak --overwrite --minutes 3 --faults 12 --seed 7

Two real vLLM servers, a tap before each, a real nats-server and two learners run under a supervisor
that restarts them whenever they end. Clients stream, hang up, request several answers and opt out.
Meanwhile processes are killed and stopped, disks fill up and hang, clocks jump, hostile records
arrive, and an attacker sends mutated requests. Everything stays on this machine. Full and hung
disks need root, and clock jumps need libfaketime (Debian: apt-get install faketime); without them,
these faults are skipped. The exit status is 1 if the service did not survive everything.
"""

from __future__ import annotations

import asyncio
import queue
import random
import secrets
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.broker import find_broker
from benchmarks.demo.fleet import begin_report
from benchmarks.results import write_results
from benchmarks.soak.attack import BURST, Attack, Door
from benchmarks.soak.clients import Clients
from benchmarks.soak.disks import unmount_below
from benchmarks.soak.faults import (
    Fault,
    Injected,
    NotSurvivedError,
    World,
    count_waiting,
    inject,
    list_faults,
    shuffle,
    until_well,
)
from benchmarks.soak.judge import FaultSeen, LifeSeen, RecordsSeen, Seen, judge, write_table
from benchmarks.soak.stage import NATS, Stage, set_stage
from benchmarks.soak.supervisor import Supervised
from benchmarks.soak.witness import Witness
from redraft.distill.data.day import choose_day
from redraft.engine.process import exiting_on_sigterm
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.cycle import GOES_ON
from redraft.online.journal import BufferEntry, Journal, StateEntry
from redraft.online.records.nats_link import probe
from redraft.online.records.record import Record, read_frames
from redraft.online.records.spool import SpoolWriter
from redraft.recipes.cli.run import run_recipe

START_S = 900.0
"""Deadline for the first start of all processes."""

CALM_SHARE, MAX_CALM_S = 0.1, 120.0
"""Share of the duration, at its end, with traffic but without new faults; at most MAX_CALM_S."""

SETTLE_S = 600.0
"""Time in seconds after the traffic in which the log and the spool must become empty and all
servers must serve the current version.
"""

PROMOTING_MINUTES = 20.0
"""Minimum duration of a soak that must promote a version. A learner's first version takes several
minutes, and faults delay it.
"""

ATTACKS_PER_MINUTE = 10_000 / 30
"""Minimum number of the attacker's requests per minute."""

PROGRESS_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = Path("tests/assets/tiny-target")
    """Folder of the target model."""
    output: Path = Path("outputs/soak")
    """Folder for the report, the drafts, the disks and the logs."""
    overwrite: bool = False
    """Replace an earlier soak in `output`."""
    minutes: float = 30
    """Duration of the traffic, in minutes. Starting and judging take a few minutes more."""
    faults: int = 100
    """Number of faults to inject, spread evenly over the time. If all remaining targets are still
    recovering when the time is up, there are fewer; the table shows how many.
    """
    seed: int | None = None
    """Random seed for faults and traffic. By default, a new seed is drawn and printed."""
    clients: int = 8
    """Number of clients, each with one request at a time."""
    pause_s: float = 0.5
    """Mean pause of a client between two requests, in seconds."""


def main(cfg: Config) -> None:
    seed = secrets.randbelow(1 << 31) if cfg.seed is None else cfg.seed
    print(f"seed: {seed}", flush=True)
    # Unmount before `begin_report` empties the folder: a killed soak may have left disks mounted
    # there.
    unmount_below(cfg.output.absolute())
    day = choose_day()
    report = begin_report(cfg, day) | {"seed": seed}
    began_s = time.monotonic()
    with exiting_on_sigterm(), ExitStack() as opened:
        stage = set_stage(cfg.output.absolute(), cfg.target, day, opened)
        seen = asyncio.run(play(cfg, stage, random.Random(seed)))
        report |= judge(seen)
        if report["failures"]:
            # Copy inside the block, because the disks are unmounted at its end.
            keep_evidence(stage, cfg.output / "evidence")
    report["duration_s"] = round(time.monotonic() - began_s, 1)
    write_results(cfg.output / "report.json", report)
    print(write_table(report))
    print(f"report: {cfg.output / 'report.json'}")
    if report["failures"]:
        print(f"copies of the buffers and the broker's files: {cfg.output / 'evidence'}")
        raise SystemExit(1)


async def play(cfg: Config, stage: Stage, rng: random.Random) -> Seen:
    """Run the service, the clients and the faults; return everything that was seen."""
    shipper = Shipper(SpoolWriter(stage.spool, "soak", 1 << 30))
    witness = Witness(stage.ingest, NATS, shipper.waiting.put)
    world = World(stage=stage, processes=build_processes(stage), witness=witness, rng=rng)
    async with running(world):
        await asyncio.gather(*(until_well(world, name, START_S) for name in world.processes))
        print(
            f"{len(world.processes)} processes are up; {cfg.minutes:g} minutes of faults begin",
            flush=True,
        )
        # The clients get their own generator, so that the number of requests does not change the
        # faults drawn.
        clients = Clients(
            {stage.url(name): world.processes[name].was_up for name in stage.taps},
            stage.prompts,
            random.Random(rng.random()),
            cfg.clients,
            cfg.pause_s,
        )
        attack = Attack(doors=build_doors(world), seed=rng.randrange(1 << 31))
        print(f"seed of the attacker: {attack.seed}", flush=True)
        injected = await play_faults(cfg, world, clients, attack)
        await settle(world, shipper)
        served = {name: await read_version(stage, name) for name in stage.servers}
    acked = {"log": set(witness.acked), "spool": shipper.shipped}
    return Seen(
        num_planned=cfg.faults,
        faults=[
            FaultSeen(
                name=one.fault.name,
                at=f"{one.began:%H:%M:%S}",
                problem=one.problem,
                seconds=one.seconds,
            )
            for one in sorted(injected, key=lambda one: one.began)
        ],
        records={
            way: see_records(stage.learners[name], acked[way])
            for way, name in (("log", "learner"), ("spool", "spool-learner"))
        },
        served=served,
        current=stage.registry.current() or "none",
        num_promoted=len(stage.registry.promoted()) - 1,
        must_promote=cfg.minutes >= PROMOTING_MINUTES,
        requests=clients.tally.counts,
        untold=clients.tally.untold,
        attack=attack.describe(),
        must_attack=int(ATTACKS_PER_MINUTE * cfg.minutes),
        lives=[
            life
            for process in world.processes.values()
            for life in see_lives(process, read_settled(stage.learners.get(process.name)))
        ],
    )


# -------------------------------------------------------------------------------------------------------
# the service


def build_processes(stage: Stage) -> dict[str, Supervised]:
    command = [find_broker(), "-c", str(stage.folder / "nats.conf")]
    broker = Supervised(
        "broker",
        command,
        stage.log("broker"),
        # The liveness probe of docs/fleet.md: `redraft fleet probe`.
        liveness=lambda: probe(stage.ingest, NATS),
    )
    others = [
        *(stage.build_learner(name) for name in stage.learners),
        *(stage.build_tap(number + 1) for number in range(len(stage.taps))),
    ]
    servers = [stage.build_server(number + 1) for number in range(len(stage.servers))]
    return {process.name: process for process in (broker, *servers, *others)}


def build_doors(world: World) -> list[Door]:
    """Return the processes under attack.

    The second server is not attacked, so that it can take over requests from the first.
    """
    processes, ports = world.processes, world.stage.ports
    api = (b"/v1/completions", b"/v1/models", b"/v1/messages/", b"/health", b"/redraft/status")
    plugin, page = (
        (b"/redraft/status", b"/redraft/swap"),
        (b"/overview.json", b"/metrics", b"/", b"/page.js"),
    )
    streams = "/v1/completions"
    return [
        *(
            Door(
                process=processes[name],
                port=ports[name],
                paths=api,
                generates=True,
                streams=streams,
            )
            for name in world.stage.taps
        ),
        Door(process=processes["learner"], port=ports["learner-page"], paths=page),
        Door(process=processes["server-1"], port=ports["server-1"], paths=plugin, streams=streams),
    ]


@asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    """Supervise all processes, and listen to the log, until the block ends."""
    keepers = [process.supervise() for process in world.processes.values()]
    tasks = [asyncio.create_task(task) for task in (*keepers, world.witness.listen())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Shipper:
    """Writes the witness's records into the spool, as a server would.

    A thread writes them, because the disk may hang.
    """

    def __init__(self, writer: SpoolWriter) -> None:
        self.writer = writer
        self.waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.shipped: set[str] = set()
        """Ids of the records that are in the spool, or were, and can be read there."""
        self.dropped: set[str] = set()
        """Ids of the records that a full disk refused, and of those that continue one. The sender
        counts the refused ones, and the learner the others, so no loss is silent.
        """
        threading.Thread(target=self._ship_forever, name="shipper", daemon=True).start()

    def _ship_forever(self) -> None:
        while True:
            self.ship(self.waiting.get())

    def ship(self, data: bytes) -> None:
        records = [record for _, record in read_frames(data) if isinstance(record, Record)]
        try:
            self.writer.write([data])
            is_written = True
        except OSError:
            is_written = False
        for record in records:
            # The learner cannot read a continuation if the text before it was dropped.
            is_cut = bool(record.context_begin) and record.previous_id in self.dropped
            is_read = is_written and not is_cut
            (self.shipped if is_read else self.dropped).add(record.record_id)


# -------------------------------------------------------------------------------------------------------
# the faults


async def play_faults(
    cfg: Config, world: World, clients: Clients, attack: Attack
) -> list[Injected]:
    """Run traffic and attacks for `cfg.minutes`, with faults until the calm end."""
    began_s, is_over = time.monotonic(), asyncio.Event()
    length_s = 60 * cfg.minutes
    calm_s = min(MAX_CALM_S, CALM_SHARE * length_s)
    injected: list[Injected] = []
    deck = shuffle(list_faults(world.stage), cfg.faults, world.rng)
    async with asyncio.TaskGroup() as tasks:
        traffic = tasks.create_task(clients.run(is_over))
        tasks.create_task(attack.run(is_over, 60 * BURST / (1.3 * ATTACKS_PER_MINUTE)))
        progress = tasks.create_task(show_progress(world, clients, injected, began_s, length_s))
        # The inner group ends when every fault has a result. Traffic and progress reports continue.
        async with asyncio.TaskGroup() as faults:
            busy: set[str] = set()
            for number in range(cfg.faults):
                await asyncio.sleep(
                    began_s + (length_s - calm_s) * number / cfg.faults - time.monotonic()
                )
                while (
                    fault := take_free(deck, busy)
                ) is None and time.monotonic() < began_s + length_s - calm_s:
                    await asyncio.sleep(0.5)
                if fault is not None:
                    busy.add(fault.target)
                    faults.create_task(_inject(world, fault, injected, busy))
        # Keep the calm period at full length even if the last fault took longer than planned.
        await asyncio.sleep(max(calm_s, began_s + length_s - time.monotonic()))
        is_over.set()
        await traffic
        progress.cancel()
    return injected


def take_free(deck: list[Fault], busy: set[str]) -> Fault | None:
    """Take the first fault from the deck whose target no other fault occupies."""
    for fault in deck:
        if fault.target not in busy:
            deck.remove(fault)
            return fault
    return None


async def _inject(world: World, fault: Fault, injected: list[Injected], busy: set[str]) -> None:
    found = await inject(world, fault)
    injected.append(found)
    busy.discard(fault.target)
    if found.problem:
        print(f"NOT SURVIVED: {fault.name}: {found.problem}", flush=True)


async def show_progress(
    world: World, clients: Clients, injected: list[Injected], began_s: float, length_s: float
) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        survived = sum(not one.problem for one in injected)
        down = [name for name, process in world.processes.items() if process.pid is None]
        requests = ", ".join(
            f"{count} {kind}" for kind, count in sorted(clients.tally.counts.items())
        )
        print(
            f"{_clock(time.monotonic() - began_s)} of {_clock(length_s)}: {survived} of "
            f"{len(injected)} faults "
            f"survived; requests: {requests}; {len(world.witness.acked)} records acknowledged"
            + (f"; down: {', '.join(down)}" if down else ""),
            flush=True,
        )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


# -------------------------------------------------------------------------------------------------------
# the end


async def settle(world: World, shipper: Shipper) -> None:
    """Wait until the log and the spool are empty and all servers serve the current version.

    After SETTLE_S seconds, the function returns anyway, and the judge reports what is missing.
    """
    with suppress(TimeoutError, NotSurvivedError):
        async with asyncio.timeout(SETTLE_S):
            await asyncio.gather(*(until_well(world, name, SETTLE_S) for name in world.processes))
            while not await _is_settled(world, shipper):
                await asyncio.sleep(1)


async def _is_settled(world: World, shipper: Shipper) -> bool:
    waiting = [await count_waiting(world, name) for name in world.stage.learners]
    served = {await read_version(world.stage, name) for name in world.stage.servers}
    return (
        not any(waiting) and shipper.waiting.empty() and served == {world.stage.registry.current()}
    )


async def read_version(stage: Stage, server: str) -> str:
    """Return the version that the server reports as served; empty if it does not answer."""
    try:
        async with httpx.AsyncClient(
            timeout=30, headers={"Authorization": f"Bearer {stage.token}"}
        ) as http:
            answer = (await http.get(f"{stage.url(server)}/redraft/status")).raise_for_status()
        return str(answer.json()["draft_version"])
    except (httpx.HTTPError, ValueError, KeyError):
        return ""


def keep_evidence(stage: Stage, folder: Path) -> None:
    """Copy the contents of the disks: the buffers and the broker's files.

    The disks themselves are unmounted when the soak ends.
    """
    for name, disk in stage.disks.items():
        shutil.copytree(disk.folder, folder / name, dirs_exist_ok=True)


def read_settled(cfg: LearnerConfig | None) -> list[list[int]]:
    """Return the memory that a learner kept at each phase change, by life.

    Changes before a life's first training attempt are left out. The list is empty without a
    configuration.
    """
    lives: list[list[int]] = []
    for entry in Journal(cfg.folder / "journal").read().entries if cfg else ():
        if isinstance(entry, StateEntry) and entry.resident_bytes:
            if lives[-1] or entry.phase == "judging":
                lives[-1].append(entry.resident_bytes)
        elif isinstance(entry, StateEntry) and entry.reason.startswith(GOES_ON):
            lives.append([])
    return lives


def see_lives(process: Supervised, settled: list[list[int]]) -> list[LifeSeen]:
    def describe_exit(number: int) -> str:
        run = process.runs[number]
        is_unwanted = run.ended_s is not None and not run.is_wanted
        return (
            f"status {run.exit_status}, life {number + 1}, see {process.log.name}"
            if is_unwanted
            else ""
        )

    # A life that ended during start-up is not in the journal, so the two lists cannot be paired.
    if len(settled) != len(process.runs):
        settled = [[] for _ in process.runs]
    return [
        LifeSeen(
            name=process.name,
            samples=run.samples,
            settled=held,
            unwanted_exit=describe_exit(number),
        )
        for number, (run, held) in enumerate(zip(process.runs, settled, strict=True))
    ]


def see_records(cfg: LearnerConfig, acked: set[str]) -> RecordsSeen:
    """Return the records in a stopped learner's files, and those that it counted as dropped."""
    folder = cfg.buffer_config.folder
    assert folder is not None
    return RecordsSeen(
        acked=acked, stored=read_stored_ids(folder), dropped=sum_dropped(cfg.folder / "journal")
    )


def read_stored_ids(folder: Path) -> set[str]:
    """Return the ids of all records in the buffer's files that can still be decoded.

    The function does not use `Buffer`, because the judge must not rely on the code that it judges,
    and because `Buffer` returns only the newest request for each prompt.
    """
    stored = set[str]()
    for path in folder.glob("records-*.db"):
        with closing(sqlite3.connect(path)) as file:
            for (frame,) in file.execute("SELECT frame FROM records JOIN frames USING (seq)"):
                stored |= {
                    record.record_id
                    for _, record in read_frames(frame)
                    if isinstance(record, Record)
                }
    return stored


def sum_dropped(journal: Path) -> Counter[str]:
    """Sum the dropped records by reason over a learner's lives, each of which counts from 0."""
    total, last = Counter[str](), Counter[str]()
    for entry in Journal(journal).read().entries:
        if isinstance(entry, BufferEntry):
            now = Counter(entry.dropped)
            # A smaller count means that a new life began: the previous count is that life's final
            # one.
            if any(now[reason] < count for reason, count in last.items()):
                total += last
            last = now
    return total + last


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
