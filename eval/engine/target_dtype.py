"""The type in which a target computes, if the user names none.

    on a GPU                                                     as stored
    on a CPU, quantised                                          as stored: servers alone compute it
    on a CPU with AMX or AVX-512, stored in bfloat16             bfloat16: half the memory
    on any other CPU, or stored in another type                  float32: outputs are compared token for token

Training, forecast and engine all ask here, `redraft serve` too, so a draft is trained for the numbers that serve it.
Importing this loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from redraft.eval.engine.hardware import Machine, this_machine
from redraft.heads.files.folder import CONFIG, is_hub_name, read_config, refuse_gguf

TargetDtype = Literal["float32", "bfloat16"]
"""Types in which a target computes here and is served."""


def default_target_dtype(target: str | Path, *, on_cpu: bool, machine: Machine | None = None) -> TargetDtype | None:
    """The type for a target, by folder or hub name; None for the type in which it is stored. By default for this
    machine."""
    if not on_cpu:
        return None
    sections = _sections(target)
    if any("quantization_config" in section for section in sections):
        return None
    if _read_dtype(sections) == "bfloat16" and (machine or this_machine()).cpu_has_bfloat16:
        return "bfloat16"
    return "float32"


def stored_dtype(name_or_path: str | Path) -> str | None:
    """The type that a model's config.json names; None if it names none or cannot be read, which loading reports."""
    return _read_dtype(_sections(name_or_path))


def _read_dtype(sections: Sequence[Mapping[str, Any]]) -> str | None:
    # `torch_dtype` until transformers 4.56.
    found = (section.get("dtype") or section.get("torch_dtype") for section in sections)
    return next((dtype for dtype in found if dtype), None)


def _sections(name_or_path: str | Path) -> Sequence[Mapping[str, Any]]:
    """The sections of a config.json that may describe the language model; none if it cannot be read."""
    try:
        config = read_config(_config_folder(name_or_path))
    except (OSError, ValueError):
        return ()
    return (config, config.get("text_config") or {})  # the second in a model of text and images


def _config_folder(name_or_path: str | Path) -> Path:
    refuse_gguf(name_or_path)
    if not is_hub_name(name_or_path):
        return Path(name_or_path)
    from huggingface_hub import hf_hub_download

    # From the network if need be: the first run must choose as later ones, which find the model in the hub's cache.
    return Path(hf_hub_download(str(name_or_path), CONFIG)).parent
