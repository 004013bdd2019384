"""Which drafts the doctor runs in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_heads import make_random, make_target

from redraft.distill.doctor.check_draft import check_draft
from redraft.distill.doctor.in_engine import EngineCheck
from redraft.heads.families import dspark, peagle
from redraft.heads.target import Target


def test_a_draft_that_the_runner_does_not_serve_is_checked_without_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    model = make_target()
    model.save_pretrained(tmp_path / "target")
    config = dspark.Config(aux_layer_ids=(1, 2, 4), num_layers=1, block_size=3, markov_rank=8)
    make_random(dspark.DSpark(config, Target.from_model(model))).export(tmp_path / "draft")
    checked = check_draft(
        str(tmp_path / "target"),
        str(tmp_path / "draft"),
        method=None,
        num_speculative_tokens=None,
        engine=EngineCheck(folder=tmp_path / "engine"),
        adaptive_verification=True,
    )
    assert checked.findings == []
    reason = "not run in the engine: only vLLM's V2 model runner serves DSpark, and VLLM_USE_V2_MODEL_RUNNER=0"
    assert [note for note in checked.notes if reason in note]
    assert not (tmp_path / "engine").exists()


def test_p_eagle_is_checked_without_an_engine_if_v2_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    model = make_target()
    model.save_pretrained(tmp_path / "target")
    config = peagle.Config(aux_layer_ids=(1, 2, 4), num_layers=2, num_steps=3)
    make_random(peagle.PEagle(config, Target.from_model(model))).export(tmp_path / "draft")
    checked = check_draft(
        str(tmp_path / "target"),
        str(tmp_path / "draft"),
        method=None,
        num_speculative_tokens=None,
        engine=EngineCheck(folder=tmp_path / "engine"),
    )
    assert checked.findings == []
    reason = "not run in the engine: only vLLM's V1 model runner serves P-EAGLE, and VLLM_USE_V2_MODEL_RUNNER=1"
    assert [note for note in checked.notes if reason in note]
    assert not (tmp_path / "engine").exists()
