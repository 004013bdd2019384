"""Recognise drafts from other trainers that resemble supported ones but differ in architecture.

Each kind has a name.

The kinds are based on the loaders and configs of vLLM 0.32, speculators 0.9, SpecForge, ModelOpt
and z-lab's DFlash. This module uses only the standard library.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MASK_EMBEDDING = "mask_embedding.pt"
"""File beside a DFlash draft's weights that replaces the embedding of the mask token in vLLM."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A kind of draft for which redraft has no module."""

    name: str
    method: str | None
    """vLLM's method for this draft. None if vLLM has none."""
    decoders: tuple[Literal["v1", "v2"], ...] = ()
    """vLLM's model runners for this draft: "v1", "v2". Empty if all runners that serve the method
    also serve this draft.
    """
    first_vllm: str = "0.32"
    """First vLLM release that serves this draft, or the first one that redraft supports."""
    architecture: str = ""
    """Pattern that must match a name in `architectures`, or `speculators_model_type`."""
    tensors: tuple[str, ...] = ()
    """Patterns, each of which must match the name of some tensor."""
    matches: Callable[[Mapping[str, Any], Collection[str]], bool] = lambda config, names: False
    """Additional condition on config.json and the names of the tensors and of MASK_EMBEDDING."""


def _is_dspark_of_other_layers(config: Mapping[str, Any]) -> bool:
    """Whether this is a DSpark draft with layers of DeepSeek-V4, Kimi K3 or Gemma 4.

    One of the names for Qwen3 layers is also used for DeepSeek layers.
    """
    names = [name for name in config.get("architectures") or () if "dspark" in name.lower()]
    ours = {"Qwen3DSparkModel"}
    # In speculators' layout, the layers' type is in a section, and it is always Qwen3.
    if config.get("model_type") == "qwen3" or config.get("speculators_model_type") == "dspark":
        ours |= {"DSparkDraftModel", "DSparkSpeculator"}
    return bool(names) and not ours.intersection(names)


def _is_named(pattern: str, config: Mapping[str, Any]) -> bool:
    marks = [*(config.get("architectures") or ()), config.get("speculators_model_type") or ""]
    return any(re.search(pattern, mark) for mark in marks)


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section: Mapping[str, Any] = config.get("dflash_config") or {}
    return section


def _has_other_width(config: Mapping[str, Any]) -> bool:
    # In speculators' layout, null means the head's hidden size.
    width = (config.get("transformer_layer_config") or config).get("hidden_size")
    return config.get("target_hidden_size") not in (None, width)


def _has_all(patterns: Collection[str], names: Collection[str]) -> bool:
    return bool(patterns) and all(
        any(re.search(pattern, name) for name in names) for pattern in patterns
    )


# The first match is used, so more specific kinds come first.
FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        name="a DSpark draft of layers other than Qwen3's",
        method="dspark",
        matches=lambda config, names: _is_dspark_of_other_layers(config),
    ),
    Foreign(
        name="a DSpark draft with a Markov head of a type other than vanilla",
        method=None,
        matches=lambda config, names: config.get("markov_head_type") not in (None, "vanilla"),
    ),
    Foreign(
        name="a DSpark draft in ModelOpt's layout",
        method=None,
        matches=lambda config, names: _section(config).get("projector_type") == "dspark",
    ),
    Foreign(
        name="a Domino draft (DFlash with a recurrent layer)",
        method=None,
        architecture="(?i)domino",
        matches=lambda config, names: _section(config).get("projector_type") == "domino",
    ),
    Foreign(
        name="a DFlash2 draft (a block of masks, with convolutions and a candidate selector)",
        method="dflash",
        decoders=("v2",),
        architecture="(?i)dflash2",
    ),
    Foreign(
        name="an XPress draft (DFlash with a refiner, for vLLM 0.33 and later)",
        method="dflash",
        decoders=("v2",),
        first_vllm="0.33",
        architecture="(?i)xpress",
    ),
    Foreign(
        name="a LiLiCorr draft (DFlash with a corrector)",
        method="dflash",
        decoders=("v2",),
        architecture="(?i)lilicorr",
    ),
    Foreign(
        name="an EAGLE-4 draft (a tree draft, for its own vLLM plugin)",
        method=None,
        architecture="(?i)eagle-?4",
    ),
    Foreign(
        name="a DFlash draft with attention sinks",
        method="dflash",
        tensors=(r"attention_sink_bias",),
    ),
    Foreign(
        name="a DFlash draft with scaled attention values (attention_value_scale)",
        method="dflash",
        matches=lambda config, names: (
            _section(config).get("attention_value_scale") not in (None, 1)
        ),
    ),
    Foreign(
        name=f"a DFlash draft with its own embedding of the mask token ({MASK_EMBEDDING})",
        method="dflash",
        # vLLM's DSpark does not read the file.
        matches=lambda config, names: (
            MASK_EMBEDDING in names and not _has_all(["markov_head"], names)
        ),
    ),
    Foreign(
        name="a DFlash draft with a norm for each target layer (Laguna)",
        method="dflash",
        tensors=(r"aux_hidden_norms\.",),
    ),
    Foreign(
        name="a DFlash draft of Muse Glimmer",
        method="dflash",
        architecture="MuseGlimmerAssistant",
        tensors=(r"^encoder\.fc\.",),
    ),
    Foreign(
        name="a Gemma 4 assistant (a draft that reads the target's KV cache)",
        method="mtp",
        matches=lambda config, names: (
            config.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant")
        ),
    ),
    Foreign(
        name="an EAGLE-3 head with latent attention (MLA)",
        method="eagle3",
        tensors=("hidden_norm", r"\.kv_a_proj_with_mqa"),
    ),
    Foreign(
        name="an EAGLE-3 head with a mixture of experts",
        method="eagle3",
        tensors=("hidden_norm", r"\.experts\."),
    ),
    Foreign(
        name="an EAGLE-3 head that uses only the target's last hidden state (use_aux_hidden_state is "
        "false)",
        method="eagle3",
        matches=lambda config, names: (
            (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False
        ),
    ),
    Foreign(
        name="a DFlash draft narrower or wider than its target (target_hidden_size)",
        method="dflash",
        matches=lambda config, names: _has_other_width(config) and _is_named("(?i)dflash", config),
    ),
    Foreign(
        name="an EAGLE-3 head narrower or wider than its target (target_hidden_size)",
        method="eagle3",
        matches=lambda config, names: _has_other_width(config),
    ),
    Foreign(
        name="an MLPSpeculator",
        method=None,
        architecture="MLPSpeculator",
        tensors=(r"^speculator\.emb\.0\.weight",),
    ),
    Foreign(
        name="a Hydra head (Medusa heads that read each other)",
        method=None,
        architecture="(?i)hydra",
        tensors=(r"hydra_(mlp|head)",),
    ),
)


AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
SECTION = "eagle_config"

NUM_DEFAULT_LAYERS = 3
"""Number of layers in `default_layers`."""


def default_layers(num_layers: int) -> list[int]:
    """Return the layers that engines give an EAGLE-3 head whose config.json lists none.

    `num_layers` is the number of the target's layers.
    """
    return [2, num_layers // 2, num_layers - 3]


def nested_layers(config: Mapping[str, Any]) -> list[int]:
    """Return the layers in an EAGLE-3 head's section, each as the number of layers below it.

    The list is empty without a section. SpecForge and ModelOpt record the index of the layer that
    ends there, which is one less, and by default the first is 1. Lists that start at a later layer
    were written for engines that use the numbers unchanged, such as vLLM's V1 runner.
    """
    layers = (config.get(SECTION) or {}).get(AUX_LAYERS) or []
    offset = 1 if layers and layers[0] <= 1 else 0
    return [layer + offset for layer in layers]


def names_for_match(folder: Path, tensors: Collection[str]) -> list[str]:
    """Return the names to compare with the table: the tensors', and MASK_EMBEDDING if it exists."""
    return [*tensors, *(path.name for path in folder.glob(MASK_EMBEDDING))]


def match_foreign(config: Mapping[str, Any], names: Collection[str] = ()) -> Foreign | None:
    """Return the kind of a draft for which redraft has no module.

    None if redraft may support it.
    """
    for kind in FOREIGN:
        is_named = kind.architecture and _is_named(kind.architecture, config)
        if is_named or _has_all(kind.tensors, names) or kind.matches(config, names):
            return kind
    return None


def find_foreign(config: Mapping[str, Any], names: Collection[str] = ()) -> str | None:
    """Describe a draft for which redraft has no module, with its method in vLLM.

    Return None if redraft may support the draft.
    """
    if (kind := match_foreign(config, names)) is not None:
        config_text = f'"method": "{kind.method}"'
        serves = (
            f"vLLM serves it with {config_text}"
            if kind.method
            else "vLLM has no method to serve it"
        )
        return f"{kind.name}: {serves}; redraft cannot train, forecast or check it"
    return None
