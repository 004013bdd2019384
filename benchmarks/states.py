"""Measure MB/s of hidden states sent to a reader in another process, by storage and format.

    $ python -m benchmarks.states --storages /dev/shm/states s3://bucket/states --output outputs/states.json

    $ pip install s3fs 'moto[server]' && moto_server -p 9000 &     # over TCP on one machine
    $ export AWS_ENDPOINT_URL=http://127.0.0.1:9000 AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x
    $ python -m benchmarks.states --storages /dev/shm/states s3://states/bench

A storage is a folder, or any URL that fsspec knows: s3:// needs the package s3fs, and
AWS_ENDPOINT_URL for your own server. moto is a test server written in Python, so its MB/s are a
lower bound for a real server. The writer is `write_states`, as in `redraft serve-features`. The
reader is `Storage.take`, as in a training run. Rounds are interleaved.

T = tokens, L = layers, D = hidden
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import tyro

from benchmarks.results import write_results
from redraft.distill.signal.features_store import Storage, write_states
from redraft.distill.signal.storage import StatesFormat


@dataclass(frozen=True, kw_only=True)
class Config:
    storages: tuple[str, ...] = ("/dev/shm/redraft-states-bench",)
    """Folders or URLs through which states are sent."""
    tokens: int = 2048
    """Number of tokens per text."""
    layers: int = 4
    """Number of states per token. An EAGLE-3 head has three layers and the last one."""
    hidden: int = 4096
    """Number of values per state."""
    texts: int = 8
    """Number of texts per round, sent one after another."""
    rounds: int = 3
    output: Path = Path("outputs/states.json")


def main(cfg: Config) -> None:
    found: dict[tuple[str, str], list[float]] = {}
    for number, (storage, states_format) in itertools.product(
        range(cfg.rounds), itertools.product(cfg.storages, get_args(StatesFormat))
    ):
        speed = measure(cfg, storage, states_format, f"round{number}")
        found.setdefault((storage, states_format), []).append(speed)
    rows: list[dict[str, Any]] = [
        {
            "storage": storage,
            "format": states_format,
            "tokens_per_s": statistics.median(speeds),
            "mb_per_s": statistics.median(speeds) * count_bytes(cfg, states_format) / 1e6,
            "rounds_tokens_per_s": speeds,
        }
        for (storage, states_format), speeds in found.items()
    ]
    for row in rows:
        print(
            f"{row['storage']}, {row['format']}: {row['tokens_per_s']:,.0f} tokens/s, "
            f"{row['mb_per_s']:,.0f} MB/s"
        )
    write_results(cfg.output, {"config": asdict(cfg), "states": rows})


def count_bytes(cfg: Config, states_format: str) -> int:
    """Return the bytes of one token's states in transit."""
    return cfg.layers * (cfg.hidden + 4 if states_format == "float8" else 2 * cfg.hidden)


def measure(cfg: Config, storage: str, states_format: StatesFormat, name: str) -> float:
    """Return tokens per second through a storage, from the first request to the last text read."""
    asked: Any
    asked, theirs = multiprocessing.get_context("spawn").Pipe()
    writer = multiprocessing.get_context("spawn").Process(
        target=write, args=(theirs, cfg, states_format), daemon=True
    )
    writer.start()
    try:
        asked.recv()  # the process has started, which takes seconds
        read = torch.empty(cfg.tokens, cfg.layers, cfg.hidden, dtype=torch.bfloat16)

        def use(first: int, states_tLD: torch.Tensor, _: Any) -> None:
            read[first : first + len(states_tLD)].copy_(states_tLD)

        start_s = time.perf_counter()
        for text in range(cfg.texts):
            url = f"{Storage(storage).root}/{name}-{states_format}-{text}"
            asked.send(url)
            Storage(storage).take(url, use)
        return cfg.texts * cfg.tokens / (time.perf_counter() - start_s)
    finally:
        asked.close()
        writer.join(timeout=10)


def write(asked: Any, cfg: Config, states_format: StatesFormat) -> None:
    """Write the states of a text to every URL received, until the other side closes."""
    torch.manual_seed(0)
    states_TLD = torch.randn(cfg.tokens, cfg.layers, cfg.hidden).bfloat16()
    asked.send("ready")
    while True:
        try:
            url = asked.recv()
        except EOFError:
            return
        write_states(url, states_TLD, range(cfg.layers), states_format)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
