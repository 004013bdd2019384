"""Network traffic, disk space and compute for learning from a fleet, per served token.

Captured bytes are the sizes of records made by the plugin's code. Stored bytes are the size of a
real buffer. FLOPs are counted on a training step over these records, in a batch like the learner's.
docs/capacity.md shows such tables for some fleets (`benchmarks.capacity`).
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from redraft.distill.loss.choice import Divergence
from redraft.distill.plan.counted_step import (
    DRAFT,
    Counted,
    Plan,
    count_flops,
    count_step,
    make_models,
)
from redraft.distill.plan.operations import DEVICES
from redraft.distill.plan.sizes import find_sizes
from redraft.heads.catalog import FamilyName, find_family
from redraft.heads.family import Reads
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.candidate import choose_reads
from redraft.online.learning.config import BufferConfig, Training
from redraft.online.learning.replay import make_batches, select_texts
from redraft.online.records.record import Record, encode_record, read_frames
from redraft.recipes.plan.count import make_plan
from redraft.recipes.plan.fleet import FleetPlanConfig
from redraft.recipes.plan.plan import PlanConfig
from redraft.recipes.plan.traffic import Traffic, make_record

NUM_RECORDS = 24
"""Number of records over which sizes are averaged."""

STATEFUL_RECORDS = 4
"""Number of records with hidden states over which sizes are averaged. It is smaller, because each
takes tens of megabytes.
"""

H100 = DEVICES[0]

UTILISATION = 0.4
"""Fraction of the peak FLOP/s that training reaches."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs per token that is both served and captured."""

    name: str
    weights: float
    """Number of weights that multiply a token in all draft steps, excluding embeddings and output
    head.
    """
    captured_bytes: float
    stored_bytes: float
    learner_flops: float
    step_memory_bytes: int
    """Peak memory of the learner's step in one micro-batch. It is counted per step, not per token.
    """
    row_memory_bytes: int
    """Peak memory with one row per micro-batch, which the learner uses if memory is short."""


def report(cfg: FleetPlanConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """Return (lines for a terminal, costs per token)."""
    found = all_costs(cfg)
    lines = [
        f"{cfg.tokens_per_s:,.0f} tokens/s of {cfg.target}, {cfg.fraction:.2%} of the requests "
        "captured",
        "",
        *fleet_table(cfg, found),
        "",
        "per token that is served and captured:",
        "",
        *token_table(found),
    ]
    return lines, [asdict(cost) for cost in found]


def all_costs(cfg: FleetPlanConfig) -> list[Costs]:
    """Calculate the costs of every family."""
    traffic = replace(cfg.traffic, vocab_size=find_sizes(cfg.target).vocab_size)
    return [count_costs(family, cfg.target, cfg.draft, traffic) for family in cfg.families]


# -----------------------------------------------------------------------------------------------
# counting


@cache
def count_costs(family: FamilyName, target: str, draft: str, traffic: Traffic) -> Costs:
    """Calculate a family's costs from records of the traffic and a learner's step on them."""
    plan = plan_learner(family, target, draft)
    reads, num_states = find_reads(plan)
    hidden = (num_states, plan.target.hidden_size) if num_states else None
    records = _records(hidden, traffic, STATEFUL_RECORDS if hidden else NUM_RECORDS)
    counted, tokens = count_learner(plan, records, reads)
    met = sum(
        work.flops * n for work, n in counted.operations.items() if (work.part, work.kind) == MEETS
    )
    step = _records(hidden, traffic, count_texts(max(len(record.hidden) for record in records)))
    step_memory, row_memory = (
        count_learner(plan, some, reads)[0].memory.total() for some in (step, records[:1])
    )
    captured = (
        statistics.mean(len(encode_record(record)) for record in records) / traffic.output_tokens
    )
    return Costs(
        name=find_family(family).title if find_family(family).is_head else f"standalone, {draft}",
        weights=met / 2 / tokens,
        captured_bytes=captured,
        stored_bytes=captured * stored_per_captured(traffic),
        learner_flops=count_flops(counted) * passes() / len(records) / traffic.output_tokens,
        step_memory_bytes=step_memory,
        row_memory_bytes=row_memory,
    )


MEETS = DRAFT, "product"
"""Part and kind of the operations that multiply a token by the draft's weights, at 2 FLOPs per
weight.
"""


def passes() -> float:
    """Return how often a record is trained on, e.g. 8 times with 4 new and 28 replayed texts."""
    training = Training()
    return (training.fresh_per_step + training.replay_per_step) / training.fresh_per_step


def plan_learner(family: FamilyName, target: str, draft: str) -> Plan:
    """Return the sizes of a learner's step."""
    plan = make_plan(PlanConfig(family=family, target=target, checkpoint=draft, signal="endpoint"))
    learner = Training()
    divergence = Divergence(name=learner.divergence)  # type: ignore[arg-type]
    # The learner uses its own optimizer, not the one that `redraft train` uses: with a small batch,
    # Muon's products would dominate.
    return replace(plan, divergence=divergence, optimizer=learner.optimizer)


def find_reads(plan: Plan) -> tuple[Reads, int]:
    """Return (field of the signal for the recorded states, number of states per token)."""
    draft = make_models(plan, torch.device("meta"))[1]
    reads = choose_reads(find_family(plan.family), draft)
    return reads, len(draft.aux_layer_ids) or int(reads == "last")


def count_learner(plan: Plan, records: list[Record], reads: Reads) -> tuple[Counted, int]:
    """Return (a step on the records, number of its tokens) for the learner's padded batch."""
    texts = select_texts(records)
    (batch,) = make_batches(
        texts, num_batches=1, sequence_length=Training().sequence_length, seed=0, reads=reads
    )
    return count_step(plan, batch=batch, signal=batch.signal), batch.input_ids_BT.numel()


def count_texts(state_bytes: int) -> int:
    """Return how many texts a learner's step has, if each has this many bytes of hidden states."""
    training, most_bytes = Training(), BufferConfig().max_read_bytes
    numbers = (training.fresh_per_step, training.replay_per_step)
    return sum(min(number, max(1, most_bytes // max(1, state_bytes))) for number in numbers)


def _records(hidden: tuple[int, int] | None, traffic: Traffic, number: int) -> list[Record]:
    records = [make_record(seed, traffic) for seed in range(number)]
    if hidden is None:
        return records
    return [with_states(record, hidden, seed) for seed, record in enumerate(records)]


def with_states(record: Record, hidden: tuple[int, int], seed: int) -> Record:
    """Return the record with random hidden states for every token that the target read.

    The states are normally distributed.
    """
    # The target never reads the last output token, so no state belongs to it.
    tokens = len(record.context_ids) + len(record.output_ids) - 1
    states_HLD = torch.randn(
        tokens, *hidden, generator=torch.Generator().manual_seed(seed)
    ).bfloat16()
    return msgspec.structs.replace(
        record,
        hidden_begin=0,
        hidden_shape=hidden,
        hidden=states_HLD.view(torch.int16).numpy().tobytes(),
    )


@cache
def stored_per_captured(traffic: Traffic) -> float:
    """Return the bytes in the buffer's files per byte of records."""
    frames = b"".join(
        encode_record(make_record(number, traffic)) for number in range(8 * NUM_RECORDS)
    )
    with tempfile.TemporaryDirectory() as folder:
        with Buffer(BufferConfig(folder=Path(folder)), "0" * 64) as buffer:
            buffer.append(read_frames(frames), 0.0)
        return sum(path.stat().st_size for path in Path(folder).glob("records-*.db")) / len(frames)


# -----------------------------------------------------------------------------------------------
# tables


def fleet_table(cfg: FleetPlanConfig, found: list[Costs]) -> Iterator[str]:
    """Yield a row per family, for a fleet with this output speed and this captured share."""
    yield "| draft | captured | stored per day | kept by 8 GiB | learner | H100s at 40% |"
    yield "|---|---|---|---|---|---|"
    captured_per_s = cfg.tokens_per_s * cfg.fraction
    for cost in found:
        stored_per_s = cost.stored_bytes * captured_per_s
        flops_per_s = cost.learner_flops * captured_per_s
        yield (
            f"| {cost.name} | {format_bytes(cost.captured_bytes * captured_per_s)}/s "
            f"| {format_bytes(stored_per_s * 86400)} "
            f"| {_duration(BufferConfig().max_bytes / stored_per_s)} | {two(flops_per_s / 1e12)} "
            f"TFLOP/s | {two(flops_per_s / H100.flops_per_s / UTILISATION)} |"
        )


def token_table(found: list[Costs]) -> Iterator[str]:
    """Yield a row per family, for one token that is served and captured."""
    yield (
        "| draft | weights per token | captured | stored | learner | learner's memory | at least |"
    )
    yield "|---|---|---|---|---|---|---|"
    for cost in found:
        yield (
            f"| {cost.name} | {two(cost.weights / 1e6)}M | {format_bytes(cost.captured_bytes)} "
            f"| {format_bytes(cost.stored_bytes)} | {two(cost.learner_flops / 1e9)} GFLOP "
            f"| {format_bytes(cost.step_memory_bytes)} | {format_bytes(cost.row_memory_bytes)} |"
        )


def two(number: float) -> str:
    """Round a number to two significant digits: 0.0042, 0.42, 4.2, 42, 420."""
    # Round first, then format: 9.96 becomes 10, not 10.0.
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.10f}".rstrip("0").rstrip(".")


def format_bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        # From 995 on, two digits would round to 1,000, so the next unit is used.
        if number < 995:
            return f"{two(number)} {unit}"
        number /= 1000
    return f"{two(number)} TB"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{two(seconds / size)} {unit}"
    return f"{two(seconds)} seconds"
