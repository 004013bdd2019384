"""Write offline data as records that the learner replays beside live traffic, against forgetting.

    $ redraft anchors --target models/llama-8b --data answers.jsonl --output anchors
    $ redraft learner --config learner.toml --set 'anchors="anchors"'

One pass of the target over every sample keeps its largest probabilities at each label: what a server's capture keeps of
an answer. `replay.anchor_share` of learner.toml is their share of every draw. A head learns without anchors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from distill.data import load_conversations
from distill.samples import build_samples
from distill.setup import Signal, load_target
from distill.signals import InProcessTarget
from heads.artifact import fingerprint
from heads.checkpoint import model_folder
from online.anchors import write_anchors
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str
    """Folder or hub name of the model that the servers serve."""
    data: str
    """Hub name, .jsonl, .parquet, folder of text, or `stdlib`: what must not be forgotten, best as the target says it
    (redraft regenerate)."""
    split: str = "train"
    """Of a data set on the hub."""
    output: Path = Path("anchors")
    """File that receives the records."""
    overwrite: bool = False
    """Replace it where it is there."""
    num_conversations: int = 2000
    """At most so many, from the beginning."""
    max_length: int = 4096
    """Longest text in tokens: what the draft is trained at."""
    top_k: int = 32
    """Probabilities kept at every label: as many as the servers' --capture.top-k."""


def main(cfg: Config) -> None:
    """Raises: FileExistsError where the output is there; as loading target and data."""
    if cfg.output.exists() and not cfg.overwrite:
        raise FileExistsError(f"{cfg.output} is there already: choose another --output, or pass --overwrite")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_target(cfg.target, Signal(), device)
    conversations = load_conversations(cfg.data, split=cfg.split)[: cfg.num_conversations]
    samples, stats = build_samples(conversations, tokenizer, max_length=cfg.max_length)
    print(f"data: {stats}")
    of = fingerprint(model_folder(cfg.target))
    write_anchors(cfg.output, tqdm(samples, desc="anchors", unit="sample"), InProcessTarget(model), of, k=cfg.top_k)
    print(f"anchors: {len(samples):,} records, {cfg.output.stat().st_size / 1e6:,.1f} MB in {cfg.output}")


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
