"""Get the target's parts that a head starts from, even if the layers are not in this process.

whole target in this process            its modules
layers in shards, or on other machines  a few tensors of its files; the first process shares the head
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from redraft.distill.signal.features import load_part
from redraft.distill.signal.sharded import is_sharded
from redraft.files.target_folder import TargetFolder
from redraft.heads.nn.causal_lm import FINAL_NORMS, decoder_layers, final_norm
from redraft.heads.target import norm_scale

IN_LAYER = re.compile(r".*\.layers\.(\d+)\.(.+)")

TAKEN = re.compile(
    r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.(weight|bias)|(\w+\.)*\w*norm\w*\.(weight|bias)"
)
"""Tensors that a draft layer in Llama's layout may take from a target layer. Experts are not among
them.
"""


def is_whole(model: Any) -> bool:
    """Whether this process has the values of all of a target's layers."""
    return not is_sharded(model) and not any(
        weight.is_meta for weight in decoder_layers(model).parameters()
    )


def last_layers(model: Any, count: int) -> tuple[list[nn.Module], nn.Module]:
    """Return the last `count` decoder layers and the final norm.

    Raises: the errors of `final_norm`.
    """
    return list(decoder_layers(model)[-count:]), final_norm(model)


def read_last_layers(
    target: TargetFolder, dtype: torch.dtype, count: int
) -> tuple[list[nn.Module], nn.Module]:
    """Like `last_layers`, but read from the target's files, in `dtype`.

    Other tensors stay on `meta`.

    Raises:
        FileNotFoundError
        ValueError: the weights are quantised, or a tensor is missing.
    """
    if method := target.quantization:
        raise ValueError(
            f"{target.name} is quantised ({method}), but a head can start only from unquantised weights"
        )
    first = target.text_config.num_hidden_layers - count
    return last_layers(
        _load(target, dtype, lambda layer, name: layer >= first and bool(TAKEN.fullmatch(name))),
        count,
    )


def read_final_norm(target: TargetFolder, dtype: torch.dtype) -> nn.Module:
    """Return the target's final norm, read from its files, whether they are quantised or not.

    Raises:
        FileNotFoundError
        ValueError: the norm is missing.
    """
    return final_norm(_load(target, dtype, lambda layer, name: False))


def read_stream_norms(target: TargetFolder, dtype: torch.dtype, layer_ids: Collection[int]) -> Any:
    """Load the target with only the norms that `stream_scales` reads.

    Raises:
        FileNotFoundError
        ValueError: a norm is missing.
    """
    return _load(
        target,
        dtype,
        lambda layer, name: layer in layer_ids and name.startswith("input_layernorm."),
    )


def _load(target: TargetFolder, dtype: torch.dtype, is_wanted: Callable[[int, str], bool]) -> Any:
    """Load the target on the CPU, with the final norm and the wanted tensors of its layers.

    `is_wanted(layer, name)` selects these tensors.
    """

    def choose(name: str) -> bool:
        found = IN_LAYER.fullmatch(name)
        return is_wanted(int(found[1]), found[2]) if found else name.split(".")[-2] in FINAL_NORMS

    return load_part(target, dtype, torch.device("cpu"), choose)


def stream_scales(model: Any, layer_ids: Sequence[int], name: str) -> list[Tensor]:
    """Return the factors of the norm that is applied to each stream after k layers, [D].

    This is the next layer's norm, or the final norm.

    Raises:
        ValueError: a norm is of a different kind.
    """
    layers, final = decoder_layers(model), final_norm(model)
    norms = [
        getattr(layers[k], "input_layernorm", None) if k < len(layers) else final for k in layer_ids
    ]
    scales = [scale for norm in norms if (scale := norm_scale(norm)) is not None]
    if len(scales) < len(norms) or norm_scale(final) is None:
        raise ValueError(
            f"the norms of {name} differ from those of a head: choose a different --init"
        )
    return scales
