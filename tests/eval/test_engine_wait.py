"""The wait of vLLM's engine core, as its own plugin loader mends it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from eval import engine_wait

LOAD_AND_RUN = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.engine.core import EngineCoreProc
before = shm_broadcast.sched_yield
engine = type("Engine", (), {"_handle_shutdown": lambda self: False})()
try:
    EngineCoreProc.run_busy_loop(engine)
except SystemExit:
    pass
print("mended", shm_broadcast.sched_yield is not before)
"""


def test_every_so_many_calls_one_sleeps(monkeypatch):
    slept, yielded = [], []
    monkeypatch.setattr(engine_wait.time, "sleep", slept.append)
    wait = engine_wait.with_sleeps(lambda: yielded.append(1))
    for _ in range(3 * engine_wait.YIELDS_PER_SLEEP):
        wait()
    assert slept == 3 * [engine_wait.SLEEP_S]
    assert len(yielded) == 3 * (engine_wait.YIELDS_PER_SLEEP - 1)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("environment", "is_mended"),
    [({}, False), ({engine_wait.ENABLED: "1"}, True), ({"VLLM_PLUGINS": "redraft"}, True)],
    ids=["another's server", "measured", "redraft serve"],
)
def test_the_engine_core_of_our_servers_waits_with_sleeps(environment, is_mended):
    clean = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", engine_wait.ENABLED)}
    command = [sys.executable, "-c", LOAD_AND_RUN]
    run = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    assert f"mended {is_mended}" in run.stdout
