"""The training labels of a fixed conversation, recorded for a later comparison with serving.

If the chat template or the tokenizer has changed, or the loss mask is shifted by one token, the
draft has learned rows other than those that it drafts. The weights do not show this.
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redraft.distill.data.conversations import Conversation
from redraft.distill.data.samples import build_samples
from redraft.heads.doctor.pair import Finding

PROBE: Conversation = {
    "messages": [
        {"role": "user", "content": "Name three rivers."},
        {"role": "assistant", "content": "The Nile, the Rhine and the Amazon."},
    ],
    "domain": "all",
}

MAX_TOKENS = 4096  # Larger than the probe's length with any template and tokenizer.


def label_probe(tokenizer: Any, day: datetime.date | None = None) -> dict[str, list[int]] | None:
    """Return the probe's `input_ids`, and `labels`, the positions of its training labels.

    Return None if there is no chat template, or if it does not render the probe. A template that
    contains the date uses `day`, which is then required.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        (sample,), _ = build_samples(
            [PROBE], tokenizer, max_length=MAX_TOKENS, day=day, progress=False
        )
    except ValueError:  # e.g. a template that needs a system prompt
        return None
    return {
        "input_ids": sample.input_ids.tolist(),
        "labels": sample.loss_mask.nonzero()[0].tolist(),
    }


def compare_probes(
    trained: Mapping[str, Sequence[int]], served: Mapping[str, Sequence[int]]
) -> Iterator[Finding]:
    ids, served_ids = list(trained["input_ids"]), list(served["input_ids"])
    labels, served_labels = list(trained["labels"]), list(served["labels"])
    if ids != served_ids:
        position = next(
            (i for i, (a, b) in enumerate(zip(ids, served_ids, strict=False)) if a != b), len(ids)
        )
        yield Finding(
            f"the chat template or tokenizer is not the one used in training: "
            f"the probe differs from token {position} on",
            "serve with the chat template used in training, or train the draft again with "
            "the served one",
        )
    elif labels != served_labels:
        # E.g. if labels were recorded from position 12 and are served from 11, then by = 1: one
        # token late.
        by = labels[0] - served_labels[0] if labels else 0
        side = (
            f"begin {abs(by)} tokens {'late' if by > 0 else 'early'}"
            if by
            else "cover other tokens"
        )
        yield Finding(
            f"the loss mask used in training is shifted: its labels {side} (positions "
            f"{_range(labels)} of the probe, but {_range(served_labels)} as served)",
            "train again with labels from the first token that the assistant writes up to and "
            "including its end of turn",
        )


def _range(positions: Sequence[int]) -> str:
    return f"{positions[0]} to {positions[-1]}" if positions else "none"
