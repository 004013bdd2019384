"""Heads that draft a block at once are accepted by a real vLLM as the forecast says.

The temperatures are 0 and 1.

Each head is trained for a minute first: a random one is never accepted, and would prove nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import model_runners
import pytest

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 3

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported heads by family, each trained once."""
    return {"folder": tmp_path_factory.mktemp("heads")}


WINDOWS = {
    "windows": ["--head.window", "32"],
    "a full layer last": ["--head.window", "32", "--head.full-layers", "1"],
}
"""Prompts have up to 512 tokens, and a block of the CPU's cache 128: several are evicted."""


def train(head: str, heads: dict[str, Path]) -> Path:
    if head not in heads:
        family, _, windows = head.partition(", ")
        output = heads["folder"] / re.sub(r"\W+", "-", head)
        command = [sys.executable, "-m", "benchmarks.studies.presets", family]
        command += WINDOWS.get(windows, [])
        command += ["--prove.no-engine", "--output", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1500)
        assert done.returncode == 0, done.stderr[-3000:]
        heads[head] = output / "draft"
    return heads[head]


def evaluate(head: Path, runner: str, method: str, output: Path) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "redraft.recipes.cli",
        "eval",
        "--target",
        "tests/assets/tiny-target",
    ]
    command += [
        "--target-dtype",
        "float32",
        "--draft",
        f"head={head}",
        "--prompts",
        "stdlib",
        "--held-out",
        "0.05",
    ]
    command += ["--max-prompt-tokens", "512"]
    command += ["--temperature", "0", "1", "--draft-sample-method", method, "--num-prompts", "64"]
    command += [
        "--num-speculative-tokens",
        str(NUM_TOKENS),
        "--max-tokens",
        "48",
        "--output",
        str(output),
    ]
    environment = os.environ | model_runners.environment(runner)
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=2400, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads((output / "report.json").read_text())["results"]
    return [row for row in results if row["draft"] == "head" and row["domain"] is None]


@pytest.mark.parametrize(
    ("family", "runner", "method"),
    [
        ("dflash", "v1", "greedy"),
        ("dflash", "v1", "probabilistic"),
        ("peagle", "v1", "greedy"),
        ("dflash", "v2", "greedy"),
        ("dspark", "v2", "greedy"),
        ("dspark", "v2", "probabilistic"),
        ("dflash, windows", "v1", "greedy"),
        ("dflash, a full layer last", "v2", "greedy"),
    ],
)
def test_the_real_engine_accepts_as_many_tokens_of_a_block_as_forecast(
    family: str, runner: str, method: str, heads: dict[str, Path], tmp_path: Path
) -> None:
    rows = evaluate(train(family, heads), runner, method, tmp_path / "out")
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    for row in rows:
        (entry,) = row["by_num_speculative_tokens"]
        forecast, engine = entry["forecast"]["tau"]["value"], entry["engine"]["tau"]
        print(
            f"{family}, {runner}, {method}, temperature {row['temperature']}: forecast "
            f"{forecast:.4f}, {engine:.4f}"
        )
        assert forecast > 1.05, "the head has learned something"
        if row["temperature"] == 0:
            assert engine == pytest.approx(forecast, rel=0.01)
        else:
            difference = entry["engine"]["difference"]
            # A 95% interval is four standard errors wide.
            assert abs(difference["value"]) < 3 / 4 * (difference["high"] - difference["low"])
