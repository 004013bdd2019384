"""tests/gpu in shards side by side, each in a process, with the outcome of every test."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import Config
from benchmarks.gpu.results import Results

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")

TESTS = Path(__file__).parents[2] / "tests/gpu"


def measure(cfg: Config, results: Results) -> None:
    """Run the tests. Raises: ValueError if one did not pass, or none ran."""
    on_cpu = cfg.device == "cpu"
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    if on_cpu:
        env["REDRAFT_GPU_TESTS_ON"] = "cpu"
    nodes = collect(cfg, env)
    num_shards = min(2 if on_cpu else 6, len(nodes))
    outcomes: Counter[str] = Counter()
    not_passed: dict[str, str] = {}
    with ThreadPoolExecutor(max(num_shards, 1)) as pool:
        # Every n-th test, because neighbours take alike times.
        jobs = [pool.submit(run_shard, cfg, env, i, nodes[i::num_shards]) for i in range(num_shards)]
        for job in as_completed(jobs):
            for case in job.result():
                outcomes[case["outcome"]] += 1
                if case["outcome"] not in ("passed", "skipped"):
                    not_passed[case["test"]] = case["message"]
            results.keep("outcomes", dict(outcomes))
            results.keep("not passed", not_passed)
    if not_passed or not outcomes["passed"]:
        raise ValueError(f"{len(not_passed)} tests did not pass, {outcomes['passed']} did")


def collect(cfg: Config, env: dict[str, str]) -> list[str]:
    """The ids of the tests. Raises: ValueError if they cannot be collected."""
    command = [*PYTEST, "--collect-only", "-m", "gpu", "-k", cfg.tests, str(TESTS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    nodes = [line for line in done.stdout.splitlines() if "::" in line and " " not in line.partition("[")[0]]
    if done.returncode or not nodes:
        raise ValueError(f"no tests are collected: {done.stdout[-2000:]}{done.stderr[-1000:]}")
    return nodes


def run_shard(cfg: Config, env: dict[str, str], number: int, nodes: list[str]) -> list[dict[str, Any]]:
    """The outcome of each test of a shard."""
    report = cfg.output / f"tests.{number}.xml"
    report.unlink(missing_ok=True)
    command = [*PYTEST, f"--junitxml={report}", *nodes]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    print(done.stdout[-4000:], flush=True)
    if not report.exists():
        return [{"test": f"shard {number}", "outcome": "error", "message": (done.stdout + done.stderr)[-2000:]}]
    return [read_case(case) for case in ET.parse(report).iter("testcase")]


def read_case(case: ET.Element) -> dict[str, Any]:
    """A test of pytest's report."""
    for outcome in ("failure", "error", "skipped"):
        if (found := case.find(outcome)) is not None:
            message = (found.get("message") or "")[:600]
            return {"test": case.get("name"), "outcome": outcome, "message": message}
    return {"test": case.get("name"), "outcome": "passed", "message": ""}


MEASURES = {"tests": measure}
