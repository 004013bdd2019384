"""The acceptance report.

report.json follows a schema, report.html is for reading, and report.md is for a pull request.

The same measurements and seed give the same bytes, so a report contains neither a date nor a
duration. `acceptance.schema.json` next to this file describes report.json.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redraft.engine.lookups import depends_on_load
from redraft.engine.machine import environment
from redraft.engine.prompts import domains
from redraft.eval.forecast.drafts import NamedDraft
from redraft.eval.intervals import CONFIDENCE
from redraft.eval.report.answer import compose_answer, join_words
from redraft.eval.report.page import TEMPLATES, charts_of, render_text, write_page
from redraft.eval.report.results import Measured, build_results, list_prompt_counts
from redraft.files.artifact import write_whole
from redraft.files.kept import hash_key

SCHEMA_VERSION = 3  # the schema describes what each version changed
FEW_PROMPTS = 20  # with fewer prompts in a domain, intervals are rough


def build_acceptance_report(
    measured: Measured,
    *,
    target: Mapping[str, Any],
    drafts: Sequence[NamedDraft],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of report.json. `target` has `name` and `fingerprint`.

    Its `baseline` is None; `eval.report.regression.compare_reports` computes that section.
    """
    rows = build_results(measured)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "target": dict(target),
        "drafts": [_describe_draft(draft) for draft in drafts],
        "domains": domains(measured.prompts),
        "settings": {
            **settings,
            "temperatures": list(measured.temperatures),
            "num_speculative_tokens": list(measured.num_speculative_tokens),
            "num_prompts": len(measured.prompts),
            "confidence": CONFIDENCE,
            "seed": measured.seed,
        },
        "results": rows,
        "baseline": None,
        "notes": [*_list_notes(measured, drafts), *_list_left_out(settings)],
        "prompts": [
            # The id is the same in every report, and differs for every domain and text.
            {"id": hash_key([prompt.domain, prompt.token_ids])[:16], "domain": prompt.domain}
            for prompt in measured.prompts
        ],
        "per_prompt": list(list_prompt_counts(measured)),
        # Omit the date, because equal measurements must give equal bytes.
        "environment": {name: value for name, value in environment().items() if name != "date"},
    }
    return {**report, "answer": compose_answer(measured, report)}


def write_acceptance_report(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write report.json, .html and .md.

    Return the path of report.html, otherwise of report.json.
    """
    page = write_page(
        folder,
        report,
        TEMPLATES / "acceptance.html.j2",
        charts_of("redraft.eval.report.acceptance_charts"),
    )
    write_whole(folder / "report.md", render_text(TEMPLATES / "acceptance.md.j2", **report))
    return page


def _describe_draft(draft: NamedDraft) -> dict[str, Any]:
    return {
        "name": draft.name,
        "source": draft.source,
        "family": draft.family,
        "fingerprint": draft.fingerprint,
        "method": draft.speculative["method"] if draft.speculative else None,
        "is_sampled": bool(draft.forecast and draft.forecast.is_sampled),
        "notes": list(draft.notes),
    }


def _list_notes(measured: Measured, drafts: Sequence[NamedDraft]) -> list[str]:
    notes = [f"{draft.name}: {note}." for draft in drafts for note in draft.notes]
    for draft in drafts:
        if measured.forecast and depends_on_load(draft.speculative or {}):
            notes.append(
                f"{draft.name} proposes fewer tokens in steps with several requests; here, "
                "every step had one request."
            )
        beyond = [k for k in measured.num_speculative_tokens if not draft.serves(k)]
        if beyond and draft.forecast:
            left_out = join_words([f"k = {k}" for k in beyond])
            verb = "are" if len(beyond) > 1 else "is"
            notes.append(
                f"{draft.name} was trained to draft {draft.forecast.max_tokens} tokens: {left_out} "
                f"{verb} left out."
            )
    sizes = Counter(prompt.domain for prompt in measured.prompts)
    few = [
        f"{name} ({sizes[name]})" for name in domains(measured.prompts) if sizes[name] < FEW_PROMPTS
    ]
    if few:
        notes.append(
            f"There are few prompts for {join_words(few)}: with fewer than {FEW_PROMPTS}, "
            "intervals are rough."
        )
    return notes


def _list_left_out(settings: Mapping[str, Any]) -> list[str]:
    penalties = [
        f"{name} {value:g}" for name, value in settings.get("penalties_left_out", {}).items()
    ]
    if not penalties:
        return []
    return [
        f"The target's generation_config.json also sets {join_words(penalties)}. The "
        "measurements ignore this, so requests "
        "that do not turn it off may have a different acceptance."
    ]
