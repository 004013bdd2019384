"""The online learner on two real servers: the traffic moves to a new domain, the draft adapts.

    $ make demo-online                                    # at most 20 minutes on two cores: outputs/demo-online/
    $ python -m benchmarks.demo.online --overwrite --distil-steps 40 --records-b 200 --overhead-pairs 2
    $ python -m benchmarks.demo.online --preset smollm2      # SmolLM2-135M-Instruct in outputs/demo-online-smollm2/
    $ python -m benchmarks.demo.online --preset v2           # vLLM's V2 model runner, by Triton's interpreter on a CPU

The traffic has two domains, A and B. A draft distilled on A is served to 8 streaming clients, who
ask about A and later about B. The learner captures, trains, evaluates, publishes and swaps, with
the defaults of learner.toml except for the few settings in `forced_settings`. Then a poisoned draft
is offered to the gate, and a useless one is forced past it. Everything is measured in the engine,
and no request may fail. At the end the training is replayed offline with several seeds, and
compared with a ceiling, i.e. the same draft trained for as many steps only on the recorded answers
to B. One server swaps between the first and the adapted draft, round by round, to measure the
difference in speed.

The small target, which is the default, writes code and then prose. A real model answers questions
about documentation, and then completes functions; the latter is measured on the prompts of
HumanEval, which are never trained on (`make_scene`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.demo.delays import account
from benchmarks.demo.fleet import (
    Answer,
    Server,
    Traffic,
    begin_report,
    measure_rates,
    read_tau,
    runner_environment,
    start_learner,
)
from benchmarks.demo.online_config import PRESETS, Config, describe_settings, forced_settings
from benchmarks.demo.online_outputs import Text, compare_with_target, spread
from benchmarks.demo.online_replay import FIRST, Replayer
from benchmarks.demo.online_report import (
    build_timeline,
    count_minutes_to_adapt,
    count_records_to_adapt,
    estimate_overhead,
    estimate_speed,
    find_minutes,
    summarise_report,
    summarise_traffic,
)
from benchmarks.demo.online_stage import Stage, make_scene
from redraft.distill.data.day import choose_day
from redraft.engine.measure import Measurement, measure
from redraft.engine.prompts import Prompt
from redraft.eval.report.page import charts_of, write_page
from redraft.files.artifact import PROVENANCE
from redraft.files.checkpoint import load_causal_lm
from redraft.files.progress import Progress
from redraft.heads.families.standalone import StandaloneDraft
from redraft.online.daemon import control
from redraft.online.daemon.config import LearnerConfig
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.rollout import Outcome
from redraft.online.fleet.server import connected
from redraft.online.journal import Journal, SwapEntry, TrainingEntry
from redraft.online.learning.gate import Decision
from redraft.recipes.cli.run import run_recipe

CEILING = "offline on B"

INTERPRETED = (
    "V2 on a CPU: Triton's interpreter runs the kernels, for correctness and not for "
    "speed (--preset v2)"
)

TEMPLATE = Path(__file__).parent / "templates" / "online.html.j2"

draw_charts = charts_of("benchmarks.demo.online_charts")


def main(cfg: Config) -> None:
    began_s = time.perf_counter()
    # Checked before any work, because V2 may not run on this machine.
    if "TRITON_INTERPRET" in runner_environment(cfg.runner):
        print(INTERPRETED)
    day, scene = choose_day(), make_scene(cfg)
    report = begin_report(cfg, day) | {
        "target": scene.target.name,
        "dtype": scene.dtype,
        "domains": list(scene.domains),
        "about": dict(scene.about),
    }
    stage = Stage.set(cfg, scene, day)
    report |= asyncio.run(play(cfg, stage))
    report["duration_s"] = round(time.perf_counter() - began_s, 1)
    page = write_page(cfg.output, report, TEMPLATE, draw_charts)
    print(summarise_report(report))
    print(f"report: {page}")


async def play(cfg: Config, stage: Stage) -> dict[str, Any]:
    """Run the demo on a prepared stage, and return the report."""
    a, b = stage.scene.domains
    report: dict[str, Any] = {"settings": describe_settings(forced_settings(cfg))}
    with ExitStack() as running:
        servers = [running.enter_context(stage.server(core)) for core in (0, 1)]
        await asyncio.gather(*(server.ready() for server in servers))
        urls = [server.url for server in servers]
        traffic = Traffic(
            urls,
            {name: itertools.cycle(some) for name, some in stage.traffic.items()},
            clients=cfg.clients,
            max_tokens=cfg.max_tokens,
            pause_s=cfg.pause_s,
        )
        first = [await read_status(stage, server) for server in servers]
        report["runner"] = first[0]["runner"]

        # 1. Before: the draft was trained on A only.
        before = await measure_domains(cfg, stage, servers)
        print(
            f"tau of the draft trained on {a}: {read_tau(before[a]):.2f} on {a}, "
            f"{read_tau(before[b]):.2f} on {b}"
        )

        # 2. The traffic moves from A to B, and the learner follows.
        async with learner(stage, servers) as cfg_learner, traffic.flowing():
            await wait(cfg.traffic_a_s, f"traffic of {a}")
            traffic.domain, shifted_s = b, time.time()
            records_at_shift = count_trained_records(cfg_learner)

            def is_learned() -> bool:
                # A version's `records` includes the records of domain A.
                served = read_provenance(stage.registry, stage.registry.current() or "")
                return int(served.get("records", 0)) - records_at_shift >= cfg.records_b

            await wait(cfg.traffic_b_s, f"traffic of {b}", is_learned)
            # 3. Two drafts that must not be served.
            report["bad_candidate"] = await offer_poison(cfg_learner, stage)
            report["bad_draft"] = await force_useless(cfg_learner, stage)
        journal = Journal(stage.folder / "learner" / "journal").read().entries
        report |= summarise_traffic(traffic, journal)
        report["delays"] = account(journal)

        # 4. After: the served version, every version before it, and the ceiling.
        after = await measure_domains(cfg, stage, servers)
        moments = {
            "a_before": before[a],
            "b_before": before[b],
            "b_adapted": after[b],
            "a_after": after[a],
        }
        report["tau"] = {name: read_tau(run) for name, run in moments.items()}
        report["tokens_per_s"] = {name: run.tokens_per_s for name, run in moments.items()}
        # The learner has stopped, so its lock on the buffer is released.
        report["gap"] = await asyncio.to_thread(replay, cfg, stage)
        minutes = find_minutes(journal, shifted_s)
        report["versions"] = [
            {**row, "minutes": minutes.get(row["version"])}
            for row in await measure_versions(cfg, stage, servers, records_at_shift)
        ]
        report["tau"]["b_offline"] = next(
            v["tau"] for v in report["versions"] if v["origin"] == CEILING
        )
        report["records_to_adapt"] = count_records_to_adapt(report)
        report["minutes_to_adapt"] = count_minutes_to_adapt(report)

        # 5. The speed, and the cost of capture.
        report["speed"] = await compare_speed(cfg, stage, servers[0])
        # No swap may have changed a single bit of the target's weights.
        last = [await read_status(stage, server) for server in servers]
        report["swap"]["target_checksum_equal"] = list(map(read_checksum, last)) == list(
            map(read_checksum, first)
        )
        report["capture"] = await measure_capture_overhead(cfg, stage, servers)
    report["outputs"] = check_outputs(cfg, stage, traffic.answers, list(moments.values()))
    report["lossless"] = report["outputs"]["lossless"]
    report["timeline"] = build_timeline(journal, shifted_s)
    return report


# -------------------------------------------------------------------------------------------------------
# the acts


@asynccontextmanager
async def learner(stage: Stage, servers: Sequence[Server]) -> Any:
    """Run `redraft learner` next to the servers."""
    stage.configure(servers)
    async with start_learner(stage.folder):
        yield stage.config


async def wait(seconds: float, title: str, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Show a progress bar for this time, or until `is_enough`."""
    with Progress(
        total=round(seconds), desc=title, unit="s", bar_format="{desc}: {n:.0f}/{total} s"
    ) as bar:
        while bar.n < round(seconds) and not is_enough():
            await asyncio.sleep(1)
            bar.update()


def read_provenance(registry: Registry, version: str) -> dict[str, Any]:
    """Read the provenance of a version.

    If the learner made the version, `records` is the number of records trained on by then.
    """
    provenance: dict[str, Any] = json.loads((registry.path(version) / PROVENANCE).read_text())
    return provenance


def count_trained_records(cfg: LearnerConfig) -> int:
    """Return the number of records that the learner has trained on so far."""
    seen = [
        e.records_seen
        for e in Journal(cfg.folder / "journal").read().entries
        if isinstance(e, TrainingEntry)
    ]
    return seen[-1] if seen else 0


async def measure_domains(
    cfg: Config, stage: Stage, servers: Sequence[Server]
) -> dict[str, Measurement]:
    """Measure each domain's test prompts in the engine, one domain per server."""
    domains = stage.scene.domains
    measured = await asyncio.gather(
        *(
            measure_server(cfg, server, stage.test[name])
            for server, name in zip(servers, domains, strict=True)
        )
    )
    return dict(zip(domains, measured, strict=True))


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
    """Offer the gate the current draft with noise, and return the verdict.

    The noise on every matrix is 0.3 times its spread.
    """
    folder = stage.folder / "poisoned"
    served = stage.registry.path(stage.registry.current() or "")
    await asyncio.to_thread(add_noise, served, folder, noise=0.3)
    verdict = await control.ask(cfg.folder, control.Judged, do="judge", draft=str(folder))
    return {"rejected_by_gate": verdict.decision is Decision.REJECT, "reason": verdict.reason}


async def force_useless(cfg: LearnerConfig, stage: Stage) -> dict[str, Any]:
    """Publish a draft that is mostly noise and swap it in past the gate, as an operator could.

    Return the outcome.
    """
    registry = stage.registry
    current = registry.current()
    version = await asyncio.to_thread(
        registry.publish,
        lambda folder: add_noise(registry.path(current or ""), folder, noise=3.0),
        target_fingerprint=stage.fingerprint,
        provenance={"origin": "noise"},
        evaluation={},
    )
    outcome = await control.ask(cfg.folder, Outcome, do="swap", version=version)
    swaps = [e for e in Journal(cfg.folder / "journal").read().entries if isinstance(e, SwapEntry)]
    there = next(s for s in swaps if s.version == version)
    back = [s for s in swaps if s.from_version == version and s.outcome == "rolled_back"]
    return {
        "rolled_back": not outcome.passed and registry.current() == current and bool(back),
        "rollback_s": back[-1].time_s - there.time_s if back else None,
        "reason": outcome.reason,
        "version": version,
    }


def add_noise(draft: Path, folder: Path, noise: float) -> None:
    """Write the draft into `folder` with noise on every matrix.

    The noise is `noise` times the matrix's standard deviation.
    """
    model = StandaloneDraft.load(draft)
    generator = torch.Generator().manual_seed(0)
    for weight in model.model.parameters():
        if weight.ndim == 2:
            weight.data += (
                noise
                * weight.std()
                * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            )
    model.export(folder, like=draft)
    # A server refuses a draft with a config other than the one it was started with.
    shutil.copy(draft / "config.json", folder)


async def measure_versions(
    cfg: Config, stage: Stage, servers: Sequence[Server], records_at_shift: int
) -> list[dict[str, Any]]:
    """Measure every version that was current, and the ceiling.

    The results are tau on B's test prompts, and the number of B's records trained on.
    """
    registry = stage.registry
    offline = registry.publish(
        lambda folder: copy_draft(stage.folder / "ceiling", registry.path(FIRST), folder),
        target_fingerprint=stage.fingerprint,
        provenance={"origin": CEILING},
        evaluation={},
    )
    promoted, b = registry.promoted(), stage.scene.domains[1]
    rows = []
    async with connected({server.url: stage.token for server in servers}) as fleet:
        # Measure two versions at a time, one on each server. With an odd number of versions, the
        # last one leaves the second server idle.
        for first in range(0, len(promoted) + 1, 2):
            pair = [*promoted, offline][first : first + 2]
            await asyncio.gather(
                *(server.swap(version) for server, version in zip(fleet, pair, strict=False))
            )
            measured = await asyncio.gather(
                *(
                    measure_server(cfg, server, stage.test[b])
                    for server, _ in zip(servers, pair, strict=False)
                )
            )
            for version, run in zip(pair, measured, strict=True):
                provenance = read_provenance(registry, version)
                records = max(0, provenance.get("records", 0) - records_at_shift)
                origin = provenance.get(
                    "origin", "learned" if "records" in provenance else "offline on A"
                )
                rows.append(
                    {"version": version, "origin": origin, "records": records, "tau": read_tau(run)}
                )
    return rows


def replay(cfg: Config, stage: Stage) -> dict[str, Any]:
    """Return the share of the gap that learning closes, with an interval.

    The learner's training is replayed offline with several seeds.
    """
    b = stage.scene.domains[1]
    records = read_provenance(stage.registry, stage.registry.current() or "").get("records", 0)
    replayer = Replayer(
        stage.config, stage.target, stage.test[b], cfg.num_speculative_tokens, cfg.max_tokens
    )
    return replayer.run(records, b, range(cfg.seeds), stage.folder / "ceiling")


def copy_draft(draft: Path, like: Path, folder: Path) -> None:
    """Copy the draft's files, except for config.json, which comes from `like`.

    Servers refuse a draft with a different config.
    """
    for path in draft.iterdir():
        shutil.copy(path, folder)
    shutil.copy(like / "config.json", folder)


async def compare_speed(cfg: Config, stage: Stage, server: Server) -> dict[str, Any]:
    """Return `estimate_speed` of the adapted draft over the first draft.

    In every round, the server swaps to each of the two.
    """
    versions = {"before": FIRST, "adapted": stage.registry.current() or FIRST}
    runs: dict[str, list[Measurement]] = {name: [] for name in versions}
    prompts = stage.test[stage.scene.domains[1]]
    async with connected({server.url: stage.token}) as (swapped,):
        for number in Progress(range(cfg.speed_rounds), desc="speed", unit="round"):
            some = [
                prompts[(number * cfg.speed_prompts + i) % len(prompts)]
                for i in range(cfg.speed_prompts)
            ]
            # Each draft is first in turn, so that a drift of the machine's speed favours neither.
            for name in sorted(versions, reverse=bool(number % 2)):
                await swapped.swap(versions[name])
                runs[name].append(await measure_server(cfg, server, some))
    steps = {name: [run.step_s for run in some if run.step_s] for name, some in runs.items()}
    return estimate_speed(
        {name: [run.tokens_per_s for run in some] for name, some in runs.items()}
    ) | {
        "concurrency": min(cfg.speed_prompts, cfg.clients // 2),
        "mode": server.mode,
        "step_ms": {name: 1000 * statistics.median(some) for name, some in steps.items() if some},
    }


async def measure_capture_overhead(
    cfg: Config, stage: Stage, servers: Sequence[Server]
) -> dict[str, Any]:
    """Measure 1 - (tokens/s with capture) / (tokens/s without) for one server under load.

    Both are medians over interleaved rounds.
    """
    urls, prompts = [servers[0].url], stage.test[stage.scene.domains[1]][: cfg.overhead_prompts]
    rates = await measure_rates(
        urls, prompts, rounds=cfg.overhead_pairs, clients=cfg.clients, max_tokens=cfg.max_tokens
    )
    (whole, interval), (tenth, tenth_interval) = (
        estimate_overhead(rates[share], rates[0.0]) for share in (1.0, 0.1)
    )
    return {
        "overhead": whole,
        "overhead_interval": interval,
        "overhead_at_10_percent": tenth,
        "overhead_at_10_percent_interval": tenth_interval,
        "tokens_per_s": {str(share): some for share, some in rates.items()},
    }


async def read_status(stage: Stage, server: Server) -> dict[str, Any]:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {stage.token}"}) as http:
        status: dict[str, Any] = (await http.get(f"{server.url}/redraft/status")).json()
    return status


def read_checksum(status: Mapping[str, Any]) -> str:
    """Read the checksum of the target's weights from a server's status."""
    return str(status["target_checksum"]) if status["target_intact"] else "changed"


def check_outputs(
    cfg: Config, stage: Stage, answers: Sequence[Answer], runs: Sequence[Measurement]
) -> dict[str, Any]:
    """Run `compare_with_target` on the answers that clients and measurements received."""
    texts: list[Text] = [(answer.prompt.token_ids, answer.token_ids) for answer in answers]
    for run in runs:
        pairs = zip(run.prompts, run.outputs, strict=True)
        texts += [(prompt.token_ids, output.token_ids) for prompt, output in pairs]
    is_exact = stage.scene.dtype == "float32"
    exact = stage.target if is_exact else load_causal_lm(stage.scene.target, torch.float32).eval()
    return compare_with_target(spread(texts, cfg.checked_answers), stage.target, exact)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
