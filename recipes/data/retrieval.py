"""Count the target's answers: a draft that needs no training, no GPU and no pass of a model to propose tokens."""

from __future__ import annotations

from redraft.distill.data.conversations import load_conversations
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import build_samples
from redraft.heads.families.retrieval import Text, count_answers
from redraft.heads.files.artifact import publish, require_free
from redraft.heads.files.folder import fetch_model
from redraft.heads.files.target_folder import TargetFolder
from redraft.recipes.data.retrieval_config import Config


def main(cfg: Config) -> None:
    """Count and publish.

    Raises:
        FileExistsError: the output is not empty.
        FileNotFoundError: the target is neither a folder nor on the hub.
        ValueError: the data or the tokenizer cannot be read, or there is no answer.
    """
    require_free(cfg.output, overwrite=cfg.overwrite)
    # Before the counting: the fingerprint reads the weights.
    fetch_model(cfg.target)
    target, day = TargetFolder.open(cfg.target), choose_day(cfg.date)
    conversations = load_conversations(cfg.data, split=cfg.split)
    samples, stats = build_samples(
        conversations, target.tokenizer, max_length=cfg.sequence_length, day=day, ends=target.end_ids
    )
    print(stats)
    draft = count_answers([Text(ids=s.input_ids, is_label=s.loss_mask) for s in samples], cfg.retrieval)
    provenance = {
        "target": cfg.target,
        "target_fingerprint": target.fingerprint,
        "data": cfg.data,
        "labels": stats.labels,
        "date": day.isoformat(),
    }
    publish(cfg.output, draft.write, provenance, overwrite=cfg.overwrite)
    print(f"{len(draft.entries):,} runs of up to {cfg.retrieval.max_run} tokens -> {cfg.output}")
