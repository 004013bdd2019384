"""Processes that are restarted whenever they end, as by systemd or Kubernetes.

Their memory and descriptors are sampled all the time.

start ─► runs ─ ends, or the liveness probe fails twice ─► the rest of its group is killed ─► 1 to 8 s ─► start
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from redraft.engine.process import start_group, stop_group

POLL_S = 0.2
BACKOFF_S, MAX_BACKOFF_S = 1.0, 8.0
"""Initial and maximum pause before a restart. The pause doubles with every run shorter than
SHORT_RUN_S.
"""

SHORT_RUN_S = 20.0
LIVENESS_PERIOD_S = 5.0
LIVENESS_FAILURES = 2
SAMPLE_S = 5.0


@dataclass
class Run:
    """One life of a process."""

    pid: int
    began_s: float
    """Monotonic time, like all times in this module."""
    ready_s: float | None = None
    """Time when the process first listened on its port; its start time if it has no known port."""
    ended_s: float | None = None
    exit_status: int | None = None
    is_wanted: bool = False
    """Whether the soak ended the process: with a fault, at the end, or after a failed liveness
    probe.
    """
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Samples of (time, resident bytes, descriptors), summed over the process and its children,
    from the time when it was ready.
    """


class Supervised:
    """One process and its children, kept alive."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        liveness: Callable[[], Awaitable[None]] | None = None,
        port: int | None = None,
    ) -> None:
        self.port = port
        self.name, self.command, self.log, self.env, self.liveness = (
            name,
            list(command),
            log,
            env,
            liveness,
        )
        self.runs: list[Run] = []
        self.num_liveness_kills = 0
        self._process: subprocess.Popen[bytes] | None = None

    async def supervise(self) -> None:
        """Keep the process alive until the task is cancelled; then ask the process to stop."""
        tasks = [
            self._restart_forever(),
            self._sample_forever(),
            *([self._probe_forever()] if self.liveness else []),
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(task)
        finally:
            self.end()

    @property
    def pid(self) -> int | None:
        """Process id of the leader; None while the process is down."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def run(self) -> Run:
        return self.runs[-1]

    def was_up(self, since_s: float) -> bool:
        """Whether the current run was ready by then and is still running."""
        ready_s = self.run.ready_s if self.runs else None
        # A killed process closes its connections before the system reports its exit.
        is_alive = self.pid is not None and not self.run.is_wanted
        return is_alive and ready_s is not None and ready_s <= since_s

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self, child: str = "") -> None:
        """Send SIGKILL to the leader or, if given, to the child whose name contains `child`.

        Raises:
            LookupError: the process is down or has no such child.
        """
        if self.pid is None:
            raise LookupError(f"{self.name} is down")
        leader = psutil.Process(self.pid)
        found = (
            [p for p in leader.children(recursive=True) if child in p.name()] if child else [leader]
        )
        if not found:
            raise LookupError(f"{self.name} has no child process {child}")
        self.run.is_wanted = True
        found[0].kill()

    def end(self) -> None:
        """Ask the process to exit, and kill it if it does not exit in time."""
        if self._process is not None:
            if self.runs:
                self.run.is_wanted = True
            # A stopped process handles SIGTERM only after SIGCONT.
            self.signal(signal.SIGCONT)
            stop_group(self._process)

    async def _restart_forever(self) -> None:
        backoff_s = BACKOFF_S
        while True:
            self._process = start_group(self.command, log=self.log, env=self.env)
            run = Run(self._process.pid, time.monotonic())
            self.runs.append(run)
            while (status := self._process.poll()) is None:
                if run.ready_s is None and (self.port is None or await _is_listening(self.port)):
                    run.ready_s = time.monotonic()
                await asyncio.sleep(POLL_S)
            run.ended_s, run.exit_status = time.monotonic(), status
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    run.pid, signal.SIGKILL
                )  # the rest of a container stops with its first process
            is_short = run.ended_s - run.began_s < SHORT_RUN_S
            backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s) if is_short else BACKOFF_S
            await asyncio.sleep(backoff_s)

    async def _probe_forever(self) -> None:
        assert self.liveness is not None
        failures = 0
        while True:
            await asyncio.sleep(LIVENESS_PERIOD_S)
            try:
                await self.liveness()
                failures = 0
            except (OSError, TimeoutError):
                failures += 1
            if failures >= LIVENESS_FAILURES and self.pid is not None:
                failures = 0
                self.num_liveness_kills += 1
                self.run.is_wanted = True
                self.signal(signal.SIGKILL)

    async def _sample_forever(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            if self.pid is not None and self.run.ready_s is not None:
                with contextlib.suppress(psutil.Error, FileNotFoundError):
                    leader = psutil.Process(self.pid)
                    family = [leader, *leader.children(recursive=True)]
                    sizes = [(p.memory_info().rss, p.num_fds()) for p in family]
                    self.run.samples.append(
                        (time.monotonic(), sum(s for s, _ in sizes), sum(n for _, n in sizes))
                    )


async def _is_listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
