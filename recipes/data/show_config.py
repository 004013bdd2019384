"""Show what a draft would learn from a data set, before any training.

$ redraft data answers.jsonl --target meta-llama/Llama-3.1-8B-Instruct
$ redraft data ShareGPT_V3.json --target TARGET --held-out 0.05 --num-samples 10 --no-color

The command prints sizes, rejected answers by reason, the vocabulary, and samples with the labels in
colour. It loads only the target's tokenizer. It reads, splits, renders and truncates the data as
training does.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.files.setting_error import require_least


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    source: Annotated[str, tyro.conf.Positional]
    """Conversations: a hub name, a .jsonl, .json or .parquet file (the first two also as .gz or
    .zst), a folder, or `stdlib`.
    """
    target: str
    """Folder or hub name of the served model, whose tokenizer and chat template are used."""
    split: str = "train"
    """Split of the data set."""
    domain_column: str | None = None
    """Column with the domain of each row (chat, code, math, ...). Default: `domain`, if present."""
    held_out: float = 0.05
    """Fraction of the conversations to hold out, between 0 and 1. Draft vocabularies are evaluated
    on them.
    """
    sequence_length: int = 4096
    """Maximum sample length in tokens. Use the training run's --loop.sequence-length."""
    cut_answers: bool = False
    """Fill a sample with the beginning of an answer that does not fit, as with --data.cut-answers."""
    date: str | None = None
    """Date, as YYYY-MM-DD, for chat templates that contain today's date. Default: today."""
    num_samples: int = 3
    """Number of samples to show, taken from each domain in turn, with at least one of each type of
    turn.
    """
    json: Path | None = None
    """JSON file for the samples and for the counts of everything that was used, rejected or
    omitted.
    """
    sample_tokens: int = 300
    """Number of tokens to show per sample."""
    color: bool = True
    """Show labels in green. With --no-color, or if the output is not a terminal, labels are
    enclosed in 「 and 」.
    """
    strict: bool = False
    """Stop at the first row that cannot be used. By default, such rows are skipped and counted."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"--held-out is {self.held_out}: it must be above 0 and below 1")
        require_least(self, sequence_length=2, num_samples=0, sample_tokens=1)
