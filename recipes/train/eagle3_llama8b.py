"""Train an EAGLE-3 head, prove it in a real vLLM, and report. In training, the head drafts several steps from features
of the steps before, as it will in the server (training-time test).

$ accelerate launch recipes/train/eagle3_llama8b.py                   # for Llama-3.1-8B-Instruct
$ accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train/eagle3_llama8b.py --loop.steps 20000
$ redraft eagle3 --preset demo                                  # the small target of tests/assets, on two CPU cores
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from redraft.distill.data.vocabulary import frequent_ids, require_smaller
from redraft.distill.head_run import DEMO, HeadConfig, HeadRun, target_config
from redraft.distill.loss.divergences import Divergence
from redraft.distill.train.loop import Loop
from redraft.distill.train.optim import Optim
from redraft.heads.families import eagle3
from redraft.heads.families.eagle3_start import start_by_least_squares
from redraft.heads.target import aux_layers
from redraft.recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(HeadConfig):
    head: eagle3.Config = field(default_factory=eagle3.Config)
    init: Literal["last_layer", "least_squares", "random"] = "last_layer"
    """Initial weights. `last_layer`: a copy of the target's last layer. `least_squares`: the best linear prediction of
    the target's next state, which drafts before the first step; it needs --head.fc-norm. `random`: random ones. If the
    target is in shards or on servers, the layer and the norms are read from its files."""
    init_tokens: int = 65536
    """Tokens that --init least_squares is fitted to: several times the hidden size times the number of target layers
    that are read. For a target of 8B the fit takes about 10 GB of the device's memory, before training."""
    draft_vocab_size: int = 32000
    """Size of the head's vocabulary: the tokens most frequent as labels. A smaller vocabulary makes a
    draft step faster; 0 keeps all of the target's."""
    layout: Literal["vllm", "speculators"] = "vllm"
    """Format of the exported checkpoint: vLLM's, or that of the library `speculators`. vLLM serves both."""
    divergence: Divergence = field(default_factory=lambda: Divergence(name="lk_hybrid"))
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-4, max_grad_norm=0.5))
    loop: Loop = field(default_factory=lambda: Loop(steps=20000, sequence_length=2048))
    output: Path = Path("outputs/eagle3-llama8b")
    """Folder of the run. It receives the config, metrics, checkpoints, the exported draft and the report."""

    def __post_init__(self) -> None:
        if self.init_tokens < 1:
            raise ValueError(f"--init-tokens is {self.init_tokens}: it must be at least 1")
        if self.init != "least_squares":
            return
        if not self.head.fc_norm:
            raise ValueError("--init least_squares needs --head.fc-norm: without it the head trains badly from there")
        if self.head.norm_before_residual:
            raise ValueError("--init least_squares is not for heads with --head.norm-before-residual")


PRESETS = {
    "demo": Config(
        **DEMO,
        head=eagle3.Config(aux_layer_ids=(2, 4, 7), num_steps=3),
        draft_vocab_size=2048,
        output=Path("outputs/demo-heads/eagle3"),
    )
}


def main(cfg: Config) -> None:
    # 1. Refuse flags that do not fit the target, before any work.
    shape = target_config(cfg.target)
    aux_layers(cfg.head.aux_layer_ids, shape.num_hidden_layers)
    require_smaller(cfg.draft_vocab_size, shape.vocab_size)

    # 2. The target, the data, and the folder of the run.
    run = HeadRun(cfg, "eagle3", cfg.head.num_steps)
    # Counted on the training part alone: held-out text must not choose the vocabulary it is judged with.
    draft_ids_W = frequent_ids(run.data.train.samples, cfg.draft_vocab_size, shape.vocab_size)

    # 3. The head: new, or continued.
    head = run.start() if cfg.start_from else make_head(run, cfg, draft_ids_W)
    before = run.forecast(head)

    # 4. Training: optimizer, `prepare` and the loop (distill/train/).
    head, cost = run.train(head)

    # 5. The proof: publish the head, load it back, forecast it, serve it in vLLM, report.
    def export(folder: Path) -> None:
        tokens = cfg.prove.num_speculative_tokens
        head.export(folder, torch.bfloat16, layout=cfg.layout, target_name=cfg.target, num_speculative_tokens=tokens)

    draft = run.publish(export)
    run.prove(before, draft, cost, {"method": "eagle3", "model": str(draft.absolute())})


def make_head(run: HeadRun, cfg: Config, draft_ids_W: Tensor | None) -> eagle3.Eagle3:
    """An untrained head with the initial weights that the flags choose."""
    head = eagle3.Eagle3(cfg.head, run.target, draft_ids_W)
    if cfg.init == "random":
        run.say_start("random weights")
    elif cfg.init == "last_layer":
        run.start_as_layers(head, 1)
    else:
        scales = run.stream_scales(head.aux_layer_ids)
        run.say_start(f"least squares on up to {cfg.init_tokens:,} tokens")
        # The final norm alone: all else but the output head is replaced.
        head.init_from_layer(nn.Module(), run.model.base_model.norm)
        head.to(run.accelerator.device)
        start_by_least_squares(head, run.last_signals(head.aux_layer_ids, cfg.init_tokens), scales)
        # Each rank has solved for itself, and other hardware may give other signs.
        run.share(head)
    return head


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
