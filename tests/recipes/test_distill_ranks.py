"""Whole recipes on two processes, by the shipped configs.

Sharded in training, one folder when served.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from redraft.files.artifact import verify
from redraft.heads.families.standalone import StandaloneDraft

ROOT = Path(__file__).parents[2]


def launch(
    config: str | None, recipe: str, target: Path, data: Path, output: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    """The recipe on two processes by a config, four rows a step.

    Without one, alone on as many rows.
    """
    if (config or "").startswith("zero"):
        pytest.importorskip(
            "deepspeed", reason="DeepSpeed is not installed: pip install 'redraft[deepspeed]'"
        )
    two = ["--config_file", f"recipes/accelerate/{config}.yaml", "--num_processes", "2"]
    launcher = [
        "-m",
        "accelerate.commands.launch",
        *two,
        "--mixed_precision",
        "no",
        "--main_process_port",
        "0",
    ]
    arguments = {
        "--target": str(target),
        "--data.source": str(data),
        "--data.held-out": "0.2",
        "--data.num-prompts": "4",
        "--data.max-prompt-tokens": "128",
        "--loop.steps": "6",
        "--loop.batch-size": "2" if config else "4",
        "--loop.sequence-length": "128",
        "--loop.save-every": "3",
        "--loop.eval-every": "3",
        "--prove.max-tokens": "64",
        "--output": str(output),
    }
    command = [
        sys.executable,
        *(launcher if config else []),
        str(ROOT / "recipes/train.py"),
        recipe,
    ]
    return subprocess.run(
        [*command, *(part for pair in arguments.items() if pair[0] not in flags for part in pair), *flags],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=600,
    )  # fmt: skip


def report(output: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((output / "report.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("config", ["fsdp2", "zero3"])
def test_a_draft_trained_in_shards_is_one_folder_that_vllm_serves(
    config: str, random_target: Path, data: Path, tmp_path: Path
) -> None:
    flags = ["--draft.layers", "0", "--optim.lr", "1e-3"]
    recipe = "standalone"
    done = launch(config, recipe, random_target, data, tmp_path / "two", *flags)
    assert done.returncode == 0, done.stderr[-4000:]
    folder = tmp_path / "two/draft"
    verify(folder)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    found = report(tmp_path / "two")
    assert found["engine"]["tau"] == pytest.approx(found["offline"]["tau_forecast"], rel=0.02)
    alone = launch(None, recipe, random_target, data, tmp_path / "one", *flags, "--prove.no-engine")
    assert alone.returncode == 0, alone.stderr[-4000:]
    weights, its_weights = (
        StandaloneDraft.load(tmp_path / name / "draft").state_dict() for name in ("one", "two")
    )
    for (
        name,
        tensor,
    ) in weights.items():  # the export rounds to bfloat16: a last digit may fall the other way
        assert ((tensor - its_weights[name]).abs() <= 2**-7 * tensor.abs() + 1e-4).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2", "zero3"])
def test_a_head_trained_in_shards_is_resumed_and_exported(
    config: str, random_target: Path, data: Path, tmp_path: Path
) -> None:
    flags = ["--head.aux-layer-ids", "0", "1", "2", "--draft-vocab-size", "256"]
    flags += ["--prove.no-engine", "--prove.num-speculative-tokens", "3"]
    recipe = "eagle3"
    done = launch(config, recipe, random_target, data, tmp_path / "run", *flags)
    assert done.returncode == 0, done.stderr[-4000:]
    verify(tmp_path / "run/draft")
    again = launch(config, recipe, random_target, data, tmp_path / "run", *flags)
    assert again.returncode == 0, again.stderr[-4000:]
    alone = launch(
        None, recipe, random_target, data, tmp_path / "run", *flags, "--loop.batch-size", "2"
    )
    assert alone.returncode == 2
    assert "2 processes of " in alone.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "config"),
    [("standalone", "ddp"), ("standalone", "zero2"), ("medusa", "ddp")],
)
def test_a_target_in_shards_is_forecast_as_a_whole_one(
    recipe: str, config: str, random_target: Path, data: Path, tmp_path: Path
) -> None:
    flags = ["--optim.lr", "1e-3", "--prove.no-engine"]
    if recipe == "standalone":
        flags += ["--draft.num-layers", "1", "--draft.hidden-size", "64"]
    for chosen, more in ((None, []), (config, ["--signal.shard"])):
        done = launch(chosen, recipe, random_target, data, tmp_path / str(chosen), *flags, *more)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    one, two = (
        report(tmp_path / str(chosen))["offline"]["tau_forecast"] for chosen in (None, config)
    )
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("init", ["last_layer", "least_squares"])
def test_a_target_in_shards_gives_the_start_of_a_whole_one(
    init: str, random_target: Path, data: Path, tmp_path: Path
) -> None:
    """Steps of 1e-12 leave the weights as they began."""
    flags = [
        "--head.aux-layer-ids",
        "0",
        "1",
        "2",
        "--draft-vocab-size",
        "256",
        "--prove.no-engine",
        "--init",
        init,
    ]
    flags += [
        "--head.fc-norm",
        "--optim.lr",
        "1e-12",
        "--prove.num-speculative-tokens",
        "3",
        "--init-tokens",
        "2048",
    ]
    found = []
    for config, more in ((None, []), ("ddp", ["--signal.shard", "--loop.batch-size", "4"])):
        output = tmp_path / str(config)
        done = launch(config, "eagle3", random_target, data, output, *flags, *more)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        said = [
            line for line in done.stdout.splitlines() if line.startswith("the head starts from ")
        ]
        assert len(said) == 1
        if init == "last_layer":
            assert ("files" in said[0]) == (config is not None)
        found.append(load_file(max((output / "checkpoints").iterdir()) / "model.safetensors"))
    one, two = found
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            two[name], tensor, rtol=1e-3, atol=1e-4 if init == "least_squares" else 1e-7
        )
