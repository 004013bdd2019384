"""Checks of a draft's origin: intact bytes, the right target, all tensors."""

from __future__ import annotations

from collections.abc import Iterator

from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.files.artifact import MANIFEST, verify
from redraft.heads.files.checkpoint import load_causal_lm
from redraft.heads.files.folder import names_lineage
from redraft.heads.target import Target


def manifest(pair: Pair) -> Iterator[Finding]:
    """Every file is as it was published; a folder without a manifest was not published and passes."""
    if not (pair.draft / MANIFEST).is_file():
        return
    try:
        verify(pair.draft)
    except ValueError as error:
        problem, _, cure = str(error).rpartition(": ")
        yield Finding(problem, cure)


def target_fingerprint(pair: Pair) -> Iterator[Finding]:
    """The provenance names the given target; another version of it is a doubt."""
    trained_for = (pair.provenance or {}).get("target_fingerprint")
    # A folder with the layer in it differs from the target of the layer's training.
    if trained_for is None or pair.is_own_target or trained_for == pair.target.fingerprint:
        return
    name = (pair.provenance or {}).get("target", "another model")
    if names_lineage(pair.provenance, pair.target.lineage):
        yield Finding(
            f"the draft was trained for another version of this target: {name}, fingerprint {trained_for[:12]}",
            "measure the acceptance with `redraft eval`, or run `redraft adapt`",
            is_doubt=True,
        )
        return
    yield Finding(
        f"the draft was trained for another target: {name}, fingerprint {trained_for[:12]}",
        "give that target, or train a draft for this one",
    )


def completeness(pair: Pair) -> Iterator[Finding]:
    """The checkpoint has exactly the tensors of the head; engines silently load an incomplete one."""
    try:
        if pair.family.is_head:
            pair.family.load(pair.draft, lambda: Target.from_folder(pair.target.folder))
        else:
            load_causal_lm(pair.draft)
    except (ValueError, KeyError) as error:
        text = f"config.json lacks {error}" if isinstance(error, KeyError) else str(error)
        yield Finding(text.removeprefix(f"{pair.draft} ").removeprefix(f"{pair.draft}: "), "export the head again")
