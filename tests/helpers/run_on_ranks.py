"""A run with a checkpoint after every step, to be killed and resumed.

python run_on_ranks.py OUTPUT PIDS    a file in the folder PIDS for each process
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from make_heads import make_signal, make_target
from train_on_ranks import make_standalone, micro_batches

from redraft.distill.launch.ranks import leave
from redraft.distill.loss.choice import Divergence
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.run_folder import RunFolder
from redraft.distill.train.step import Distillation

torch.set_num_threads(1)

STEPS = 12


def main(output: Path, pids: Path) -> None:
    accelerator = make_accelerator(1, None, None)
    (pids / str(os.getpid())).touch()
    run = RunFolder.open(output, {}, accelerator, overwrite=False)
    target = make_target()
    optim = Optim(lr=1e-2)
    distillation = Distillation(
        make_standalone(target),
        lambda batch: make_signal(target, batch),
        Divergence(),
        optim,
        STEPS,
        accelerator,
    )
    run.restore(distillation.resume)
    for step in range(distillation.step_index, STEPS):
        stats = distillation.step(
            micro_batches(step, accelerator.process_index, accelerator.num_processes, 1)
        )
        run.log(step + 1, loss=stats.loss)
        run.save(step + 1, distillation.save)
    weights = distillation.weights()
    if accelerator.is_main_process:
        torch.save(weights, output / "weights.pt")
    leave(accelerator)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
