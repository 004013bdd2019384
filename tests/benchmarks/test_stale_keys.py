"""The forecast of a head on keys of another one."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.studies.stale_keys import run
from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample
from redraft.files.checkpoint import load_causal_lm
from redraft.heads.catalog import find_family
from redraft.heads.target import Target


def test_its_own_keys_in_place_of_themselves_change_nothing_and_others_do(tiny_target: Path):
    target, model = Target.from_folder(tiny_target), load_causal_lm(tiny_target).float().eval()
    head = find_family("eagle3").load(Path("tests/assets/tiny-eagle3"), lambda: target).float()
    ids = model.generate(torch.arange(20, 40)[None], max_new_tokens=60, do_sample=False)[0].numpy()
    mask = torch.arange(len(ids)).numpy() >= 20
    sample = Sample(input_ids=ids, loss_mask=mask, conversation="a", domain="")
    batch = PackedDataset([sample], sequence_length=len(ids)).batch(0, batch_size=1)
    with torch.no_grad():
        (accepted, blocks), own = run(head, model, batch, 20)
        assert blocks > 20
        assert {name: keys.shape[1] for name, keys in own.items()} == {
            name: len(ids) for name in ("k_proj", "v_proj")
        }
        assert run(head, model, batch, 20, own)[0] == (accepted, blocks)
        noise = {name: 5 * torch.randn_like(keys) for name, keys in own.items()}
        assert run(head, model, batch, 20, noise)[0] != (accepted, blocks)
        # keys of no token are replaced
        assert run(head, model, batch, 0, noise)[1]["k_proj"].equal(own["k_proj"])
