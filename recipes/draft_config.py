"""How vLLM serves a draft, and what may be wrong with one that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from eval.ngram import Ngram
from heads.artifact import safetensors_header
from heads.check import Pair, family_of_tensors
from heads.check_families import METHODS
from heads.check_static import static_findings
from heads.checkpoint import is_hub_name, model_folder
from heads.tensors import tensor_files

WITHOUT_MODEL = ("ngram", "suffix", "mtp")
"""Drafts that are no folder: looked up in the text, or the target's own layer."""


def draft_config(draft: str) -> dict[str, Any]:
    """vLLM's --speculative-config of a draft, but for the number of tokens. A hub name is fetched.

    Raises: FileNotFoundError, ValueError where there is no such draft, or vLLM cannot serve it beside a target.
    """
    if draft == "ngram":
        ngram = Ngram()
        return {"method": "ngram", "prompt_lookup_min": ngram.min, "prompt_lookup_max": ngram.max}
    if draft in WITHOUT_MODEL:
        return {"method": draft}
    if not is_hub_name(draft) and not Path(draft).is_dir():
        raise FileNotFoundError(f"there is no draft {draft}: give a folder, a hub name, {', '.join(WITHOUT_MODEL)}")
    family = _family(Path(snapshot_download(draft)) if is_hub_name(draft) else Path(draft))
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
    if draft in WITHOUT_MODEL:
        return ""
    try:
        pair = Pair.read(model_folder(target), model_folder(draft))
        found = static_findings(pair, method=None, num_speculative_tokens=num_speculative_tokens)
    except (ValueError, OSError) as error:  # it cannot be read at all
        return f"; {error}"
    return "".join(f"; {finding.problem}, cure: {finding.cure}" for finding in found[:1])
