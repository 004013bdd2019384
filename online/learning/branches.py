"""Refused drafts in a batch, for heads that read the tokens they draft.

B = batch, N = refused drafts of a row, S = draft tokens, K = kept top-k ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from redraft.distill.signal.sources import UNRECORDED
from redraft.heads.draft import Branches
from redraft.online.records.record import Record
from redraft.online.records.sequences import RefusedDraft, refused_drafts

Placed = tuple[int, RefusedDraft]
"""The start of the draft's text in the row of the batch, and the draft."""


def draw_refused(record: Record, count: int, rng: np.random.Generator) -> tuple[RefusedDraft, ...]:
    """At most `count` refused drafts of the record, drawn at random, in the order of the text."""
    found = list(refused_drafts(record)) if count else []
    return tuple(found[i] for i in sorted(rng.permutation(len(found))[:count]))


def lay_out_refused(shares: Sequence[Sequence[Sequence[Placed]]], top_k: int) -> list[Branches | None]:
    """The refused drafts of each rank's rows, in tensors of one shape; None for every rank if there are none.

    Ranks must take as many draft steps as each other: ZeRO-3 gathers the weights for each.
    """
    rows = [row for share in shares for row in share]
    count = max((len(row) for row in rows), default=0)
    if not count:
        return [None] * len(shares)
    length = max(len(draft.draft_ids_S) for row in rows for _, draft in row)
    return [_lay_out(share, top_k, count, length) for share in shares]


def _lay_out(rows: Sequence[Sequence[Placed]], top_k: int, count: int, length: int) -> Branches:
    row_BN = torch.zeros(len(rows), count, dtype=torch.int64)
    ids_BNS = torch.zeros(len(rows), count, length, dtype=torch.int64)
    mask_BNS = torch.zeros(len(rows), count, length, dtype=torch.bool)
    ids_BNSK = torch.full((len(rows), count, length, top_k), -1, dtype=torch.int64)
    log_probs_BNSK = torch.full(ids_BNSK.shape, UNRECORDED)
    for b, row in enumerate(rows):
        for n, (start, draft) in enumerate(row):
            refused = slice(draft.num_accepted, len(draft.draft_ids_S))
            row_BN[b, n] = start + draft.row
            ids_BNS[b, n, : refused.stop] = torch.from_numpy(draft.draft_ids_S.astype(np.int64))
            mask_BNS[b, n, refused] = True
            ids_BNSK[b, n, refused] = torch.from_numpy(draft.topk_ids_QK[:, :top_k].astype(np.int64))
            log_probs_BNSK[b, n, refused] = torch.from_numpy(draft.topk_log_probs_QK[:, :top_k].copy())
    return Branches(row_BN=row_BN, ids_BNS=ids_BNS, mask_BNS=mask_BNS, ids_BNSK=ids_BNSK, log_probs_BNSK=log_probs_BNSK)
