"""All patches of vLLM, and those of two waits.

The CPU build takes requests while it computes; a server ends in time.

The CPU build's engine core waits for the worker by calling `sched_yield` in a loop. Each call gives
up the interpreter for less than a microsecond, but a thread waiting for it takes fifty to wake up.
So the thread for new requests may not run until the engine is out of work, and requests are then
served one after the other, at a third of the speed, for seconds or minutes. A short sleep now and
then lets the thread in and costs 1% of a step.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from redraft.eval.engine.lookups import patch_lookups

ENABLED = "REDRAFT_ENGINE_WAIT"  # 1: for measurements and hidden states; serve patches itself

YIELDS_PER_SLEEP = 128  # One sleep per 128 calls, which is about every 0.3 ms of waiting.
SLEEP_S = 20e-6


def register() -> None:
    """Entry point of vLLM's general plugins. Does nothing unless ENABLED is set."""
    if os.environ.get(ENABLED) == "1":
        for patch in list_patches():
            patch()


def list_patches() -> list[Callable[[], None]]:
    """The patches of this process's vLLM: most are of the CPU build."""
    from vllm.platforms import current_platform

    # These load torch, which a process that only starts servers does without.
    from redraft.eval.engine.cpu_patches import (
        fix_cpu_sampling,
        patch_gemm_release,
        patch_grouped_norm,
    )

    of_cpu = (fix_cpu_sampling, patch_engine_wait, patch_gemm_release, patch_grouped_norm)
    return [*(of_cpu if current_platform.is_cpu() else ()), patch_lookups, patch_ending]


def patch_engine_wait() -> None:
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.engine.core import EngineCoreProc

    run = EngineCoreProc.run_busy_loop

    def run_busy_loop(
        self: Any,
    ) -> None:  # runs in the engine core's process only; workers wait as before
        # The name in shm_broadcast, which imported the function, not the one in vllm.distributed.
        shm_broadcast.sched_yield = with_sleeps(shm_broadcast.sched_yield)
        run(self)

    EngineCoreProc.run_busy_loop = run_busy_loop


def with_sleeps(sched_yield: Callable[[], None]) -> Callable[[], None]:
    """`sched_yield`, with every YIELDS_PER_SLEEP-th call replaced by a sleep."""
    calls = itertools.count(1)

    def wait() -> None:
        if next(calls) % YIELDS_PER_SLEEP:
            sched_yield()
        else:
            time.sleep(SLEEP_S)

    return wait


LAUNCHER = "vllm.entrypoints.launchers.launcher"
ENDING_S = 5  # for connections to close after the engine's end; complete answers need ms


def patch_ending() -> None:
    """Bound the wait for connections of vLLM's API server, which otherwise never ends after SIGTERM
    while a client sends half a request or reads nothing. Does nothing in processes without one.
    """
    launcher: Any = sys.modules.get(LAUNCHER)
    if launcher is None:
        return
    shutdown = launcher.NoSignalServer.shutdown

    async def shutdown_in_time(self: Any, sockets: Any = None) -> None:
        self.config.timeout_graceful_shutdown = ENDING_S
        await shutdown(self, sockets)

    launcher.NoSignalServer.shutdown = shutdown_in_time
