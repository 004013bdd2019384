"""Count the target's answers: a draft that needs no training, no GPU and no pass of a model to propose tokens."""

from __future__ import annotations

from redraft.distill.data.conversations import load_conversations
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import build_samples
from redraft.heads.families.retrieval import Text, count_answers
from redraft.heads.files.artifact import fingerprint, publish, require_free
from redraft.heads.files.checkpoint import end_ids, load_tokenizer
from redraft.heads.files.folder import fetch_model
from redraft.recipes.cli import run_recipe
from redraft.recipes.data import retrieval_config
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
    target = fetch_model(cfg.target)
    tokenizer, day = load_tokenizer(cfg.target), choose_day(cfg.date)
    conversations = load_conversations(cfg.data, split=cfg.split)
    ends = end_ids(cfg.target, tokenizer)
    samples, stats = build_samples(conversations, tokenizer, max_length=cfg.sequence_length, day=day, ends=ends)
    print(stats)
    draft = count_answers([Text(ids=s.input_ids, is_label=s.loss_mask) for s in samples], cfg.retrieval)
    provenance = {
        "target": cfg.target,
        "target_fingerprint": fingerprint(target),
        "data": cfg.data,
        "labels": stats.labels,
        "date": day.isoformat(),
    }
    publish(cfg.output, draft.write, provenance, overwrite=cfg.overwrite)
    print(f"{len(draft.entries):,} runs of up to {cfg.retrieval.max_run} tokens -> {cfg.output}")


if __name__ == "__main__":
    run_recipe(main, Config, retrieval_config.__doc__)
