"""Blocks of sessions at two servers in turn, and the ratios of what clients saw."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_completions import event, served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import in_event_loop

from benchmarks.demo import never_slower
from benchmarks.demo.never_slower import Beside, Block, Counted, describe_counts, summarise
from benchmarks.workloads import Session, Workload
from redraft.engine.prompts import Prompt


def make_block(tokens_s: float, first_s: float = 0.1, decoding: float = 20.0) -> Block:
    return Block(tokens_s=tokens_s, first_s=first_s, decoding=decoding)


def test_ratios_are_those_of_pairs_with_an_interval_of_six() -> None:
    rates = [(12.0, 10.0), (30.0, 20.0), (9.0, 10.0), (11.0, 10.0), (13.0, 10.0), (7.0, 5.0)]
    found = summarise([(make_block(ours, 0.2), make_block(plain)) for ours, plain in rates])
    assert found["tokens_s"]["ratio"] == pytest.approx(1.25)
    assert found["tokens_s"]["interval"] == pytest.approx((0.9, 1.5))
    assert found["first_token"]["ratio"] == pytest.approx(2.0), "slower"
    assert found["decoding"] == {"ratio": 1.0, "interval": (1.0, 1.0), "pairs": 6}
    few = summarise([(make_block(1.0), make_block(2.0))])
    assert few["tokens_s"] == {"ratio": 0.5, "interval": None, "pairs": 1}
    assert summarise([])["tokens_s"]["ratio"] is None


def test_accepted_tokens_are_of_a_lookup_or_of_the_head() -> None:
    plain = Counted(queries=100, hits=80, drafts=0, accepted=0, by_head=0)
    counts = Counted(queries=100, hits=75, drafts=40, accepted=60, by_head=15)
    assert describe_counts(counts, plain) == {
        "hit_rate": 0.75, "hit_rate_plain": 0.8, "tau": 2.5, "head_share": 0.25, "lookup_share": 0.75,
    }  # fmt: skip
    # Ten answers of 20 tokens: 10 tokens from prefills, 60 accepted ones, and 130 steps.
    whole = replace(counts, tokens=200, answers=10)
    assert describe_counts(whole, plain)["tau"] == pytest.approx(1 + 60 / 130)
    swapped = Counted(queries=0, hits=0, drafts=40, accepted=60, by_head=-5)
    found = describe_counts(swapped, swapped)
    assert (found["head_share"], found["lookup_share"], found["hit_rate"]) == (None, None, None)


@in_event_loop
async def test_both_servers_get_the_same_sessions_and_the_learner_rests_beside_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(never_slower, "IDLE_S", 0.0)
    seen: dict[str, list[list[int]]] = {"plain": [], "up": []}
    is_resting, rested = [False], list[tuple[str, bool]]()

    def make_app(name: str) -> Starlette:
        async def complete(request: Request) -> Response:
            seen[name].append((await request.json())["prompt"])
            rested.append((name, is_resting[0]))

            async def answer() -> Any:
                yield event({"choices": [{"token_ids": [7]}]})
                await asyncio.sleep(0.001)
                yield event({"choices": [{"token_ids": [8, 8]}]})

            return StreamingResponse(answer(), media_type="text/event-stream")

        async def metrics(request: Request) -> Response:
            drafts, accepted = (
                (5 * len(seen["up"]), 10 * len(seen["up"])) if name == "up" else (0, 0)
            )
            hits = 60 if name == "up" else 80
            lines = [
                f"vllm:prefix_cache_queries_total {100 * len(seen[name])}",
                f"vllm:prefix_cache_hits_total {hits * len(seen[name])}",
                f"vllm:spec_decode_num_drafts_total {drafts}",
                f"vllm:spec_decode_num_draft_tokens_total {3 * drafts}",
                f"vllm:spec_decode_num_accepted_tokens_total {accepted}",
                f"vllm:generation_tokens_total {20 * len(seen[name])}",
                f"vllm:request_decode_time_seconds_count {len(seen[name])}",
            ]
            return PlainTextResponse("\n".join(lines) + "\n")

        return Starlette(
            routes=[
                Route("/v1/completions", complete, methods=["POST"]),
                Route("/metrics", metrics),
            ]
        )

    @contextlib.contextmanager
    def resting() -> Iterator[None]:
        is_resting[0] = True
        yield
        is_resting[0] = False

    async def count_head() -> float:
        return 4.0 * len(seen["up"])

    def sessions() -> Iterator[Session]:
        for number in range(100):
            yield Session(prompt=Prompt(token_ids=[number]), results=([9, number],))

    workload = Workload(name="agents", sessions=sessions(), clients=2, block=3, max_tokens=4)
    async with served(make_app("plain")) as plain, served(make_app("up")) as up:
        addresses = [f"http://127.0.0.1:{one.port}" for one in (plain, up)]
        beside = Beside(plain=addresses[0], up=addresses[1], resting=resting, count_head=count_head)
        found = await beside.compare(workload, 6)
        few = Workload(name="agents", sessions=iter([]))
        with pytest.raises(ValueError, match="too few sessions"):
            await beside.compare(few, 6)
    assert sorted(seen["plain"]) == sorted(seen["up"])
    assert [0, 7, 8, 8, 9, 0] in seen["up"], "a turn goes on after the answer"
    prompts = [tuple(prompt) for prompt in seen["up"]]
    assert len(set(prompts)) == len(prompts) == 6 * 3 * 2
    assert set(rested) == {("plain", True), ("up", False)}
    assert (found["requests"], found["failed"]) == (72, 0)
    assert found["tokens_s"]["pairs"] == 6
    assert found["tokens_s"]["interval"] is not None
    assert (found["hit_rate"], found["hit_rate_plain"]) == (0.6, 0.8)
    # An answer has 20 tokens: 1 from the prefill, 10 accepted, 9 from steps, 5 of them with a draft.
    assert (found["tau"], found["head_share"]) == (pytest.approx(1 + 10 / 9), 0.4)
