"""Build a draft from n-gram counts of the target's answers.

This draft needs no training and no GPU, and proposes tokens without running a model.

    $ redraft regenerate --target TARGET --prompts prompts.jsonl --output answers.jsonl
    $ redraft data count --target TARGET --data answers.jsonl --output drafts/answers
    $ redraft eval --target TARGET --draft drafts/answers --draft ngram                   # acceptance
    $ redraft serve TARGET --draft drafts/answers --num-speculative-tokens 6
    $ redraft serve TARGET --draft drafts/answers+HEAD:2 --num-speculative-tokens 6

The data may also be answers that you have logged. The draft proposes the token that most often
followed the last few tokens, in the request or in the answers. Answers that repeat phrases, such as
code and reports, gain most.
"""

from dataclasses import dataclass, field
from pathlib import Path

from redraft.files.setting_error import require_least
from redraft.heads.families.retrieval import Config as RetrievalConfig


@dataclass(frozen=True, kw_only=True)
class CountConfig:
    target: str
    """Folder or hub name of the served model, whose tokenizer and chat template are used."""
    data: str
    """Conversations with answers of the target: a hub name, a .jsonl, .json or .parquet file (the
    first two also as .gz or .zst), or a folder.
    """
    output: Path = Path("outputs/retrieval")
    """Output folder of the draft."""
    split: str = "train"
    """Split of the data set."""
    sequence_length: int = 4096
    """Maximum sample length in tokens."""
    date: str | None = None
    """Date, as YYYY-MM-DD, for chat templates that contain today's date. Default: today."""
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    overwrite: bool = False
    """Replace an output folder that was written by redraft."""

    def __post_init__(self) -> None:
        require_least(self, sequence_length=2)


def main(cfg: CountConfig) -> None:
    """Count the n-grams in the answers, and publish the counts as a draft.

    Raises:
        FileExistsError: the output already exists.
        FileNotFoundError: there is no such target.
        ValueError: there are no data, no tokenizer or no answers.
    """
    # Imported here, because they import torch.
    from redraft.distill.data.conversations import load_conversations
    from redraft.distill.data.day import choose_day
    from redraft.distill.data.samples import build_samples
    from redraft.files.artifact import publish
    from redraft.files.replaced import require_replaceable
    from redraft.files.target_folder import TargetFolder
    from redraft.heads.families.retrieval import Text, count_answers

    require_replaceable(cfg.output, cfg, overwrite=cfg.overwrite)
    target, day = TargetFolder.open(cfg.target), choose_day(cfg.date)
    # Before counting, because the fingerprint reads the weights and may fail.
    target.fetch_and_check()
    conversations = load_conversations(cfg.data, split=cfg.split)
    samples, stats = build_samples(
        conversations,
        target.tokenizer,
        max_length=cfg.sequence_length,
        day=day,
        ends=target.end_ids,
    )
    print(stats)
    draft = count_answers(
        [Text(ids=s.input_ids, is_label=s.loss_mask) for s in samples], cfg.retrieval
    )
    provenance = {
        "target": cfg.target,
        "target_fingerprint": target.fingerprint,
        "data": cfg.data,
        "labels": stats.labels,
        "date": day.isoformat(),
    }
    publish(cfg.output, draft.write, provenance, overwrite=cfg.overwrite)
    print(f"{len(draft.entries):,} runs of up to {cfg.retrieval.max_run} tokens -> {cfg.output}")
