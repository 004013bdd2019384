"""Train an EAGLE-3 head by training-time test, prove it in a real vLLM, and report.

$ accelerate launch recipes/eagle3_llama8b.py                   # for Llama-3.1-8B-Instruct
$ accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/eagle3_llama8b.py --loop.steps 20000
$ redraft eagle3 --preset demo                                  # the small target of tests/assets, on two CPU cores
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from distill.head_run import HeadConfig, HeadRun, target_config
from distill.loop import Loop
from distill.losses import Divergence
from distill.prove import Prove
from distill.setup import Data
from distill.train import Optim
from distill.vocabulary import frequent_ids, require_smaller
from heads import eagle3
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    head: eagle3.Config = field(default_factory=eagle3.Config)
    init: Literal["last_layer", "random"] = "last_layer"
    """Begin as the target's last layer, or at random."""
    draft_vocab_size: int = 32000
    """Ids that the head can propose: those that are labels most often. 0: all of the target's."""
    layout: Literal["vllm", "speculators"] = "vllm"
    """Whose checkpoint layout to write; vLLM serves both."""
    divergence: Divergence = field(default_factory=lambda: Divergence(name="lk_hybrid"))
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-4, max_grad_norm=0.5))
    loop: Loop = field(default_factory=lambda: Loop(steps=20000, sequence_length=2048))
    output: Path = Path("outputs/eagle3-llama8b")
    """Folder of the run: config, metrics, checkpoints, the exported draft, the report."""


PRESETS = {
    "demo": Config(
        target="tests/assets/tiny-target",
        head=eagle3.Config(aux_layer_ids=(2, 4, 7), num_steps=3),
        draft_vocab_size=2048,
        data=Data(source="stdlib", held_out=0.05, max_prompt_tokens=512),
        divergence=Divergence(name="forward_kl"),
        optim=Optim(lr=2e-3),
        loop=Loop(steps=64, batch_size=4, sequence_length=1024, eval_every=16, eval_batches=1, save_every=64),
        prove=Prove(num_speculative_tokens=3),
        output=Path("outputs/demo-heads/eagle3"),
        mixed_precision="bf16",
    )
}


def main(cfg: Config) -> None:
    # 1. what cannot fit the target
    shape = target_config(cfg.target)
    eagle3.aux_layers(cfg.head.aux_layer_ids, shape.num_hidden_layers)
    require_smaller(cfg.draft_vocab_size, shape.vocab_size)

    # 2. target, data and folder
    run = HeadRun(cfg, "eagle3", cfg.head.num_steps)
    draft_ids_W = frequent_ids(run.data.train.samples, cfg.draft_vocab_size, shape.vocab_size)

    # 3. the head
    def make() -> eagle3.Eagle3:
        head = eagle3.Eagle3(cfg.head, run.target, draft_ids_W)
        if cfg.init == "last_layer":
            head.init_from_layer(*run.last_layer())
        return head

    before = run.forecast(run.new(make))

    # 4. optimizer, `prepare` and the loop
    trained = run.train(make)

    # 5. proof: what is published is what is judged
    def export(head: eagle3.Eagle3, folder: Path) -> None:
        tokens = cfg.prove.num_speculative_tokens
        head.export(folder, torch.bfloat16, layout=cfg.layout, target_name=cfg.target, num_speculative_tokens=tokens)

    draft = run.publish(trained, export)
    run.prove(before, trained, draft, {"method": "eagle3", "model": str(draft.absolute())})


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
