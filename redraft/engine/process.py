"""Start child processes that do not outlive this process. Neither do their own children."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

STOP_TIMEOUT_S = 10  # time for a process to shut down before it is killed
PLAIN_LOG = {"VLLM_LOGGING_COLOR": "0", "VLLM_LOGGING_PREFIX": ""}
"""Variables for child processes, whose logs `engine_log` reads. FORCE_COLOR alone would colour them."""
PR_SET_PDEATHSIG = 1  # option of prctl(2): the signal that the kernel sends when the parent exits

# Import this here instead of in the child, where a loader lock held by another thread at fork would
# stay locked until exec.
LIBC = ctypes.CDLL(None)

_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """Reserve a loopback port for a child process that accepts the port as an argument.

    The port is not assigned to any other process before this one exits. A child binds its port only
    seconds later. Until then, a socket of this process holds the port without listening: Linux does
    not assign it to processes that ask for any free port, but lets a server listen on it if the
    server sets SO_REUSEADDR, as vLLM, uvicorn and nats-server do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _RESERVED.append(held)
    return int(held.getsockname()[1])


@contextlib.contextmanager
def process_group(
    command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `start_group`, and stop the whole group on exit; SIGTERM also causes the exit."""
    # The whole log is searched for the cause of an exit, so it must not contain an earlier run.
    log.unlink(missing_ok=True)
    with exiting_on_sigterm():
        process = start_group(command, log=log, env=env)
        try:
            yield process
        finally:
            stop_group(process)


@contextlib.contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit within this context.

    Nothing changes if the program already handles the signal, or outside the main thread. By
    default, SIGTERM terminates a program at once. The kernel then sends SIGTERM to the leader of
    each group, but only once, and a vLLM process that is still loading may ignore it.
    """
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def deferring_exit() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the block ends; outside the main thread, do nothing.

    Their handlers raise between any two operations, so a lock acquired in the block could otherwise
    stay held for the whole shutdown.
    """
    # A signal mask would not do, because another thread of the process could receive the signal.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda n, _: received.append(n)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def start_group(
    command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, niceness: int = 0
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a process group.

    Its output is appended to `log`, and its nice level is raised by `niceness`. If this process or
    the calling thread exits, the kernel sends SIGTERM to the leader, which stops its children
    itself. The group is not a separate session, because Linux divides a processor among sessions
    first (autogroups): in a separate session, a learner running next to the many threads of two
    vLLM servers got 10% of two cores instead of 28%.
    """
    log.parent.mkdir(parents=True, exist_ok=True)

    def prepare() -> None:
        os.nice(niceness)
        if sys.platform == "linux":
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("ab") as output:
        # The child has its own copy of the descriptor, so `output` can be closed here.
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **PLAIN_LOG, **(env or {})},
            process_group=0,
            preexec_fn=prepare,
        )


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the group to stop, and kill the members that have not exited in time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        # Kill the engine's workers, if any of them outlived the leader.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
