"""The baseline of a comparison.

A server of two speeds is found out, and two modes are never compared.
"""

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
import torch
from fake_completions import event, served
from safetensors.torch import save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from redraft.distill.run import proof
from redraft.engine.measure import (
    MOST_REPEATS,
    Measurement,
    Output,
    changed_speed,
    find_full_load,
    time_steps,
)
from redraft.engine.prompts import Prompt
from redraft.engine.server import Mode, VllmServer
from redraft.eval.serving import baseline, rounds
from redraft.eval.serving.baseline import (
    choose_mode,
    count_speeds,
    describe_baseline,
    measure_bandwidth,
    read_weight_bytes,
)
from redraft.eval.serving.rounds import PLAIN, Plan, plain_runs, run_rounds
from redraft.files.folder import WEIGHTS
from redraft.files.target_folder import TargetFolder

PROMPTS = [Prompt(token_ids=[1, 2])]


class Engine:
    """A stand-in that sends one token per step.

    `steps_s` are the pauses before the tokens of each answer.
    """

    def __init__(self, *steps_s: list[float]) -> None:
        self.steps_s, self.finished = list(steps_s), 0
        self.salts: dict[bool, list[str]] = {True: [], False: []}  # Of the warm-up, and of others.

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/metrics", self.metrics),
            ]
        )

    async def complete(self, request: Request) -> Response:
        question = await request.json()
        is_warm_up = question["max_tokens"] == 16
        self.salts[is_warm_up].append(question["cache_salt"])
        if is_warm_up:
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
        return PlainTextResponse(
            f"{name}_sum {float(self.finished)}\n{name}_count {float(self.finished)}\n"
        )


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


CHANGING = [0.01] * 20 + [0.03] * 20


def run_one(engine: Engine) -> Measurement:
    with running(engine) as url:
        plan = Plan(rounds=1, prompts={1: 1}, max_tokens=40)
        return run_rounds({PLAIN: make_server(url)}, PROMPTS, plan)[PLAIN, 1][0]


def test_a_round_in_which_a_server_changes_its_speed_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The head's server is at a third of its speed in the second half, once.
    halves = {PLAIN: [(0.01, 0.01)] * 2, "head": [(0.01, 0.03), (0.01, 0.012)]}
    measured: list[str] = []

    def take(server: VllmServer, *_: Any, **__: Any) -> Measurement:
        measured.append(server.url)
        return replace(make_run(0.01), half_step_s=halves[server.url].pop(0))

    monkeypatch.setattr(rounds, "measure", take)
    servers = {name: make_server(name) for name in halves}
    results = run_rounds(servers, PROMPTS, Plan(rounds=1, prompts={1: 1}, max_tokens=4))
    assert measured == [PLAIN, "head"] * 2, (
        "the whole load, on all servers: a ratio is within a round"
    )
    assert [runs[0].repeats for runs in results.values()] == [1, 1]
    assert not any(changed_speed(runs[0].half_step_s) for runs in results.values())


def test_no_measurement_reads_what_another_or_the_warm_up_has_left_in_a_prefix_cache() -> None:
    engine = Engine([0.0] * 4)
    with running(engine) as url:
        plan = Plan(rounds=2, prompts={1: 3}, max_tokens=4)
        some = [*PROMPTS, Prompt(token_ids=[1, 3]), *PROMPTS]
        run_rounds({PLAIN: make_server(url)}, some, plan)
    warm_ups, others = engine.salts[True], engine.salts[False]
    assert (len(warm_ups), len(others)) == (2, 6)
    for first, other, repeated in (others[:3], others[3:]):
        # Different prompts of a round share what their beginnings have in common. A repeated prompt
        # would read its whole prefill from the cache.
        assert first == other != repeated
    assert len({*warm_ups, *others}) == 6


def test_a_server_that_never_keeps_its_speed_is_reported_with_two() -> None:
    run = run_one(Engine(CHANGING))
    assert run.repeats == MOST_REPEATS
    assert changed_speed(run.half_step_s)
    assert count_speeds([run]) >= 2


def test_a_prefill_is_no_change_of_speed() -> None:
    """A second request is read in chunks while the first decodes.

    It makes 10 steps 20 times as long.
    """
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


def test_a_speed_ends_with_the_first_slot_that_stays_empty() -> None:
    # Two slots: C follows A; B and D have 6 and 4 tokens; when B ends nobody follows, and D goes on
    # alone.
    a, b = [(0.0, 0), (1.0, 1), (2.0, 2)], [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 3)]
    c, d = [(2.1, 0), (2.5, 3)], [(2.6, 0), (3.0, 2), (4.0, 1), (5.0, 1)]
    assert find_full_load([a, b, c, d]) == (3.0, 3 + 6 + 3 + 2)
    assert find_full_load([b]) == (3.0, 6), "one request is the whole load"


def test_servers_of_different_modes_are_not_compared() -> None:
    servers = {PLAIN: make_server("http://a", "eager"), "head": make_server("http://b", "compiled")}
    with pytest.raises(ValueError, match=r"none.* eager.*head.* compiled"):
        run_rounds(servers, PROMPTS, Plan(rounds=1, prompts={1: 1}, max_tokens=4))


def make_run(step_s: float, repeats: int = 0, **changes: Any) -> Measurement:
    return Measurement(
        prompts=PROMPTS,
        outputs=[Output(token_ids=[7] * 50, counts=None)],
        full_s=50 * step_s,
        full_tokens=50,
        dtype="bfloat16",
        counts=None,
        step_s=step_s,
        half_step_s=(step_s, step_s),
        repeats=repeats,
        **changes,
    )


@pytest.mark.parametrize(
    ("steps_ms", "speeds"), [((12, 13, 14), 1), ((12, 17, 24), 1), ((12, 13, 40), 2), ((12,), 1)]
)
def test_speeds_a_factor_apart_are_counted(steps_ms: tuple[int, ...], speeds: int) -> None:
    assert count_speeds([make_run(step_ms / 1000) for step_ms in steps_ms]) == speeds


SERVED = (
    "(EngineCore pid=1) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='m', speculative_config=None, dtype=torch.{dtype}, max_seq_len=623, load_format=auto, "
    "tensor_parallel_size={tensor}, "
    "pipeline_parallel_size={pipeline}, data_parallel_size={data}, decode_context_parallel_size=1, "
    "quantization={quantization}, quantization_config=None, enforce_eager=False, "
    "kv_cache_dtype=auto\n"
)
"""vLLM's line about its engine."""


def make_target(folder: Path, **config: Any) -> Path:
    """1,000 weights stored in bfloat16, beside an embedding of 500."""
    folder.mkdir(exist_ok=True)
    names = {
        "model.layers.0.mlp.weight": (30, 20),
        "lm_head.weight": (20, 20),
        "model.embed_tokens.weight": (25, 20),
    }
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in names.items()},
        folder / WEIGHTS,
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_experts": None, **config})
    )
    return folder


def write_log(folder: Path, **changes: Any) -> Path:
    served = {
        "dtype": "bfloat16",
        "tensor": 1,
        "pipeline": 1,
        "data": 1,
        "quantization": None,
        **changes,
    }
    (folder / "log").write_text(
        "OpenMP thread binding info: \n\tlocal_rank=0, core ids=[0, 1]\n"
        f"{SERVED.format(**{**served, 'dtype': 'float16', 'tensor': 4})}"
        "OpenMP thread binding info: \n\tlocal_rank=0, core ids=[0]\n"
        f"\tlocal_rank=1, core ids=[4, 5]\n\treserved_cpus=[1]\n{SERVED.format(**served)}"
        "(APIServer pid=9) INFO [utils.py:1] non-default args: {'port': 1, 'max_model_len': -1}\n"
    )
    return folder / "log"


def test_the_baseline_is_its_share_of_the_time_to_read_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [
        {(PLAIN, 1): [make_run(0.020), make_run(0.020, 2)], ("head", 1): [make_run(0.001)]},
        {(PLAIN, 1): [make_run(0.020)], (PLAIN, 8): [make_run(0.05)]},
    ]
    monkeypatch.setattr(baseline, "measure_bandwidth", lambda: 200e3)
    modes: dict[Mode, float] = {"compiled": 50.0, "eager": 40.0}
    target, log = make_target(tmp_path), write_log(tmp_path, dtype="float32")
    found = describe_baseline(plain_runs(groups), "compiled", modes, log=log, target=target)
    # 1,000 weights of 4 bytes at 200 kB/s: a step of 20 ms could not be faster
    assert found.limit_share == pytest.approx(1.0)
    assert (found.step_ms, found.tokens_s) == pytest.approx((20.0, 50.0))
    assert (found.speeds, found.repeated, found.mode) == (1, 2, "compiled")
    assert found.threads == 3, "of the last start, over all ranks"
    assert found.not_default == "'port': 1, 'max_model_len': -1"
    log.unlink()
    unknown = describe_baseline(plain_runs(groups), "compiled", modes, log=log, target=target)
    assert (unknown.limit_share, unknown.not_default) == (None, None)
    assert unknown.step_ms == pytest.approx(20.0)
    # Answers too short to time their steps: eight requests at 400 tokens/s in all.
    short = [replace(make_run(0.020), step_s=None, full_tokens=400, full_s=1.0)]
    eight = describe_baseline({8: short}, "compiled", modes, log=log, target=target)
    assert (eight.step_ms, eight.tokens_s) == pytest.approx((20.0, 400.0))
    json.dumps([vars(found), vars(unknown)])


@pytest.mark.parametrize(
    ("served", "on_cpu", "num_bytes"),
    [
        ({}, True, 2000),
        ({"dtype": "float32"}, True, 4000),
        # Each GPU reads its half; the ranks of a CPU share its memory.
        ({"tensor": 2}, False, 1000),
        ({"tensor": 2}, True, 2000),
        ({"pipeline": 2}, False, None),
        ({"data": 2}, False, None),
        ({"quantization": "fp8"}, False, None),
    ],
)
def test_the_bytes_of_a_step_are_those_of_the_served_type_on_one_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: dict[str, Any],
    on_cpu: bool,
    num_bytes: int | None,
) -> None:
    monkeypatch.setattr(baseline, "ENGINE_IS_CPU", on_cpu)
    assert read_weight_bytes(make_target(tmp_path), write_log(tmp_path, **served)) == num_bytes


@pytest.mark.parametrize(
    "config", [{"num_experts": 128}, {"n_routed_experts": 8}, {"text_config": {"model_type": "x"}}]
)
def test_the_weights_that_a_step_of_experts_reads_are_not_known(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    assert read_weight_bytes(make_target(tmp_path, **config), write_log(tmp_path)) is None


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_faster_mode_is_chosen_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
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
    assert choose() == ("eager", {"compiled": 25.0, "eager": 30.0}), (
        "as kept: nothing is left to measure"
    )
    assert most_at_once == (2 if on_cpu else 1), "a GPU has the memory of one server"
    assert choose("--enforce-eager") == ("eager", {}), "the user's choice"


def test_a_proof_asks_each_server_once_and_the_plain_one_for_all_runs_of_a_reference(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, started = Engine([0.0] * 4), list[str]()

    @contextlib.contextmanager
    def start(target: str, *, log: Path, **options: Any) -> Iterator[VllmServer]:
        started.append(log.stem)
        log.parent.mkdir(exist_ok=True)
        log.touch()
        yield make_server(url)

    monkeypatch.setattr(rounds, "vllm_server", start)
    prompts = [Prompt(token_ids=[number]) for number in range(6)]
    with running(engine) as url:
        for run in ("one", "two"):
            found = proof.prove_in_engine(
                proof.Prove(max_tokens=4, reference=tmp_path / "reference"),
                TargetFolder.open(tiny_target),
                {"method": "eagle3"},
                prompts,
                tmp_path / run,
            )
            assert found.lossless.num_prompts == 6
            assert found.lossless.lossless
    assert started == ["vllm-with-draft", "vllm-without-draft", "vllm-with-draft"]
    assert len(engine.salts[False]) == 3 * 6, "no load is repeated"


def test_the_bandwidth_of_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "BANDWIDTH_BYTES", 1 << 27)
    assert 1e9 < measure_bandwidth() < 1e13


def test_weights_outside_safetensors_are_not_counted(tmp_path: Path) -> None:
    target, log = make_target(tmp_path), write_log(tmp_path)
    (target / WEIGHTS).rename(target / "consolidated.safetensors")
    assert read_weight_bytes(target, log) is None
