"""The flagship recipe as its user runs it.

A process, flags, a folder; killed, resumed, and given bad input.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recipe_runs import build_command, kill_when, run
from safetensors.torch import load_file

from redraft.files.artifact import verify


@pytest.fixture
def command(random_target: Path, data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The recipe's arguments on the small random target, with further flags.

    The folder is under `tmp_path`.
    """
    return lambda output, *flags: build_command(random_target, data, tmp_path / output, *flags)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    verify(folder / "draft")
    return load_file(folder / "draft/model.safetensors")


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_with_the_weights_and_metrics_of_an_unbroken_one(
    command, tmp_path
):
    whole = run(command("whole"))
    assert whole.returncode == 0, whole.stderr
    kill_when(command("broken"), (tmp_path / "broken/checkpoints/step-000004/manifest.json").exists)
    assert not (tmp_path / "broken/draft").exists()
    resumed = run(command("broken"))
    assert resumed.returncode == 0, resumed.stderr
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("whole", "broken")
    ]
    for one, other in zip(*lines, strict=True):
        one.pop("tokens_per_s", None), other.pop("tokens_per_s", None)
        assert one == other
    report = json.loads((tmp_path / "broken/report.json").read_text())
    assert 0 <= report["offline"]["alpha_greedy_after"] <= 1
    assert report["train"]["skipped_steps"] == 0


def test_a_folder_that_holds_a_run_is_refused_without_overwrite(command, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/run.json").write_text("{}")
    (tmp_path / "taken/metrics.jsonl").write_text('{"step": 1}')
    refused = run(command("taken"))
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("redraft: ")
    assert "--overwrite" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (tmp_path / "taken/run.json").read_text() == "{}"


def test_a_run_that_ended_before_it_began_keeps_nobody_from_its_folder(command, tmp_path):
    for _ in range(2):
        refused = run(command("mistyped", "--target", str(tmp_path / "nowhere")))
        assert refused.returncode == 2
        assert str(tmp_path / "nowhere") in refused.stderr.splitlines()[-1]


def test_resuming_with_another_config_names_what_changed_and_a_cut_checkpoint_names_its_file(
    command, tmp_path
):
    kill_when(command("run"), (tmp_path / "run/checkpoints/step-000002/manifest.json").exists)
    other = run(command("run", "--optim.lr", "5e-4"))
    assert other.returncode == 2
    assert "optim" in other.stderr.splitlines()[-1]
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    weights_file = next(newest.glob("*.safetensors"))
    weights_file.write_bytes(weights_file.read_bytes()[:-100])
    cut = run(command("run"))
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


@pytest.mark.slow
def test_a_cached_signal_trains_nearly_as_the_exact_one_does(command, tmp_path):
    two = ("--loop.steps", "2")
    exact = run(command("exact", *two))
    cached = run(command("cached", *two, "--signal.kind", "cache", "--signal.k", "256"))
    assert cached.returncode == 0, cached.stderr
    assert exact.returncode == 0, exact.stderr
    assert "bytes per token" in cached.stdout + cached.stderr
    expected, found = weights(tmp_path / "exact"), weights(tmp_path / "cached")
    assert all(
        torch.allclose(expected[name].float(), found[name].float(), atol=2e-2) for name in expected
    )
    assert not all(torch.equal(expected[name], found[name]) for name in expected)
