"""Checks of where a draft comes from: its bytes, the target it was trained for, and whether it is complete."""

from __future__ import annotations

from collections.abc import Iterator

from heads.artifact import MANIFEST, fingerprint, verify
from heads.check import Pair
from heads.checkpoint import load_causal_lm
from heads.families import family
from heads.finding import Finding
from heads.target import Target


def manifest(pair: Pair) -> Iterator[Finding]:
    """Every file as it was published; nothing to say of a folder that was not."""
    if not (pair.draft / MANIFEST).is_file():
        return
    try:
        verify(pair.draft)
    except ValueError as error:
        problem, _, cure = str(error).rpartition(": ")
        yield Finding(problem, cure)


def target_fingerprint(pair: Pair) -> Iterator[Finding]:
    """The target that provenance names is the one that was given; a target that holds its MTP layer is its own."""
    trained_for = (pair.provenance or {}).get("target_fingerprint")
    if trained_for is None or pair.is_own_target or trained_for == fingerprint(pair.target):
        return
    name = (pair.provenance or {}).get("target", "another model")
    yield Finding(
        f"the draft was trained for another target: {name}, fingerprint {trained_for[:12]}",
        "give that target, or train a draft for this one",
    )


def completeness(pair: Pair) -> Iterator[Finding]:
    """Every tensor of the head is there and none besides; engines load one that lacks some in silence."""
    try:
        if pair.family == "standalone":
            load_causal_lm(pair.draft)
        else:
            family(pair.family).head.load(pair.draft, Target.from_folder(pair.target))
    except (ValueError, KeyError) as error:
        text = f"config.json lacks {error}" if isinstance(error, KeyError) else str(error)
        yield Finding(text.removeprefix(f"{pair.draft} ").removeprefix(f"{pair.draft}: "), "export the head again")
