"""The part of a target that a head shares. V = vocabulary, D = hidden."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redraft.files.checkpoint import load_text_config
from redraft.files.foreign import default_layers
from redraft.files.target_folder import TargetFolder
from redraft.files.tensors import list_tensors, read_tensors

EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Short names of a target's shared tensors."""

OUTER = re.compile(r"^((model|language_model|backbone)\.)+")


def short_name(name: str) -> str:
    """The name of a tensor within its language model.

    It is the same in files for text only and in files for text and images.
    """
    short = OUTER.sub("", name)
    return EMBEDDINGS if short == "embeddings.weight" else short  # Nemotron-H


@dataclass(frozen=True, kw_only=True)
class Target:
    """The embeddings and the output head of a target.

    A draft head uses them, but neither trains nor saves them. It keeps references to these tensors
    without registering them, so they follow the target's updates.
    """

    config: Any
    """The `transformers` config of the text model."""
    embed_VD: Tensor
    head_VD: Tensor
    has_moved: bool = False
    """Whether the target's weights may have changed since a draft copied these tensors. If so, the
    copies are dropped, not compared.
    """

    def drop_copy(self, tensors: dict[str, Tensor], name: str, rows: Tensor, folder: Path) -> None:
        """Remove a draft's copy of these target rows from its `tensors`, if there is one.

        Raises:
            ValueError: it differs. It is compared in the dtype of the copy, because a bfloat16 export
                rounds the rows of a float32 target, or in that of a float16 target, because many
                quantised targets have the rows of a bfloat16 model, rounded.
        """
        held = tensors.pop(name, rows)
        is_copy = torch.equal(held, rows.to(held))
        if rows.dtype == torch.float16:
            is_copy = is_copy or torch.equal(held.to(rows), rows)
        if not (self.has_moved or is_copy):
            raise ValueError(
                f"{folder}: {name} differs from the target's: it is a leftover, was trained, or "
                f"belongs to a different target"
            )

    @staticmethod
    def from_model(model: Any) -> Target:
        """Take the tensors from a causal LM of `transformers`."""
        return Target(
            config=model.config.get_text_config(),
            embed_VD=model.get_input_embeddings().weight.detach(),
            head_VD=model.get_output_embeddings().weight.detach(),
        )

    @staticmethod
    def from_folder(folder: Path) -> Target:
        """Take the tensors from a model folder, reading only these two.

        Raises:
            ValueError: the folder has no embeddings, or one of the two tensors is quantised.
        """
        # Compare short names, because DeepSeek-V3 (61 layers) has copies in an MTP layer,
        # `model.layers.61.embed_tokens.weight`.
        names = {short_name(name): name for name in list_tensors(folder)}
        tensors = read_tensors(
            folder, [names[short] for short in (EMBEDDINGS, HEAD) if short in names]
        )
        if EMBEDDINGS not in names:
            raise ValueError(
                f"{folder} has no tensor {EMBEDDINGS}: give the folder of the target model"
            )
        # Without scales, the numbers of a packed tensor mean nothing. Most packed output heads have
        # other names, e.g. lm_head.qweight, and must not be taken for tied weights.
        packed = [name for name, tensor in tensors.items() if tensor.element_size() == 1]
        if HEAD not in names:
            packed += [
                name
                for short, name in names.items()
                if short.startswith("lm_head.") and not short.endswith(".bias")
            ]
        if packed:
            raise ValueError(
                f"{folder} has a quantised {packed[0]}, but a head needs unquantised embeddings and "
                "an unquantised output head: use a copy of the target in which they are not quantised"
            )
        embed = tensors[names[EMBEDDINGS]]
        # A checkpoint with tied weights stores only the embeddings.
        head = tensors.get(names.get(HEAD, ""), embed)
        return Target(config=load_text_config(folder), embed_VD=embed, head_VD=head)


@dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    """A target, loaded once and passed on: its files, its model, and the tensors shared with heads."""

    files: TargetFolder
    model: Any
    """The frozen causal LM of `transformers`. It has no layers if servers compute them."""
    rewritten: TargetFolder | None = None
    """The converted copy from which the model was loaded, if any."""
    has_moved: bool = False
    """The same as in `Target`."""

    @property
    def source(self) -> TargetFolder:
        """The files from which the model was loaded."""
        return self.rewritten or self.files

    @cached_property
    def borrowed(self) -> Target:
        """The embeddings and the output head of the model."""
        return replace(Target.from_model(self.model), has_moved=self.has_moved)


@torch.no_grad()
def norm_scale(norm: Any) -> Tensor | None:
    """The factors of an RMS norm, [D].

    Gemma stores each factor minus 1. The result is None if the module is not an RMS norm or has no
    values.
    """
    weight = getattr(norm, "weight", None)
    if (
        weight is None
        or weight.is_meta
        or weight.ndim != 1
        or getattr(norm, "bias", None) is not None
    ):
        return None
    # The root mean square of ones is 1, so the output is the factors.
    try:
        factors = norm(torch.ones_like(weight)).float()
    except (
        TypeError,
        AttributeError,
    ):  # a gated norm takes a second tensor, which may be None at first
        return None
    # Gemma adds 1 in float32.
    stored = (weight.detach(), 1 + weight.detach().float())
    return next(
        (scale for scale in stored if torch.allclose(factors, scale.float(), rtol=0.02, atol=1e-3)),
        None,
    )


def layer_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The tensors of a target's layer or norm, as a start for a draft in Llama's layout.

    For norms, the tensors are the factors. In that layout, `post_attention_layernorm` comes before
    the MLP. In OLMo 2 and in Gemma 2 and 3, the tensor with this name norms the attention output.
    Gemma's norm before the MLP has a different name, and OLMo 2 has none. Tensors on `meta`, which
    were not read from the target's files, are omitted.
    """
    scales = {
        f"{name}.weight".lstrip("."): norm_scale(module) for name, module in layer.named_modules()
    }
    stored = {name: tensor for name, tensor in layer.state_dict().items() if not tensor.is_meta}
    weights = {**stored, **{name: scale for name, scale in scales.items() if scale is not None}}
    if "post_feedforward_layernorm.weight" in weights:
        weights.pop("post_attention_layernorm.weight", None)
        if (before_mlp := weights.get("pre_feedforward_layernorm.weight")) is not None:
            weights["post_attention_layernorm.weight"] = before_mlp
    return weights


def aux_layers(chosen: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return a target's aux layers: the chosen ones, or 2, n // 2 and n - 3 for n layers.

    Raises:
        ValueError: a layer does not exist, or the layers are not ascending.
    """
    # For 4 layers, the default would be (2, 2, 1), which is refused below.
    layers = tuple(chosen or default_layers(num_layers))
    flag = "--head.aux-layer-ids"
    if list(layers) != sorted(set(layers)):
        if chosen:
            raise ValueError(f"{flag} {layers}: give distinct layers in ascending order")
        some = sorted({0, (num_layers + 1) // 2, num_layers})
        raise ValueError(
            f"a target of {num_layers} layers is too small for the default aux layers "
            f"{layers}: choose the layers, e.g. {flag} {' '.join(map(str, some))}"
        )
    # num_layers is allowed: it is the stream after the last layer, before the final norm.
    if layers[0] < 0 or layers[-1] > num_layers:
        raise ValueError(f"{flag} {layers}: the target has layers 0 to {num_layers}")
    return layers
