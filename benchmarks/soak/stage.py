"""The service under test: folders, disks, settings and commands of all processes.

clients ─► tap-1 ─► server-1 ─► broker ─► learner ─► registry ─► both servers
        └► tap-2 ─► server-2      └ witness ─► spool ─► spool-learner (it only stores)

log-disk: the broker's store      learner-disk, spool-disk: a learner's folder, and the spool
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.demo.fleet import fastest_precision
from benchmarks.soak.disks import Disk, mounted
from benchmarks.soak.supervisor import Supervised
from redraft.distill.data.conversations import load_conversations
from redraft.distill.data.samples import held_out_prompts
from redraft.engine.process import free_port
from redraft.engine.prompts import Prompt
from redraft.files.checkpoint import load_causal_lm, load_tokenizer
from redraft.files.folder import fingerprint
from redraft.files.target_folder import TargetFolder
from redraft.heads.families.standalone import Init, StandaloneDraft, make_draft
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.daemon.opening import provide_first_version
from redraft.online.fleet.registry import Registry
from redraft.online.records.nats_config import Nats
from redraft.online.tokens import read_token, write_token

FAKETIME = "libfaketimeMT.so.1"
NO_SHIFT = "+0d\n"

NUM_SERVERS = 2
MAX_MODEL_LEN = 512
NUM_SPECULATIVE_TOKENS = 3
DISK_BYTES = 1 << 30
"""Size of each small disk. Its image file is sparse."""

NOISE = 0.3
"""Noise added to every matrix of the draft, a copy of the target, as a fraction of the matrix's
standard deviation.
"""

NATS = Nats(fleet="soak")


@dataclass(frozen=True, kw_only=True)
class Stage:
    folder: Path
    target: Path
    fingerprint: str
    token: str
    prompts: Sequence[Prompt]
    disks: Mapping[str, Disk]
    """Disks by the name of the process that stores its files there: `broker`, `learner`,
    `spool-learner`.
    """
    ports: Mapping[str, int]
    """Ports by process name. `learner-page` is the learner's status page, its only port."""
    learners: Mapping[str, LearnerConfig]
    """learner and spool-learner."""
    faketime: Path | None
    """Path of the library that shifts a process's clock. None if it is not installed."""

    @property
    def registry(self) -> Registry:
        return Registry(self.learners["learner"].registry)

    @property
    def spool(self) -> Path:
        return self.disks["spool-learner"].folder / "spool"

    @property
    def ingest(self) -> str:
        return f"nats://127.0.0.1:{self.ports['broker']}"

    @property
    def servers(self) -> list[str]:
        return [f"server-{number}" for number in range(1, NUM_SERVERS + 1)]

    @property
    def taps(self) -> list[str]:
        """Names of the taps; each is in front of one server."""
        return [f"tap-{number}" for number in range(1, NUM_SERVERS + 1)]

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def clock_file(self, name: str) -> Path:
        return self.folder / f"clock-{name}"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    # -----------------------------------------------------------------------------------------------
    # the processes

    def build_server(self, number: int) -> Supervised:
        name = f"server-{number}"
        command = [
            *(sys.executable, "-m", "redraft.recipes.cli", "serve", str(self.target)),
            *("--registry", str(self.registry.folder), "--token-file", str(self.folder / "token")),
            *("--num-speculative-tokens", str(NUM_SPECULATIVE_TOKENS)),
            *("--capture.ingest", self.ingest, "--capture.nats.fleet", NATS.fleet),
            *(
                "--",
                "--port",
                str(self.ports[name]),
                "--host",
                "127.0.0.1",
                "--served-model-name",
                "m",
            ),
            *(
                "--dtype",
                "float32",
                "--enforce-eager",
                "--max-model-len",
                str(MAX_MODEL_LEN),
                "--max-num-seqs",
                "16",
            ),
            *("--kv-cache-memory-bytes", str(128 << 20), "--no-enable-prefix-caching"),
            "--disable-uvicorn-access-log",  # a line for each request of the attacker
        ]
        # By default, vLLM would bind both servers to the first core.
        core = str((number - 1) % (os.cpu_count() or 1))
        return Supervised(
            name,
            command,
            self.log(name),
            env={"VLLM_CPU_OMP_THREADS_BIND": core, "VLLM_NO_USAGE_STATS": "1"},
            port=self.ports[name],
        )

    def build_learner(self, name: str) -> Supervised:
        settings = str(self.folder / f"{name}.toml")
        learner = self._build(name, "learner", "--config", settings)
        learner.port = self.ports.get(f"{name}-page")
        return learner

    def build_tap(self, number: int) -> Supervised:
        name, server = f"tap-{number}", self.url(f"server-{number}")
        # The tap samples a fifth of the requests, because log-probabilities for all of them would
        # slow the servers down.
        sample = ("--fraction", "0.2", "--spool", str(self.folder / f"{name}-spool"))
        ports = ("--port", str(self.ports[name]), "--admin-port", "0")
        tap = self._build(name, "tap", server, "--target", str(self.target), *sample, *ports)
        tap.port = self.ports[name]
        return tap

    def _build(self, name: str, *command: str) -> Supervised:
        environment = {"OMP_NUM_THREADS": "1", **self._shift_clock(name)}
        return Supervised(
            name,
            [sys.executable, "-m", "redraft.recipes.cli", *command],
            self.log(name),
            env=environment,
        )

    def _shift_clock(self, name: str) -> dict[str, str]:
        """Return the environment variables that shift a process's wall clock.

        The process sees this machine's time plus the offset in `clock_file`.
        """
        if self.faketime is None:
            return {}
        return {
            "LD_PRELOAD": str(self.faketime),
            "FAKETIME_TIMESTAMP_FILE": str(self.clock_file(name)),
            # The library reads the file once a second. Only the wall clock jumps: the monotonic
            # clock and file times stay correct.
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }


def set_stage(folder: Path, target: Path, day: datetime.date, opened: ExitStack) -> Stage:
    """Prepare everything that exists before the first process starts.

    The disks are unmounted when `opened` closes.

    `day` is the date in the clients' prompts if the chat template writes today's date.
    """
    draft, prompts = make_draft_and_prompts(target, folder, day)
    names = ("broker", "learner", "spool-learner")
    disks = {
        name: opened.enter_context(
            mounted(folder / f"{name}.img", folder / f"{name}-disk", DISK_BYTES)
        )
        for name in names
    }
    doors = ("server-1", "server-2", "broker", "tap-1", "tap-2", "learner-page")
    ports = {name: free_port() for name in doors}
    write_token(folder / "token")
    (disks["spool-learner"].folder / "spool").mkdir(mode=0o700)
    _write_settings(folder, target, draft, disks, ports)
    learners = {name: load_config(folder / f"{name}.toml") for name in names[1:]}
    for config in learners.values():
        config.registry.mkdir(parents=True, exist_ok=True)
        # Before any process starts, because the servers load the registry's current version.
        provide_first_version(config, Registry(config.registry), TargetFolder.open(target))
    faketime = next(iter(sorted(Path("/usr/lib").glob(f"*/faketime/{FAKETIME}"))), None)
    stage = Stage(
        folder=folder, target=target, fingerprint=fingerprint(target), token=read_token(folder / "token"),
        prompts=prompts, disks=disks, ports=ports, learners=learners, faketime=faketime,
    )  # fmt: skip
    for name in ("learner", "spool-learner", *stage.taps):
        stage.clock_file(name).write_text(NO_SHIFT)
    return stage


@torch.no_grad()
def make_draft_and_prompts(
    target: Path, folder: Path, day: datetime.date
) -> tuple[Path, list[Prompt]]:
    """Return the folder of a draft that can still improve, and the clients' prompts."""
    model, tokenizer = load_causal_lm(target, torch.float32).eval(), load_tokenizer(target)
    draft: StandaloneDraft = make_draft(
        Init(layers=tuple(range(model.config.num_hidden_layers))), model, tokenizer
    )
    generator = torch.Generator().manual_seed(0)
    for weight in draft.parameters():
        if weight.ndim == 2:
            weight.add_(
                torch.randn(weight.shape, generator=generator), alpha=NOISE * float(weight.std())
            )
    draft.export(folder / "draft", torch.bfloat16, tokenizer=tokenizer)
    conversations = load_conversations("stdlib")
    return folder / "draft", held_out_prompts(
        conversations, tokenizer, num_prompts=2000, max_length=160, day=day
    )


def _write_settings(
    folder: Path, target: Path, draft: Path, disks: Mapping[str, Disk], ports: Mapping[str, int]
) -> None:
    urls = [f"http://127.0.0.1:{ports[name]}" for name in ("server-1", "server-2")]
    (folder / "fleet.toml").write_text("".join(f'[[servers]]\nurl = "{url}"\n' for url in urls))
    (folder / "no-fleet.toml").write_text("servers = []\n")
    (folder / "nats.conf").write_text(
        f'listen: "127.0.0.1:{ports["broker"]}"\nmax_payload: 8MB\n'
        f'jetstream {{ store_dir: "{disks["broker"].folder}/store", max_file_store: '
        f"{DISK_BYTES * 3 // 4} }}\n"
    )
    shared = {"target": str(target.absolute()), "initial": str(draft), "token": "token"}
    log = f'ingest = "nats://127.0.0.1:{ports["broker"]}"'
    spool = f'spool = "{disks["spool-learner"].folder}/spool"'
    (folder / "learner.toml").write_text(
        _LEARNER.format(
            **shared, records=log, registry="drafts", folder=disks["learner"].folder / "learner", fleet="fleet.toml",
            fresh_per_step=4, precision=fastest_precision(), page=ports["learner-page"],
        )
    )  # fmt: skip
    # This learner stores records but never trains: it never gets the 2^30 new records of its first
    # step.
    (folder / "spool-learner.toml").write_text(
        _LEARNER.format(
            **shared, records=spool, registry="spool-drafts", folder=disks["spool-learner"].folder / "learner",
            fleet="no-fleet.toml", fresh_per_step=1 << 30, precision="no", page=0,
        )
    )  # fmt: skip


_LEARNER = """
target = "{target}"
registry = "{registry}"
{records}
folder = "{folder}"
[draft]
initial = "{initial}"
[fleet]
file = "{fleet}"
token_file = "{token}"
poll_s = 2
[nats]
fleet = "soak"
[stream]
max_bytes = 400000000
[page]
port = {page}
[training]
lr = 4e-4
warmup_steps = 10
mixed_precision = "{precision}"
fresh_per_step = {fresh_per_step}
replay_per_step = 4
sequence_length = 512
records_per_candidate = 128
[buffer]
held_out_fraction = 0.2
[judging]
num_speculative_tokens = 3
held_out_per_domain = 60
[gate]
min_gain = 0.005
min_requests = 30
min_domain_requests = 20
max_domain_loss = 0.25
[rollout]
warm_up_s = 1
min_drafts = 300
window_timeout_s = 60
poll_s = 0.5
watch_s = 2
max_loss = 0.2
swap_timeout_s = 30
rollback_timeout_s = 60
"""
