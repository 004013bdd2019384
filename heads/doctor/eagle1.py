"""Checks of an EAGLE-1 head, which borrows embeddings and output head of the target."""

from __future__ import annotations

from functools import partial

from redraft.heads.doctor import shared
from redraft.heads.doctor.pair import Check

CHECKS: tuple[Check, ...] = (
    *shared.LLAMA_LAYER,
    partial(shared.shared_weights, borrowed=(shared.EMBEDDINGS, shared.HEAD)),
    shared.fc_bias,
)
