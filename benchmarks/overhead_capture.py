"""Measure capture by stage: CPU time of the real code on tensors of a target's sizes.

    hook         in the engine thread: references to a step's tensors, a copy of its states
    reduction    top-k and log-sum-exp of the logits
    assembly     logs of requests, and a record of each
    encoding     msgpack and zstd
    writing      a file of the spool

All stages but the first run in a second thread. There is one request at a time, with 0 draft
tokens. That thread handles ten steps per batch, as it would for a target with 20 ms per step.

V = vocabulary, D = size of a hidden state, N = tokens that a step reads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from redraft.online.engine.capture import Capture
from redraft.online.engine.feed import Batch, Feed
from redraft.online.engine.reduction import reduce_steps
from redraft.online.engine.request_log import RequestInfo
from redraft.online.records.record import Sampling, encode_frame
from redraft.recipes.plan.hook_work import open_capture

REQUESTS = 12
PROMPT_TOKENS = 160
STATES = 3
"""Number of states per token that an EAGLE-3 head reads."""
STEPS_PER_BATCH = 10


def profile_capture(
    config: Any, answer_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """CPU milliseconds of each stage and bytes written per request, for a target's config."""
    spent = Counter[str]()
    torch.manual_seed(0)
    logits_1V = torch.randn(1, config.vocab_size, dtype=dtype)
    streams = [torch.randn(PROMPT_TOKENS, config.hidden_size, dtype=dtype) for _ in range(STATES)]
    with open_capture() as capture, timing_stages(capture, spent):
        feed = Feed(capture, max_model_len=config.max_position_embeddings)
        for number in range(REQUESTS):
            for step in range(answer_tokens):
                with timed(spent, "hook"):
                    put_step(feed, number, step, answer_tokens, logits_1V, streams)
                if step % STEPS_PER_BATCH == STEPS_PER_BATCH - 1:
                    take(capture, spent)
            feed.end(f"r{number}")
            feed.flush()
            take(capture, spent)
            capture._ship()
        spent["assembly"] -= spent["reduction"] + spent["encoding"]
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": answer_tokens,
            "ms_per_request": {
                stage: 1e3 * spent[stage] / REQUESTS
                for stage in ("hook", "reduction", "assembly", "encoding", "writing")
            },
            "bytes_per_request": capture.counts["shipped_bytes"] / REQUESTS,
        }


def put_step(
    feed: Feed, number: int, step: int, answer_tokens: int, logits_1V: Any, streams: list[Any]
) -> None:
    """Do the hooks' work for one step of one request."""
    name, size = f"r{number}", 1 if step else PROMPT_TOKENS
    if not step:
        feed.requests[name] = RequestInfo(
            request_id=name,
            prompt_ids=list(range(PROMPT_TOKENS)),
            sampling=Sampling(temperature=0.0),
            max_tokens=answer_tokens,
            stop_ids=frozenset(),
        )
    batch = Batch(
        infos=[feed.requests[name]],
        first_reads=[0, size],
        num_drafts=[0],
        proposers=[0],
        first_rows=[0],
        first_drafts=[0],
        starts=[PROMPT_TOKENS + step],
        is_partial=[False],
    )
    sampled_BK = torch.full((1, 1), 5, dtype=torch.int32)
    feed.put(
        feed.make_step(
            batch,
            sampled_BK=sampled_BK,
            logits_RV=logits_1V,
            draft_ids_S=None,
            draft_probs_S=None,
        )
    )
    feed.put_states([stream[:size] for stream in streams])


def take(capture: Capture, spent: Counter[str]) -> None:
    with timed(spent, "assembly"):
        capture._apply_or_close(capture.queue.take())


@contextmanager
def timed(spent: Counter[str], stage: str) -> Iterator[None]:
    began_s = time.thread_time()
    yield
    spent[stage] += time.thread_time() - began_s  # type: ignore[assignment]


@contextmanager
def timing_stages(capture: Capture, spent: Counter[str]) -> Iterator[None]:
    """Add the CPU time of each stage to `spent` within the block."""

    def stage(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with timed(spent, name):
                return call(*args, **kwargs)

        return run

    module = "redraft.online.engine.capture"
    with (
        mock.patch(f"{module}.reduce_steps", stage("reduction", reduce_steps)),
        mock.patch(f"{module}.encode_frame", stage("encoding", encode_frame)),
        mock.patch.object(capture._outlet, "write", stage("writing", capture._outlet.write)),
    ):
        yield
