"""Model folders without the weights: config.json, the file of each tensor, and whether all files are there.

Standard library only, apart from the hub's client for a hub name: help texts and control planes read folders too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.heads.files.artifact import MANIFEST, safetensors_header, verify

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Files of a hub repository to download. Subfolders hold the model in formats of others."""
OLD_WEIGHTS = "pytorch_model*.bin"
"""Weights of repositories without safetensors."""
TRAINED_WITH = "trained_with"
"""Key in an export's `redraft` section: the trained architecture, under the engines' keys. The engines' copies at the
top level may be edited after the export; these are not."""

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: it is not JSON.
    """
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG}: it is not an exported head")
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is corrupt ({error}): export the head again") from error
    return config


def find_quantization(config: Mapping[str, Any]) -> str | None:
    """The quantization of the weights beside this config.json, as its tool calls it; None if they are plain."""
    # The second key is an old one of compressed-tensors. ModelOpt names the method `quant_algo`. A wrapper of text and
    # images may have the section below its text model.
    inner = config.get("text_config")
    places = [config, inner if isinstance(inner, Mapping) else {}]
    keys = ("quantization_config", "compression_config")
    section = next((place[key] for place in places for key in keys if place.get(key)), None)
    return None if not section else section.get("quant_method") or section.get("quant_algo") or "packed"


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a safetensors folder, by the tensor's name.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: a file is truncated; the message names it.
    """
    if (folder / INDEX).is_file():
        _refuse_two(folder)
        return {name: folder / file for name, file in _read_index(folder / INDEX).items()}
    if not (folder / WEIGHTS).is_file() and (old := sorted(folder.glob(OLD_WEIGHTS))):
        raise FileNotFoundError(
            f"{folder} has its weights in {old[0].name}: convert them to {WEIGHTS}, with torch.load and "
            "safetensors.torch.save_file"
        )
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} holds neither {WEIGHTS} nor {INDEX}: it is not a model folder")
    return dict.fromkeys(safetensors_header(folder / WEIGHTS), folder / WEIGHTS)


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises ValueError, with the file's name, if it is corrupt."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is corrupt ({error}): fetch it again") from error


def _read_index(path: Path) -> dict[str, str]:
    """The file name of each tensor in an index of shards."""
    index = read_json(path)
    files: dict[str, str] | None = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict):
        raise ValueError(f"{path} is corrupt (it has no weight_map): fetch it again")
    return files


def _refuse_two(folder: Path) -> None:
    """Raise ValueError if a folder has two sets of weights: transformers reads the whole file, vLLM the index."""
    if (folder / WEIGHTS).is_file() and WEIGHTS not in _read_index(folder / INDEX).values():
        raise ValueError(
            f"{folder} has both {WEIGHTS} and {INDEX}, which transformers and vLLM do not choose alike: remove the one "
            "that is left over"
        )


def count_parameters(folder: Path) -> int:
    """Number of values in the weights of a safetensors folder. Raises: as `tensor_files`."""
    headers = [safetensors_header(file) for file in sorted(set(tensor_files(folder).values()))]
    return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())


def is_hub_name(name_or_path: str | Path) -> bool:
    """True for `owner/name`, unless such a folder exists here."""
    return HUB_NAME.fullmatch(str(name_or_path)) is not None and not Path(name_or_path).exists()


def refuse_gguf(name_or_path: str | Path) -> None:
    """Raise ValueError if a model is named by its GGUF file; the message is the command that makes a folder of it."""
    if Path(name_or_path).suffix.lower() == ".gguf":
        raise ValueError(
            f"{name_or_path} is a GGUF file: run `redraft data import-gguf {name_or_path} FOLDER`, "
            "then give FOLDER instead"
        )


def model_folder(name_or_path: str | Path) -> Path:
    """The folder of a model: the given one, or for a hub name the folder in the hub's cache.

    Raises:
        FileNotFoundError: the hub's cache does not hold the model.
        ValueError: the name is a GGUF file.
    """
    refuse_gguf(name_or_path)
    if not is_hub_name(name_or_path):
        return Path(name_or_path)
    from huggingface_hub import try_to_load_from_cache

    # Never from the network: a question about a folder must not start a download of many gigabytes. By one file, since
    # `snapshot_download` refuses a snapshot without the files of the repository which nobody reads.
    config = try_to_load_from_cache(str(name_or_path), CONFIG)
    if not isinstance(config, str):
        raise FileNotFoundError(f"{name_or_path} is neither a folder here nor in the hub's cache: load it once")
    return Path(config).parent


def fetch_model(name_or_path: str | Path) -> Path:
    """The folder of a model: the given one, or for a hub name the folder in the hub's cache, made complete.

    Only files are downloaded which transformers or vLLM read. If the hub cannot be asked, a complete model in the cache
    will do.

    Raises:
        FileNotFoundError: the hub does not give the model, and the cache does not hold all of it.
        ValueError: the name is a GGUF file.
    """
    if not is_hub_name(name_or_path):
        return model_folder(name_or_path)
    reason = _download(str(name_or_path))
    try:
        folder = model_folder(name_or_path)
        _check_weights(folder)
        if not _has_weights(folder):
            raise FileNotFoundError(f"{folder} holds no weights")
    except (FileNotFoundError, ValueError) as error:
        raise FileNotFoundError(
            f"{name_or_path} is no folder here, and the hub does not give all of it: {reason or error}"
        ) from error
    return folder


def _download(name: str) -> str:
    """Download the files of a model that are not in the hub's cache. Returns the reason if it fails, or ""."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=[*MODEL_FILES], ignore_patterns="*/*"))
        if not _has_weights(folder):
            snapshot_download(name, allow_patterns=OLD_WEIGHTS, ignore_patterns="*/*")
    except Exception as error:  # OSError and the errors of the HTTP library, which differs from release to release
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob(OLD_WEIGHTS))


def check_model_folder(name_or_path: str | Path) -> None:
    """Check that a local model folder is complete: a config, every shard of the index, and no file cut short.

    A folder with a manifest is compared with it byte for byte. A hub name is left to the hub's checks.

    Raises:
        FileNotFoundError: the folder is missing, or is not a model folder.
        ValueError: a file is corrupt or missing, or the name is a GGUF file; the message names it.
    """
    require_config(name_or_path)
    if is_hub_name(name_or_path):
        return
    folder = Path(name_or_path)
    if (folder / MANIFEST).is_file():
        verify(folder)
    _check_weights(folder)


def require_config(name_or_path: str | Path) -> None:
    """Check that a local model folder has a config. A hub name is left to the hub's checks.

    Raises:
        FileNotFoundError: the folder is missing, or is not a model folder.
        ValueError: the name is a GGUF file.
    """
    refuse_gguf(name_or_path)
    if is_hub_name(name_or_path):
        return
    folder = Path(name_or_path)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no model folder {folder}, and it is not a hub name (owner/name) either")
    if not (folder / CONFIG).is_file() and (folder / ADAPTER).is_file():
        base = read_json(folder / ADAPTER).get("base_model_name_or_path")
        raise FileNotFoundError(
            f"{folder} is an adapter of {base}: merge it first (peft's merge_and_unload, then save_pretrained), and "
            "give the merged model"
        )
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG}: it is not a model folder")


def _check_weights(folder: Path) -> None:
    """Raise ValueError, naming the first, if a safetensors file is cut short or a shard of an index is missing."""
    for path in sorted(folder.glob("*.safetensors")):
        safetensors_header(path)
    if (folder / INDEX).is_file():
        _refuse_two(folder)
    for path in folder.glob("*.safetensors.index.json"):
        shards = set(_read_index(path).values())
        if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
            raise ValueError(f"{folder / missing[0]} is missing: {path.name} names it; fetch it again")
