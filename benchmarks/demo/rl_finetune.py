"""The fine-tune case: how many labels an old and a new draft need on a fine-tuned target.

The small target learns C++, from headers that PyTorch ships. Both drafts are then trained on its
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.demo.fleet import distil_on
from redraft.distill.data.conversations import Conversation, split_held_out
from redraft.distill.data.samples import Sample
from redraft.distill.signal.parts import last_layers
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.optim import Optim
from redraft.engine.sampling import GREEDY, Sampling
from redraft.eval.forecast.greedy import Continuation, Forecast, forecast
from redraft.eval.intervals import estimate_tau_gain
from redraft.files.checkpoint import load_causal_lm
from redraft.files.progress import Progress
from redraft.files.target_folder import TargetFolder
from redraft.heads.families.eagle3 import Eagle3
from redraft.heads.target import Target

LINES = 24
"""Number of header lines per answer."""

OPTIM = Optim(lr=1e-3, schedule="constant", warmup_fraction=0.1)
"""Optimizer settings with a constant rate, so that each point of a curve equals the end of a
training run of that length.
"""

Answer = Callable[[Any, Sequence[Conversation], int, Sampling], list[Continuation]]
"""Function that returns a model's answers to the questions of a limited number of conversations."""

Curve = Sequence[tuple[int, float]]
"""(number of labels read so far, tau) at each point."""


def make_samples(answers: Sequence[Continuation]) -> list[Sample]:
    """Make samples whose labels are the answers."""
    samples = []
    for number, one in enumerate(answers):
        ids = np.array([*one.prompt.token_ids, *one.output_ids], np.int32)
        mask = np.arange(len(ids)) >= len(one.prompt.token_ids)
        samples.append(
            Sample(
                input_ids=ids, loss_mask=mask, conversation=str(number), domain=one.prompt.domain
            )
        )
    return samples


def read_headers() -> list[Conversation]:
    """Read conversations that ask for a part of a header."""
    root, found = Path(torch.__file__).parent / "include", list[Conversation]()
    for header in sorted((root / "c10").rglob("*.h")):
        lines = [line for line in header.read_text(errors="ignore").splitlines() if line.strip()]
        for first in range(0, len(lines) - LINES, LINES):
            question = (
                f"Write the C++ header `{header.relative_to(root)}`, part {first // LINES + 1}."
            )
            answer = "\n".join(lines[first : first + LINES])[:900]
            messages: Any = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            found.append({"messages": messages, "domain": "cpp"})
    return found


def fine_tune(target: TargetFolder, conversations: Sequence[Conversation], steps: int) -> Any:
    """Fine-tune the target for `steps` steps of 2,048 tokens on the conversations, in float32."""
    model = load_causal_lm(target.folder, torch.float32).train()
    texts = [
        target.tokenizer.apply_chat_template(one["messages"], tokenize=False)
        for one in conversations
    ]
    ids = [
        i for text in target.tokenizer(texts, add_special_tokens=False)["input_ids"] for i in text
    ]
    rows_NT = torch.tensor(ids[: len(ids) // 512 * 512]).view(-1, 512)
    order_N = torch.randperm(len(rows_NT), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    for step in Progress(range(steps), desc="fine-tune the target", unit="step"):
        ids_BT = rows_NT[order_N.roll(-4 * step)[:4]]
        optimizer.zero_grad()
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval().requires_grad_(False)


def compare_starts(
    old: Path, target: TargetFolder, answer: Answer, *, tuning: int, steps: int, prompts: int
) -> dict[str, Any]:
    """Return tau on a fine-tune by the number of labels that each draft has read.

    The drafts are the old draft unchanged, the old draft in training, and a new draft in training.
    """
    train, test = split_held_out(read_headers(), 0.15)
    model = fine_tune(target, train, tuning)
    texts = answer(model, test, prompts, GREEDY)
    samples = make_samples(answer(model, train, 4 * prompts, Sampling()))
    moved = replace(Target.from_model(model), has_moved=True)
    continued = Eagle3.load(old, moved)
    new = Eagle3(continued.config, moved, continued._draft_ids_W)
    new.init_from_layers(*last_layers(model, 1))
    signal = InProcessTarget(model, new.aux_layer_ids)
    curves, found = dict[str, list[tuple[int, float]]](), dict[str, list[Forecast]]()
    for name, draft in (("adapted", continued), ("new", new)):
        curves[name], found[name] = [], []
        for step, labels in enumerate(
            distil_on(samples, draft, model, name=name, steps=steps, optim=OPTIM, rows=2)
        ):
            if step % 4 == 0 or step == steps:
                found[name].append(forecast(draft, signal, texts, 3))
                curves[name].append((labels, found[name][-1].overall.tau))
    before, after = ([one.counts for one in found["adapted"][i].per_prompt] for i in (0, -1))
    gain = estimate_tau_gain(after, before)
    return {
        "tau_old": curves["adapted"][0][1],
        "tau_adapted": curves["adapted"][-1][1],
        "tau_new": curves["new"][-1][1],
        "gain": {"value": gain.value, "interval": gain.interval()},
        "curves": curves,
        "labels_to_same_tau_ratio": find_labels_ratio(curves["adapted"], curves["new"]),
    }


def find_labels_ratio(adapted: Curve, new: Curve) -> float | None:
    """Return the labels that the adapted draft needs for the last tau of the new one.

    The number is a share of the new draft's labels. Between two points, the curve is interpolated
    linearly. None if the adapted draft does not reach that tau.
    """
    labels_new, wanted = new[-1]
    labels_before, tau_before = adapted[0]
    for labels, tau in adapted:
        if tau >= wanted:
            share = (wanted - tau_before) / (tau - tau_before) if tau > tau_before else 0.0
            return (labels_before + share * (labels - labels_before)) / labels_new
        labels_before, tau_before = labels, tau
    return None
