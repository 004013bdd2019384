"""The quick demo without an engine: its settings, its servers and its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.demo import quick
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.lossless import Difference
from redraft.engine.measure import Measurement, Output
from redraft.engine.prompts import Prompt
from redraft.eval.serving.bench_report import LosslessReport
from redraft.eval.serving.rounds import PLAIN, Plan, Results
from redraft.recipes.decide.bench_config import PRESETS, RETRIEVAL

SECONDS = {PLAIN: [2.0] * 6, RETRIEVAL: [1.0, 1.0, 1.25, 1.0, 0.8, 1.0]}
"""Of each round, for 96 tokens."""


def measure(
    target: str,
    drafts: Mapping[str, Any],
    prompts: Sequence[Prompt],
    plan: Plan,
    logs: Path,
    **options: Any,
) -> Results:
    assert list(drafts) == [PLAIN, RETRIEVAL]
    assert drafts[PLAIN] is None
    assert (options["mode"], options["vllm_defaults"]) == ("compiled", True)
    assert (plan.rounds, dict(plan.prompts), plan.max_tokens) == (6, {1: 2}, 96)
    assert len(prompts) == 12
    counts = AcceptanceCounts.from_blocks([1, 0], 2)
    return {
        (name, 1): [
            Measurement(
                prompts=prompts[:1],
                outputs=[
                    Output(token_ids=[1, 2, 3], counts=None if name == PLAIN else counts),
                ],
                full_s=seconds,
                full_tokens=96,
                dtype="bfloat16",
                counts=None if name == PLAIN else counts,
            )
            for seconds in SECONDS[name]
        ]
        for name in drafts
    }


def test_the_answer_is_the_ratio_over_plain_vllm_with_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = SimpleNamespace(name="target", dtype="bfloat16")
    counted = SimpleNamespace(name=RETRIEVAL, speculative_config={"method": "custom"})
    parted = LosslessReport(
        num_prompts=12,
        lossless=True,
        differences=[
            Difference(
                prompt=0,
                domain="code",
                position=3,
                token_with=1,
                token_without=2,
                logit_gap=0.0,
                is_tie=True,
            )
        ],
        num_parted_alone=0,
        widest_gap_alone=0.0,
    )
    monkeypatch.setattr(quick, "make_target", lambda folder: folder)
    monkeypatch.setattr(quick, "open_target", lambda *_, **__: target)
    monkeypatch.setattr(quick, "load_questions", lambda cfg: [])
    monkeypatch.setattr(quick, "render_prompts", lambda *_: ([], [Prompt(token_ids=[1])] * 12))
    monkeypatch.setattr(quick, "prepare", lambda *_: None)
    monkeypatch.setattr(
        quick, "make_lookups", lambda _: iter([SimpleNamespace(name="ngram"), counted])
    )
    monkeypatch.setattr(quick, "measure_servers", measure)
    monkeypatch.setattr(quick, "prove_lossless", lambda *_: parted)
    quick.main(quick.QuickConfig(output=tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert "plain vLLM:        48.0 tokens/s, 1.00 tokens per step" in lines
    assert "2.00x as fast [1.60, 2.50], one request at a time" in lines
    assert "11 of 12 outputs equal plain vLLM's, token for token" in lines
    written = json.loads((tmp_path / "report.json").read_text())
    assert written[RETRIEVAL]["ratio"] == 2.0
    assert written[RETRIEVAL]["interval"] == pytest.approx([1.6, 2.5])


def test_the_questions_are_those_of_the_long_demo_at_one_request(tmp_path: Path) -> None:
    ours, long = quick.make_settings(tmp_path), PRESETS["smollm2"]
    same = ("temperature", "max_tokens", "max_prompt_tokens", "rounds")
    assert [getattr(ours, name) for name in same] == [getattr(long, name) for name in same]
    assert ours.loads == long.loads[:1] == (1,)
    assert not ours.train
