"""The table of engines, one row each, with everything that other modules use.

To add an engine, write a module with the functions of `Rules`, and add a row here. `redraft export`
and `redraft doctor --engine` need nothing else.

This module uses only the standard library, because help texts list the engines. A module with rules
imports torch, so it is imported on first use.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from redraft.heads.family import Family

if TYPE_CHECKING:
    from redraft.heads.doctor.pair import Finding, Pair


@dataclass(frozen=True, kw_only=True)
class Export:
    """A draft to be exported to an engine."""

    pair: Pair
    output: Path
    """Folder to publish, or the draft's own folder if no files have to be written."""
    num_tokens: int
    """Number of draft tokens per step, for families that do not fix it."""
    gguf: Path | None = None
    """The target's GGUF file, for llama.cpp."""


class Rules(Protocol):
    """The interface of an engine's module.

    Its functions are never called for families in the row's `unserved`.
    """

    def find_refused(self, pair: Pair) -> Iterator[Finding]:
        """Report the parts of a draft that the engine cannot compute from any form of folder."""

    def find_misread(self, pair: Pair) -> Iterator[Finding]:
        """Report the parts of this folder that the engine interprets differently from training.

        `write` corrects them.
        """

    def write(self, export: Export, folder: Path) -> None:
        """Write the draft's files for the engine into `folder`, which becomes `export.output`."""

    def serve(self, export: Export) -> str:
        """Return the shell command that serves the target with `export.output`."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One row of the table of engines."""

    name: str
    """Name on the command line."""
    title: str
    """Name in messages."""
    version: str
    """Release or date of the sources on which the rules are based."""
    is_run: bool
    """Whether tests serve exports in the engine. If not, the rules come from reading its loaders.
    """
    module: str
    """Module that implements `Rules`."""
    package: str = ""
    """Package whose version is compared with `version`. Empty for an engine with its own checks."""
    unserved: Mapping[str, str] = field(default_factory=dict)
    """Families that the engine does not support, with the reason for each."""

    @property
    def proof(self) -> str:
        """Return the engine's name and version, and the basis of its rules, for reports."""
        state = "run" if self.is_run else "its loaders were read, not run"
        return f"{self.title} {self.version} ({state})"

    def find_installed(self) -> str:
        """Return the engine's version installed in this environment; empty if there is none."""
        try:
            return importlib.metadata.version(self.package) if self.package else ""
        except importlib.metadata.PackageNotFoundError:
            return ""

    def rules(self) -> Rules:
        """Import the module of rules, which loads torch."""
        return cast(Rules, import_module(self.module))

    def require_served(self, family: Family) -> None:
        """Raise ValueError if the engine has no method for drafts of this family."""
        if reason := self.unserved.get(family.name):
            raise ValueError(
                f"{self.title} does not support {family.title}: {reason}; serve it with vLLM, "
                f"or train a different family"
            )


OWN_LOOKUP = "it has lookups of its own, and redraft's plugin runs only in vLLM"
LOOKUPS = dict.fromkeys(("retrieval", "live", "ngram", "suffix"), OWN_LOOKUP)

ENGINES: tuple[Engine, ...] = (
    Engine(
        name="vllm",
        title="vLLM",
        version="0.32",
        is_run=True,
        module="redraft.heads.engines.vllm",
    ),
    Engine(
        name="sglang",
        title="SGLang",
        version="0.5.23",
        is_run=False,
        module="redraft.heads.engines.sglang",
        package="sglang",
        unserved={
            **LOOKUPS,
            "peagle": "it does not support parallel drafting with an EAGLE-3 head",
            "medusa": "it does not support heads of this kind",
        },
    ),
    Engine(
        name="tensorrt-llm",
        title="TensorRT-LLM",
        version="main of autumn 2026",
        is_run=False,
        module="redraft.heads.engines.tensorrt_llm",
        unserved={
            **LOOKUPS,
            "eagle1": "its PyTorch backend supports only EAGLE-3 heads",
            "peagle": "its parallel method (PARD) supports only whole models",
            "medusa": "only its older C++ backend supports it",
        },
    ),
    Engine(
        name="llama.cpp",
        title="llama.cpp",
        version="b11549",
        is_run=True,
        module="redraft.heads.engines.llama_cpp",
        unserved={
            **LOOKUPS,
            "eagle1": "it does not support such heads",
            "peagle": "it does not support parallel drafting with an EAGLE-3 head",
            "medusa": "it does not support such heads",
            "mtp": "its own converter puts the layer into the target's file",
        },
    ),
)

if TYPE_CHECKING:
    EngineName = str
else:
    # Type of choices for command lines. mypy cannot read a type that is made from a table.
    EngineName = Literal[tuple(engine.name for engine in ENGINES)]


def find_engine(name: str) -> Engine:
    """Return the row for an engine.

    Raises:
        ValueError: there is no such engine.
    """
    known = {engine.name: engine for engine in ENGINES}
    if name not in known:
        raise ValueError(f"there is no engine {name}: choose one of {', '.join(known)}")
    return known[name]
