"""Named tensors in folders: a few out of a sharded model, a head's own with their config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from heads.artifact import safetensors_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TRAINED_WITH = "trained_with"
"""Key of an export's `redraft` section: what the head was, under the engines' own keys; those may be edited later."""


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor of a safetensors folder, by the tensor's name.

    Raises: FileNotFoundError where there is none; ValueError naming a file that is truncated.
    """
    if (folder / INDEX).is_file():
        return {name: folder / file for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()}
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} holds neither {WEIGHTS} nor {INDEX}: it is no model folder")
    return dict.fromkeys(safetensors_header(folder / WEIGHTS), folder / WEIGHTS)


def read_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors, each read from the shard that holds it. KeyError is a bug: names come from `tensor_files`."""
    files = tensor_files(folder)
    tensors: dict[str, Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, wanted in by_file.items():
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in wanted}
    return tensors


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`.

    Raises: FileNotFoundError, ValueError.
    """
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG}: it is no exported head")
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is corrupt ({error}): export the head again") from error
    return config


def write_head(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """`config.json` and `model.safetensors` of a head, its floating-point tensors in `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    # clones: safetensors refuses tensors that share memory
    save_file({n: t.detach().cpu().contiguous().clone() for n, t in cast.items()}, folder / WEIGHTS, {"format": "pt"})
    named_dtype = {"dtype": str(dtype).removeprefix("torch."), "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps({**config, **named_dtype}, indent=2) + "\n")


def load_into(module: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Copy `tensors` into the module of the same names: all of them, and none that it does not know.

    Engines load a head that lacks a tensor in silence; here that is an error.
    Raises: ValueError naming the first tensor that is missing, unknown or of another shape.
    """
    own = module.state_dict()
    if missing := sorted(own.keys() - tensors.keys()):
        raise ValueError(f"{source} lacks {len(missing)} tensors of its head, the first is {missing[0]}")
    if unknown := sorted(tensors.keys() - own.keys()):
        raise ValueError(f"{source} holds {len(unknown)} tensors its config does not call for, such as {unknown[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            shapes = f"{tuple(tensor.shape)} instead of {tuple(own[name].shape)}"
            raise ValueError(f"{source}: tensor {name} is {shapes}; it belongs to another target or config")
    module.load_state_dict(dict(tensors))
