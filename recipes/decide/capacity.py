"""Cost of capture, storage and learning for a fleet: bytes and FLOPs per served token, for a standalone draft,
EAGLE-1 and EAGLE-3.

    $ redraft capacity                                    # 1,000 tokens/s of Llama-3.1-8B
    $ redraft capacity --tokens-per-s 250000 --fraction 0.01 --traffic.tau 3.1
    $ redraft capacity --page docs/capacity.md            # update the tables of that page

Captured bytes are the sizes of records made by the plugin's code; stored bytes are the size of a real buffer. FLOPs are
counted from the drafts' modules and from the texts of a training step on those records:

    (6 (once + steps layer) T + 6 steps layers width T^2 + c steps W D R) (fresh + replay) / fresh

T = tokens of a text, R = labelled rows, W = draft vocabulary, D = hidden size, width = size of attention's queries.
`layer` counts the weights used for a token in every draft step, `once` those used in the first step only; c = 6 for a
trained head and 4 for the target's.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.heads.catalog import find_family
from redraft.heads.files.artifact import write_whole
from redraft.heads.target import Target
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig, Training
from redraft.online.learning.replay import select_texts
from redraft.online.records.record import Record, encode_record, read_frames
from redraft.recipes.cli import run_recipe
from redraft.recipes.demo.traffic import Traffic, make_record

NUM_RECORDS = 24
"""Records to average sizes over."""

STATEFUL_RECORDS = 4
"""The same for records with hidden states, which are tens of megabytes each."""

GPU_FLOPS_PER_S = 989e12
"""Peak of an H100 in bfloat16, dense."""

UTILISATION = 0.4
"""Share of the peak reached in training."""

LLAMA_8B = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
)  # fmt: skip
LLAMA_1B = LlamaConfig(
    vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
EAGLE3_VOCABULARY = 32_000


@dataclass(frozen=True, kw_only=True)
class Config:
    tokens_per_s: float = 1000
    """Output tokens per second served by the whole fleet."""
    fraction: float = 1.0
    """Share of the requests to capture, from 0 to 1: the servers' --capture.fraction."""
    traffic: Traffic = field(default_factory=Traffic)
    page: Path | None = None
    """Markdown file to update the tables in, instead of printing a table for the settings above."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The properties of a family that determine its costs. Weights are counted, not weighed in bytes."""

    name: str
    once: int = 0
    """Weights used for a token in the first draft step only."""
    layer: int
    """Weights used for a token in every draft step, without embeddings and head."""
    head: int
    """W * D."""
    is_head_trained: bool
    num_steps: int = 1
    layers: int = 1
    width: int
    """Size of attention's queries: heads * head size."""
    hidden: tuple[int, int] | None = None
    """Number and size of a token's hidden states in a record; None if records hold none."""

    def training_flops(self, tokens: int, rows: int) -> float:
        """FLOPs of forward and backward over one text."""
        # 6 = 2 forward and 4 backward, per weight and token.
        weights = 6 * (self.once + self.num_steps * self.layer) * tokens
        # Scores and output take 2 T^2 width each, forward. Causality halves the sum, the backward pass triples
        # it: 6.
        attention = 6 * self.num_steps * self.layers * self.width * tokens**2
        # A frozen head has no gradient of weights: 2 forward, 2 for the gradient of the hidden states.
        return weights + attention + (6 if self.is_head_trained else 4) * self.num_steps * self.head * rows


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one token that is served and captured."""

    captured_bytes: float
    stored_bytes: float
    learner_flops: float


def main(cfg: Config) -> None:
    if cfg.page is not None:
        write_whole(cfg.page, fill_tables(cfg.page.read_text()))
        return
    print(*fleet_table(cfg.tokens_per_s, cfg.fraction, cfg.traffic), sep="\n")


# ----------------------------------------------------------------------------------------------- counting


@cache
def drafts() -> tuple[Draft, ...]:
    """The families that learn from live traffic, with Llama-3.1-8B as the target."""
    # Shapes without memory. The ids of the draft vocabulary are checked, so they need values.
    with torch.device("meta"):
        weight_VD = torch.empty(LLAMA_8B.vocab_size, LLAMA_8B.hidden_size)
        target = Target(config=LLAMA_8B, embed_VD=weight_VD, head_VD=weight_VD)
        standalone = LlamaForCausalLM(LLAMA_1B)
        eagle1, eagle3 = find_family("eagle1"), find_family("eagle3")
        one = eagle1.draft_class()(eagle1.config_class()(), target)
        three = eagle3.draft_class()(eagle3.config_class()(), target, torch.arange(EAGLE3_VOCABULARY, device="cpu"))
    width = LLAMA_8B.num_attention_heads * LLAMA_8B.head_dim
    return (
        Draft(
            name="standalone, Llama-3.2-1B",
            # Tied: embeddings and head are one matrix, counted as `head`.
            layer=_weights(standalone) - LLAMA_1B.vocab_size * LLAMA_1B.hidden_size,
            head=LLAMA_1B.vocab_size * LLAMA_1B.hidden_size,
            is_head_trained=True,
            layers=LLAMA_1B.num_hidden_layers,
            width=LLAMA_1B.num_attention_heads * LLAMA_1B.head_dim,
        ),
        Draft(
            name="EAGLE-1",
            layer=_weights(one),
            head=weight_VD.numel(),
            is_head_trained=False,
            num_steps=one.config.num_steps,
            width=width,
            hidden=(1, LLAMA_8B.hidden_size),
        ),
        Draft(
            name="EAGLE-3",
            once=_weights(three.fc),
            layer=_weights(three) - _weights(three.fc) - _weights(three.lm_head),
            head=_weights(three.lm_head),
            is_head_trained=True,
            num_steps=three.config.num_steps,
            width=width,
            hidden=(len(three.aux_layer_ids), LLAMA_8B.hidden_size),
        ),
    )


def _weights(module: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@cache
def costs(draft: Draft, traffic: Traffic) -> Costs:
    records = _records(draft.hidden, traffic)
    training = Training()
    # By default a step has 4 new texts and 28 replayed ones, so each record is trained 8 times on average.
    passes = (training.fresh_per_step + training.replay_per_step) / training.fresh_per_step
    branches = 0 if draft.hidden else training.branches_per_record
    texts = select_texts(records, branches_per_record=branches, rng=np.random.default_rng(0))
    flops = sum(draft.training_flops(len(text.input_ids_T), len(text.rows_R)) for text in texts) * passes
    captured_bytes = statistics.mean(len(encode_record(record)) for record in records)
    return Costs(
        captured_bytes=captured_bytes / traffic.output_tokens,
        stored_bytes=captured_bytes / traffic.output_tokens * stored_per_captured(traffic),
        learner_flops=flops / len(records) / traffic.output_tokens,
    )


def _records(hidden: tuple[int, int] | None, traffic: Traffic) -> list[Record]:
    if hidden is None:
        return [make_record(number, traffic) for number in range(NUM_RECORDS)]
    return [with_states(make_record(number, traffic), hidden, number) for number in range(STATEFUL_RECORDS)]


def with_states(record: Record, hidden: tuple[int, int], seed: int) -> Record:
    """The record with hidden states for every token read by the target, drawn from a normal distribution."""
    # The target never reads the last output token, so no state belongs to it.
    tokens = len(record.context_ids) + len(record.output_ids) - 1
    states_HLD = torch.randn(tokens, *hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return msgspec.structs.replace(
        record, hidden_begin=0, hidden_shape=hidden, hidden=states_HLD.view(torch.int16).numpy().tobytes()
    )


@cache
def stored_per_captured(traffic: Traffic) -> float:
    """Bytes in the buffer's files per byte of records."""
    frames = b"".join(encode_record(make_record(number, traffic)) for number in range(8 * NUM_RECORDS))
    with tempfile.TemporaryDirectory() as folder:
        with Buffer(BufferConfig(folder=Path(folder)), "0" * 64) as buffer:
            buffer.append(read_frames(frames), 0.0)
        return sum(path.stat().st_size for path in Path(folder).glob("records-*.db")) / len(frames)


# ----------------------------------------------------------------------------------------------- the page


def fleet_table(tokens_per_s: float, fraction: float, traffic: Traffic) -> Iterator[str]:
    """A row per family, for a fleet with this output speed and this share of captured requests."""
    yield "| draft | captured | stored in a day | kept by 8 GiB | learner | H100s at 40% |"
    yield "|---|---|---|---|---|---|"
    for draft in drafts():
        cost, captured_per_s = costs(draft, traffic), tokens_per_s * fraction
        stored_per_s = cost.stored_bytes * captured_per_s
        flops_per_s = cost.learner_flops * captured_per_s
        yield (
            f"| {draft.name} | {_bytes(cost.captured_bytes * captured_per_s)}/s | {_bytes(stored_per_s * 86400)} "
            f"| {_duration(BufferConfig().max_bytes / stored_per_s)} | {_two(flops_per_s / 1e12)} TFLOP/s "
            f"| {_two(flops_per_s / GPU_FLOPS_PER_S / UTILISATION)} |"
        )


def token_table(traffic: Traffic) -> Iterator[str]:
    """A row per family, for one token that is served and captured."""
    yield "| draft | weights a token meets | captured | stored | learner |"
    yield "|---|---|---|---|---|"
    for draft in drafts():
        cost, met = costs(draft, traffic), draft.once + draft.num_steps * draft.layer
        yield (
            f"| {draft.name} | {_two(met / 1e6)}M | {_bytes(cost.captured_bytes)} | {_bytes(cost.stored_bytes)} "
            f"| {_two(cost.learner_flops / 1e9)} GFLOP |"
        )


def traffic_table(traffic: Traffic) -> Iterator[str]:
    """Captured bytes per token with other settings of capture."""
    yield "| standalone draft, per token captured | captured | of the table above |"
    yield "|---|---|---|"
    (draft, *_), base = drafts(), costs(drafts()[0], traffic).captured_bytes
    others = {
        f"{traffic.top_k} probabilities, {traffic.num_speculative_tokens} draft tokens, tau {traffic.tau}": traffic,
        "8 probabilities a row": replace(traffic, top_k=8),
        "7 draft tokens, tau 3.5": replace(traffic, num_speculative_tokens=7, tau=3.5),
        "prompts of 4,000 tokens": replace(traffic, prompt_tokens=4000),
    }
    for name, other in others.items():
        captured_bytes = costs(draft, other).captured_bytes
        yield f"| {name} | {_bytes(captured_bytes)} | {_two(captured_bytes / base)} |"


TABLES = {
    "token": lambda: token_table(Traffic()),
    "thousand": lambda: fleet_table(1000, 1.0, Traffic()),
    "traffic": lambda: traffic_table(Traffic()),
    "fleet": lambda: fleet_table(1_000_000, 0.002, Traffic()),
}


def fill_tables(page: str) -> str:
    """The page with every table between `<!-- table NAME -->` and `<!-- end -->` recomputed."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n" + "\n".join(TABLES[match[2]]()) + f"\n{match[3]}"

    return re.sub(r"(<!-- table (\w+) -->).*?(<!-- end -->)", table, page, flags=re.DOTALL)


def _two(number: float) -> str:
    """Two significant digits: 0.0042, 0.42, 4.2, 42, 420."""
    # First to two digits, then to text: 9.96 becomes 10, not 10.0.
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.10f}".rstrip("0").rstrip(".")


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        # From 995 on, two digits would round to 1,000: the next unit.
        if number < 995:
            return f"{_two(number)} {unit}"
        number /= 1000
    return f"{_two(number)} TB"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{_two(seconds / size)} {unit}"
    return f"{_two(seconds)} seconds"


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
