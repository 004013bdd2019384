"""Convert a GGUF file into a model folder in bfloat16.

transformers, vLLM and every redraft command can load the folder.

    $ redraft data import-gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
    $ redraft train standalone --target models/smollm2 --data.source answers.jsonl

The folder has the tokenizer and the chat template of the file, both checked, and a manifest of
SHA-256 sums. Quantised weights are rounded to the nearest bfloat16 numbers, so the folder is as
large as the model in bfloat16.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    file: Annotated[Path, tyro.conf.Positional]
    """GGUF file with an architecture that transformers supports."""
    output: Annotated[Path, tyro.conf.Positional]
    """Output folder of the model."""
    overwrite: bool = False
    """Replace an output folder that was written by redraft."""


def main(cfg: ImportConfig) -> None:
    """Convert the file, and publish the model folder.

    Raises:
        FileExistsError: the output is not empty.
        FileNotFoundError: there is no such file.
        OSError: the disk is full.
        ValueError: the file is not GGUF, is corrupt, or has an architecture that transformers does
            not read; or the `gguf` package is not installed.
    """
    # Imported here, because they import torch.
    from redraft.files.artifact import publish, sha256
    from redraft.files.gguf import (
        check_gguf,
        load_gguf,
        read_config,
        read_header,
        require_space_for,
        save,
    )
    from redraft.files.replaced import require_replaceable

    check_gguf(cfg.file)
    require_replaceable(cfg.output, cfg, overwrite=cfg.overwrite)
    header = read_header(cfg.file)
    config = read_config(cfg.file, header.architecture)
    require_space_for(config, cfg.output)
    print(
        f"{header.name or cfg.file.name}: architecture {header.architecture}, "
        f"{', '.join(header.weight_types)}"
    )
    model, tokenizer = load_gguf(cfg.file, header, config)
    provenance = {
        "imported_from": {"file": cfg.file.name, "sha256": sha256(cfg.file), **asdict(header)}
    }
    publish(cfg.output, partial(save, model, tokenizer), provenance, overwrite=cfg.overwrite)
    if tokenizer.chat_template is None:
        print("note: the file has no chat template, which is normal for base models")
    print(f"{model.num_parameters():,} parameters in bfloat16 -> {cfg.output}")
