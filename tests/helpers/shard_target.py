"""A target shared out over two ranks: signal, answers and steps, written down by the first.

python shard_target.py TARGET OUTPUT [compiled]      alone or under torchrun
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from train_on_ranks import micro_batches

from redraft.distill.launch.ranks import leave
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.sharded import is_sharded, leading, load_sharded
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.greedy import greedy_continuations
from redraft.files.checkpoint import load_causal_lm
from redraft.files.target_folder import TargetFolder
from redraft.heads.families import eagle3
from redraft.heads.target import Target

torch.set_num_threads(1)


def load(name: str, accelerator: Accelerator) -> object:
    if accelerator.num_processes > 1:
        return load_sharded(
            TargetFolder(name=name, folder=Path(name), dtype="float32"), accelerator.device
        )
    return load_causal_lm(name, torch.float32).requires_grad_(False).eval()


def main(name: str, output: Path, *, compiles: bool) -> None:
    accelerator = make_accelerator(1, None, None)
    model = load(name, accelerator)
    assert is_sharded(model) == (accelerator.num_processes > 1)
    held = sum(
        getattr(p, "to_local", lambda p=p: p)().numel()
        for p in model.base_model.layers.parameters()
    )
    torch.manual_seed(1)
    head = eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=(0, 1, 2), num_steps=2), Target.from_model(model)
    )
    source = InProcessTarget(model, (0, 1, 2))
    answers = None
    with leading(model) as leads:
        if leads:
            with leading(model):
                pass  # what is led already goes on
            prompts = [Prompt(token_ids=[5, 6, 7]), Prompt(token_ids=[9, 4, 3, 8, 11])]
            answers = greedy_continuations(
                model, prompts, max_tokens=6, num_speculative_tokens=2, end_ids=()
            )
    optim = Optim(lr=1e-2, warmup_fraction=0.0)
    distillation = Distillation(head, source, Divergence(name="forward_kl"), optim, 4, accelerator)
    if compiles:
        # The graphs and their gradients as for any backend, without minutes of C++.
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
        distillation.compile_layers()
    rank, ranks = accelerator.process_index, accelerator.num_processes
    losses = [distillation.step(micro_batches(step, rank, ranks, 1)).loss for step in range(4)]
    tau = distillation.evaluate(micro_batches(9, rank, ranks, 1), 2).tau
    weights = {key: tensor.clone() for key, tensor in distillation.weights().items()}
    if accelerator.is_main_process:
        texts = [vars(answer) for answer in answers or []]
        found = {
            "held": held,
            "answers": repr(texts),
            "losses": losses,
            "tau": tau,
            "weights": weights,
        }
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if compiles else 0
        torch.save({**found, "graphs": graphs}, output)
    leave(accelerator)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), compiles="compiled" in sys.argv[3:])
