"""A learner in a separate process, with a fault at a given point.

It kills itself, as kill -9 would.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable
from importlib import import_module
from inspect import isawaitable
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.learner import run

FORKS = multiprocessing.get_context("forkserver")
# Torch is imported once for all of them. A session of tests has one such server, so it imports for
# every fork.
FORKS.set_forkserver_preload(
    [
        "redraft.online.daemon.learner",
        "redraft.distill.run.training_run",
        "redraft.eval.report.charts",
    ]
)


def start(cfg: LearnerConfig, fault: str = "") -> ForkServerProcess:
    """A learner's process.

    `fault`: "before 3 redraft.online.learning.buffer:Buffer.append" kills it at the third call of
    that method, "after 3 ..." after that call; "slow 0.5 ..." makes every call take half a second
    longer.
    """
    # the fork server has the environment of the first test that used it, so this one's goes along
    process = FORKS.Process(target=learn, args=(cfg, fault, dict(os.environ)))
    process.start()
    return process


def learn(cfg: LearnerConfig, fault: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if fault:
        arm(*fault.split())
    run(cfg)


def arm(what: str, number: str, name: str) -> None:
    module, path = name.split(":")
    *owners, attribute = path.split(".")
    owner: Any = import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    work, calls = getattr(owner, attribute), itertools.count(1)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(float(number))
        return work(*args, **kwargs)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if next(calls) != int(number):
            return work(*args, **kwargs)
        if what == "before":
            die()
        result = work(*args, **kwargs)
        return die_after(result) if isawaitable(result) else die()

    setattr(owner, attribute, slow if what == "slow" else dying)


async def die_after(work: Awaitable[Any]) -> None:
    await work
    die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
