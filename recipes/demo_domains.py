"""A draft per domain behind a router, against one shared draft of the same size: mixed traffic on two real servers.

    $ make demo-domains                                   # 15 to 25 minutes on two cores: outputs/demo-domains/
    $ python recipes/demo_domains.py --overwrite --distil-steps 20 --num-test-prompts 8

Three drafts of one target are distilled for as long each: one on code, one on prose, and one on both; and a shared one
more, for as long as the two specialists together. The router learns from unlabelled prompts which kinds there are, and
tells every request by its text alone. Then the same mixed traffic goes through it to servers with a specialist each,
and to the same servers with either shared draft.
"""

from __future__ import annotations

import asyncio
import random
import secrets
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

import eval.engine
from distill.data import Conversation, load_conversations, split_held_out
from distill.samples import held_out_prompts
from eval.acceptance import AcceptanceCounts
from eval.engine import complete_all, wait_until_healthy
from eval.process import free_port, process_group
from eval.prompts import Prompt
from eval.report import write_page
from heads.artifact import fingerprint, publish
from heads.checkpoint import load_causal_lm, load_tokenizer
from heads.standalone import Init, StandaloneDraft, make_draft
from online.domains import Clusters
from online.fleet import connected
from online.proxy import POOL_HEADER
from online.registry import Registry
from recipes import bench_router, domains
from recipes.cli import run_recipe
from recipes.demo_fleet import Server, begun, distil, served

A, B = "code", "prose"

SPECIALIST, SHARED, SHARED_LONGER = "v000001", "v000002", "v000003"
"""In the registry of either domain."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = Path("tests/assets/tiny-target")
    output: Path = Path("outputs/demo-domains")
    overwrite: bool = False
    """Replace the demo in `output`."""
    draft_layers: tuple[int, ...] = (0, 6)
    """Layers of the target that every draft begins with."""
    distil_steps: int = 120
    """Of 4,096 tokens, for each draft; twice as many for the shared one that is trained longer."""
    distil_lr: float = 1e-3
    num_test_prompts: int = 96
    """Half of them of each domain, in turn: never trained, and unknown to the router."""
    num_routed: int = 400
    """Held-out prompts that the router is asked to tell apart."""
    clients: int = 8
    max_tokens: int = 96
    """Longest answer."""
    max_prompt_tokens: int = 160
    num_speculative_tokens: int = 3


def main(cfg: Config) -> None:
    began_s = time.perf_counter()
    report = begun(cfg)
    folder = cfg.output.absolute()

    # 1. data: the parts to train on, and prompts that nothing has seen
    train, held_out = split_held_out(load_conversations("stdlib"), 0.05)
    parts = {name: [c for c in train if c["domain"] == name] for name in (A, B)}
    tokenizer = load_tokenizer(cfg.target)
    prompts = held_out_prompts(held_out, tokenizer, num_prompts=cfg.num_routed, max_length=cfg.max_prompt_tokens)

    # 2. what kinds of prompts there are, without their labels, which only give the kinds their names
    texts = domains.prompts(train)
    publish(folder / "clusters", Clusters.fit(texts[0], 2).named_after(*texts).write, {"prompts": len(texts[0])})

    # 3. two specialists and the shared drafts, in the registries of two domains
    make_drafts(cfg, folder, parts, tokenizer)

    # 4. the same traffic through the router, to the specialists and to the shared drafts
    with running_servers(cfg, folder) as servers, running_router(cfg, folder, servers) as router:
        report |= asyncio.run(play(cfg, folder, servers, router, prompts))
    with tempfile.TemporaryDirectory() as scratch:
        report["domains"]["router_overhead_ms_p50"] = router_overhead_ms(Path(scratch))

    report["duration_s"] = round(time.perf_counter() - began_s, 1)
    page = write_page(cfg.output, report, "domains.html.j2", "online_charts.domain_charts")
    print(summary(report["domains"]))
    print(f"report: {page}")


# ------------------------------------------------------------------------------------------------------- the stage


def make_drafts(cfg: Config, folder: Path, parts: Mapping[str, Sequence[Conversation]], tokenizer: Any) -> None:
    """A registry for each domain with its specialist and with the shared drafts; the specialist is current."""
    target = load_causal_lm(cfg.target, torch.float32).eval()
    size = min(map(len, parts.values()))
    mixed = [c for part in parts.values() for c in random.Random(0).sample(part, size)]  # half and half, as the traffic

    def drafted(name: str, conversations: Sequence[Conversation], steps: int) -> StandaloneDraft:
        draft = make_draft(Init(layers=cfg.draft_layers), target, tokenizer)
        distil(draft, target, tokenizer, conversations, name=name, steps=steps, lr=cfg.distil_lr)
        return draft

    shared = [drafted(f"{A} and {B}", mixed, times * cfg.distil_steps) for times in (1, 2)]
    for name, part in parts.items():
        registry = Registry(folder / "drafts" / name)
        for draft in (drafted(name, part, cfg.distil_steps), *shared):
            registry.publish(
                partial(draft.export, tokenizer=tokenizer, dtype=torch.bfloat16),
                target_fingerprint=fingerprint(cfg.target),
                provenance={"origin": "offline"},
                evaluation={},
            )
        registry.promote(SPECIALIST)


@contextmanager
def running_servers(cfg: Config, folder: Path) -> Iterator[dict[str, Server]]:
    """A server for each domain, on a core of its own, with its specialist."""
    (folder / "token").write_text(secrets.token_urlsafe(16))
    (folder / "spool").mkdir(mode=0o700)

    def server(core: int, name: str) -> Any:
        return served(
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
    """Address of `redraft router` in front of them."""
    listed = (f'[[servers]]\nurl = "{server.url}"\ndomain = "{name}"\n' for name, server in servers.items())
    (folder / "fleet.toml").write_text("".join(listed))
    port = free_port()
    (folder / "router.toml").write_text(
        f'fleet = "fleet.toml"\nclusters = "clusters"\ntarget = "{cfg.target.absolute()}"\nport = {port}\n'
    )
    command = [sys.executable, "-m", "recipes.router", "--config", str(folder / "router.toml")]
    url, log = f"http://127.0.0.1:{port}", folder / "logs" / "router.log"
    with process_group(command, log=log) as process:
        wait_until_healthy(url, process, log, what="the router")
        yield url


# ------------------------------------------------------------------------------------------------------- the acts


async def play(
    cfg: Config, folder: Path, servers: Mapping[str, Server], router: str, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Which pool every prompt went to, and what was accepted of specialists and of the shared drafts."""
    routed = await pools_of(router, prompts, cfg.clients)
    traffic = prompts[: cfg.num_test_prompts]
    token = (folder / "token").read_text()
    found = {}
    async with connected({server.url: token for server in servers.values()}) as fleet:
        for version in (SPECIALIST, SHARED, SHARED_LONGER):
            await asyncio.gather(*(server.swap(version) for server in fleet))
            found[version] = await taus(cfg, router, traffic, f"drafts {version}")
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


async def taus(cfg: Config, router: str, prompts: Sequence[Prompt], what: str) -> dict[str, float]:
    """tau in the engine on each domain's prompts, all sent through the router without a label, and the mean of both."""
    through = eval.engine.Server(
        url=router, model="m", dtype="float32", num_speculative_tokens=cfg.num_speculative_tokens
    )
    outputs = await complete_all(through, prompts, cfg.max_tokens, 0.0, cfg.clients, what)
    counts = {name: AcceptanceCounts.zero(cfg.num_speculative_tokens) for name in (A, B)}
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.counts is not None, "there is a draft"
        counts[prompt.domain] += output.counts
    a, b = counts[A].tau, counts[B].tau
    return {"a": a, "b": b, "mean": (a + b) / 2}


async def pools_of(router: str, prompts: Sequence[Prompt], clients: int) -> list[str]:
    """The pool that the router sent each prompt to."""
    slots = asyncio.Semaphore(clients)

    async def one(http: httpx.AsyncClient, prompt: Prompt) -> str:
        async with slots:
            body = {"model": "m", "prompt": prompt.token_ids, "max_tokens": 1}
            answer = await http.post(f"{router}/v1/completions", json=body)
        return answer.raise_for_status().headers[POOL_HEADER.decode()]

    async with httpx.AsyncClient(timeout=60) as http:
        return list(await asyncio.gather(*(one(http, prompt) for prompt in prompts)))


def router_overhead_ms(scratch: Path) -> float:
    """What it adds to an answer at the median, in front of a server that answers at once."""
    texts = bench_router.sample_texts()
    with bench_router.running_pair(scratch, texts) as (direct, router):
        results = bench_router.overhead(direct, router, "\n".join(texts)[:2000], 300)
    return float(results["answer"]["overhead_ms_p50"])


def summary(found: Mapping[str, Any]) -> str:
    names = {**found["names"], "mean": "mean"}
    own, shared, longer = (found[f"tau_{which}"] for which in ("specialised", "shared", "shared_longer"))
    return "\n".join(
        [
            *(
                f"tau on {name}: {own[key]:.3f} with its own draft, {shared[key]:.3f} with the shared one, "
                f"{longer[key]:.3f} with the shared one that was trained twice as long"
                for key, name in names.items()
            ),
            f"routed right without a label: {found['routed_right']:.1%} of {found['num_routed']}; "
            f"the router adds {found['router_overhead_ms_p50']:.2f} ms at the median",
        ]
    )


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
