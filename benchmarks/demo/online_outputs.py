"""Compare the tokens that clients received with the target's greedy ones.

In float32, they are the same except for ties. In 16 bits, rounding decides between more tokens,
with or without a draft. So the target alone, computed here in its dtype, is compared with the
target in float32 on the same texts. The engine has different kernels and batches, and rounds
differently, so an answer may be off by up to twice the widest of these gaps.

T = tokens of an answer, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from redraft.engine.lossless import TIE_LOGIT_GAP, TIE_LOGIT_GAP_HALF
from redraft.files.progress import Progress

Text = tuple[Sequence[int], Sequence[int]]
"""The tokens of a prompt, and the tokens of its answer."""


def spread(texts: Sequence[Text], most: int) -> Sequence[Text]:
    """Return at most `most` of the texts, evenly spaced."""
    return texts[:: -(-len(texts) // most)] if texts else texts


@torch.no_grad()
def compare_with_target(texts: Sequence[Text], target: Any, exact: Any) -> dict[str, Any]:
    """Count the answers with a token other than the best one of `exact`.

    `exact` is the target in float32. The widest gap in logits is reported too. Both are also
    reported for `target_alone`, i.e. for the tokens that `target`, the same model in the dtype in
    which it is served, prefers after the same text. If `exact` is `target`, there is nothing to
    compare, and the counts of `target_alone` are 0. `tie_gap` is the widest gap that counts as
    rounding, and `lossless` is true if all gaps are within it.
    """
    gaps, alone = [0.0], [0.0]
    for prompt, answer in Progress(texts, desc="lossless", unit="answer"):
        ids = torch.tensor([[*prompt, *answer]])
        # Row t predicts token t + 1, so the answer is predicted by the rows from the last token of
        # the prompt to the second to last token.
        rows = slice(len(prompt) - 1, -1)
        logits_TV = exact(input_ids=ids).logits[0, rows]
        gaps.append(widest_gap(logits_TV, torch.tensor(answer)))
        if target is not exact:
            alone.append(widest_gap(logits_TV, target(input_ids=ids).logits[0, rows].argmax(-1)))
    tie_gap = max(
        2 * max(alone), TIE_LOGIT_GAP if target.dtype == torch.float32 else TIE_LOGIT_GAP_HALF
    )
    return {
        "answers": len(texts),
        "parted": sum(gap > 0 for gap in gaps),
        "widest_gap": max(gaps),
        "target_alone": {"parted": sum(gap > 0 for gap in alone), "widest_gap": max(alone)},
        "tie_gap": tie_gap,
        "lossless": max(gaps) <= tie_gap,
    }


def widest_gap(logits_TV: Tensor, ids_T: Tensor) -> float:
    """Return the largest distance of a token's logit from the best one of its row.

    0 if every token is a best one.
    """
    chosen_T = logits_TV.gather(1, ids_T[:, None])[:, 0]
    return float((logits_TV.amax(-1) - chosen_T).max())
