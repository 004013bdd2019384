"""Train Medusa heads on what their target would say, or on the text, prove them in a real vLLM, and report.

$ accelerate launch recipes/medusa_llama8b.py                   # for Llama-3.1-8B-Instruct, self-distilled
$ accelerate launch recipes/medusa_llama8b.py --divergence.name cross_entropy       # hard labels
$ redraft medusa --preset demo                                  # the small target of tests/assets, on two CPU cores
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
from heads import medusa
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    head: medusa.Config = field(default_factory=lambda: medusa.Config(num_heads=4))
    optim: Optim = field(default_factory=lambda: Optim(lr=5e-4))
    loop: Loop = field(default_factory=lambda: Loop(steps=10000, sequence_length=2048))
    output: Path = Path("outputs/medusa-llama8b")
    """Folder of the run: config, metrics, checkpoints, the exported draft, the report."""


PRESETS = {
    "demo": Config(
        target="tests/assets/tiny-target",
        head=medusa.Config(num_heads=3),
        data=Data(source="stdlib", held_out=0.05, max_prompt_tokens=512),
        divergence=Divergence(name="forward_kl"),
        optim=Optim(lr=2e-3),
        loop=Loop(steps=64, batch_size=4, sequence_length=1024, eval_every=16, eval_batches=1, save_every=64),
        prove=Prove(num_speculative_tokens=3),
        output=Path("outputs/demo-heads/medusa"),
        mixed_precision="bf16",
    )
}


def main(cfg: Config) -> None:
    # 1. target, data and folder
    run = HeadRun(cfg, "medusa", cfg.head.num_heads)

    # 2. the heads
    def make() -> medusa.Medusa:
        return medusa.Medusa(cfg.head, run.target)

    before = run.forecast(run.new(make))

    # 3. optimizer, `prepare` and the loop
    trained = run.train(make)

    # 4. proof: what is published is what is judged
    draft = run.publish(trained, lambda head, folder: head.export(folder, torch.bfloat16))
    run.prove(before, trained, draft, {"method": "medusa", "model": str(draft.absolute())})


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
