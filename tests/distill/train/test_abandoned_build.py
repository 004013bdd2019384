"""A lock that a killed build of DeepSpeed's extension left is told, instead of waited for."""

from __future__ import annotations

import os
import time

import pytest

from redraft.distill.launch.ranks import LONGEST_BUILD_S, refuse_abandoned_build


def make_lock(root, monkeypatch, age_s):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root))
    lock = root / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)
    return lock


def test_a_lock_older_than_any_build_ends_the_run_with_the_cure(tmp_path, monkeypatch):
    lock = make_lock(tmp_path, monkeypatch, LONGEST_BUILD_S + 60)
    with pytest.raises(TimeoutError, match=str(lock)):
        refuse_abandoned_build()


def test_a_build_at_work_is_waited_for(tmp_path, monkeypatch):
    make_lock(tmp_path, monkeypatch, 60)
    refuse_abandoned_build()
