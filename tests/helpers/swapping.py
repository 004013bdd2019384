"""Engines that swap drafts, in a process of their own.

`run_swaps.py` with either of vLLM's model runners.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import model_runners

Reports = list[dict[str, Any]]
"""Of the start and of every swap, as in `run_swaps.py`."""


def run_engines(specs: Sequence[dict[str, Any]], runner: str) -> list[Reports]:
    """The reports of each engine. They run one after the other."""
    script = Path(__file__).parent / "run_swaps.py"
    command, environment = (
        [sys.executable, script, json.dumps(specs)],
        model_runners.environment(runner),
    )
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    line = next((line for line in result.stdout.splitlines() if line.startswith("REPORT")), None)
    assert line, result.stderr[-3000:]
    reports: list[Reports] = json.loads(line.removeprefix("REPORT"))
    for report in (report for engine in reports for report in engine):
        assert report["status"]["runner"].lower().startswith(f"{runner} model runner")
    return reports


def run_swaps(
    target: Path, draft: Path, method: str, swaps: Sequence[Any], runner: str = "v1"
) -> Reports:
    """The reports of one engine."""
    spec = {"target": str(target), "draft": str(draft), "method": method, "swaps": list(swaps)}
    (reports,) = run_engines([spec], runner)
    return reports
