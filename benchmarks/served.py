"""Compare the forecast with the engine under the target's own sampling.

The small target has filters in its generation_config; drafts are greedy and sampled.

The engine uses the target's own sampling, because the requests do not set any. The forecast is made
on the engine's answers, so the two differ only by the random draws in drafting and verification,
not by the text: by 0.5% with the default number of prompts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redraft.distill.data.conversations import load_conversations, split_held_out
from redraft.distill.data.samples import held_out_prompts
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.measure import Output, measure
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import Sampling, read_sampling
from redraft.engine.server import vllm_server
from redraft.eval.forecast.draft_source import SampleMethod
from redraft.eval.forecast.drafts import load_drafts
from redraft.eval.forecast.greedy import Continuation, generate_answers
from redraft.eval.forecast.teacher_forced import Forecastable, PromptRows, Protocol, evaluate_batch
from redraft.eval.intervals import estimate_gain
from redraft.files.checkpoint import load_causal_lm
from redraft.files.folder import GENERATION_CONFIG
from redraft.files.target_folder import TargetFolder
from redraft.heads.families.standalone import StandaloneDraft
from redraft.heads.target import LoadedTarget

SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
"""Sampling parameters of Qwen2.5."""

METHODS: Mapping[str, SampleMethod] = {"greedy": "greedy", "sampled": "probabilistic"}

NOISE = 0.35
"""Standard deviation of the noise on the draft's weights, relative to theirs. With it, a third of
the draft tokens is rejected.
"""


@dataclass(frozen=True, kw_only=True)
class ServedCase:
    """Sizes of the measurement."""

    target: Path = Path("tests/assets/tiny-target")
    num_prompts: int = 192
    max_tokens: int = 64
    num_speculative_tokens: int = 3
    seed: int = 0


def measure_served(case: ServedCase, folder: Path) -> dict[str, Any]:
    """Measure the forecasts' relative error in tau, with the target's filters and without."""
    target = make_target(case.target, folder / "target")
    draft = make_draft(case.target, folder / "draft", case.seed)
    _, held_out = split_held_out(load_conversations("stdlib"), 0.2)
    prompts = held_out_prompts(
        held_out, target.files.tokenizer, num_prompts=case.num_prompts, max_length=256
    )
    protocol = Protocol(
        # `forecast` passes the sampling in the target's folder.
        temperatures=(),
        num_speculative_tokens=(case.num_speculative_tokens,),
        max_tokens=case.max_tokens,
        end_ids=target.files.end_ids,
        seed=case.seed,
        batch_size=16,
        filters=read_sampling(target.files.folder),
    )
    report: dict[str, Any] = {}
    for name, method in METHODS.items():
        outputs = ask_engine(case, target, draft, method, prompts, folder / f"vllm-{name}.log")
        texts = continue_answers(target, prompts, outputs, protocol)
        (named,) = load_drafts([f"it={draft}"], target, method)
        assert named.forecast is not None
        with_filters = forecast(target, named.forecast, texts, protocol)
        # A forecast without filters also expects different text: answers drawn from all tokens.
        plain = replace(protocol, filters=Sampling(temperature=protocol.filters.temperature))
        texts_of_plain = generate_answers(
            target.model,
            prompts,
            max_tokens=case.max_tokens,
            num_speculative_tokens=case.num_speculative_tokens,
            end_ids=protocol.end_ids,
            sampling=plain.filters,
            seed=case.seed,
        )
        counts = [output.counts or AcceptanceCounts.zero() for output in outputs]
        report[name] = compare(counts, with_filters, case)
        without = compare(counts, forecast(target, named.forecast, texts_of_plain, plain), case)
        report[name]["ignoring_filters"] = {
            key: without[key] for key in ("tau_forecast", "error", "error_interval")
        }
    return {f"error_{name}": abs(report[name]["error"]) for name in METHODS} | {
        "sampling": SAMPLING,
        **report,
    }


def make_target(source: Path, folder: Path) -> LoadedTarget:
    """Copy the target, and set its sampling."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = folder / GENERATION_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | SAMPLING | {"do_sample": True}))
    model = load_causal_lm(folder).float().eval()
    return LoadedTarget(files=TargetFolder.open(folder), model=model)


def make_draft(source: Path, folder: Path, seed: int) -> Path:
    """Copy the target with noise on its weights.

    This gives a draft for real text without training.
    """
    model = load_causal_lm(source).float()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data += NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
    StandaloneDraft(model).export(folder, tokenizer=TargetFolder.open(source).tokenizer)
    return folder


def ask_engine(
    case: ServedCase,
    target: LoadedTarget,
    draft: Path,
    method: SampleMethod,
    prompts: Sequence[Prompt],
    log: Path,
) -> list[Output]:
    """Return the engine's answers and counts, sampled as the target's folder says."""
    config = {
        "method": "draft_model",
        "model": str(draft.absolute()),
        "num_speculative_tokens": case.num_speculative_tokens,
        "draft_sample_method": method,
    }
    with vllm_server(
        target.files.name,
        log=log,
        speculative_config=config,
        max_model_len=512,
        max_num_seqs=16,
        dtype="float32",  # as the forecast, which is compared with these counts
    ) as server:
        return measure(
            server, prompts, max_tokens=case.max_tokens, sampling=None, concurrency=16
        ).outputs


def continue_answers(
    target: LoadedTarget, prompts: Sequence[Prompt], outputs: Sequence[Output], protocol: Protocol
) -> list[Continuation]:
    """Return the engine's answers, and the tokens after their ends, for the last block's drafts."""
    num_beyond, texts = protocol.most_tokens - 1, []
    for prompt, output in zip(prompts, outputs, strict=True):
        whole = Prompt(token_ids=[*prompt.token_ids, *output.token_ids])
        (rest,) = generate_answers(
            target.model,
            [whole],
            max_tokens=num_beyond,
            num_speculative_tokens=1,
            # The engine's last block drafted beyond an end token, so the text must continue there.
            end_ids=(),
            sampling=protocol.filters,
            seed=protocol.seed,
        )
        texts.append(
            Continuation(prompt=prompt, output_ids=output.token_ids, beyond_ids=rest.output_ids)
        )
    return texts


def forecast(
    target: LoadedTarget, draft: Forecastable, texts: Sequence[Continuation], protocol: Protocol
) -> list[PromptRows]:
    signal, rows = InProcessTarget(target.model, []), []
    for first in range(0, len(texts), protocol.batch_size):
        batch = texts[first : first + protocol.batch_size]
        found = evaluate_batch(
            batch, signal, {"it": draft}, read_sampling(target.files.folder).temperature, protocol
        )
        rows += [row["it"] for row in found]
    return rows


def compare(
    counts: Sequence[AcceptanceCounts], rows: Sequence[PromptRows], case: ServedCase
) -> dict[str, Any]:
    """Compare forecast and engine, with the 95% interval of the error over prompts."""
    expected = [row.counts[case.num_speculative_tokens] for row in rows]
    # Column 0 is the forecast and column 1 the engine, on the same prompts, so the gain is the
    # forecast's error in tau.
    over_N2 = np.array(
        [(e.num_accepted, c.num_accepted) for e, c in zip(expected, counts, strict=True)], float
    )
    under_N2 = np.array(
        [(e.num_drafts, c.num_drafts) for e, c in zip(expected, counts, strict=True)], float
    )
    tau_forecast, tau_engine = (1 + over_N2.sum(0) / under_N2.sum(0)).tolist()
    low, high = estimate_gain(over_N2, under_N2).interval()
    return {
        "tau_forecast": round(tau_forecast, 4),
        "tau_engine": round(tau_engine, 4),
        "error": round(tau_forecast / tau_engine - 1, 5),
        "error_interval": [round(low / tau_engine, 5), round(high / tau_engine, 5)],
        "num_drafts": int(under_N2[:, 1].sum()),
    }
