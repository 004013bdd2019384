"""The hooks of `--pace` on objects with the attributes of vLLM's.

Test_runners.py has the engine.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from real_server import running_server
from waiting import wait_until

from redraft.engine import hooks
from redraft.engine.hooks import RunnerState, SchedulerState
from redraft.engine.settings import VARIABLE
from redraft.online.engine import pace as pace_hooks
from redraft.online.engine.class_hooks import note_swaps, take_drafts
from redraft.online.engine.config import TABLE, list_arms, make_table
from redraft.online.engine.domains import is_counted
from redraft.online.engine.engine_calls import EngineCalls
from redraft.online.engine.pace import (
    Pacer,
    answer_pace,
    find_decider,
    install,
    install_pacer,
)
from redraft.online.engine.pace_memory import PaceMemory
from redraft.online.engine.pace_status import PaceMetrics, describe_pace, read_gauges
from redraft.online.engine.routes import BeforeMetrics
from redraft.online.engine.runner_v2 import complete_graphs, explain_adaptive, without_table


def make_config(method: str = "eagle3", **changes: Any) -> SimpleNamespace:
    """A server's configuration; `changes` are of the speculative part, or of the whole."""
    speculative: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": False,
        "draft_sample_method": "greedy",
        "parallel_drafting": False,
        TABLE: [(1, 1, 3), (2, 2, 0), (3, 3, 1), (4, 4, 2), (5, 5, 3)],
    }
    whole = {
        "use_v2_model_runner": False,
        "parallel_config": SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        "model_config": SimpleNamespace(enable_sleep_mode=False, max_model_len=4096),
    }
    speculative |= {name: value for name, value in changes.items() if name in speculative}
    whole |= {name: value for name, value in changes.items() if name in whole}
    part = SimpleNamespace(
        **speculative,
        use_gemma4_mtp=lambda: method == "gemma4",
        use_eagle=lambda: method in ("eagle3", "gemma4"),
        uses_draft_model=lambda: method == "draft_model",
        use_ngram_gpu=lambda: method == "ngram_gpu",
    )
    return SimpleNamespace(speculative_config=part, **whole)


SLEEPS = SimpleNamespace(enable_sleep_mode=True, max_model_len=4096)
STAGES = SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (make_config(), ""),
        (make_config("ngram"), ""),
        (make_config(**{TABLE: [[1, 16, 3], [17, 64, 1]]}), f"{TABLE} decides"),
        (
            make_config(**{TABLE: None}),
            f'give "{TABLE}": [[1, 1, 3], [2, 2, 0], [3, 3, 1], [4, 4, 2], [5, 5, 3]]',
        ),
        # vLLM drops the table then
        (
            make_config(parallel_config=SimpleNamespace(data_parallel_size=2), **{TABLE: None}),
            "data-parallel",
        ),
        (make_config(parallel_config=STAGES), "pipeline stages"),
        (
            make_config(
                enable_adaptive_verification=True, **{TABLE: make_table(3, is_adaptive=True)}
            ),
            "",
        ),
        (make_config(enable_adaptive_verification=True), f"{TABLE} decides"),
        (make_config(use_v2_model_runner=True), ""),
        (make_config("ngram_gpu"), "ngram_gpu must process every step"),
        (make_config("ngram_gpu", use_v2_model_runner=True), ""),
        (make_config(model_config=SLEEPS), ""),
        (make_config("ngram", draft_sample_method="probabilistic", model_config=SLEEPS), ""),
        (
            make_config(draft_sample_method="probabilistic", model_config=SLEEPS),
            "--enable-sleep-mode",
        ),
        (SimpleNamespace(speculative_config=None), "nothing is drafted"),
    ],
)
def test_one_decides_and_says_so(config, told, caplog):
    found = find_decider(config)
    assert found.startswith(told) or told in found
    assert bool(found) is bool(told)
    scheduler = SimpleNamespace(
        vllm_config=config,
        num_spec_tokens=3,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        dynamic_sd_lookup=[0, 3],
    )
    with caplog.at_level(logging.INFO, pace_hooks.logger.name):
        install_pacer(scheduler, "auto")
    if told:
        assert caplog.messages[-1] == f"redraft: --pace auto is off: {found}"
        # A table of all numbers decides on nothing; a person's does.
        assert scheduler.dynamic_sd_lookup == ([0, 3] if TABLE in found else [3, 3])
    else:
        *verifies, decides, off = caplog.messages
        assert bool(verifies) is config.speculative_config.enable_adaptive_verification
        assert (
            decides == "redraft: --pace auto chooses the number of draft tokens per step, at most 3"
        )
        assert ("only reads prompts" in off) == (config.speculative_config.method == "eagle3")
    assert isinstance(scheduler.dynamic_sd_lookup, Pacer) is not told
    engine = SimpleNamespace(scheduler=scheduler)
    assert (answer_pace(engine) is None) is bool(told)


def test_forced_adaptive_verification_needs_no_pacer_and_gives_no_warning(caplog):
    config = make_config(
        enable_adaptive_verification=True,
        parallel_config=SimpleNamespace(data_parallel_size=2),
        **{TABLE: None},
    )
    scheduler = SimpleNamespace(vllm_config=config, dynamic_sd_lookup=None)
    for pace, warns in (("adaptive", False), ("auto", True)):
        caplog.clear()
        with caplog.at_level(logging.INFO, pace_hooks.logger.name):
            install_pacer(scheduler, pace)
        assert (
            f"--pace {pace}: vLLM decides how many draft tokens each step verifies"
            in caplog.messages[0]
        )
        assert any(record.levelname == "WARNING" for record in caplog.records) is warns
        assert scheduler.redraft.pacer is None


def test_an_adaptive_pacer_chooses_between_no_draft_and_all_tokens():
    pacer = Pacer(7, 64, 4096, "auto", has_keys=False, is_adaptive=True)
    assert pacer.policy.arms == [0, 7]
    assert Pacer(7, 64, 4096, "auto", has_keys=False).policy.arms == [0, 1, 2, 3, 5, 7]
    pacer.set("adaptive")
    assert (pacer[40], describe_pace(pacer.status())) == (7, "pace 7, adaptive")


def test_a_refusal_of_adaptive_verification_while_vllm_loads_names_a_way_out():
    def refuse(**options):
        raise ValueError(
            "Adaptive verification trims verification requests on device, which the X attention "
            "backend does not support."
        )

    with pytest.raises(ValueError, match="--attention-backend TRITON_ATTN"):
        explain_adaptive(refuse)(vllm_config=None)
    assert explain_adaptive(lambda **options: options)(a=1) == {"a": 1}


# --- the scheduler


class Spy:
    """In place of the policy: answers with `arm`, and keeps what it is told."""

    def __init__(self, arm: int) -> None:
        self.arm, self.is_read, self.observed = arm, True, []

    def choose(self, requests: int, context: float, *, is_read: bool) -> int:
        self.is_read = is_read
        return self.arm

    def observe(self, *args: Any, tokens: int, num_reading: int) -> None:
        self.observed.append((*args, tokens, num_reading))


class Server:
    """A scheduler's account of requests: name, prompt, and tokens answered so far."""

    def __init__(self, pacer: Pacer, **prompts: int) -> None:
        self.pacer, self.now_s = pacer, 0.0
        self.requests = {
            name: SimpleNamespace(
                num_tokens=size, num_output_tokens=0, max_tokens=100, is_finished=lambda: False
            )
            for name, size in prompts.items()
        }

    def step(self, seconds: float = 1.0, finished: tuple[str, ...] = (), **new: int) -> None:
        """A step that answers so many tokens of each request.

        The first reads the prompt, the others the draft.
        """
        verified = self.pacer._drafted
        self.pacer[len(new)]
        drafts = {
            name: [-1] * verified
            for name in new
            if self.requests[name].num_output_tokens and verified
        }
        read = {
            name: 1 + len(drafts.get(name, ())) if request.num_output_tokens else request.num_tokens
            for name, request in self.requests.items()
            if name in new
        }
        output = SimpleNamespace(
            finished_req_ids=set(finished),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name)
                for name in new
                if not self.requests[name].num_output_tokens
            ],
            num_scheduled_tokens=read,
            scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=sum(read.values()),
        )
        self.pacer.begin(output, self.now_s)
        self.now_s += seconds
        result = SimpleNamespace(
            sampled_token_ids=[[7] * count for count in new.values()],
            req_id_to_index={name: place for place, name in enumerate(new)},
        )
        self.pacer.end(output, result, self.requests)
        self.pacer.finish(self.now_s)
        for name, count in new.items():
            self.requests[name].num_tokens += count
            self.requests[name].num_output_tokens += count


def make_pacer(arm: int, *, has_keys: bool = True) -> tuple[Pacer, Spy]:
    pacer, spy = Pacer(3, 8, 4096, "auto", has_keys=has_keys), Spy(arm)
    pacer.policy = spy  # type: ignore[assignment]
    return pacer, spy


def test_the_policy_is_told_the_time_and_the_accepted_tokens_of_a_step():
    pacer, spy = make_pacer(2)
    server = Server(pacer, a=20, b=30)
    server.step(0.5, a=1, b=1)  # the prompts
    server.step(0.25, a=3, b=2)
    spy.arm = 0
    server.step(0.25, a=1, b=1)
    server.step(0.125, a=1, b=1)
    assert spy.observed == [
        # requests, context, drafted, verified, seconds, accepted, tokens, num_reading
        (0, 0, 2, 0, 0.5, [], 0, 2),
        (2, 26, 2, 2, 0.25, [2, 1], 5, 0),
        (2, 28.5, 0, 2, 0.25, [0, 0], 2, 0),
        (2, 29.5, 0, 0, 0.125, [], 2, 0),
    ]


def test_steps_scheduled_ahead_take_the_time_since_the_one_before():
    pacer, spy = make_pacer(0)
    outputs = []
    for begin_s in (0.0, 0.1):
        pacer[1]
        outputs.append(
            SimpleNamespace(
                finished_req_ids=(),
                scheduled_new_reqs=(),
                num_scheduled_tokens={"a": 1},
                scheduled_spec_decode_tokens={},
                total_num_scheduled_tokens=1,
            )
        )
        pacer.begin(outputs[-1], begin_s)
    for output, end_s in zip(outputs, (1.0, 1.5), strict=True):
        pacer.end(output, SimpleNamespace(sampled_token_ids=[]), {})
        pacer.finish(end_s)
    assert [seconds for _, _, _, _, seconds, *_ in spy.observed] == [1.0, 0.5]


def test_a_request_whose_text_the_draft_has_not_read_counts_in_no_probe():
    pacer, spy = make_pacer(0)
    server = Server(pacer, a=90, b=9)
    server.step(a=1, b=1)
    for _ in range(5):
        server.step(a=1, b=1)
    assert pacer.unread == {"a": 5, "b": 5}
    assert spy.is_read, "of one of two the draft has read nearly all"
    spy.arm = 3
    server.step(a=1, b=1)
    server.step(a=4, b=1)
    assert spy.observed[-1][5] == [3], "a's alone"
    server.step(b=1)
    server.step(b=1)
    assert not spy.is_read
    scheduler = SimpleNamespace(requests=server.requests, redraft=SchedulerState(pacer=pacer))
    assert (is_counted(scheduler, "a"), is_counted(scheduler, "b")) == (True, False), (
        "nor by domain"
    )
    scheduler.redraft.pacer = None
    assert is_counted(scheduler, "b"), "without a pace all is read"
    scheduler.redraft.foreign = frozenset("b")
    assert not is_counted(scheduler, "b")
    server.step(a=1, finished=("b",))
    assert pacer.unread == {"a": 5}


def test_nothing_is_kept_of_a_request_that_waits_only_for_a_connector():
    pacer, spy = make_pacer(0)
    server = Server(pacer, a=9, b=9)
    server.step(a=1, b=1)
    server.step(a=1, b=1)
    server.requests["a"].is_finished = lambda: True
    server.step(b=1, finished=("a",))
    assert pacer.unread == {"b": 2}
    server.step(a=4, b=1)  # scheduled ahead, before the end of a was known
    assert pacer.unread == {"b": 3}
    assert spy.observed[-1] == (2, 6, 0, 0, 1.0, [], 2, 0), "as with a request that is gone"


def test_a_preempted_request_is_read_again():
    pacer, _ = make_pacer(0)
    server = Server(pacer, a=9)
    server.step(a=1)
    server.step(a=1)
    assert pacer.unread == {"a": 1}
    server.requests["a"].num_output_tokens = 0  # V2 restarts it, with its answer in the prompt
    server.step(a=1)
    assert pacer.unread == {}


def test_a_draft_without_keys_has_read_everything():
    pacer, spy = make_pacer(0, has_keys=False)
    server = Server(pacer, a=9)
    for _ in range(8):
        server.step(a=1)
    assert (pacer.unread, spy.is_read) == ({}, True)


NO_GAIN = {"low": 1.0, "speed": 1.0, "high": 1.0}


def test_a_fixed_number_asks_no_policy_and_a_new_pace_holds_from_the_next_step():
    pacer = Pacer(3, 8, 4096, "2", has_keys=True)
    assert pacer[1] == 2
    assert pacer.status() == {"pace": "2", "cells": []}
    engine = SimpleNamespace(scheduler=SimpleNamespace(redraft=SchedulerState(pacer=pacer)))
    assert answer_pace(engine, "5")["pace"] == "3", "the most"
    assert answer_pace(engine, "0")["pace"] == "0"
    assert pacer[1] == 0
    assert answer_pace(engine, "off")["pace"] == "3", "as without a pacer"
    assert pacer[1] == 3
    nothing = {"pace": "auto", "cells": [], "gain": NO_GAIN, "explored": 0.0}
    assert answer_pace(engine, "auto") == nothing
    with pytest.raises(ValueError, match="fast"):
        answer_pace(engine, "fast")


def test_a_swap_reaches_the_policy_by_a_call_of_the_same_signature():
    def collective_rpc(engine, method, timeout=None, args=(), kwargs=None):
        return [method, args]

    pacer, swaps = make_pacer(0)[0], []
    pacer.policy.swapped = lambda: swaps.append(1)  # type: ignore[method-assign]
    engine, call = (
        SimpleNamespace(scheduler=SimpleNamespace(redraft=SchedulerState(pacer=pacer))),
        note_swaps(collective_rpc),
    )
    assert call(engine, "redraft_load", None, (1,), None) == ["redraft_load", (1,)]
    assert not swaps
    pacer.memory = PaceMemory(Path("registry"), "key", "v000001")
    for again in ({"args": ("v000002",)}, {}):
        call(engine, "redraft_commit", None, *([] if again else [("v000003",)]), **again)
        assert pacer.memory.version == ("v000002" if again else "v000003")
    swaps.clear()
    assert call(engine, "redraft_commit", None, (), None) == ["redraft_commit", ()]
    for change in ("redraft_move", "redraft_load_target", "finish_weight_update", "reload_weights"):
        call(engine, change, None, (), None)
    assert len(swaps) == 5
    assert not pacer.memory.version, "the target's weights are others now"
    assert call(
        SimpleNamespace(scheduler=SimpleNamespace(redraft=SchedulerState())), "redraft_commit"
    )
    assert len(inspect.signature(call).parameters) == 5, (
        "vLLM counts them before it converts arguments"
    )


def test_the_status_has_the_cells_that_were_seen():
    pacer = Pacer(3, 8, 4096, "auto", has_keys=True)
    server = Server(pacer, a=20, b=2500)
    server.step(a=1, b=1)
    server.step(a=1)
    server.step(a=1, b=1)
    assert pacer.status() == {
        "pace": "auto",
        "cells": [
            {"requests": requests, "context": context, "tokens": 0, "steps": 1} | NO_GAIN
            for requests, context in ((1, 1024), (2, 2048))
        ],
        "gain": NO_GAIN,
        "explored": 0.0,
    }


@dataclass
class Asked:
    """A request of the simulated engine, with the attributes of vLLM's."""

    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    drafts: int = 0
    """Draft tokens to verify in the next step."""

    def is_finished(self) -> bool:
        return False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


RATES = (0.8, 0.7, 0.6)  # Of a draft token, if those before it are accepted.
CHUNK = 128  # Most tokens that a step reads of a prompt.
FINDS = 0.7  # Share of the steps in which a lookup proposes anything.


class Simulated:
    """An engine of two clients, each of which asks another question once one is answered.

    Prompts are read in chunks beside the other client's answer, a lookup proposes nothing now and
    then, and answers are short.
    """

    def __init__(self, pace: str, seed: int = 0) -> None:
        self.rng, self.now_s, self.tokens = random.Random(seed), 0.0, 0
        self.running: dict[str, Asked] = {}
        scheduler = SimpleNamespace(
            max_num_scheduled_tokens=512,
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=CHUNK),
        )

        def survey() -> tuple[int, float]:
            scheduler.running = list(self.running.values())
            return pace_hooks.survey(scheduler)

        self.pacer = Pacer(3, 8, 4096, pace, has_keys=False, survey=survey)
        self.sizes: list[tuple[int, float]] = []
        choose = self.pacer.policy.choose

        def note(requests: int, context: float, *, is_read: bool) -> int:
            self.sizes.append((requests, context))
            return choose(requests, context, is_read=is_read)

        self.pacer.policy.choose = note  # type: ignore[method-assign]

    def run(self, steps: int) -> Simulated:
        for step in range(steps):
            while len(self.running) < 2:
                prompt, answer = self.rng.randrange(50, 300), self.rng.randrange(8, 48)
                self.running[f"{step}-{len(self.running)}"] = Asked(prompt, answer)
            self._step()
        return self

    def _step(self) -> None:
        drafts, scheduled = {}, {}
        for name, request in self.running.items():
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left <= 0 and request.drafts:
                drafts[name] = [7] * request.drafts
            scheduled[name] = min(left, CHUNK) if left > 0 else 1 + request.drafts
        number = self.pacer[len(scheduled)]
        output = SimpleNamespace(
            finished_req_ids=(),
            scheduled_new_reqs=(),
            num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=sum(scheduled.values()),
        )
        self.pacer.begin(output, self.now_s)
        time = 1 + 0.02 * sum(scheduled.values()) + 0.04 * number
        self.now_s += time * math.exp(self.rng.gauss(0, 0.05)) / 100
        sampled = []
        for name, request in self.running.items():
            request.num_computed_tokens += scheduled[name] if not request.num_output_tokens else 0
            if request.num_computed_tokens < request.num_prompt_tokens:
                sampled.append([])
                continue
            verified = len(drafts.get(name, ()))
            hits = (i for i in range(verified) if self.rng.random() >= RATES[i])
            sampled.append([7] * (1 + next(hits, verified)))
        result = SimpleNamespace(
            sampled_token_ids=sampled,
            req_id_to_index={name: place for place, name in enumerate(self.running)},
        )
        self.pacer.end(output, result, self.running)
        self.pacer.finish(self.now_s)
        new = 0
        for (name, request), ids in zip(list(self.running.items()), sampled, strict=True):
            number_new = min(len(ids), request.max_tokens - request.num_output_tokens)
            new += number_new
            request.num_output_tokens += number_new
            request.drafts = number if self.rng.random() < FINDS else 0
            if request.num_output_tokens >= request.max_tokens:
                del self.running[name]
        self.tokens += new


@pytest.mark.parametrize("seed", range(2))
def test_the_gain_shown_is_that_of_clients_who_wait_for_prompts_too(seed: int) -> None:
    """A pair of servers with the same clients: one chooses the number, one drafts nothing."""
    auto, off = Simulated("auto", seed).run(6000), Simulated("0", seed).run(6000)
    clients = (auto.tokens / auto.now_s) / (off.tokens / off.now_s)
    shown = auto.pacer.status()
    (cell,) = [cell for cell in shown["cells"] if cell["requests"] == 2]
    assert clients > 1.1
    assert cell["speed"] > clients + 0.1, "in steps without prompts"
    assert shown["gain"]["speed"] == pytest.approx(clients, rel=0.05)
    assert shown["gain"]["low"] < 1.02 * clients
    assert clients < 1.02 * shown["gain"]["high"]


def test_requests_that_read_their_prompt_do_not_count_as_decoding() -> None:
    """With chunks of 128 tokens `b` decodes from the fifth step on, and is drafted for before."""
    simulated = Simulated("auto")
    simulated.running = {"a": Asked(20, 40), "b": Asked(400, 40)}
    simulated.run(6)
    assert [requests for requests, _ in simulated.sizes] == [1, 1, 1, 2, 2, 2]
    assert [context for _, context in simulated.sizes][:4] == [20, 21, 22, pytest.approx(211.5)]
    steps = {cell.requests: count for cell, count in simulated.pacer.policy.steps.items()}
    assert steps == {1: 3, 2: 2}, "the first step reads prompts alone"


STATUS = {
    "pace": "auto",
    "cells": [
        {"requests": 1, "context": 1024, "tokens": 3, "steps": 900, "speed": 1.41, "low": 1.24, "high": 1.64},
        {"requests": 8, "context": 1024, "tokens": 0, "steps": 90, **NO_GAIN},
    ],
    "gain": {"low": 1.12, "speed": 1.21, "high": 1.3},
    "explored": 0.004,
}  # fmt: skip
LINE = (
    "pace auto: 3 tokens at 1, 0 at 8; 1.21x [1.12, 1.30] as fast as without drafts in this server, "
    "including prompts; 0.4% explored"
)


def test_metrics_and_a_line_show_the_number_chosen_its_speed_and_the_time_explored():
    registry = CollectorRegistry()
    metrics = PaceMetrics(registry)
    assert read_gauges(generate_latest(registry).decode()) is None
    metrics.show(STATUS)
    found = read_gauges(generate_latest(registry).decode())
    assert describe_pace(STATUS) == describe_pace(found) == LINE
    for pace, is_adaptive in (("2", False), ("0", False), ("3", True)):
        metrics.show({"pace": pace, "adaptive": is_adaptive, "cells": []})
        found = describe_pace(read_gauges(generate_latest(registry).decode()))
        assert found == f"pace {pace}" + ", adaptive" * is_adaptive
    many = [
        {"requests": size, "context": 1024, "tokens": 0, "steps": size} for size in range(1, 20)
    ]
    assert describe_pace({**STATUS, "cells": many}) == (
        "pace auto: 0 tokens at 14, 0 at 15, 0 at 16, 0 at 17, 0 at 18, 0 at 19; 0.4% explored"
    )
    long = {"requests": 1, "context": 8192, "tokens": 0, "steps": 50, **NO_GAIN}
    both = describe_pace({**STATUS, "cells": [STATUS["cells"][0], long]})
    assert both.startswith("pace auto: 3 tokens at 1 (1k), 0 at 1 (8k); 1.21x")


def test_the_status_of_a_server_has_the_pace(monkeypatch):
    async def ask_all(method, new=""):
        return [{"redraft_pace": STATUS}[method]]

    calls = EngineCalls(
        SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=ask_all), errored=False)
    )
    monkeypatch.setattr(hooks, "_installed", set())
    assert asyncio.run(calls.read_pace()) is None
    monkeypatch.setattr(hooks, "_installed", {"pace"})
    assert asyncio.run(calls.read_pace()) == {**STATUS, "line": LINE}


def test_metrics_ask_the_engine_when_they_are_read_and_answer_without_it():
    said = []

    async def fail():
        said.append("asked")
        raise ConnectionError

    async def app(scope, receive, send):
        said.append(scope["path"])

    for path in ("/metrics", "/metrics/", "/v1/completions"):
        asyncio.run(BeforeMetrics(app, fail)({"type": "http", "path": path}, None, None))
    assert said == ["asked", "/metrics", "asked", "/metrics/", "/v1/completions"]


# --- the worker


@dataclass
class Scheduled:
    num_spec_tokens_to_schedule: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=lambda: {"a": 1, "b": 1})
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


PROMPT = {"a": 9, "b": 1}


def make_runner(method: str, **changes: Any) -> SimpleNamespace:
    """A runner whose draft answers with as many tokens as it is asked for, and notes how many."""
    asked: list[int] = []

    def propose(scheduled: Scheduled, sampled: Any) -> Any:
        number = scheduled.num_spec_tokens_to_schedule
        asked.append(number)
        if isinstance(sampled, list):
            return [[5] * number for _ in sampled]
        return torch.full((len(sampled), number), 5)

    config = make_config(method, **changes)
    return SimpleNamespace(
        asked=asked,
        vllm_config=config,
        speculative_config=config.speculative_config,
        num_spec_tokens=3,
        propose_draft_token_ids=propose,
        valid_sampled_token_count_event=None,
    )


@pytest.mark.parametrize(
    ("method", "number", "read", "asked"),
    [
        ("eagle3", 0, {}, []),
        ("eagle3", 0, PROMPT, [0]),  # its keys
        ("eagle3", 2, {}, [2]),
        ("draft_model", 0, {}, []),
        ("draft_model", 0, PROMPT, [0]),
        ("ngram", 0, PROMPT, []),
        ("ngram", 2, {}, [2]),
        ("suffix", 0, {}, [3]),
        ("suffix", 2, {}, [3]),
        ("p-eagle", 2, {}, [3]),
        ("p-eagle", 0, {}, []),
    ],
)
def test_at_0_a_draft_is_called_only_for_keys_of_a_prompt(method, number, read, asked):
    runner = (
        make_runner("eagle3", parallel_drafting=True)
        if method == "p-eagle"
        else make_runner(method)
    )
    install(runner)
    install(runner)  # once is enough
    sampled = (
        torch.tensor([[7], [7]]) if method in ("eagle3", "draft_model", "p-eagle") else [[7], [7]]
    )
    found = runner.propose_draft_token_ids(
        Scheduled(number, **({"num_scheduled_tokens": read} if read else {})), sampled
    )
    assert runner.asked == asked
    if isinstance(found, list):
        assert found == [[5] * number] * 2
    else:
        assert found.tolist() == [[5] * number] * 2
        assert found.dtype == torch.int64


def test_the_schedulers_output_is_copied_only_for_another_number_of_tokens():
    runner = make_runner("eagle3")
    seen: list[Scheduled] = []
    propose = runner.propose_draft_token_ids
    runner.propose_draft_token_ids = lambda scheduled, sampled: (
        seen.append(scheduled) or propose(scheduled, sampled)
    )
    install(runner)
    scheduled = Scheduled(2)
    runner.propose_draft_token_ids(scheduled, torch.tensor([[7], [7]]))
    assert seen == [scheduled]
    assert seen[0] is scheduled


def test_workers_are_asked_for_drafts_only_after_a_step_in_which_the_draft_computes():
    asked: list[bool] = []
    post_step = take_drafts(lambda engine, model_executed: asked.append(model_executed))
    pacer = Pacer(3, 8, 4096, "2", has_keys=True)
    engine = SimpleNamespace(scheduler=SimpleNamespace(redraft=SchedulerState(pacer=pacer)))
    for pace, read, expected in (
        ("2", 1, [True]),
        ("0", 1, []),
        ("0", 30, [True]),  # the draft reads a prompt after its first token
        ("1", 1, [True]),
    ):
        pacer.set(pace)
        assert pacer[4] == int(pace)
        scheduled = SimpleNamespace(
            finished_req_ids=(),
            scheduled_new_reqs=(),
            num_scheduled_tokens={"a": read},
            scheduled_spec_decode_tokens={},
            total_num_scheduled_tokens=read,
        )
        pacer.begin(scheduled, 0.0)
        asked.clear()
        post_step(engine, True)
        assert asked == expected
    post_step(SimpleNamespace(), True)
    assert asked == [True] * 2, "a server without a pace always asks"


def test_live_counts_learn_at_0_too():
    runner, learned = make_runner("ngram"), []
    runner.redraft = RunnerState(lookup=SimpleNamespace(skip=lambda: learned.append(1)))
    install(runner)
    for number, count in ((0, 1), (2, 1), (0, 2)):  # a proposal learns by itself
        runner.propose_draft_token_ids(Scheduled(number), [[7], [7]])
        assert len(learned) == count


@pytest.mark.parametrize(
    ("method", "number", "num_tokens", "is_called"),
    [("eagle3", 0, 2, False), ("eagle3", 0, 10, True), ("eagle3", 0, 4, False), ("eagle3", 2, 2, True),
     ("ngram_gpu", 0, 10, False), ("ngram_gpu", 1, 2, True), ("gemma4", 0, 10, False), ("draft_model", 0, 10, True),
     ("draft_model", 2, 2, True)],
)  # fmt: skip
def test_the_second_runner_calls_a_draft_at_0_only_for_keys_of_a_prompt(
    method, number, num_tokens, is_called
):
    """Of two requests; with four tokens, one of them verifies two."""
    config = make_config(method, use_v2_model_runner=True)
    drafts = torch.full((8, 3), 5, dtype=torch.int32)
    runner = SimpleNamespace(
        vllm_config=config,
        speculative_config=config.speculative_config,
        speculator=SimpleNamespace(
            propose=lambda input_batch, states, **options: drafts[: input_batch.num_reqs],
            num_speculative_steps=3,
        ),
        req_states=SimpleNamespace(draft_tokens=drafts),
        num_speculative_steps=3,
    )
    install(runner)
    install(runner)  # once is enough
    verified = 2 if num_tokens == 4 else 0
    batch = SimpleNamespace(num_reqs=2, num_tokens=num_tokens, num_draft_tokens=verified)
    found = runner.speculator.propose(batch, "states", num_speculative_tokens=number)
    assert found.tolist() == [[5 if is_called else -1] * 3] * 2
    assert found.dtype == torch.int32
    drafted = max(1, number) if method == "draft_model" else 3
    assert runner.speculator.num_speculative_steps == drafted, (
        "a standalone draft would make the most"
    )
    # vLLM's own runs before it serves, all by name and without a number
    found = runner.speculator.propose(input_batch=batch, states="states", dummy_run=True)
    assert found.tolist() == [[5] * 3] * 2
    assert runner.speculator.num_speculative_steps == 3


def find_graphs(cls, most: int) -> set[tuple[int, int]]:
    """(requests, draft tokens) of the steps with a full graph of vLLM.

    They are those of at most 32 requests, in a server of 64.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import _is_compatible

    tiers = [
        (1 + arm, 64 if arm == most else 1 + list_arms(most).index(arm)) for arm in list_arms(most)
    ]
    sizes = {
        n * length
        for length, requests in tiers
        for n in (1, 2, 4, *range(8, 65, 8))
        if n <= requests
    }
    speculative = SimpleNamespace(
        num_speculative_tokens_per_batch_size=make_table(most),
        uses_dynamic_speculative_decoding=lambda: True,
    )
    config = SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=most,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    if cls.__name__.startswith("DFlash"):
        speculative.uses_dynamic_speculative_decoding = lambda: bool(
            speculative.num_speculative_tokens_per_batch_size
        )
    manager = SimpleNamespace(
        vllm_config=config,
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
        ),
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        max_num_reqs=64,
        decode_query_len=1 + most,
        varlen_decode=False,
        lora_capture_cases=[0],
        _maybe_ubatch_twin=lambda graph: None,
        _capture_descs={},
        _candidates={},
    )
    cls._init_candidates(manager)
    found = set()
    for number in range(1, 33):
        for arm in list_arms(most):
            tokens = number * (1 + arm)
            graph = next(
                graph
                for graph in manager._candidates[tokens, 0]
                if _is_compatible(graph, number, tokens, 1 + arm, 0, 1 + arm, 1)
            )
            if graph.cg_mode == CUDAGraphMode.FULL:
                assert graph in manager._capture_descs[CUDAGraphMode.FULL]
                found.add((number, arm))
    return found


@pytest.mark.parametrize("most", [3, 5])
def test_steps_of_any_number_have_a_full_graph_on_the_second_runner(most, monkeypatch):
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

    every = {(number, arm) for number in range(1, 33) for arm in list_arms(most)}
    assert (9, 0) in every - find_graphs(CudaGraphManager, most), "vLLM alone leaves holes"
    vllms = CudaGraphManager._init_candidates
    monkeypatch.setattr(CudaGraphManager, "_init_candidates", complete_graphs(vllms))
    monkeypatch.setattr(DFlashCudaGraphManager, "_init_candidates", without_table(vllms))
    assert find_graphs(CudaGraphManager, most) == every
    assert find_graphs(DFlashCudaGraphManager, most) == {
        (number, most) for number in range(1, 33)
    }, "whole blocks"


def test_a_head_behind_a_lookup_is_asked_for_one_token_at_least():
    runner = make_runner("eagle3")
    install(runner)
    assert runner.propose_draft_token_ids(Scheduled(0, PROMPT), [[7], []]) == [[], []]
    assert runner.asked == [1]


def test_where_another_decides_the_runner_stays_as_it_is():
    runner = make_runner("eagle3", **{TABLE: [[1, 16, 3], [17, 64, 1]]})
    before = runner.propose_draft_token_ids
    install(runner)
    assert runner.propose_draft_token_ids is before


def test_a_skipped_draft_still_counts_the_rejected_tokens_of_steps_scheduled_ahead():
    copied = []
    runner = make_runner("eagle3")
    runner.valid_sampled_token_count_event = object()
    runner.requests, runner.input_batch = "requests", "batch"
    runner.discard_request_mask = SimpleNamespace(gpu="mask")
    runner.drafter = SimpleNamespace(prepare_next_token_ids_padded=lambda *given: (given, "counts"))
    runner._copy_valid_sampled_token_count = lambda *given: copied.append(given)
    install(runner)
    sampled = torch.tensor([[7, 8, -1], [7, -1, -1]])
    assert runner.propose_draft_token_ids(Scheduled(0), sampled).shape == (2, 0)
    assert copied == [((sampled, "requests", "batch", "mask"), "counts")]


@pytest.mark.parametrize("most", [1, 3, 4, 8, 15])
def test_vllm_prepares_for_each_number_of_the_policy(most):
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    found = build_dynamic_sd_schedule_lookup(make_table(most), 64, most)
    assert (
        set(found[1:])
        == set(list_arms(most))
        == set(Pacer(most, 64, 4096, "auto", has_keys=True).policy.arms)
    )
    assert found[64] == most, "the widest graphs are those of the most tokens"
    assert build_dynamic_sd_schedule_lookup(make_table(most), 1, most)[1] == most


# --- seeds


@pytest.mark.parametrize(
    ("settings", "varies"),
    [
        ({}, False),
        ({"pace": "off"}, False),
        ({"pace": "auto"}, True),
        ({"pace": "2"}, True),
        ({"lookup": {"retrieval": "live"}}, True),
        ({"lookup": {"head_requests": 4}}, True),
        ({"lookup": {"head_tokens": 4}}, False),
    ],
)
def test_sampled_requests_with_a_seed_have_no_draft_where_drafts_vary(
    monkeypatch, settings, varies
):
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setenv(VARIABLE, json.dumps(settings))
    seen = []
    monkeypatch.setattr(
        Scheduler,
        "schedule",
        lambda scheduler, throttle=False: seen.append(
            [request.spec_token_ids for request in scheduler.running]
        ),
    )
    kinds = [(7, 1.0), (0, 0.1), (7, 0.0), (None, 1.0)]
    requests = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(seed=seed, temperature=temperature),
            spec_token_ids=[5, 6],
        )
        for seed, temperature in kinds
    ]
    requests.append(SimpleNamespace(sampling_params=None, spec_token_ids=[5, 6]))
    monkeypatch.setattr(hooks, "_installed", set())
    monkeypatch.setattr(hooks, "_chains", {})
    for _ in range(2):
        hooks.install_if_asked(next(each for each in hooks.FEATURES if each.name == "seeds"))
    scheduler = SimpleNamespace(
        running=requests,
        dynamic_sd_lookup=None,
        num_spec_tokens=3,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    Scheduler.schedule(scheduler, throttle=True)
    drafted = [5, 6]
    none = [] if varies else drafted
    assert seen == [[none, none, drafted, drafted, drafted]]
    assert scheduler.dynamic_sd_lookup == ([3] * 5 if varies else None), "no padding either"
    scheduler.dynamic_sd_lookup = table = [0, 1, 2, 3, 3]
    Scheduler.schedule(scheduler)
    assert scheduler.dynamic_sd_lookup is table


# --- the engine


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_shows_the_pace_and_records_what_it_answers_without_a_draft(
    random_target, registry, tmp_path
):
    prompt = list(range(20, 60))
    with running_server(random_target, registry, tmp_path, ["--pace", "auto"]) as server:
        answers = [server.complete(prompt, ignore_eos=True) for _ in range(4)]
        pace = server.status()["pace"]
        assert [cell["requests"] for cell in pace["cells"]] == [1]
        assert pace["cells"][0]["steps"] >= 60
        assert pace["line"].startswith("pace auto: ")
        wait_until(
            lambda: (
                (gauges := read_gauges(server.http.get("/metrics").text))
                and describe_pace(gauges).startswith("pace auto: ")
            )
        )
        server.swap("v000002")  # the policy is told
        taken = server.http.post("/redraft/pace", json={"pace": "0"})
        assert (taken.status_code, taken.json()["pace"]) == (200, "0")
        assert server.status()["pace"]["line"] == "pace 0"
        records = server.records(answers)
    rows = [record.positions[record.branches == 0].tolist() for record in records]
    assert rows == [list(range(40, 64))] * 4
    assert any((record.draft_ids == -1).sum() > 12 for record in records), "drafting begins off"
    assert (
        "--pace auto chooses the number of draft tokens per step, at most 3"
        in server.log.read_text()
    )
