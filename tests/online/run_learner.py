"""A learner in a process of its own that kills itself, as kill -9 would, at a given point of its work."""

from __future__ import annotations

import multiprocessing
import os
import signal
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from online.config import LearnerConfig
from online.learner import run

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["online.learner"])  # torch is loaded once for all of them


def start(cfg: LearnerConfig, kill_at: str = "") -> ForkServerProcess:
    """A learner's process. `kill_at` is such as "before 3 online.buffer:Buffer.append": its third call."""
    process = FORKS.Process(target=learn, args=(cfg, kill_at))
    process.start()
    return process


def learn(cfg: LearnerConfig, kill_at: str) -> None:
    torch.set_num_threads(1)
    if kill_at:
        arm(*kill_at.split())
    run(cfg)


def arm(when: str, number: str, name: str) -> None:
    module, path = name.split(":")
    *owners, attribute = path.split(".")
    owner: Any = import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    work, calls = getattr(owner, attribute), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        is_last = calls == int(number)
        if is_last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = work(*args, **kwargs)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, dying)
