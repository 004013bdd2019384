"""Serving benchmarks as they come out of cells that nobody had to wait for."""

from __future__ import annotations

from typing import Any

from eval.load import Latency, Served
from eval.serving_bench import Cell, Sweep, plan, tables
from eval.serving_report import serving_report

ACCEPTED = (0.6, 0.4, 0.3, 0.2, 0.1)
"""Of the first draft, by position."""


def make_sweep(**changes: Any) -> Sweep:
    values: dict[str, Any] = {
        "drafts": ("runs/good/draft", "ngram"),
        "num_speculative_tokens": (3, 1, 5),
        "concurrency": (4, 1, 16),
        "request_rates": (2.0, 8.0),
        "input_tokens": (64, 256),
        "data": ("sonnet", "random"),
        "quantizations": ("fp8",),
        "output_tokens": 64,
        "prompts_per_client": 2,
        "engine_has_ideal": False,
    }
    return Sweep(**{**values, **changes})


def make_served(tokens_per_s: float = 100.0, step_s: float = 0.01, **changes: Any) -> Served:
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
    return Served(**{**values, **changes})


def step_s(concurrency: int, k: int) -> float:
    """A target step takes 10 ms and 0.5 ms a row, a draft step 1 ms."""
    return 0.010 + 0.0005 * concurrency * (k + 1) + 0.001 * k


def serve(cell: Cell) -> Served:
    """What a server with these step times would have shown."""
    b, k = cell.load.concurrency or 4, cell.variant.num_speculative_tokens
    rates = tuple(rate * (0.5 if cell.variant.draft == "ngram" else 1.0) for rate in ACCEPTED[:k])
    tau = 1 + sum(rates)
    seconds = step_s(b, k)
    return make_served(
        b * tau / seconds,
        seconds,
        tau=tau,
        num_steps=round(512 / tau),
        acceptance_per_position=rates,
    )


def make_serving_report(sweep: Sweep | None = None, **changes: Any) -> dict[str, Any]:
    questions = plan(sweep or make_sweep())
    measured = {cell: serve(cell) for cells in questions.values() for cell in cells if not cell.variant.quantization}
    facts: dict[str, Any] = {
        "target": "a target",
        "command": "redraft bench --preset demo",
        "settings": {
            "draft": (sweep or make_sweep()).drafts[0],
            "num_speculative_tokens": 3,
            "concurrency": 4,
            "input_tokens": 64,
            "output_tokens": 64,
            "data": "sonnet",
            "repeats": 1,
        },
        "refused": [{"what": "good in fp8 k=3", "reason": "fp8 quantization is currently not supported in cpu."}],
        "ideal_source": "cost model",
        "environment": {"date": "2026-01-02", "processor": "an abacus"},
        "duration_s": 300.0,
    }
    configs = {
        "runs/good/draft": {"method": "draft_model", "model": "runs/good/draft"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    }
    return serving_report(tables(questions, measured), configs, **{**facts, **changes})
