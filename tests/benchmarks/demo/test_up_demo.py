"""The demo of `redraft up`.

Its estimates and page on made numbers, and a short run in the real engine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_completions import event, served
from make_delays import make_delays
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import in_event_loop, until

from benchmarks.demo import up
from benchmarks.demo.up import Config, Pair, Play, draw, estimate, find_gain, summarise
from benchmarks.demo.up_versions import draw_learning
from redraft.engine.machine import environment
from redraft.engine.prompts import Prompt
from redraft.eval.report.page import write_page
from redraft.online.daemon import control
from redraft.online.tokens import write_token


def make_pairs(*ratios: float) -> list[Pair]:
    return [
        Pair(s=60.0 * i, clients=1, auto=10 * ratio, undrafted=10, version="v1")
        for i, ratio in enumerate(ratios)
    ]


def test_the_speed_is_the_median_of_the_pairs_with_an_interval_of_six() -> None:
    six = estimate(make_pairs(1.4, 1.0, 1.2, 1.3, 1.1, 0.9))
    assert six == {"ratio": pytest.approx(1.15), "interval": pytest.approx((0.9, 1.4)), "pairs": 6}
    assert estimate(make_pairs(1.4, 1.0)) == {
        "ratio": pytest.approx(1.2),
        "interval": None,
        "pairs": 2,
    }
    assert estimate([])["ratio"] is None


def test_the_gain_begins_where_nine_pairs_of_one_client_show_one() -> None:
    assert find_gain(make_pairs(1.0, 0.9, *[1.2] * 9, 0.9)) == 120
    assert find_gain(make_pairs(*[1.2] * 8, 0.9)) is None
    busy = [replace(pair, clients=8, undrafted=20) for pair in make_pairs(*[1.2] * 9)]
    both = [pair for pairs in zip(make_pairs(*[1.2] * 9), busy, strict=True) for pair in pairs]
    assert find_gain(both) == 0, "eight clients are slower, one is not"


def test_fewer_pairs_than_an_interval_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="5"):
        Config(pairs=5)
    with pytest.raises(ValueError, match="--workload-pairs 5"):
        Config(workload_pairs=5)


AGENTS = {
    "clients": 1, "requests": 64, "failed": 0, "tau": 1.6, "head_share": 0.25, "lookup_share": 0.75,
    "hit_rate": 0.81, "hit_rate_plain": 0.82,
    "tokens_s": {"ratio": 1.07, "interval": (0.98, 1.2), "pairs": 8},
    "first_token": {"ratio": 1.02, "interval": (0.99, 1.05), "pairs": 8},
    "decoding": {"ratio": 1.3, "interval": None, "pairs": 8},
}  # fmt: skip


def test_the_page_shows_the_speeds_and_the_curve(tmp_path: Path) -> None:
    pairs = make_pairs(1.0, 0.98, *[1.3] * 9)
    speeds = {"speed_first": estimate(pairs[:2]), "with_counts": estimate(pairs[2:])}
    speeds |= {"head_alone": estimate(make_pairs(*[1.1] * 6))}
    clients = {"1": estimate(pairs[2:]), "8": estimate([])}
    seen = {
        "time_to_gain_s": find_gain(pairs),
        "explored_share": 0.004,
        "promoted": 2,
        "requests": 900,
        "failed": 0,
        "cut_by_kill": 3,
        "never_slower": {"agents": AGENTS},
    }
    report = {
        "target": "smollm2", "dtype": "bfloat16", "command": "python -m benchmarks.demo.up", "started": "redraft up M",
        "environment": environment(), "lossless": True, "kill_s": [200.0, 230.0], "duration_s": 1.0,
        "passed_gate": 3, "delays": make_delays(),
        "pairs": [{**vars(pair), "ratio": pair.ratio} for pair in pairs],
        "swaps": [{"s": 130.0, "version": "v000002", "outcome": "swapped"}],
        "learning": {
            "versions": [
                {"version": "v000001", "records": 0, "minutes": 0.0, "requests": 64, "tau": 1.01},
                {"version": "v000002", "records": 64, "minutes": 2.2, "requests": 64, "tau": 1.71},
            ],
            "tau_offline": 1.85, "gain_offline": [0.08, 0.21], "steps": 16, "minutes_to_adapt": 2.2,
        },
        "up": {**speeds, **seen, "speed_last_by_clients": clients, "restart_s": 30.0, "pace": "pace auto: 3 " "tokens"},
    }  # fmt: skip

    def read_page() -> str:
        def charts(report: Any) -> Any:
            return {"speed": draw(report), **draw_learning(report["learning"])}

        return write_page(tmp_path, report, up.TEMPLATE, charts).read_text()

    page = read_page()
    assert "From an empty folder to <em>1.30×</em>" in page
    assert "1.10×" in page
    assert "v000002" in page
    assert "kill -9" in page
    assert "faster from 120 s on" in summarise(report["up"])
    assert "1.07× (95% interval 0.98× to 1.20×)" in page
    assert "81%, 82%" in page
    assert "reaches <em>1.85</em>" in page
    assert "90% of that were served after 2.2 minutes" in page
    assert summarise(report["up"]).endswith(
        "agents beside plain vLLM: tokens/s 1.07x [0.98, 1.20], time to the first token 1.02x [0.99, "
        "1.05], 0 failed"
    )
    assert "no gain is shown" in summarise({**report["up"], "time_to_gain_s": None})
    assert summarise(report["up"]).startswith("2 versions were promoted\n")
    report["learning"] |= {"tau_offline": None, "minutes_to_adapt": None}
    report["up"]["promoted"] = 0
    assert summarise(report["up"]).startswith("No version was promoted yet\n")
    assert "<h1>No version was promoted: " in read_page()


@contextlib.asynccontextmanager
async def playing(
    output: Path, phases: Iterator[str]
) -> AsyncIterator[tuple[Play, list[dict[str, Any]]]]:
    """The demo beside a server that takes any pace, and a learner in these phases.

    With the bodies of all requests to the server.
    """
    seen: list[dict[str, Any]] = []

    async def complete(request: Request) -> Response:
        seen.append(await request.json())
        told = [event({"choices": [{"token_ids": [7]}]}) for _ in range(2)]
        return StreamingResponse(iter(told), media_type="text/event-stream")

    async def pace(request: Request) -> Response:
        seen.append(await request.json())
        return JSONResponse({})

    async def status(request: Request) -> Response:
        return JSONResponse({"draft_version": "v000001"})

    async def answer(request: dict[str, Any]) -> control.Standing:
        return control.Standing(
            phase=next(phases),
            candidate=None,
            current="v000001",
            is_asleep=False,
            steps_saved=0,
            failed_rounds={},
        )

    questions = [Prompt(token_ids=[number], domain="code") for number in range(60)]
    play = Play(Config(output=output), output, "float32", 0, questions)
    play.seen.ready_s = time.time()
    play.folder.mkdir(parents=True)
    write_token(play.folder / "token")
    settings = {"target": output, "registry": output, "spool": output, "folder": play.folder}
    lines = [f"{name} = {json.dumps(str(path))}" for name, path in settings.items()]
    (play.folder / "learner.toml").write_text("\n".join(lines))
    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/redraft/pace", pace, methods=["POST"]),
        Route("/redraft/status", status),
    ]
    async with served(Starlette(routes=routes)) as server, control.serve(play.folder, answer):
        play.url = f"http://127.0.0.1:{server.port}"
        play.traffic.urls = [play.url]
        yield play, seen


@in_event_loop
async def test_no_question_is_asked_twice(tmp_path: Path) -> None:
    """Counted answers would draft the answer to a repeated question whole."""
    async with playing(tmp_path, itertools.repeat("training")) as (play, seen):
        await play.measure(2)
        async with play.traffic.flowing():
            await until(lambda: len(play.traffic.answers) >= 10)
        await play.measure(1)
        numbers = [body["prompt"][0] for body in seen if "prompt" in body]
        assert len(numbers) >= 18
        assert len(set(numbers)) == len(numbers)
        for _ in play._waiting:
            pass
        with pytest.raises(ValueError, match="60"):
            await play.measure(1)


@in_event_loop
async def test_a_killed_demo_continues_with_its_pairs_and_asks_no_question_again(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path, itertools.repeat("training")) as (play, seen):
        await play.measure(1)
        async with play.traffic.flowing():
            await until(lambda: len(play.traffic.answers) >= 3)
        await play.measure(2, play.seen.alone)
        asked = {body["prompt"][0] for body in seen if "prompt" in body}
    again = Play(play.cfg, play.target, "float32", 0, play.questions)
    assert again.seen == play.seen
    assert [len(pairs) for pairs in (again.seen.pairs, again.seen.alone)] == [1, 1]
    assert len(again.seen.texts) >= 3
    assert all(len(prompt) == 1 and answer == [7, 7] for prompt, answer in again.seen.texts)
    left = [prompt.token_ids[0] for prompt in again._waiting]
    assert left
    assert not asked & set(left)


@in_event_loop
async def test_no_pace_is_set_during_a_rollout_and_traffic_flows_until_it_ends(
    tmp_path: Path,
) -> None:
    phases = iter(["canary", "canary", "rolling"])
    async with playing(tmp_path, itertools.chain(phases, itertools.repeat("idle"))) as (play, seen):
        await play.measure(1)
    first = next(place for place, body in enumerate(seen) if "pace" in body)
    assert first > 0
    assert next(phases, None) is None
    assert [body["pace"] for body in seen if "pace" in body] == ["0", "auto", "auto"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_one_command_serves_learns_and_continues_after_a_kill(
    tiny_target: Path, tmp_path: Path
) -> None:
    output = tmp_path / "demo"
    up.main(
        Config(
            target=tiny_target,
            output=output,
            pairs=6,
            workload_pairs=6,
            learn_s=120,
            checked_answers=20,
        )
    )
    report = json.loads((output / "report.json").read_text())
    assert report["lossless"]
    assert report["up"]["failed"] == 0
    assert report["up"]["requests"] > 300
    assert math.isfinite(report["up"]["with_counts"]["ratio"])
    assert math.isfinite(report["up"]["head_alone"]["ratio"])
    assert report["up"]["promoted"] >= 0
    assert report["up"]["explored_share"] <= 0.02
    versions = report["learning"]["versions"]
    assert len(versions) == report["up"]["promoted"] + 1
    assert (report["learning"]["tau_offline"] is not None) == (len(versions) > 1)
    beside = report["up"]["never_slower"]
    assert [*beside] == ["questions", "agents", "retrieval", "batch-8", "batch-16"]
    for found in beside.values():
        assert found["failed"] == 0
        assert found["tokens_s"]["pairs"] == found["first_token"]["pairs"] == 6
        assert found["tokens_s"]["interval"] is not None
        assert found["hit_rate"] is not None
    assert beside["agents"]["hit_rate"] > 0.5
    assert (output / "report.html").is_file()
