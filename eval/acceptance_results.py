"""One row of numbers for every draft, domain, temperature and number of draft tokens, each with its 95% interval.

N = prompts, R = resamples, M = quantities, K = num_speculative_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.acceptance import AcceptanceCounts
from eval.bootstrap import interval, resampled_ratios
from eval.prompts import Prompt, domains
from eval.teacher_forced import PromptRows, Rows

Array = NDArray[np.float64]

PARTS = 0.03
"""The engine's tau and the forecast's part where they are further apart, relative to the engine's."""

DIGITS = 6
"""Of every number of a report: the order in which a machine adds does not reach them."""

EngineCounts = Mapping[tuple[str, float, int], Sequence[AcceptanceCounts]]
"""By draft, temperature and number of draft tokens, in the order of the prompts."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything that was measured, prompt by prompt."""

    prompts: Sequence[Prompt]
    drafts: Sequence[str]
    temperatures: Sequence[float]
    num_speculative_tokens: Sequence[int]
    forecast: Rows
    engine: EngineCounts = field(default_factory=dict)
    seed: int = 0
    """Of the resampling."""

    def rows(self, draft: str, temperature: float) -> list[PromptRows] | None:
        """The forecast's, prompt by prompt; None where the draft has none."""
        by_prompt = self.forecast.get(temperature) or [{}]
        return [row[draft] for row in by_prompt] if draft in by_prompt[0] else None


def results(measured: Measured) -> list[dict[str, Any]]:
    """The report's `results`: a row for every draft, temperature and domain (None, all of them, first)."""
    names = domains(measured.prompts)
    found = []
    for draft in measured.drafts:
        for temperature in measured.temperatures:
            rows = measured.rows(draft, temperature)
            for domain in (None, *(names if len(names) > 1 else ())):
                chosen = [i for i, prompt in enumerate(measured.prompts) if domain in (None, prompt.domain)]
                identity = {"draft": draft, "temperature": temperature, "domain": domain, "num_prompts": len(chosen)}
                told = [rows[i] for i in chosen] if rows else None
                found.append({**identity, **_rates(told, measured.seed), **_by_k(measured, identity, told, chosen)})
    return found


def _rates(rows: Sequence[PromptRows] | None, seed: int) -> dict[str, Any]:
    """What does not depend on the number of draft tokens."""
    if rows is None:
        return {"num_output_tokens": None, "alpha": None, "alpha_greedy": None}
    over_N2 = np.array([(row.alpha_sum, row.alpha_greedy_sum) for row in rows])
    labels_N = np.array([row.num_rows for row in rows], float)
    alpha, alpha_greedy = _with_intervals(over_N2, np.column_stack([labels_N, labels_N]), seed)
    num_tokens = sum(row.num_output_tokens for row in rows)
    return {"num_output_tokens": num_tokens, "alpha": alpha, "alpha_greedy": alpha_greedy}


def _by_k(
    measured: Measured, identity: Mapping[str, Any], rows: Sequence[PromptRows] | None, chosen: Sequence[int]
) -> dict[str, Any]:
    """Forecast and engine for every number of draft tokens that either has."""
    entries = []
    for k in measured.num_speculative_tokens:
        told = rows if rows and k in rows[0].counts else None
        counted = measured.engine.get((identity["draft"], identity["temperature"], k))
        engine = [counted[i] for i in chosen] if counted else None
        if told or engine:
            entries.append(
                {
                    "num_speculative_tokens": k,
                    "forecast": _forecast(told, k, measured.seed) if told else None,
                    "engine": _engine(engine, told, k, identity["temperature"], measured.seed) if engine else None,
                }
            )
    return {"by_num_speculative_tokens": entries}


def _forecast(rows: Sequence[PromptRows], k: int, seed: int) -> dict[str, Any]:
    accepted_NK, steps_N, drafts_N = _sums(rows, k)
    over_NM = np.column_stack([accepted_NK.sum(1), accepted_NK])
    accepted, *per_position = _with_intervals(over_NM, np.column_stack([steps_N] * (k + 1)), seed)
    return {
        "num_steps": _rounded(steps_N.sum()),
        "tau": {name: _rounded(1 + value) for name, value in accepted.items()},
        "acceptance_per_position": per_position,
        "drafted_share": _rounded(_ratio(drafts_N.sum(), steps_N.sum())),
        "tau_per_draft": _rounded(1 + _ratio(accepted_NK.sum(), drafts_N.sum())),
    }


def _sums(rows: Sequence[PromptRows], k: int) -> tuple[Array, Array, Array]:
    """Accepted tokens by position [N, K], target steps [N] and drafts [N] of every prompt."""
    counts = [row.counts[k] for row in rows]
    accepted_NK = np.array([c.accepted_per_position for c in counts], float)
    return accepted_NK, np.array([c.num_steps for c in counts]), np.array([c.num_drafts for c in counts])


def _with_intervals(over_NM: Array, under_NM: Array, seed: int) -> list[dict[str, float]]:
    resampled_RM = resampled_ratios(over_NM, under_NM, seed=seed)
    values_M = [_ratio(over, under) for over, under in zip(over_NM.sum(0), under_NM.sum(0), strict=True)]
    found = []
    for value, resampled_R in zip(values_M, resampled_RM.T, strict=True):
        low, high = interval(resampled_R)
        found.append({"value": _rounded(value), "low": _rounded(low), "high": _rounded(high)})
    return found


def _engine(
    counts: Sequence[AcceptanceCounts],
    rows: Sequence[PromptRows] | None,
    k: int,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """The engine's rates over its drafts, and how far the forecast of the same is off."""
    total = sum(counts[1:], counts[0])
    section: dict[str, Any] = {
        "num_drafts": total.num_drafts,
        "tau": _rounded(total.tau),
        "acceptance_per_position": [_rounded(rate) for rate in total.acceptance_per_position],
        "forecast_error": None,
        "difference": None,
        "parts": None,
    }
    return section if rows is None else {**section, **_apart(counts, rows, k, temperature, seed)}


def _apart(
    counts: Sequence[AcceptanceCounts], rows: Sequence[PromptRows], k: int, temperature: float, seed: int
) -> dict[str, Any]:
    """Forecast minus engine, in tau per draft. Sampled answers differ from run to run; that alone parts nothing."""
    accepted_NK, _, told_drafts_N = _sums(rows, k)
    over_NM = np.column_stack([accepted_NK.sum(1), [c.num_accepted for c in counts]]).astype(float)
    under_NM = np.column_stack([told_drafts_N, [c.num_drafts for c in counts]]).astype(float)
    told, seen = over_NM.sum(0) / np.maximum(under_NM.sum(0), 1)
    resampled_R2 = resampled_ratios(over_NM, under_NM, seed=seed)
    low, high = interval(resampled_R2[:, 0] - resampled_R2[:, 1])
    error = (told - seen) / (1 + seen)
    by_chance = temperature > 0 and low <= 0 <= high
    return {
        "forecast_error": _rounded(error),
        "difference": {"value": _rounded(told - seen), "low": _rounded(low), "high": _rounded(high)},
        "parts": bool(abs(error) > PARTS and not by_chance),
    }


def per_prompt(measured: Measured) -> Iterator[dict[str, Any]]:
    """Target steps and accepted tokens of every prompt: what a later report is paired with."""
    for draft in measured.drafts:
        for temperature in measured.temperatures:
            rows = measured.rows(draft, temperature)
            for k in measured.num_speculative_tokens if rows else ():
                if rows and k in rows[0].counts:
                    counts = [row.counts[k] for row in rows]
                    yield {
                        "draft": draft,
                        "temperature": temperature,
                        "num_speculative_tokens": k,
                        "steps": [_rounded(c.num_steps) for c in counts],
                        "accepted": [_rounded(c.num_accepted) for c in counts],
                    }


def tau_lead(measured: Measured, one: str, other: str, temperature: float, k: int) -> tuple[float, float, float] | None:
    """tau of one draft minus another's on the same prompts with its 95% interval; None where either has no forecast."""
    columns = []
    for draft in (one, other):
        rows = measured.rows(draft, temperature)
        if rows is None or k not in rows[0].counts:
            return None
        accepted_NK, steps_N, _ = _sums(rows, k)
        columns.append((accepted_NK.sum(1), steps_N))
    over_N2, under_N2 = (np.column_stack(column) for column in zip(*columns, strict=True))
    resampled_R2 = resampled_ratios(over_N2, under_N2, seed=measured.seed)
    mine, its = (_ratio(over, under) for over, under in zip(over_N2.sum(0), under_N2.sum(0), strict=True))
    return (mine - its, *interval(resampled_R2[:, 0] - resampled_R2[:, 1]))


def tau_of(entry: Mapping[str, Any]) -> float:
    """Tokens per target step of an entry by k: as forecast, or where nothing forecasts it as the engine counted."""
    return float(entry["forecast"]["tau"]["value"] if entry["forecast"] else entry["engine"]["tau"])


def entry_of(row: Mapping[str, Any], num_speculative_tokens: int) -> Mapping[str, Any] | None:
    """A result's entry for so many draft tokens."""
    entries: Sequence[Mapping[str, Any]] = row["by_num_speculative_tokens"]
    return next((entry for entry in entries if entry["num_speculative_tokens"] == num_speculative_tokens), None)


def compared_k(rows: Sequence[Mapping[str, Any]]) -> int:
    """The most draft tokens that every draft was measured with, or where there is no such number, that any was."""
    sets = [{entry["num_speculative_tokens"] for entry in row["by_num_speculative_tokens"]} for row in rows]
    return int(max(set.intersection(*sets) or set.union(*sets)))


def _ratio(over: float, under: float) -> float:
    return float(over / under) if under > 0 else 0.0


def _rounded(value: float) -> float:
    return round(float(value), DIGITS)
