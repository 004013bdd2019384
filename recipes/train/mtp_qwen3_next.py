"""Tune the MTP layer of a target, or train one from scratch; put it back, prove it in a real vLLM, and report.

$ redraft serve-features Qwen/Qwen3-Next-80B-A3B-Instruct       # its linear attention packs no documents: read a server
$ accelerate launch recipes/train/mtp_qwen3_next.py --signal.kind endpoint --signal.url http://127.0.0.1:8000
$ accelerate launch recipes/train/mtp_qwen3_next.py --target XiaomiMiMo/MiMo-7B-RL --init scratch
$ redraft mtp --preset demo                                     # the small target of tests/assets, on two CPU cores
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from redraft.distill.head_run import DEMO, HeadConfig, HeadRun, target_config
from redraft.distill.train.loop import Loop
from redraft.distill.train.optim import Optim
from redraft.heads.families import mtp
from redraft.heads.families.mtp_folder import as_mimo, stitch
from redraft.heads.families.mtp_layouts import detect_layout
from redraft.heads.files.checkpoint import refuse_quantised
from redraft.heads.files.folder import model_folder
from redraft.recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    target: str = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    """Model on your server, of a layout with MTP layers: MiMo, Qwen3-Next, Qwen3.5 or DeepSeek. A folder or a
    hub name."""
    as_mimo: bool = False
    """Rewrite a Llama target into the MiMo layout, which computes the same and has room for an MTP layer."""
    head: mtp.Config = field(default_factory=lambda: mtp.Config(num_steps=4))
    init: Literal["native", "last_layer", "scratch"] = "native"
    """Initial weights: the target's MTP layer (native), a copy of the target's last layer, or random (scratch)."""
    optim: Optim = field(default_factory=lambda: Optim(lr=2e-5, max_grad_norm=0.5))
    loop: Loop = field(default_factory=lambda: Loop(steps=5000, sequence_length=2048))
    output: Path = Path("outputs/mtp-qwen3-next")
    """Folder of the run. It receives the config, metrics, checkpoints, the target with the tuned layer, the report."""


PRESETS = {
    "demo": Config(
        **DEMO,
        as_mimo=True,
        head=mtp.Config(num_steps=3),
        init="last_layer",
        output=Path("outputs/demo-heads/mtp"),
    )
}


def main(cfg: Config) -> None:
    # 1. The target, the data, and the folder of the run.
    config = target_config(cfg.target)
    # The layer would be stored beside scales of other weights.
    refuse_quantised(config, f"an MTP layer for {cfg.target}", "give the folder of the weights before quantisation")
    if not cfg.as_mimo:
        detect_layout(config)  # refuses a target without MTP layers, before any work
    run = HeadRun(cfg, "mtp", cfg.head.num_steps, convert=as_mimo if cfg.as_mimo else None)
    folder = model_folder(run.target_name)

    # 2. The layer: continued, the target's, or new.
    if cfg.start_from:
        layer = run.start()
    else:
        layer = mtp.Mtp.load(folder, run.target) if cfg.init == "native" else mtp.Mtp(cfg.head, run.target)
        # A loaded layer has the options of the folder it came from: those of --head replace them.
        layer.config = cfg.head
        if cfg.init == "last_layer":
            layer.init_from_layer(*run.last_layer())
    before = run.forecast(layer)

    # 3. Training: optimizer, `prepare` and the loop (distill/train/).
    layer, cost = run.train(layer)

    # 4. The proof: publish the target with the layer in it, forecast and serve it, report.
    def export(out: Path) -> None:
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in layer.checkpoint_tensors().items()}
        # One MTP layer is in the weights, so the config must say 1, however many the target came with.
        stitch(folder, tensors, out, {layer.layout.count_key: 1, "redraft": layer.record()})

    draft = run.publish(export)
    run.prove(before, draft, cost, {"method": "mtp"}, served=draft)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
