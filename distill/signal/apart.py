"""Run one document per row, for a target whose packed documents would affect each other.

    packed                 a a a b b c c c c c . .          [B, T], position ids begin again in every document
    apart, in 2 passes     c c c c c | a a a      b b .     rows of similar length, padding on the right
    back                   h h h h h h h h h h . .          every token's states in its old position

Padding on the right needs no mask, because attention, convolutions and recurrences look only to the
left.

B = batch, T = tokens, b = documents in a pass, t = tokens in its longest document, n = documents, N
= rows, D = hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Number of passes; they take 5 to 28% more tokens than packed rows, and one pass 81 to 306% (chat,
# reasoning).
PASSES = 4
# Lengths are rounded to multiples of this, so that splitting thousands of documents takes as long
# as splitting dozens.
STEP = 16


def documents(document_BT: Tensor) -> list[Tensor]:
    """Return each document's indices into the flattened batch, in order, without padding."""
    flat_BT = torch.arange(document_BT.numel(), device=document_BT.device).view_as(document_BT)
    found: list[Tensor] = []
    for document_T, at_T in zip(document_BT, flat_BT, strict=True):
        is_token_T = document_T >= 0
        _, counts = document_T[is_token_T].unique_consecutive(return_counts=True)
        found += at_T[is_token_T].split(counts.tolist())
    return found


def split_documents(document_BT: Tensor, most_pairs: float) -> list[Tensor]:
    """Return, for each pass, the indices [b, t] into the flattened batch, with -1 on padding.

    There are at most `PASSES` passes, or more if b * t * t would exceed `most_pairs`.
    """
    found = sorted(documents(document_BT), key=len, reverse=True)
    passes, start = [], 0
    for end in split_by_length([len(each) for each in found]):
        fitting = max(1, int(min(most_pairs / len(found[start]) ** 2, end - start)))
        for first in range(start, end, fitting):
            rows = found[first : min(first + fitting, end)]
            passes.append(pad_sequence(rows, batch_first=True, padding_value=-1))
        start = end
    return passes


def split_by_length(lengths: Sequence[int]) -> list[int]:
    """Split lengths in descending order into at most `PASSES` runs.

    Returns the ends of the runs with the fewest padded tokens.
    """
    # A run may begin only at the first of all lengths with the same number of steps.
    rounded = [-(-length // STEP) for length in lengths]
    begins = [n for n in range(len(lengths)) if n == 0 or rounded[n] != rounded[n - 1]]
    ends = [*begins[1:], len(lengths)]
    # best[n] is (padded tokens of the lengths from n on, ends of the runs), with one more run in
    # every round.
    best: dict[int, tuple[int, list[int]]] = {len(lengths): (0, [])}
    best |= {n: (lengths[n] * (len(lengths) - n), [len(lengths)]) for n in begins}
    for _ in range(PASSES - 1):
        further = {
            n: min(
                (lengths[n] * (end - n) + best[end][0], [end, *best[end][1]])
                for end in ends
                if end > n
            )
            for n in begins
        }
        best = {len(lengths): (0, []), **further}
    return best[0][1]


def positions(at_bt: Tensor, position_ids_BT: Tensor) -> Tensor:
    """Return the positions in a pass, [b, t].

    They do not restart on the padding, because a restart would create a mask.
    """
    first_b1 = position_ids_BT.flatten()[at_bt[:, :1]]
    return first_b1 + torch.arange(at_bt.shape[1], device=at_bt.device)


def put_back(whole: Tensor | None, states_btD: Tensor, at_bt: Tensor, num_rows: int) -> Tensor:
    """Put the states of a pass in the rows of the flattened batch, [N, D].

    Rows that are in no pass are zero.
    """
    if whole is None:
        whole = states_btD.new_zeros(num_rows, states_btD.shape[2])
    is_token_bt = at_bt >= 0
    whole[at_bt[is_token_bt]] = states_btD[is_token_bt]
    return whole


def padding_factor(document_BT: Tensor) -> float:
    """Return the number of tokens in the passes, as a multiple of the packed batch's."""
    return (
        sum(at_bt.numel() for at_bt in split_documents(document_BT, float("inf")))
        / document_BT.numel()
    )
