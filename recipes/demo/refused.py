"""Does a head learn from drafts that the target refused? Copies of it train on the same records, with and without.

head in a real server, recorded ─► records ─┬─► plain: the text ────────────────────┬─► swapped into the server,
                                            └─► learned: and the refused drafts ────┘   and measured there

$ python recipes/demo/refused.py --head outputs/demo-heads/eagle3/draft
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from redraft.distill.data.conversations import load_conversations, split_held_out
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import held_out_prompts
from redraft.eval.engine.measure import measure
from redraft.eval.engine.process import free_port
from redraft.eval.intervals import Estimate
from redraft.eval.machine import environment
from redraft.eval.prompts import Prompt
from redraft.eval.report.page import write_results
from redraft.heads.files.artifact import fingerprint
from redraft.heads.files.checkpoint import load_tokenizer
from redraft.heads.progress import Progress
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.learner import provide_first_version
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.server import connected
from redraft.online.learning.candidate import DRAFT, Candidate
from redraft.online.learning.config import DraftConfig, Training
from redraft.online.records.record import Record, read_frames
from redraft.online.records.spool import open_file, spool_files
from redraft.online.tokens import read_token, write_token
from redraft.recipes.cli import run_recipe
from redraft.recipes.demo.fleet import Server, measure_tokens_per_s, read_tau, start_server

MODES = {"plain": 0, "learned": 1_000_000}
"""Refused drafts trained per record, by mode."""

SHIPPING_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Config:
    head: Path = Path("outputs/demo-heads/eagle3/draft")
    """Folder of a head that reads the tokens it drafts: EAGLE-1, EAGLE-3 or MTP."""
    family: str = "eagle3"
    """Family of the head."""
    target: Path = Path("tests/assets/tiny-target")
    """Folder of the target."""
    conversations: str = "stdlib"
    """Conversations that give the prompts: some to learn from, the held-out ones to measure."""
    held_out: float = 0.05
    """Share of the conversations to measure on."""
    records: int = 400
    """Requests to record."""
    passes: int = 4
    """Times that each record is trained."""
    records_per_step: int = 16
    """Records of an optimizer step."""
    seeds: int = 3
    """Copies trained with each mode, in different orders of the records."""
    lr: float = 1e-3
    """AdamW learning rate."""
    num_test_prompts: int = 64
    """Prompts to measure tau on."""
    num_speculative_tokens: int = 3
    """Draft tokens per step."""
    max_tokens: int = 96
    """Longest answer, in tokens."""
    clients: int = 8
    """Requests at once."""
    output: Path = Path("outputs/refused/report.json")
    """File that receives the results."""

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"--seeds is {self.seeds}: an interval needs 2 or more")


def main(cfg: Config) -> None:
    print(describe(report := {**asdict(cfg), "environment": environment(), **asyncio.run(compare(cfg))}))
    write_results(cfg.output, report)


async def compare(cfg: Config) -> dict[str, Any]:
    """`rejected_branches` of a report: by mode the tau in the engine, and the gain with its interval over seeds."""
    learning, test = choose_prompts(cfg)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        registry = make_registry(cfg, folder)
        write_token(folder / "token")
        token = read_token(folder / "token")
        with start_server(
            cfg.target,
            registry.folder,
            spool=folder / "spool",
            token_file=folder / "token",
            num_speculative_tokens=cfg.num_speculative_tokens,
            max_model_len=512,
            core=0,
            port=free_port(),
            log=folder / "server.log",
            options=("--capture.hidden-states",),
        ) as server:
            await server.ready()
            records = await record(cfg, server, learning, folder / "spool", token)
            taus: dict[str, list[float]] = {name: [] for name in ("before", *MODES)}
            taus["before"].append(await measure_tau(cfg, server, test))
            async with connected({server.url: token}) as (reached,):
                for seed in range(cfg.seeds):
                    for name, branches in MODES.items():
                        version = await asyncio.to_thread(train, cfg, registry, records, branches, seed)
                        await reached.swap(version)
                        taus[name].append(await measure_tau(cfg, server, test))
                        print(f"seed {seed}, {name}: tau {taus[name][-1]:.3f}", flush=True)
    return summarise(taus) | {"records": len(records), "steps": cfg.passes * -(-len(records) // cfg.records_per_step)}


def choose_prompts(cfg: Config) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts of the recorded requests, prompts to measure tau on)."""
    tokenizer = load_tokenizer(cfg.target)
    train, held_out = split_held_out(load_conversations(cfg.conversations), cfg.held_out)
    counts = ((train, cfg.records), (held_out, cfg.num_test_prompts))
    day = choose_day()
    learning, test = (
        held_out_prompts(part, tokenizer, num_prompts=count, max_length=160, day=day) for part, count in counts
    )
    return learning, test


def make_registry(cfg: Config, folder: Path) -> Registry:
    """A registry whose current version is the head."""
    draft = DraftConfig(family=cfg.family, initial=cfg.head)
    settings = LearnerConfig(target=cfg.target, registry=folder / "drafts", spool=folder / "spool", draft=draft)
    registry = Registry(settings.registry)
    provide_first_version(settings, registry, fingerprint(cfg.target))
    return registry


async def record(cfg: Config, server: Server, prompts: Sequence[Prompt], spool: Path, token: str) -> list[Record]:
    """The records of the prompts' answers, in the order of the requests' ends."""
    spool.mkdir(mode=0o700, exist_ok=True)
    shown = Progress(prompts, desc="record", unit="request")
    await measure_tokens_per_s([server.url], shown, clients=cfg.clients, max_tokens=cfg.max_tokens, captured=1.0)
    async with httpx.AsyncClient(timeout=60) as http:
        deadline_s = time.monotonic() + SHIPPING_TIMEOUT_S
        while True:
            status = (
                await http.get(f"{server.url}/redraft/status", headers={"Authorization": f"Bearer {token}"})
            ).json()
            counts = status["capture"]
            if not counts["open_requests"] and counts.get("records", 0) == counts.get("shipped_records", 0) > 0:
                break
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the server did not write all records within {SHIPPING_TIMEOUT_S} s: {counts}")
            await asyncio.sleep(0.1)
    return read_spool(spool)


def read_spool(spool: Path) -> list[Record]:
    records = []
    for path in spool_files(spool):
        with open_file(path) as file:
            records += [record for _, record in read_frames(file.read()) if isinstance(record, Record)]
    return records


def train(cfg: Config, registry: Registry, records: Sequence[Record], branches: int, seed: int) -> str:
    """The version of a copy of the first one, trained on the records with so many refused drafts of each."""
    settings = Training(lr=cfg.lr, warmup_steps=5, sequence_length=512, head_branches_per_record=branches, seed=seed)
    candidate = Candidate(settings, cfg.family, cfg.target)
    candidate.begin(registry.path(registry.versions()[0]))
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(records)) for _ in range(cfg.passes)])
    starts = range(0, len(order), cfg.records_per_step)
    for start in Progress(starts, desc=f"train with {branches and 'all'} refused drafts", unit="step"):
        candidate.step([records[i] for i in order[start : start + cfg.records_per_step]], seed * 1_000_003 + start)

    def write(partial: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            candidate.write(Path(folder))
            shutil.copytree(Path(folder) / DRAFT, partial, dirs_exist_ok=True)

    version = registry.publish(write, target_fingerprint=fingerprint(cfg.target), provenance={}, evaluation={})
    candidate.distillation.close()
    return version


async def measure_tau(cfg: Config, server: Server, prompts: Sequence[Prompt]) -> float:
    measured = await asyncio.to_thread(
        measure,
        server.measured(cfg.num_speculative_tokens),
        prompts,
        max_tokens=cfg.max_tokens,
        concurrency=cfg.clients,
    )
    return read_tau(measured)


def summarise(taus: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Mean tau by mode, and the relative gain of `learned` over `plain` with its 95% interval over pairs of seeds."""
    gains = np.array(taus["learned"]) / np.array(taus["plain"]) - 1
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains))
    return {
        **{name: {"tau_engine": float(np.mean(some)), "by_seed": list(some)} for name, some in taus.items()},
        "gain": float(gains.mean()),
        "gain_interval": Estimate(float(gains.mean()), error, len(gains) - 1).interval(),
    }


def describe(report: Mapping[str, Any]) -> str:
    low, high = report["gain_interval"]
    before, plain, learned = (report[name]["tau_engine"] for name in ("before", *MODES))
    return (
        f"tau in the engine {before:.3f}; after {report['records']} records {plain:.3f} from the text, {learned:.3f} "
        f"with refused drafts: {report['gain']:+.1%} (95% interval over seeds {low:+.1%} to {high:+.1%})"
    )


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
