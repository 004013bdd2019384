from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from redraft.engine.engine_log import last_error
from redraft.engine.process import free_port, process_group

PARENT_OF_A_DEAF_CHILD = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"])
print("pids", child.pid, flush=True)
time.sleep(600)
"""


def wait_for(log: Path, *words: str) -> str:
    deadline = time.monotonic() + 600
    while not all(word in (text := log.read_text() if log.exists() else "") for word in words):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    return text


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    """Wait until the process is gone.

    A killed one takes a moment; one that was not killed would sleep for minutes.
    """
    deadline = time.monotonic() + 300
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def child_pid(text: str) -> int:
    return int(text.split("pids ")[1].split()[0])


def test_a_child_that_ignores_sigterm_is_gone_on_exit(tmp_path: Path):
    log = tmp_path / "log"
    with process_group([sys.executable, "-c", PARENT_OF_A_DEAF_CHILD], log=log) as process:
        child = child_pid(wait_for(log, "deaf", "pids"))
        assert is_running(child)
    assert process.returncode == -signal.SIGTERM
    wait_until_gone(child)


def test_the_group_is_gone_after_an_error_in_the_body(tmp_path: Path):
    with (
        pytest.raises(RuntimeError, match="body"),
        process_group(
            [sys.executable, "-c", "import time; time.sleep(600)"], log=tmp_path / "log"
        ) as process,
    ):
        raise RuntimeError("body")
    assert process.returncode == -signal.SIGTERM


@pytest.mark.vllm
def test_a_cause_is_read_from_the_log_whatever_the_shell_says_of_colours_and_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("VLLM_LOGGING_COLOR", "1")
    monkeypatch.setenv("VLLM_LOGGING_PREFIX", "[gateway 7] ")
    script = (
        "from vllm.logger import init_logger; init_logger('vllm.x').error('ValueError: no blocks')"
    )
    log = tmp_path / "log"
    with process_group([sys.executable, "-c", script], log=log) as process:
        assert process.wait(600) == 0
    assert last_error(log) == "ValueError: no blocks", log.read_text()


def test_a_process_that_ended_by_itself_is_no_error(tmp_path: Path):
    with process_group([sys.executable, "-c", "print('done')"], log=tmp_path / "log") as process:
        process.wait()
    assert (process.returncode, (tmp_path / "log").read_text()) == (0, "done\n")


def start_owner(command: str, log: Path) -> subprocess.Popen[bytes]:
    """A process that starts Python with this command as a group, and sleeps.

    It waits a second for the end of the group.
    """
    code = f"""
import sys, time
from pathlib import Path
from redraft.engine import process
process.STOP_TIMEOUT_S = 1
with process.process_group([sys.executable, "-c", {command!r}], log=Path({str(log)!r})):
    time.sleep(600)
"""
    return subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])


def test_sigterm_to_the_owner_ends_a_group_that_ignores_sigterm(tmp_path: Path):
    deaf = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('pids', "
        "os.getpid(), flush=True)"
    )
    owner = start_owner(f"{deaf}; time.sleep(600)", log := tmp_path / "log")
    sleeper = child_pid(wait_for(log, "pids", "\n"))
    owner.terminate()
    assert owner.wait() == 128 + signal.SIGTERM
    wait_until_gone(sleeper)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_the_process_dies_with_a_killed_owner(tmp_path: Path):
    sleeper_code = "import os, time; print('pids', os.getpid(), flush=True); time.sleep(600)"
    owner = start_owner(sleeper_code, log := tmp_path / "log")
    sleeper = child_pid(wait_for(log, "pids", "\n"))
    owner.kill()
    owner.wait()
    wait_until_gone(sleeper)


TAKE_PORTS = """
import socket
sockets = []
try:
    while len(sockets) < 2000:
        sockets.append(socket.socket())
        sockets[-1].bind(("127.0.0.1", 0))
except OSError:
    pass  # no port is left, or no descriptor
print(*(one.getsockname()[1] for one in sockets if one.fileno() >= 0))
"""


def test_a_port_for_a_child_is_given_to_nobody_else_and_the_child_can_listen_on_it() -> None:
    """Another process asks for 2,000 ports.

    Without a reservation it gets some of the 200 in nearly every run.
    """
    mine = {free_port() for _ in range(200)}
    assert len(mine) == 200
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (r.getrlimit(r.RLIMIT_NOFILE)[1],) "
        f"* 2)\n{TAKE_PORTS}"
    )
    theirs = set(
        map(
            int,
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, check=True
            ).stdout.split(),
        )
    )
    assert len(theirs) > 500
    assert not mine & theirs
    with socket.create_server(("0.0.0.0", mine.pop())) as server:
        socket.create_connection(("127.0.0.1", server.getsockname()[1])).close()
