"""What training labels of a conversation that never changes, to compare with what is served now.

A chat template that was edited, another tokenizer, or a loss mask that is shifted by a token: the draft learned other
rows than it is asked for, and nothing of it shows in its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distill.data import Conversation
from distill.samples import build_samples
from heads.finding import Finding

PROBE: Conversation = {
    "messages": [
        {"role": "user", "content": "Name three rivers."},
        {"role": "assistant", "content": "The Nile, the Rhine and the Amazon."},
    ],
    "domain": "all",
}

MAX_TOKENS = 4096
"""More than any template and tokenizer make of the probe."""


def label_probe(tokenizer: Any) -> dict[str, list[int]] | None:
    """`input_ids` of the probe and `labels`, the positions that training learns from; None without a chat template."""
    if tokenizer.chat_template is None:
        return None
    (sample,), _ = build_samples([PROBE], tokenizer, max_length=MAX_TOKENS, progress=False)
    return {"input_ids": sample.input_ids.tolist(), "labels": sample.loss_mask.nonzero()[0].tolist()}


def compare_probes(trained: Mapping[str, Sequence[int]], served: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """How what training recorded differs from what the served template and tokenizer make of the same conversation."""
    ids, served_ids = list(trained["input_ids"]), list(served["input_ids"])
    labels, served_labels = list(trained["labels"]), list(served["labels"])
    if ids != served_ids:
        position = next((i for i, (a, b) in enumerate(zip(ids, served_ids, strict=False)) if a != b), len(ids))
        yield Finding(
            f"the chat template or tokenizer is not the one trained with: the probe differs from token {position} on",
            "serve with the chat template of training, or train the draft again with the one that is served",
        )
    elif labels != served_labels:
        by = labels[0] - served_labels[0] if labels else 0
        side = f"begin {abs(by)} tokens {'late' if by > 0 else 'early'}" if by else "cover other tokens"
        yield Finding(
            f"the loss mask of training is shifted: its labels {side} (positions {_range(labels)} of the probe, "
            f"served are {_range(served_labels)})",
            "train again with labels from the first token that the assistant writes to its end of turn",
        )


def _range(positions: Sequence[int]) -> str:
    return f"{positions[0]} to {positions[-1]}" if positions else "none"
