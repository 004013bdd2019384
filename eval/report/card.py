"""The model card of an exported draft: README.md with front matter for the hub, made from an acceptance report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from redraft.eval.report.page import TEMPLATES, render_text
from redraft.eval.report.results import read_tau
from redraft.heads.catalog import find_method
from redraft.heads.files.artifact import write_whole
from redraft.heads.files.folder import is_hub_name

MADE_BY = "<!-- made by redraft eval -->"
"""Marks a card as ours. A README.md without it was written by somebody else and is never overwritten."""


def write_card(folder: Path, report: Mapping[str, Any], draft: str) -> Path:
    """Write the card of the draft named `draft` into `folder`.

    Raises: FileExistsError if `folder` has a README.md that redraft did not write.
    """
    path = folder / "README.md"
    if path.is_file() and MADE_BY not in path.read_text():
        raise FileExistsError(f"{path} was not made by redraft: move it away to let --card write one")
    write_whole(path, render_card(report, draft))
    return path


def render_card(report: Mapping[str, Any], draft: str) -> str:
    """The README.md of the draft named `draft`."""
    about = next(entry for entry in report["drafts"] if entry["name"] == draft)
    rows = [row for row in report["results"] if row["draft"] == draft]
    front_matter = ModelCardData(
        library_name="vllm" if about["method"] else None,
        pipeline_tag="text-generation",
        # the hub makes it a link, which a local folder cannot be
        base_model=report["target"]["name"] if is_hub_name(report["target"]["name"]) else None,
        tags=["speculative-decoding", "draft-model", about["family"].replace("_", "-"), "redraft"],
        model_name=draft,
        eval_results=_list_eval_results(report["settings"]["data"], rows),
    )
    family = find_method(about["method"])
    return render_text(
        TEMPLATES / "card.md.j2",
        **report,
        front_matter=front_matter.to_yaml(),
        about=about,
        rows=rows,
        is_in_target=family is not None and family.is_in_target,
        made_by=MADE_BY,
    )


def _list_eval_results(data: str, rows: list[Mapping[str, Any]]) -> list[EvalResult]:
    """tau for every domain, temperature and number of draft tokens."""
    results = []
    for row in rows:
        for entry in row["by_num_speculative_tokens"]:
            k = entry["num_speculative_tokens"]
            results.append(
                EvalResult(
                    task_type="text-generation",
                    task_name="Speculative decoding",
                    dataset_type=data,
                    dataset_name=data if row["domain"] is None else f"{data}, {row['domain']}",
                    metric_type="tau",
                    metric_name=f"tokens per target step, {k} draft token{'s' if k > 1 else ''}, "
                    f"temperature {row['temperature']:g}",
                    metric_value=round(read_tau(entry), 3),
                )
            )
    return results
