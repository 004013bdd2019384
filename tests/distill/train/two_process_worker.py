"""Three optimizer steps on two rows of unequal length.

One process takes both, two processes take one each.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from make_heads import take_rows
from test_train import make_batch, make_distillation, make_model, weights

from redraft.distill.launch.ranks import leave

if __name__ == "__main__":
    distillation = make_distillation(make_model(1), make_model(0))
    rank, ranks = distillation.accelerator.process_index, distillation.accelerator.num_processes
    for seed in range(3):
        whole = make_batch([24, 7], seed=seed)
        stats = distillation.step([take_rows(whole, slice(rank, None, ranks))])
    if Accelerator().is_main_process:
        torch.save({"weights": weights(distillation), "loss": stats.loss}, sys.argv[1])
    leave(distillation.accelerator)
