"""Train an MLPSpeculator in two stages, on text and on what its target writes itself, and report.

$ accelerate launch recipes/mlp_speculator_llama8b.py           # for Llama-3.1-8B-Instruct
$ accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/mlp_speculator_llama8b.py --text.steps 5000
$ redraft mlp-speculator --preset demo                          # the small target of tests/assets, on two CPU cores

vLLM has no proposer for it: the reference decoder stands in for the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from distill.head_run import HeadConfig, HeadRun
from distill.loop import Loop
from distill.losses import Divergence
from distill.prove import Prove
from distill.setup import Data
from distill.train import Optim
from heads import mlp_speculator
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    head: mlp_speculator.Config = field(default_factory=lambda: mlp_speculator.Config(num_stages=4, scale_input=True))
    text: Loop = field(default_factory=lambda: Loop(steps=15000, sequence_length=4096))
    """The first stage, on the data's own text by cross-entropy."""
    loop: Loop = field(default_factory=lambda: Loop(steps=6000, on_policy=1.0, on_policy_tokens=256))
    """The second, on what the target writes after the data's prompts."""
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-3))
    output: Path = Path("outputs/mlp-speculator-llama8b")
    """Folder of the run: config, metrics, checkpoints, the exported draft, the report."""


DEMO_LOOP = Loop(steps=64, batch_size=4, sequence_length=1024, eval_every=16, eval_batches=1, save_every=64)
PRESETS = {
    "demo": Config(
        target="tests/assets/tiny-target",
        head=mlp_speculator.Config(scale_input=True),
        data=Data(source="stdlib", held_out=0.05, max_prompt_tokens=512),
        text=DEMO_LOOP,
        divergence=Divergence(name="forward_kl"),
        loop=replace(DEMO_LOOP, steps=16, save_every=16, on_policy=1.0, on_policy_tokens=64),
        prove=Prove(num_speculative_tokens=3),
        output=Path("outputs/demo-heads/mlp_speculator"),
        mixed_precision="bf16",
    )
}


def main(cfg: Config) -> None:
    # 1. target, data and folder
    run = HeadRun(cfg, "mlp_speculator", cfg.head.num_stages)

    # 2. the head
    def make() -> mlp_speculator.MLPSpeculator:
        return mlp_speculator.MLPSpeculator(cfg.head, run.target)

    before = run.forecast(run.new(make))

    # 3. optimizer, `prepare` and the loop: on text, then on the target's own words
    on_text = run.train(make, divergence=Divergence(name="cross_entropy"), loop=cfg.text, stage="text")
    after_text = run.publish(on_text, lambda head, folder: head.export(folder), "after-text")
    trained = run.train(make, start=after_text)

    # 4. proof: what is published is what is judged
    draft = run.publish(trained, lambda head, folder: head.export(folder, torch.bfloat16))
    run.prove(before, trained, draft, speculative=None)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
