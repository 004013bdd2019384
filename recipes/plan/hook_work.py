"""Calculate the work and memory of the capture hook.

The real hook is counted on a step of a production server's size.

The bytes in the queue are the sizes of the tensors that a step leaves in it. The hook's work on a
GPU is traced with tensors that take no memory. A trace cannot look into Triton kernels, so each
kernel counts as reading and writing its tensors once.
"""

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from redraft.distill.plan.operations import Operation, add_up
from redraft.distill.plan.sizes import find_sizes
from redraft.distill.plan.weightless import Count, size_bytes
from redraft.online.engine import one_pass
from redraft.online.engine.capture import Capture
from redraft.online.engine.config import CaptureConfig
from redraft.online.engine.feed import Batch, Feed
from redraft.online.engine.request_log import RequestInfo
from redraft.online.engine.steps import EngineStep
from redraft.online.records.record import Sampling
from redraft.recipes.plan.capture import CapturePlanConfig

STATES = {"standalone": 0, "eagle1, mtp": 1, "eagle3, peagle": 3, "dflash, dspark": 5}
"""Number of hidden states per token that the hook copies, by draft family. Block drafters usually
read five layers.
"""

SCANNED, COPIED, DRAFTED = "top-k and log-sum-exp", "hidden states", "draft probabilities"


def report(cfg: CapturePlanConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the report in words, and the numbers for JSON."""
    target = find_sizes(cfg.target).get_text_config()
    rows = list(
        count_work(
            requests=cfg.requests,
            vocabularies=(target.vocab_size,),
            num_drafts=cfg.num_speculative_tokens,
            hidden_size=target.hidden_size,
        )
    )
    return list(format_work(rows)), rows


def count_work(
    families: Sequence[str] = tuple(STATES),
    requests: Sequence[int] = (1, 32, 256),
    vocabularies: Sequence[int] = (32_000, 128_256, 151_936),
    *,
    num_drafts: int = 3,
    hidden_size: int = 4096,
) -> Iterator[dict[str, Any]]:
    """Yield a row per case: bytes queued, bytes moved on a GPU, and kernels."""
    for name, num_requests, vocab_size in itertools.product(families, requests, vocabularies):
        step, operations = _trace(STATES[name], num_requests, num_drafts, vocab_size, hidden_size)
        work = add_up(operations, operations)
        parts = {
            part: sum(o.num_bytes * n for o, n in operations.items() if o.part == part)
            for part in PARTS
        }
        yield {
            "families": name,
            "requests": num_requests,
            "vocab_size": vocab_size,
            "bytes_queued": step.num_bytes,
            "bytes_moved": work.num_bytes,
            "bytes_by_part": parts,
            "kernels": work.calls,
        }


PARTS = (SCANNED, COPIED, DRAFTED)


def format_work(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Format the rows as a table for a terminal."""
    yield (
        f"{'hook':<15}{'requests':>9}{'vocabulary':>11}{'queued, MB':>11}{'moved, MB':>10}{'kernels':>8}"
    )
    for row in rows:
        sizes = f"{row['bytes_queued'] / 1e6:>11.2f}{row['bytes_moved'] / 1e6:>10.1f}{row['kernels']:>8}"
        yield f"{row['families']:<15}{row['requests']:>9}{row['vocab_size']:>11,}{sizes}"


def _trace(
    num_states: int, num_requests: int, num_drafts: int, vocab_size: int, hidden_size: int
) -> tuple[EngineStep, Counter[Operation]]:
    """Return (step that the hook queues on a GPU, its operations).

    The draft tokens are assumed to be sampled, because greedy drafts need less work.
    """
    rows = num_requests * (num_drafts + 1)
    with Count(weightless=True) as count, open_capture() as capture:
        logits_RV = torch.empty(rows, vocab_size, dtype=torch.bfloat16)
        streams = [torch.empty(rows, hidden_size, dtype=torch.bfloat16) for _ in range(num_states)]
        draft_logits = torch.empty(num_requests, num_drafts, vocab_size, dtype=torch.bfloat16)
        feed = Feed(capture, max_model_len=4096, reduces=True)
        count.begin(SCANNED)
        with mock.patch.object(one_pass, "find_kernels", return_value=_CountedKernels(count)):
            step = make_step(feed, num_requests, num_drafts, logits_RV)
            count.begin(COPIED)
            if streams:
                feed.unread = step
                feed.put_states(streams)
                (step,) = capture.queue.take()
            count.begin("")
            slots_N = torch.arange(num_requests).repeat_interleave(num_drafts)
            steps_N = torch.arange(num_drafts).repeat(num_requests)
            ids_N, temperatures_N = torch.zeros_like(slots_N), torch.ones(len(slots_N))
            count.begin(DRAFTED)
            one_pass.gather_probs(draft_logits, slots_N, steps_N, ids_N, temperatures_N)
            count.begin("")
        # Compute it now, because weightless tensors have sizes only while operations are being
        # counted.
        assert step.num_bytes > 0
    return step, count.operations


class _CountedKernels:
    """Replacement for the module with the kernels.

    Each kernel counts as reading and writing its tensors once.
    """

    def __init__(self, count: Count) -> None:
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return _CountedKernel(self._count, name)


class _CountedKernel:
    def __init__(self, count: Count, name: str) -> None:
        self._count, self._name = count, name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._run

    def _run(self, *args: Any, **_: Any) -> None:
        tensors = [x for x in args if isinstance(x, Tensor)]
        num_bytes = sum(map(size_bytes, tensors))
        if self._name == "read_groups":
            # This kernel reads only the chosen groups of logits, i.e. as many elements as it
            # writes.
            logits_RV, values_RM = tensors[0], tensors[-1]
            num_bytes += values_RM.numel() * logits_RV.element_size() - size_bytes(logits_RV)
        self._count.operations[Operation(self._count.part, "other", 0, num_bytes)] += 1


@contextmanager
def open_capture() -> Iterator[Capture]:
    with tempfile.TemporaryDirectory() as folder:
        yield Capture(
            CaptureConfig(spool=Path(folder) / "spool", hidden_states=True),
            "bench",
            "target",
            "start",
        )


def make_step(feed: Feed, num_requests: int, num_drafts: int, logits_RV: Tensor) -> EngineStep:
    """Create a step that verifies `num_drafts` tokens for every request."""
    sampling = Sampling(temperature=0.0)
    info = RequestInfo(
        request_id="r", prompt_ids=[1], sampling=sampling, max_tokens=64, stop_ids=frozenset()
    )
    num_rows = num_drafts + 1
    batch = Batch(
        infos=[info] * num_requests,
        # Each request reads k draft tokens and the last sampled token, which gives k + 1 rows of
        # logits.
        first_reads=[num_rows * i for i in range(num_requests + 1)],
        num_drafts=[num_drafts] * num_requests,
        proposers=[0] * num_requests,
        first_rows=[num_rows * i for i in range(num_requests)],
        first_drafts=[num_drafts * i for i in range(num_requests)],
        starts=[2] * num_requests,
        is_partial=[False] * num_requests,
    )
    step = feed.make_step(
        batch,
        sampled_BK=torch.zeros(num_requests, num_rows, dtype=torch.int32),
        logits_RV=logits_RV,
        draft_ids_S=torch.zeros(num_requests * num_drafts, dtype=torch.int32),
        draft_probs_S=None,
    )
    assert step is not None
    return step
