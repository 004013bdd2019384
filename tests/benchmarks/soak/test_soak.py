"""A short soak, as a user starts it.

Two real servers, taps, broker, learners, and ten faults in three minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.vllm
def test_a_short_soak_survives_every_fault(tmp_path):
    output = tmp_path / "soak"
    command = [
        sys.executable,
        "-m",
        "benchmarks.soak",
        "--output",
        output,
        "--minutes=3",
        "--faults=10",
        "--seed=2",
    ]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    report = json.loads((output / "report.json").read_text())
    assert report["failures"] == []
    assert report["faults"]["injected"] == report["faults"]["survived"] > 5
    assert report["records"]["acked"] > 20
    assert report["records"]["lost"] == report["requests"]["failed_untold"] == 0
    assert "fault" in done.stdout
    assert f"seed: {report['seed']}" in done.stdout
