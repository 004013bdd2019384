"""The proof of a trained draft: exported, forecast on held-out prompts, served by a real vLLM with and without it."""

from __future__ import annotations

import functools
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from distill.label_probe import label_probe
from distill.loop import LoadedData, Trained
from distill.run import Run
from distill.signals import EndpointTarget
from distill.train import Distillation
from eval.engine import Lossless, Measurement, compare_lossless, measure, vllm_server
from eval.forecast import Continuation, Forecast, SignalFunction, cut_continuation, forecast, greedy_continuations
from eval.kept import kept
from eval.prompts import Prompt
from eval.reference import measure_by_reference
from eval.report import domain_section, engine_section, environment, offline_section, served_on, write_report
from heads.artifact import fingerprint, publish
from heads.checkpoint import load_causal_lm, load_tokenizer, model_folder
from heads.draft import Draft

MAX_DRAFT_TOKENS = 128
"""What vLLM's rejection sampler takes of one request in one step."""


@dataclass(frozen=True, kw_only=True)
class Prove:
    engine: bool = True
    """Serve the draft in a real vLLM beside its target, and serve the target alone, when training is done."""
    ce_baseline: bool = False
    """Train the same draft with plain cross-entropy on the text for as many steps, to compare with."""
    num_speculative_tokens: int = 4
    """Tokens drafted at a time, in held-out metrics, forecast and engine."""
    max_tokens: int = 128
    """Longest answer to a held-out prompt."""
    concurrency: int = 4
    """Requests the engine serves at a time."""
    engine_args: tuple[str, ...] = ()
    """Passed through to vLLM, e.g. --tensor-parallel-size 8."""
    reference: Path | None = None
    """Folder that keeps what depends on target and prompts alone (its answers, the engine's measurement without a
    draft) for several runs to share; unset: the run's own."""

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "max_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"--prove.{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 1")


class Judge:
    """Forecasts drafts on held-out prompts, which the target answers once."""

    def __init__(self, cfg: Prove, name: str, target: Any, signal: SignalFunction, data: LoadedData, run: Run) -> None:
        """`name`: the folder or hub name of `target`; `signal` is what the drafts are forecast with."""
        self.cfg, self.signal = cfg, signal
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.continuations = kept(
            cfg.reference or run.folder,
            "answers",
            [fingerprint(model_folder(name)), data.prompts, cfg.max_tokens, cfg.num_speculative_tokens, data.end_ids],
            list[Continuation],
            lambda: self._answers(target, data.prompts, data.end_ids),
        )

    def _answers(self, target: Any, prompts: Sequence[Prompt], end_ids: Sequence[int]) -> list[Continuation]:
        beyond = self.cfg.num_speculative_tokens - 1
        if isinstance(self.signal, EndpointTarget):  # the target is on the server only
            texts = self.signal.greedy([prompt.token_ids for prompt in prompts], self.cfg.max_tokens + beyond)
            return [
                cut_continuation(prompt, text, self.cfg.max_tokens, beyond, end_ids)
                for prompt, text in zip(prompts, texts, strict=True)
            ]
        return greedy_continuations(
            target,
            prompts,
            max_tokens=self.cfg.max_tokens,
            num_speculative_tokens=self.cfg.num_speculative_tokens,
            end_ids=end_ids,
        )

    def forecast(self, draft: nn.Module, signal: SignalFunction | None = None) -> Forecast:
        """`signal`: where the draft reads more of the target than others do."""
        draft.to(self.device).eval()
        return forecast(
            cast(Draft, draft),
            signal or self.signal,
            self.continuations,
            self.cfg.num_speculative_tokens,
            self.device,
        )


def check_num_tokens(num_speculative_tokens: int, num_steps: int) -> None:
    """Return where an engine can serve a head of `num_steps` draft steps with so many tokens.

    Raises: ValueError.
    """
    if num_steps > MAX_DRAFT_TOKENS:
        raise ValueError(f"a head of {num_steps} draft steps: vLLM verifies at most {MAX_DRAFT_TOKENS} draft tokens")
    if not 1 <= num_speculative_tokens <= num_steps:
        raise ValueError(
            f"{num_speculative_tokens} draft tokens asked of a head that learns {num_steps}: lower "
            "--prove.num-speculative-tokens or let the head learn more"
        )


Write = Callable[[Mapping[str, Tensor], Path], None]
"""Writes a draft's weights, whole, into a folder as the engine loads them."""


def export_draft(
    distillation: Distillation, run: Run, data: LoadedData, target: str, write: Write, name: str = "draft"
) -> Path:
    """The published folder `name` of the run: what `write` made of the draft's weights, with its provenance."""
    folder = run.folder / name
    weights = distillation.weights()
    if distillation.accelerator.is_main_process:
        provenance = {
            "command": sys.argv,
            "config": run.config,
            "data_hash": data.hash,
            "data": str(data.stats),
            "target": target,
            "target_fingerprint": fingerprint(model_folder(target)),
            "label_probe": label_probe(load_tokenizer(target)),
            "metrics": run.metrics[-2:],
            "environment": environment(),
        }
        publish(folder, lambda partial: write(weights, partial), provenance, overwrite=True)
    distillation.accelerator.wait_for_everyone()
    return folder


@dataclass(frozen=True, kw_only=True)
class EngineProof:
    with_draft: Measurement
    without_draft: Measurement
    lossless: Lossless
    decoder: str = "a real vLLM"
    """What served the draft."""


def leave_gpu(*models: nn.Module) -> None:
    """Take these to the CPU: the engine wants the GPU for itself. What is on `meta` stays there."""
    for tensor in itertools.chain.from_iterable((*model.parameters(), *model.buffers()) for model in models):
        if not tensor.is_meta:
            tensor.data = tensor.data.cpu()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prove_in_engine(
    cfg: Prove,
    target: str,
    speculative: Mapping[str, Any],
    prompts: Sequence[Prompt],
    folder: Path,
    served: str | Path | None = None,
) -> EngineProof:
    """The same prompts at temperature 0 through a vLLM with the draft and one without; logs go to `folder`.

    `speculative`: vLLM's speculative config but for the number of tokens. `served`: the folder that is served with the
    draft where it is not the target's own, because the draft's tensors lie in it.

    Raises: ChildProcessError with the engine's own message; ConnectionError.
    """

    def measured(name: str, model: str | Path, config: Mapping[str, Any] | None) -> Measurement:
        with vllm_server(
            model,
            log=folder / f"vllm-{name}-draft.log",
            speculative_config=config,
            max_model_len=max(len(p.token_ids) for p in prompts) + cfg.max_tokens + cfg.num_speculative_tokens,
            extra_args=cfg.engine_args,
        ) as server:
            return measure(server, prompts, max_tokens=cfg.max_tokens, concurrency=cfg.concurrency)

    with_draft = measured(
        "with", served or target, {**speculative, "num_speculative_tokens": cfg.num_speculative_tokens}
    )
    without_draft = kept(
        cfg.reference or folder,
        "without-draft",
        [fingerprint(model_folder(target)), prompts, cfg.max_tokens, cfg.concurrency, cfg.engine_args, served_on()],
        Measurement,
        lambda: measured("without", target, None),
    )
    return EngineProof(
        with_draft=with_draft,
        without_draft=without_draft,
        lossless=compare_lossless(with_draft, without_draft, _logits_of(target)),
    )


def prove_by_reference(cfg: Prove, model: Any, head: Any, continuations: Sequence[Continuation]) -> EngineProof:
    """The same in this process, for a head that vLLM has no proposer for."""
    with_draft, without_draft = (
        measure_by_reference(model, draft, continuations, cfg.num_speculative_tokens) for draft in (head, None)
    )
    return EngineProof(
        with_draft=with_draft,
        without_draft=without_draft,
        lossless=compare_lossless(with_draft, without_draft),
        decoder="the reference decoder, for vLLM has no proposer for this head,",
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
        "command": shlex.join(sys.argv),
        "offline": offline_section(before=before, after=after, ce_baseline=ce_baseline),
        "by_domain": domain_section(after, engine.with_draft if engine else None),
        "train": vars(trained),
        "curves": run.metrics,
        "environment": environment(),
        "duration_s": round(time.perf_counter() - started, 1),
    }
    if engine:
        section = engine_section(engine.with_draft, engine.without_draft, engine.lossless, after)
        sections["engine"] = {**section, "decoder": engine.decoder}
    return write_report(run.folder, sections)
