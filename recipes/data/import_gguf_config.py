"""Turn a GGUF file into a model folder in bfloat16, which transformers, vLLM and every redraft command load.

    $ redraft data import-gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
    $ redraft train standalone --target models/smollm2 --data.source answers.jsonl

The folder has the tokenizer and the chat template of the file, both checked, and a manifest of SHA-256 sums. Quantised
weights become the bfloat16 numbers nearest to them; the folder is the size of the model in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Config:
    file: Annotated[Path, tyro.conf.Positional]
    """GGUF file of an architecture that transformers reads."""
    output: Annotated[Path, tyro.conf.Positional]
    """Folder to write the model to."""
    overwrite: bool = False
    """Replace a folder that redraft has written."""
