"""Write offline data as records that the learner replays beside live traffic, against forgetting."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from redraft.distill.data.conversations import load_conversations
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import build_samples
from redraft.distill.run.config import Signal
from redraft.distill.run.inputs import load_target
from redraft.distill.signal.sources import InProcessTarget
from redraft.eval.engine.target_dtype import open_target
from redraft.heads.files.artifact import write_whole
from redraft.heads.progress import Progress
from redraft.online.learning.anchors import write_anchors
from redraft.recipes.serve.anchors_config import Config


def main(cfg: Config) -> None:
    """Write the anchors.

    Raises:
        FileExistsError: if the output exists.
        ValueError: if the target or the data cannot be used.
    """
    if cfg.output.exists() and not cfg.overwrite:
        raise FileExistsError(f"{cfg.output} already exists: choose another --output, or pass --overwrite")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = open_target(cfg.target, cfg.target_dtype, on_cpu=device.type == "cpu")
    model = load_target(target, Signal(), device)
    conversations = load_conversations(cfg.data, split=cfg.split)[: cfg.num_conversations]
    day = choose_day(cfg.date)
    samples, stats = build_samples(
        conversations, target.tokenizer, max_length=cfg.max_length, day=day, ends=target.end_ids
    )
    print(f"data: {stats}")
    provenance = {
        "command": sys.argv,
        "config": asdict(cfg),
        "data": str(stats),
        "date": day.isoformat(),
        "target_fingerprint": target.fingerprint,
    }
    bar = Progress(samples, desc="anchors", unit="sample")
    write_anchors(cfg.output, bar, InProcessTarget(model), target.fingerprint, k=cfg.top_k)
    # Last: an interrupted run leaves earlier anchors with the provenance of those.
    write_whole(cfg.output.with_name(f"{cfg.output.name}.json"), json.dumps(provenance, indent=2, default=str) + "\n")
    print(f"anchors: {len(samples):,} records, {cfg.output.stat().st_size / 1e6:,.1f} MB in {cfg.output}")
