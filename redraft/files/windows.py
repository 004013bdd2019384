"""The positions that each layer of a head attends to, and the keys for them in config.json.

    window W     a query at position p attends to the W keys above p - W, including its own
    is_causal    it attends to no later key; otherwise, also to later keys below p + W

This is the rule of vLLM's FlashAttention, Triton and CPU kernels, and of z-lab's code. Speculators
trains with up to a block more at the far edge. The second line applies to the slots of a block. All
other layers are always causal.

This module uses only the standard library, because servers and control planes read windows without
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redraft.files.setting_error import SettingError

SLIDING, EVERYTHING = "sliding_attention", "full_attention"
SECTION = "dflash_config"  # DFlash's section in config.json
OF_SPECULATORS = "speculators_model_type"


@dataclass(frozen=True)
class View:
    """The positions that one layer attends to."""

    window: int | None = None
    """Size of the window in positions. None means all positions of a document."""
    is_causal: bool = False

    def __str__(self) -> str:
        reach = f"a window of {self.window}" if self.window else "no window"
        return f"{reach}, {'causal' if self.is_causal else 'both directions'}"


FULL = View()


def make_views(
    num_layers: int,
    window: int | None,
    full_layers: Sequence[int] = (),
    is_causal: bool | None = None,
) -> tuple[View, ...]:
    """Create one view per layer.

    If `is_causal` is None, exactly the layers with a window are causal.

    Raises:
        ValueError: a layer in `full_layers` does not exist, or there is no window to exempt it
            from.
    """
    if missing := [layer for layer in full_layers if not 0 <= layer < num_layers]:
        raise SettingError(
            f"{{full_layers}} {missing} do not exist: the draft's own layers are 0 to {num_layers - 1}"
        )
    if full_layers and window is None:
        raise SettingError(
            f"{{full_layers}} {list(full_layers)} needs a window for the other layers: set {{window}}"
        )
    windows = [None if layer in full_layers else window for layer in range(num_layers)]
    return tuple(View(w, bool(w) if is_causal is None else is_causal) for w in windows)


def target_window(config: Any) -> int | None:
    """Return the window in a target's `transformers` config, if all of the target's layers have it.

    vLLM applies it to every draft layer that has no window of its own
    (`EngineArgs.create_engine_config`).
    """
    types = getattr(config, "layer_types", None) or ()
    return (getattr(config, "sliding_window", None) or None) if {*types} <= {SLIDING} else None


def beside_target(views: Sequence[View], config: Any) -> tuple[View, ...]:
    """Return the views of these layers in vLLM, for a target with this `transformers` config."""
    window = target_window(config)
    return tuple(View(view.window or window, view.is_causal) for view in views)


def is_mixed(views: Sequence[View]) -> bool:
    """Whether some layers have a window and others do not."""
    return len({view.window for view in views}) > 1


def write_views(views: Sequence[View]) -> dict[str, Any]:
    """Return the keys for transformers: `layer_types` and, if there is a window, its size."""
    types = {"layer_types": [SLIDING if view.window else EVERYTHING for view in views]}
    windows = {view.window for view in views if view.window}
    # Without `use_sliding_window`, transformers drops the size from a Qwen3 config.
    return (
        {**types, "sliding_window": windows.pop(), "use_sliding_window": True} if windows else types
    )


def count_states(config: Mapping[str, Any]) -> int | None:
    """Return the number of target states before a token that a head with this config.json uses.

    Return None if a layer uses all of them. All layers of a DFlash or DSpark head attend to the
    target's states. In EAGLE-3 and P-EAGLE, a layer attends to the previous layer's states, so the
    reaches of the layers add up.
    """
    windows = [view.window for view in served_views(config)]
    if None in windows:
        return None
    reaches = [window - 1 for window in windows if window]
    is_block = config.get(OF_SPECULATORS) in ("dflash", "dspark") or _has_block_keys(config)
    return max(reaches) if is_block else sum(reaches)


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return each layer's type. If a Qwen3 config has none, transformers derives them."""
    if types := config.get("layer_types"):
        return list(types)
    first = num_layers
    if config.get("model_type") == "qwen3" and config.get("use_sliding_window"):
        # The numbers are the defaults of transformers.
        first = config.get("max_window_layers", 28) if config.get("sliding_window", 4096) else first
    return [SLIDING if layer >= first else EVERYTHING for layer in range(num_layers)]


def read_windows(config: Mapping[str, Any], num_layers: int, folder: Any) -> dict[str, Any]:
    """Read the options `window` and `full_layers` from a config with transformers' keys.

    Raises:
        ValueError: the config has an unsupported kind of layer, a different number of layers, or a
            window that engines would not apply.
    """
    types = _layer_types(config, num_layers)
    if len(types) != num_layers:
        raise ValueError(
            f"{folder}: layer_types has {len(types)} entries, but the draft has {num_layers} layers: "
            "write one entry per layer"
        )
    if unknown := sorted({*types} - {SLIDING, EVERYTHING}):
        raise ValueError(f"{folder}: the layer type {unknown[0]} is not supported here")
    if SLIDING not in types:
        return {"window": None, "full_layers": ()}
    if config.get("model_type") == "qwen3" and not config.get("use_sliding_window"):
        raise ValueError(
            f"{folder}: layer_types has windows, but a Qwen3 config drops their size without "
            '"use_sliding_window": true: add it next to sliding_window'
        )
    if not config.get("sliding_window"):
        raise ValueError(
            f"{folder}: layer_types has windows, but config.json has no sliding_window: add the size "
            "used in training"
        )
    full = tuple(layer for layer, kind in enumerate(types) if kind == EVERYTHING)
    return {"window": int(config["sliding_window"]), "full_layers": full}


def read_block_windows(config: Mapping[str, Any], folder: Any) -> dict[str, Any]:
    """Read the options `window`, `full_layers` and `is_causal` from a DFlash or DSpark config.

    They are read as in vLLM (`_resolve_layer_attention` in `qwen3_dflash.py`).

    Raises:
        ValueError: for the same reasons as in `read_windows`.
    """
    section, num_layers = config.get(SECTION) or {}, config["num_hidden_layers"]
    types = _layer_types(config, num_layers)
    is_causal = config.get("is_causal")
    is_causal = section.get("causal") if is_causal is None else is_causal
    read = {**config, "layer_types": types}
    if section.get("use_swa") and SLIDING not in types:
        # This is ModelOpt's and MiMo's key for a window in every layer. Because no layer type
        # states the window, it does not make layers causal.
        read["layer_types"], is_causal = [SLIDING] * len(types), bool(is_causal)
    # Transformers does not read this section, so it does not drop the size.
    if "swa_window_size" in section:
        read |= {"sliding_window": section["swa_window_size"], "use_sliding_window": True}
    windows = read_windows(read, num_layers, folder)
    # None if the windows imply it, so that each meaning has only one spelling.
    is_implied = is_causal is None or make_views(num_layers, **windows) == make_views(
        num_layers, **windows, is_causal=bool(is_causal)
    )
    return {**windows, "is_causal": None if is_implied else bool(is_causal)}


def served_views(config: Mapping[str, Any], folder: Any = "the draft") -> tuple[View, ...]:
    """Return the view of each layer in vLLM, for the draft with this config.json.

    Raises:
        ValueError: for the same reasons as in `read_windows`.
    """
    kind = config.get(OF_SPECULATORS)
    layers = {**(config.get("transformer_layer_config") or config)}
    num_layers = layers.get("num_hidden_layers") or 1
    if kind in ("dflash", "dspark"):
        layers = {"model_type": "qwen3", **layers, SECTION: {}}
        # As in vLLM's `update_dflash`. Its `update_dspark` does not read the key.
        if kind == "dflash":
            is_causal = not config.get("sliding_window_non_causal", True)
            layers[SECTION] = {"causal": is_causal}
    if _has_block_keys(layers):
        return make_views(num_layers, **read_block_windows(layers, folder))
    windows = read_windows(layers, num_layers, folder)
    return make_views(num_layers, **windows, is_causal=True)


def _has_block_keys(config: Mapping[str, Any]) -> bool:
    return SECTION in config or "target_layer_ids" in config


def trained_views(config: Mapping[str, Any], folder: Any = "the draft") -> tuple[View, ...]:
    """Return the view of each layer in training.

    The views are as served, except in speculators' layout, where vLLM interprets the direction
    differently: the package trains full layers in both directions, and layers with a window as
    `sliding_window_non_causal` specifies.

    Raises:
        ValueError: for the same reasons as in `read_windows`.
    """
    if config.get(OF_SPECULATORS) not in ("dflash", "dspark"):
        return served_views(config, folder)
    layers = {"model_type": "qwen3", **(config.get("transformer_layer_config") or {})}
    windows = read_windows(layers, layers.get("num_hidden_layers") or 1, folder)
    is_causal = False if config.get("sliding_window_non_causal") else None
    return make_views(layers.get("num_hidden_layers") or 1, **windows, is_causal=is_causal)


def require_trained_window(window: int | None, trained: int | None, folder: Any) -> None:
    """Raise ValueError if a head attends further back than in training.

    If `trained` is None, the window used in training is unknown, and nothing is checked.
    """
    if trained is not None and (window is None or window > trained):
        found = "no window" if window is None else f"a window of {window}"
        raise ValueError(
            f"{folder}: config.json has {found}, but the head was trained with a window of {trained}: "
            f'write "sliding_window": {trained} and the layer_types used in training'
        )


def write_speculators(views: Sequence[View]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys for a DFlash or DSpark head in speculators' layout.

    The first result has the keys for the section on its layers, and the second the keys for the top
    level.
    """
    directions = {view.is_causal for view in views}
    layer = {**write_views(views), "num_hidden_layers": len(views)}
    if SLIDING in layer["layer_types"] and len(directions) == 1:
        # vLLM reads this key, but the package does not. vLLM treats DSpark's windows as causal,
        # whatever the value of `sliding_window_non_causal`.
        layer["is_causal"] = directions == {True}
    # vLLM makes every layer of a DFlash head causal unless this is true.
    return layer, {"sliding_window_non_causal": True not in directions}


def require_speculators(family: str, views: Sequence[View]) -> None:
    """Raise ValueError unless vLLM and the package derive these views from speculators' layout."""
    layer, top = write_speculators(views)
    config = {OF_SPECULATORS: family, "transformer_layer_config": layer, **top}
    if not served_views(config) == trained_views(config) == tuple(views):
        said = "; ".join(dict.fromkeys(map(str, views)))
        raise ValueError(
            f"the layout speculators cannot express to vLLM that the layers of this head have {said}: use "
            "--layout vllm"
        )
