"""Launches of scripts on two processes of this machine, on one node or as two nodes of one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from accelerate.commands.launch import launch_command, launch_command_parser
from run_learner import FORKS

from redraft.engine.process import free_port

ROOT = Path(__file__).parents[2]

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}


def require(config: str) -> None:
    if config.startswith("zero"):
        pytest.importorskip(
            "deepspeed", reason="DeepSpeed is not installed: pip install 'redraft[deepspeed]'"
        )


def accelerate_launch(config: str, *options: str, nodes: int = 1) -> list[list[str]]:
    """The command of each node, as a user gives it.

    A shipped config, and what this machine has other than a server.
    """
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    shipped = ["--config_file", str(ROOT / f"recipes/accelerate/{config}.yaml")]
    here = [
        "--num_processes",
        "2",
        "--mixed_precision",
        "no",
        "--main_process_port",
        str(free_port()),
        *options,
    ]
    base = [*launcher, *shipped, *here]
    if nodes == 1:
        return [base]
    between = ["--num_machines", str(nodes), "--main_process_ip", "127.0.0.1"]
    return [[*base, *between, "--machine_rank", str(rank)] for rank in range(nodes)]


def read_launch(config: str) -> dict[str, str]:
    """The environment in which `accelerate_launch(config)` would start torchrun."""
    found: dict[str, str] = {}
    asked = launch_command_parser().parse_args([*accelerate_launch(config)[0][3:], "script.py"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.run.run", lambda _: found.update(os.environ))
        launch_command(asked)
    return found


def fork_ranks(
    work: Callable[..., None],
    *args: Any,
    ranks: int = 1,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run `work(*args)` on so many ranks, without a launcher and without its imports.

    Each is a fork of a process that has imported PyTorch and redraft.
    """
    port = free_port()
    environment = {**environment, **ENVIRONMENT}
    processes = [
        FORKS.Process(target=_as_rank, args=(rank, ranks, port, environment, work, args))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(300)
        assert [process.exitcode for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()


def _as_rank(
    rank: int,
    ranks: int,
    port: int,
    environment: Mapping[str, str],
    work: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    os.environ |= environment
    if ranks > 1:
        # What `accelerate launch` sets, too.
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(number) for name, number in own.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work(*args)


def run_all(
    commands: Sequence[Sequence[str]], script: Sequence[str], timeout_s: float = 300
) -> list[str]:
    """What each node's launcher wrote, once all have ended well."""
    started = [
        subprocess.Popen(
            [*command, *script],
            cwd=ROOT,
            env=ENVIRONMENT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=timeout_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, text[-4000:]
    return said
