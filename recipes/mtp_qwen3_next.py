"""Tune a target's own MTP layer, or train one from scratch, put it back, prove it in a real vLLM, and report.

$ redraft serve-features Qwen/Qwen3-Next-80B-A3B-Instruct       # its linear attention packs no documents: read a server
$ accelerate launch recipes/mtp_qwen3_next.py --signal.kind endpoint --signal.url http://127.0.0.1:8000
$ accelerate launch recipes/mtp_qwen3_next.py --target XiaomiMiMo/MiMo-7B-RL --init scratch
$ redraft mtp --preset demo                                     # the small target of tests/assets, on two CPU cores
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
from heads import mtp
from heads.checkpoint import model_folder
from heads.mtp_folder import as_mimo, stitch
from heads.mtp_layouts import layout_of
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    target: str = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    """Folder or hub name of a target of a layout with MTP layers: MiMo, Qwen3-Next, Qwen3.5, DeepSeek."""
    as_mimo: bool = False
    """Give a Llama target the MiMo layout, which computes the same and has room for an MTP layer."""
    head: mtp.Config = field(default_factory=lambda: mtp.Config(num_steps=4))
    init: Literal["native", "last_layer", "scratch"] = "native"
    """Begin as the target's own MTP layer, as its last layer, or at random."""
    optim: Optim = field(default_factory=lambda: Optim(lr=2e-5, max_grad_norm=0.5))
    loop: Loop = field(default_factory=lambda: Loop(steps=5000, sequence_length=2048))
    output: Path = Path("outputs/mtp-qwen3-next")
    """Folder of the run: config, metrics, checkpoints, the target with its tuned layer, the report."""


PRESETS = {
    "demo": Config(
        target="tests/assets/tiny-target",
        as_mimo=True,
        head=mtp.Config(num_steps=3),
        init="last_layer",
        data=Data(source="stdlib", held_out=0.05, max_prompt_tokens=512),
        divergence=Divergence(name="forward_kl"),
        optim=Optim(lr=2e-3),
        loop=Loop(steps=64, batch_size=4, sequence_length=1024, eval_every=16, eval_batches=1, save_every=64),
        prove=Prove(num_speculative_tokens=3),
        output=Path("outputs/demo-heads/mtp"),
        mixed_precision="bf16",
    )
}


def main(cfg: Config) -> None:
    # 1. target, data and folder
    if not cfg.as_mimo:
        layout_of(target_config(cfg.target))  # refuses what has no MTP layers before any work
    run = HeadRun(cfg, "mtp", cfg.head.num_steps, convert=as_mimo if cfg.as_mimo else None)
    folder = model_folder(run.target_name)

    # 2. the layer
    def make() -> mtp.Mtp:
        layer = mtp.Mtp.load(folder, run.target) if cfg.init == "native" else mtp.Mtp(cfg.head, run.target)
        layer.config = cfg.head
        if cfg.init == "last_layer":
            layer.init_from_layer(*run.last_layer())
        return layer

    before = run.forecast(run.new(make))

    # 3. optimizer, `prepare` and the loop
    trained = run.train(make)

    # 4. proof: the target with the layer in it is what is published, judged and served
    def export(layer: mtp.Mtp, out: Path) -> None:
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in layer.checkpoint_tensors().items()}
        stitch(folder, tensors, out, {layer.layout.count_key: 1, "redraft": layer.record()})

    draft = run.publish(trained, export)
    run.prove(before, trained, draft, {"method": "mtp"}, served=draft)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
