"""Train an EAGLE-1 head, prove it in a real vLLM, and report. EAGLE-1 regresses the target's next hidden state.

$ accelerate launch recipes/train/eagle1_llama8b.py                   # for Llama-3.1-8B-Instruct
$ accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train/eagle1_llama8b.py --head.num-steps 1
$ redraft eagle1 --preset demo                                  # the small target of tests/assets, on two CPU cores
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from redraft.distill.head_run import DEMO, HeadConfig, HeadRun
from redraft.distill.train.loop import Loop
from redraft.distill.train.optim import Optim
from redraft.heads.families import eagle1
from redraft.recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    head: eagle1.Config = field(default_factory=lambda: eagle1.Config(num_steps=4))
    optim: Optim = field(default_factory=lambda: Optim(lr=5e-5, max_grad_norm=0.5))
    loop: Loop = field(default_factory=lambda: Loop(steps=20000, sequence_length=2048))
    output: Path = Path("outputs/eagle1-llama8b")
    """Folder of the run. It receives the config, metrics, checkpoints, the exported draft and the report."""


PRESETS = {"demo": Config(**DEMO, head=eagle1.Config(num_steps=3), output=Path("outputs/demo-heads/eagle1"))}


def main(cfg: Config) -> None:
    # 1. The target, the data, and the folder of the run.
    run = HeadRun(cfg, "eagle1", cfg.head.num_steps)

    # 2. The head: new, or continued.
    head = run.start() if cfg.start_from else eagle1.Eagle1(cfg.head, run.target)
    before = run.forecast(head)

    # 3. Training: optimizer, `prepare` and the loop (distill/train/).
    head, cost = run.train(head)

    # 4. The proof: publish the head, load it back, forecast it, serve it in vLLM, report.
    draft = run.publish(lambda folder: head.export(folder, torch.bfloat16))
    run.prove(before, draft, cost, {"method": "eagle", "model": str(draft.absolute())})


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
