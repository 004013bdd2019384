"""A child process that cannot outlive us, nor its own children it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

STOP_TIMEOUT_S = 10
"""What a process gets to shut down by itself before it is killed."""

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that the kernel sends when the parent dies."""

LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec a loader lock that another thread held stays locked


def free_port() -> int:
    """A loopback port that nobody has, for a child that is told its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process_group(
    command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`command` as the leader of its own process group, output to `log`; the whole group is gone on exit.

    If this process is killed, the leader gets SIGTERM from the kernel and takes its children down itself. It is no
    session of its own: Linux shares a processor among sessions first (autogroups), and beside the many threads of two
    vLLM servers a learner got 10% of two cores that way instead of 28%.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            process_group=0,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    try:
        yield process
    finally:
        _stop_group(process)


def _die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        os.killpg(process.pid, signal.SIGKILL)  # the engine's workers, if the leader left any behind
    process.wait()
