"""Write model folders for engines: vLLM's layout, with some tensors and keys changed.

W = draft vocabulary, V = target vocabulary, R = rank."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from redraft.files.artifact import MANIFEST, PROVENANCE, write_json
from redraft.files.folder import CONFIG, WEIGHTS, read_config
from redraft.files.foreign import AUX_LAYERS, default_layers
from redraft.files.tensors import read_tensors
from redraft.files.windows import View, trained_views
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.families.eagle3 import has_qk_norm
from redraft.heads.families.mtp_folder import link
from redraft.heads.target import Target

Tensors = dict[str, Tensor]
Edit = Callable[[dict[str, Any], Tensors], None]
"""Changes config.json and the tensors of a folder in vLLM's layout, in place."""

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


OTHERWISE = "serve it with vLLM, or train a head without it"
"""Fix for a part of a head that only vLLM computes."""


def write(pair: Pair, folder: Path, edit: Edit) -> None:
    """Write a head with `write_changed`.

    The files of a whole model are written unchanged, without the manifest and the provenance.
    """
    if pair.family.is_head:
        write_changed(pair, folder, edit)
        return
    for path in pair.draft.iterdir():
        if path.is_file() and path.name not in (MANIFEST, PROVENANCE):
            link(path, folder / path.name)


def write_changed(pair: Pair, folder: Path, edit: Edit) -> None:
    """Write the head in vLLM's layout and in its stored dtype, then apply `edit`.

    Raises:
        ValueError: a tensor of the head is missing, unknown or has the wrong shape.
    """
    head = pair.family.load(pair.draft, lambda: Target.from_folder(pair.target.folder))
    kinds = [pair.dtypes[name] for name in pair.shapes if pair.dtypes[name] in DTYPES]
    head.export(folder, DTYPES[max(set(kinds), key=kinds.count)])
    config = read_config(folder)
    tensors = read_tensors(folder)
    edit(config, tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    write_json(folder / CONFIG, config)


def layers_read(pair: Pair) -> list[int]:
    """Return the target layers that a head was trained on.

    Each is given as the number of layers below its stream.
    """
    recorded = pair.trained_with.get(AUX_LAYERS) or pair.family.read_layers(pair.config)
    return list(recorded or default_layers(pair.target_config.num_hidden_layers))


def name_later_norms(tensors: Tensors, name: str) -> None:
    """Rename the first norm in every layer after the first layer to `name`."""
    for old in list(tensors):
        if re.fullmatch(r"layers\.[1-9]\d*\.(input_layernorm|hidden_norm)\.weight", old):
            prefix = ".".join(old.split(".")[:2])
            tensors[f"{prefix}.{name}.weight"] = tensors.pop(old)


def widen_vocabulary(config: dict[str, Any], tensors: Tensors, vocab_size: int) -> None:
    """Make the draft propose from the whole vocabulary.

    The target's head replaces the draft's rows, and a Markov head gets a bias of zero for the
    additional ids.
    """
    config["draft_vocab_size"] = vocab_size
    tensors.pop("lm_head.weight", None)
    offset_W = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    name = "markov_head.markov_w2.weight"
    if offset_W is not None and name in tensors:
        rows_WR = tensors[name]
        whole_VR = rows_WR.new_zeros((vocab_size, rows_WR.shape[1]))
        whole_VR[offset_W + torch.arange(len(offset_W))] = rows_WR
        tensors[name] = whole_VR


def refuse_eagle3(pair: Pair, title: str) -> Iterator[Finding]:
    """Report the parts of an EAGLE-3 head that only vLLM computes."""
    # If absent, it is true in the speculators layout.
    unset = pair.config.get("speculators_model_type") == "eagle3"
    if pair.config.get("norm_before_residual", unset):
        yield Finding(
            f"norm_before_residual is true: {title} uses the residual before the norm", OTHERWISE
        )
    if has_qk_norm(pair.config):
        yield Finding(f"{title}'s layer has no norms of queries and keys", OTHERWISE)
    if len(layers_read(pair)) == 1:
        yield Finding(
            f"{title} applies fc only to several streams, but the head reads one", OTHERWISE
        )


def misnamed_norms(pair: Pair, title: str) -> Iterator[Finding]:
    """Report the norms of later layers, which only vLLM calls `input_layernorm`."""
    if any(name.startswith("layers.1.input_layernorm") for name in pair.shapes):
        yield Finding(
            f"{title} expects the first norm of layers.1 under the name hidden_norm, so it would "
            "leave the weights of this norm at one",
            export_cure(title),
        )


def dropped_vocabulary(pair: Pair, title: str) -> Iterator[Finding]:
    """Report a block head's own vocabulary, which only vLLM and llama.cpp support."""
    if "d2t" in pair.shapes:
        rows = pair.shapes["d2t"][0]
        yield Finding(
            f"{title} drops d2t and lm_head: the head proposes from all "
            f"{pair.target_config.vocab_size} ids, not from the {rows} that it was trained on",
            export_cure(title),
        )


def other_views(pair: Pair, title: str, views: tuple[View, ...]) -> Iterator[Finding]:
    """Report the first layer whose attention in the engine (`views`) differs from training."""
    for layer, (trained, served) in enumerate(zip(trained_views(pair.config), views, strict=True)):
        if trained != served:
            yield Finding(
                f"layer {layer} was trained with {trained}, but {title} reads {served} in this "
                "folder",
                export_cure(title),
            )
            return


def dropped_scale(pair: Pair, title: str) -> Iterator[Finding]:
    """Report a logit scale, which only vLLM applies. The argmax does not depend on it."""
    if (scale := pair.layer_config.get("logit_scale", 1)) != 1:
        yield Finding(
            f"{title} drops logit_scale ({scale}): greedy drafts are the same, but sampled "
            "ones are not",
            "let the engine draft greedily",
            is_doubt=True,
        )


def other_layout(pair: Pair, title: str) -> Iterator[Finding]:
    """Report the layout of the package `speculators`, which only vLLM supports."""
    if pair.is_speculators:
        yield Finding(f"{title} does not read the speculators layout", export_cure(title))


def export_cure(title: str) -> str:
    """Return the fix for a folder that an engine interprets differently from training."""
    return f"redraft export DRAFT --engine {title.lower()}"


def shell(*words: object) -> str:
    """Join words into a shell command line."""
    return shlex.join(str(word) for word in words)


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of config.json, or an empty mapping if there is none."""
    return config.get(name) or {}
