"""The report on made counts, and a short form with the real peer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.time_to_tau import bench
from benchmarks.time_to_tau.bench import Config, Judged, main, make_course, report, require_same
from benchmarks.time_to_tau.course import Finished, Mark, make_settings
from redraft.distill.train.run_config import make_config
from redraft.files.checkpoint import load_causal_lm
from redraft.heads.catalog import find_family
from redraft.heads.families.eagle3 import Eagle3
from redraft.heads.target import Target

TINY = Path(__file__).parents[2] / "assets" / "tiny-target"


def make_judged(cfg: Config, name: str, seed: int, taus: list[float]) -> Judged:
    """A course of 5 minutes a mark, and 1,000 answer tokens a minute for redraft, 500 for others."""
    rate = 1000 if name == "redraft" else 500
    marks = [
        Mark(
            minutes=5.0 * i, cpu_minutes=9.0 * i, steps=i, tokens=9 * rate * i,
            labels=5 * rate * i, head=f"head-{i:02}",
        )
        for i in range(len(taus))
    ]  # fmt: skip
    finished = Finished(
        course=make_course(cfg, "target", name, seed), settings={}, planned_steps=7, marks=marks
    )
    counts = [np.array([[10 * (tau - 1), 10.0]] * 4) for tau in taus]
    return Judged(finished, counts, counts[-1])


def test_the_report_has_ratio_and_gains_of_each_peer_and_a_chart(tmp_path: Path) -> None:
    cfg = Config(output=tmp_path, minutes=15, seeds=2)
    judged = {
        "redraft": [make_judged(cfg, "redraft", seed, [1.2, 1.6, 1.8]) for seed in range(2)],
        "best": [make_judged(cfg, "best", seed, [1.2, 1.3, 1.3]) for seed in range(2)],
        "speculators": [
            make_judged(cfg, "speculators", seed, [1.0, 1.2, 1.4]) for seed in range(2)
        ],
        "speculators_small": [],
    }
    report(cfg, "target", judged)
    written = json.loads((tmp_path / "report.json").read_text())
    ratio = written["time_to_tau"]["ratio_speculators"]
    assert ratio["value"] == pytest.approx(0.25)
    assert ratio["minutes"] == pytest.approx(2.5)
    assert ratio["reached"] is True
    assert written["time_to_tau"]["best_ratio_speculators"]["reached"] is False
    assert set(written["time_to_tau"]) == {"ratio_speculators", "best_ratio_speculators"}
    assert written["equal_time"]["speculators"]["value"] == pytest.approx(0.4)
    # 5,000 answer tokens: our minute 5, the peer's minute 10
    assert written["equal_labels"]["speculators"]["value"] == pytest.approx(0.2)
    assert written["trainers"]["speculators"]["runs"][0]["engine"] == pytest.approx(1.4)
    assert [point["minutes"] for point in written["trainers"]["redraft"]["curve"]] == [0, 5, 10]
    chart = (tmp_path / "curves.svg").read_text()
    assert chart.startswith("<svg")
    assert "redraft, default" in chart
    assert "speculators, default" in chart


def test_a_finished_training_with_other_settings_is_refused(tmp_path: Path) -> None:
    course = make_course(Config(output=tmp_path), "target", "redraft", 0)
    course.result.parent.mkdir()
    content = {"course": vars(course), "settings": {}, "planned_steps": 1, "marks": []}
    course.result.write_text(json.dumps(content))
    require_same(course)
    with pytest.raises(ValueError, match="pass a different --output"):
        require_same(replace(course, minutes=29.0))


@pytest.mark.parametrize("family", ["eagle3", "dflash"])
def test_the_flags_of_every_side_are_understood(family: Any, tmp_path: Path) -> None:
    cfg = Config(family=family, output=tmp_path)
    found = {name: make_settings(make_course(cfg, "target", name, 0)) for name in bench.SIDES}
    default = found["redraft"]
    assert default.loop.batch_size == make_config(find_family(family)).loop.batch_size
    assert default.loop.sequence_length == cfg.sequence_length
    assert found["best"].loop.batch_size == 1
    assert found["best"].head != default.head


def test_an_unknown_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match="speculator: choose from redraft"):
        Config(trainers=("speculator",))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle3", "dflash"])
def test_a_short_form_trains_and_judges_redraft_and_the_real_peer_and_then_continues(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("speculators", reason="pip install speculators==0.9.0")
    blocks = ("--head.num-anchors", "16", "--head.num-layers", "1")
    peer = "speculators" if family == "eagle3" else "speculators_small"
    cfg = Config(
        family=family, trainers=("redraft", peer), target=str(TINY), output=tmp_path,
        minutes=0.1, every_minutes=0.05, seeds=1, num_questions=3, max_tokens=16, rows=1,
        sequence_length=256, threads=1, engine=False,
        flags=(
            "--draft-vocab-size", "2048",
            *(("--init-tokens", "1024") if family == "eagle3" else blocks),
        ),
    )  # fmt: skip
    main(cfg)
    written = json.loads((tmp_path / "report.json").read_text())
    for name in cfg.trainers:
        (run,) = written["trainers"][name]["runs"]
        assert run["marks"][-1]["steps"] == run["planned_steps"] >= 1
        assert run["marks"][-1]["labels"] > 0
        assert all(mark["tau"] >= 1 for mark in run["marks"])
    # Everything is kept: nothing is trained or judged twice.
    monkeypatch.setattr(bench.subprocess, "run", None)
    main(cfg)
    again = json.loads((tmp_path / "report.json").read_text())
    assert again["trainers"] == written["trainers"]
    if family == "eagle3":
        last = written["trainers"]["speculators"]["runs"][0]["marks"][-1]["head"]
        compare_with_its_own_code(tmp_path / "speculators-0" / last)


def compare_with_its_own_code(head: Path) -> None:
    """The trained head of speculators proposes the same in its code as in ours."""
    import speculators
    from make_heads import make_signal
    from speculators.models.attention import create_float_mask

    from redraft.heads.draft import Batch

    model = load_causal_lm(TINY).float()
    ours = Eagle3.load(head, Target.from_model(model)).eval()
    theirs = speculators.SpeculatorModel.from_pretrained(str(head)).eval()
    theirs._attn_impl, theirs._create_mask_fn = "eager", create_float_mask
    for layer in theirs.layers:
        layer.self_attn.config._attn_implementation = "eager"
    logits: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0]))
    batch = Batch.padded([list(range(20, 60))])
    signal = make_signal(model, batch, ours.aux_layer_ids)
    assert signal.aux_BTLD is not None
    with torch.no_grad():
        theirs(
            signal.aux_BTLD.flatten(2),
            batch.input_ids_BT.roll(-1, 1),
            torch.zeros_like(batch.input_ids_BT),
            ttt_steps=3,
        )
        steps = ours.draft_steps(batch, signal, 3)
    for step, logits_TW in zip(steps, logits, strict=True):
        rows_N = step.mask_BT[0].nonzero().squeeze(-1)
        torch.testing.assert_close(step.logits(rows_N), logits_TW[rows_N], atol=1e-4, rtol=1e-4)
