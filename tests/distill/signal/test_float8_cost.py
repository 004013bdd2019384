"""The acceptance that a cache in float8 costs an EAGLE-3 head, by the forecast on held-out answers.

Prints the figures:

pytest -s tests/distill/signal/test_float8_cost.py
"""

from __future__ import annotations

import argparse
import ast
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample, data_hash
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.cache import CachedHiddenStates, HiddenDtype, HiddenStates
from redraft.distill.signal.shards import write_cache
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.objective import distill_loss
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.greedy import Continuation, Forecast, forecast, greedy_continuations
from redraft.eval.intervals import estimate_gain
from redraft.files.checkpoint import load_tokenizer
from redraft.heads.draft import Batch, ExactTarget
from redraft.heads.families import eagle3
from redraft.heads.target import Target

LAYERS = (2, 4, 7)
LENGTH, NUM_TEXTS = 128, 192
PROMPT, ANSWER, HELD_OUT = 24, 64, 96
STEPS, ROWS, SEEDS, TOKENS = 72, 8, (0, 1), 3


def make_samples(tokenizer: Any) -> list[Sample]:
    """Pieces of Python to train on."""
    ids = [
        i
        for module in (argparse, json, typing)
        for i in tokenizer(Path(module.__file__).read_text())["input_ids"]
    ]
    pieces = np.array(ids[: LENGTH * NUM_TEXTS], np.int32).reshape(NUM_TEXTS, LENGTH)
    mask = np.ones(LENGTH, bool)
    return [
        Sample(input_ids=i, loss_mask=mask, conversation=str(n), domain="code")
        for n, i in enumerate(pieces)
    ]


def make_answers(model: Any, tokenizer: Any) -> list[Continuation]:
    """The target's answers to pieces of another file."""
    ids = tokenizer(Path(ast.__file__).read_text())["input_ids"]
    starts = range(0, PROMPT * HELD_OUT, PROMPT)
    prompts = [Prompt(token_ids=ids[i : i + PROMPT], domain="code") for i in starts]
    return greedy_continuations(
        model, prompts, max_tokens=ANSWER, num_speculative_tokens=TOKENS, end_ids=()
    )


def batches(samples: list[Sample], seed: int) -> Iterator[Batch]:
    """STEPS batches, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        chosen = [samples[i] for i in rng.choice(len(samples), ROWS, replace=False)]
        yield next(PackedDataset(chosen, sequence_length=LENGTH).in_order(ROWS))


def train(
    model: Any, samples: list[Sample], source: CachedHiddenStates | None, seed: int
) -> eagle3.Eagle3:
    """A head after STEPS steps on `source`; a new one if there is none."""
    torch.manual_seed(seed)
    head = eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=LAYERS, num_steps=TOKENS, own_head=False),
        Target.from_model(model),
    )
    head.init_from_layers([model.base_model.layers[-1]], model.base_model.norm)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-3)
    for batch in batches(samples, seed) if source else ():
        signal = source(batch)
        num_rows = ROWS * LENGTH * TOKENS
        loss = distill_loss(
            head.draft_steps(batch, signal), batch, signal, Divergence(), scale=1 / num_rows
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
    return head.eval()


def count(found: Forecast) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Accepted tokens and drafts of every answer, [N, 2]."""
    return np.array(
        [(one.counts.num_accepted, one.counts.num_drafts) for one in found.per_prompt], np.float64
    )


def label_overlap(exact: Any, cached: Any, batch: Batch) -> float:
    """1 - TV of the target's distribution and the cache's, mean over a batch's tokens."""
    one, other = exact(batch).distribution, cached(batch).distribution
    assert isinstance(one, ExactTarget)
    assert isinstance(other, ExactTarget)
    p, q = (
        torch.softmax(known.hidden_BTD.float() @ known.head_VD.float().T, -1)
        for known in (one, other)
    )
    return float(torch.minimum(p, q).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_float8_costs_less_than_a_fiftieth_of_the_accepted_tokens(
    tiny_target: Path, tmp_path: Path
) -> None:
    model, tokenizer = (
        LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32),
        load_tokenizer(tiny_target),
    )
    samples, exact = (
        make_samples(tokenizer),
        InProcessTarget(model.eval().requires_grad_(False), LAYERS),
    )
    answers, caches = make_answers(model, tokenizer), {}
    head_VD, hidden_size = model.get_output_embeddings().weight.detach(), model.config.hidden_size
    names: tuple[HiddenDtype, ...] = ("bfloat16", "float8")
    for dtype in names:
        folder, content = (
            tmp_path / dtype,
            HiddenStates(layers=LAYERS, hidden_size=hidden_size, dtype=dtype),
        )
        write_cache(
            samples, exact, folder, content, target="t", sequence_length=LENGTH, batch_size=ROWS
        )
        caches[dtype] = CachedHiddenStates(
            folder, content, target="t", data=data_hash(samples), head_VD=head_VD
        )
        overlap = label_overlap(exact, caches[dtype], next(batches(samples, 0)))
        print(
            f"{dtype}: {content.bytes_per_row} bytes a token, 1 - TV to the exact target "
            f"{overlap:.4f}"
        )
    untrained = forecast(train(model, samples, None, 0), exact, answers, TOKENS).overall.tau
    print(f"untrained: tau {untrained:.3f}")
    counts = {dtype: np.zeros((HELD_OUT, 2)) for dtype in names}
    for seed in SEEDS:
        for dtype in names:
            found = forecast(train(model, samples, caches[dtype], seed), exact, answers, TOKENS)
            print(f"seed {seed}, {dtype}: tau {found.overall.tau:.3f}")
            counts[dtype] += count(found)
    both_N22 = np.stack([counts["float8"], counts["bfloat16"]], axis=1)
    gain = estimate_gain(both_N22[..., 0], both_N22[..., 1])
    low, high = gain.interval()
    accepted, drafts = counts["bfloat16"].sum(0)
    tau = 1 + accepted / drafts
    print(f"bfloat16: tau {tau:.3f}, float8 {tau + gain.value:.3f}: {low:+.3f} to {high:+.3f}")
    assert tau - 1 > 1.5 * (untrained - 1), "a useless head would lose nothing"
    assert gain.value > -0.02 * (tau - 1)
