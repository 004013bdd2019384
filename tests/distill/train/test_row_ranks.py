"""Which rows a rank trains if ranks share rows, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_heads import make_batch, make_ids, make_target

from redraft.distill.data.packing import collate
from redraft.distill.data.samples import Sample, data_hash
from redraft.distill.signal.cache import CachedHiddenStates, HiddenStates
from redraft.distill.signal.shards import write_cache
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.row_ranks import require_shares
from redraft.distill.train.run_config import Loop, Signal
from redraft.heads.catalog import find_family
from redraft.heads.draft import Batch, final_hidden, label_rows, token_rows
from redraft.heads.nn.shares import share_rows

RANKS, AHEAD = 2, 3


def shares(batch: Batch) -> Iterator[Batch]:
    return (share_rows(batch, rank, RANKS, AHEAD) for rank in range(RANKS))


def test_context_parallel_ranks_have_each_row_once_and_see_the_labels_behind_their_pieces() -> None:
    """Rank 0 has the first and the last of four pieces, rank 1 those between."""
    batch = make_batch([[make_ids(9), make_ids(6, seed=2)], [make_ids(16, seed=3)]], loss_from=2)
    first, second = shares(batch)
    assert [part.shared and part.shared.starts for part in (first, second)] == [(0, 12), (4, 8)]
    for part in (first, second):
        assert part.shared is not None
        rows_t, own_t = part.shared.rows_t, part.shared.is_own_t
        assert torch.equal(part.input_ids_BT, batch.input_ids_BT[:, rows_t])
        for shift in range(AHEAD):
            assert torch.equal(
                label_rows(part, shift)[:, own_t], label_rows(batch, shift)[:, rows_t[own_t]]
            )
    owned = torch.cat([p.shared.rows_t[p.shared.is_own_t] for p in (first, second) if p.shared])
    assert owned.sort().values.tolist() == list(range(16))
    assert sum(int(token_rows(part).sum()) for part in (first, second)) == 15 + 16
    assert all(not label_rows(part, 1)[:, 4 : 4 + AHEAD].any() for part in (first, second))


def test_context_parallel_ranks_read_their_rows_of_a_cache(tmp_path: Path) -> None:
    model = make_target()
    samples = [
        Sample(
            input_ids=np.array(make_ids(length, seed=length), np.int32),
            loss_mask=np.arange(length) >= 2,
            conversation=str(length),
            domain="all",
        )
        for length in (11, 5, 16)
    ]
    content = HiddenStates(layers=(1, 4), hidden_size=32, dtype="float32")
    live = InProcessTarget(model, content.layers)
    write_cache(samples, live, tmp_path, content, target="t", sequence_length=16, batch_size=1)
    cached = CachedHiddenStates(
        tmp_path, content, target="t", data=data_hash(samples), head_VD=live._head()
    )
    batch = collate([[samples[0], samples[1]], [samples[2]]], 16)
    whole = cached(batch)
    assert whole.aux_BTLD is not None
    for part in shares(batch):
        assert part.shared is not None
        signal, rows_t = cached(part), part.shared.rows_t
        is_token_BT = part.document_BT >= 0
        for found, wanted in (
            (final_hidden(signal), final_hidden(whole)),
            (signal.aux_BTLD, whole.aux_BTLD),
        ):
            assert found is not None
            assert torch.equal(found[is_token_BT], wanted[:, rows_t][is_token_BT])


@pytest.mark.parametrize(
    ("family", "options", "processes", "named"),
    [
        ("eagle3", {"context_parallel": 2}, 3, "3 processes"),
        ("eagle3", {"context_parallel": 4, "sequence_length": 4100}, 4, "multiple of 8"),
        ("peagle", {"context_parallel": 2}, 2, "P-EAGLE"),
        ("standalone", {"context_parallel": 2}, 2, "standalone"),
        ("dflash", {"context_parallel": 2}, 2, "--signal.kind cache"),
    ],
)
def test_context_parallel_that_cannot_work_is_refused_in_one_line(
    family: str, options: dict[str, Any], processes: int, named: str
) -> None:
    signal = Signal(kind="endpoint", url=("http://t1:8001",)) if family == "dflash" else Signal()
    with pytest.raises(ValueError, match=named) as refused:
        require_shares(find_family(family), Loop(**options), signal, processes)
    assert "\n" not in str(refused.value)
    require_shares(find_family("eagle3"), Loop(context_parallel=2), Signal(), 4)
