"""The wait of vLLM's engine core, after vLLM's plugin loader has patched it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from redraft.engine import wait as engine_wait
from redraft.engine.server import find_two_speeds
from redraft.engine.settings import VARIABLE, write_settings

CASES = {
    "another's server": ({}, False),
    "measured": (write_settings(engine_wait.ENABLED), True),
    "redraft serve": ({"VLLM_PLUGINS": "redraft"}, True),
}

# vLLM takes seconds to import: once, for a fork of each case.
LOAD_AND_RUN = """
import json, os, sys
from vllm.plugins import load_general_plugins
import vllm.v1.engine.core

def load_and_run():
    load_general_plugins()
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.engine.core import EngineCoreProc
    before = shm_broadcast.sched_yield
    engine = type("Engine", (), {"_handle_shutdown": lambda self: False})()
    try:
        EngineCoreProc.run_busy_loop(engine)
    except SystemExit:
        pass
    return shm_broadcast.sched_yield is not before

for name, environment in json.loads(sys.argv[1]).items():
    if not os.fork():
        os.environ |= environment
        print(name, "mended", load_and_run(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_one_in_a_number_of_calls_sleeps(monkeypatch):
    slept, yielded = [], []
    monkeypatch.setattr(engine_wait.time, "sleep", slept.append)
    wait = engine_wait.with_sleeps(lambda: yielded.append(1))
    for _ in range(3 * engine_wait.YIELDS_PER_SLEEP):
        wait()
    assert slept == 3 * [engine_wait.SLEEP_S]
    assert len(yielded) == 3 * (engine_wait.YIELDS_PER_SLEEP - 1)


@pytest.fixture(scope="module")
def loaded() -> str:
    """A line for each case: whether an engine core in its environment waits with sleeps."""
    clean = {
        name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", VARIABLE)
    }
    environments = json.dumps({name: environment for name, (environment, _) in CASES.items()})
    command = [sys.executable, "-c", LOAD_AND_RUN, environments]
    return subprocess.run(command, env=clean, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("name", CASES)
def test_the_engine_core_of_our_servers_waits_with_sleeps(name: str, loaded: str) -> None:
    assert f"{name} mended {CASES[name][1]}\n" in loaded


@pytest.mark.parametrize(
    ("variables", "num_cores", "warned"),
    [
        ({}, 2, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, 2, True),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "8"}, 8, True),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "7"}, 8, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-7"}, 8, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, 1, False),
    ],
)
def test_threads_that_leave_the_loop_no_core_are_warned_of(
    variables: dict[str, str], num_cores: int, warned: bool
) -> None:
    warning = find_two_speeds(variables, num_cores)
    assert bool(warning) == warned
    assert (f"OMP_NUM_THREADS={num_cores - 1}" in warning) == warned
