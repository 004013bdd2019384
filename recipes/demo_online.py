"""The online learner on two real servers: traffic shifts to what the draft has never seen, and the draft follows.

    $ make demo-online                                    # at most 20 minutes on two cores: outputs/demo-online/
    $ python recipes/demo_online.py --overwrite --distil-steps 40 --records-b 200 --overhead-pairs 2

Two domains of one target. A draft is distilled on A alone and served; 8 clients stream answers, first of A, then of B.
The learner captures, trains, judges, publishes and swaps. Then it is offered a poisoned draft, and a useless one is
forced past its gate. All of it is measured in the engine, and no client may ever be failed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from tqdm import tqdm

from distill.data import Conversation, load_conversations, split_held_out
from distill.samples import build_samples, held_out_prompts
from distill.signals import InProcessTarget
from eval.engine import TIE_LOGIT_GAP, Measurement, measure
from eval.process import free_port, process_group
from eval.prompts import Prompt
from eval.report import write_page
from heads.artifact import PROVENANCE, fingerprint
from heads.checkpoint import load_causal_lm, load_tokenizer
from heads.standalone import Init, StandaloneDraft, make_draft
from online import control
from online.anchors import write_anchors
from online.config import LearnerConfig, load_config
from online.fleet import connected
from online.journal import Journal, SwapEntry, TrainingEntry
from online.learner import provide_first_version
from online.registry import Registry
from recipes.cli import run_recipe
from recipes.demo_fleet import Answer, Server, Traffic, begun, distil, fastest_precision, served, tokens_per_s
from recipes.demo_online_report import overhead, records_to_adapt, summary, timeline, traffic_report

A, B = "code", "prose"


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = Path("tests/assets/tiny-target")
    output: Path = Path("outputs/demo-online")
    overwrite: bool = False
    """Replace the demo in `output`."""
    draft_layers: tuple[int, ...] = (0, 6)
    """Layers of the target that the draft begins with."""
    distil_steps: int = 60
    """Of 4,096 tokens, offline on A, for the draft that is served."""
    ceiling_steps: int = 150
    """The same draft's, offline on B's training part, for the ceiling."""
    distil_lr: float = 1e-3
    num_anchors: int = 300
    """Samples of A that the learner keeps for a share of every step."""
    num_test_prompts: int = 48
    """Of each domain: never in traffic and never trained, they measure tau in the engine."""
    clients: int = 8
    pause_s: float = 1.0
    """Of each client between two answers: it leaves the learner about one of two cores."""
    max_tokens: int = 96
    """Longest answer."""
    max_prompt_tokens: int = 160
    num_speculative_tokens: int = 3
    traffic_a_s: float = 45
    records_b: int = 360
    """B flows until the served draft has learned from so many records of it,"""
    traffic_b_s: float = 540
    """and no longer than this."""
    lr: float = 1e-3
    """The learner's."""
    records_per_candidate: int = 240
    overhead_pairs: int = 16
    """Runs of one server with capture of every request, of a tenth and of none, in turn: many and short, because the
    speed of a shared machine changes within seconds."""
    overhead_prompts: int = 20
    """Of each run."""


def main(cfg: Config) -> None:
    began_s = time.perf_counter()
    report = begun(cfg) | {"domains": [A, B]}
    stage = Stage.set(cfg)
    report |= asyncio.run(play(cfg, stage))
    report["duration_s"] = round(time.perf_counter() - began_s, 1)
    page = write_page(cfg.output, report, "online.html.j2", "online_charts.charts")
    print(summary(report))
    print(f"report: {page}")


async def play(cfg: Config, stage: Stage) -> dict[str, Any]:
    """The report, from the first start of a server to the last measurement."""
    report: dict[str, Any] = {}
    with ExitStack() as running:
        servers = [running.enter_context(stage.server(core)) for core in (0, 1)]
        await asyncio.gather(*(server.ready() for server in servers))
        urls = [server.url for server in servers]
        traffic = Traffic(urls, stage.traffic, clients=cfg.clients, max_tokens=cfg.max_tokens, pause_s=cfg.pause_s)
        checksums = [await target_checksum(stage, server) for server in servers]

        # 1. before: the draft knows A
        before = await taus(cfg, stage, servers)
        report["tau"] = {"a_before": before[A].tau, "b_before": before[B].tau}
        print(f"tau of the draft that knows {A}: {before[A].tau:.2f} on {A}, {before[B].tau:.2f} on {B}")

        # 2. traffic moves from A to B; the learner follows
        async with learner(stage, servers) as cfg_learner, traffic.flowing():
            await passing(cfg.traffic_a_s, f"traffic of {A}")
            traffic.domain, shifted_s = B, time.time()
            records_at_shift = trained_records(cfg_learner)

            def is_learned() -> bool:
                served = provenance_of(stage.registry, stage.registry.current() or "")
                return int(served.get("records", 0)) - records_at_shift >= cfg.records_b

            await passing(cfg.traffic_b_s, f"traffic of {B}", is_learned)
            # 3. what must not be served
            report["bad_candidate"] = await offer_poison(cfg_learner, stage)
            report["bad_draft"] = await force_useless(cfg_learner, stage)
        journal = Journal(stage.folder / "learner" / "journal").read().entries
        report |= traffic_report(traffic, journal)

        # 4. after: the version that is served now, every version before it, and the ceiling
        after = await taus(cfg, stage, servers)
        report["tau"] |= {"b_adapted": after[B].tau, "a_after": after[A].tau}
        report["versions"] = await measure_versions(cfg, stage, servers, records_at_shift)
        report["tau"]["b_offline"] = next(v["tau"] for v in report["versions"] if v["origin"] == "offline on B")
        report["records_to_adapt"] = records_to_adapt(report)
        now = [await target_checksum(stage, server) for server in servers]
        report["swap"]["target_checksum_equal"] = now == checksums

        # 5. what capture costs
        report["capture"] = await capture_overhead(cfg, stage, servers)
    report["lossless"] = all_greedy(stage, traffic.answers, [*before.values(), *after.values()])
    report["timeline"] = timeline(journal, shifted_s)
    return report


# ------------------------------------------------------------------------------------------------------- the stage


@dataclass(kw_only=True)
class Stage:
    """What is made before a server starts: prompts, drafts, anchors, the learner's settings."""

    cfg: Config
    folder: Path
    target: Any
    fingerprint: str
    token: str
    traffic: dict[str, list[Prompt]]
    test: dict[str, list[Prompt]]
    config: LearnerConfig

    @classmethod
    def set(cls, cfg: Config) -> Stage:
        folder = cfg.output.absolute()
        target, tokenizer = load_causal_lm(cfg.target, torch.float32).eval(), load_tokenizer(cfg.target)
        train, held_out = split_held_out(load_conversations("stdlib"), 0.05)
        parts = {name: [c for c in train if c["domain"] == name] for name in (A, B)}

        draft = make_draft(Init(layers=cfg.draft_layers), target, tokenizer)
        for name, steps in ((A, cfg.distil_steps), (B, cfg.ceiling_steps)):  # the ceiling goes on from the served draft
            distil(draft, target, tokenizer, parts[name], name=name, steps=steps, lr=cfg.distil_lr)
            draft.export(folder / f"draft-{name}", tokenizer, dtype=torch.bfloat16)
        samples, _ = build_samples(parts[A][: cfg.num_anchors], tokenizer, max_length=512, progress=False)
        write_anchors(folder / "anchors", samples, InProcessTarget(target), fingerprint(cfg.target))

        token = secrets.token_urlsafe(16)
        (folder / "token").write_text(token)
        (folder / "spool").mkdir(mode=0o700)
        config = cls._learner_config(cfg, folder, servers=[])
        registry = Registry(config.registry)
        provide_first_version(config, registry, fingerprint(cfg.target))

        def prompts(conversations: Sequence[Conversation], count: int) -> list[Prompt]:
            return held_out_prompts(conversations, tokenizer, num_prompts=count, max_length=cfg.max_prompt_tokens)

        return cls(
            cfg=cfg,
            folder=folder,
            target=target,
            fingerprint=fingerprint(cfg.target),
            token=token,
            traffic={name: prompts(part, 2000) for name, part in parts.items()},
            test={name: prompts([c for c in held_out if c["domain"] == name], cfg.num_test_prompts) for name in (A, B)},
            config=config,
        )

    @property
    def registry(self) -> Registry:
        return Registry(self.config.registry)

    @contextmanager
    def server(self, core: int) -> Iterator[Server]:
        with served(
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
        """learner.toml: a fleet of two, evidence of a minute instead of a day's."""
        (folder / "learner.toml").write_text(f"""
target = "{cfg.target.absolute()}"
registry = "drafts"
spool = "spool"
folder = "learner"
anchors = "anchors"
[draft]
initial = "draft-{A}"
[fleet]
servers = {json.dumps(list(servers))}
token_file = "token"
poll_s = 2
[buffer]
held_out_fraction = 0.2
[replay]
half_life_s = 120
[training]
lr = {cfg.lr}
warmup_steps = 10
mixed_precision = "{fastest_precision()}"
fresh_per_step = 4
replay_per_step = 12
branches_per_record = 0
sequence_length = 512
records_per_candidate = {cfg.records_per_candidate}
[judging]
num_speculative_tokens = {cfg.num_speculative_tokens}
held_out_per_domain = 60
[gate]
min_gain = 0.01
min_requests = 30
min_domain_requests = 20
max_domain_loss = 0.25
[rollout]
warm_up_s = 1
min_drafts = 400
window_timeout_s = 60
poll_s = 0.5
watch_s = 2
max_loss = 0.2
""")
        return load_config(folder / "learner.toml")

    def configure(self, servers: Sequence[Server]) -> None:
        self.config = self._learner_config(self.cfg, self.folder, [server.url for server in servers])


# ------------------------------------------------------------------------------------------------------- the acts


@asynccontextmanager
async def learner(stage: Stage, servers: Sequence[Server]) -> Any:
    """`redraft learner` beside the servers, on whatever cores they leave it."""
    stage.configure(servers)
    command = [sys.executable, "-m", "recipes.learner", "--config", str(stage.folder / "learner.toml")]
    log = stage.folder / "logs" / "learner.log"
    with process_group(command, log=log, env={"OMP_NUM_THREADS": "1"}) as process:
        while not (stage.folder / "learner" / control.SOCKET).exists():
            if process.poll() is not None:
                raise ChildProcessError(f"the learner did not start: see {log}")
            await asyncio.sleep(0.2)
        yield stage.config
        if process.poll() is not None:
            raise ChildProcessError(f"the learner ended by itself: see {log}")


async def passing(seconds: float, what: str, is_enough: Callable[[], bool] = lambda: False) -> None:
    """A bar for as long, or until it is enough."""
    with tqdm(total=round(seconds), desc=what, unit="s", bar_format="{desc}: {n:.0f}/{total} s") as bar:
        while bar.n < round(seconds) and not is_enough():
            await asyncio.sleep(1)
            bar.update()


def provenance_of(registry: Registry, version: str) -> dict[str, Any]:
    """What a version was made of; `records`: how many the learner had trained on, where it made the version."""
    provenance: dict[str, Any] = json.loads((registry.path(version) / PROVENANCE).read_text())
    return provenance


def trained_records(cfg: LearnerConfig) -> int:
    """How many records the learner has trained on by now."""
    seen = [e.records_seen for e in Journal(cfg.folder / "journal").read().entries if isinstance(e, TrainingEntry)]
    return seen[-1] if seen else 0


async def taus(cfg: Config, stage: Stage, servers: Sequence[Server]) -> dict[str, Any]:
    """The engine's own counts on each domain's test prompts, one domain a server."""
    measured = await asyncio.gather(
        *(_measured(cfg, server, stage.test[name]) for server, name in zip(servers, (A, B), strict=True))
    )
    return {name: Measured(run) for name, run in zip((A, B), measured, strict=True)}


@dataclass(frozen=True)
class Measured:
    run: Measurement

    @property
    def tau(self) -> float:
        assert self.run.counts is not None
        return self.run.counts.tau


async def _measured(cfg: Config, server: Server, prompts: Sequence[Prompt]) -> Measurement:
    return await asyncio.to_thread(
        measure,
        server.measured(cfg.num_speculative_tokens),
        prompts,
        max_tokens=cfg.max_tokens,
        concurrency=cfg.clients // 2,
    )


async def offer_poison(cfg: LearnerConfig, stage: Stage) -> dict[str, Any]:
    """What the gate says of the current draft with a third of its weights' spread in noise on top."""
    folder = stage.folder / "poisoned"
    served = stage.registry.path(stage.registry.current() or "")
    await asyncio.to_thread(spoilt, served, folder, noise=0.3)
    verdict = await control.ask(cfg.folder, do="judge", draft=str(folder))
    return {"rejected_by_gate": verdict["decision"] == "reject", "reason": verdict["reason"]}


async def force_useless(cfg: LearnerConfig, stage: Stage) -> dict[str, Any]:
    """A draft of nothing but noise, published and swapped in as a person would, past the gate."""
    registry = stage.registry
    current = registry.current()
    version = await asyncio.to_thread(
        registry.publish,
        lambda folder: spoilt(registry.path(current or ""), folder, noise=3.0),
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


def spoilt(draft: Path, folder: Path, noise: float) -> None:
    """The draft with noise of `noise` times their spread on all matrices."""
    model = StandaloneDraft.load(draft)
    generator = torch.Generator().manual_seed(0)
    for weight in model.model.parameters():
        if weight.ndim == 2:
            weight.data += noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    model.export(folder, load_tokenizer(draft))
    shutil.copy(draft / "config.json", folder)


async def measure_versions(
    cfg: Config, stage: Stage, servers: Sequence[Server], records_at_shift: int
) -> list[dict[str, Any]]:
    """Every version that was current, and the ceiling: tau on B's test prompts, after how many records of B."""
    registry = stage.registry
    offline = registry.publish(
        lambda folder: copy_draft(stage.folder / f"draft-{B}", registry.path("v000001"), folder),
        target_fingerprint=stage.fingerprint,
        provenance={"origin": "offline on B"},
        evaluation={},
    )
    promoted = registry.promoted()
    rows = []
    async with connected({server.url: stage.token for server in servers}) as fleet:
        for first in range(0, len(promoted) + 1, 2):
            pair = [*promoted, offline][first : first + 2]
            await asyncio.gather(*(server.swap(version) for server, version in zip(fleet, pair, strict=False)))
            measured = await asyncio.gather(
                *(_measured(cfg, server, stage.test[B]) for server, _ in zip(servers, pair, strict=False))
            )
            for version, run in zip(pair, measured, strict=True):
                provenance = provenance_of(registry, version)
                records = max(0, provenance.get("records", 0) - records_at_shift)
                origin = provenance.get("origin", "learned" if "records" in provenance else "offline on A")
                rows.append({"version": version, "origin": origin, "records": records, "tau": Measured(run).tau})
    return rows


def copy_draft(draft: Path, like: Path, folder: Path) -> None:
    """The draft's files with the very configuration of `like`, which is what the servers compare."""
    for path in draft.iterdir():
        shutil.copy(path, folder)
    shutil.copy(like / "config.json", folder)


async def capture_overhead(cfg: Config, stage: Stage, servers: Sequence[Server]) -> dict[str, Any]:
    """1 - tokens/s with capture / tokens/s without, of one server under load; medians of interleaved pairs."""
    urls, prompts = [servers[0].url], stage.test[B][: cfg.overhead_prompts]
    rates: dict[float, list[float]] = {0.0: [], 0.1: [], 1.0: []}
    for pair in tqdm(range(cfg.overhead_pairs), desc="what capture costs", unit="pair"):
        order = list(rates)
        for share in order[pair % 3 :] + order[: pair % 3]:
            rates[share].append(
                await tokens_per_s(urls, prompts, clients=cfg.clients, max_tokens=cfg.max_tokens, captured=share)
            )
    (whole, interval), (tenth, _) = (overhead(rates[share], rates[0.0]) for share in (1.0, 0.1))
    return {
        "overhead": whole,
        "overhead_interval": interval,
        "overhead_at_10_percent": tenth,
        "tokens_per_s": {str(share): some for share, some in rates.items()},
    }


async def target_checksum(stage: Stage, server: Server) -> str:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {stage.token}"}) as http:
        status = (await http.get(f"{server.url}/redraft/status")).json()
    return str(status["target_checksum"]) if status["target_intact"] else "changed"


@torch.no_grad()
def all_greedy(stage: Stage, answers: Sequence[Answer], runs: Sequence[Measured]) -> bool:
    """Whether every token that any client got is the target's own greedy one, or ties with it."""
    texts = [(answer.prompt.token_ids, answer.token_ids) for answer in answers]
    for measured in runs:
        outputs = zip(measured.run.prompts, measured.run.outputs, strict=True)
        texts += [(prompt.token_ids, output.token_ids) for prompt, output in outputs]
    for prompt, output in tqdm(texts, desc="lossless", unit="answer"):
        logits_TV = stage.target(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen_T = logits_TV.gather(1, torch.tensor(output)[:, None])[:, 0]
        if float((logits_TV.amax(-1) - chosen_T).max()) > TIE_LOGIT_GAP:
            return False
    return True


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
