"""The online learner on two real servers: the traffic moves to a new domain, and the draft adapts.

    $ make demo-online                                    # at most 20 minutes on two cores: outputs/demo-online/
    $ python recipes/demo/online.py --overwrite --distil-steps 40 --records-b 200 --overhead-pairs 2

The target has two domains, A and B. A draft distilled on A is served to 8 streaming clients, who ask about A and later
about B. The learner captures, trains, evaluates, publishes and swaps, on the defaults of learner.toml but for the few
settings in `forced_settings`. Then a poisoned draft is offered to the gate, and a useless one is forced past it.
Everything is measured in the engine, and no request may fail. At the end the training is replayed offline with several
seeds, beside a ceiling: the same draft, trained for as many steps on the recorded answers to B alone.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from redraft.distill.data.conversations import Conversation, load_conversations, split_held_out
from redraft.distill.data.rendering import choose_day
from redraft.distill.data.samples import build_samples, held_out_prompts
from redraft.distill.signal.sources import InProcessTarget
from redraft.eval.engine.lossless import TIE_LOGIT_GAP
from redraft.eval.engine.measure import Measurement, measure
from redraft.eval.engine.process import free_port, process_group
from redraft.eval.prompts import Prompt
from redraft.eval.report.page import write_page
from redraft.heads.families.standalone import Init, StandaloneDraft, make_draft
from redraft.heads.files.artifact import PROVENANCE, fingerprint
from redraft.heads.files.checkpoint import load_causal_lm, load_tokenizer
from redraft.heads.progress import Progress
from redraft.online.daemon import control
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.daemon.learner import provide_first_version
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.server import connected
from redraft.online.journal import Journal, SwapEntry, TrainingEntry
from redraft.online.learning.anchors import write_anchors
from redraft.online.tokens import read_token, write_token
from redraft.recipes.cli import run_recipe
from redraft.recipes.demo.fleet import (
    Answer,
    Server,
    Traffic,
    begin_report,
    distil,
    fastest_precision,
    measure_rates,
    start_server,
)
from redraft.recipes.demo.online_replay import Replayer
from redraft.recipes.demo.online_report import (
    build_timeline,
    count_records_to_adapt,
    estimate_overhead,
    summarise_report,
    summarise_traffic,
)

A, B = "code", "prose"

CEILING = "offline on B"

TEMPLATE = Path(__file__).parent / "templates" / "online.html.j2"


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = Path("tests/assets/tiny-target")
    """Folder of the target model."""
    output: Path = Path("outputs/demo-online")
    """Folder for the report, the drafts and the logs."""
    overwrite: bool = False
    """Replace the demo in `output`."""
    draft_layers: tuple[int, ...] = (0, 6)
    """Layers of the target to initialise the draft with."""
    distil_steps: int = 60
    """Training steps of 4,096 tokens, offline on A, for the served draft."""
    seeds: int = 3
    """Seeds of the offline replay of the learner's training, and of its ceiling."""
    distil_lr: float = 1e-3
    """AdamW learning rate of the offline distillation on A."""
    num_anchors: int = 300
    """Samples of A replayed by the learner against forgetting."""
    num_test_prompts: int = 48
    """Prompts per domain to measure tau on. They are never in the traffic."""
    clients: int = 8
    """Number of streaming clients."""
    pause_s: float = 1.0
    """Pause of a client between two answers, in seconds. It leaves the learner about one of two cores."""
    max_tokens: int = 96
    """Maximum length of an answer, in tokens."""
    max_prompt_tokens: int = 160
    """Maximum length of a prompt, in tokens."""
    num_speculative_tokens: int = 3
    """Draft tokens per step."""
    traffic_a_s: float = 45
    """Duration of the traffic of A, in seconds."""
    records_b: int = 360
    """Number of records of B in the served draft's training after which the traffic of B ends."""
    traffic_b_s: float = 540
    """Maximum duration of the traffic of B, in seconds."""
    overhead_pairs: int = 16
    """Number of rounds to measure the cost of capture in, each with capture of all, a tenth and none of the requests.
    Many short rounds are best, because the speed of a shared machine changes within seconds."""
    overhead_prompts: int = 20
    """Requests per measurement of the cost of capture."""


def draw_charts(report: Mapping[str, Any]) -> dict[str, Any]:
    from redraft.recipes.demo.online_charts import build_charts

    return build_charts(report)


def main(cfg: Config) -> None:
    began_s = time.perf_counter()
    day = choose_day()
    report = begin_report(cfg, day) | {"domains": [A, B]}
    stage = Stage.set(cfg, day)
    report |= asyncio.run(play(cfg, stage))
    report["duration_s"] = round(time.perf_counter() - began_s, 1)
    page = write_page(cfg.output, report, TEMPLATE, draw_charts)
    print(summarise_report(report))
    print(f"report: {page}")


async def play(cfg: Config, stage: Stage) -> dict[str, Any]:
    """Run the demo on a prepared stage, and return the report."""
    report: dict[str, Any] = {"settings": describe_settings(forced_settings(cfg))}
    with ExitStack() as running:
        servers = [running.enter_context(stage.server(core)) for core in (0, 1)]
        await asyncio.gather(*(server.ready() for server in servers))
        urls = [server.url for server in servers]
        traffic = Traffic(urls, stage.traffic, clients=cfg.clients, max_tokens=cfg.max_tokens, pause_s=cfg.pause_s)
        # Before any swap: at the end, the target's weights must be the same, bit for bit.
        checksums = [await read_target_checksum(stage, server) for server in servers]

        # 1. before: the draft was trained on A only
        before = await measure_domains(cfg, stage, servers)
        report["tau"] = {"a_before": read_tau(before[A]), "b_before": read_tau(before[B])}
        print(f"tau of the draft trained on {A}: {read_tau(before[A]):.2f} on {A}, {read_tau(before[B]):.2f} on {B}")

        # 2. the traffic moves from A to B, and the learner follows
        async with learner(stage, servers) as cfg_learner, traffic.flowing():
            await wait(cfg.traffic_a_s, f"traffic of {A}")
            traffic.domain, shifted_s = B, time.time()
            records_at_shift = count_trained_records(cfg_learner)

            def is_learned() -> bool:
                # `records` of a version counts those of A too.
                served = read_provenance(stage.registry, stage.registry.current() or "")
                return int(served.get("records", 0)) - records_at_shift >= cfg.records_b

            await wait(cfg.traffic_b_s, f"traffic of {B}", is_learned)
            # 3. two drafts that must not be served
            report["bad_candidate"] = await offer_poison(cfg_learner, stage)
            report["bad_draft"] = await force_useless(cfg_learner, stage)
        journal = Journal(stage.folder / "learner" / "journal").read().entries
        report |= summarise_traffic(traffic, journal)

        # 4. after: the served version, every version before it, and the ceiling
        after = await measure_domains(cfg, stage, servers)
        report["tau"] |= {"b_adapted": read_tau(after[B]), "a_after": read_tau(after[A])}
        # The learner has ended, and with it the lock on the buffer.
        report["gap"] = await asyncio.to_thread(replay, cfg, stage)
        report["versions"] = await measure_versions(cfg, stage, servers, records_at_shift)
        report["tau"]["b_offline"] = next(v["tau"] for v in report["versions"] if v["origin"] == CEILING)
        report["records_to_adapt"] = count_records_to_adapt(report)
        now = [await read_target_checksum(stage, server) for server in servers]
        report["swap"]["target_checksum_equal"] = now == checksums

        # 5. the cost of capture
        report["capture"] = await measure_capture_overhead(cfg, stage, servers)
    report["lossless"] = are_all_greedy(stage, traffic.answers, [*before.values(), *after.values()])
    report["timeline"] = build_timeline(journal, shifted_s)
    return report


def forced_settings(cfg: Config) -> dict[str, tuple[Any, str]]:
    """The learner's settings that are not the defaults, each with the reason."""
    slow = "the two small servers verify about 50 drafts a second together"
    cores = "the learner shares two cores with two servers"
    return {
        "training.lr": (1e-3, "a model of a few million parameters learns at higher rates than one of billions"),
        "training.sequence_length": (512, "the longest text that the small target serves"),
        "training.mixed_precision": (fastest_precision(), "the faster one on this processor"),
        "training.replay_per_step": (12, cores),
        "training.branches_per_record": (0, cores),
        "fleet.poll_s": (2, "the chart of live traffic shows minutes"),
        "rollout.min_drafts": (400, slow),
        "rollout.max_loss": (0.2, slow),
        "rollout.window_timeout_s": (60, slow),
        "rollout.poll_s": (0.5, slow),
        "rollout.warm_up_s": (1, "answers take two seconds"),
        "rollout.watch_s": (2, "answers take two seconds"),
    }


def describe_settings(forced: Mapping[str, tuple[Any, str]]) -> list[dict[str, Any]]:
    """A row for every forced setting: name, default, value and reason. All others are the defaults."""
    defaults = asdict(LearnerConfig(target=Path("target"), registry=Path("drafts"), spool=Path("spool")))
    rows = []
    for name, (value, reason) in forced.items():
        table, key = name.split(".")
        rows.append({"setting": name, "default": defaults[table][key], "value": value, "reason": reason})
    # The faster precision may be the default.
    return [row for row in rows if row["value"] != row["default"]]


# ------------------------------------------------------------------------------------------------------- the stage


@dataclass(kw_only=True)
class Stage:
    """Everything that is prepared before a server starts: prompts, drafts, anchors, the learner's settings."""

    cfg: Config
    folder: Path
    target: Any
    fingerprint: str
    token: str
    traffic: dict[str, list[Prompt]]
    test: dict[str, list[Prompt]]
    config: LearnerConfig

    @classmethod
    def set(cls, cfg: Config, day: datetime.date) -> Stage:
        folder = cfg.output.absolute()
        target, tokenizer = load_causal_lm(cfg.target, torch.float32).eval(), load_tokenizer(cfg.target)
        train, held_out = split_held_out(load_conversations("stdlib"), 0.05)
        parts = {name: [c for c in train if c["domain"] == name] for name in (A, B)}

        draft = make_draft(Init(layers=cfg.draft_layers), target, tokenizer)
        distil(draft, target, tokenizer, parts[A], day=day, name=A, steps=cfg.distil_steps, lr=cfg.distil_lr)
        draft.export(folder / f"draft-{A}", torch.bfloat16, tokenizer=tokenizer)
        samples, _ = build_samples(parts[A][: cfg.num_anchors], tokenizer, max_length=512, day=day, progress=False)
        write_anchors(folder / "anchors", samples, InProcessTarget(target), fingerprint(cfg.target))

        write_token(folder / "token")
        (folder / "spool").mkdir(mode=0o700)
        # Without servers: they start from the registry, which these settings name. `configure` adds the
        # addresses.
        config = cls._learner_config(cfg, folder, servers=[])
        registry = Registry(config.registry)
        provide_first_version(config, registry, fingerprint(cfg.target))

        def prompts(conversations: Sequence[Conversation], count: int) -> list[Prompt]:
            return held_out_prompts(
                conversations, tokenizer, num_prompts=count, max_length=cfg.max_prompt_tokens, day=day
            )

        return cls(
            cfg=cfg,
            folder=folder,
            target=target,
            fingerprint=fingerprint(cfg.target),
            token=read_token(folder / "token"),
            traffic={name: prompts(part, 2000) for name, part in parts.items()},
            test={name: prompts([c for c in held_out if c["domain"] == name], cfg.num_test_prompts) for name in (A, B)},
            config=config,
        )

    @property
    def registry(self) -> Registry:
        return Registry(self.config.registry)

    @contextmanager
    def server(self, core: int) -> Iterator[Server]:
        with start_server(
            self.cfg.target,
            self.config.registry,
            spool=self.folder / "spool",
            token_file=self.folder / "token",
            num_speculative_tokens=self.cfg.num_speculative_tokens,
            max_model_len=512,
            core=core,
            port=free_port(),
            log=self.folder / "logs" / f"server-{core}.log",
        ) as server:
            yield server

    @staticmethod
    def _learner_config(cfg: Config, folder: Path, servers: Sequence[str]) -> LearnerConfig:
        """Write learner.toml: the addresses, and the forced settings."""
        addresses: dict[str, Any] = {
            "target": str(cfg.target.absolute()),
            "registry": "drafts",
            "spool": "spool",
            "folder": "learner",
            "anchors": "anchors",
            "draft.initial": f"draft-{A}",
            "fleet.servers": list(servers),
            "fleet.token_file": "token",
        }
        settings = addresses | {name: value for name, (value, _) in forced_settings(cfg).items()}
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        (folder / "learner.toml").write_text("\n".join(lines) + "\n")
        return load_config(folder / "learner.toml")

    def configure(self, servers: Sequence[Server]) -> None:
        self.config = self._learner_config(self.cfg, self.folder, [server.url for server in servers])


# ------------------------------------------------------------------------------------------------------- the acts


@asynccontextmanager
async def learner(stage: Stage, servers: Sequence[Server]) -> Any:
    """Run `redraft learner` beside the servers, without binding it to a core."""
    stage.configure(servers)
    command = [sys.executable, "-m", "redraft.recipes.serve.learner", "--config", str(stage.folder / "learner.toml")]
    log = stage.folder / "logs" / "learner.log"
    # One thread: the servers leave about one of two cores.
    with process_group(command, log=log, env={"OMP_NUM_THREADS": "1"}) as process:
        # The socket is there once the learner answers; before, `control.ask` would find nobody.
        while not (stage.folder / "learner" / control.SOCKET).exists():
            if process.poll() is not None:
                raise ChildProcessError(f"the learner did not start: see {log}")
            await asyncio.sleep(0.2)
        yield stage.config
        if process.poll() is not None:
            # A dead learner must not pass for one with nothing to do.
            raise ChildProcessError(f"the learner ended early: see {log}")


async def wait(seconds: float, title: str, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Show a progress bar for this time, or until `is_enough`."""
    with Progress(total=round(seconds), desc=title, unit="s", bar_format="{desc}: {n:.0f}/{total} s") as bar:
        while bar.n < round(seconds) and not is_enough():
            await asyncio.sleep(1)
            bar.update()


def read_provenance(registry: Registry, version: str) -> dict[str, Any]:
    """The provenance of a version. If the learner made it, `records` counts the records trained on by then."""
    provenance: dict[str, Any] = json.loads((registry.path(version) / PROVENANCE).read_text())
    return provenance


def count_trained_records(cfg: LearnerConfig) -> int:
    """The number of records the learner has trained on by now."""
    seen = [e.records_seen for e in Journal(cfg.folder / "journal").read().entries if isinstance(e, TrainingEntry)]
    return seen[-1] if seen else 0


async def measure_domains(cfg: Config, stage: Stage, servers: Sequence[Server]) -> dict[str, Measurement]:
    """The engine's measurement on each domain's test prompts, one domain per server."""
    measured = await asyncio.gather(
        *(measure_server(cfg, server, stage.test[name]) for server, name in zip(servers, (A, B), strict=True))
    )
    return dict(zip((A, B), measured, strict=True))


def read_tau(measurement: Measurement) -> float:
    assert measurement.counts is not None, "the server has a draft"
    return measurement.counts.tau


async def measure_server(cfg: Config, server: Server, prompts: Sequence[Prompt]) -> Measurement:
    return await asyncio.to_thread(
        measure,
        server.measured(cfg.num_speculative_tokens),
        prompts,
        max_tokens=cfg.max_tokens,
        # Both servers are measured at once, with half of the clients each.
        concurrency=cfg.clients // 2,
    )


async def offer_poison(cfg: LearnerConfig, stage: Stage) -> dict[str, Any]:
    """Offer the gate the current draft with noise of 0.3 times the spread of every matrix, and return the verdict."""
    folder = stage.folder / "poisoned"
    served = stage.registry.path(stage.registry.current() or "")
    await asyncio.to_thread(add_noise, served, folder, noise=0.3)
    verdict = await control.ask(cfg.folder, do="judge", draft=str(folder))
    return {"rejected_by_gate": verdict["decision"] == "reject", "reason": verdict["reason"]}


async def force_useless(cfg: LearnerConfig, stage: Stage) -> dict[str, Any]:
    """Publish a draft that is mostly noise and swap it in past the gate, as an operator could; return the outcome."""
    registry = stage.registry
    current = registry.current()
    version = await asyncio.to_thread(
        registry.publish,
        lambda folder: add_noise(registry.path(current or ""), folder, noise=3.0),
        target_fingerprint=stage.fingerprint,
        provenance={"origin": "noise"},
        evaluation={},
    )
    outcome = await control.ask(cfg.folder, do="swap", version=version)
    swaps = [e for e in Journal(cfg.folder / "journal").read().entries if isinstance(e, SwapEntry)]
    there = next(s for s in swaps if s.version == version)
    back = [s for s in swaps if s.from_version == version and s.outcome == "rolled_back"]
    return {
        "rolled_back": not outcome["passed"] and registry.current() == current and bool(back),
        "rollback_s": back[-1].time_s - there.time_s if back else None,
        "reason": outcome["reason"],
        "version": version,
    }


def add_noise(draft: Path, folder: Path, noise: float) -> None:
    """Write the draft into `folder` with noise on every matrix, `noise` times its standard deviation."""
    model = StandaloneDraft.load(draft)
    generator = torch.Generator().manual_seed(0)
    for weight in model.model.parameters():
        if weight.ndim == 2:
            weight.data += noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    model.export(folder, like=draft)
    # A server refuses a draft with another configuration than it was started with.
    shutil.copy(draft / "config.json", folder)


async def measure_versions(
    cfg: Config, stage: Stage, servers: Sequence[Server], records_at_shift: int
) -> list[dict[str, Any]]:
    """For every version that was current, and for the ceiling: tau on B's test prompts, and records of B trained on."""
    registry = stage.registry
    offline = registry.publish(
        lambda folder: copy_draft(stage.folder / "ceiling", registry.path("v000001"), folder),
        target_fingerprint=stage.fingerprint,
        provenance={"origin": CEILING},
        evaluation={},
    )
    promoted = registry.promoted()
    rows = []
    async with connected({server.url: stage.token for server in servers}) as fleet:
        # Two versions at a time, one on each server. Of an odd number, the last leaves the second server idle.
        for first in range(0, len(promoted) + 1, 2):
            pair = [*promoted, offline][first : first + 2]
            await asyncio.gather(*(server.swap(version) for server, version in zip(fleet, pair, strict=False)))
            measured = await asyncio.gather(
                *(measure_server(cfg, server, stage.test[B]) for server, _ in zip(servers, pair, strict=False))
            )
            for version, run in zip(pair, measured, strict=True):
                provenance = read_provenance(registry, version)
                records = max(0, provenance.get("records", 0) - records_at_shift)
                origin = provenance.get("origin", "learned" if "records" in provenance else "offline on A")
                rows.append({"version": version, "origin": origin, "records": records, "tau": read_tau(run)})
    return rows


def replay(cfg: Config, stage: Stage) -> dict[str, Any]:
    """The share of the gap closed, with an interval, by the learner's training replayed offline with several seeds."""
    records = read_provenance(stage.registry, stage.registry.current() or "").get("records", 0)
    with Replayer(stage.config, stage.target, stage.test[B], cfg.num_speculative_tokens, cfg.max_tokens) as replayer:
        return replayer.run(records, B, range(cfg.seeds), stage.folder / "ceiling")


def copy_draft(draft: Path, like: Path, folder: Path) -> None:
    """Copy the draft's files, but config.json from `like`: servers refuse a draft with another configuration."""
    for path in draft.iterdir():
        shutil.copy(path, folder)
    shutil.copy(like / "config.json", folder)


async def measure_capture_overhead(cfg: Config, stage: Stage, servers: Sequence[Server]) -> dict[str, Any]:
    """1 - (tokens/s with capture) / (tokens/s without) of one server under load, as medians over interleaved rounds."""
    urls, prompts = [servers[0].url], stage.test[B][: cfg.overhead_prompts]
    rates = await measure_rates(
        urls, prompts, rounds=cfg.overhead_pairs, clients=cfg.clients, max_tokens=cfg.max_tokens
    )
    (whole, interval), (tenth, tenth_interval) = (estimate_overhead(rates[share], rates[0.0]) for share in (1.0, 0.1))
    return {
        "overhead": whole,
        "overhead_interval": interval,
        "overhead_at_10_percent": tenth,
        "overhead_at_10_percent_interval": tenth_interval,
        "tokens_per_s": {str(share): some for share, some in rates.items()},
    }


async def read_target_checksum(stage: Stage, server: Server) -> str:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {stage.token}"}) as http:
        status = (await http.get(f"{server.url}/redraft/status")).json()
    return str(status["target_checksum"]) if status["target_intact"] else "changed"


@torch.no_grad()
def are_all_greedy(stage: Stage, answers: Sequence[Answer], runs: Sequence[Measurement]) -> bool:
    """Whether every token received by any client is the target's greedy token, or ties with it."""
    texts = [(answer.prompt.token_ids, answer.token_ids) for answer in answers]
    for run in runs:
        outputs = zip(run.prompts, run.outputs, strict=True)
        texts += [(prompt.token_ids, output.token_ids) for prompt, output in outputs]
    for prompt, output in Progress(texts, desc="lossless", unit="answer"):
        # Row t predicts token t + 1: the output is predicted from the last token of the prompt to the last but
        # one.
        logits_TV = stage.target(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen_T = logits_TV.gather(1, torch.tensor(output)[:, None])[:, 0]
        if float((logits_TV.amax(-1) - chosen_T).max()) > TIE_LOGIT_GAP:
            return False
    return True


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
