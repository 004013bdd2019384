"""The tensors that a step leaves in the queue of capture, counted by the real hook on a step of the size of a fleet."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from redraft.online.engine.capture import Capture
from redraft.online.engine.config import CaptureConfig
from redraft.online.engine.feed import Batch, Feed
from redraft.online.engine.request_log import RequestInfo
from redraft.online.records.record import Sampling


def count_step(*, num_requests: int, num_drafts: int, vocab_size: int) -> dict[str, Any]:
    """Bytes of one step's tensors in the queue, all requests recorded, with bfloat16 logits.

    `bytes_per_step` is what a GPU's hook leaves, `bytes_by_reference` what the CPU's does.
    """
    with tempfile.TemporaryDirectory() as folder:
        capture = Capture(CaptureConfig(spool=Path(folder) / "spool"), "bench", "target", "start")
        sizes = [
            _count(Feed(capture, max_model_len=4096, reduces=reduces), num_requests, num_drafts, vocab_size)
            for reduces in (True, False)
        ]
    return {"bytes_per_step": sizes[0], "bytes_by_reference": sizes[1]}


def _count(feed: Feed, num_requests: int, num_drafts: int, vocab_size: int) -> int:
    """Bytes of a step in which every request verifies `num_drafts` tokens."""
    sampling = Sampling(temperature=0.0)
    info = RequestInfo(request_id="r", prompt_ids=[1], sampling=sampling, max_tokens=64, stop_ids=frozenset())
    num_rows = num_drafts + 1
    batch = Batch(
        infos=[info] * num_requests,
        # Each request reads k drafts and the last sampled token: k + 1 rows of logits.
        first_reads=[num_rows * i for i in range(num_requests + 1)],
        num_drafts=[num_drafts] * num_requests,
        first_rows=[num_rows * i for i in range(num_requests)],
        first_drafts=[num_drafts * i for i in range(num_requests)],
        starts=[2] * num_requests,
        is_partial=[False] * num_requests,
    )
    step = feed.make_step(
        batch,
        sampled_BK=torch.zeros(num_requests, num_rows, dtype=torch.int32),
        logits_RV=torch.zeros(num_requests * num_rows, vocab_size, dtype=torch.bfloat16),
        draft_ids_S=torch.zeros(num_requests * num_drafts, dtype=torch.int32),
        draft_probs_S=None,
    )
    assert step is not None
    return step.num_bytes
