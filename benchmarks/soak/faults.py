"""The faults that the soak injects.

Each fault is injected into the running service and then ended. The service survives it if the
target recovers.

kill      kill -9 of a process, or of the engine inside a server        the supervisor starts it again
stop      SIGSTOP of a process for seconds, then SIGCONT
fill      a disk is full for seconds
freeze    every write to a disk hangs for seconds
pipe      a server is asked to swap to a version whose weights include a pipe without a writer
clock     the wall clock of a process jumps, and jumps back
records   hostile records with correct checksums, in the log or in the spool
tear      a file is torn or a stray one appears while its process is down
"""

from __future__ import annotations

import asyncio
import datetime
import os
import random
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from benchmarks.soak import poison
from benchmarks.soak.stage import NATS, NO_SHIFT, Stage
from benchmarks.soak.supervisor import Supervised
from benchmarks.soak.witness import Witness
from redraft.files.artifact import write_whole
from redraft.online.daemon import control
from redraft.online.records.nats_link import BrokerError, connect, probe
from redraft.online.records.publisher import MESSAGE_ID
from redraft.online.records.spool import PARTIAL, SUFFIX

RECOVERY_S = 600.0
"""Deadline for a target to recover. A server takes half a minute to load, and minutes on a busy
machine.
"""

JUMPS = ("+1h", "-1h", "+1d", "-1d", "+8d")
"""Jumps of the wall clock. The longest exceeds the age at which the buffer deletes records, and the
learner must not delete any during such a short jump.
"""


class NotSurvivedError(Exception):
    """The target did not recover from the fault. The message says why."""


@dataclass(kw_only=True)
class World:
    """The running service that the faults act on."""

    stage: Stage
    processes: dict[str, Supervised]
    witness: Witness
    rng: random.Random


Act = Callable[[World, str], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    kind: str
    target: str
    act: Act = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"


@dataclass(frozen=True, kw_only=True)
class Injected:
    """One injected fault and its end."""

    fault: Fault
    began: datetime.datetime
    seconds: float
    """Time in seconds from the injection until the target recovered."""
    problem: str = ""
    """Why the service did not survive the fault; empty if it did."""


async def inject(world: World, fault: Fault) -> Injected:
    """Inject the fault, and wait until its target has recovered."""
    began, began_s = datetime.datetime.now(datetime.UTC), time.monotonic()
    problem = ""
    try:
        await fault.act(world, fault.target)
        await until_well(world, fault.target)
    except NotSurvivedError as error:
        problem = str(error)
    except Exception as error:  # the soak continues, and does not pass
        problem = f"it could not be injected: {error!r}"
    return Injected(fault=fault, began=began, seconds=time.monotonic() - began_s, problem=problem)


# -------------------------------------------------------------------------------------------------------
# being well


async def until_well(world: World, target: str, deadline_s: float = RECOVERY_S) -> None:
    """Wait until the target works.

    Raises:
        NotSurvivedError: the target does not work before the deadline.
    """
    end_s = time.monotonic() + deadline_s
    while True:
        problem = await find_problem(world, target)
        if not problem:
            return
        if time.monotonic() > end_s:
            raise NotSurvivedError(f"{target} is not well after {deadline_s:.0f} s: {problem}")
        await asyncio.sleep(0.5)


async def find_problem(world: World, target: str) -> str:
    """Return why the target does not work; empty if it does."""
    stage = world.stage
    try:
        async with asyncio.timeout(10):
            if target == "broker":
                await probe(stage.ingest, NATS)
            elif target in stage.learners:
                await control.ask(stage.learners[target].folder, control.Standing, do="status")
            else:
                async with httpx.AsyncClient() as http:
                    answer = await http.get(f"{stage.url(target)}/health")
                # A tap works even if its server is down: it then answers 503.
                is_tap = target in stage.taps
                if answer.status_code != 200 and not (is_tap and answer.status_code == 503):
                    return f"/health answers {answer.status_code}"
    except (OSError, ValueError, httpx.HTTPError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -------------------------------------------------------------------------------------------------------
# the acts


async def kill(world: World, target: str, child: str = "") -> None:
    """Kill a process or, if given, its child, and wait until the process has exited.

    Otherwise, the next check would see it as healthy.
    """
    process = world.processes[target]
    with suppress(LookupError):  # it is down already, after another fault
        process.kill(child)
    run, end_s = process.run, time.monotonic() + 60
    while run.ended_s is None:
        if time.monotonic() > end_s:
            raise NotSurvivedError(
                f"{process.name} is still running a minute after it or its engine was killed"
            )
        await asyncio.sleep(0.1)


async def stop(world: World, target: str) -> None:
    process, pid = world.processes[target], world.processes[target].pid
    process.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(world.rng.uniform(3, 15))
    finally:
        if process.pid == pid:  # else its liveness probe has had it restarted
            process.signal(signal.SIGCONT)


async def fill(world: World, target: str) -> None:
    disk = world.stage.disks[target]
    disk.fill()
    try:
        await asyncio.sleep(world.rng.uniform(5, 15))
    finally:
        disk.free()
    await until_flowing(world, target)


async def freeze(world: World, target: str) -> None:
    seconds = world.rng.uniform(4, 12)
    thawing = world.stage.disks[target].freeze(seconds, world.stage.log("freeze"))
    while thawing.poll() is None:
        await asyncio.sleep(0.2)
    await until_flowing(world, target)


async def until_flowing(world: World, target: str) -> None:
    """Wait until the broker acknowledges records again, or the learner has caught up.

    The learner has caught up when its log or spool is almost empty.
    """
    end_s = time.monotonic() + RECOVERY_S
    before = len(world.witness.acked)
    while True:
        if target == "broker" and len(world.witness.acked) > before:
            return
        # Not 0, because traffic continues and a few records are always waiting.
        if target != "broker" and await count_waiting(world, target) <= 16:
            return
        if time.monotonic() > end_s:
            raise NotSurvivedError(
                f"records still do not flow through {target} {RECOVERY_S:.0f} s after the fault"
            )
        await asyncio.sleep(1)


async def count_waiting(world: World, target: str) -> float:
    """Count the records in the log, or files in the spool, that the learner has not taken yet.

    The count is infinite if the broker does not answer.
    """
    if target == "spool-learner":
        return len(list(world.stage.spool.glob(f"*{SUFFIX}")))
    try:
        async with asyncio.timeout(10):
            client = await connect(world.stage.ingest, NATS, "learner")
            try:
                return float((await client.jetstream().stream_info(NATS.stream)).state.messages)
            finally:
                await client.close()
    except (OSError, TimeoutError):
        return float("inf")


async def offer_pipe(world: World, target: str) -> None:
    """Ask a server to swap to a version whose weights include a pipe without a writer.

    The server must refuse the version instead of waiting for the pipe.
    """
    stage = world.stage
    registry = stage.registry
    # The registry numbers versions from 1, so no real version has this name.
    folder = registry.folder / "v000000"
    shutil.copytree(registry.path(registry.current() or ""), folder)
    os.mkfifo(folder / "z.safetensors")
    deadline_s = time.monotonic() + RECOVERY_S
    try:
        async with httpx.AsyncClient(
            timeout=60, headers={"Authorization": f"Bearer {stage.token}"}
        ) as http:
            while True:
                try:
                    answer = await http.post(
                        f"{stage.url(target)}/redraft/swap", json={"version": folder.name}
                    )
                except httpx.HTTPError as error:
                    found, is_taken = f"{type(error).__name__} {error}", False
                else:
                    found, is_taken = f"{answer.status_code} {answer.text}", answer.is_success
                    if (
                        answer.status_code == 422
                    ):  # more requests arrive while the server is busy with a swap
                        return
                if is_taken or time.monotonic() > deadline_s:
                    raise NotSurvivedError(
                        f"{target} did not refuse a version with a pipe: {found}"
                    )
                await asyncio.sleep(2)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def shift_clock(world: World, target: str) -> None:
    path = world.stage.clock_file(target)
    write_whole(path, world.rng.choice(JUMPS) + "\n")
    try:
        await asyncio.sleep(world.rng.uniform(5, 15))
    finally:
        write_whole(path, NO_SHIFT)
    await asyncio.sleep(2)  # the library looks at the file once a second


async def poison_log(world: World, target: str) -> None:
    """Publish hostile records to the log, as soon as no other fault blocks the broker."""
    deadline_s = time.monotonic() + RECOVERY_S
    while not await _publish_hostile(world):
        if time.monotonic() > deadline_s:
            raise NotSurvivedError(
                "the log accepted no hostile record, so the learner was not tested"
            )
        await asyncio.sleep(2)
    await until_flowing(world, "learner")


async def _publish_hostile(world: World, count: int = 100) -> int:
    """Publish hostile records. Return how many of them the log acknowledged."""
    number, published = world.rng.randrange(1 << 30), 0
    with suppress(BrokerError, OSError, TimeoutError):
        client = await connect(world.stage.ingest, NATS)
        try:
            stream = client.jetstream(timeout=10)
            for i in range(count):
                content = _draw_hostile(world, number + i)
                await stream.publish(
                    NATS.subject(""), content, headers={MESSAGE_ID: f"hostile-{number + i}"}
                )
                published += 1
        finally:
            await client.close()
    return published


async def poison_spool(world: World, target: str) -> None:
    """Write files of hostile records, and entries that are not files, into the spool."""
    number = world.rng.randrange(1 << 30)
    for i in range(20):
        content = b"".join(_draw_hostile(world, number + 5 * i + j) for j in range(5))
        await asyncio.to_thread(
            _write_spool, world.stage.spool, f"{time.time_ns():020d}-hostile-{i:08d}", content
        )
    odd = world.stage.spool / f"{time.time_ns():020d}-hostile-pipe{SUFFIX}"
    await asyncio.to_thread(os.mkfifo, odd)
    try:
        await asyncio.sleep(3)
    finally:
        await asyncio.to_thread(odd.unlink, missing_ok=True)
    await until_flowing(world, "spool-learner")


def _write_spool(spool: Path, name: str, content: bytes) -> None:
    partial = spool / f".{name}{PARTIAL}"
    with suppress(OSError):  # the disk is full: another fault's doing
        partial.write_bytes(content)
        partial.rename(spool / f"{name}{SUFFIX}")


def _draw_hostile(world: World, number: int) -> bytes:
    """Return a fuzzed record, or rarely frames that need far more memory than their size.

    Such frames unpack to 60 MB, are nested 100,000 levels deep, hold 40 MB of compressed hidden
    states, or continue a long text a hundred times.
    """
    draw = world.rng.random()
    if draw < 0.01:
        return poison.make_bomb(number)
    if draw < 0.02:
        return poison.make_nested(100_000)
    if draw < 0.03:
        return poison.make_float8(number, 40 << 20)
    if draw < 0.05:
        return b"".join(poison.make_chain(number, (16 << 20) // 4, 100, 160_000))
    return poison.fuzz(world.rng, number, world.stage.fingerprint)


async def flood_spool(world: World, target: str) -> None:
    """Write one tenant's valid records into the spool: far more and longer than other tenants'."""
    number = world.rng.randrange(1 << 30)
    for i in range(20):
        frames = poison.make_flood(number + 50 * i, 50, world.stage.fingerprint)
        name = f"{time.time_ns():020d}-flood-{i:08d}"
        await asyncio.to_thread(_write_spool, world.stage.spool, name, frames)
    await until_flowing(world, target)


# -------------------------------------------------------------------------------------------------------
# torn files


async def tear_learner(world: World, target: str) -> None:
    """Kill the learner, and damage a file in its folder before it restarts."""
    await kill(world, target)
    folder = world.stage.learners[target].folder
    world.rng.choice((_tear_journal, _leave_partial_checkpoint, _leave_stray_files))(folder)


def _tear_journal(folder: Path) -> None:
    """Append a line that is incomplete and not valid UTF-8."""
    with (
        suppress(OSError),
        max((folder / "journal").glob("journal-*.jsonl"), default=folder / "none").open(
            "ab"
        ) as file,
    ):
        file.write(b'{"kind":"state","time_s":17\xff\xfe\0\0')


def _leave_partial_checkpoint(folder: Path) -> None:
    with suppress(OSError):
        partial = folder / "checkpoints" / ".checkpoint-99.partial"
        partial.mkdir(parents=True, exist_ok=True)
        (partial / "model.safetensors").write_bytes(b"torn")


def _leave_stray_files(folder: Path) -> None:
    with suppress(OSError):
        (folder / "state.json.partial").write_bytes(b"{")
        (folder / control.SOCKET).write_bytes(b"")


async def tear_fleet(world: World, target: str) -> None:
    """Tear fleet.toml for some seconds, as an editor that writes in place does."""
    path = world.stage.folder / "fleet.toml"
    whole = path.read_text()
    # Write in place instead of renaming, so that readers see the torn file.
    path.write_text(whole[: world.rng.randrange(len(whole))])
    try:
        await asyncio.sleep(world.rng.uniform(4, 10))
    finally:
        write_whole(path, whole)


async def tear_spool(world: World, target: str) -> None:
    """Kill the spool's learner, and leave it a torn file and a partial file."""
    await kill(world, target)
    spool, now = world.stage.spool, time.time_ns()
    await asyncio.to_thread(_write_spool, spool, f"{now:020d}-torn-{0:08d}", poison.pack({})[:-3])
    with suppress(OSError):
        (spool / f".{now:020d}-torn-00000001{PARTIAL}").write_bytes(b"RDR1")


# -------------------------------------------------------------------------------------------------------
# the deck


def list_faults(stage: Stage) -> list[Fault]:
    """Return every fault that this machine can inject."""
    learners = list(stage.learners)
    processes = [*stage.servers, *learners, *stage.taps, "broker"]
    faults = [
        *(Fault("kill", name, kill) for name in processes),
        *(
            Fault("kill the engine of", name, partial(kill, child="EngineCore"))
            for name in stage.servers
        ),
        *(Fault("stop", name, stop) for name in processes),
        *(Fault("a pipe as weights of", name, offer_pipe) for name in stage.servers[:1]),
        Fault("hostile records to", "broker", poison_log),
        Fault("hostile records to", "spool-learner", poison_spool),
        Fault("a flood of one tenant to", "spool-learner", flood_spool),
        *(Fault("torn files of", name, tear_learner) for name in learners),
        Fault("torn spool of", "spool-learner", tear_spool),
        Fault("torn fleet.toml of", "learner", tear_fleet),
    ]
    faults += [
        Fault("full disk of", name, fill) for name, disk in stage.disks.items() if disk.is_real
    ]
    faults += [
        Fault("hung disk of", name, freeze) for name, disk in stage.disks.items() if disk.is_real
    ]
    if stage.faketime is not None:
        faults += [
            Fault("clock jump of", name, shift_clock) for name in (*learners, *stage.taps[:1])
        ]
    return faults


def shuffle(faults: Sequence[Fault], count: int, rng: random.Random) -> list[Fault]:
    """Return `count` faults: rounds of all faults, each round in a new random order.

    The last round may be incomplete.
    """
    deck: list[Fault] = []
    while len(deck) < count:
        deck += rng.sample(faults, len(faults))
    return deck[:count]
