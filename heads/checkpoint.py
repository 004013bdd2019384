"""Hugging Face model folders in: whole, and with one clear line where they are not."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from heads.artifact import MANIFEST, safetensors_header, verify


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    """MiMo without its MTP layer is a Qwen2, which `transformers` knows and MiMo it does not."""

    model_type = "mimo"


AutoConfig.register("mimo", MiMoConfig)

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@functools.cache
def register_models() -> None:
    """Let `AutoModelForCausalLM` know MiMo: once, and not at import, where Qwen2's module takes most of a second."""
    from transformers import Qwen2ForCausalLM

    class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
        config_class = MiMoConfig

    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def load_causal_lm(name_or_path: str | Path, dtype: torch.dtype | None = None) -> Any:
    """The causal LM of a folder or a hub name, in `dtype` (None: as stored), every weight of it from the files.

    Attention is SDPA: it reads a boolean mask per document, as `heads.draft.attention_mask` makes it.

    Raises: FileNotFoundError for a missing or wrong folder; ValueError naming the file that is corrupt, or what lacks.
    """
    check_model_folder(name_or_path)
    register_models()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(name_or_path),
            dtype=dtype or "auto",
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises a dozen types here, many of several lines
        raise ValueError(f"cannot load the model {name_or_path}: {_first_line(error)}") from error
    # transformers fills what lacks with random numbers and only warns
    if wrong := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ValueError(f"{name_or_path} lacks {len(wrong)} weights of its architecture, the first is {wrong[0]}")
    return model


def end_ids(name_or_path: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer in an engine: the tokenizer's and those of generation_config.json."""
    path = model_folder(name_or_path) / "generation_config.json"
    theirs = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    listed = theirs if isinstance(theirs, list) else [theirs]
    return tuple(sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None}))


def load_tokenizer(name_or_path: str | Path) -> Any:
    """The tokenizer of a folder or a hub name.

    Raises: FileNotFoundError for a missing or wrong folder; ValueError where its tokenizer cannot be read.
    """
    folder = Path(name_or_path)
    if not is_hub_name(folder) and not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if folder.is_dir() and not any(folder.glob("*token*")) and not (folder / "vocab.json").exists():
        raise FileNotFoundError(f"{folder} holds no tokenizer (tokenizer.json): it is not a model folder")
    try:
        return AutoTokenizer.from_pretrained(str(name_or_path))
    except Exception as error:
        raise ValueError(f"cannot load the tokenizer of {name_or_path}: {_first_line(error)}") from error


def is_hub_name(name_or_path: str | Path) -> bool:
    """True for `owner/name` where no such folder exists here."""
    return HUB_NAME.fullmatch(str(name_or_path)) is not None and not Path(name_or_path).exists()


def model_folder(name_or_path: str | Path) -> Path:
    """The folder that holds a model: itself, or where the hub's files were cached when it was loaded.

    Raises: FileNotFoundError where neither exists.
    """
    if not is_hub_name(name_or_path):
        return Path(name_or_path)
    try:
        return Path(snapshot_download(str(name_or_path), local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{name_or_path} is neither a folder here nor in the hub's cache: load it once"
        ) from error


def check_model_folder(name_or_path: str | Path) -> None:
    """Return where a local model folder is complete: config, every shard of the index, each file as long as it says.

    A folder with a manifest is compared with it byte for byte. A hub name is left to the hub's own checks.

    Raises: FileNotFoundError for a missing or wrong folder; ValueError naming the file that is corrupt or missing.
    """
    if is_hub_name(name_or_path):
        return
    folder = Path(name_or_path)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no model folder {folder}, and it is no hub name (owner/name) either")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: it is not a model folder")
    if (folder / MANIFEST).is_file():
        verify(folder)
    for path in sorted(folder.glob("*.safetensors")):
        safetensors_header(path)
    for path in folder.glob("*.safetensors.index.json"):
        shards = set(json.loads(path.read_text())["weight_map"].values())
        if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
            raise ValueError(f"{folder / missing[0]} is missing: {path.name} names it; fetch it again")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
