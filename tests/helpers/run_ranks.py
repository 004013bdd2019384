"""Three training steps on all launched ranks, written as a checkpoint. Before that: a broken candidate is not written.

python run_ranks.py DRAFT RECORDS OUTPUT
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from steady import SteadyAdamW

from redraft.online.learning.candidate import Candidate, NotFiniteError, Ranks
from redraft.online.learning.config import Training
from redraft.online.records.record import read_frames

torch.set_num_threads(1)
torch.optim.AdamW = SteadyAdamW  # type: ignore[misc]


class Breakable(Candidate):
    def break_weights(self) -> None:
        """Break the candidate, as a far too high learning rate would."""
        for parameter in self.distillation.module.parameters():
            getattr(parameter, "ds_tensor", parameter).data.fill_(math.nan)


def main(draft: Path, frames: Path, output: Path) -> None:
    cfg = Training(lr=1e-3, warmup_steps=1, sequence_length=64)
    candidate = Breakable(cfg, "standalone", draft)
    ranks = Ranks(candidate)
    if not candidate.accelerator.is_main_process:
        ranks.follow()
        return
    records = [record for _, record in read_frames(frames.read_bytes())]
    ranks.do(Candidate.begin, draft)
    ranks.do(Breakable.break_weights)
    try:
        ranks.do(Candidate.write, output)
    except NotFiniteError:
        ranks.do(Candidate.begin, draft)
    for step in range(3):
        stats = ranks.do(Candidate.step, records[8 * step : 8 * step + 8], step)
        print(f"step {step}: loss {stats.loss:.9f}, {stats.labels} labels")
    output.mkdir()  # nothing has been written yet
    ranks.do(Candidate.write, output)
    ranks.do(Candidate.rest)
    ranks.dismiss()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
