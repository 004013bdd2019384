"""The proof of a trained draft: exported, forecast on held-out prompts, served by a real vLLM with and without it."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from distill.loop import LoadedData, Trained
from distill.run import Run
from distill.signals import EndpointTarget
from distill.train import Distillation
from eval.engine import Lossless, Measurement, compare_lossless, measure, vllm_server
from eval.forecast import Forecast, SignalFunction, cut_continuation, forecast, greedy_continuations
from eval.prompts import Prompt
from eval.report import domain_section, engine_section, environment, offline_section, write_report
from heads.artifact import fingerprint, publish
from heads.checkpoint import load_causal_lm, model_folder
from heads.draft import Draft
from heads.standalone import StandaloneDraft


@dataclass(frozen=True, kw_only=True)
class Prove:
    engine: bool = True
    """Serve the draft in a real vLLM beside its target, and serve the target alone, when training is done."""
    ce_baseline: bool = False
    """Train the same draft with plain cross-entropy on the text for as many steps, to compare with."""
    num_speculative_tokens: int = 4
    max_tokens: int = 128
    """Longest answer to a held-out prompt."""
    concurrency: int = 4
    """Requests the engine serves at a time."""
    engine_args: tuple[str, ...] = ()
    """Passed through to vLLM, e.g. --tensor-parallel-size 8."""


class Judge:
    """Forecasts drafts on held-out prompts, which the target answers once."""

    def __init__(
        self, cfg: Prove, target: Any, signal: SignalFunction, prompts: Sequence[Prompt], end_ids: Sequence[int]
    ) -> None:
        self.cfg, self.signal = cfg, signal
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        beyond = cfg.num_speculative_tokens - 1
        if isinstance(signal, EndpointTarget):  # the target is on the server only
            texts = signal.greedy([prompt.token_ids for prompt in prompts], cfg.max_tokens + beyond)
            self.continuations = [
                cut_continuation(prompt, text, cfg.max_tokens, beyond, end_ids)
                for prompt, text in zip(prompts, texts, strict=True)
            ]
            return
        self.continuations = greedy_continuations(
            target,
            prompts,
            max_tokens=cfg.max_tokens,
            num_speculative_tokens=cfg.num_speculative_tokens,
            end_ids=end_ids,
        )

    def forecast(self, draft: nn.Module) -> Forecast:
        draft.to(self.device).eval()
        return forecast(
            cast(Draft, draft), self.signal, self.continuations, self.cfg.num_speculative_tokens, self.device
        )


def export_draft(distillation: Distillation, run: Run, tokenizer: Any, data: LoadedData, target: str) -> Path:
    """The folder of the published draft, in the target's dtype: what vLLM and transformers load."""
    folder = run.folder / "draft"
    state = distillation.accelerator.get_state_dict(
        distillation.module
    )  # whole, whatever shards it; all ranks take part
    if distillation.accelerator.is_main_process:
        draft = cast(StandaloneDraft, distillation.draft)
        weights = {name.removeprefix("draft.model."): tensor for name, tensor in state.items()}
        provenance = {
            "command": sys.argv,
            "config": run.config,
            "data_hash": data.hash,
            "data": str(data.stats),
            "target": target,
            "target_fingerprint": fingerprint(model_folder(target)),
            "metrics": run.metrics[-2:],
            "environment": environment(),
        }
        publish(
            folder,
            lambda partial: draft.export(partial, tokenizer, dtype=torch.bfloat16, weights=weights),
            provenance,
            overwrite=True,
        )
    distillation.accelerator.wait_for_everyone()
    return folder


@dataclass(frozen=True, kw_only=True)
class EngineProof:
    with_draft: Measurement
    without_draft: Measurement
    lossless: Lossless


def prove_in_engine(cfg: Prove, target: str, draft: Path, prompts: Sequence[Prompt], logs: Path) -> EngineProof:
    """The same prompts at temperature 0 through a vLLM with the draft and one without.

    Raises: ChildProcessError with the engine's own message; ConnectionError.
    """
    speculative = {
        "method": "draft_model",
        "model": str(draft.absolute()),
        "num_speculative_tokens": cfg.num_speculative_tokens,
    }
    max_model_len = max(len(p.token_ids) for p in prompts) + cfg.max_tokens + cfg.num_speculative_tokens
    measured = []
    for name, config in (("with", speculative), ("without", None)):
        with vllm_server(
            target,
            log=logs / f"vllm-{name}-draft.log",
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


def report(
    run: Run,
    *,
    target: str,
    before: Forecast,
    after: Forecast,
    ce_baseline: Forecast | None,
    engine: EngineProof | None,
    trained: Trained,
    started: float,
) -> Path:
    """Write report.json and report.html into the run's folder; the path of the latter."""
    sections: dict[str, Any] = {
        "target": target,
        "draft": str(run.folder / "draft"),
        "command": " ".join(sys.argv),
        "offline": offline_section(before=before, after=after, ce_baseline=ce_baseline),
        "by_domain": domain_section(after, engine.with_draft if engine else None),
        "train": vars(trained),
        "curves": run.metrics,
        "environment": environment(),
        "duration_s": round(time.perf_counter() - started, 1),
    }
    if engine:
        sections["engine"] = engine_section(engine.with_draft, engine.without_draft, engine.lossless, after)
    return write_report(run.folder, sections)
