"""SGLang 0.5.23: rules from reading the wheel's code, not from running it.

EAGLE-3 (`models/llama_eagle3.py`, `spec_aux_hidden_state.py`)
    layers only from the section `eagle_config`, one less than ours for most targets; the loop of
    most targets ends before the stream after the last layer; `lm_head` is the target's only if
    `draft_vocab_size` is null; layers after the first one have a `hidden_norm`
EAGLE-1 (`models/llama_eagle.py`)
    a class of its own, and a bias of `fc`
DFlash, DSpark (`models/dflash.py`, `models/dspark.py`, `speculative/dflash_utils.py`)
    the target's head and its whole vocabulary; the direction of attention only at the top level

Unknown tensors and keys are silently dropped.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from redraft.files.foreign import AUX_LAYERS, SECTION, default_layers
from redraft.files.windows import SECTION as BLOCK
from redraft.files.windows import SLIDING, View
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.engines import folders
from redraft.heads.engines.folders import OTHERWISE, Tensors, export_cure, section
from redraft.heads.engines.table import Export

TITLE = "SGLang"
ARCHITECTURE = "LlamaForCausalLMEagle"  # EAGLE-1's

ALGORITHMS = {
    "standalone": "STANDALONE",
    "eagle1": "EAGLE",
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
    "mtp": "NEXTN",
}


FROM_SECOND = re.compile(
    r"Deepseek(V2|V3|V32)ForCausalLM|GlmMoeDsa|Glm4MoeLite|MistralLarge3|KimiK25"
)
"""Architectures of targets for which SGLang uses a list that does not start at 1 unchanged
(`models/deepseek_v2.py`, `models/glm4_moe_lite.py`).
"""
WITH_LAST = re.compile("GptOss")
"""Architectures of targets whose stream after the last layer is captured (`models/gpt_oss.py`)."""


def find_refused(pair: Pair) -> Iterator[Finding]:
    """Report the parts of a draft that SGLang does not compute."""
    last = pair.target_config.num_hidden_layers
    reads_last = pair.family.layers_key and last in folders.layers_read(pair)
    if reads_last and not _is_target(WITH_LAST, pair):
        yield Finding(
            f"the head reads the stream after the last layer, {last}, which {TITLE} never captures",
            "serve it with vLLM, or train it on lower layers",
        )
    if pair.family.name == "eagle3":
        yield from _refuse_eagle3(pair)
    elif pair.family.name == "mtp" and "mimo" in str(pair.target.config.architectures).lower():
        yield Finding(
            f"{TITLE} feeds MiMo's layer the state after the target's last norm, but it "
            "was trained on the state before that norm",
            "serve it with vLLM",
        )


def _refuse_eagle3(pair: Pair) -> Iterator[Finding]:
    yield from folders.refuse_eagle3(pair, TITLE)
    layers = folders.layers_read(pair)
    if _listed(pair, layers) is None:
        yield Finding(
            f"the head reads the layers {layers}, and no list in {SECTION} makes {TITLE} feed them from "
            "this target",
            "serve it with vLLM, or train it on layers from 2 on",
        )
    layer = pair.layer_config
    if layer.get("attention_bias"):
        yield Finding(f"{TITLE}'s layer has no biases for queries, keys and values", OTHERWISE)
    if SLIDING in (layer.get("layer_types") or ()):
        yield Finding(
            f"{TITLE} takes an EAGLE-3 head's window from a flag "
            "(--speculative-draft-window-size), which has not been compared with training",
            OTHERWISE,
        )


def _is_target(names: re.Pattern[str], pair: Pair) -> bool:
    return any(names.match(name) for name in pair.target.config.architectures or ())


def _captured(pair: Pair, listed: list[int]) -> list[int]:
    """Return the streams that SGLang feeds for a list in `eagle_config`, by the layers below them."""
    is_as_it_is = (_is_target(FROM_SECOND, pair) and listed[0] != 1) or (
        _is_target(WITH_LAST, pair) and max(listed) == pair.target_config.num_hidden_layers
    )
    return listed if is_as_it_is else [layer + 1 for layer in listed]


def _listed(pair: Pair, layers: list[int]) -> list[int] | None:
    """Return the list for which SGLang feeds these layers. None if there is none."""
    lists = ([layer - 1 for layer in layers], layers)
    return next((each for each in lists if _captured(pair, each) == layers), None)


def find_misread(pair: Pair) -> Iterator[Finding]:
    """Report the parts of this folder that SGLang interprets differently from training."""
    yield from folders.dropped_scale(pair, TITLE)
    if pair.is_speculators:
        yield from folders.other_layout(pair, TITLE)
    elif pair.family.name == "eagle3":
        yield from _misread_eagle3(pair)
    elif pair.family.name == "eagle1":
        yield from _misread_eagle1(pair)
    elif pair.family.name in ("dflash", "dspark"):
        yield from folders.dropped_vocabulary(pair, TITLE)
        yield from folders.other_views(pair, TITLE, _views(pair))


def _misread_eagle3(pair: Pair) -> Iterator[Finding]:
    told = section(pair.config, SECTION).get(AUX_LAYERS)
    default = default_layers(pair.target_config.num_hidden_layers)
    served = _captured(pair, told) if told else default
    trained = folders.layers_read(pair)
    if served != trained:
        source = f"the section {SECTION}" if told else f"its default without {SECTION}"
        yield Finding(
            f"{TITLE} feeds the layers {served} ({source}), but the head was trained on {trained}",
            export_cure(TITLE),
        )
    if pair.config.get("draft_vocab_size") is not None and "lm_head.weight" not in pair.shapes:
        yield Finding(
            f"the folder has no lm_head, and {TITLE} shares the target's only if "
            "draft_vocab_size is null: otherwise, it keeps random numbers",
            export_cure(TITLE),
        )
    yield from folders.misnamed_norms(pair, TITLE)


def _misread_eagle1(pair: Pair) -> Iterator[Finding]:
    if ARCHITECTURE not in (pair.config.get("architectures") or ()):
        yield Finding(
            f"{TITLE} recognises an EAGLE-1 head only by the architecture {ARCHITECTURE}",
            export_cure(TITLE),
        )
    if "fc.bias" not in pair.shapes:
        yield Finding(
            f"the folder has no fc.bias, and {TITLE} leaves it uninitialised",
            export_cure(TITLE),
        )


def _views(pair: Pair) -> tuple[View, ...]:
    """Return the attention that SGLang gives each layer (`_get_dflash_layer_attention_params`)."""
    config = pair.config
    types = config.get("layer_types") or [None] * config["num_hidden_layers"]
    is_causal = config.get("is_causal")
    windows = [config.get("sliding_window") if kind == SLIDING else None for kind in types]
    # Without this key, layers with a window are causal and the others are not.
    return tuple(View(w, bool(w) if is_causal is None else bool(is_causal)) for w in windows)


def write(export: Export, folder: Path) -> None:
    """Write the draft in SGLang's format.

    vLLM can read the folder too, except for EAGLE-1 heads and heads with several layers.
    """
    folders.write(export.pair, folder, partial(_edit, export.pair))


def _edit(pair: Pair, config: dict[str, Any], tensors: Tensors) -> None:
    if pair.family.name == "eagle1":
        config["architectures"] = [ARCHITECTURE]
        fc = tensors["fc.weight"]
        tensors["fc.bias"] = torch.zeros(len(fc), dtype=fc.dtype)
    elif pair.family.name == "eagle3":
        layers = _listed(pair, config[AUX_LAYERS])
        config[SECTION] = {"use_aux_hidden_state": True, AUX_LAYERS: layers}
        if "lm_head.weight" not in tensors:
            config["draft_vocab_size"] = None
        folders.name_later_norms(tensors, "hidden_norm")
    else:
        folders.widen_vocabulary(config, tensors, pair.target_config.vocab_size)
        if (is_causal := section(config, BLOCK).get("causal")) is not None:
            config["is_causal"] = is_causal


def serve(export: Export) -> str:
    """Return the shell command that serves the target with the draft.

    DFlash and DSpark propose whole blocks, regardless of `num_tokens`.
    """
    pair, num_tokens = export.pair, export.num_tokens
    name = pair.family.name
    words: list[object] = ["python", "-m", "sglang.launch_server", "--model-path", pair.target.name]
    words += ["--speculative-algorithm", ALGORITHMS[name]]
    if not pair.is_own_target:
        words += ["--speculative-draft-model-path", export.output]
    if name == "dflash":
        words += [
            "--speculative-num-draft-tokens",
            1 + int(pair.family.max_tokens(pair.config) or 0),
        ]
    elif name == "dspark":
        words += ["--speculative-dspark-block-size", pair.family.max_tokens(pair.config)]
    else:
        words += ["--speculative-num-steps", num_tokens, "--speculative-eagle-topk", 1]
        words += ["--speculative-num-draft-tokens", num_tokens + 1]
    return folders.shell(*words)
