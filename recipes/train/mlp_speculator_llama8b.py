"""Train an MLPSpeculator in two stages, on text and then on answers of the target, and report.

$ accelerate launch recipes/train/mlp_speculator_llama8b.py           # for Llama-3.1-8B-Instruct
$ accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train/mlp_speculator_llama8b.py --text.steps 5000
$ redraft mlp-speculator --preset demo                          # the small target of tests/assets, on two CPU cores

vLLM 0.32 cannot serve an MLPSpeculator, so the proof uses the reference decoder instead, in this process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from redraft.distill.head_run import DEMO, HeadConfig, HeadRun
from redraft.distill.loss.divergences import Divergence
from redraft.distill.train.loop import Loop
from redraft.distill.train.optim import Optim
from redraft.heads.families import mlp_speculator
from redraft.recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    head: mlp_speculator.Config = field(default_factory=lambda: mlp_speculator.Config(num_stages=4, scale_input=True))
    text: Loop = field(default_factory=lambda: Loop(steps=15000, sequence_length=4096))
    """First stage: cross-entropy on the text of the data."""
    loop: Loop = field(default_factory=lambda: Loop(steps=6000, on_policy=1.0, on_policy_tokens=256))
    """Second stage: the divergence from the target, on the target's answers to the data's prompts."""
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-3))
    output: Path = Path("outputs/mlp-speculator-llama8b")
    """Folder of the run. It receives the config, metrics, checkpoints, the exported draft and the report."""


TEXT: Loop = DEMO["loop"]
PRESETS = {
    # `replace`, because DEMO holds `optim` and `loop` too, and a keyword cannot be given twice.
    "demo": replace(
        Config(**DEMO, head=mlp_speculator.Config(scale_input=True), text=TEXT),
        optim=Optim(lr=1e-3),
        loop=replace(TEXT, steps=16, save_every=16, on_policy=1.0, on_policy_tokens=64),
        output=Path("outputs/demo-heads/mlp_speculator"),
    )
}


def main(cfg: Config) -> None:
    # 1. The target, the data, and the folder of the run.
    run = HeadRun(cfg, "mlp_speculator", cfg.head.num_stages)

    # 2. The head: new, or continued.
    head = run.start() if cfg.start_from else mlp_speculator.MLPSpeculator(cfg.head, run.target)
    before = run.forecast(head)

    # 3. Training on text, and from there on the target's answers. Every rank loads the first stage's weights, in
    #    float32 as trained.
    on_text, _ = run.train(head, divergence=Divergence(name="cross_entropy"), loop=cfg.text, stage="text")
    # Only the main process runs this lambda: on the others `on_text` is None.
    after_text = run.publish(lambda folder: on_text.export(folder), "after-text")
    head, cost = run.train(run.load(after_text))

    # 4. The proof: publish the head, load it back, forecast it, run it in the reference decoder, report.
    draft = run.publish(lambda folder: head.export(folder, torch.bfloat16))
    run.prove(before, draft, cost, speculative=None)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
