"""Read model folders.

The functions find a model's location, read its JSON files, find the file of each tensor, check
completeness, and compute the fingerprint.

Apart from the hub's client for hub names, this module uses only the standard library and msgspec,
because help texts and control planes read folders too. Code that needs transformers is in
`files.checkpoint`.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from redraft.files.artifact import (
    MANIFEST,
    VOLATILE_CONFIG_KEYS,
    refuse_pointer,
    safetensors_header,
    safetensors_samples,
    sha256,
    verify,
)
from redraft.files.foreign import MASK_EMBEDDING

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
MISTRAL_CONFIG = "params.json"
GENERATION_CONFIG = "generation_config.json"
MODELOPT = "hf_quant_config.json"
"""File next to config.json in which ModelOpt states the quantization."""
SMALL_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", MASK_EMBEDDING)
MODEL_FILES = (*SMALL_FILES, "*.safetensors")
"""Files of a hub repository that are downloaded."""
OTHERS = ("*/*", "consolidated*")
"""Files that contain the model in different formats."""
OLD_WEIGHTS = "pytorch_model*.bin"
"""Weights in repositories that have no safetensors files."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
TO_SAFETENSORS = f"convert them to {WEIGHTS}, with torch.load and safetensors.torch.save_file"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
TRAINED_WITH = "trained_with"
"""Key in an export's `redraft` section for the trained architecture, under the engines' names. The
copies for engines at the top level may be edited after the export, but not this section.
"""

T = TypeVar("T")
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` in a folder.

    Raises:
        FileNotFoundError: the folder is missing, or is not a model folder.
        ValueError: the file is not valid JSON.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no model folder {folder}, and it is not a hub name (owner/name) either"
        )
    if not (folder / CONFIG).is_file() and (folder / ADAPTER).is_file():
        base = read_json(folder / ADAPTER).get("base_model_name_or_path")
        raise FileNotFoundError(
            f"{folder} is an adapter for {base}: merge it first (peft's merge_and_unload, then "
            "save_pretrained), and give the merged model"
        )
    if not (folder / CONFIG).is_file():
        reason = "it is not a model folder"
        if (folder / MISTRAL_CONFIG).is_file():
            reason = (
                f"its {MISTRAL_CONFIG} is Mistral's own format, which redraft does not read; get the "
                "model in the format of transformers"
            )
        elif (folder / "draft" / CONFIG).is_file():
            reason = f"it is the folder of a run; did you mean {folder / 'draft'}?"
        raise FileNotFoundError(f"{folder} contains no {CONFIG}: {reason}")
    return read_json(folder / CONFIG)


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises the same errors as `read_as`."""
    return read_as(path, dict[str, Any])


def read_as(path: Path, kind: type[T], cure: str = "fetch or export it again") -> T:
    """Read the record in a JSON file.

    Missing keys get their defaults, and unknown keys are ignored.

    Raises:
        ValueError: the file is corrupt or of a different type; the message names the file and ends
            with `cure`.
    """
    content = path.read_bytes()
    refuse_pointer(path, content)
    try:
        # msgspec's decoder refuses NaN, which other programs may write.
        return msgspec.convert(json.loads(content), kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is corrupt ({error}): {cure}") from error


def text_sections(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return a config.json, and its language-model section if the model has images."""
    return config, config.get("text_config") or {}


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of this config.json on the quantization of the weights.

    It is empty if the weights are not quantised.
    """
    # The second key is from old versions of compressed-tensors.
    keys = ("quantization_config", "compression_config")
    return next(
        (place[key] for place in text_sections(config) for key in keys if place.get(key)), {}
    )


def find_quantization(config: Mapping[str, Any]) -> str | None:
    """Return the quantization that this config.json states, under the name that its tool uses.

    Return None if the weights are not quantised.
    """
    section = quantization_section(config)
    # ModelOpt calls the method `quant_algo`.
    return (
        None
        if not section
        else section.get("quant_method") or section.get("quant_algo") or "packed"
    )


def read_quantization(folder: Path, config: Mapping[str, Any] | None = None) -> str | None:
    """Apply `find_quantization` to a folder. A ModelOpt file may state the quantization too.

    `config` is the folder's config.json, if it has been read. Raises the same errors as
    `read_config`.
    """
    if found := find_quantization(read_config(folder) if config is None else config):
        return found
    path = folder / MODELOPT
    return (
        str(read_json(path).get("quantization", {}).get("quant_algo") or "packed")
        if path.is_file()
        else None
    )


def find_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the weights' dtype that this config.json states, if any."""
    # It was called `torch_dtype` until transformers 4.56.
    sections = text_sections(config)
    return next(
        (dtype for one in sections if (dtype := one.get("dtype") or one.get("torch_dtype"))), None
    )


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Read the generation_config.json in a folder. Empty if there is none.

    Raises:
        ValueError: the file is corrupt.
    """
    path = folder / GENERATION_CONFIG
    return read_json(path) if path.is_file() else {}


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file that contains each tensor of a safetensors folder, by the tensor's name.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: a file is truncated; the message names it.
    """
    first = weight_files(folder)[0]
    if (folder / INDEX).is_file():
        return {
            name: folder / file for name, file in read_as(folder / INDEX, _Index).weight_map.items()
        }
    if first.name != WEIGHTS:
        raise FileNotFoundError(f"{folder} has its weights in {first.name}: {TO_SAFETENSORS}")
    return dict.fromkeys(safetensors_header(first), first)


def _refuse_two(folder: Path) -> None:
    """Raise ValueError if a folder has two sets of weights.

    transformers reads the single file, and vLLM reads the index.
    """
    if (folder / WEIGHTS).is_file() and WEIGHTS not in read_as(
        folder / INDEX, _Index
    ).weight_map.values():
        raise ValueError(
            f"{folder} has both {WEIGHTS} and {INDEX}, and transformers and vLLM may read "
            f"different files: remove the outdated one"
        )


def tensor_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return each tensor's dtype and shape in a safetensors folder (`safetensors_header`), by name.

    Raises the same errors as `tensor_files`.
    """
    files = sorted(set(tensor_files(folder).values()))
    return {name: entry for file in files for name, entry in safetensors_header(file).items()}


def count_parameters(folder: Path) -> int:
    """Count the parameters in a safetensors folder. Raises the same errors as `tensor_files`."""
    return sum(math.prod(entry["shape"]) for entry in tensor_entries(folder).values())


def is_hub_name(name_or_path: str | Path) -> bool:
    """Whether this is `owner/name`, but not an existing local folder or the name of a GGUF file."""
    is_name = HUB_NAME.fullmatch(str(name_or_path)) is not None and not _is_gguf(name_or_path)
    return is_name and not Path(name_or_path).exists()


def _is_gguf(name_or_path: str | Path) -> bool:
    return Path(name_or_path).suffix.lower() == ".gguf"


def refuse_gguf(name_or_path: str | Path) -> None:
    """Raise ValueError if a model is specified by its GGUF file.

    The message contains the command that converts the file to a folder.
    """
    if _is_gguf(name_or_path):
        raise ValueError(
            f"{name_or_path} is a GGUF file: run `redraft data import-gguf {name_or_path} FOLDER`, "
            "then use FOLDER instead"
        )


def model_folder(name_or_path: str | Path, revision: str | None = None) -> Path:
    """Return a model's folder: the given one or, for a hub name, the one in the hub's cache.

    `revision` is the branch, tag or commit on the hub; None means the main branch.

    Raises:
        FileNotFoundError: the hub's cache does not contain the model.
        ValueError: the name is a GGUF file.
    """
    refuse_gguf(name_or_path)
    if not is_hub_name(name_or_path):
        return Path(name_or_path)
    from huggingface_hub import try_to_load_from_cache

    # Never use the network, because looking up a folder must not start a download of many
    # gigabytes. Look up a single file, because `snapshot_download` rejects a snapshot without some
    # files that are never read.
    config = try_to_load_from_cache(str(name_or_path), CONFIG, revision=revision)
    if not isinstance(config, str):
        version = f" at revision {revision}" if revision else ""
        raise FileNotFoundError(
            f"{name_or_path}{version} is neither a local folder nor in the hub's cache: download it "
            "first"
        )
    return Path(config).parent


def loaded_folder(model_config: Any) -> Path:
    """Return the folder that vLLM's config of a model names.

    Raises the same errors as `model_folder`.
    """
    return model_folder(model_config.model, model_config.revision)


def open_folder(name_or_path: str | Path) -> Path:
    """Return the folder of a model, with all files except the weights.

    It is the given folder or, for a hub name, the one in the hub's cache, completed by a download.

    Raises:
        FileNotFoundError: the folder does not exist, or neither the hub nor its cache provides the
            model.
        ValueError: the name is a GGUF file.
    """
    if not is_hub_name(name_or_path):
        return model_folder(name_or_path)
    reason = _download(str(name_or_path), *SMALL_FILES)
    try:
        return model_folder(name_or_path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name_or_path} is not a local folder, and the hub does not provide it: {reason or error}"
        ) from error


def fetch_model(name_or_path: str | Path) -> Path:
    """Return the folder of a model, with all its files.

    It is the given folder or, for a hub name, the one in the hub's cache, completed by a download.
    Only files that transformers or vLLM read are downloaded. If the hub cannot be reached, a
    complete model in the cache is sufficient.

    Raises:
        FileNotFoundError: the hub does not provide the model, and the cache does not contain all of
            it.
        ValueError: the name is a GGUF file.
    """
    if not is_hub_name(name_or_path):
        return model_folder(name_or_path)
    reason = _download(str(name_or_path), *MODEL_FILES)
    try:
        folder = model_folder(name_or_path)
        if not reason and not _has_weights(folder):
            reason = _download(str(name_or_path), OLD_WEIGHTS)
        _check_weights(folder)
        if not _has_weights(folder):
            raise FileNotFoundError(f"{folder} contains no weights")
    except (FileNotFoundError, ValueError) as error:
        raise FileNotFoundError(
            f"{name_or_path} is not a local folder, and the hub does not provide all of its files: "
            f"{reason or error}"
        ) from error
    return folder


def _download(name: str, *patterns: str) -> str:
    """Download the files of a model that are not in the hub's cache.

    Return the reason if the download fails, otherwise "".
    """
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, allow_patterns=[*patterns], ignore_patterns=[*OTHERS])
    # OSError, and the errors of the HTTP library, which depends on the release.
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob(OLD_WEIGHTS))


def check_model_folder(name_or_path: str | Path) -> None:
    """Check that a local model folder is complete.

    It must have a config and every shard in the index, and no file may be truncated. A folder with
    a manifest is compared with its manifest, byte for byte. A hub name is not checked here, because
    the hub's client checks its files.

    Raises:
        FileNotFoundError: the folder is missing, or is not a model folder.
        ValueError: a file is corrupt or missing, or the name is a GGUF file; the message names it.
    """
    refuse_gguf(name_or_path)
    if is_hub_name(name_or_path):
        return
    folder = Path(name_or_path)
    read_config(folder)
    check_files(folder)


def check_files(folder: Path) -> None:
    """Check the files of `check_model_folder`, but not the config.

    Raises:
        ValueError: a file is corrupt or missing; the message names it.
    """
    if (folder / MANIFEST).is_file():
        verify(folder)
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    """Refuse a truncated safetensors file, and an index with a missing shard.

    Raises:
        ValueError: the message names the first such file.
    """
    for path in sorted(folder.glob("*.safetensors")):
        safetensors_header(path)
    if (folder / INDEX).is_file():
        _refuse_two(folder)
    for path in folder.glob("*.safetensors.index.json"):
        shards = set(read_as(path, _Index).weight_map.values())
        if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
            raise ValueError(
                f"{folder / missing[0]} is missing, although {path.name} lists it: download it again"
            )


def weight_files(folder: Path) -> list[Path]:
    """Return a model's weight files, sorted: the files in the index, the single file, or old files.

    Raises:
        FileNotFoundError: there are no weights.
        ValueError: there are two sets of weights.
    """
    if (folder / INDEX).is_file():
        _refuse_two(folder)
        return sorted(
            {folder / name for name in read_as(folder / INDEX, _Index).weight_map.values()}
        )
    whole = folder / WEIGHTS
    if files := [whole] if whole.is_file() else sorted(folder.glob(OLD_WEIGHTS)):
        return files
    others = sorted(path.name for path in folder.glob("*") if path.suffix in WEIGHT_SUFFIXES)
    if not others:
        raise FileNotFoundError(
            f"{folder} contains neither {WEIGHTS} nor {INDEX}: it is not a model folder"
        )
    cure = TO_SAFETENSORS
    if others[0].endswith(".safetensors"):
        cure = f"download {INDEX} too" if len(others) > 1 else f"rename it to {WEIGHTS}"
    raise FileNotFoundError(f"{folder} has its weights in {others[0]}: {cure}")


def fingerprint(folder: Path, config: Mapping[str, Any] | None = None) -> str:
    """Return the SHA-256, in hex, of a model's config, tokenizer and samples of its weights.

    From a safetensors file, it reads the header (names, dtypes, shapes) and SAMPLE_BYTES at the
    start, middle and end of every tensor, so tens of gigabytes take about a second, and a
    fine-tuned copy still has a different fingerprint. Other weight files are read completely. The
    same weights in different shards have different fingerprints. A fingerprint does not reveal
    corrupt bytes; `verify` does. `config` is the folder's config.json, if it has been read.

    Raises:
        FileNotFoundError: there is no config.json, or there are no weights.
        ValueError: a file is truncated or corrupt.
    """
    config = read_config(folder) if config is None else config
    weights, digest = weight_files(folder), hashlib.sha256()
    # Keys are sorted below, because saving a model again may reorder them.
    kept = {key: value for key, value in config.items() if key not in VOLATILE_CONFIG_KEYS}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for path in [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]:
        digest.update(bytes.fromhex(sha256(path)))
    for path in weights:
        if path.suffix == ".safetensors":
            for block in safetensors_samples(path):
                digest.update(block)
        else:
            digest.update(bytes.fromhex(sha256(path)))
    return digest.hexdigest()


def lineage(folder: Path, config: Mapping[str, Any] | None = None) -> str:
    """Return the SHA-256, in hex, of the part of a target that a draft's layout depends on.

    This part is the model's type, the vocabulary, and the names and shapes of the tensors. A
    fine-tune or a later checkpoint has the lineage of the model it started from, but a different
    `fingerprint`. Settings that a later release of transformers spells differently are ignored, and
    so are the tensors' dtypes, their order in shards, and an output head that is a copy of tied
    embeddings. `config` is the folder's config.json, if it has been read.

    Raises:
        FileNotFoundError: there is no config.json, or there are no safetensors weights.
        ValueError: a file is truncated or corrupt.
    """
    config = read_config(folder) if config is None else config
    shapes = {
        name: entry["shape"]
        for name, entry in tensor_entries(folder).items()
        if not name.endswith(("lm_head.weight", "rotary_emb.inv_freq"))
    }
    types = [section.get("model_type") for section in text_sections(config)]
    known = json.dumps([types, shapes, _digest_vocabulary(folder)], sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()


def _digest_vocabulary(folder: Path) -> str:
    """Return the SHA-256 of a tokenizer's tokens and merges. Empty if there is no tokenizer."""
    path = next((folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), None)
    if path is None:
        return ""
    if path.name != "tokenizer.json":
        return sha256(path)
    # Padding, truncation, added tokens and the spelling of merges can change when a fine-tune is
    # saved.
    model = read_json(path).get("model") or {}
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or ()
    ]
    return hashlib.sha256(
        json.dumps([model.get("vocab"), merges], sort_keys=True).encode()
    ).hexdigest()


def trained_with(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the trained architecture in config.json; empty for exports of other trainers."""
    recorded: Mapping[str, Any] = (config.get("redraft") or {}).get(TRAINED_WITH) or {}
    return recorded
