"""TensorRT-LLM's PyTorch backend of autumn 2026: rules from its sources, not from running it.

EAGLE-3 (`_torch/models/modeling_speculative.py`, `llmapi/llm_args.py`)
    layers from a YAML file, one less than ours; `norm_before_fc` only from the section
    `eagle_config`; layers after the first one have a `hidden_norm`
DFlash, DSpark (`modeling_dflash.py`, `modeling_dspark.py`)
    the target's head and its whole vocabulary; layers with a window are causal and the others are
    not; DSpark's keys only from sections

Unknown tensors and keys are silently dropped.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from redraft.files.folder import read_json
from redraft.files.foreign import AUX_LAYERS, SECTION, default_layers
from redraft.files.windows import SECTION as BLOCK
from redraft.files.windows import SLIDING, View, trained_views
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.engines import folders
from redraft.heads.engines.folders import OTHERWISE, Tensors, export_cure, section
from redraft.heads.engines.table import Export

TITLE = "TensorRT-LLM"
LAYERS = "eagle3_layers_to_capture"
OPTIONS = "spec.yaml"
"""File in an export that contains the options for trtllm-serve."""

DECODING_TYPES = {
    "standalone": "Draft_Target",
    "eagle3": "Eagle3",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "mtp": "MTP",
}


def find_refused(pair: Pair) -> Iterator[Finding]:
    """Report the parts of a draft that TensorRT-LLM does not compute."""
    name = pair.family.name
    if name == "eagle3":
        yield from _refuse_eagle3(pair)
    elif name in ("dflash", "dspark"):
        yield from _refuse_views(pair)
    elif name == "mtp" and "mimo" in str(pair.target.config.architectures).lower():
        yield Finding(f"{TITLE} does not support MiMo's MTP layer", "serve it with vLLM")


def _refuse_eagle3(pair: Pair) -> Iterator[Finding]:
    yield from folders.refuse_eagle3(pair, TITLE)
    is_normed = section(pair.config, SECTION).get(
        "norm_before_fc", pair.config.get("norm_before_fc")
    )
    if pair.config.get("fc_norm") and is_normed:
        yield Finding(
            f"the head has norm_before_fc and fc_norm, but {TITLE} applies only the latter",
            OTHERWISE,
        )
    if SLIDING in (pair.layer_config.get("layer_types") or ()):
        yield Finding(f"{TITLE} does not support a window in an EAGLE-3 head", OTHERWISE)
    if 0 in folders.layers_read(pair):
        yield Finding(
            f"the head reads the embedding (layer 0), but -1 means a different state in {TITLE}",
            OTHERWISE,
        )


def _refuse_views(pair: Pair) -> Iterator[Finding]:
    for layer, view in enumerate(trained_views(pair.config)):
        if pair.family.name == "dspark" and view != View():
            yield Finding(
                f"layer {layer} was trained with {view}, but {TITLE} supports only "
                "bidirectional DSpark layers without a window",
                OTHERWISE,
            )
            return
        if view.is_causal != bool(view.window):
            yield Finding(
                f"layer {layer} was trained with {view}, but in {TITLE} exactly the "
                "layers with a window are causal",
                OTHERWISE,
            )
            return


def find_misread(pair: Pair) -> Iterator[Finding]:
    """Report the parts of this folder that TensorRT-LLM interprets differently from training."""
    yield from folders.dropped_scale(pair, TITLE)
    if pair.is_speculators:
        yield from folders.other_layout(pair, TITLE)
    elif pair.family.name == "eagle3":
        yield from _misread_layers(pair)
        if pair.config.get("norm_before_fc") and SECTION not in pair.config:
            yield Finding(
                f"{TITLE} reads norm_before_fc only in the section {SECTION}, and drops the norm",
                export_cure(TITLE),
            )
        yield from folders.misnamed_norms(pair, TITLE)
    elif pair.family.name in ("dflash", "dspark"):
        yield from folders.dropped_vocabulary(pair, TITLE)
        if pair.family.name == "dspark":
            yield from _misread_dspark(pair)


def _misread_layers(pair: Pair) -> Iterator[Finding]:
    told = None
    if (pair.draft / OPTIONS).is_file():
        told = read_json(pair.draft / OPTIONS).get("speculative_config", {}).get(LAYERS)
    default = default_layers(pair.target_config.num_hidden_layers)
    served = [layer + 1 for layer in told] if told else default
    trained = folders.layers_read(pair)
    if served != trained or told is None:
        yield Finding(
            f"{TITLE} reads the layers from its options ({LAYERS} in {OPTIONS}), not from "
            f"config.json: it uses {served}, but the head was trained on {trained}",
            export_cure(TITLE),
        )


def _misread_dspark(pair: Pair) -> Iterator[Finding]:
    keys = section(pair.config, BLOCK)
    if keys.get("target_layer_ids") != pair.config.get("target_layer_ids"):
        yield Finding(
            f"{TITLE} reads target_layer_ids only in the section {BLOCK}", export_cure(TITLE)
        )
    told = keys.get("shift_label", pair.config.get("shift_label", True))
    if told != pair.config.get("sample_from_anchor", True):
        yield Finding(
            f"{TITLE} reads shift_label ({str(told).lower()}) instead of sample_from_anchor",
            export_cure(TITLE),
        )


def write(export: Export, folder: Path) -> None:
    """Write the draft in TensorRT-LLM's format, with the options for the server."""
    folders.write(export.pair, folder, partial(_edit, export.pair))
    (folder / OPTIONS).write_text(json.dumps(options(export), indent=2) + "\n")  # JSON is YAML


def _edit(pair: Pair, config: dict[str, Any], tensors: Tensors) -> None:
    if pair.family.name == "eagle3":
        layers = [layer - 1 for layer in config[AUX_LAYERS]]
        is_normed = config["norm_before_fc"]
        config[SECTION] = {
            "use_aux_hidden_state": True,
            AUX_LAYERS: layers,
            "norm_before_fc": is_normed,
        }
        if config["num_hidden_layers"] > 1:  # in TensorRT-LLM, "midlayer" is a single layer
            for name in [name for name in tensors if name.startswith("midlayer.")]:
                tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
        folders.name_later_norms(tensors, "hidden_norm")
        return
    folders.widen_vocabulary(config, tensors, pair.target_config.vocab_size)
    if pair.family.name == "dspark":
        config[BLOCK] = {
            "target_layer_ids": config["target_layer_ids"],
            "mask_token_id": config["mask_token_id"],
            "shift_label": config["sample_from_anchor"],
        }


def options(export: Export) -> dict[str, Any]:
    """Return the options for trtllm-serve."""
    pair = export.pair
    chosen: dict[str, Any] = {
        "decoding_type": DECODING_TYPES[pair.family.name],
        "max_draft_len": pair.family.max_tokens(pair.config) or export.num_tokens,
    }
    if not pair.is_own_target:
        chosen["speculative_model"] = str(export.output.absolute())
    if pair.family.name == "eagle3":
        chosen[LAYERS] = [layer - 1 for layer in folders.layers_read(pair)]
    return {"speculative_config": chosen}


def serve(export: Export) -> str:
    """Return the shell command that serves the target with the draft.

    A target that includes an MTP layer is served unchanged, so the command line contains its
    options.
    """
    if export.pair.is_own_target:
        text = folders.shell(json.dumps(options(export)))
        command = folders.shell("trtllm-serve", export.pair.target.name, "--extra_llm_api_options")
        return f"echo {text} > {OPTIONS} && {command} {OPTIONS}"
    file = export.output / OPTIONS
    return folders.shell("trtllm-serve", export.pair.target.name, "--extra_llm_api_options", file)
