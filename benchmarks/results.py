"""Write the results of a benchmark as one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.engine.machine import environment
from redraft.files.artifact import write_whole


def write_results(output: Path, results: Mapping[str, Any]) -> None:
    """Write the results and the environment in which they were measured as one JSON file."""
    write_whole(
        output, json.dumps({"environment": environment(), **results}, indent=2, default=str) + "\n"
    )
    print(f"written to {output}")
