"""Import a recipe for the sake of `Config`, without the libraries that take seconds to load.

`--help` reads dataclasses: names, types, defaults, docstrings. The same modules define models and losses,
so they import torch. While `stand_ins()` is active, each library in HEAVY is an empty module instead, and every
name in it is an empty class. A class serves as a base class, a decorator, a type or a value; the body of a module
needs no more. Sphinx documents code in the same way (`autodoc_mock_imports`).

A recipe imported in this way can print help, and must do nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HEAVY = {
    "accelerate",
    "altair",
    "datasets",
    "huggingface_hub",
    "safetensors",
    "scipy",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
}
"""Slow libraries without any use in the types and defaults of a `Config`."""


class StandIn(type):
    """The class of the empty classes; any use of one gives another, or the argument."""

    def __getattr__(cls, name: str) -> Any:
        return make_stand_in(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """As a decorator, return the decorated function or class; otherwise, an empty class."""
        # `@torch.no_grad()` takes both ways: the call without arguments gives an empty class, and this class,
        # called with the function below it, gives the function.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else make_stand_in(cls.__name__)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())  # without it, Python would iterate through `__getitem__` and never end

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def make_stand_in(name: str) -> Any:
    """An empty class called `name`.

    Raises: AttributeError for a dunder, by which libraries ask whether a feature is there.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn(name, (), {})


class StandInFinder(MetaPathFinder, Loader):
    """Finds the libraries in HEAVY, and all submodules, as empty modules."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] not in HEAVY:
            return None
        return ModuleSpec(fullname, self, is_package=True)  # a package, because it may have submodules

    def exec_module(self, module: ModuleType) -> None:
        # A module's `__getattr__` (PEP 562) also answers `from torch import Tensor`.
        module.__dict__["__getattr__"] = make_stand_in


@contextmanager
def stand_ins() -> Iterator[None]:
    """Replace the libraries in HEAVY that are not loaded yet. At the end, forget them and everything imported with
    them: a later import is a real one."""
    before, finder = set(sys.modules), StandInFinder()
    # In front: the finder of the installed packages would be asked first.
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            # Our modules too: they hold stand-ins as base classes and decorators.
            if name.partition(".")[0] in {*HEAVY, "redraft"}:
                _forget(name)


def _forget(name: str) -> None:
    del sys.modules[name]
    package, _, last = name.rpartition(".")
    if package in sys.modules:  # `from package import last` would find it there
        sys.modules[package].__dict__.pop(last, None)
