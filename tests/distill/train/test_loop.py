"""What a launch is told of its machine, and the text that a run is evaluated on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample
from redraft.distill.train import loop
from redraft.distill.train.loop import Loop


@pytest.mark.parametrize(
    ("precision", "computes", "is_told"), [("bf16", False, True), ("bf16", True, False), ("no", False, False)]
)
def test_a_run_is_told_where_bfloat16_is_no_help(
    precision: str, computes: bool, is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def accelerator(**of: Any) -> SimpleNamespace:
        return SimpleNamespace(mixed_precision=of["mixed_precision"], is_main_process=True)

    monkeypatch.setattr(loop, "Accelerator", accelerator)
    monkeypatch.setattr(loop, "computes_bfloat16", lambda: computes)
    loop.make_accelerator(1, precision, None)
    assert ("no instructions for bfloat16" in capsys.readouterr().out) == is_told


@pytest.mark.skipif(torch.cuda.is_available(), reason="of CPUs")
def test_a_cpu_that_computes_in_bfloat16_has_the_instructions_for_it() -> None:
    if loop.computes_bfloat16():
        assert torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


def test_no_more_held_out_batches_are_made_than_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = np.arange(4, dtype=np.int32), np.ones(4, dtype=bool)
    samples = [Sample(input_ids=ids, loss_mask=mask, conversation=str(i), domain="all") for i in range(5)]
    held_out, made = PackedDataset(samples, sequence_length=4, seed=0), []
    collate = held_out._collate
    monkeypatch.setattr(held_out, "_collate", lambda rows: made.append(len(rows)) or collate(rows))
    accelerator: Any = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"))
    for wanted, num in ((2, 2), (9, 5)):
        made.clear()
        batches = loop._take_held_out(held_out, Loop(batch_size=1, eval_batches=wanted), accelerator)
        assert len(batches) == len(made) == num
