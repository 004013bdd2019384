"""Compare a draft per domain, behind a router, with one shared draft of the same size, on two real
servers.

    $ make demo-domains                                   # 15 to 25 minutes on two cores: outputs/demo-domains/
    $ python -m benchmarks.studies.domains --overwrite --distil-steps 20 --num-test-prompts 8

Three drafts of one target are distilled with the same number of steps: on code, on prose, and on
both. A fourth, shared one gets twice the steps, as many as the two specialists together. The router
learns the domains from unlabelled prompts and routes every request by its text. The same mixed
traffic then goes through the router to two servers: first each with a specialist, then both with
either shared draft.
"""

from __future__ import annotations

import asyncio
import datetime
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import router as bench_router
from benchmarks.demo.fleet import Server, begin_report, distil, start_server
from redraft.distill.data.conversations import Conversation, load_conversations, split_held_out
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import held_out_prompts
from redraft.eval.counts import AcceptanceCounts
from redraft.eval.engine.measure import complete_all
from redraft.eval.engine.process import free_port, process_group
from redraft.eval.engine.sampling import GREEDY
from redraft.eval.engine.server import VllmServer, wait_until_healthy
from redraft.eval.prompts import Prompt
from redraft.eval.report.page import write_page
from redraft.heads.families.standalone import Init, StandaloneDraft, make_draft
from redraft.heads.files.artifact import publish
from redraft.heads.files.checkpoint import load_causal_lm, load_tokenizer
from redraft.heads.files.folder import fingerprint
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.server import connected
from redraft.online.tokens import read_token, write_token
from redraft.online.traffic.domains import Clusters
from redraft.online.traffic.proxy import POOL_HEADER
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.serve import domains

A, B = "code", "prose"

SPECIALIST, SHARED, SHARED_LONGER = "v000001", "v000002", "v000003"
"""Versions in the registries of both domains."""


TEMPLATE = Path(__file__).parent / "templates" / "domains.html.j2"


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = Path("tests/assets/tiny-target")
    """Folder of the target model."""
    output: Path = Path("outputs/demo-domains")
    """Folder for the report, the drafts and the logs."""
    overwrite: bool = False
    """Replace the demo in `output`."""
    draft_layers: tuple[int, ...] = (0, 6)
    """Layers of the target to initialise every draft with."""
    distil_steps: int = 120
    """Training steps of 4,096 tokens per draft. The longer-trained shared draft gets twice as many.
    """
    distil_lr: float = 1e-3
    """AdamW learning rate of the training."""
    num_test_prompts: int = 96
    """Prompts to measure tau on, half of them of each domain. They are not used in training, nor by
    the router.
    """
    num_routed: int = 400
    """Held-out prompts to measure the router's accuracy on."""
    clients: int = 8
    """Requests in flight."""
    max_tokens: int = 96
    """Maximum length of an answer, in tokens."""
    max_prompt_tokens: int = 160
    """Maximum length of a prompt, in tokens."""
    num_speculative_tokens: int = 3
    """Draft tokens per step."""


def draw_charts(report: Mapping[str, Any]) -> dict[str, Any]:
    from benchmarks.studies.domains_charts import build_charts  # altair is in the `report` extra

    return build_charts(report)


def main(cfg: Config) -> None:
    began_s = time.perf_counter()
    day = choose_day()
    report = begin_report(cfg, day)
    folder = cfg.output.absolute()

    # 1. data: a training part per domain, and held-out prompts
    train, held_out = split_held_out(load_conversations("stdlib"), 0.05)
    parts = {name: [c for c in train if c["domain"] == name] for name in (A, B)}
    tokenizer = load_tokenizer(cfg.target)
    prompts = held_out_prompts(
        held_out, tokenizer, num_prompts=cfg.num_routed, max_length=cfg.max_prompt_tokens, day=day
    )

    # 2. find the domains; labels only name them
    texts = domains.read_prompts(train)
    publish(
        folder / "clusters",
        Clusters.fit(texts[0], 2).named_after(*texts).write,
        {"prompts": len(texts[0])},
    )

    # 3. train the specialists and the shared drafts
    make_drafts(cfg, folder, parts, tokenizer, day)

    # 4. the same traffic, first to the specialists, then to the shared drafts
    with running_servers(cfg, folder) as servers, running_router(cfg, folder, servers) as router:
        report |= asyncio.run(measure_drafts(cfg, folder, servers, router, prompts))
    # After the servers have stopped: on two cores they would slow the router down.
    with tempfile.TemporaryDirectory() as scratch:
        report["domains"]["router_overhead_ms_p50"] = measure_router_overhead_ms(Path(scratch))

    report["duration_s"] = round(time.perf_counter() - began_s, 1)
    page = write_page(cfg.output, report, TEMPLATE, draw_charts)
    print(summarise(report["domains"]))
    print(f"report: {page}")


# ----------------------------------------------------------------------------------------------
# drafts and servers


def make_drafts(
    cfg: Config,
    folder: Path,
    parts: Mapping[str, Sequence[Conversation]],
    tokenizer: Any,
    day: datetime.date,
) -> None:
    """Fill a registry per domain with the specialist, which is current, and the shared drafts."""
    target = load_causal_lm(cfg.target, torch.float32).eval()
    size = min(map(len, parts.values()))
    mixed = [
        c for part in parts.values() for c in random.Random(0).sample(part, size)
    ]  # half and half, as the traffic

    def train_draft(
        name: str, conversations: Sequence[Conversation], steps: int
    ) -> StandaloneDraft:
        draft = make_draft(Init(layers=cfg.draft_layers), target, tokenizer)
        distil(
            draft,
            target,
            tokenizer,
            conversations,
            day=day,
            name=name,
            steps=steps,
            lr=cfg.distil_lr,
        )
        return draft

    # Trained once, published in both registries: both servers get the same shared drafts.
    shared = [train_draft(f"{A} and {B}", mixed, times * cfg.distil_steps) for times in (1, 2)]
    for name, part in parts.items():
        registry = Registry(folder / "drafts" / name)
        # The registry counts versions from 1, so this order makes SPECIALIST, SHARED and
        # SHARED_LONGER.
        for draft in (train_draft(name, part, cfg.distil_steps), *shared):
            registry.publish(
                partial(draft.export, tokenizer=tokenizer, dtype=torch.bfloat16),
                target_fingerprint=fingerprint(cfg.target),
                provenance={"origin": "offline"},
                evaluation={},
            )
        registry.promote(SPECIALIST)


@contextmanager
def running_servers(cfg: Config, folder: Path) -> Iterator[dict[str, Server]]:
    """A server for each domain with the specialist, each on a separate core."""
    write_token(folder / "token")
    (folder / "spool").mkdir(mode=0o700)

    def server(core: int, name: str) -> Any:
        return start_server(
            cfg.target,
            folder / "drafts" / name,
            spool=folder / "spool",
            token_file=folder / "token",
            num_speculative_tokens=cfg.num_speculative_tokens,
            max_model_len=512,
            core=core,
            port=free_port(),
            log=folder / "logs" / f"{name}.log",
        )

    async def ready(*servers: Server) -> None:
        await asyncio.gather(*(server.ready() for server in servers))

    with server(0, A) as a, server(1, B) as b:
        asyncio.run(ready(a, b))
        yield {A: a, B: b}


@contextmanager
def running_router(cfg: Config, folder: Path, servers: Mapping[str, Server]) -> Iterator[str]:
    """Run `redraft router` in front of the servers, and yield the address."""
    listed = (
        f'[[servers]]\nurl = "{server.url}"\ndomain = "{name}"\n'
        for name, server in servers.items()
    )
    (folder / "fleet.toml").write_text("".join(listed))
    port = free_port()
    (folder / "router.toml").write_text(
        f'fleet = "fleet.toml"\nclusters = "clusters"\ntarget = "{cfg.target.absolute()}"\n'
        f"port = {port}\nadmin_port = 0\n"
    )
    command = [
        sys.executable,
        "-m",
        "redraft.recipes.cli",
        "router",
        "--config",
        str(folder / "router.toml"),
    ]
    url, log = f"http://127.0.0.1:{port}", folder / "logs" / "router.log"
    with process_group(command, log=log) as process:
        wait_until_healthy(url, process, log, name="the router")
        yield url


# ----------------------------------------------------------------------------------------------------
# measurements


async def measure_drafts(
    cfg: Config, folder: Path, servers: Mapping[str, Server], router: str, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """The router's accuracy, and tau of the specialists and of the shared drafts."""
    routed = await find_pools(router, prompts, cfg.clients)
    # `held_out_prompts` takes the domains in turn, so the first ones are half code, half prose.
    traffic = prompts[: cfg.num_test_prompts]
    token = read_token(folder / "token")
    found = {}
    async with connected({server.url: token for server in servers.values()}) as fleet:
        for version in (SPECIALIST, SHARED, SHARED_LONGER):
            await asyncio.gather(*(server.swap(version) for server in fleet))
            found[version] = await measure_taus(cfg, router, traffic, f"drafts {version}")
    right = [pool == prompt.domain for pool, prompt in zip(routed, prompts, strict=True)]
    return {
        "domains": {
            "names": {"a": A, "b": B},
            "tau_specialised": found[SPECIALIST],
            "tau_shared": found[SHARED],
            "tau_shared_longer": found[SHARED_LONGER],
            "routed_right": sum(right) / len(right),
            "num_routed": len(right),
            "num_prompts": len(traffic),
            "steps": cfg.distil_steps,
        }
    }


async def measure_taus(
    cfg: Config, router: str, prompts: Sequence[Prompt], title: str
) -> dict[str, float]:
    """tau in the engine per domain, and the mean.

    All prompts go through the router without a label.
    """
    through = VllmServer(
        url=router, model="m", dtype="float32", num_speculative_tokens=cfg.num_speculative_tokens
    )
    outputs = await complete_all(through, prompts, cfg.max_tokens, GREEDY, cfg.clients, title)
    counts = {name: AcceptanceCounts.zero(cfg.num_speculative_tokens) for name in (A, B)}
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.counts is not None, "the server has a draft"
        # The servers count every request by itself, so the router in between takes nothing from the
        # counts.
        counts[prompt.domain] += output.counts
    a, b = counts[A].tau, counts[B].tau
    return {"a": a, "b": b, "mean": (a + b) / 2}


async def find_pools(router: str, prompts: Sequence[Prompt], clients: int) -> list[str]:
    """The pool chosen by the router for each prompt."""
    slots = asyncio.Semaphore(clients)

    async def one(http: httpx.AsyncClient, prompt: Prompt) -> str:
        async with slots:
            body = {"model": "m", "prompt": prompt.token_ids, "max_tokens": 1}
            answer = await http.post(f"{router}/v1/completions", json=body)
        return answer.raise_for_status().headers[POOL_HEADER.decode()]

    async with httpx.AsyncClient(timeout=60) as http:
        return list(await asyncio.gather(*(one(http, prompt) for prompt in prompts)))


def measure_router_overhead_ms(scratch: Path) -> float:
    """Median delay added by the router, in front of a server that answers at once."""
    texts = bench_router.sample_texts()
    with bench_router.running_pair(scratch, texts) as (direct, router):
        results = bench_router.overhead(direct, router, "\n".join(texts)[:2000], 300)
    return float(results["answer"]["overhead_ms_p50"])


def summarise(found: Mapping[str, Any]) -> str:
    """The lines to print at the end."""
    names = {**found["names"], "mean": "mean"}
    special, shared, longer = (
        found["tau_specialised"],
        found["tau_shared"],
        found["tau_shared_longer"],
    )
    return "\n".join(
        [
            *(
                f"tau on {name}: {special[key]:.3f} with a draft per domain, {shared[key]:.3f} "
                "with the shared draft, "
                f"{longer[key]:.3f} with the shared draft trained twice as long"
                for key, name in names.items()
            ),
            f"routed correctly without a label: {found['routed_right']:.1%} of "
            f"{found['num_routed']}; "
            f"the router adds {found['router_overhead_ms_p50']:.2f} ms at the median",
        ]
    )


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
