"""Lets vLLM's CPU build take requests while it computes.

The engine core waits for its worker by calling `sched_yield` in a loop. That gives up the interpreter for less than a
microsecond at a time, and a thread that waits for the interpreter takes fifty to wake up: the thread that receives new
requests may not get it before the engine has run out of work. Then requests are served one after the other, for seconds
or minutes, at a third of the speed. A short sleep now and then lets the thread in, at 1% of a step.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

ENABLED = "REDRAFT_ENGINE_WAIT"
"""1: the server is one that redraft measures. (A server of `redraft serve` needs no telling.)"""

YIELDS_PER_SLEEP = 128
"""About 0.3 ms of waiting."""

SLEEP_S = 20e-6


def register() -> None:
    """The entry point of vLLM's general plugins: nothing but in a server that redraft measures."""
    if os.environ.get(ENABLED) == "1":
        mend_engine_wait()


def mend_engine_wait() -> None:
    """Let the engine core sleep now and then while it waits; nothing on other platforms than the CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.engine.core import EngineCoreProc

    run = EngineCoreProc.run_busy_loop

    def run_busy_loop(self: Any) -> None:  # runs in the engine core's process only: its workers wait as ever
        shm_broadcast.sched_yield = with_sleeps(shm_broadcast.sched_yield)
        run(self)

    EngineCoreProc.run_busy_loop = run_busy_loop


def with_sleeps(sched_yield: Callable[[], None]) -> Callable[[], None]:
    """`sched_yield`, but for every so many calls a sleep."""
    calls = itertools.count(1)

    def wait() -> None:
        if next(calls) % YIELDS_PER_SLEEP:
            sched_yield()
        else:
            time.sleep(SLEEP_S)

    return wait
