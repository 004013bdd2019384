"""Measure how fast records get from a server's publisher into the learner's buffer, beside the bare log.

$ redraft bench-ingest                # needs nats-server (Debian: apt-get install nats-server)

The same records go, in turn, in every round:

    end to end    publisher ─► JetStream ─► decoded, checked, committed to the buffer, acknowledged
    raw           publisher ─► JetStream ─► fetched with nats-py and acknowledged, nothing done with them
    embedded      spool files ─► decoded, checked, committed to the buffer, unlinked
    drain, raw drain   the same from a log that is full already: how fast a learner catches up

The publisher is a process of its own. A ratio is the median of the rounds' ratios.
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

from eval.process import free_port
from eval.report import write_results
from online.buffer import Buffer, BufferConfig
from online.ingest import take
from online.nats_config import Nats, StreamLimits
from online.records import Frame, frame_of
from online.spool import SpoolWriter
from recipes.cli import run_recipe
from recipes.synthetic_traffic import Traffic, make_record

REQUIRED_OF_RAW = 0.6
LIMITS = StreamLimits(max_bytes=4 << 30)
SHIPPED_RECORDS = 32
"""What capture hands over at once."""


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/bench/ingest.json")
    """File that receives the results."""
    records: int = 600
    """That each side moves in a round."""
    rounds: int = 5
    """That count; one more comes first."""
    traffic: Traffic = field(default_factory=Traffic)
    folder: Path | None = None
    """Where broker, spool and buffer write; default: the system's temporary folder."""


@dataclass(frozen=True)
class Bench:
    """What every side of the benchmark uses."""

    records: int
    vocab_size: int
    folder: Path
    url: str
    publisher: Connection

    def publish(self, where: str, fleet: str) -> None:
        """Begin to publish all records: into the log of this fleet, or into the spool of this name."""
        self.publisher.send((where, fleet))

    def published(self) -> None:
        self.publisher.recv()


Side = Callable[[Bench, str], float]
"""Seconds that all records took; the name is for its fleet and folders."""


def main(cfg: Config) -> None:
    """Raises: FileNotFoundError without nats-server."""
    frame_bytes = statistics.mean(len(frame) for frame in frames(20, cfg.traffic))
    print(f"{cfg.records} records of {frame_bytes / 1e3:.0f} kB, {cfg.rounds} interleaved rounds", flush=True)
    with tempfile.TemporaryDirectory(dir=cfg.folder) as folder, running_bench(cfg, Path(folder)) as bench:
        seconds = measure(bench, cfg.rounds)
    results = {name: summary(taken_s, seconds["raw"], cfg.records, frame_bytes) for name, taken_s in seconds.items()}
    results["drain"]["of_raw"] = of(seconds["raw drain"], seconds["drain"])
    for name, result in results.items():
        print(line(name, result))
    write_results(cfg.output, {"config": asdict(cfg), "frame_bytes": frame_bytes, "results": results})


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by side; one round more comes first and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(rounds + 1):
        for name, side in SIDES.items():
            taken_s = side(bench, f"{name.replace(' ', '-')}-{number}")
            if number:
                seconds[name].append(taken_s)
    return seconds


def summary(taken_s: list[float], raw_s: list[float], records: int, frame_bytes: float) -> dict[str, Any]:
    median_s = statistics.median(taken_s)
    return {
        "records_per_s": records / median_s,
        "mb_per_s": records * frame_bytes / median_s / 1e6,
        "of_raw": of(raw_s, taken_s),
        "seconds": taken_s,
    }


def of(base_s: list[float], taken_s: list[float]) -> float:
    """Speed as a share of the base's: the median of the rounds' ratios."""
    return statistics.median(base / taken for base, taken in zip(base_s, taken_s, strict=True))


def line(name: str, result: dict[str, Any]) -> str:
    verdict = ""
    if name == "end to end":
        verdict = f"  {'PASS' if result['of_raw'] >= REQUIRED_OF_RAW else 'BELOW TARGET'} (at least {REQUIRED_OF_RAW})"
    return (
        f"    {name:<12} {result['records_per_s']:7,.0f} records/s  {result['mb_per_s']:6,.0f} MB/s"
        f"  {result['of_raw']:.2f} of raw{' drain' if name == 'drain' else ''}{verdict}"
    )


# ----------------------------------------------------------------------------------------------- the sides


def end_to_end(bench: Bench, name: str) -> float:
    return asyncio.run(_through_the_log(bench, name, is_full=False))


def drain(bench: Bench, name: str) -> float:
    return asyncio.run(_through_the_log(bench, name, is_full=True))


async def _through_the_log(bench: Bench, name: str, *, is_full: bool) -> float:
    from online.stream import StreamSource

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


def raw(bench: Bench, name: str) -> float:
    return asyncio.run(_raw(bench, name, is_full=False))


def raw_drain(bench: Bench, name: str) -> float:
    return asyncio.run(_raw(bench, name, is_full=True))


async def _raw(bench: Bench, name: str, *, is_full: bool) -> float:
    """What nats-py's own pull subscription can take, from a stream of the same kind."""
    from online.nats_link import connect
    from online.stream import CONSUMER, provide_stream

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
    """When the clock starts: with the publisher, or where the log is to be full first, behind it."""
    began_s = time.perf_counter()
    bench.publish("log", name)
    if is_full:
        await asyncio.to_thread(bench.published)
        began_s = time.perf_counter()
    return began_s


async def _end(bench: Bench, name: str, is_full: bool) -> None:
    """Leave nothing behind for the next side to wait for."""
    from online.nats_link import connect

    if not is_full:
        await asyncio.to_thread(bench.published)
    client = await connect(bench.url, Nats())
    await client.jetstream().delete_stream(Nats(fleet=name).stream)
    await client.close()
    shutil.rmtree(bench.folder / name, ignore_errors=True)


def embedded(bench: Bench, name: str) -> float:
    spool = bench.folder / f"{name}-spool"
    with Buffer(BufferConfig(folder=bench.folder / name, held_out_fraction=0), "0" * 64) as buffer:
        began_s, num_stored = time.perf_counter(), 0
        bench.publish("spool", str(spool))
        while num_stored < bench.records:
            counts = take(spool, buffer, bench.vocab_size, time.time()).counts
            num_stored += counts["stored"]
            if not counts:
                time.sleep(0.001)
        taken_s = time.perf_counter() - began_s
    bench.published()
    shutil.rmtree(bench.folder / name)
    return taken_s


SIDES: dict[str, Side] = {
    "end to end": end_to_end,
    "raw": raw,
    "embedded": embedded,
    "drain": drain,
    "raw drain": raw_drain,
}


# ----------------------------------------------------------------------------------------------- their surroundings


def frames(count: int, traffic: Traffic) -> list[Frame]:
    return [frame_of(make_record(number, traffic)) for number in range(count)]


@contextmanager
def running_bench(cfg: Config, folder: Path) -> Iterator[Bench]:
    """A broker and a publisher that wait for the first side."""
    executable = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")
    if executable is None:
        raise FileNotFoundError("no nats-server here: install it (Debian: apt-get install nats-server)")
    port = free_port()
    config = folder / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\nmax_payload: 8MB\njetstream {{ store_dir: "{folder}/nats" }}\n')
    ours, theirs = multiprocessing.Pipe()
    publisher = multiprocessing.get_context("spawn").Process(
        target=publish, args=(f"nats://127.0.0.1:{port}", cfg.records, cfg.traffic, theirs), daemon=True
    )
    publisher.start()
    with subprocess.Popen([executable, "-c", str(config)], stderr=subprocess.DEVNULL) as broker:
        try:
            ours.recv()  # its records are made
            yield Bench(cfg.records, cfg.traffic.vocab_size, folder, f"nats://127.0.0.1:{port}", ours)
        finally:
            broker.kill()
            publisher.kill()


def publish(url: str, count: int, traffic: Traffic, orders: Connection) -> None:
    """The publisher's process: all records, each time it is told where to."""
    from online.publisher import Publisher

    made = frames(count, traffic)
    batches = [made[first : first + SHIPPED_RECORDS] for first in range(0, count, SHIPPED_RECORDS)]
    orders.send("ready")
    while True:
        where, name = orders.recv()
        if where == "log":
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
