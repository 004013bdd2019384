"""On PYTHONPATH: a process that would become vLLM's server prints vLLM's command and ends well.

`redraft serve` refuses what it must before that moment, so everything of its own has run.
"""

import os
import shlex
from collections.abc import Mapping, Sequence

_execve = os.execve


def execve(path: str, command: Sequence[str], env: Mapping[str, str]) -> None:
    if "vllm.entrypoints.launchers.api_server.entry" in command:
        print(shlex.join(command), flush=True)
        os._exit(0)
    _execve(path, command, env)


os.execve = execve  # type: ignore[assignment]
