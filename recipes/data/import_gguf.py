"""Turn a GGUF file into a model folder in bfloat16, which transformers, vLLM and every redraft command load."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from redraft.heads.files.artifact import publish, require_free, sha256
from redraft.heads.files.gguf import check_gguf, load_gguf, read_config, read_header, require_space_for, save
from redraft.recipes.data.import_gguf_config import Config


def main(cfg: Config) -> None:
    """Convert and publish.

    Raises:
        FileExistsError: the output is not empty.
        FileNotFoundError: there is no such file.
        OSError: the disk has no room.
        ValueError: the file is not GGUF, is corrupt, or has an architecture that transformers does not read; or the
            `gguf` package is not installed.
    """
    check_gguf(cfg.file)
    require_free(cfg.output, overwrite=cfg.overwrite)
    header = read_header(cfg.file)
    config = read_config(cfg.file, header.architecture)
    require_space_for(config, cfg.output)
    print(f"{header.name or cfg.file.name}: architecture {header.architecture}, {', '.join(header.weight_types)}")
    model = load_gguf(cfg.file, header, config)
    provenance = {"imported_from": {"file": cfg.file.name, "sha256": sha256(cfg.file), **asdict(header)}}
    publish(cfg.output, partial(save, model), provenance, overwrite=cfg.overwrite)
    if model.tokenizer.chat_template is None:
        print("note: the file has no chat template, as base models have none")
    print(f"{model.model.num_parameters():,} parameters in bfloat16 -> {cfg.output}")
