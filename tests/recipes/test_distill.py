"""The flagship recipe as its user runs it: a process, flags, a folder; killed, resumed, and given bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eval.engine import vllm_server
from heads.artifact import verify

ROOT = Path(__file__).parents[2]
STEPS = 8


@pytest.fixture
def command(random_target: Path, data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The recipe on the small random target, for a folder under `tmp_path`, with further flags."""

    def build(output: str, *flags: str) -> list[str]:
        defaults = {
            "--target": str(random_target),
            "--draft.layers": "0",
            "--data.source": str(data),
            "--data.held-out": "0.2",
            "--data.num-prompts": "4",
            "--data.max-prompt-tokens": "128",
            "--loop.steps": str(STEPS),
            "--loop.batch-size": "2",
            "--loop.sequence-length": "128",
            "--loop.save-every": "2",
            "--loop.eval-every": "4",
            "--loop.on-policy": "0.5",
            "--optim.lr": "1e-3",
            "--prove.max-tokens": "8",
            "--output": str(tmp_path / output),
        }
        if "--draft.num-layers" in flags:
            del defaults["--draft.layers"]
        arguments = [part for pair in defaults.items() for part in pair]
        recipe = [sys.executable, str(ROOT / "recipes/distill_llama3b.py")]
        return [*recipe, *arguments, "--prove.no-engine", *flags]

    return build


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=600, **options)


def kill_after(command: list[str], seen: Path) -> None:
    """Start the command and kill -9 it as soon as `seen` is there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 500
        while not seen.exists():
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    verify(folder / "draft")
    return load_file(folder / "draft/model.safetensors")


def test_a_killed_and_resumed_run_ends_with_the_weights_and_metrics_of_an_unbroken_one(command, tmp_path):
    whole = run(command("whole"))
    assert whole.returncode == 0, whole.stderr
    kill_after(command("broken"), tmp_path / "broken/checkpoints/step-000004/manifest.json")
    assert not (tmp_path / "broken/draft").exists()
    resumed = run(command("broken", "--resume"))
    assert resumed.returncode == 0, resumed.stderr
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    lines = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("whole", "broken")]
    for one, other in zip(*lines, strict=True):
        one.pop("tokens_per_s", None), other.pop("tokens_per_s", None)
        assert one == other
    report = json.loads((tmp_path / "broken/report.json").read_text())
    assert 0 <= report["offline"]["alpha_greedy_after"] <= 1
    assert report["train"]["skipped_steps"] == 0


def test_a_folder_that_holds_a_run_is_refused_without_resume_or_overwrite(command, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/run.json").write_text("{}")
    (tmp_path / "taken/metrics.jsonl").write_text('{"step": 1}')
    refused = run(command("taken"))
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("redraft: ")
    assert "--resume" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (tmp_path / "taken/run.json").read_text() == "{}"


def test_a_run_that_ended_before_it_began_keeps_nobody_from_its_folder(command, tmp_path):
    for _ in range(2):
        refused = run(command("mistyped", "--target", str(tmp_path / "nowhere")))
        assert refused.returncode == 2
        assert refused.stderr.splitlines()[-1] == f"redraft: there is no folder {tmp_path / 'nowhere'}"


def test_resuming_with_another_config_names_what_changed_and_a_cut_checkpoint_names_its_file(command, tmp_path):
    kill_after(command("run"), tmp_path / "run/checkpoints/step-000002/manifest.json")
    other = run(command("run", "--resume", "--optim.lr", "5e-4"))
    assert other.returncode == 2
    assert "optim" in other.stderr.splitlines()[-1]
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    weights_file = next(newest.glob("*.safetensors"))
    weights_file.write_bytes(weights_file.read_bytes()[:-100])
    cut = run(command("run", "--resume"))
    assert cut.returncode == 2
    assert str(weights_file.name) in cut.stderr.splitlines()[-1]
    assert "Traceback" not in cut.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--target", "no/such/folder"], ["no/such/folder"]),
        (["--data.source", "missing.jsonl"], ["missing.jsonl", "no such file"]),
        (["--divergence.name", "kl"], ["unknown divergence", "forward_kl"]),
        (["--signal.kind", "endpoint"], ["--signal.url"]),
        (["--draft.layers", "7"], ["layers"]),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(command, flags, words):
    failed = run(command("bad", *flags))
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
    assert all(word in failed.stderr for word in words), failed.stderr[-500:]


def test_a_cached_signal_trains_nearly_as_the_exact_one_does(command, tmp_path):
    exact = run(command("exact", "--loop.steps", "2", "--loop.on-policy", "0"))
    cached = run(
        command("cached", "--loop.steps", "2", "--loop.on-policy", "0", "--signal.kind", "cache", "--signal.k", "256")
    )
    assert cached.returncode == 0, cached.stderr
    assert exact.returncode == 0, exact.stderr
    assert "bytes a token" in cached.stdout + cached.stderr
    expected, found = weights(tmp_path / "exact"), weights(tmp_path / "cached")
    assert all(torch.allclose(expected[name].float(), found[name].float(), atol=2e-2) for name in expected)
    assert not all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.vllm
def test_a_target_behind_a_vllm_server_needs_no_weights_here(command, random_target, tmp_path):
    with vllm_server(random_target, log=tmp_path / "vllm.log", max_model_len=256) as server:
        done = run(
            command(
                "remote",
                "--loop.steps",
                "2",
                "--signal.kind",
                "endpoint",
                "--signal.url",
                server.url,
                "--signal.k",
                "20",
                "--draft.num-layers",
                "1",
                "--draft.hidden-size",
                "64",
            )
        )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "remote/report.json").read_text())
    assert report["by_domain"].keys() == {"code", "prose"}
    assert report["offline"]["tau_forecast"] >= 1
