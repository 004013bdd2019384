"""The baseline of a comparison: a server of two speeds is found out, and two modes are never compared."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_completions import event, served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from redraft.distill.run import proof
from redraft.eval.engine.measure import MOST_REPEATS, Measurement, Output, changed_speed, time_steps
from redraft.eval.engine.server import Mode, VllmServer
from redraft.eval.prompts import Prompt
from redraft.eval.serving import baseline, rounds
from redraft.eval.serving.baseline import (
    choose_mode,
    count_speeds,
    describe_baseline,
    measure_bandwidth,
    weight_bytes,
)
from redraft.eval.serving.rounds import PLAIN, Plan, plain_runs, run_rounds
from redraft.heads.files.target_folder import TargetFolder

PROMPTS = [Prompt(token_ids=[1, 2])]


class Engine:
    """A stand-in that sends one token per step; `steps_s` are the pauses before the tokens of each answer."""

    def __init__(self, *steps_s: list[float]) -> None:
        self.steps_s, self.finished = list(steps_s), 0

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/metrics", self.metrics),
            ]
        )

    async def complete(self, request: Request) -> Response:
        question = await request.json()
        if question["max_tokens"] == 16:  # the warm-up
            return StreamingResponse(self.answer([0.0] * 2), media_type="text/event-stream")
        steps_s = self.steps_s.pop(0) if len(self.steps_s) > 1 else self.steps_s[0]
        return StreamingResponse(self.answer(steps_s), media_type="text/event-stream")

    async def answer(self, steps_s: list[float]) -> AsyncIterator[bytes]:
        for pause_s in steps_s:
            await asyncio.sleep(pause_s)
            yield event({"choices": [{"token_ids": [7]}]})
        self.finished += 1
        yield event({"choices": [], "usage": {}})
        yield b"data: [DONE]\n\n"

    async def metrics(self, request: Request) -> Response:
        name = "vllm:request_decode_time_seconds"
        return PlainTextResponse(f"{name}_sum {float(self.finished)}\n{name}_count {float(self.finished)}\n")


@contextlib.contextmanager
def running(engine: Engine) -> Iterator[str]:
    """The address of the stand-in, served by another thread."""
    ready, end, address = threading.Event(), threading.Event(), []

    async def run() -> None:
        async with served(engine.application()) as server:
            address.append(f"http://127.0.0.1:{server.port}")
            ready.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(30)
        yield address[0]
    finally:
        end.set()
        thread.join(30)


def make_server(url: str, mode: Mode = "compiled") -> VllmServer:
    return VllmServer(url=url, model="m", dtype="float32", num_speculative_tokens=0, mode=mode)


@pytest.fixture(autouse=True)
def no_spinning_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "IDLE_S", 0.0)


CHANGING = [0.02] * 20 + [0.06] * 20


def run_one(engine: Engine) -> Measurement:
    with running(engine) as url:
        plan = Plan(rounds=1, prompts={1: 1}, max_tokens=40)
        return run_rounds({PLAIN: make_server(url)}, PROMPTS, plan)[PLAIN, 1][0]


def test_a_round_in_which_a_server_changes_its_speed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # The head's server is at a third of its speed in the second half, once.
    halves = {PLAIN: [(0.01, 0.01)] * 2, "head": [(0.01, 0.03), (0.01, 0.012)]}
    measured: list[str] = []

    def take(server: VllmServer, *_: Any, **__: Any) -> Measurement:
        measured.append(server.url)
        return replace(make_run(0.01), half_step_s=halves[server.url].pop(0))

    monkeypatch.setattr(rounds, "measure", take)
    servers = {name: make_server(name) for name in halves}
    results = run_rounds(servers, PROMPTS, Plan(rounds=1, prompts={1: 1}, max_tokens=4))
    assert measured == [PLAIN, "head"] * 2, "the whole load, on all servers: a ratio is within a round"
    assert [runs[0].repeats for runs in results.values()] == [1, 1]
    assert not any(changed_speed(runs[0].half_step_s) for runs in results.values())


def test_a_server_that_never_keeps_its_speed_is_reported_with_two() -> None:
    run = run_one(Engine(CHANGING))
    assert run.repeats == MOST_REPEATS
    assert changed_speed(run.half_step_s)
    assert count_speeds([run]) >= 2


def test_a_prefill_is_no_change_of_speed() -> None:
    """A second request is read in chunks while the first decodes, and makes 10 steps 20 times as long."""
    steady = [0.01] * 30
    first = list(itertools.accumulate([0.0, 0.1, *[0.2] * 10, *steady]))
    second = list(itertools.accumulate([0.05, 2.1, *steady]))
    step_s, half_step_s = time_steps([tuple(first), tuple(second)])
    assert step_s == pytest.approx(0.01)
    assert half_step_s == pytest.approx((0.01, 0.01))
    assert time_steps([tuple(first[:12])]) == (None, None)


def test_longer_drafts_are_no_change_of_speed() -> None:
    drafting = [0.03, 0.03, 0.03, 0.01] * 10
    times_s = tuple(itertools.accumulate([0.0, 0.1, *drafting, *[0.01] * 40]))
    assert time_steps([times_s])[1] == pytest.approx((0.01, 0.01))


def test_servers_of_different_modes_are_not_compared() -> None:
    servers = {PLAIN: make_server("http://a", "eager"), "head": make_server("http://b", "compiled")}
    with pytest.raises(ValueError, match=r"none.* eager.*head.* compiled"):
        run_rounds(servers, PROMPTS, Plan(rounds=1, prompts={1: 1}, max_tokens=4))


def make_run(step_s: float, repeats: int = 0, **changes: Any) -> Measurement:
    return Measurement(
        prompts=PROMPTS,
        outputs=[Output(token_ids=[7] * 50, counts=None)],
        duration_s=50 * step_s,
        dtype="bfloat16",
        counts=None,
        step_s=step_s,
        half_step_s=(step_s, step_s),
        repeats=repeats,
        **changes,
    )


@pytest.mark.parametrize(("steps_ms", "speeds"), [((12, 13, 14), 1), ((12, 17, 24), 1), ((12, 13, 40), 2), ((12,), 1)])
def test_speeds_a_factor_apart_are_counted(steps_ms: tuple[int, ...], speeds: int) -> None:
    assert count_speeds([make_run(step_ms / 1000) for step_ms in steps_ms]) == speeds


def test_the_baseline_is_its_share_of_the_time_to_read_the_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(150_000))
    (tmp_path / "log").write_text(
        "OpenMP thread binding info: \n\tlocal_rank=0, core ids=[0, 1]\n"
        "OpenMP thread binding info: \n\tlocal_rank=0, core ids=[0]\n"
        "\tlocal_rank=1, core ids=[4, 5]\n\treserved_cpus=[1]\n"
    )
    groups = [
        {(PLAIN, 1): [make_run(0.020), make_run(0.020, 2)], ("head", 1): [make_run(0.001)]},
        {(PLAIN, 1): [make_run(0.020)], (PLAIN, 8): [make_run(0.05)]},
    ]
    found = describe_baseline(
        plain_runs(groups), "compiled", {"compiled": 50.0, "eager": 40.0},
        log=tmp_path / "log", target=tmp_path, bandwidth=10e6,
    )  # fmt: skip
    # 150 kB at 10 MB/s are 15 ms of a step of 20
    assert found.limit_share == pytest.approx(0.75)
    assert (found.step_ms, found.tokens_s) == pytest.approx((20.0, 50.0))
    assert (found.speeds, found.repeated, found.mode) == (1, 2, "compiled")
    assert found.threads == 3, "of the last start, over all ranks"
    json.dumps(vars(found))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_faster_mode_is_chosen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    running: list[Mode] = []
    most_at_once = 0

    @contextlib.contextmanager
    def start(target: str, *, log: Path, mode: Mode, **options: Any) -> Iterator[VllmServer]:
        nonlocal most_at_once
        running.append(mode)
        most_at_once = max(most_at_once, len(running))
        yield make_server("http://a", mode)
        running.remove(mode)

    speeds = {"compiled": [20.0, 60.0, 25.0], "eager": [30.0, 1.0, 40.0]}
    monkeypatch.setattr(baseline, "vllm_server", start)

    def choose(*arguments: str) -> tuple[Mode, dict[Mode, float]]:
        return choose_mode(
            "t",
            lambda server: speeds[server.mode].pop(),
            3,
            tmp_path,
            tmp_path,
            "key",
            on_cpu=on_cpu,
            extra_args=arguments,
        )

    assert choose() == ("eager", {"compiled": 25.0, "eager": 30.0}), "by medians"
    assert choose() == ("eager", {"compiled": 25.0, "eager": 30.0}), "as kept: nothing is left to measure"
    assert most_at_once == (2 if on_cpu else 1), "a GPU has the memory of one server"
    assert choose("--enforce-eager") == ("eager", {}), "the user's choice"


def test_the_proof_of_a_training_serves_in_the_faster_mode(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, Mode]] = []

    @contextlib.contextmanager
    def start(target: str, *, log: Path, mode: Mode, **options: Any) -> Iterator[VllmServer]:
        started.append((log.stem, mode))
        if options.get("speculative_config"):
            raise ChildProcessError("as far as the test goes")
        yield make_server("http://a", mode)

    for module in (baseline, proof):
        monkeypatch.setattr(module, "vllm_server", start)
    rates = {"compiled": 0.02, "eager": 0.01}
    monkeypatch.setattr(proof, "measure", lambda server, *_, **__: make_run(rates[server.mode]))
    with pytest.raises(ChildProcessError):
        proof.prove_in_engine(
            proof.Prove(speed_rounds=6), TargetFolder.open(tiny_target), {"method": "eagle3"}, PROMPTS, tmp_path
        )
    assert sorted(started[:2]) == [("vllm-compiled", "compiled"), ("vllm-eager", "eager")]
    assert started[2:] == [("vllm-with-draft", "eager")]


def test_the_bandwidth_of_this_machine_is_measured() -> None:
    assert 1e9 < measure_bandwidth() < 1e13


def test_the_weights_of_a_target_are_counted_once_in_every_layout(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"12345")
    assert weight_bytes(tmp_path) == 5
    (tmp_path / "model.safetensors").write_bytes(b"123")
    (tmp_path / "consolidated.safetensors").write_bytes(b"1234")
    assert weight_bytes(tmp_path) == 3
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).unlink()
    assert weight_bytes(tmp_path) == 4
