"""Servers that are started together."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from redraft.eval.serving import rounds
from redraft.eval.serving.rounds import share_memory, start_servers

NEVER_READY = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"


def test_a_server_that_does_not_start_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "vllm-slow.log"
    fails = f"""
import pathlib, sys, time
while "pid" not in (pathlib.Path({str(slow)!r}).read_text() if pathlib.Path({str(slow)!r}).exists() else ""):
    time.sleep(0.05)
sys.exit("ValueError: no such draft")
"""

    def command(model: str, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", fails if "--speculative-config" in arguments else NEVER_READY]

    monkeypatch.setattr("redraft.engine.server.vllm_command", command)
    monkeypatch.setattr("redraft.engine.server.START_TIMEOUT_S", 40)
    began_s = time.monotonic()
    drafts = {"slow": None, "bad": {"method": "ngram", "num_speculative_tokens": 2}}
    with (
        pytest.raises(ChildProcessError, match=r"\bdraft\b.*vllm-bad\.log"),
        start_servers("t", drafts, tmp_path),
    ):
        pass
    assert time.monotonic() - began_s < 30
    pid = slow.read_text().split()[1]
    assert not Path("/proc", pid).exists()


def test_sigterm_ends_every_server_that_starts(tmp_path: Path) -> None:
    script = f"""
import pathlib, sys
from redraft.eval.serving import rounds
from redraft.engine import server
server.vllm_command = lambda model, arguments: [sys.executable, "-c", {NEVER_READY!r}]
with rounds.start_servers("t", {{"a": None, "b": None}}, pathlib.Path({str(tmp_path)!r}), dtype="float32"):
    pass
"""
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        logs = [tmp_path / f"vllm-{name}.log" for name in ("a", "b")]
        wait_until(lambda: all(log.exists() and "pid" in log.read_text() for log in logs))
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    pids = [log.read_text().split()[1] for log in logs]
    assert [pid for pid in pids if Path("/proc", pid).exists()] == []


class Servers:
    """Servers that are told to start: the options of each, and how many start at once."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.options: dict[str, dict[str, Any]] = {}
        self.starting = self.most_starting = 0

    @contextlib.contextmanager
    def __call__(self, target: str, *, log: Path, **options: Any) -> Iterator[str]:
        self.options[log.stem] = options
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        time.sleep(0.1)
        self.starting -= 1
        if log.stem == self.refused:
            raise ChildProcessError("no such draft")
        yield log.stem


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(rounds, "vllm_server", made)
    return made


FOUR: dict[str, Any] = dict.fromkeys(("none", "ngram", "retrieval", "eagle3"))


def test_servers_on_a_gpu_start_in_turn_and_share_memory(servers: Servers, tmp_path: Path) -> None:
    options: dict[str, Any] = {"extra_args": ("--seed=1",), "max_num_seqs": 8}
    with start_servers("t", FOUR, tmp_path, on_cpu=False, **options) as started:
        assert started == {name: f"vllm-{name}" for name in FOUR}
    assert servers.most_starting == 1
    for options in servers.options.values():
        assert options["extra_args"] == ("--gpu-memory-utilization=0.225", "--seed=1")
        assert options["max_num_seqs"] == 8


def test_servers_on_a_cpu_start_together_without_a_share(servers: Servers, tmp_path: Path) -> None:
    five = {**FOUR, "runs/a": None}
    with start_servers("t", five, tmp_path, on_cpu=True, extra_args=("--seed=1",)):
        assert servers.most_starting == 5
    assert "vllm-runs-a" in servers.options, "the log of a draft that is named by its path"
    assert all(options["extra_args"] == ("--seed=1",) for options in servers.options.values())


def test_after_a_failed_start_on_a_gpu_no_other_begins(servers: Servers, tmp_path: Path) -> None:
    servers.refused = "vllm-ngram"
    starting = start_servers("t", FOUR, tmp_path, on_cpu=False)
    with pytest.raises(ChildProcessError, match="draft"), starting:
        pass
    # The next one begins to start before the failure is known.
    assert list(servers.options)[:2] == ["vllm-none", "vllm-ngram"]
    assert "vllm-eagle3" not in servers.options


@pytest.mark.parametrize(
    "named",
    [
        ("--gpu-memory-utilization=0.3",),
        ("--gpu-memory-utilization", "0.3"),
        ("--gpu_memory_utilization=0.3",),
    ],
)
def test_a_share_that_the_caller_names_is_kept(named: tuple[str, ...]) -> None:
    assert share_memory(named, 4) == named
    assert share_memory((), 1) == (), "one server has the memory that vLLM takes by default"
