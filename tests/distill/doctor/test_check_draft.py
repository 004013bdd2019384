"""Which drafts the doctor runs in the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from make_heads import make_random, make_target

from redraft.distill.doctor.check_draft import check_draft
from redraft.distill.doctor.in_engine import EngineCheck
from redraft.heads.families import dspark, peagle
from redraft.heads.target import Target


@pytest.mark.parametrize(
    ("asked", "make", "reason"),
    [
        (
            "0",
            lambda target: dspark.DSpark(
                dspark.Config(aux_layer_ids=(1, 2, 4), num_layers=1, block_size=3, markov_rank=8),
                target,
            ),
            "only vLLM's V2 model runner serves DSpark, but VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            "1",
            lambda target: peagle.PEagle(
                peagle.Config(aux_layer_ids=(1, 2, 4), num_layers=2, num_steps=3), target
            ),
            "only vLLM's V1 model runner serves P-EAGLE, but VLLM_USE_V2_MODEL_RUNNER=1",
        ),
    ],
)
def test_a_draft_that_the_runner_does_not_serve_is_checked_without_an_engine(
    asked: str,
    make: Callable[[Target], Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    model = make_target()
    model.save_pretrained(tmp_path / "target")
    make_random(make(Target.from_model(model))).export(tmp_path / "draft")
    checked = check_draft(
        str(tmp_path / "target"),
        str(tmp_path / "draft"),
        method=None,
        num_speculative_tokens=None,
        engine=EngineCheck(folder=tmp_path / "engine"),
    )
    assert checked.findings == []
    assert [note for note in checked.notes if f"engine: {reason}" in note]
    assert not (tmp_path / "engine").exists()
