"""Every head family by name. A family is imported when it is asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from heads.artifact import PROVENANCE, fingerprint
from heads.tensors import read_config

MODULES = {
    "eagle1": "heads.eagle1:Eagle1",
    "eagle3": "heads.eagle3:Eagle3",
    "medusa": "heads.medusa:Medusa",
    "mlp_speculator": "heads.mlp_speculator:MLPSpeculator",
    "mtp": "heads.mtp:Mtp",
}
"""A new family is one file and one line here."""


@dataclass(frozen=True)
class Family:
    """`config()` are its options; `head(config, target)` its module; `head.load(folder, target)` one from a folder."""

    config: Any
    head: Any


def family(name: str) -> Family:
    """The family of that name.

    Raises: ValueError for an unknown one.
    """
    if name not in MODULES:
        raise ValueError(f"there is no head family {name}: choose one of {', '.join(MODULES)}")
    module_name, head = MODULES[name].split(":")
    module = import_module(module_name)
    return Family(config=module.Config, head=getattr(module, head))


def family_of(folder: Path) -> str:
    """The family of an exported folder, from its config.

    Raises: ValueError where the config names none that is known.
    """
    config = read_config(folder)
    architecture = (config.get("architectures") or [""])[0]
    # a head of others has no entry of ours
    name = config.get("redraft", {}).get("family") or BY_ARCHITECTURE.get(architecture)
    if name not in MODULES:
        raise ValueError(f"{folder} is no head of a known family (architecture {architecture or 'not given'})")
    return str(name)


def require_head(folder: Path, name: str, target: Path) -> None:
    """Return where `folder` holds a head of the family `name`, and says no other target than this one.

    Raises: FileNotFoundError, ValueError.
    """
    if (found := family_of(folder)) != name:
        raise ValueError(f"{folder} holds a head of the family {found}, not {name}: use the recipe of {found}")
    provenance = json.loads((folder / PROVENANCE).read_text()) if (folder / PROVENANCE).is_file() else {}
    trained_for = provenance.get("target_fingerprint")
    if trained_for is not None and trained_for != fingerprint(target):
        raise ValueError(
            f"{folder} was trained for another target than {target}: {provenance.get('target', 'unnamed')}"
        )


BY_ARCHITECTURE = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "EagleLlamaForCausalLM": "eagle1",
    "MedusaModel": "medusa",
    "MLPSpeculatorPreTrainedModel": "mlp_speculator",
}
"""Architectures that only a head has; EAGLE-1's LlamaForCausalLM could be any Llama."""
