"""The numbers of an acceptance report, with 95% intervals.

They are listed by draft, temperature, domain and number of draft tokens.

N = prompts, M = quantities, K = num_speculative_tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from redraft.engine.counts import AcceptanceCounts
from redraft.engine.prompts import Prompt, domains
from redraft.eval.forecast.teacher_forced import PromptRows, Rows
from redraft.eval.intervals import Estimate, estimate_gain, estimate_ratio

Array = NDArray[np.float64]

MAX_DIFFERENCE = 0.03  # share of the engine's tau above which forecast and engine diverge
# Decimal places in a report, few enough to hide rounding that depends on the order of sums.
DIGITS = 6

EngineCounts = Mapping[tuple[str, float, int], Sequence[AcceptanceCounts]]
"""The engine's counts per prompt, in the order of the prompts, by (draft, temperature,
num_speculative_tokens).
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    prompts: Sequence[Prompt]
    drafts: Sequence[str]
    temperatures: Sequence[float]
    num_speculative_tokens: Sequence[int]
    forecast: Rows
    engine: EngineCounts = field(default_factory=dict)
    seed: int = 0
    """Random seed for sampled answers."""

    def rows(self, draft: str, temperature: float) -> list[PromptRows] | None:
        """Return a draft's forecast, one entry per prompt. None if the draft has no forecast."""
        by_prompt = self.forecast.get(temperature) or [{}]
        return [row[draft] for row in by_prompt] if draft in by_prompt[0] else None


def build_results(measured: Measured) -> list[dict[str, Any]]:
    """The report's `results`: a row for every draft, temperature and domain.

    The row for all prompts together (domain None) comes first, and is the only row if there is a
    single domain.
    """
    names = domains(measured.prompts)
    shown = [None, *names] if len(names) > 1 else [None]
    results = []
    for draft in measured.drafts:
        for temperature in measured.temperatures:
            rows = measured.rows(draft, temperature)
            for domain in shown:
                chosen = [
                    i
                    for i, prompt in enumerate(measured.prompts)
                    if domain in (None, prompt.domain)
                ]
                identity = {
                    "draft": draft,
                    "temperature": temperature,
                    "domain": domain,
                    "num_prompts": len(chosen),
                }
                forecast = [rows[i] for i in chosen] if rows else None
                entries = _build_entries(measured, draft, temperature, forecast, chosen)
                rates = _summarise_rates(forecast)
                results.append({**identity, **rates, "by_num_speculative_tokens": entries})
    return results


def _summarise_rates(rows: Sequence[PromptRows] | None) -> dict[str, Any]:
    if rows is None:
        return {"num_output_tokens": None, "alpha": None, "alpha_greedy": None}
    over_N2 = np.array([(row.alpha_sum, row.alpha_greedy_sum) for row in rows])
    labels_N = np.array([row.num_rows for row in rows], float)
    alpha, alpha_greedy = _with_intervals(
        over_N2, np.column_stack([labels_N, labels_N]), [1.0, 1.0]
    )
    num_tokens = sum(row.num_output_tokens for row in rows)
    return {"num_output_tokens": num_tokens, "alpha": alpha, "alpha_greedy": alpha_greedy}


def _build_entries(
    measured: Measured,
    draft: str,
    temperature: float,
    rows: Sequence[PromptRows] | None,
    chosen: Sequence[int],
) -> list[dict[str, Any]]:
    entries = []
    for k in measured.num_speculative_tokens:
        forecast = rows if rows and k in rows[0].counts else None
        counted = measured.engine.get((draft, temperature, k))
        engine = [counted[i] for i in chosen] if counted else None
        longest = forecast if forecast and k == max(forecast[0].counts) else []
        if forecast or engine:
            entries.append(
                {
                    "num_speculative_tokens": k,
                    "forecast": _summarise_forecast(forecast, k) if forecast else None,
                    "engine": _summarise_engine(engine, forecast, k, temperature)
                    if engine
                    else None,
                    "other_sample_method": _summarise_other(forecast, k, "other_counts"),
                    "block_verification": _summarise_other(forecast, k, "block_counts"),
                    "adaptive": _summarise_adaptive(longest),
                    "by_context": _summarise_contexts(longest),
                }
            )
    return entries


def _summarise_forecast(rows: Sequence[PromptRows], k: int) -> dict[str, Any]:
    accepted_NK, steps_N, drafts_N = _stack_counts(rows, k)
    # Column 0 is tau - 1, and the other columns are the acceptance by position. All are per target
    # step.
    over_NM = np.column_stack([accepted_NK.sum(1), accepted_NK])
    most = [float(k)] + [1.0] * k
    accepted, *per_position = _with_intervals(over_NM, np.column_stack([steps_N] * (k + 1)), most)
    return {
        "num_steps": _rounded(steps_N.sum()),
        "tau": {name: _rounded(1 + value) for name, value in accepted.items()},
        "acceptance_per_position": per_position,
        "drafted_share": _rounded(_ratio(drafts_N.sum(), steps_N.sum())),
        "tau_per_draft": _rounded(1 + _ratio(accepted_NK.sum(), drafts_N.sum())),
    }


def _summarise_adaptive(rows: Sequence[PromptRows]) -> list[dict[str, float]]:
    """Return tau and verified rows per step by threshold, with the largest measured k."""
    points = []
    for same in zip(*(row.adaptive for row in rows), strict=True):
        steps = sum(one.num_steps for one in same)
        points.append(
            {
                "threshold": same[0].threshold,
                "tau": _rounded(1 + _ratio(sum(one.num_accepted for one in same), steps)),
                "rows": _rounded(_ratio(sum(one.num_rows for one in same), steps)),
            }
        )
    return points


def _summarise_contexts(rows: Sequence[PromptRows]) -> list[dict[str, float]]:
    """Return tau by context length, for the largest measured k."""
    found = []
    for power in sorted({power for row in rows for power in row.by_context}):
        same = [row.by_context[power] for row in rows if power in row.by_context]
        steps = sum(one.num_steps for one in same)
        found.append(
            {
                "from_tokens": power,
                "to_tokens": 2 * power - 1,
                "num_drafts": _rounded(sum(one.num_drafts for one in same)),
                "tau": _rounded(1 + _ratio(sum(one.num_accepted for one in same), steps)),
            }
        )
    return found


def _summarise_other(
    rows: Sequence[PromptRows] | None, k: int, name: Literal["other_counts", "block_counts"]
) -> dict[str, Any] | None:
    """Return the forecast for the server's alternative way to draft or verify, and its gain.

    Return None if the alternative changes nothing.
    """
    if not rows or k not in getattr(rows[0], name):
        return None
    counts = [(getattr(row, name)[k], row.counts[k]) for row in rows]
    over_N2 = np.array([(other.num_accepted, served.num_accepted) for other, served in counts])
    under_N2 = np.array([(other.num_steps, served.num_steps) for other, served in counts])
    return {
        "tau": _rounded(1 + _ratio(over_N2[:, 0].sum(), under_N2[:, 0].sum())),
        "gain": _with_interval(estimate_gain(over_N2, under_N2), -k, k),
    }


def _stack_counts(rows: Sequence[PromptRows], k: int) -> tuple[Array, Array, Array]:
    """Return expected counts per prompt.

    They are accepted tokens by position [N, K], target steps [N], and drafts [N].
    """
    counts = [row.counts[k] for row in rows]
    accepted_NK = np.array([c.accepted_per_position for c in counts], float)
    return (
        accepted_NK,
        np.array([c.num_steps for c in counts]),
        np.array([c.num_drafts for c in counts]),
    )


def _with_intervals(
    over_NM: Array, under_NM: Array, most: Sequence[float]
) -> list[dict[str, float]]:
    """Return sum_N over / sum_N under for each of M quantities, with 95% intervals over prompts.

    `most` is the largest possible value of each quantity; the smallest is 0.
    """
    return [
        _with_interval(estimate_ratio(over_N, under_N), 0.0, highest)
        for over_N, under_N, highest in zip(over_NM.T, under_NM.T, most, strict=True)
    ]


def _with_interval(estimate: Estimate, least: float, most: float) -> dict[str, float]:
    low, high = estimate.interval(bounds=(least, most))
    return {"value": _rounded(estimate.value), "low": _rounded(low), "high": _rounded(high)}


def _summarise_engine(
    counts: Sequence[AcceptanceCounts],
    rows: Sequence[PromptRows] | None,
    k: int,
    temperature: float,
) -> dict[str, Any]:
    """Return the engine's rates per draft and, if there is a forecast, their difference from it."""
    total = sum(counts[1:], counts[0])
    section: dict[str, Any] = {
        "num_drafts": total.num_drafts,
        "tau": _rounded(total.tau),
        "acceptance_per_position": [_rounded(rate) for rate in total.acceptance_per_position],
        "forecast_error": None,
        "difference": None,
        "diverges": None,
    }
    if rows is not None:
        section |= _compare_with_engine(counts, rows, k, temperature)
    return section


def _compare_with_engine(
    counts: Sequence[AcceptanceCounts], rows: Sequence[PromptRows], k: int, temperature: float
) -> dict[str, Any]:
    """The forecast minus the engine's result, in tau per draft.

    Above temperature 0, the engine samples different answers than the forecast did, so the two
    diverge only if the interval of the difference excludes 0. At temperature 0, the answers are the
    same, so the error alone decides.
    """
    accepted_NK, _, forecast_drafts_N = _stack_counts(rows, k)
    # The columns are forecast and engine. They are per draft, not per step, because vLLM's counters
    # do not include steps without a draft.
    over_N2 = np.column_stack([accepted_NK.sum(1), [c.num_accepted for c in counts]]).astype(float)
    under_N2 = np.column_stack([forecast_drafts_N, [c.num_drafts for c in counts]]).astype(float)
    forecast, engine = over_N2.sum(0) / np.maximum(under_N2.sum(0), 1)
    difference = _with_interval(estimate_gain(over_N2, under_N2), -k, k)
    # Both are tau - 1, so the error is a share of the engine's tau.
    error = (forecast - engine) / (1 + engine)
    by_chance = temperature > 0 and difference["low"] <= 0 <= difference["high"]
    return {
        "forecast_error": _rounded(error),
        "difference": difference,
        "diverges": bool(abs(error) > MAX_DIFFERENCE and not by_chance),
    }


def list_prompt_counts(measured: Measured) -> Iterator[dict[str, Any]]:
    """Yield the report's `per_prompt`.

    It contains the target steps and accepted tokens for every prompt, for later paired comparisons.
    """
    for draft in measured.drafts:
        for temperature in measured.temperatures:
            rows = measured.rows(draft, temperature)
            if rows is None:
                continue
            for k in measured.num_speculative_tokens:
                if k in rows[0].counts:
                    counts = [row.counts[k] for row in rows]
                    yield {
                        "draft": draft,
                        "temperature": temperature,
                        "num_speculative_tokens": k,
                        "steps": [_rounded(c.num_steps) for c in counts],
                        "accepted": [_rounded(c.num_accepted) for c in counts],
                    }


def compare_taus(
    measured: Measured, one: str, other: str, temperature: float, k: int
) -> tuple[float, float, float] | None:
    """Return (tau of `one` - tau of `other`, low, high), with a 95% interval over prompts.

    Return None if either draft has no forecast.
    """
    columns = []
    for draft in (one, other):
        rows = measured.rows(draft, temperature)
        if rows is None or k not in rows[0].counts:
            return None
        accepted_NK, steps_N, _ = _stack_counts(rows, k)
        columns.append((accepted_NK.sum(1), steps_N))
    over_N2, under_N2 = (np.column_stack(column) for column in zip(*columns, strict=True))
    gain = estimate_gain(over_N2, under_N2)
    return (gain.value, *gain.interval(bounds=(-float(k), float(k))))


def read_tau(entry: Mapping[str, Any]) -> float:
    """Tokens per target step in an entry of `by_num_speculative_tokens`.

    It is the forecast or, without one, the engine's count.
    """
    return float(entry["forecast"]["tau"]["value"] if entry["forecast"] else entry["engine"]["tau"])


def find_entry(row: Mapping[str, Any], num_speculative_tokens: int) -> Mapping[str, Any] | None:
    """Return a row's entry for this number of draft tokens.

    None if that number was not measured.
    """
    entries: Sequence[Mapping[str, Any]] = row["by_num_speculative_tokens"]
    return next(
        (entry for entry in entries if entry["num_speculative_tokens"] == num_speculative_tokens),
        None,
    )


def choose_common_k(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of draft tokens at which to compare drafts.

    It is the largest number that all rows have or, if there is none, the largest in any row.
    """
    sets = [
        {entry["num_speculative_tokens"] for entry in row["by_num_speculative_tokens"]}
        for row in rows
    ]
    # No k is in all rows if one draft cannot propose even the smallest requested number.
    return int(max(set.intersection(*sets) or set.union(*sets)))


def _ratio(over: float, under: float) -> float:
    return float(over / under) if under > 0 else 0.0


def _rounded(value: float) -> float:
    return round(float(value), DIGITS)
