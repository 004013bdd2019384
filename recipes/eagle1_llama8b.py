"""Train an EAGLE-1 head (feature regression and a divergence), prove it in a real vLLM, and report.

$ accelerate launch recipes/eagle1_llama8b.py                   # for Llama-3.1-8B-Instruct
$ accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/eagle1_llama8b.py --head.num-steps 1
$ redraft eagle1 --preset demo                                  # the small target of tests/assets, on two CPU cores
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from distill.head_run import HeadConfig, HeadRun
from distill.loop import Loop
from distill.losses import Divergence
from distill.prove import Prove
from distill.setup import Data
from distill.train import Optim
from heads import eagle1
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    head: eagle1.Config = field(default_factory=lambda: eagle1.Config(num_steps=4))
    optim: Optim = field(default_factory=lambda: Optim(lr=5e-5, max_grad_norm=0.5))
    loop: Loop = field(default_factory=lambda: Loop(steps=20000, sequence_length=2048))
    output: Path = Path("outputs/eagle1-llama8b")
    """Folder of the run: config, metrics, checkpoints, the exported draft, the report."""


PRESETS = {
    "demo": Config(
        target="tests/assets/tiny-target",
        head=eagle1.Config(num_steps=3),
        data=Data(source="stdlib", held_out=0.05, max_prompt_tokens=512),
        divergence=Divergence(name="forward_kl"),
        optim=Optim(lr=2e-3),
        loop=Loop(steps=64, batch_size=4, sequence_length=1024, eval_every=16, eval_batches=1, save_every=64),
        prove=Prove(num_speculative_tokens=3),
        output=Path("outputs/demo-heads/eagle1"),
        mixed_precision="bf16",
    )
}


def main(cfg: Config) -> None:
    # 1. target, data and folder
    run = HeadRun(cfg, "eagle1", cfg.head.num_steps)

    # 2. the head
    def make() -> eagle1.Eagle1:
        return eagle1.Eagle1(cfg.head, run.target)

    before = run.forecast(run.new(make))

    # 3. optimizer, `prepare` and the loop
    trained = run.train(make)

    # 4. proof: what is published is what is judged
    draft = run.publish(trained, lambda head, folder: head.export(folder, torch.bfloat16))
    run.prove(before, trained, draft, {"method": "eagle", "model": str(draft.absolute())})


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
