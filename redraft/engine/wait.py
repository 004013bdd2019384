"""The plugin for engines that redraft starts itself, and two waits.

The CPU build takes requests while it computes; a server ends in time.

The CPU build's engine core waits for the worker by calling `sched_yield` in a loop. Each call gives
up the interpreter for less than a microsecond, but a thread waiting for it takes fifty to wake up.
So the thread for new requests may not run until the engine is out of work, and requests are then
served one after the other, at a third of the speed, for seconds or minutes. A short sleep now and
then lets the thread in and costs 1% of a step.
"""

import itertools
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redraft.engine import hooks
from redraft.engine.settings import read_settings

ENABLED = {"engine_wait": True}
"""Settings for measurements and hidden states; a server with the plugin patches itself."""

YIELDS_PER_SLEEP = 128  # One sleep per 128 calls, which is about every 0.3 ms of waiting.
SLEEP_S = 20e-6


def register() -> None:
    """Entry point of vLLM's general plugins. Does nothing without the settings ENABLED."""
    if read_settings().get("engine_wait"):
        for feature in hooks.FEATURES:
            if feature.is_measured:
                hooks.install_if_asked(feature)


def is_cpu() -> bool:
    """Whether this is vLLM's CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def run_with_sleeps(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """An engine core's loop with sleeps. It runs in the engine core's process only."""

    def run_busy_loop(engine: Any) -> None:
        hooks.install("yields")
        run(engine)

    return run_busy_loop


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


def has_launcher() -> bool:
    """Whether this process has vLLM's API server."""
    return LAUNCHER in sys.modules


def shutdown_in_time(shutdown: Callable[[Any, Any], Awaitable[None]]) -> Any:
    """`shutdown` of vLLM's API server that waits a bounded time for connections.

    Otherwise it never ends after SIGTERM while a client sends half a request or reads nothing.
    """

    async def bounded(self: Any, sockets: Any = None) -> None:
        self.config.timeout_graceful_shutdown = ENDING_S
        await shutdown(self, sockets)

    return bounded
