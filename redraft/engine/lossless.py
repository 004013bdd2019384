"""Compare outputs with a draft to outputs without one.

Greedy speculative decoding must not change any token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redraft.engine.measure import Measurement
from redraft.engine.prompts import Prompt

if TYPE_CHECKING:
    from torch import Tensor

# Maps token ids to the logits of the next token, [V].
NextLogits = Callable[[Sequence[int]], "Tensor"]

TIE_LOGIT_GAP = 1e-3  # smaller gaps are ties in float32, because batching changes logits by 1e-5
# For a 16-bit engine: bfloat16 rounds logits between 16 and 32 to multiples of 1/8.
TIE_LOGIT_GAP_HALF = 0.25


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between two outputs for the same prompt."""

    prompt: int
    domain: str
    position: int
    """Index of the first output token that differs."""
    token_with: int | None
    """Token of the output with a draft. None if this output had ended."""
    token_without: int | None
    logit_gap: float | None
    """Distance between the worse token's logit and the target's best logit. None if unknown."""
    is_tie: bool
    """Whether the gap is within floating-point error."""


@dataclass(frozen=True, kw_only=True)
class Lossless:
    num_prompts: int
    differences: list[Difference]

    @property
    def lossless(self) -> bool:
        """Whether all outputs are equal except at ties, which rounding may break either way."""
        return all(difference.is_tie for difference in self.differences)

    @property
    def widest_gap(self) -> float:
        """Return the largest known logit gap of any difference, or 0."""
        return max((difference.logit_gap or 0.0 for difference in self.differences), default=0.0)


def compare_lossless(
    with_draft: Measurement,
    without_draft: Measurement,
    target_logits: NextLogits | None = None,
    *,
    known_rounding: float = 0.0,
) -> Lossless:
    """Find the first difference between each prompt's greedy outputs.

    `target_logits` identifies ties. `known_rounding` is a gap at which the target has already
    diverged from itself without a draft.
    """
    # A draft changes the shapes of the target's matrix products, and so how logits are rounded.
    tie_gap = max(
        known_rounding, TIE_LOGIT_GAP if with_draft.dtype == "float32" else TIE_LOGIT_GAP_HALF
    )
    assert [p.token_ids for p in with_draft.prompts] == [p.token_ids for p in without_draft.prompts]
    rows = zip(with_draft.prompts, with_draft.outputs, without_draft.outputs, strict=True)
    differences = [
        _difference(index, prompt, mine.token_ids, other.token_ids, target_logits, tie_gap)
        for index, (prompt, mine, other) in enumerate(rows)
        if mine.token_ids != other.token_ids
    ]
    return Lossless(num_prompts=len(with_draft.prompts), differences=differences)


def _difference(
    index: int,
    prompt: Prompt,
    mine: list[int],
    other: list[int],
    target_logits: NextLogits | None,
    tie_gap: float,
) -> Difference:
    # If one output is a prefix of the other, the difference is at the end of the shorter one.
    pairs = enumerate(zip(mine, other, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(other)))
    pair = [ids[position] if position < len(ids) else None for ids in (mine, other)]
    gap = None
    if target_logits is not None and None not in pair:
        # Both outputs have the same prefix here, so one pass gives the logits of both tokens.
        logits_V = target_logits([*prompt.token_ids, *mine[:position]])
        # The gap is measured from the best of all tokens, because a tie needs both tokens near the
        # top.
        gap = float(logits_V.max() - logits_V[pair].min())
    return Difference(
        prompt=index,
        domain=prompt.domain,
        position=position,
        token_with=pair[0],
        token_without=pair[1],
        logit_gap=gap,
        is_tie=gap is not None and gap <= tie_gap,
    )
