"""Measure how fast records get from a server's publisher into the learner's buffer.

For comparison, the log alone is measured too.

$ python -m benchmarks.ingest                # with the nats-server of `make env`

In every round, the same records take each of these ways in turn:

    end to end    publisher ─► JetStream ─► decoded, checked, committed to the buffer, acknowledged
    raw           publisher ─► JetStream ─► fetched with nats-py and acknowledged, but not used
    embedded      spool files ─► decoded, checked, committed to the buffer, unlinked
    drain, raw drain   like end to end and raw, but from a full log: how fast a learner catches up

The publisher runs in a separate process. Ratios are medians over rounds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.broker import find_broker
from benchmarks.results import write_results
from redraft.engine.process import free_port
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.intake import Spool
from redraft.online.records.nats_config import Nats, StreamLimits
from redraft.online.records.record import Frame, encode_frame
from redraft.online.records.spool import SpoolWriter
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.plan.traffic import Traffic, make_record

REQUIRED_OF_RAW = 0.6
LIMITS = StreamLimits(max_bytes=4 << 30)
SHIPPED_RECORDS = 32
"""Number of records per batch that capture hands over."""


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/bench/ingest.json")
    """File for the results."""
    records: int = 600
    """Number of records that take each way in a round."""
    rounds: int = 5
    """Number of rounds that count, after one warm-up round."""
    traffic: Traffic = field(default_factory=Traffic)
    folder: Path | None = None
    """Folder for the broker, the spool and the buffer. By default, the system's temporary folder.
    """


@dataclass(frozen=True)
class Bench:
    """The settings and the publisher that all sides of the benchmark share."""

    records: int
    vocab_size: int
    folder: Path
    url: str
    publisher: Connection

    def publish(self, where: str, fleet: str) -> None:
        """Start publishing all records.

        They go to this fleet's log, or to the spool in this folder.
        """
        self.publisher.send((where, fleet))

    def wait_published(self) -> None:
        self.publisher.recv()


Side = Callable[[Bench, str], float]
"""Moves all records and returns the time in seconds. Its name is used for the fleet and the
folders.
"""


def main(cfg: Config) -> None:
    """Measure and print all sides.

    Raises:
        FileNotFoundError: there is no nats-server.
    """
    frame_bytes = statistics.mean(len(frame) for frame in frames(20, cfg.traffic))
    print(
        f"{cfg.records} records of {frame_bytes / 1e3:.0f} kB, {cfg.rounds} interleaved rounds",
        flush=True,
    )
    with (
        tempfile.TemporaryDirectory(dir=cfg.folder) as folder,
        running_bench(cfg, Path(folder)) as bench,
    ):
        seconds = measure(bench, cfg.rounds)
    results = {
        name: summary(taken_s, seconds["raw"], cfg.records, frame_bytes)
        for name, taken_s in seconds.items()
    }
    # A drain starts from a full log, so it can be compared only with the raw drain.
    results["drain"]["of_raw"] = of(seconds["raw drain"], seconds["drain"])
    for name, result in results.items():
        print(line(name, result))
    write_results(
        cfg.output, {"config": asdict(cfg), "frame_bytes": frame_bytes, "results": results}
    )


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Return the time of every round in seconds, by side, without the warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(rounds + 1):
        for name, side in SIDES.items():
            taken_s = side(bench, f"{name.replace(' ', '-')}-{number}")
            if number:
                seconds[name].append(taken_s)
    return seconds


def summary(
    taken_s: list[float], raw_s: list[float], records: int, frame_bytes: float
) -> dict[str, Any]:
    median_s = statistics.median(taken_s)
    return {
        "records_per_s": records / median_s,
        "mb_per_s": records * frame_bytes / median_s / 1e6,
        "of_raw": of(raw_s, taken_s),
        "seconds": taken_s,
    }


def of(base_s: list[float], taken_s: list[float]) -> float:
    """Return the speed as a share of the base's: the median of the rounds' ratios."""
    return statistics.median(base / taken for base, taken in zip(base_s, taken_s, strict=True))


def line(name: str, result: dict[str, Any]) -> str:
    verdict = ""
    if name == "end to end":
        verdict = (
            f"  {'PASS' if result['of_raw'] >= REQUIRED_OF_RAW else 'BELOW TARGET'} (at "
            f"least {REQUIRED_OF_RAW})"
        )
    return (
        f"    {name:<12} {result['records_per_s']:7,.0f} records/s  {result['mb_per_s']:6,.0f} MB/s"
        f"  {result['of_raw']:.2f} of raw{' drain' if name == 'drain' else ''}{verdict}"
    )


# -----------------------------------------------------------------------------------------------
# the sides


async def _through_the_log(bench: Bench, name: str, *, is_full: bool) -> float:
    from redraft.online.learning.stream import StreamSource

    with Buffer(BufferConfig(folder=bench.folder / name, held_out_fraction=0), "0" * 64) as buffer:
        source = StreamSource(bench.url, Nats(fleet=name), LIMITS, buffer, bench.vocab_size)
        await source.take()  # makes the stream
        began_s = await _begin(bench, name, is_full)
        num_stored = 0
        while num_stored < bench.records:
            num_stored += (await source.take()).counts["stored"]
        taken_s = time.perf_counter() - began_s
        await source.close()
    await _end(bench, name, is_full)
    return taken_s


async def _raw(bench: Bench, name: str, *, is_full: bool) -> float:
    """Take all records with nats-py's pull subscription, from a stream with the same settings."""
    from redraft.online.learning.stream import CONSUMER, provide_stream
    from redraft.online.records.nats_link import connect

    config = Nats(fleet=name)
    client = await connect(bench.url, config)
    stream = client.jetstream()
    await provide_stream(stream, config, LIMITS)
    subscription = await stream.pull_subscribe_bind(CONSUMER, config.stream)
    began_s = await _begin(bench, name, is_full)
    num_taken = 0
    while num_taken < bench.records:
        messages = await subscription.fetch(min(256, bench.records - num_taken), timeout=10)
        for message in messages:
            await message.ack()
        num_taken += len(messages)
    taken_s = time.perf_counter() - began_s
    await client.close()
    await _end(bench, name, is_full)
    return taken_s


async def _begin(bench: Bench, name: str, is_full: bool) -> float:
    """Start the publisher, and return the time at which the measurement starts.

    That is now or, with `is_full`, the time when the log is full.
    """
    began_s = time.perf_counter()
    bench.publish("log", name)
    if is_full:
        await asyncio.to_thread(bench.wait_published)
        began_s = time.perf_counter()
    return began_s


async def _end(bench: Bench, name: str, is_full: bool) -> None:
    """Wait for the publisher and delete the stream and the buffer."""
    from redraft.online.records.nats_link import connect

    if not is_full:
        await asyncio.to_thread(bench.wait_published)
    client = await connect(bench.url, Nats())
    await client.jetstream().delete_stream(Nats(fleet=name).stream)
    await client.close()
    shutil.rmtree(bench.folder / name, ignore_errors=True)


def embedded(bench: Bench, name: str) -> float:
    spool = bench.folder / f"{name}-spool"
    with Buffer(BufferConfig(folder=bench.folder / name, held_out_fraction=0), "0" * 64) as buffer:
        began_s, num_stored = time.perf_counter(), 0
        source = Spool(spool, buffer, bench.vocab_size)
        bench.publish("spool", str(spool))
        while num_stored < bench.records:
            counts = source.take(time.time()).counts
            num_stored += counts["stored"]
            if not counts:
                time.sleep(0.001)
        taken_s = time.perf_counter() - began_s
    bench.wait_published()
    shutil.rmtree(bench.folder / name)
    return taken_s


SIDES: dict[str, Side] = {
    "end to end": lambda bench, name: asyncio.run(_through_the_log(bench, name, is_full=False)),
    "raw": lambda bench, name: asyncio.run(_raw(bench, name, is_full=False)),
    "embedded": embedded,
    "drain": lambda bench, name: asyncio.run(_through_the_log(bench, name, is_full=True)),
    "raw drain": lambda bench, name: asyncio.run(_raw(bench, name, is_full=True)),
}


# -------------------------------------------------------------------------------------- the broker
# and the publisher


def frames(count: int, traffic: Traffic) -> list[Frame]:
    return [encode_frame(make_record(number, traffic)) for number in range(count)]


@contextmanager
def running_bench(cfg: Config, folder: Path) -> Iterator[Bench]:
    """Start a broker and a publisher."""
    executable = find_broker()
    port = free_port()
    config = folder / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\nmax_payload: 8MB\njetstream {{ store_dir: "{folder}/nats" '
        f"}}\n"
    )
    # The publisher is a process, not a thread, because in a fleet, it does not share the learner's
    # interpreter.
    ours, theirs = multiprocessing.Pipe()
    publisher = multiprocessing.get_context("spawn").Process(
        target=publish,
        args=(f"nats://127.0.0.1:{port}", cfg.records, cfg.traffic, theirs),
        daemon=True,
    )
    publisher.start()
    with subprocess.Popen([executable, "-c", str(config)], stderr=subprocess.DEVNULL) as broker:
        try:
            ours.recv()  # the publisher has created its records
            yield Bench(
                cfg.records, cfg.traffic.vocab_size, folder, f"nats://127.0.0.1:{port}", ours
            )
        finally:
            broker.kill()
            publisher.kill()


def publish(url: str, count: int, traffic: Traffic, orders: Connection) -> None:
    """Publish all records to the place that each order names; runs in the publisher's process."""
    from redraft.online.records.publisher import Publisher

    made = frames(count, traffic)
    batches = [made[first : first + SHIPPED_RECORDS] for first in range(0, count, SHIPPED_RECORDS)]
    orders.send("ready")
    while True:
        where, name = orders.recv()
        if where == "log":
            # The queue is unbounded, because dropped records never count as published and the loop
            # below would not end.
            publisher = Publisher(url, Nats(fleet=name), max_waiting_bytes=1 << 40)
            for batch in batches:
                publisher.write(batch)
            while publisher.counts["published_records"] < count:
                time.sleep(0.005)
            publisher.close()
        else:
            writer = SpoolWriter(Path(name), "bench", 1 << 40)
            for batch in batches:
                writer.write(batch)
        orders.send("published")


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
