"""A patch of vLLM's API server, which otherwise never ends while a client sends half a request or reads nothing.

After SIGTERM and the engine's end, vLLM waits for all connections to close, without a limit."""

from __future__ import annotations

import sys
from typing import Any

LAUNCHER = "vllm.entrypoints.launchers.launcher"
ENDING_S = 5  # for connections to close after the engine's end; complete answers need ms


def patch_ending() -> None:
    """Bound the wait. Does nothing in processes without an API server."""
    launcher: Any = sys.modules.get(LAUNCHER)
    if launcher is None:
        return
    shutdown = launcher.NoSignalServer.shutdown

    async def shutdown_in_time(self: Any, sockets: Any = None) -> None:
        self.config.timeout_graceful_shutdown = ENDING_S
        await shutdown(self, sockets)

    launcher.NoSignalServer.shutdown = shutdown_in_time
