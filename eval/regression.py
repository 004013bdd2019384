"""A report against an earlier one: what fell, by draft, temperature, domain and number of draft tokens.

Where the prompts are the same they are paired, so that what is hard about a prompt cancels out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.acceptance_results import DIGITS
from eval.bootstrap import interval, resampled_ratios
from eval.drafts import LOOKUPS

Array = NDArray[np.float64]

MIN_PAIRED_SHARE = 0.5
"""Of the baseline's prompts; with fewer in common the two are taken as samples of their own."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """tau in both reports, from the forecasts."""

    draft: str
    temperature: float
    domain: str | None
    num_speculative_tokens: int
    before: float
    after: float
    loss: float
    """(before - after) / before; negative where it rose."""
    low: float
    """Of before - after, in tau, 95% interval."""
    high: float
    is_paired: bool
    num_prompts: int
    """Compared ones."""

    def fell(self, max_loss: float) -> bool:
        """Lost more than `max_loss`; of prompts that are not the same ones, more than chance explains besides."""
        return self.loss > max_loss and (self.is_paired or self.low > 0)


def read_baseline(path: Path, target_fingerprint: str, schema_version: int) -> dict[str, Any]:
    """An earlier report of the same target.

    Raises: FileNotFoundError; ValueError where it is none, of another schema, or of another target.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no baseline {path}")
    try:
        baseline = json.loads(path.read_bytes())
        version, target = baseline["schema_version"], baseline["target"]
        fingerprint, name = target["fingerprint"], target["name"]
        baseline["per_prompt"], baseline["prompts"], baseline["settings"], baseline["drafts"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no acceptance report of `redraft eval` ({error!r})") from None
    if version != schema_version:
        raise ValueError(f"{path} is a report of schema version {version}, this redraft compares {schema_version}")
    if fingerprint != target_fingerprint:
        raise ValueError(f"{path} is a baseline of another target ({name}): measure one of this target first")
    return dict(baseline)


ALIKE = ("max_tokens", "draft_sample_method", "ngram")
"""Settings that change what is drafted for the same prompt."""


def counterparts(
    drafts: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], baseline: Mapping[str, Any]
) -> dict[str, str]:
    """By the name of each draft (with its `name` and `family`), what the baseline calls the one it is compared with.

    That is its namesake, or where one model on either side has none, these two.

    Raises: ValueError where a draft has no counterpart, or the baseline was measured in another way.
    """
    for name in ALIKE:
        now, was = settings.get(name), baseline["settings"].get(name)
        if now != was:
            raise ValueError(f"the baseline was measured with {name} {was}, this is with {now}: ask for the same")
    families = {draft["name"]: draft["family"] for draft in drafts}
    theirs = {draft["name"]: draft["family"] for draft in baseline["drafts"]}
    pairs = {name: name for name in families if name in theirs}
    new, old = ([n for n, family in some.items() if n not in pairs] for some in (families, theirs))
    if len(new) == 1 and len(old) > 1:  # n-grams are a yardstick, and may be left out
        old = [name for name in old if (theirs[name] in LOOKUPS) == (families[new[0]] in LOOKUPS)]
    if len(new) == len(old) == 1:
        return {**pairs, new[0]: old[0]}
    if new:
        raise ValueError(
            f"the baseline measured {', '.join(theirs)}, which of them {', '.join(new)} is compared with is not clear: "
            "name the drafts alike (--draft NAME=FOLDER)"
        )
    return pairs


def compare(report: Mapping[str, Any], baseline: Mapping[str, Any], max_loss: float) -> dict[str, Any]:
    """The `baseline` section of a report: every change, those that fell first, and how many they are.

    Raises: ValueError where a draft has no measurement in common with its counterpart.
    """
    changes = list(_changes(report, baseline))
    forecast = {row["draft"] for row in report["per_prompt"]}
    if lacking := sorted(forecast - {change.draft for change in changes}):
        raise ValueError(
            f"the baseline has no measurement of {', '.join(lacking)} to compare with: ask for the same temperatures "
            "and draft tokens"
        )
    entries = [{**asdict(change), "fell": change.fell(max_loss)} for change in changes]
    return {
        "max_loss": max_loss,
        "num_fell": sum(entry["fell"] for entry in entries),
        "changes": sorted(entries, key=lambda entry: (not entry["fell"], -entry["loss"])),
    }


def describe(change: Mapping[str, Any]) -> str:
    """One change in a line."""
    where = f" on {change['domain']}" if change["domain"] else ""
    return (
        f"{change['draft']}{where}, k = {change['num_speculative_tokens']}, temperature {change['temperature']:g}: "
        f"tau {change['before']:.3f} -> {change['after']:.3f} ({-change['loss']:+.1%}; 95% interval of the loss "
        f"{change['low']:+.3f} to {change['high']:+.3f})"
    )


def _changes(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> Iterator[Change]:
    before, after = _sums(baseline), _sums(report)
    called = counterparts(report["drafts"], report["settings"], baseline)
    for (draft, temperature, k), mine in after.items():
        its = before.get((called[draft], temperature, k))
        for domain in _domains(report) if its else ():
            one, other = ({i: v for i, v in sums.items() if domain in (None, i[0])} for sums in (its or {}, mine))
            if one and other:
                yield _change(one, other, draft=draft, temperature=temperature, domain=domain, k=k)


Sums = dict[tuple[str, str], tuple[float, float]]
"""By domain and id of a prompt: accepted tokens and target steps."""


def _sums(report: Mapping[str, Any]) -> dict[tuple[str, float, int], Sums]:
    ids = [(prompt["domain"], prompt["id"]) for prompt in report["prompts"]]
    return {
        (row["draft"], row["temperature"], row["num_speculative_tokens"]): dict(
            zip(ids, zip(row["accepted"], row["steps"], strict=True), strict=True)
        )
        for row in report["per_prompt"]
    }


def _change(before: Sums, after: Sums, *, draft: str, temperature: float, domain: str | None, k: int) -> Change:
    common = [prompt for prompt in before if prompt in after]
    is_paired = len(common) >= MIN_PAIRED_SHARE * len(before)
    one, other = (_array(sums, common if is_paired else list(sums)) for sums in (before, after))
    (was, was_R), (now, now_R) = _tau(one, seed=0), _tau(other, seed=0 if is_paired else 1)
    low, high = interval(was_R - now_R)
    return Change(
        draft=draft,
        temperature=temperature,
        domain=domain,
        num_speculative_tokens=k,
        before=round(was, DIGITS),
        after=round(now, DIGITS),
        loss=round((was - now) / was, DIGITS),
        low=round(low, DIGITS),
        high=round(high, DIGITS),
        is_paired=is_paired,
        num_prompts=len(common) if is_paired else len(after),
    )


def _array(sums: Sums, prompts: Sequence[tuple[str, str]]) -> Array:
    return np.array([sums[prompt] for prompt in prompts], float)


def _tau(sums_N2: Array, seed: int) -> tuple[float, Array]:
    """tau, and its resamples [R]."""
    accepted_N1, steps_N1 = sums_N2[:, :1], sums_N2[:, 1:]
    tau = 1 + float(accepted_N1.sum() / steps_N1.sum()) if steps_N1.sum() else 1.0
    return tau, 1 + resampled_ratios(accepted_N1, steps_N1, seed=seed)[:, 0]


def _domains(report: Mapping[str, Any]) -> list[str | None]:
    return [None, *(report["domains"] if len(report["domains"]) > 1 else ())]
