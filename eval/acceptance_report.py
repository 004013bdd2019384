"""The acceptance report: report.json by a schema, report.html for people, report.md for a pull request.

The same measurements and seed give the same bytes, so nothing in it tells when or how fast it was made.
`acceptance.schema.json` beside this file says what report.json holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.acceptance_answer import answer, words
from eval.acceptance_results import DIGITS, Measured, per_prompt, results
from eval.bootstrap import CONFIDENCE, NUM_RESAMPLES
from eval.cost import Advice, StepCosts, advise
from eval.drafts import NamedDraft
from eval.kept import key_hash
from eval.prompts import Prompt, domains
from eval.report import environment, render_text, write_page
from heads.artifact import write_whole

SCHEMA_VERSION = 1

FEW_PROMPTS = 20
"""Fewer in a domain leave its intervals too narrow."""


def acceptance_report(
    measured: Measured,
    *,
    target: Mapping[str, Any],
    drafts: Sequence[NamedDraft],
    settings: Mapping[str, Any],
    costs: Mapping[str, StepCosts] | None = None,
) -> dict[str, Any]:
    """Everything that report.json holds.

    `target` has `name` and `fingerprint`; `settings` is what the measurement was asked for; `costs` are those of the
    drafts' steps, by name. The section `baseline` is for `eval.regression.compare` to fill.
    """
    rows = results(measured)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "target": dict(target),
        "drafts": [_about(draft) for draft in drafts],
        "domains": domains(measured.prompts),
        "settings": {
            **settings,
            "temperatures": list(measured.temperatures),
            "num_speculative_tokens": list(measured.num_speculative_tokens),
            "num_prompts": len(measured.prompts),
            "confidence": CONFIDENCE,
            "num_resamples": NUM_RESAMPLES,
            "seed": measured.seed,
        },
        "results": rows,
        "advice": _advice(rows, drafts, costs or {}),
        "baseline": None,
        "notes": _notes(measured, drafts),
        "prompts": [{"id": prompt_id(prompt), "domain": prompt.domain} for prompt in measured.prompts],
        "per_prompt": list(per_prompt(measured)),
        "environment": {name: value for name, value in environment().items() if name != "date"},
    }
    return {**report, "answer": answer(measured, report)}


def prompt_id(prompt: Prompt) -> str:
    """What tells a prompt from others, in any report."""
    return key_hash([prompt.domain, prompt.token_ids])[:16]


def write_acceptance_report(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write report.json, report.html and report.md into `folder`; the path of the page, or of the JSON without one."""
    page = write_page(folder, report, "acceptance.html.j2", "acceptance_charts.charts")
    write_whole(folder / "report.md", markdown(report))
    return page


def markdown(report: Mapping[str, Any]) -> str:
    """The report for a pull request."""
    return render_text("acceptance.md.j2", **report)


def _about(draft: NamedDraft) -> dict[str, Any]:
    return {
        "name": draft.name,
        "source": draft.source,
        "family": draft.family,
        "fingerprint": draft.fingerprint,
        "method": draft.speculative["method"] if draft.speculative else None,
        "is_sampled": bool(draft.forecast and draft.forecast.is_sampled),
        "notes": list(draft.notes),
    }


def _notes(measured: Measured, drafts: Sequence[NamedDraft]) -> list[str]:
    found = [f"{draft.name}: {note}." for draft in drafts for note in draft.notes]
    for draft in drafts:
        beyond = [k for k in measured.num_speculative_tokens if not draft.serves(k)]
        if beyond and draft.forecast:
            left_out = words([f"k = {k}" for k in beyond])
            verb = "are" if len(beyond) > 1 else "is"
            found.append(f"{draft.name} learned {draft.forecast.max_tokens} draft tokens: {left_out} {verb} left out.")
    sizes = {name: sum(p.domain == name for p in measured.prompts) for name in domains(measured.prompts)}
    if few := [f"{name} ({count})" for name, count in sizes.items() if count < FEW_PROMPTS]:
        found.append(f"Few prompts of {words(few)}: intervals from so few are too narrow.")
    return found


def _advice(
    rows: Sequence[Mapping[str, Any]], drafts: Sequence[NamedDraft], costs: Mapping[str, StepCosts]
) -> list[dict[str, Any]]:
    """How many tokens to draft by draft and temperature, over all domains."""
    served = {draft.name: draft.speculative for draft in drafts}
    found = []
    for row in rows:
        entry = next(reversed(row["by_num_speculative_tokens"]), None)
        if row["domain"] is None and entry and entry["forecast"] and row["draft"] in costs:
            rates = [rate["value"] for rate in entry["forecast"]["acceptance_per_position"]]
            advice = advise(rates, costs[row["draft"]])
            found.append(
                {
                    "draft": row["draft"],
                    "temperature": row["temperature"],
                    "speculative_config": _config(advice, served[row["draft"]]),
                    **_rounded(advice.to_json()),
                }
            )
    return found


def _config(advice: Advice, speculative: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return advice.speculative_config(speculative) if speculative else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
