"""The plugin for engines that redraft starts itself, and two waits.

The CPU build leaves its cores to others while it waits; a server ends in time.

In vLLM, the engine core waits for its workers, and they for it, by calling `sched_yield` in a loop.
If another thread of the same priority wants the core, each call gives it away until the next tick
of the kernel: 4 ms at 250 Hz. On the two cores of a small machine such threads are the API server's
and capture's. A thread of the same process may not even get the interpreter from such a loop, and
requests are then served one after the other. A thread that sleeps is woken at once instead. It must
not yield as well: Linux holds the turns it gave away against it.
"""

import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from redraft.engine import hooks
from redraft.engine.machine import VLLM_VERSION
from redraft.engine.process import LIBC
from redraft.engine.settings import read_settings

PR_SET_TIMERSLACK = 29  # Option of prctl(2).

ENABLED = {"engine_wait": True}
"""Settings for measurements and hidden states; a server with the plugin patches itself."""

SLEEP_S = 20e-6  # The step is noticed half of it late: 0.1% of one of 10 ms.
SLACK_NS = 1000
"""Time by which Linux may end a sleep late; 50,000 by default."""


def register() -> None:
    """Entry point for vLLM's general plugins. Does nothing without the settings ENABLED."""
    if read_settings().get("engine_wait") and not hooks.find_unsupported(VLLM_VERSION):
        for feature in hooks.FEATURES:
            if feature.is_measured:
                hooks.install_if_asked(feature)


def is_cpu() -> bool:
    """Whether this is vLLM's CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def with_sleeps(_sched_yield: Callable[[], None]) -> Callable[[], None]:
    """Replace `sched_yield` by a short sleep in this process."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_TIMERSLACK, SLACK_NS)  # later threads inherit it
    return partial(time.sleep, SLEEP_S)


LAUNCHER = "vllm.entrypoints.launchers.launcher"
ENDING_S = 5  # for connections to close after the engine's end; complete answers need ms


def has_launcher() -> bool:
    """Whether vLLM's API server runs in this process."""
    return LAUNCHER in sys.modules


def shutdown_in_time(shutdown: Callable[[Any, Any], Awaitable[None]]) -> Any:
    """Bound the time for which `shutdown` of vLLM's API server waits for connections.

    Otherwise, the server never ends after SIGTERM while a client has sent only half a request or
    does not read its response.
    """

    async def bounded(self: Any, sockets: Any = None) -> None:
        self.config.timeout_graceful_shutdown = ENDING_S
        await shutdown(self, sockets)

    return bounded
