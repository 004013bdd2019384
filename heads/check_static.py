"""Which checks every family gets. A new check is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from heads import check_eagle3, check_families, check_origin, check_shared
from heads.artifact import MANIFEST, PROVENANCE
from heads.check import Pair
from heads.checkpoint import model_folder
from heads.finding import Finding

Check = Callable[[Pair], Iterator[Finding]]

EAGLE: tuple[Check, ...] = (
    check_shared.sizes,
    check_shared.rope,
    check_shared.positions,
    check_shared.shared_weights,
    check_shared.fc_bias,
)
BY_FAMILY: dict[str, tuple[Check, ...]] = {
    "eagle1": EAGLE,
    "eagle3": (*EAGLE, check_eagle3.aux_layers, check_eagle3.options, check_eagle3.vocabulary_map),
    "medusa": (check_families.medusa_bias,),
    "mtp": (check_families.mtp_layout, check_shared.sizes, check_shared.rope, check_shared.positions),
    "mlp_speculator": (),
    "standalone": (check_shared.tokenizer, check_shared.positions),
}


def static_findings(pair: Pair, *, method: str | None, num_speculative_tokens: int) -> list[Finding]:
    """Everything that configs, headers and small tensors give away, without computing anything."""
    checks: list[Check] = [
        check_origin.manifest,
        check_origin.target_fingerprint,
        partial(check_families.method_flag, method=method),
        *BY_FAMILY[pair.family],
    ]
    if pair.family == "medusa":
        checks.append(partial(check_families.medusa_sizes, num_speculative_tokens=num_speculative_tokens))
    found = [finding for check in checks for finding in check(pair)]
    # what a wrong key or tensor does to loading is named above in better words
    return found or list(check_origin.completeness(pair))


def first_cure(target: str | Path, draft: str | Path, num_speculative_tokens: int) -> str:
    """What is found first in a draft that an engine refused, and its cure, to put behind what the engine said; empty
    where nothing is found."""
    try:
        pair = Pair.read(model_folder(target), model_folder(draft))
        found = static_findings(pair, method=None, num_speculative_tokens=num_speculative_tokens)
    except (ValueError, OSError) as error:  # it cannot be read at all
        return f"; {error}"
    return "".join(f"; {finding.problem}, cure: {finding.cure}" for finding in found[:1])


def notes(pair: Pair) -> Iterator[str]:
    """What could not be checked, and why; a line each."""
    if pair.family == "mlp_speculator":
        yield "vLLM has no proposer for MLPSpeculator: redraft's reference decoder serves it"
    if not (pair.draft / MANIFEST).is_file():
        yield f"{pair.draft} has no {MANIFEST}: whether its files are intact is not known"
    if pair.provenance is None:
        yield f"{pair.draft} has no {PROVENANCE}: which target and acceptance it was trained to is not known"
    if pair.trained_with is None and pair.family == "eagle3":
        yield "its config does not record how it was trained: aux layers and norms are taken at their word"
    trained_length = ((pair.provenance or {}).get("config", {}).get("loop") or {}).get("sequence_length")
    served_length = pair.target_config.max_position_embeddings
    if trained_length is not None and trained_length < served_length:
        yield f"trained on {trained_length} positions, the target serves {served_length}: measure acceptance far out"
