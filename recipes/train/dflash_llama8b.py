"""Train a DFlash head, prove it in a real vLLM, and report. The head drafts a whole block of tokens in one pass, from
the states of several target layers.

$ accelerate launch recipes/train/dflash_llama8b.py                   # for Llama-3.1-8B-Instruct
$ accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train/dflash_llama8b.py --loop.steps 20000
$ redraft dflash --preset demo                                  # the small target of tests/assets, on two CPU cores
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from redraft.distill.data.vocabulary import frequent_ids
from redraft.distill.head_run import DEMO, HeadRun, ParallelConfig, target_config
from redraft.heads.families import dflash
from redraft.recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(ParallelConfig):
    head: dflash.Config = field(default_factory=dflash.Config)
    layout: Literal["vllm", "speculators"] = "vllm"
    """Format of the exported checkpoint: vLLM's, or that of the library `speculators`. vLLM reads both."""
    output: Path = Path("outputs/dflash-llama8b")
    """Folder of the run. It receives the config, metrics, checkpoints, the exported draft and the report."""


PRESETS = {
    "demo": Config(
        **DEMO,
        head=dflash.Config(aux_layer_ids=(2, 4, 7), num_layers=2, block_size=4, num_anchors=256, gamma=4.0),
        draft_vocab_size=2048,
        output=Path("outputs/demo-heads/dflash"),
    )
}


def main(cfg: Config) -> None:
    # 1. Refuse flags that do not fit the target, before any work.
    shape = target_config(cfg.target)
    cfg.check(cfg.head, shape)
    dflash.check_options(cfg.head, shape.vocab_size)

    # 2. The target, the data, and the folder of the run.
    run = HeadRun(cfg, "dflash", cfg.head.num_tokens)
    draft_ids_W = frequent_ids(run.data.train.samples, cfg.draft_vocab_size, shape.vocab_size)

    # 3. The head: new, or continued.
    if cfg.start_from:
        head = run.start()
    else:
        mask = run.mask_token(cfg.head.mask_token_id)
        head = dflash.DFlash(replace(cfg.head, mask_token_id=mask), run.target, draft_ids_W)
        if cfg.init == "last_layers":
            run.start_as_layers(head, cfg.head.num_layers)
        else:
            run.say_start("random weights")
    before = run.forecast(head)

    # 4. Training: optimizer, `prepare` and the loop (distill/train/).
    head, cost = run.train(head)

    # 5. The proof: publish the head, load it back, forecast it, serve it in vLLM, report.
    def export(folder: Path) -> None:
        tokens = cfg.prove.num_speculative_tokens
        head.export(folder, torch.bfloat16, layout=cfg.layout, target_name=cfg.target, num_speculative_tokens=tokens)

    draft = run.publish(export)
    run.prove(before, draft, cost, {"method": "dflash", "model": str(draft.absolute())})


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
