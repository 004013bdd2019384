"""How vLLM serves a draft, and what may be wrong with one that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.drafts import draft_folder
from eval.ngram import Ngram
from heads.artifact import safetensors_header
from heads.check import family_of_tensors
from heads.check_families import METHODS
from heads.check_static import first_cure
from heads.tensors import tensor_files

WITHOUT_MODEL = ("ngram", "suffix", "mtp")
"""Drafts that are no folder: looked up in the text, or the target's own layer."""


def draft_config(draft: str) -> dict[str, Any]:
    """vLLM's --speculative-config of a draft, but for the number of tokens. A hub name is fetched.

    Raises: FileNotFoundError, ValueError where there is no such draft, or vLLM cannot serve it beside a target.
    """
    if draft == "ngram":
        return Ngram().speculative_config
    if draft in WITHOUT_MODEL:
        return {"method": draft}
    family = _family(draft_folder(draft, WITHOUT_MODEL))
    if family == "mtp":
        raise ValueError(f"{draft} is a target with its MTP layer in it: give --target {draft} --draft mtp")
    if family not in METHODS:
        raise ValueError(f"vLLM has no proposer for {draft}, a draft of the family {family}")
    return {"method": METHODS[family], "model": draft}


def _family(folder: Path) -> str:
    headers = map(safetensors_header, set(tensor_files(folder).values()))
    return family_of_tensors({name for header in headers for name in header}, folder)


def cure(target: str, draft: str, num_speculative_tokens: int) -> str:
    """What doctor finds in the folder of a draft that the engine refused, with its cure; empty where it finds none."""
    return "" if draft in WITHOUT_MODEL else first_cure(target, draft, num_speculative_tokens)
