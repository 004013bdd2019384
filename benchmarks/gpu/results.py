"""Results of a phase, saved one by one, and timing on either device."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from redraft.files.artifact import write_whole


class Results:
    """A JSON file that is saved after every result, so that a kill loses only later results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {}

    def keep(self, name: str, value: Any) -> None:
        self.found[name] = value
        write_whole(self.path, json.dumps(self.found, indent=1, default=str) + "\n")
        said = json.dumps(value, default=str)
        print(f"{name}: {said if len(said) < 600 else said[:600] + '...'}", flush=True)

    def measure(self, name: str, make: Callable[..., Any], *args: Any) -> None:
        """Save the result of `make(*args)`, or its error. Later measurements run in both cases."""
        began_s = time.perf_counter()
        try:
            value = make(*args)
        except Exception as error:  # a compiler of kernels has an exception for every stage
            value = {"error": f"{type(error).__name__}: {str(error)[:1500]}"}
        self.keep(name, value)
        self.found[f"{name}, seconds"] = round(time.perf_counter() - began_s, 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def median_s(run: Callable[[], Any], device: torch.device, rounds: int = 10) -> float:
    """Return the median time of a call, in seconds.

    On a GPU, CUDA events measure it, without the launch.
    """
    for _ in range(2):
        run()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            began_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - began_s)
    return float(statistics.median(times))
