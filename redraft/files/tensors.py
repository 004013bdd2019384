"""Read a few tensors from a sharded model by name; write and load a head's tensors."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from redraft.files.folder import CONFIG, INDEX, WEIGHTS, tensor_files, weight_files

ROTARY = "rotary_emb."
"""Part of the names of rotary frequency tables, which old checkpoints contain."""


def list_tensors(folder: Path) -> dict[str, Path]:
    """Like `tensor_files`, but also supports folders with older pytorch_model*.bin files.

    Raises the same errors as `tensor_files`.
    """
    files = weight_files(folder)
    if (folder / INDEX).is_file() or files[0].name == WEIGHTS:
        return tensor_files(folder)
    return {name: path for path in files for name in _map_bin(path)}


def _map_bin(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = torch.load(
            path, map_location="cpu", mmap=True, weights_only=True
        )
    except Exception as error:  # errors of torch, zipfile or pickle
        raise ValueError(
            f"{path} is corrupt ({type(error).__name__}): download it again"
        ) from error
    return tensors


def read_tensors(folder: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read the named tensors from the shards that contain them; by default, all of `tensor_files`.

    A KeyError indicates a bug, because the names come from `list_tensors`.
    """
    files = list_tensors(folder)
    tensors: dict[str, Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for name in tensor_files(folder) if names is None else names:
        by_file.setdefault(files[name], []).append(name)
    for path, wanted in by_file.items():
        if path.suffix == ".bin":
            mapped = _map_bin(path)
            tensors |= {name: mapped[name] for name in wanted}
            continue
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in wanted}
    return tensors


def write_head(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    float32: tuple[str, ...] = (),
    like: Path | None = None,
) -> None:
    """Write a head's `config.json` and `model.safetensors`.

    The tensors are written as in `cast`. Tensors of the earlier export `like` that the head does
    not have, such as copies of the target's embeddings, are written again, because a server accepts
    only drafts with the tensors of the one that it was started with.
    """
    if like is not None:
        tensors = {**tensors, **read_tensors(like, tensor_files(like).keys() - tensors.keys())}
    stored = cast(tensors, dtype, float32)
    folder.mkdir(parents=True, exist_ok=True)
    # Clone, because safetensors does not accept tensors that share memory.
    save_file(
        {n: t.detach().cpu().contiguous().clone() for n, t in stored.items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )
    # Readers older than transformers 5 look for `torch_dtype`.
    named_dtype = {
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / CONFIG).write_text(json.dumps({**config, **named_dtype}, indent=2) + "\n")


def cast(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, float32: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Return the tensors with floating-point numbers in `dtype`.

    Those whose names contain one of the parts in `float32` are in float32.
    """
    types = {
        name: torch.float32 if any(part in name for part in float32) else dtype for name in tensors
    }
    return {n: t.to(types[n]) if t.is_floating_point() else t for n, t in tensors.items()}


def _is_packed(tensor: Tensor, mine: Tensor) -> bool:
    # torch treats FP8 as floating-point, but its numbers are meaningless without scales.
    return mine.is_floating_point() and (
        tensor.element_size() == 1 or not tensor.is_floating_point()
    )


class UnknownTensorsError(ValueError):
    """A checkpoint contains tensors that its head does not have."""

    def __init__(self, source: Path, names: list[str]) -> None:
        super().__init__(
            f"{source} contains {len(names)} tensors that its config does not need, such as {names[0]}"
        )
        self.names = names


def load_into(module: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Copy `tensors` into the parameters with the same names.

    Engines silently load a head with a missing tensor. Here, that is an error.

    Raises:
        UnknownTensorsError: there are tensors that the module does not have.
        ValueError: a tensor is missing, quantised or of a different shape; the message names the
            first one.
    """
    mine = module.state_dict()
    # Every engine computes the frequencies itself.
    tensors = {name: tensor for name, tensor in tensors.items() if ROTARY not in name}
    if packed := sorted(
        name for name, tensor in tensors.items() if name in mine and _is_packed(tensor, mine[name])
    ):
        raise ValueError(
            f"{source} contains quantised weights, such as {packed[0]}: use the weights from before "
            "the quantization"
        )
    if missing := sorted(mine.keys() - tensors.keys()):
        raise ValueError(
            f"{source} lacks {len(missing)} tensors of its head; the first is {missing[0]}"
        )
    if unknown := sorted(tensors.keys() - mine.keys()):
        raise UnknownTensorsError(source, unknown)
    for name, tensor in tensors.items():
        if tensor.shape != mine[name].shape:
            shapes = f"{tuple(tensor.shape)} instead of {tuple(mine[name].shape)}"
            raise ValueError(
                f"{source}: tensor {name} has the shape {shapes}; it belongs to a different "
                f"target or config"
            )
    # The copy has the module's dtype: a bfloat16 checkpoint becomes float32 for further training.
    module.load_state_dict(dict(tensors))
