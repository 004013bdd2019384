"""A learner in a process of its own, with a fault at a given point of its work: it kills itself, as kill -9 would."""

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

from online.config import LearnerConfig
from online.learner import run

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["online.learner"])  # torch is loaded once for all of them


def start(cfg: LearnerConfig, fault: str = "") -> ForkServerProcess:
    """A learner's process.

    `fault`: "before 3 online.buffer:Buffer.append" kills it at the third call of that method, "after 3 ..." when that
    has ended; "slow 0.5 ..." lets every call take half a second longer.
    """
    process = FORKS.Process(target=learn, args=(cfg, fault))
    process.start()
    return process


def learn(cfg: LearnerConfig, fault: str) -> None:
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
