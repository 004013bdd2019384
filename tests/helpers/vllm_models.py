"""The target architectures of the installed vLLM, from the source.

Those that pass inner layers to a head are marked.

Models of text and images import torchvision, which this environment does not have, so no class is
imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
MODELS = "vllm.model_executor.models"
INTERFACE = "SupportsEagle3"

Class = tuple[str, str]
"""Module and name."""


@functools.cache
def _source(module: str) -> tuple[ast.Module, list[str]]:
    """The tree of a module, and the package that relative imports in it begin from."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent.joinpath(*module.split(".")[1:])
    is_package = path.is_dir()
    text = (path / "__init__.py" if is_package else path.with_suffix(".py")).read_text()
    return ast.parse(text), module.split(".") if is_package else module.split(".")[:-1]


@functools.cache
def architectures() -> dict[str, Class]:
    """The class of each architecture that vLLM serves as a target."""
    tables = {
        target.id: node.value
        for node in _source(f"{MODELS}.registry")[0].body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in TABLES
    }
    listed = {
        key: value for name in TABLES for key, value in ast.literal_eval(tables[name]).items()
    }
    return {
        key: (module if module.startswith("vllm.") else f"{MODELS}.{module}", name)
        for key, (module, name) in listed.items()
    }


@functools.cache
def _classes(module: str) -> tuple[dict[str, list[str]], dict[str, Class]]:
    """The bases of each class of a module.

    The classes of vLLM that it imports come by their names here.
    """
    tree, package = _source(module)
    bases: dict[str, list[str]] = {}
    imported: dict[str, Class] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            heads = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
            bases[node.name] = [head.id for head in heads if isinstance(head, ast.Name)]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            if origin.startswith("vllm."):
                imported |= {
                    alias.asname or alias.name: (origin, alias.name) for alias in node.names
                }
    return bases, imported


def passes_inner_layers(architecture: str) -> bool:
    """Whether vLLM serves heads that read inner layers beside this architecture.

    EAGLE-3 is one of them.
    """
    return architecture in architectures() and _inherits(*architectures()[architecture])


def _inherits(module: str, name: str) -> bool:
    if name == INTERFACE:
        return True
    bases, imported = _classes(module)
    if name in bases:
        return any(_inherits(module, base) for base in bases[name])
    return name in imported and _inherits(*imported[name])
