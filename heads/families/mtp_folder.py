"""Target folders with an MTP layer: read the layer, write it back, or make room for one."""

import os
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from redraft.files.artifact import MANIFEST, PROVENANCE, require_free, write_json
from redraft.files.folder import CONFIG, INDEX, WEIGHTS, read_config
from redraft.files.tensors import list_tensors, read_tensors
from redraft.heads.families.mtp_layouts import MIMO, Layout


def read_layer(folder: Path, layout: Layout, num_layers: int) -> dict[str, Tensor]:
    """Read the tensors of a folder's MTP layer, under redraft's names.

    Raises:
        ValueError: the folder contains no MTP layer.
    """
    names = [name for name in list_tensors(folder) if layout.holds(name, num_layers)]
    if not names:
        raise ValueError(
            f"{folder} contains no MTP layer ({layout.prefix.format(n=num_layers)}*): train one from "
            "scratch"
        )
    return layout.from_checkpoint(read_tensors(folder, names), num_layers)


def stitch(
    target_folder: Path, tensors: Mapping[str, Tensor], out: Path, config: Mapping[str, Any]
) -> None:
    """Copy the target's folder with these tensors and config keys added or replaced.

    Raises:
        FileExistsError: `out` may not be written (`require_free`).
    """
    require_free(out)
    out.mkdir(parents=True, exist_ok=True)
    # 1. Copy tokenizer, templates and so on, but not the target's manifest and provenance, which do
    # not describe the new folder.
    files = list_tensors(target_folder)
    shards = set(files.values())
    for path in target_folder.iterdir():
        if (
            path.is_file()
            and path not in shards
            and path.name not in (CONFIG, INDEX, MANIFEST, PROVENANCE)
        ):
            link(path, out / path.name)
    # 2. Keep the target's shards, without the tensors to replace.
    kept: dict[str, str] = {}
    for path in sorted(shards):
        kept |= _keep_shard(
            path, {name for name, file in files.items() if file == path}, set(tensors), out
        )
    # 3. Write the new tensors, into a file whose name no earlier stitch used.
    added = next(
        name for i in count() if (name := f"model-added-{i}.safetensors") not in kept.values()
    )
    save_file(
        {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()},
        out / added,
        {"format": "pt"},
    )
    # 4. Write index and config last, because they name files that must already exist.
    weight_map = {**kept, **dict.fromkeys(tensors, added)}
    write_json(out / INDEX, {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))})
    write_json(out / CONFIG, {**read_config(target_folder), **config})


def _keep_shard(path: Path, names: set[str], replaced: set[str], out: Path) -> dict[str, str]:
    """Map each remaining tensor of the shard to its file in `out`.

    The file is a link, or a new file without the replaced tensors.
    """
    # If there is a model.safetensors, transformers reads it as the whole model and never reads the
    # index.
    name = "model-target.safetensors" if path.name == WEIGHTS else f"{path.stem}.safetensors"
    left = names - replaced
    if left == names and path.suffix == ".safetensors":
        link(path, out / name)
    # Otherwise, a loader would load both the old and the new tensor, and keep whichever comes last.
    elif left:
        save_file(read_tensors(path.parent, left), out / name, {"format": "pt"})
    return dict.fromkeys(left, name)


def link(source: Path, copy: Path) -> None:
    """Make `copy` a hard link to the file that `source` resolves to, or a copy on another disk."""
    try:
        # Both names share contents and mode. Resolve symbolic links, because the hub's cache
        # consists of them.
        os.link(source.resolve(), copy)
    except OSError:
        shutil.copy2(source, copy)


def as_mimo(llama_folder: Path, out: Path) -> None:
    """Write the target to `out` in the MiMo layout, which has room for an MTP layer.

    In this layout, the target is a Llama with zero biases on q, k and v.

    Raises:
        ValueError: the folder does not contain a Llama that can be converted.
    """
    config = read_config(llama_folder)
    if (
        config["architectures"] != ["LlamaForCausalLM"]
        or config.get("attention_bias")
        or config.get("mlp_bias")
    ):
        raise ValueError(
            f"{llama_folder} is not a LlamaForCausalLM without biases: only such models can be converted "
            "to MiMo"
        )
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if (config.get("head_dim") or hidden // heads) * heads != hidden:
        raise ValueError(
            f"{llama_folder}: MiMo needs a head size of hidden_size / num_attention_heads, "
            f"which this target does not have"
        )
    weights = [
        name
        for name in list_tensors(llama_folder)
        if name.endswith(tuple(f".{x}_proj.weight" for x in "qkv"))
    ]
    biases = {
        name.replace(".weight", ".bias"): torch.zeros(len(weight), dtype=weight.dtype)
        for name, weight in read_tensors(llama_folder, weights).items()
    }
    # vLLM recognises MiMo by the architecture. transformers opens the folder as a Qwen2 model.
    mimo = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
        MIMO.count_key: 1,
    }
    stitch(llama_folder, biases, out, mimo)
