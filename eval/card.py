"""A model card of an exported draft, README.md with the front matter that the hub reads, from an acceptance report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from eval.acceptance_results import tau_of
from eval.report import render_text
from heads.artifact import write_whole
from heads.checkpoint import is_hub_name

MADE_BY = "<!-- made by redraft eval -->"
"""Stands in every card of ours; a README.md without it is somebody's own."""


def write_card(folder: Path, report: Mapping[str, Any], draft: str) -> Path:
    """Write the card of the draft of that name into its folder.

    Raises: FileExistsError where README.md is there and not ours.
    """
    path = folder / "README.md"
    if path.is_file() and MADE_BY not in path.read_text():
        raise FileExistsError(f"{path} was not made by redraft: move it away first")
    write_whole(path, card(report, draft))
    return path


def card(report: Mapping[str, Any], draft: str) -> str:
    """README.md of the draft of that name."""
    about = next(entry for entry in report["drafts"] if entry["name"] == draft)
    rows = [row for row in report["results"] if row["draft"] == draft]
    front_matter = ModelCardData(
        library_name="vllm" if about["method"] else None,
        pipeline_tag="text-generation",
        # the hub links to it; a folder of somebody's machine it cannot
        base_model=report["target"]["name"] if is_hub_name(report["target"]["name"]) else None,
        tags=["speculative-decoding", "draft-model", about["family"].replace("_", "-"), "redraft"],
        model_name=draft,
        eval_results=_eval_results(report, rows),
    )
    return render_text(
        "card.md.j2", **{**report, "front_matter": front_matter.to_yaml(), "about": about, "rows": rows},
        made_by=MADE_BY,
    )  # fmt: skip


def _eval_results(report: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> list[EvalResult]:
    """tau of every domain, temperature and number of draft tokens."""
    data = report["settings"]["data"]
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Speculative decoding",
            dataset_type=data,
            dataset_name=f"{data}{'' if row['domain'] is None else ', ' + row['domain']}",
            metric_type="tau",
            metric_name=f"tokens per target step, {entry['num_speculative_tokens']} draft tokens, "
            f"temperature {row['temperature']:g}",
            metric_value=round(tau_of(entry), 3),
        )
        for row in rows
        for entry in row["by_num_speculative_tokens"]
    ]
