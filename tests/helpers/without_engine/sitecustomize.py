"""On PYTHONPATH: a command ends well when it starts vLLM, and prints vLLM's command.

It makes no difference whether the command would become vLLM's server or start one. Everything that
it does before, such as refusing a draft or training one, has run.
"""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

ENGINES = ("vllm.entrypoints.launchers.api_server.entry", "redraft.engine.parity.dump")

_execve = os.execve


def end_before_engine(command: Any) -> None:
    if isinstance(command, list | tuple) and any(name in command for name in ENGINES):
        print(shlex.join(map(str, command)), flush=True)
        os._exit(0)


def execve(path: str, command: Sequence[str], env: Mapping[str, str]) -> None:
    end_before_engine(command)
    _execve(path, command, env)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        end_before_engine(args)
        super().__init__(args, *rest, **options)


os.execve = execve  # type: ignore[assignment]
subprocess.Popen = Popen  # type: ignore[misc]
