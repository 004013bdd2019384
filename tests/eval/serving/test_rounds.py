"""Servers that are started together."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from redraft.eval.serving.rounds import start_servers

NEVER_READY = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"


def test_a_server_that_does_not_start_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "vllm-slow.log"
    fails = f"""
import pathlib, sys, time
while "pid" not in (pathlib.Path({str(slow)!r}).read_text() if pathlib.Path({str(slow)!r}).exists() else ""):
    time.sleep(0.05)
sys.exit("ValueError: no such draft")
"""

    def command(model: str, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", fails if "--speculative-config" in arguments else NEVER_READY]

    monkeypatch.setattr("redraft.eval.engine.server.vllm_command", command)
    monkeypatch.setattr("redraft.eval.engine.server.START_TIMEOUT_S", 40)
    began_s = time.monotonic()
    drafts = {"slow": None, "bad": {"method": "ngram", "num_speculative_tokens": 2}}
    with pytest.raises(ChildProcessError, match="no such draft"), start_servers("t", drafts, tmp_path):
        pass
    assert time.monotonic() - began_s < 30
    pid = slow.read_text().split()[1]
    assert not Path("/proc", pid).exists()
