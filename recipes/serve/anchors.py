"""Write offline data as records that the learner replays to prevent forgetting.

    $ redraft data anchors --target models/llama-8b --data answers.jsonl --output anchors
    $ redraft learner --config learner.toml --set 'anchors="anchors"'

One pass of the target over every sample keeps the most probable tokens at each label, as capture
does in a server. `replay.anchor_share` in learner.toml sets the share of anchors in every training
step. Heads cannot use anchors, because anchors contain no hidden states.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from redraft.engine.target_dtype import TargetDtype


@dataclass(frozen=True, kw_only=True)
class AnchorsConfig:
    target: str
    """Folder or hub name of the served model."""
    target_dtype: TargetDtype | None = None
    """Dtype for the target's computation. Default: on a GPU, the stored dtype; on a CPU, bfloat16
    if the weights are stored in bfloat16 and the CPU has bfloat16 instructions, otherwise float32.
    """
    data: str
    """Text that the draft must not forget: a hub name, a .jsonl or .parquet file, a folder of text
    files, or `stdlib`. Answers written by the target work best (redraft regenerate).
    """
    split: str = "train"
    """Split of a data set on the hub."""
    output: Path = Path("anchors")
    """File to write the records to. Their provenance is written next to it, to OUTPUT.json."""
    overwrite: bool = False
    """Replace `output` if it already exists."""
    num_conversations: int = 2000
    """Maximum number of conversations, counted from the start of the data."""
    sequence_length: int = 4096
    """Maximum number of tokens per text. Use the sequence length that the draft is trained with."""
    date: str | None = None
    """Date (YYYY-MM-DD) for chat templates that contain today's date. Default: today."""
    logprobs: int = 32
    """Number of token probabilities to keep per label. Use the servers' --capture.logprobs."""


def main(cfg: AnchorsConfig) -> None:
    """Write the anchors.

    Raises:
        FileExistsError: the output exists and may not be replaced.
        ValueError: the target or the data cannot be used.
    """
    # Imported here, because they import torch.
    import torch

    from redraft.distill.data.conversations import load_conversations
    from redraft.distill.data.day import choose_day
    from redraft.distill.data.samples import build_samples
    from redraft.distill.run.inputs import load_target
    from redraft.distill.signal.sources import InProcessTarget
    from redraft.distill.train.run_config import Signal
    from redraft.engine.target_dtype import open_target
    from redraft.files.artifact import write_whole
    from redraft.files.progress import Progress
    from redraft.files.replaced import find_obstacle
    from redraft.files.served_target import visible_length
    from redraft.online.learning.anchors import is_record_file, write_anchors

    if obstacle := find_obstacle([cfg.output], cfg):
        raise FileExistsError(f"{obstacle}: choose a different --output")
    if cfg.output.is_file() and not is_record_file(cfg.output):
        raise FileExistsError(f"{cfg.output} does not contain anchors: choose a different --output")
    if cfg.output.exists() and not cfg.overwrite:
        raise FileExistsError(
            f"{cfg.output} already exists: choose a different --output, or pass --overwrite"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = open_target(cfg.target, cfg.target_dtype, on_cpu=device.type == "cpu")
    model = load_target(target, Signal(), device)
    conversations = load_conversations(cfg.data, split=cfg.split)[: cfg.num_conversations]
    day = choose_day(cfg.date)
    # Anchors are for standalone drafts.
    length = visible_length(target.text_config, cfg.sequence_length, is_head=False)
    samples, stats = build_samples(
        conversations, target.tokenizer, max_length=length, day=day, ends=target.end_ids
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
    write_anchors(cfg.output, bar, InProcessTarget(model), target.fingerprint, k=cfg.logprobs)
    # Do this last: if the run is interrupted, earlier anchors keep their own provenance.
    write_whole(
        cfg.output.with_name(f"{cfg.output.name}.json"),
        json.dumps(provenance, indent=2, default=str) + "\n",
    )
    print(
        f"anchors: {len(samples):,} records, {cfg.output.stat().st_size / 1e6:,.1f} MB in "
        f"{cfg.output}"
    )
