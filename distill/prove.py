"""The proof of a trained draft: exported, forecast on held-out prompts, served by a real vLLM with and without it, reported."""

from __future__ import annotations

import functools
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from distill.run import Run
from eval.engine import Lossless, Measurement, compare_lossless, measure, vllm_server
from eval.forecast import Continuation, Forecast, forecast, greedy_continuations
from eval.prompts import Prompt
from heads.artifact import publish
from heads.checkpoint import load_causal_lm
from heads.draft import Batch, Draft, TargetSignal


@dataclass(frozen=True, kw_only=True)
class Prove:
    engine: bool = True
    """Serve the draft in a real vLLM beside its target, and serve the target alone, when training is done."""
    ce_baseline: bool = False
    """Train the same draft with plain cross-entropy on the text for as many steps, to compare with."""
    num_speculative_tokens: int = 4
    max_tokens: int = 128
    """Longest answer to a prompt."""
    concurrency: int = 4
    """Requests the engine serves at a time."""
    engine_args: tuple[str, ...] = ()
    """Passed through to vLLM, e.g. --tensor-parallel-size 8."""


class Judge:
    """Forecasts drafts on one set of held-out prompts, which the target answers once."""

    def __init__(
        self, cfg: Prove, target: Any, signal: Callable[[Batch], TargetSignal], prompts: Sequence[Prompt], end_id: int
    ) -> None:
        self.cfg, self.signal, self.prompts = cfg, signal, prompts
        self.device = target.device
        self.continuations: list[Continuation] = greedy_continuations(
            target,
            prompts,
            max_tokens=cfg.max_tokens,
            num_speculative_tokens=cfg.num_speculative_tokens,
            end_ids=[end_id],
        )

    def forecast(self, draft: Draft) -> Forecast:
        return forecast(draft, self.signal, self.continuations, self.cfg.num_speculative_tokens, self.device)


@dataclass(frozen=True, kw_only=True)
class EngineProof:
    with_draft: Measurement
    without_draft: Measurement
    lossless: Lossless


def prove_in_engine(
    cfg: Prove, target: str, speculative_config: dict[str, Any], prompts: Sequence[Prompt], folder: Path
) -> EngineProof:
    """The same prompts at temperature 0 through a vLLM with the draft and one without.

    Raises: ChildProcessError with the engine's own message; ConnectionError.
    """
    max_model_len = max(len(p.token_ids) for p in prompts) + cfg.max_tokens + cfg.num_speculative_tokens
    measured = []
    for name, config in (("with", speculative_config), ("without", None)):
        with vllm_server(
            target,
            log=folder / f"vllm-{name}-draft.log",
            speculative_config=config,
            max_model_len=max_model_len,
            extra_args=cfg.engine_args,
        ) as server:
            measured.append(measure(server, prompts, max_tokens=cfg.max_tokens, concurrency=cfg.concurrency))
    with_draft, without_draft = measured
    return EngineProof(
        with_draft=with_draft,
        without_draft=without_draft,
        lossless=compare_lossless(with_draft, without_draft, _logits_of(target)),
    )


def _logits_of(target: str) -> Callable[[Sequence[int]], torch.Tensor]:
    """The target's next-token logits; loaded only when two outputs differ and a tie has to be told from an error."""
    load = functools.cache(lambda: load_causal_lm(target, torch.float32))

    @torch.no_grad()
    def logits(ids: Sequence[int]) -> torch.Tensor:
        output: torch.Tensor = load()(input_ids=torch.tensor([list(ids)])).logits[0, -1]
        return output

    return logits
