"""Both ends of the ingest log in separate processes, to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from pathlib import Path

import numpy as np
from run_learner import FORKS

from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.stream import StreamSource
from redraft.online.records.nats_config import Nats, StreamLimits
from redraft.online.records.publisher import Publisher
from redraft.online.records.record import Frame, Record, Sampling, encode_frame

VOCAB, TARGET = 4096, "target"


def make_record(number: int, *, rows: int = 60, top_k: int = 32, **changes: object) -> Record:
    """A record of about 270 bytes per row, which hardly compresses."""
    rng = np.random.default_rng(number)
    fields = {
        "server_id": "boot",
        "request_id": f"cmpl-{number}",
        "sequence": 0,
        "time_s": time.time(),
        "domain": "code",
        "target_fingerprint": TARGET,
        "draft_version": "v000001",
        "sampling": Sampling(),
        "num_prompt_tokens": 8,
        "top_k": top_k,
        "context": rng.integers(0, VOCAB, 8, "i4").tobytes(),
        "output": rng.integers(0, VOCAB, rows, "i4").tobytes(),
        "row_positions": np.arange(8, 8 + rows, dtype="i4").tobytes(),
        "row_branches": np.zeros(rows, "i4").tobytes(),
        "row_drafts": rng.integers(0, VOCAB, rows, "i4").tobytes(),
        "row_draft_probs": np.ones(rows, "f4").tobytes(),
        "row_accepted": rng.integers(0, 2, rows, "u1").tobytes(),
        "row_topk_ids": rng.integers(0, VOCAB, rows * top_k, "i4").tobytes(),
        "row_topk_log_probs": (-rng.exponential(1, rows * top_k)).astype("f4").tobytes(),
        "row_log_sum_exp": rng.normal(size=rows).astype("f4").tobytes(),
    }
    return Record(**(fields | changes))  # type: ignore[arg-type]


class NotingPublisher(Publisher):
    """A publisher that first of all writes down every record acknowledged by the broker."""

    noted: Path

    def acknowledged(self, frame: Frame) -> None:
        with self.noted.open("a") as file:
            file.write(f"{frame.record_id}\n")
        super().acknowledged(frame)


def publish(url: str, noted: Path, numbers: range, rows: int, per_s: float) -> None:
    """Publish these records at about this rate until all are acknowledged."""
    publisher = NotingPublisher(url, Nats())
    publisher.noted = noted
    for number in numbers:
        publisher.write([encode_frame(make_record(number, rows=rows))])
        time.sleep(1 / per_s)
    while publisher.counts["published_records"] < len(numbers):
        time.sleep(0.05)


def consume(url: str, folder: Path) -> None:
    """Do the work of the learner's ingest, forever."""
    with Buffer(BufferConfig(folder=folder, held_out_fraction=0), TARGET) as buffer:
        asyncio.run(
            _consume(StreamSource(url, Nats(), StreamLimits(max_bytes=1 << 30), buffer, VOCAB))
        )


async def _consume(source: StreamSource) -> None:
    while True:
        try:
            await source.take()
        except OSError:
            await asyncio.sleep(0.2)


class Ends:
    """One publisher and one consumer, each restarted after a kill."""

    def __init__(self, url: str, folder: Path, *, count: int, rows: int, per_s: float) -> None:
        self.url, self.folder, self.noted = url, folder / "buffer", folder / "acknowledged"
        self._publishing = (self.noted, range(count), rows, per_s)
        self.restart_consumer()
        self.restart_publisher()

    def restart_publisher(self) -> None:
        """Publish all its records from the first on.

        It does not know which ones its predecessor has sent.
        """
        if hasattr(self, "publisher"):
            kill(self.publisher)
        self.publisher = FORKS.Process(target=publish, args=(self.url, *self._publishing))
        self.publisher.start()

    def restart_consumer(self) -> None:
        if hasattr(self, "consumer"):
            kill(self.consumer)
        self.consumer = FORKS.Process(target=consume, args=(self.url, self.folder))
        self.consumer.start()

    def close(self) -> None:
        kill(self.publisher)
        kill(self.consumer)

    def acknowledged(self) -> set[str]:
        return set(self.noted.read_text().split()) if self.noted.exists() else set()

    def stored(self) -> list[str]:
        """Ids in the order of the buffer, from its files.

        `Buffer.fresh` returns what fits in memory.
        """
        ids: list[str] = []
        for path in sorted(self.folder.glob("records-*.db")):
            with contextlib.closing(sqlite3.connect(path)) as file:
                ids += [
                    record_id
                    for (record_id,) in file.execute("SELECT record_id FROM records ORDER BY seq")
                ]
        return ids


def kill(process: object) -> None:
    pid = process.pid  # type: ignore[attr-defined]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
    process.join()  # type: ignore[attr-defined]
