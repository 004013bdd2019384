"""Three training steps on all launched ranks, written as a checkpoint.

Before that: a broken candidate is not written.

python run_ranks.py DRAFT RECORDS OUTPUT
"""

from __future__ import annotations

import errno
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from steady import SteadyAdamW

from redraft.online.learning.candidate import STATE, Candidate, NotFiniteError, Ranks
from redraft.online.learning.config import Training
from redraft.online.records.record import read_frames

torch.set_num_threads(1)
torch.optim.AdamW = SteadyAdamW  # type: ignore[misc]


class Breakable(Candidate):
    def break_weights(self) -> None:
        """Break the candidate, as a far too high learning rate would."""
        for parameter in self.distillation.module.parameters():
            getattr(parameter, "ds_tensor", parameter).data.fill_(math.nan)

    def let_the_last_rank_fail(self, seconds: float) -> None:
        """Let the next write of the last rank take longer, and fail on a full disk."""
        if self.accelerator.is_last_process:
            save = self.distillation.save

            def fail(folder: Path) -> None:
                self.distillation.save = save  # type: ignore[method-assign]
                save(folder)
                time.sleep(seconds)
                (folder / "last").touch()
                raise OSError(errno.ENOSPC, "no space left")

            self.distillation.save = fail  # type: ignore[method-assign]


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
    ranks.do(Breakable.let_the_last_rank_fail, 1.0)
    with pytest.raises(OSError, match="no space left"):
        ranks.do(Candidate.write, output / "failed")
    assert (output / "failed" / STATE / "last").exists(), "the first rank waits for the last one"
    ranks.do(Candidate.write, output)
    ranks.do(Candidate.rest)
    ranks.dismiss()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
