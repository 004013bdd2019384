"""Compare a report with an earlier one.

The comparison lists losses of tau by draft, temperature, domain and number of draft tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from redraft.eval.intervals import (
    CONFIDENCE,
    Estimate,
    estimate_gain,
    estimate_ratio,
    subtract_independent,
)
from redraft.eval.report.results import DIGITS
from redraft.files.folder import read_as
from redraft.heads.catalog import list_lookups

# Probability that a report lists a loss for an equal draft, over all comparisons.
FALSE_ALARMS = 0.02
# Minimum share of the baseline's prompts for pairing them. Below it, the two reports count as
# independent samples.
MIN_PAIRED_SHARE = 0.5


class Target(msgspec.Struct):
    name: str
    fingerprint: str


class Draft(msgspec.Struct):
    name: str
    family: str


class PromptId(msgspec.Struct):
    domain: str
    id: str


class Counted(msgspec.Struct):
    """Accepted tokens and target steps for every prompt."""

    draft: str
    temperature: float
    num_speculative_tokens: int
    accepted: list[float]
    steps: list[float]


class Report(msgspec.Struct):
    """The keys of a `redraft eval` report that a comparison uses."""

    schema_version: int
    target: Target
    drafts: list[Draft]
    settings: dict[str, Any]
    prompts: list[PromptId]
    per_prompt: list[Counted]
    domains: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Change:
    """The forecast tau in both reports."""

    draft: str
    temperature: float
    domain: str | None
    num_speculative_tokens: int
    before: float
    after: float
    loss: float
    """Relative loss, (before - after) / before. Negative if tau rose."""
    low: float
    """Lower end of the 95% interval of before - after, in tokens per target step."""
    high: float
    """Upper end of the same interval."""
    is_paired: bool
    """Whether both taus were measured on the same prompts."""
    num_prompts: int
    """Number of compared prompts."""
    fell: bool = False
    """Whether the loss is proven and larger than allowed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The `baseline` section of a report: every change, with the losses first."""

    max_loss: float
    num_fell: int
    changes: list[Change]


def read_baseline(path: Path, target_fingerprint: str, schema_version: int) -> Report:
    """Read an earlier report on the same target.

    Raises:
        FileNotFoundError
        ValueError: the file is not such a report.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"the baseline {path} does not exist: give an earlier report.json of `redraft eval`"
        )
    baseline = read_as(path, Report, "give an earlier report.json of `redraft eval`")
    version, target = baseline.schema_version, baseline.target
    if version > schema_version:  # An older one has the keys above too, or `read_as` refuses it.
        raise ValueError(
            f"{path} has schema version {version}; this redraft reads up to version "
            f"{schema_version}"
        )
    if target.fingerprint != target_fingerprint:
        raise ValueError(
            f"{path} is a baseline for a target other than {target.name}: measure a new one"
        )
    return baseline


SAME_SETTINGS: Mapping[str, Any] = {
    "max_tokens": None,
    "draft_sample_method": None,
    # A report without these keys sampled from the whole vocabulary.
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}
"""Settings that influence acceptance, with the values that are assumed for reports without them.
They must be equal in both reports.
"""


def match_drafts(
    families: Mapping[str, str], settings: Mapping[str, Any], baseline: Report
) -> dict[str, str]:
    """Map each draft's name to the name of the baseline draft to compare it with.

    Drafts with the same name are compared. If a single draft remains on each side, these two are
    compared as well. `families` maps the drafts' names to their families.

    Raises:
        ValueError: a draft has no counterpart, or the baseline was measured with different settings
            or lacks a temperature.
    """
    for name, default in SAME_SETTINGS.items():
        now, was = settings.get(name, default), baseline.settings.get(name, default)
        if now != was:
            raise ValueError(
                f"the baseline was measured with {name} {was}, not {now}: measure both with the "
                f"same setting"
            )
    measured = {row.temperature for row in baseline.per_prompt}
    if missing := sorted(set(settings.get("temperatures", ())) - measured):
        raise ValueError(
            f"the baseline has no temperature {missing[0]:g}: measure both at the same temperatures"
        )
    baseline_families = {draft.name: draft.family for draft in baseline.drafts}
    pairs = {name: name for name in families if name in baseline_families}
    new = [name for name in families if name not in pairs]
    old = [name for name in baseline_families if name not in pairs]
    if len(new) == 1 and len(old) > 1:
        # Either report may omit n-grams, so pair models with models and lookups with lookups.
        lookups = list_lookups()
        is_lookup = families[new[0]] in lookups
        old = [name for name in old if (baseline_families[name] in lookups) == is_lookup]
    if len(new) == len(old) == 1:
        return {**pairs, new[0]: old[0]}
    if new:
        raise ValueError(
            f"it is ambiguous which draft of the baseline ({', '.join(baseline_families)}) to compare "
            f"with {', '.join(new)}: give both the same name (--draft NAME=FOLDER)"
        )
    return pairs


def compare_reports(report: Report, baseline: Report, max_loss: float) -> Comparison:
    """Compare two reports.

    Raises:
        ValueError: a draft has no measurement in common with its counterpart.
    """
    changes = list(_list_changes(report, baseline))
    forecast = {row.draft for row in report.per_prompt}
    if missing := sorted(forecast - {change.draft for change, _ in changes}):
        raise ValueError(
            f"the baseline has no measurement of {', '.join(missing)} to compare with: measure at "
            "temperatures and numbers of draft tokens that it contains"
        )
    # Any comparison could show a loss by chance, so each gets an equal share of the false alarms
    # (Bonferroni). The share is doubled, because a two-sided interval can miss on either side, but
    # only its lower end decides about a loss.
    confidence = 1 - 2 * FALSE_ALARMS / len(changes) if changes else CONFIDENCE
    judged = []
    for change, loss in changes:
        is_proven = loss.interval(confidence)[0] > 0
        judged.append(replace(change, fell=change.loss > max_loss and is_proven))
    judged.sort(key=lambda change: (not change.fell, -change.loss))
    return Comparison(max_loss=max_loss, num_fell=sum(c.fell for c in judged), changes=judged)


def describe_change(change: Change) -> str:
    domain = f" on {change.domain}" if change.domain else ""
    return (
        f"{change.draft}{domain}, k = {change.num_speculative_tokens}, "
        f"temperature {change.temperature:g}: tau {change.before:.3f} -> {change.after:.3f} "
        f"({-change.loss:+.1%}; 95% interval of the loss {change.low:+.3f} to {change.high:+.3f})"
    )


def _list_changes(report: Report, baseline: Report) -> Iterator[tuple[Change, Estimate]]:
    before, after = _read_sums(baseline), _read_sums(report)
    families = {draft.name: draft.family for draft in report.drafts}
    baseline_names = match_drafts(families, report.settings, baseline)
    domains = [None, *report.domains] if len(report.domains) > 1 else [None]
    for (draft, temperature, k), now in after.items():
        was = before.get((baseline_names[draft], temperature, k), {})
        for domain in domains:
            old, new = _select(was, domain), _select(now, domain)
            if old and new:
                yield _measure_change(
                    old, new, draft=draft, temperature=temperature, domain=domain, k=k
                )


Sums = dict[tuple[str, str], tuple[float, float]]
"""Sums (accepted tokens, target steps) of every prompt, by (domain, id)."""


def _read_sums(report: Report) -> dict[tuple[str, float, int], Sums]:
    """A report's sums, by (draft, temperature, num_speculative_tokens)."""
    ids = [(prompt.domain, prompt.id) for prompt in report.prompts]
    sums = {}
    for row in report.per_prompt:
        counts = zip(row.accepted, row.steps, strict=True)
        measured = row.draft, row.temperature, row.num_speculative_tokens
        sums[measured] = dict(zip(ids, counts, strict=True))
    return sums


def _select(sums: Sums, domain: str | None) -> Sums:
    return {prompt: counts for prompt, counts in sums.items() if domain in (None, prompt[0])}


def _measure_change(
    before: Sums, after: Sums, *, draft: str, temperature: float, domain: str | None, k: int
) -> tuple[Change, Estimate]:
    common = [prompt for prompt in before if prompt in after]
    is_paired = len(common) >= MIN_PAIRED_SHARE * len(before)
    if is_paired:
        before, after = ({prompt: sums[prompt] for prompt in common} for sums in (before, after))
    was, now = _estimate_accepted(before), _estimate_accepted(after)
    if is_paired:
        # Shape [N, before or after, accepted or steps].
        paired_N22 = np.array([(before[prompt], after[prompt]) for prompt in common], float)
        loss = estimate_gain(paired_N22[:, :, 0], paired_N22[:, :, 1])
    else:
        loss = subtract_independent(was, now)
    low, high = loss.interval(bounds=(-float(k), float(k)))
    tau_was, tau_now = 1 + was.value, 1 + now.value
    change = Change(
        draft=draft,
        temperature=temperature,
        domain=domain,
        num_speculative_tokens=k,
        before=round(tau_was, DIGITS),
        after=round(tau_now, DIGITS),
        loss=round((tau_was - tau_now) / tau_was, DIGITS),
        low=round(low, DIGITS),
        high=round(high, DIGITS),
        is_paired=is_paired,
        num_prompts=len(after),
    )
    return change, loss


def _estimate_accepted(sums: Sums) -> Estimate:
    """Accepted tokens per target step: tau - 1."""
    sums_N2 = np.array(list(sums.values()), float)
    return estimate_ratio(sums_N2[:, 0], sums_N2[:, 1])
