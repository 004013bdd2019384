"""Judge heads on held-out questions, with redraft's forecast and in vLLM, and keep every result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.distill.data.conversations import load_conversations, split_held_out
from redraft.distill.data.samples import held_out_prompts
from redraft.distill.run.inputs import load_target
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.run_config import Signal
from redraft.engine.prompts import Prompt
from redraft.engine.target_dtype import open_target
from redraft.eval.forecast.drafts import NamedDraft, load_drafts
from redraft.eval.forecast.teacher_forced import Protocol, forecast_drafts
from redraft.eval.served import EngineOptions, serve_and_count
from redraft.heads.target import LoadedTarget

Counts = NDArray[np.float64]
"""[Q, 2]: accepted draft tokens and drafts by question."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The target's greedy answers to questions that no course has trained on."""

    target: str
    data: str
    held_out: float
    num_questions: int
    max_tokens: int
    tokens: int
    """Number of draft tokens per step."""
    folder: Path

    @cached_property
    def opened(self) -> LoadedTarget:
        files = open_target(self.target, on_cpu=True)
        model = load_target(files, Signal(), torch.device("cpu"))
        return LoadedTarget(files=files, model=model)

    @cached_property
    def prompts(self) -> list[Prompt]:
        _, held_out = split_held_out(load_conversations(self.data), self.held_out)
        tokenizer = self.opened.files.tokenizer
        return held_out_prompts(
            held_out, tokenizer, num_prompts=self.num_questions, max_length=1024
        )

    @cached_property
    def protocol(self) -> Protocol:
        return Protocol(
            temperatures=(0.0,),
            num_speculative_tokens=(self.tokens,),
            max_tokens=self.max_tokens,
            end_ids=self.opened.files.end_ids,
            seed=0,
            batch_size=8,
        )

    def _load(self, heads: Sequence[Path]) -> list[NamedDraft]:
        named = [f"{number}={head}" for number, head in enumerate(heads)]
        return load_drafts(named, self.opened, "greedy")

    def forecast(self, heads: Sequence[Path]) -> list[Counts]:
        """Return the expected counts of every head; one pass of the target serves all of them."""
        drafts = {draft.name: draft.forecast for draft in self._load(heads)}
        forecasts = {name: forecast for name, forecast in drafts.items() if forecast}
        layers = sorted({layer for each in forecasts.values() for layer in each.aux_layer_ids})
        rows = forecast_drafts(
            self.opened.model,
            self.opened.files.fingerprint,
            InProcessTarget(self.opened.model, layers),
            forecasts,
            self.prompts,
            self.protocol,
            self.folder,
        )[0.0]
        return [
            np.array(
                [
                    (
                        row[name].counts[self.tokens].num_accepted,
                        row[name].counts[self.tokens].num_drafts,
                    )
                    for row in rows
                ],
                np.float64,
            )
            for name in forecasts
        ]

    def serve(self, head: Path) -> Counts:
        """Return the counts of a head in vLLM."""
        (draft,) = self._load([head])
        (counts,) = serve_and_count(
            self.opened,
            draft,
            self.tokens,
            self.prompts,
            self.protocol,
            EngineOptions(),
            self.folder,
        )
        return np.array([(each.num_accepted, each.num_drafts) for each in counts], np.float64)
