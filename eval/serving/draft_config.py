"""vLLM's config to serve a draft, and the likely cure if vLLM refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redraft.eval.engine.lookup_first import HeadLimits, mix
from redraft.eval.engine.server import require_runner
from redraft.eval.forecast.drafts import SampleMethod, draft_folder
from redraft.eval.forecast.ngram import Mix, Ngram
from redraft.heads.catalog import FAMILIES, detect_family_by_tensors, find_method
from redraft.heads.doctor.checks import first_cure
from redraft.heads.families.retrieval import BEFORE_HEAD, Retrieval, is_retrieval
from redraft.heads.family import Family
from redraft.heads.files.folder import tensor_files


def list_without_model() -> list[str]:
    """Names of the drafts without a folder: lookups in the text, and layers of the target."""
    return [family.name for family in FAMILIES if (family.is_lookup and not family.tensors) or family.is_in_target]


def draft_config(draft: str, sample_method: SampleMethod = "greedy") -> dict[str, Any]:
    """vLLM's --speculative-config of a draft, without the number of tokens. A hub name is downloaded.

    Drafts that cannot be sampled are greedy whatever `sample_method` says. `ngram+DRAFT` looks n-grams up
    first, and `ANSWERS+DRAFT` counted answers.

    Raises:
        FileNotFoundError: there is no such draft.
        ValueError: vLLM cannot serve it next to a target.
    """
    if mixed := Mix.parse(draft):
        head = draft_config(mixed.head, sample_method)
        return mix(lookup_config(mixed), head, HeadLimits(tokens=mixed.head_tokens))
    if draft == "ngram":
        return Ngram().speculative_config
    if draft in list_without_model():
        config = {"method": draft, **_sampled(find_method(draft), sample_method)}
        require_runner(config)
        return config
    folder = draft_folder(draft, list_without_model())
    if is_retrieval(folder):
        return Retrieval.speculative_config(folder)
    family = detect_family_by_tensors(tensor_files(folder), folder)
    if family.is_in_target:
        raise ValueError(
            f"{draft} is a target with its {family.title} layer in it: give --target {draft} --draft {family.name}"
        )
    if family.method is None:
        raise ValueError(f"vLLM has no proposer for {draft}, a draft of the family {family.name}")
    require_runner(family.speculative)
    return {**family.speculative, "model": draft, **_sampled(family, sample_method)}


def lookup_config(mixed: Mix) -> dict[str, Any]:
    """vLLM's config of the lookup before a head, as if it were alone."""
    if mixed.lookup == "ngram":
        return Ngram().speculative_config
    return Retrieval.speculative_config(Path(mixed.lookup), least_first=BEFORE_HEAD)


def _sampled(family: Family | None, sample_method: SampleMethod) -> dict[str, str]:
    """vLLM's draft_sample_method; empty for greedy drafts, its default."""
    can_sample = family is not None and family.can_sample
    return {"draft_sample_method": sample_method} if sample_method == "probabilistic" and can_sample else {}


def cure(target: str, draft: str, num_speculative_tokens: int) -> str:
    """The doctor's first finding in a refused draft, with the cure; empty if there is none."""
    mixed = Mix.parse(draft)
    # For a mix, the doctor reads the folder of the head.
    folder = mixed.head if mixed else draft
    if folder in list_without_model() or is_retrieval(folder):
        return ""
    return first_cure(target, folder, num_speculative_tokens)
