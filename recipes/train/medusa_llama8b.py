"""Train Medusa heads, prove them in a real vLLM, and report. Medusa's k-th head guesses the token k places ahead.

$ accelerate launch recipes/train/medusa_llama8b.py                   # for Llama-3.1-8B-Instruct, on its predictions
$ accelerate launch recipes/train/medusa_llama8b.py --divergence.name cross_entropy       # on the text itself
$ redraft medusa --preset demo                                  # the small target of tests/assets, on two CPU cores
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from redraft.distill.head_run import DEMO, HeadConfig, HeadRun
from redraft.distill.train.loop import Loop
from redraft.distill.train.optim import Optim
from redraft.heads.families import medusa
from redraft.recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    head: medusa.Config = field(default_factory=lambda: medusa.Config(num_heads=4))
    optim: Optim = field(default_factory=lambda: Optim(lr=5e-4))
    loop: Loop = field(default_factory=lambda: Loop(steps=10000, sequence_length=2048))
    output: Path = Path("outputs/medusa-llama8b")
    """Folder of the run. It receives the config, metrics, checkpoints, the exported draft and the report."""


PRESETS = {"demo": Config(**DEMO, head=medusa.Config(num_heads=3), output=Path("outputs/demo-heads/medusa"))}


def main(cfg: Config) -> None:
    # 1. The target, the data, and the folder of the run.
    run = HeadRun(cfg, "medusa", cfg.head.num_heads)

    # 2. The heads: new, or continued.
    head = run.start() if cfg.start_from else medusa.Medusa(cfg.head, run.target)
    before = run.forecast(head)

    # 3. Training: optimizer, `prepare` and the loop (distill/train/).
    head, cost = run.train(head)

    # 4. The proof: publish the heads, load them back, forecast them, serve them in vLLM, report.
    draft = run.publish(lambda folder: head.export(folder, torch.bfloat16))
    run.prove(before, draft, cost, {"method": "medusa", "model": str(draft.absolute())})


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
