"""The proof of a trained draft.

The draft is exported, forecast on held-out prompts, served in a real vLLM, and reported on.
"""

from __future__ import annotations

import functools
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from redraft.distill.data.samples import SampleStats
from redraft.distill.doctor.label_probe import label_probe
from redraft.distill.signal.sources import EndpointTarget
from redraft.distill.train.loop import TrainingCost
from redraft.distill.train.run_config import Prove
from redraft.distill.train.run_folder import RunFolder
from redraft.engine.counts import describe_contexts
from redraft.engine.lossless import Lossless, compare_lossless
from redraft.engine.machine import ENGINE_IS_CPU, engine_environment, environment
from redraft.engine.measure import Measurement
from redraft.engine.prompts import Prompt
from redraft.engine.server import read_runner
from redraft.engine.target_dtype import TargetDtype, default_target_dtype
from redraft.eval.forecast.greedy import (
    Continuation,
    Forecast,
    cut_continuation,
    greedy_continuations,
)
from redraft.eval.forecast.stored import StoredForecast, store_forecast
from redraft.eval.report.page import (
    domain_section,
    engine_section,
    offline_section,
    write_report,
)
from redraft.eval.serving.rounds import Plan, Results, keep_rounds, measure_servers
from redraft.files.checkpoint import load_causal_lm
from redraft.files.kept import compute_once
from redraft.files.target_folder import TargetFolder
from redraft.heads.family import Decoder

if TYPE_CHECKING:
    from redraft.distill.run.training_run import Run


WITH, WITHOUT = "with-draft", "without-draft"  # Names of the two servers.
DATA = ("conversations", "samples", "tokens", "labels", "labels_beyond", "share_beyond")
"""Fields of `SampleStats` in the report."""


def answer_prompts(run: Run) -> list[Continuation]:
    """Return the target's greedy answers to the held-out prompts, on which drafts are forecast.

    They are kept, so the target answers the prompts once for all runs that share them.
    """
    cfg, target, prompts, end_ids = run.cfg.prove, run.target, run.data.prompts, run.data.end_ids
    key = [
        target.files.fingerprint,
        str(target.model.dtype),
        cfg.max_tokens,
        cfg.num_speculative_tokens,
        end_ids,
    ]

    def keep(
        prompts: list[Prompt], compute: Callable[[], list[Continuation]]
    ) -> list[Continuation]:
        folder = cfg.reference or run.folder.folder
        return compute_once(folder, "answers", [*key, prompts], list[Continuation], compute)

    # A draft step at the last token of an answer still proposes up to this many tokens after it.
    beyond = cfg.num_speculative_tokens - 1
    if isinstance(run.signal, EndpointTarget):  # the target's weights are only on the server
        greedy, length = run.signal.greedy, cfg.max_tokens + beyond
        return keep(
            prompts,
            lambda: [
                cut_continuation(prompt, text, cfg.max_tokens, beyond, end_ids)
                for prompt, text in zip(
                    prompts, greedy([p.token_ids for p in prompts], length), strict=True
                )
            ],
        )
    return greedy_continuations(
        target.model,
        prompts,
        max_tokens=cfg.max_tokens,
        num_speculative_tokens=cfg.num_speculative_tokens,
        end_ids=end_ids,
        keep=keep,
        is_head=run.family.is_head,
    )


def describe_origin(run: Run) -> dict[str, Any]:
    folder, data, target = run.folder, run.data, run.target.files
    return {
        "command": sys.argv,
        "config": folder.config,
        "data_hash": data.hash,
        "data": str(data.stats),
        "date": data.date.isoformat(),
        "template_arguments": data.stats.chosen_arguments(),
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "target_lineage": target.lineage,
        "label_probe": label_probe(target.tokenizer, data.date),
        # If there are evaluations, use the last one and the last training line, because
        # `doctor.in_engine` reads tau there.
        "metrics": folder.metrics[-2:],
        "environment": environment(),
    }


def store(forecast: Forecast, run: Run) -> StoredForecast:
    """Return the forecast in the form that the provenance keeps, for comparisons with serving."""
    cfg = run.cfg.prove
    return store_forecast(
        forecast,
        run.data.prompts,
        num_speculative_tokens=cfg.num_speculative_tokens,
        max_tokens=cfg.max_tokens,
        end_ids=run.data.end_ids,
        dtype=_computed_in(run.target.model),
    )


def _computed_in(model: Any) -> str | None:
    """Return the dtype in which a target in these processes computes.

    Return None for a target on servers, which choose the dtype themselves.
    """
    # The layers of a target on servers are on `meta` here.
    if model is None or any(weight.is_meta for weight in model.parameters()):
        return None
    return str(model.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class EngineProof:
    with_draft: Measurement
    lossless: Lossless
    runner: Decoder
    """The vLLM model runner that served the draft."""


def leave_gpu(model: nn.Module, *views: Tensor) -> None:
    """Move a model, and views of its weights, to the CPU, because vLLM uses the whole GPU.

    A view left on the GPU would keep the memory allocated. Tensors on `meta` have no data to move.
    """
    for tensor in (*model.parameters(), *model.buffers(), *views):
        if not tensor.is_meta:
            tensor.data = tensor.data.cpu()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prove_in_engine(
    cfg: Prove,
    target: TargetFolder,
    speculative: Mapping[str, Any],
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    served: str | Path | None = None,
    dtype: TargetDtype | None = None,
) -> EngineProof:
    """Send the same prompts at temperature 0 to a vLLM with the draft and to one without it.

    Each server gets one round, which is enough to prove acceptance and answers; `redraft bench`
    measures speed. Logs go to `folder`. `speculative` is vLLM's speculative config without the
    number of tokens. `served` is the folder to serve with the draft if the draft's tensors are
    inside a copy of the target (MTP). By default, it is the target itself. `dtype` is the engine's
    dtype, by default the training dtype (`default_target_dtype`).

    Raises:
        ChildProcessError: the engine failed; the error has its message.
        ConnectionError: the server does not answer.
    """
    dtype = dtype or default_target_dtype(target, on_cpu=ENGINE_IS_CPU)
    load = cfg.concurrency
    plan = Plan(rounds=1, prompts={load: len(prompts)}, max_tokens=cfg.max_tokens, most_repeats=0)
    options: dict[str, Any] = {
        # The last block may extend past the answer by all of its draft tokens.
        "max_model_len": max(len(p.token_ids) for p in prompts)
        + cfg.max_tokens
        + cfg.num_speculative_tokens,
        "dtype": dtype,
        "extra_args": cfg.engine_args,
    }

    def measured(name: str, model: str | Path, config: Mapping[str, Any] | None) -> Results:
        return measure_servers(str(model), {name: config}, prompts, plan, folder, **options)

    config = {**speculative, "num_speculative_tokens": cfg.num_speculative_tokens}
    ours = measured(WITH, served or target.name, config)[WITH, load][0]
    key = [target.fingerprint, prompts, plan, cfg.engine_args, dtype, engine_environment()]
    alone = keep_rounds(cfg.reference or folder, key, lambda: measured(WITHOUT, target.name, None))[
        WITHOUT, load
    ][0]
    return EngineProof(
        with_draft=ours,
        lossless=compare_lossless(ours, alone, make_logits(target)),
        runner=read_runner(folder / f"vllm-{WITH}.log"),
    )


def make_logits(target: str | TargetFolder) -> Callable[[Sequence[int]], torch.Tensor]:
    """Return a function that returns the target's next-token logits, [V].

    The returned function loads the target at its first call. It is called only if two outputs
    differ, to distinguish a tie from an error.
    """
    load = functools.cache(lambda: load_causal_lm(target, torch.float32))

    @torch.no_grad()
    def logits(ids: Sequence[int]) -> torch.Tensor:
        output: torch.Tensor = load()(input_ids=torch.tensor([list(ids)])).logits[0, -1]
        return output

    return logits


def report(
    run: RunFolder,
    *,
    target: str,
    data: SampleStats,
    before: Forecast,
    after: Forecast,
    engine: EngineProof | None,
    cost: TrainingCost,
    started: float,
) -> Path:
    """Write report.json and report.html into the run's folder. Return the path of report.html."""
    sections: dict[str, Any] = {
        "target": target,
        "draft": str(run.folder / "draft"),
        "command": shlex.join(sys.argv),
        "offline": offline_section(before=before, after=after),
        "by_domain": domain_section(after, engine.with_draft if engine else None),
        "by_context": describe_contexts(after.by_context),
        "data": {name: getattr(data, name) for name in DATA},
        "train": vars(cost),
        "curves": run.metrics,
        "environment": environment(),
        "duration_s": round(time.perf_counter() - started, 1),
    }
    if engine:
        section = engine_section(engine.with_draft, engine.lossless, after.overall.tau)
        sections["engine"] = {**section, "decoder": "a real vLLM", "runner": engine.runner}
    return write_report(run.folder, sections)
