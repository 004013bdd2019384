"""Serving benchmarks from made-up results of cells."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from redraft.eval.engine.sampling import Sampling
from redraft.eval.serving.load import Latency, LoadResult
from redraft.eval.serving.report import build_serving_report
from redraft.eval.serving.sweep import Cell, Ratios, Sweep, build_tables, plan

ACCEPTED = (0.6, 0.4, 0.3, 0.2, 0.1)
"""Acceptance of the first draft by position; n-grams have half of it."""

SAMPLING = Sampling(temperature=0.7, top_p=0.8, top_k=20)


def make_sweep(**changes: Any) -> Sweep:
    values: dict[str, Any] = {
        "drafts": ("runs/good/draft", "ngram"),
        "num_speculative_tokens": (3, 1, 5),
        "concurrency": (4, 1, 16),
        "input_tokens": 64,
        "data": "sonnet",
        "output_tokens": 64,
        "prompts_per_client": 2,
        "sampling": SAMPLING,
        "engine_has_ideal": False,
    }
    return Sweep(**{**values, **changes})


def make_load_result(
    tokens_per_s: float = 100.0, step_s: float = 0.01, **changes: Any
) -> LoadResult:
    latency = Latency(mean=1e5 / tokens_per_s, median=1e5 / tokens_per_s, p99=2e5 / tokens_per_s)
    values: dict[str, Any] = {
        "num_requests": 8,
        "duration_s": 5.0,
        "mean_input_tokens": 64.0,
        "num_output_tokens": 512,
        "tokens_per_s": tokens_per_s,
        "requests_per_s": 1.6,
        "ttft_ms": latency,
        "tpot_ms": latency,
        "e2e_ms": latency,
        "step_s": step_s,
        "tau": 1.0,
        "num_steps": 500,
        "acceptance_per_position": (),
    }
    return LoadResult(**{**values, **changes})


def step_s(concurrency: int, k: int) -> float:
    """A target step takes 10 ms plus 0.5 ms per row, a draft step 1 ms."""
    return 0.010 + 0.0005 * concurrency * (k + 1) + 0.001 * k


def serve(cell: Cell) -> LoadResult:
    """The result of a server with these step times."""
    b, k = cell.load.concurrency, cell.variant.num_speculative_tokens
    rates = tuple(rate * (0.5 if cell.variant.draft == "ngram" else 1.0) for rate in ACCEPTED[:k])
    tau = 1 + sum(rates)
    seconds = step_s(b, k)
    return make_load_result(
        b * tau / seconds,
        seconds,
        tau=tau,
        num_steps=round(512 / tau),
        acceptance_per_position=rates,
    )


def compare(cell: Cell) -> Ratios:
    """The ratios of equal passes, with an interval that is made up."""
    ratios = Ratios.from_passes([serve(cell)], [serve(cell.alone())])
    return replace(ratios, interval=(0.9 * ratios.speed, 1.1 * ratios.speed))


def make_serving_report(
    sweep: Sweep | None = None, mixed: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """The content of a serving.json; `mixed` are further drafts by name, with the configuration."""
    questions = plan(sweep or make_sweep())
    measured = {cell: serve(cell) for cells in questions.values() for cell in cells}
    facts: dict[str, Any] = {
        "target": "a target",
        "command": "redraft bench --target TARGET --draft DRAFT",
        "settings": {
            "draft": (sweep or make_sweep()).drafts[0],
            "num_speculative_tokens": 3,
            "concurrency": 4,
            "input_tokens": 64,
            "output_tokens": 64,
            "data": "sonnet",
            "repeats": 3,
            "sampling": asdict(SAMPLING),
            "penalties": {"repetition_penalty": 1.05},
            "draft_sample_method": "greedy",
        },
        "refused": [{"what": "good all accepted k=3", "reason": "no synthetic acceptance"}],
        "baseline": {
            "mode": "compiled",
            "tokens_s": 70.0,
            "threads": 1,
            "step_ms": 14.0,
            "limit_share": 0.8,
            "speeds": 1,
            "repeated": 0,
            "modes": {"compiled": 70.0, "eager": 60.0},
        },
        "ideal_source": "cost model",
        "environment": {"date": "2026-01-02", "processor": "an abacus"},
        "duration_s": 300.0,
    }
    configs = {
        "runs/good/draft": {"method": "draft_model", "model": "runs/good/draft"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        **(mixed or {}),
    }
    ratios = {cell: compare(cell) for cell in measured if cell.variant.draft}
    return build_serving_report(
        build_tables(questions, measured, ratios), configs, **{**facts, **changes}
    )
