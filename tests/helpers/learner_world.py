"""A learner's surroundings in small.

A target and a worse draft for it, records of traffic, and a fake fleet.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fake_fleet import TOKEN, FakeServer, Traffic, running
from make_answers import make_answers
from real_server import NOISY, Server
from transformers import LlamaForCausalLM
from waiting import until

from benchmarks.demo import fleet as demo_fleet
from redraft.distill.data.samples import Sample
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.prompts import Prompt
from redraft.files.checkpoint import load_tokenizer
from redraft.files.folder import fingerprint
from redraft.online.daemon import cycle, learner
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.opening import opened
from redraft.online.fleet.discovery import FleetConfig
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.rollout import RolloutPolicy
from redraft.online.journal import Entry, Journal
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.config import BufferConfig, DraftConfig, Training
from redraft.online.learning.gate import Policy
from redraft.online.page.config import Page
from redraft.online.records.record import Record, Sampling, encode_record
from redraft.online.records.spool import SpoolWriter, spool_files

PROMPT_TOKENS, ANSWER_TOKENS = 8, 24


def make_draft(target: Path, folder: Path, noise: float = 0.05, seed: int = 1) -> Path:
    """A noisy copy of the target."""
    model = LlamaForCausalLM.from_pretrained(target)
    torch.manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data += noise * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder)
    load_tokenizer(target).save_pretrained(folder)
    return folder


def make_records(
    target: Path, count: int, *, seed: int = 0, domain: str = "code", **changes: Any
) -> list[Record]:
    """Records of greedy answers to random prompts, without any draft's tokens."""
    model = LlamaForCausalLM.from_pretrained(target).eval()
    generator = torch.Generator().manual_seed(seed)
    prompts_BT = torch.randint(20, 400, (count, PROMPT_TOKENS), generator=generator)
    texts_BT = model.generate(
        prompts_BT, max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=None
    )
    mask_T = np.arange(texts_BT.shape[1]) >= PROMPT_TOKENS
    samples = [
        Sample(
            input_ids=row.numpy().astype(np.int32),
            loss_mask=mask_T,
            conversation=f"{seed}-{i}",
            domain=domain,
        )
        for i, row in enumerate(texts_BT)
    ]
    records = make_answers(samples, InProcessTarget(model), fingerprint(target), k=16)
    fields = {
        "server_id": "boot",
        "time_s": time.time(),
        "draft_version": "start",
        "sampling": Sampling(temperature=0),
    }
    return [msgspec.structs.replace(record, **fields | changes) for record in records]


def ship(spool: Path, records: list[Record], server: str = "boot") -> None:
    """One spool file with these records."""
    SpoolWriter(spool, f"{server}-{time.monotonic_ns()}", 1 << 30).write(
        [encode_record(record) for record in records]
    )


class Versions(set[str]):
    """The registry's current content."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __contains__(self, version: object) -> bool:
        return (self.folder / str(version) / "STABLE").is_file()


QUICK = RolloutPolicy(
    warm_up_s=0,
    min_drafts=500,
    poll_s=0.02,
    watch_s=0.05,
    window_timeout_s=5,
    swap_timeout_s=3,
    rollback_timeout_s=3,
)

ON_AN_ENGINE = replace(
    QUICK, poll_s=0.5, min_drafts=200, max_loss=0.5, window_timeout_s=900, swap_timeout_s=300
)
"""Settings for a real engine: every poll is costly, 200 drafts take seconds, and they tell tau to
within 0.1.
"""

ANYTHING = Policy(min_gain=-9, max_domain_loss=9, min_requests=5, min_domain_requests=5)
"""For tests of the steps after the gate: a few seconds of training need not prove a gain."""


def streams(urls: list[str], clients: int = 4) -> demo_fleet.Traffic:
    """Clients that stream answers to random prompts.

    Their pauses leave the learner some of two cores.
    """
    rng = random.Random(0)
    prompts = [
        Prompt(token_ids=[rng.randrange(20, 400) for _ in range(PROMPT_TOKENS)], domain="code")
        for _ in range(4000)
    ]
    return demo_fleet.Traffic(
        urls,
        {"code": itertools.cycle(prompts)},
        clients=clients,
        max_tokens=ANSWER_TOKENS,
        pause_s=0.2,
    )


@dataclass
class World:
    """A target, its draft, a fleet of two, and the learner's folders."""

    root: Path
    target: Path
    draft: Path
    traffic: Traffic = field(default_factory=Traffic)
    fakes: list[FakeServer] = field(default_factory=list)

    @classmethod
    def make(cls, root: Path, target: Path, draft: Path, servers: int = 2) -> World:
        world = cls(root, target, draft)
        world.traffic = Traffic(
            tau=defaultdict(lambda: 2.0),
            drafts_per_reading=500,
            registry=Versions(root / "registry"),
        )
        world.fakes = [
            FakeServer(world.traffic, started_with="start", target_fingerprint=fingerprint(target))
            for _ in range(servers)
        ]
        return world

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def registry(self) -> Registry:
        return Registry(self.root / "registry")

    @property
    def journal(self) -> list[Entry]:
        return Journal(self.root / "learner" / "journal").read().entries

    def entries(self, kind: str) -> list[Any]:
        return [
            entry for entry in self.journal if type(entry).__name__ == f"{kind.capitalize()}Entry"
        ]

    def last(self, kind: str, name: str) -> Any:
        """A field of the newest entry of this kind; 0 if there is none yet."""
        entries = self.entries(kind)
        return getattr(entries[-1], name) if entries else 0

    def config(self, **changes: Any) -> LearnerConfig:
        training = Training(
            lr=1e-3,
            warmup_steps=2,
            fresh_per_step=4,
            replay_per_step=12,
            records_per_candidate=64,
            sequence_length=64,
        )
        config = LearnerConfig(
            target=self.target,
            registry=self.root / "registry",
            spool=self.spool,
            folder=self.root / "learner",
            draft=DraftConfig(initial=self.draft),
            fleet=FleetConfig(servers=tuple(fake.url for fake in self.fakes), poll_s=0.1),
            buffer=BufferConfig(held_out_fraction=0.3),
            training=training,
            gate=Policy(confidence=0.8, min_requests=10, min_domain_requests=10),
            rollout=QUICK,
            page=Page(port=0),
        )
        return replace(config, **changes)

    def beside(self, server: Any, **training: Any) -> dict[str, Any]:
        """Settings of a learner beside a real server.

        A draft in the server's registry becomes the first version.
        """
        config = self.config()
        return {
            "registry": server.registry,
            "spool": server.spool,
            "fleet": FleetConfig(servers=(server.url,), poll_s=0.5),
            "training": replace(config.training, **training),
            "rollout": ON_AN_ENGINE,
        }

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[None]:
        async with running(*self.fakes):
            yield

    @asynccontextmanager
    async def learner(self, **changes: Any) -> AsyncIterator[asyncio.Task[None]]:
        """Run a learner in this process while the block runs; then end it as SIGTERM would.

        It looks for work so often that a test hardly waits for it.
        """
        cfg = self.config(**changes)
        with opened(cfg) as (target, registry, buffer), pytest.MonkeyPatch.context() as patch:
            patch.setattr(cycle, "POLL_S", 0.05)
            patch.setattr(learner, "INGEST_POLL_S", 0.05)
            candidate = Candidate(cfg.training, cfg.draft.family, cfg.target)
            task = asyncio.ensure_future(learner.learn(cfg, target, registry, buffer, candidate))
            try:
                yield task
            finally:
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled() and task.exception():
                raise task.exception()


@contextmanager
def served_by(server: Server, target: Path, folder: Path) -> Iterator[World]:
    """A learner's surroundings with this real server, and an empty spool.

    The server replaces a fleet of fakes.

    A learner starts with FIRST, a copy of NOISY; afterwards the registry is as it was.
    """
    before = set(server.registry.iterdir())
    current = (server.registry / "current").readlink()
    (server.registry / "current").unlink()
    server.swap(NOISY)
    asyncio.run(until(server.has_shipped))
    for path in spool_files(server.spool):
        path.unlink()
    yield World.make(folder, target, server.registry / NOISY, servers=0)
    server.swap(NOISY)  # a server must not fall back to a draft removed below
    for path in set(server.registry.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (server.registry / "current").unlink(missing_ok=True)
    (server.registry / "current").symlink_to(current)


assert TOKEN
