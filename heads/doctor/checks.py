"""All checks of a draft's folder: some for every family, others from the family's row in the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from redraft.heads.doctor import method as check_method
from redraft.heads.doctor import origin as check_origin
from redraft.heads.doctor import weights as check_weights
from redraft.heads.doctor.pair import Check, Finding, Pair
from redraft.heads.files.artifact import MANIFEST, PROVENANCE
from redraft.heads.files.folder import model_folder
from redraft.heads.files.target_folder import TargetFolder


def static_findings(pair: Pair, *, method: str | None, num_speculative_tokens: int) -> list[Finding]:
    """The problems visible in configs and tensors, without running the draft."""
    # `first_cure` shows the first problem, so causes come before consequences.
    checks: list[Check] = [
        check_origin.manifest,
        check_origin.target_fingerprint,
        partial(check_method.method_flag, method=method),
        *pair.family.own_checks(),
        check_weights.numbers,
        partial(check_method.number_of_tokens, num_speculative_tokens=num_speculative_tokens),
    ]
    found = [finding for check in checks for finding in check(pair)]
    # a wrong key or tensor also breaks loading, but the checks above say it in better words
    known = any(not finding.is_doubt for finding in found)
    return found if known else [*check_origin.completeness(pair), *found]


def first_cure(target: str | Path, draft: str | Path, num_speculative_tokens: int) -> str:
    """The first problem of a refused draft, with the cure; empty if nothing is found."""
    try:
        pair = Pair.read(TargetFolder.open(target), model_folder(draft))
        found = static_findings(pair, method=None, num_speculative_tokens=num_speculative_tokens)
    except (ValueError, OSError) as error:  # the folder cannot be read at all
        return f"; {error}"
    problems = [finding for finding in found if not finding.is_doubt]
    return "".join(f"; {finding.problem}, cure: {finding.cure}" for finding in problems[:1])


def notes(pair: Pair) -> Iterator[str]:
    if pair.family.method is None:
        yield f"vLLM has no proposer for {pair.family.title}: nothing but a forecast is known of it"
    if not (pair.draft / MANIFEST).is_file():
        yield f"{pair.draft} has no {MANIFEST}: it is not known whether its files are intact"
    if pair.provenance is None:
        yield f"{pair.draft} has no {PROVENANCE}: the target and the acceptance of its training are not known"
    if pair.trained_with is None and pair.family.layers_key:
        yield "its config does not record how it was trained: aux layers and norms are taken as the config says"
    trained_length = ((pair.provenance or {}).get("config", {}).get("loop") or {}).get("sequence_length")
    served_length = pair.target_config.max_position_embeddings
    if trained_length is not None and trained_length < served_length:
        yield f"trained on {trained_length} positions, the target serves {served_length}: measure acceptance far out"
