"""Training on several ranks: rank 0 gives the orders, and the result equals that of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from learner_world import make_draft, make_records
from safetensors.torch import load_file

from redraft.online.records.record import encode_record

SCRIPT = Path(__file__).parents[2] / "helpers/run_ranks.py"


def losses(command, tmp_path, draft):
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    output = tmp_path / f"out-{len(command)}"
    done = subprocess.run(
        [*command, str(SCRIPT), str(draft), str(tmp_path / "records"), str(output)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith("step")], output


def launched(config):
    """The command that launches two ranks with a shipped config.

    With None, in the machine's default way.
    """
    if config is None:
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
        ]
    if config.startswith("zero"):
        pytest.importorskip(
            "deepspeed", reason="DeepSpeed is not installed: pip install 'redraft[deepspeed]'"
        )
    shipped = str(Path(__file__).parents[3] / f"recipes/accelerate/{config}.yaml")
    here = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0"]
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", shipped, *here]


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, "fsdp2", "zero3"])
def test_two_ranks_learn_what_one_would_and_export_it_once(config, random_target, tmp_path):
    draft = make_draft(random_target, tmp_path / "draft")
    (tmp_path / "records").write_bytes(
        b"".join(map(encode_record, make_records(random_target, 24)))
    )
    one_says, one = losses([sys.executable], tmp_path, draft)
    two_say, both = losses(launched(config), tmp_path, draft)
    for mine, its in zip(one_says, two_say, strict=True):
        (_, _, _, loss, labels, _), (_, _, _, its_loss, its_labels, _) = mine.split(), its.split()
        assert float(loss.strip(",")) == pytest.approx(float(its_loss.strip(",")), rel=1e-5)
        assert labels == its_labels  # of both ranks: rank 0's batches reach the other one
    files = [sorted(path.name for path in (folder / "draft").iterdir()) for folder in (one, both)]
    assert files[0] == files[1]
    weights, its_weights = (
        load_file(folder / "draft" / "model.safetensors") for folder in (one, both)
    )
    assert weights.keys() == its_weights.keys()
    for name, tensor in weights.items():
        assert (tensor - its_weights[name]).abs().max() < 1e-5, name
