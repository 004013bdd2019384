"""Checks of a head made of one Llama layer: its config against its tensors, its training, and the target's layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.nn.layers import read_layer_config

AS_TRAINED = ("rms_norm_eps", "hidden_act", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Keys of config.json that change the arithmetic and leave no trace in the shapes of the tensors."""


def tensors_fit_config(pair: Pair) -> Iterator[Finding]:
    """Layers, heads and biases in config.json match the checkpoint. Engines fill a gap with random memory."""
    config = pair.layer_config
    names = {re.sub(r"(midlayer|layers\.\d+)\.", "", name): shape for name, shape in pair.shapes.items()}
    layers = len({match[1] for name in pair.shapes if (match := re.match(r"(midlayer|layers\.\d+)\.", name))})
    asked = config.get("num_hidden_layers", layers)
    if asked != layers:
        yield Finding(
            f"config.json says {asked} layers, the checkpoint holds {layers}; the engine leaves the others unset",
            f'write "num_hidden_layers": {layers} into {_file(pair)}',
        )
    has_bias = "self_attn.q_proj.bias" in names
    if bool(config.get("attention_bias", False)) != has_bias:
        yield Finding(
            f"attention_bias is {str(not has_bias).lower()}, the checkpoint holds {'' if has_bias else 'no '}biases of "
            "attention",
            f'write "attention_bias": {str(has_bias).lower()} into {_file(pair)}',
        )
    sizes = _sizes(pair)
    for name, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        rows = names.get(f"self_attn.{name}.weight", (0,))[0]
        if rows and rows != sizes[heads] * sizes["head_dim"]:
            yield Finding(
                f"{heads} {sizes[heads]} of head_dim {sizes['head_dim']} do not make the {rows} rows of {name}",
                f"write the {heads} and head_dim of the training into {_file(pair)}",
            )


def activation(pair: Pair) -> Iterator[Finding]:
    """The layer's MLP gates with SiLU, the one function that engines compute for a Llama layer."""
    if (act := pair.layer_config.get("hidden_act", "silu")) not in ("silu", "swish"):
        yield Finding(
            f'hidden_act is "{act}", engines compute a Llama layer with "silu" only',
            f'write "hidden_act": "silu" into {_file(pair)}, if the head was trained so; or train it with silu',
        )


def arithmetic(pair: Pair) -> Iterator[Finding]:
    """Norm and heads are those of training, or, for another trainer's head, compared with the
    target's layers: a doubt."""
    trained, sizes = pair.trained_with or {}, _sizes(pair)
    for key in AS_TRAINED:
        mine = sizes[key]
        if key in trained:
            if mine != trained[key]:
                yield Finding(
                    f"{key} is {mine}, the head was trained with {trained[key]}",
                    f'write "{key}": {_json(trained[key])} into {_file(pair)}',
                )
        elif key != "hidden_act" and mine != (its := _read_target(pair, key)):
            yield Finding(
                f"{key} is {mine}, that of the target's layers is {its}, and nothing records the head's training",
                f'if the head was trained with the target\'s, write "{key}": {_json(its)} into {_file(pair)}',
                is_doubt=True,
            )


def _sizes(pair: Pair) -> Mapping[str, Any]:
    known = (*AS_TRAINED, "hidden_size", "model_type")
    config = read_layer_config({key: value for key, value in pair.layer_config.items() if key in known})
    return {key: getattr(config, key) for key in AS_TRAINED}


def _read_target(pair: Pair, key: str) -> Any:
    # the defaults of transformers for absent keys
    config = pair.target_config
    if key == "head_dim":
        return getattr(config, key, None) or config.hidden_size // config.num_attention_heads
    if key == "num_key_value_heads":
        return getattr(config, key, None) or config.num_attention_heads
    return getattr(config, key, None)


def _json(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _file(pair: Pair) -> str:
    return "transformer_layer_config of config.json" if pair.is_speculators else "config.json"


CHECKS = (tensors_fit_config, activation, arithmetic)
