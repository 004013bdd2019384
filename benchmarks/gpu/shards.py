"""Run tests/gpu in parallel shards, and record the outcome of every test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu.check import Config
from benchmarks.gpu.results import Results

PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")

TESTS = Path(__file__).parents[2] / "tests/gpu"


def measure(cfg: Config, results: Results) -> None:
    """Run the tests.

    Raises:
        ValueError: a test did not pass, or no test ran.
    """
    on_cpu = cfg.device == "cpu"
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    if on_cpu:
        env["REDRAFT_GPU_TESTS_ON"] = "cpu"
    nodes = collect(cfg, env)
    num_shards = min(2 if on_cpu else 6, len(nodes))
    outcomes: Counter[str] = Counter()
    not_passed: dict[str, str] = {}
    lock = threading.Lock()

    def run(number: int) -> None:
        # A shard takes every n-th test, because neighbouring tests take similar times.
        for test, outcome, message in run_shard(env, nodes[number::num_shards]):
            with lock:
                outcomes[outcome] += not message
                if outcome in ("FAILED", "ERROR"):
                    not_passed[test] = message
                results.keep("outcomes", dict(outcomes))
                results.keep("not passed", not_passed)

    with ThreadPoolExecutor(num_shards) as pool:
        for job in [pool.submit(run, number) for number in range(num_shards)]:
            job.result()
    if not_passed or not outcomes["PASSED"]:
        raise ValueError(f"{len(not_passed)} tests did not pass; {outcomes['PASSED']} passed")


def collect(cfg: Config, env: dict[str, str]) -> list[str]:
    """Return the ids of the tests. Raises: ValueError if pytest cannot collect them."""
    command = [*PYTEST, "-q", "--collect-only", "-m", "gpu", "-k", cfg.tests, str(TESTS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    nodes = [
        line
        for line in done.stdout.splitlines()
        if "::" in line and " " not in line.partition("[")[0]
    ]
    if done.returncode or not nodes:
        raise ValueError(f"pytest collected no tests: {done.stdout[-2000:]}{done.stderr[-1000:]}")
    return nodes


def run_shard(env: dict[str, str], nodes: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (test, outcome, "") as each test ends, then (test, outcome, message) per failure."""
    command = [*PYTEST, "-v", "-rfE", "--color=no", *nodes]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    num_ended = 0
    for line in process.stdout:
        if found := re.match(r"(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", line):
            num_ended += 1
            yield found[1], found[2], ""
        elif found := re.match(r"(FAILED|ERROR) (\S+)(?: - (.*))?", line):
            yield found[2], found[1], found[3] or "failed"
        print(line, end="", flush=True)
    if process.wait() and num_ended < len(nodes):
        yield (
            nodes[num_ended],
            "ERROR",
            f"pytest exited with status {process.returncode} after {num_ended} tests",
        )


MEASURES = {"tests": measure}
