"""Three steps of a standalone draft and of EAGLE-3, compiled or not, on the ranks of this launch.

python compiled_worker.py OUTPUT eager|compiled
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from make_heads import make_signal, make_target
from train_on_ranks import FAMILIES, micro_batches

from redraft.distill.launch.ranks import leave
from redraft.distill.loss.choice import Divergence
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation

if __name__ == "__main__":
    output, target = Path(sys.argv[1]), make_target()
    # The graphs and their gradients as for any backend, without minutes of C++.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    found = {}
    for name in ("standalone", "eagle3"):
        accelerator = make_accelerator(1, None, None)
        torch.manual_seed(1)
        draft = FAMILIES[name](target)
        aux = draft.aux_layer_ids
        distillation = Distillation(
            draft,
            lambda batch, aux=aux: make_signal(target, batch, aux),
            Divergence(),
            Optim(lr=1e-2, warmup_fraction=0.0),
            3,
            accelerator,
        )
        if sys.argv[2] == "compiled":
            distillation.compile_layers()
        rank, ranks = accelerator.process_index, accelerator.num_processes
        losses = [distillation.step(micro_batches(step, rank, ranks, 1)).loss for step in range(3)]
        distillation.save(output.with_suffix(f".{name}"))
        accelerator.wait_for_everyone()  # the first rank's file is read by all
        distillation.resume(output.with_suffix(f".{name}"))
        weights = {key: tensor.clone() for key, tensor in distillation.weights().items()}
        found[name] = {"losses": losses, "weights": weights}
        distillation.close()
    if PartialState().is_main_process:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch.save({"found": found, "graphs": graphs}, output)
    leave(make_accelerator(1, None, None))
