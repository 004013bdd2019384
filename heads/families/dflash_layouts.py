"""Configs of DFlash and DSpark heads, in the layouts of vLLM and of the package `speculators`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.files import speculators
from redraft.files.folder import trained_with
from redraft.files.windows import (
    SECTION,
    read_block_windows,
    require_trained_window,
    trained_views,
)
from redraft.heads.options import DFlash, read_record
from redraft.heads.shape import read_layer_config


def translate(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return config.json with vLLM's keys, translated if it is in the `speculators` layout.

    Raises:
        ValueError: it has no mask token or no target layers.
    """
    if speculators.MARK not in config:
        return config
    require_keys(config, folder, "aux_hidden_state_layer_ids", "mask_token_id")
    # The package uses Qwen3's defaults for absent keys.
    inner = read_layer_config(
        {"model_type": "qwen3", **(config.get("transformer_layer_config") or {})}, folder
    ).to_dict()
    # If there are rotary parameters for several kinds of layers, the package uses these for all of
    # them.
    rope = inner["rope_parameters"].get("sliding_attention", inner["rope_parameters"])
    section = {
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": [layer - 1 for layer in config["aux_hidden_state_layer_ids"]],
    }
    # This is the direction used in training, which vLLM does not always read (`served_views`).
    directions = {view.is_causal for view in trained_views(config, folder)}
    is_causal = directions.pop() if len(directions) == 1 else None
    read = {"model_type": inner["model_type"], "is_causal": is_causal, SECTION: section}
    return {**inner, "rope_parameters": rope, **config, **read}


def require_keys(section: Mapping[str, Any], folder: Path, *keys: str) -> None:
    """Raise ValueError unless a config.json, or a section of it, has these keys."""
    for key in keys:
        if section.get(key) in (None, []):
            raise ValueError(f"{folder}: config.json has no {key}: add the value used in training")


def read_options(
    config: Mapping[str, Any], section: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Read the fields of a `Config` from config.json; layers and mask token are in `section`.

    Raises:
        ValueError: a key is absent, the windows cannot be read, or the rotation is not supported.
    """
    if config.get("is_neox_style") is False:
        raise ValueError(f"{folder}: only rotary halves (is_neox_style) are supported here")
    # z-lab's newer files have the block size in the family's section.
    block_size = config.get("block_size") or section.get("block_size")
    section = {**section, "block_size": block_size}
    needed = ("target_layer_ids", "mask_token_id", "block_size", "num_hidden_layers")
    require_keys(section, folder, *needed)
    windows = read_block_windows(config, folder)
    require_trained_window(windows["window"], trained_with(config).get("window"), folder)
    return {
        "aux_layer_ids": tuple(layer + 1 for layer in section["target_layer_ids"]),
        "num_layers": config["num_hidden_layers"],
        "block_size": block_size,
        "mask_token_id": section["mask_token_id"],
        **windows,
        **read_record(DFlash, config),
    }
