"""Write offline data as records that the learner replays beside live traffic, against forgetting.

    $ redraft data anchors --target models/llama-8b --data answers.jsonl --output anchors
    $ redraft learner --config learner.toml --set 'anchors="anchors"'

One pass of the target over every sample keeps the largest probabilities at each label, as capture does in a server.
`replay.anchor_share` in learner.toml sets the share of anchors in every training step. Heads cannot use anchors, which
hold no hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from redraft.eval.engine.target_dtype import TargetDtype


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str
    """Folder or hub name of the served model."""
    target_dtype: TargetDtype | None = None
    """Type in which the target computes. By default as stored on a GPU. On a CPU bfloat16 if it is stored so and the
    CPU has instructions for bfloat16, else float32."""
    data: str
    """Text the draft must not forget: a hub name, a .jsonl or .parquet file, a folder of text, or `stdlib`. Answers
    written by the target are best (redraft regenerate)."""
    split: str = "train"
    """Split of a data set on the hub."""
    output: Path = Path("anchors")
    """File to write the records to. Its provenance stands beside it, in OUTPUT.json."""
    overwrite: bool = False
    """Replace `output` if it exists."""
    num_conversations: int = 2000
    """Maximum number of conversations, taken from the beginning of the data."""
    max_length: int = 4096
    """Maximum length of a text in tokens. Use the length the draft is trained with."""
    date: str | None = None
    """Date, as YYYY-MM-DD, for chat templates that write today's. By default today."""
    top_k: int = 32
    """Probabilities to keep at every label. Use the servers' --capture.top-k."""
