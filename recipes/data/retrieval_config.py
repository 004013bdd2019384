"""Count the target's answers: a draft that needs no training, no GPU and no pass of a model to propose tokens.

    $ redraft regenerate --target TARGET --data prompts.jsonl --output answers.jsonl     # or logged answers
    $ redraft retrieval --target TARGET --data answers.jsonl --output drafts/answers
    $ redraft eval --target TARGET --draft drafts/answers --draft ngram                    # how much is accepted?
    $ redraft serve TARGET --draft drafts/answers --num-speculative-tokens 6
    $ redraft serve TARGET --draft drafts/answers+HEAD:2 --num-speculative-tokens 6

It proposes the token that followed the last few tokens most often, in the request or in the answers (heads/families/
retrieval.py). Answers that repeat phrases, such as code and reports, gain most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from redraft.heads.families.retrieval import Config as RetrievalConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str
    """Folder or hub name of the served model, whose tokenizer and chat template are used."""
    data: str
    """Conversations with answers of the target: a hub name, a .jsonl, .json or .parquet file (also .gz or .zst), or a
    folder."""
    output: Path = Path("outputs/retrieval")
    """Folder to write the draft to."""
    split: str = "train"
    """Split of a hub data set."""
    sequence_length: int = 4096
    """Longest sample in tokens."""
    date: str | None = None
    """Date, as YYYY-MM-DD, for chat templates that write today's. By default today."""
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    overwrite: bool = False
    """Replace a folder that redraft has written."""
