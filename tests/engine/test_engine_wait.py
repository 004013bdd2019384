"""The wait of vLLM's engine core and workers, after vLLM's plugin loader has patched it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from redraft.engine import patches
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

def load():
    from vllm.distributed.device_communicators import shm_broadcast
    before = shm_broadcast.sched_yield
    load_general_plugins()
    return shm_broadcast.sched_yield is not before

for name, environment in json.loads(sys.argv[1]).items():
    if not os.fork():
        os.environ |= environment
        print(name, "mended", load(), flush=True)
        os._exit(0)
    os.wait()
"""


COUNT_TICKS = """
import os, sys, time
from redraft.engine.patches import with_sleeps
wait = with_sleeps(os.sched_yield) if sys.argv[1] == "sleeps" else os.sched_yield
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
neighbour = os.fork()
if not neighbour:
    while True:
        pass
ticks, end_s = 0, time.monotonic() + 0.5
while (began_s := time.monotonic()) < end_s:
    wait()
    ticks += time.monotonic() - began_s > 0.9e-3
os.kill(neighbour, 9)
print(ticks)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's scheduler")
def test_another_thread_takes_the_core_for_ticks_from_a_loop_of_yields_and_not_of_sleeps():
    # A tick takes 1 to 10 ms, and a sleep at most 0.5. Other work on the machine takes ticks too.
    for _ in range(5):
        yields, sleeps = (
            int(subprocess.check_output([sys.executable, "-c", COUNT_TICKS, kind], text=True))
            for kind in ("yields", "sleeps")
        )
        if sleeps < yields / 3:
            return
    pytest.fail(f"{sleeps} of the sleeps took a tick, and {yields} of the yields")


def test_sleeps_grow_with_the_wait_and_begin_short_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, slept = [1000.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(patches, "time", clock)
    wait = patches.Sleeps()
    while now_s[0] < 1000.1:
        began_s = now_s[0]
        wait()
        assert slept[-1] == pytest.approx(min(max(20e-6, (began_s - 1000) / 100), 500e-6))
        now_s[0] += 20e-6  # the check for a message
    assert len(slept) < 700  # 0.1 s has 2,500 sleeps of 20 us
    now_s[0] += 0.001
    wait()
    assert slept[-1] == 20e-6


@pytest.fixture(scope="module")
def loaded() -> str:
    """A line for each case: whether a process of vLLM in its environment waits with sleeps."""
    clean = {
        name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", VARIABLE)
    }
    environments = json.dumps({name: environment for name, (environment, _) in CASES.items()})
    command = [sys.executable, "-c", LOAD_AND_RUN, environments]
    return subprocess.run(command, env=clean, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("name", CASES)
def test_the_processes_of_our_servers_wait_with_sleeps(name: str, loaded: str) -> None:
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
