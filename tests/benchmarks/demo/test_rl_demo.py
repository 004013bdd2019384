"""The demo of a target that moves.

Names, estimates and page on made numbers, and a short run that is killed once.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from learner_world import make_draft, make_records
from recorded_heads import words
from safetensors.torch import load_file, save_file

from benchmarks.demo import rl
from benchmarks.demo.fleet import begin_report
from benchmarks.demo.rl import Config, Play, find_checkpoint, repeated_share
from benchmarks.demo.rl_finetune import find_labels_ratio
from benchmarks.demo.rl_judge import (
    DRAFTS,
    Judged,
    Policy,
    build_charts,
    count_engine,
    decide,
    judge,
    summarise,
)
from benchmarks.soak import poison
from redraft.distill.data.packing import collate
from redraft.distill.data.samples import Sample
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.machine import environment
from redraft.eval.report.page import write_page
from redraft.files.checkpoint import load_causal_lm
from redraft.online.daemon.opening import open_buffer, provide_first_version
from redraft.online.fleet.registry import Registry
from redraft.online.records.record import decode_record, encode_record
from redraft.online.tokens import write_token

ROOT = Path(__file__).parents[3]
SECOND, THIRD = "step-2@aaaaaaaaaaaa", "step-3@bbbbbbbbbbbb"


def make_updates(count: int, *, learning: Any = 80.0) -> list[Judged]:
    """Updates of 100 drafts each.

    `learning` is the number of tokens accepted, or one for every update.
    """
    accepted = np.broadcast_to(learning, count).tolist()
    return [
        Judged(
            update=i + 1,
            counts={"frozen": (100, 50), "once": (100, 60), "learning": (100, accepted[i])},
            engine=(10, 8),
            records=32,
            misnamed=int(i == 0),
            would_be_noticed=31,
        )
        for i in range(count)
    ]


def test_the_gain_is_paired_by_blocks_of_updates() -> None:
    found = summarise(make_updates(40, learning=[70.0, 90.0] * 20))
    assert [found["tau"][name]["value"] for name in DRAFTS] == pytest.approx([1.5, 1.6, 1.8])
    assert found["tau_engine"] == pytest.approx(1.8)
    # Two updates make a block, and all blocks have the same mean: nothing is left to vary.
    assert found["gain"]["learning"] == {
        "value": pytest.approx(0.2),
        "interval": pytest.approx((0.2, 0.2)),
    }
    assert found["gain"]["frozen"]["value"] == pytest.approx(-0.1)
    assert found["records"]["misnamed"] == pytest.approx(1 / (40 * 32))
    assert found["records"]["would_be_noticed"] == pytest.approx(31 / 32)
    # Here blocks differ by 0.1 from the mean: t(0.975, 19) * 0.1 / sqrt(19).
    low, high = summarise(make_updates(40, learning=[70.0, 70.0, 90.0, 90.0] * 10))["gain"][
        "learning"
    ]["interval"]
    assert (low, high) == (
        pytest.approx(0.2 - 2.093 * 0.1 / 19**0.5, abs=1e-3),
        pytest.approx(0.4 - low),
    )


def test_the_sentence_follows_the_interval() -> None:
    def sentence(**settings: Any) -> str:
        return decide(summarise(make_updates(**settings))["gain"]["learning"])

    assert sentence(count=20).startswith(
        "adapting once is not enough; learning gains +0.20 [+0.20, +0.20]"
    )
    assert sentence(count=20, learning=[20.0, 110.0] * 10).startswith(
        "whether adapting once is enough is undecided; learning gains +0.05 [-0."
    )
    assert sentence(count=20, learning=40.0).startswith(
        "adapting once is enough; learning gains -0.20 ["
    )
    # certain, and too small to pay for a learner
    assert sentence(count=20, learning=61.0).startswith(
        "adapting once is enough; learning gains +0.01 [+0.0"
    )
    assert sentence(count=1).startswith("too few updates to decide")


def test_labels_are_counted_up_to_the_same_tau() -> None:
    new = [(0, 1.0), (200, 2.2), (400, 2.5)]
    assert find_labels_ratio([(0, 1.0), (100, 2.0), (200, 3.0)], new) == pytest.approx(150 / 400)
    assert find_labels_ratio([(0, 2.6), (100, 2.7)], new) == 0
    assert find_labels_ratio([(0, 1.0), (400, 2.4)], new) is None


def test_records_under_a_wrong_name_are_found(random_target: Path, tmp_path: Path) -> None:
    weights, near = tmp_path / "weights", tmp_path / "near"
    weights.mkdir()
    model = load_file(random_target / "model.safetensors")
    torch.manual_seed(0)
    save_file(
        {name: tensor + 1e-4 * torch.randn_like(tensor) for name, tensor in model.items()},
        weights / "2",
    )
    shutil.copytree(random_target, near)
    shutil.copy(weights / "2", near / "model.safetensors")
    (weights / "2").rename(weights / f"{SECOND}.safetensors")
    changes: dict[str, Any] = {"draft_version": "v000001"}
    first = make_records(random_target, 3, **changes)
    second = make_records(near, 4, seed=1, target_version=SECOND, **changes)
    wrong = msgspec.structs.replace(second[0], target_version="")
    unknown = msgspec.structs.replace(second[0], target_version=THIRD)
    drafts = {
        "frozen": make_draft(random_target, tmp_path / "frozen", noise=2.0),
        "once": near,
        "v000001": near,
    }
    policy, before = (Policy(random_target, weights) for _ in range(2))
    found = judge([*first, wrong, *second, unknown], policy, before, drafts, {"": 1, SECOND: 2})
    assert [(one.update, one.records, one.misnamed, one.would_be_noticed) for one in found] == [
        (0, 1, 1, 0),
        (1, 4, 1, 0),
        (2, 4, 0, 4),
    ]
    # The target itself as its draft has all 3 tokens of every block accepted.
    assert found[2].counts["learning"] == found[2].counts["once"]
    drafted, accepted = found[2].counts["learning"]
    assert accepted == pytest.approx(3 * drafted)
    assert found[2].counts["frozen"][1] < accepted


def test_the_buffer_is_judged_with_the_versions_that_were_served(
    tiny_target: Path, tmp_path: Path
) -> None:
    # As it is served: records of the stored bfloat16 weights, in bfloat16, would fit no model in
    # float32.
    target, head = tmp_path / "tiny-target", tmp_path / "tiny-eagle3"
    shutil.copytree(tiny_target, target)
    model = load_causal_lm(tiny_target, torch.float32)
    model.save_pretrained(target)
    for folder in (head, tmp_path / "once"):
        shutil.copytree(tiny_target.parent / "tiny-eagle3", folder)
    play = Play(Config(target=target, output=tmp_path), rl.choose_day())
    config = play.configure([])
    registry = Registry(config.registry)
    provide_first_version(config, registry, play.target)
    source = InProcessTarget(model, (2, 4, 7))
    (tmp_path / "updates.jsonl").write_text(json.dumps({"update": 1, "version": ""}) + "\n")
    frames = []
    for record in make_records(target, 2, draft_version="v000001", target_version=""):
        ids = np.concatenate([record.context_ids, record.output_ids])
        sample = Sample(
            input_ids=ids, loss_mask=np.ones(len(ids), bool), conversation="", domain=""
        )
        states_HLD = source(collate([[sample]], len(ids))).aux_BTLD[0, :-1]
        hidden = {
            "hidden_shape": tuple(states_HLD.shape[1:]),
            "hidden": words(states_HLD).tobytes(),
        }
        frames.append(encode_record(msgspec.structs.replace(record, **hidden)))
    with open_buffer(config, registry, play.target.fingerprint) as buffer:
        assert (
            buffer.append([(frame, decode_record(frame)) for frame in frames], time.time())[
                "stored"
            ]
            == 2
        )
    (judged,) = play.judge()
    assert (judged.update, judged.records, judged.misnamed) == (1, 2, 0)
    # The three drafts are one and the same here.
    assert judged.counts["learning"] == judged.counts["once"] == judged.counts["frozen"]
    assert judged.counts["frozen"][0] > 10


def test_targets_are_pushed_alone_and_with_another_draft_in_turns(
    tiny_target: Path, tmp_path: Path
) -> None:
    asked: list[dict[str, str]] = []

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                json.dumps({"pause_ms": 150 if "draft" in asked[-1] else 100}).encode()
            )

    play = Play(Config(target=tiny_target, output=tmp_path, updates=30), rl.choose_day())
    shutil.copytree(play.head, tmp_path / "once")
    write_token(tmp_path / "token")
    config = play.configure([])
    provide_first_version(config, Registry(config.registry), play.target)
    for number in (9, 10):
        (play.policies / f"step-{number}").mkdir(parents=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Taking) as server:
        Thread(target=server.serve_forever).start()
        found = asyncio.run(play.compare_pushes(f"http://127.0.0.1:{server.server_port}", config))
        server.shutdown()
    assert (found["pause_s"], found["with_draft_s"]) == (0.1, 0.15)
    assert {Path(one["path"]).name for one in asked} == {"step-10"}
    assert [one.get("draft") for one in asked] == [
        None,
        "v000002",
        "v000001",
        None,
        None,
        "v000002",
    ]


def test_the_report_has_the_numbers_of_the_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(play: Play) -> dict[str, Any]:
        rows = [
            json.dumps({"update": i, "version": f"{i}", "tokens_per_s": 80.0}) for i in range(1, 41)
        ]
        (play.folder / "updates.jsonl").write_text("\n".join(rows))
        return {
            "push": {"pause_s": 0.1, "with_draft_s": 0.15},
            "failed_requests": 0,
            "failures": [],
        }

    curves = {"adapted": [[0, 1.1], [4000, 2.5]], "new": [[0, 1.0], [4000, 2.3]]}
    adapt = {
        "tau_old": 1.1,
        "tau_adapted": 2.5,
        "tau_new": 2.3,
        "curves": curves,
        "labels_to_same_tau_ratio": 0.5,
    }
    adapt["gain"] = {"value": 1.4, "interval": [1.3, 1.5]}
    stand_ins = {"prepare": lambda play: None, "run": run, "judge": lambda play: make_updates(40)}
    for name, stand_in in {**stand_ins, "adapt": lambda play: adapt}.items():
        monkeypatch.setattr(Play, name, stand_in)
    cfg = Config(output=tmp_path / "demo", updates=40)
    rl.main(cfg)
    monkeypatch.setattr(Play, "run", None)  # a resumed demo has done it
    rl.main(replace(cfg, resume=True))
    report = json.loads((cfg.output / "report.json").read_text())
    assert report["updates"] == 40
    assert report["records"]["misnamed"] == pytest.approx(1 / 1280)
    assert {name: report["tau"][name]["value"] for name in DRAFTS} == pytest.approx(
        {"frozen": 1.5, "once": 1.6, "learning": 1.8}
    )
    assert all(len(report["tau"][name]["interval"]) == 2 for name in DRAFTS)
    assert (report["push"]["pause_s"], report["push"]["with_draft_s"]) == (0.1, 0.15)
    assert (report["adapt"]["labels_to_same_tau_ratio"], report["failed_requests"]) == (0.5, 0)
    assert report["machine"]
    assert report["sentence"] in (cfg.output / "report.html").read_text()


def test_the_engines_counts_are_those_of_its_steps() -> None:
    # One step accepts the first of 3 draft tokens, the next all 3.
    counts = count_engine(poison.make_record())
    assert (counts.num_drafts, counts.num_accepted) == (2, 4)
    undrafted = poison.make_record(row_drafts=poison.i32(*[-1] * 8), row_accepted=bytes(8))
    assert count_engine(undrafted).num_drafts == 0


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) == (None, 0)
    for number in (9, 10, 11):
        (tmp_path / f"checkpoint-{number}").mkdir()
        if number < 11:
            (tmp_path / f"checkpoint-{number}" / "trainer_state.json").touch()
    assert find_checkpoint(tmp_path) == (str(tmp_path / "checkpoint-10"), 10)


def test_a_demo_continues_with_the_same_settings_only(tmp_path: Path) -> None:
    cfg = Config(output=tmp_path / "demo", updates=4)
    day = rl.choose_day()
    begin_report(cfg, day)
    (cfg.output / "kept").touch()
    begin_report(Config(output=cfg.output, updates=4, resume=True), day, resume=True)
    assert (cfg.output / "kept").is_file()
    with pytest.raises(ValueError, match=rf"{cfg.output} .*--overwrite"):
        begin_report(Config(output=cfg.output, updates=5, resume=True), day, resume=True)
    begin_report(Config(output=cfg.output, updates=5, overwrite=True), day)
    assert not (cfg.output / "kept").exists()


def test_answers_that_repeat_themselves_are_told() -> None:
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share([1, 2, 3, 4, 5]) == 0
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)


def test_the_page_shows_the_decision_and_the_curves(tmp_path: Path) -> None:
    found = summarise(make_updates(40))
    rows = [
        {"update": i, "tokens_per_s": 80.0 + i, "frozen": 1.5, "once": 1.6, "learning": 1.8}
        for i in range(1, 41)
    ]
    curves = {"adapted": [(0, 1.1), (4000, 2.5)], "new": [(0, 1.0), (4000, 2.3)]}
    adapt = {
        "tau_old": 1.1,
        "tau_adapted": 2.5,
        "tau_new": 2.3,
        "curves": curves,
        "gain": found["gain"]["learning"],
    }
    report = found | {
        "target": "tiny", "updates": 40, "sentence": decide(found["gain"]["learning"]), "failed_requests": 0,
        "push": {"pause_s": 0.1, "with_draft_s": 0.15}, "environment": environment(), "command": "x", "duration_s": 1.0,
        "adapt": adapt | {"labels_to_same_tau_ratio": find_labels_ratio(curves["adapted"], curves["new"])},
        "curve": rows,
    }  # fmt: skip
    page = write_page(tmp_path, report, rl.TEMPLATE, build_charts).read_text()
    assert "adapting once is not enough; learning gains +0.20" in page
    assert "86% of the labels" in page


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_run_that_is_killed_continues_and_proves_its_numbers(tmp_path: Path) -> None:
    output, log = tmp_path / "demo", tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "benchmarks.demo.rl",
        "--output",
        str(output),
        "--updates",
        "6",
    ]
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    rows = output / "updates.jsonl"
    while not (rows.is_file() and len(rows.read_text().splitlines()) >= 2):
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)
    process.kill()
    process.wait()
    result = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((output / "report.json").read_text())
    assert report["updates"] == 6
    assert report["failed_requests"] == 0
    assert report["records"]["stored"] >= 6 * 32
    assert report["records"]["misnamed"] <= 0.01
    assert report["records"]["would_be_noticed"] > 0.7
    assert abs(report["tau"]["learning"]["value"] - report["tau_engine"]) < 0.2
    assert report["push"]["pause_s"] > 0
    assert report["sentence"] in result.stdout
    assert (output / "report.html").is_file()
