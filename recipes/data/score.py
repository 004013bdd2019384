"""Run the target over recorded token ids, so that any engine's traffic can train a draft.

    $ redraft tap http://127.0.0.1:8080 --engine llama.cpp --target TARGET --spool ids --port 8001
    $ redraft data score ids --target TARGET --draft DRAFT --spool spool
    $ redraft learner --config learner.toml              # spool = "spool"

One pass of the target over each record gives the distributions at every token of the answer, and
the hidden states that `--draft` reads. It needs the target's full weights, but no engine: run it
offline, or on an idle server. Files are removed from `ids` once they are scored. If the learner
does not empty `spool`, the other files stay in `ids`.
"""

import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.engine.target_dtype import TargetDtype
from redraft.files.setting_error import require_least

POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    records: Annotated[Path, tyro.conf.Positional]
    """Spool with the records to score."""
    target: str
    """Folder or hub name of the served model."""
    spool: Path
    """Output folder for scored records: the spool of a learner."""
    draft: Path | None = None
    """Folder of the draft that will be trained. For a head, the records include the hidden states
    that it reads.
    """
    target_dtype: TargetDtype | None = None
    """Dtype for the target's computation. Default: on a GPU, the stored dtype; on a CPU, bfloat16
    if the weights are stored in bfloat16 and the CPU has bfloat16 instructions, otherwise float32.
    """
    logprobs: int = 32
    """Number of token probabilities recorded per position."""
    spool_bytes: int = 1 << 30
    """Size of `spool` in bytes at which no further file is scored until the learner has emptied it
    (default 1 GiB).
    """
    follow: bool = False
    """Wait for new files, and for space in `spool`, instead of exiting."""

    def __post_init__(self) -> None:
        require_least(self, logprobs=1, spool_bytes=1)


def main(cfg: ScoreConfig) -> None:
    """Score the records, and write them to the spool.

    Raises:
        FileNotFoundError: a folder is missing.
        ValueError: the target or the draft cannot be used, or the spool is full.
    """
    # Imported here, because they import torch.
    import torch

    from redraft.distill.run.inputs import load_target
    from redraft.distill.signal.sources import InProcessTarget
    from redraft.distill.train.run_config import Signal
    from redraft.engine.target_dtype import open_target
    from redraft.files.folder import read_config
    from redraft.files.progress import Progress
    from redraft.heads.catalog import detect_family, require_trained_for
    from redraft.heads.family import Reads
    from redraft.heads.target import aux_layers
    from redraft.online.learning.rereading import Texts, read_file
    from redraft.online.records.spool import SpoolWriter, count_bytes, spool_files

    if not cfg.records.is_dir():
        raise FileNotFoundError(f"the folder {cfg.records} does not exist: give the spool of a tap")
    if cfg.records.resolve() == cfg.spool.resolve():
        raise ValueError(
            f"--spool {cfg.spool} is the input folder: choose a different one for the output"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = open_target(cfg.target, cfg.target_dtype, on_cpu=device.type == "cpu")
    reads: Reads = "nothing"
    layers = list[int]()
    if cfg.draft is not None:
        family = detect_family(cfg.draft)
        if not family.learns_online or family.is_in_target:
            raise ValueError(
                f"{cfg.draft} is a {family.title} draft, and this command cannot compute "
                "its hidden states: record them with the plugin (redraft serve)"
            )
        require_trained_for(cfg.draft, target)
        reads = family.reads
        if reads == "layers":
            listed = family.read_layers(read_config(cfg.draft))
            layers = list(aux_layers(listed, target.text_config.num_hidden_layers))
    cure = "record the server with the plugin (redraft serve), which needs no scoring"
    model = load_target(target, Signal(), device, cure=cure)
    signal = InProcessTarget(model, layers)
    # This writer deletes nothing, because the scored files no longer exist elsewhere.
    out = SpoolWriter(cfg.spool, "score", sys.maxsize)
    counts: Counter[str] = Counter()
    texts = Texts()
    while True:
        files = spool_files(cfg.records)
        num_scored = 0
        for path in Progress(files, desc="scored", unit="file"):
            if count_bytes(cfg.spool) >= cfg.spool_bytes:
                break
            found = read_file(path, signal, target.fingerprint, reads, cfg.logprobs, out, texts)
            counts.update(found)
            num_scored += 1
        if num_scored or not cfg.follow:
            print(", ".join(f"{count:,} {name}" for name, count in counts.items()) or "no records")
        if not cfg.follow and num_scored < len(files):
            raise ValueError(
                f"{cfg.spool} is full ({count_bytes(cfg.spool):,} bytes), and "
                f"{len(files) - num_scored:,} files are left in {cfg.records}: start the learner, "
                "and run the command again, or set a larger --spool-bytes"
            )
        if not cfg.follow:
            return
        time.sleep(POLL_S)
