"""On PYTHONPATH: the processes of a vLLM server fork, so that vLLM is imported once.

On a CPU, vLLM lets its API server start the engine core, and the engine core its worker, as new
interpreters. Each imports vLLM for eight seconds and longer, which is most of a server's start.
Forks compute the same, but with the number of threads with which the API server was imported.
"""

import os
import signal
import sys
from typing import Any


def fork_of_vllm(method: str | None = None) -> Any:
    """In place of `multiprocessing.get_context`."""
    is_vllms = sys._getframe(1).f_globals.get("__name__") == "vllm.utils.system_utils"
    return _get_context("fork" if is_vllms else method)


def forget_wakeups() -> None:
    """A signal to the fork must not wake the event loop that it has inherited."""
    signal.set_wakeup_fd(-1)


if "vllm.entrypoints.launchers.api_server.entry" in sys.orig_argv:
    import multiprocessing

    _get_context = multiprocessing.get_context
    multiprocessing.get_context = fork_of_vllm
    # numba and torch share OpenMP. With two threads on the engine's only core, every parallel region
    # of an n-gram server would spin for milliseconds.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    os.register_at_fork(after_in_child=forget_wakeups)
