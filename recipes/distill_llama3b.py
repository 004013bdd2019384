"""Distil a standalone draft from its target, prove it in a real vLLM, and report.

$ accelerate launch recipes/distill_llama3b.py                  # Llama-3.1-70B-Instruct -> Llama-3.2-3B-Instruct
$ accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/distill_llama3b.py --loop.steps 5000
$ python recipes/distill_llama3b.py --preset demo               # the small target of tests/assets, on two CPU cores
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from distill.loop import Loop, Trained, make_accelerator, train
from distill.losses import Divergence
from distill.prove import Judge, Prove, export_draft, leave_gpu, prove_in_engine, report
from distill.ranks import leave
from distill.run import Run
from distill.setup import Data, Signal, live_signal, load_data, load_target, target_signal
from distill.train import Distillation, Optim
from heads.standalone import Init, StandaloneDraft, make_draft
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str = "meta-llama/Llama-3.1-70B-Instruct"
    """Folder or hub name of the model whose server is to be sped up."""
    draft: Init = field(default_factory=lambda: Init(checkpoint="meta-llama/Llama-3.2-3B-Instruct"))
    data: Data = field(default_factory=Data)
    signal: Signal = field(default_factory=Signal)
    divergence: Divergence = field(default_factory=lambda: Divergence(name="lk_hybrid"))
    optim: Optim = field(default_factory=Optim)
    loop: Loop = field(default_factory=Loop)
    prove: Prove = field(default_factory=Prove)
    output: Path = Path("outputs/distill-llama3b")
    """Folder of the run: config, metrics, checkpoints, the exported draft, the report."""
    resume: bool = False
    """Go on with the run in `output`."""
    overwrite: bool = False
    """Replace the run in `output`."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Unset: what the accelerate config says."""
    gradient_checkpointing: bool = False
    """Slower by a third, far less memory."""
    wandb: str | None = None
    """Project to log to; offline where nobody is logged in."""


PRESETS = {
    "demo": Config(
        target="tests/assets/tiny-target",
        draft=Init(layers=(0, 6)),
        data=Data(source="stdlib", held_out=0.05, max_prompt_tokens=512),
        divergence=Divergence(name="forward_kl"),
        optim=Optim(lr=3e-3),
        loop=Loop(steps=400, batch_size=2, sequence_length=1024, eval_every=100, eval_batches=8, save_every=200),
        prove=Prove(ce_baseline=True),
        output=Path("outputs/demo"),
        mixed_precision="bf16",
    )
}


def main(cfg: Config) -> None:
    started = time.perf_counter()
    accelerator = make_accelerator(cfg.optim.accumulation, cfg.mixed_precision, cfg.wandb)
    run = Run.open(cfg.output, asdict(cfg), accelerator, resume=cfg.resume, overwrite=cfg.overwrite)

    # 1. models
    target, tokenizer = load_target(cfg.target, cfg.signal, accelerator.device)
    untrained = make_draft(cfg.draft, target, tokenizer, cfg.loop.seed)
    print(f"draft: begins as {cfg.draft}")

    # 2. data, and what the target says about it
    data = load_data(cfg.data, cfg.target, tokenizer, cfg.loop)
    signal = target_signal(cfg.signal, target, cfg.target, data, run.folder, accelerator)
    is_main = accelerator.is_main_process
    judge = Judge(cfg.prove, cfg.target, target, live_signal(cfg.signal, target), data, run) if is_main else None
    before = judge.forecast(untrained) if judge else None
    leave_gpu(untrained)

    # 3. and 4. optimizer, `prepare` and the loop
    def distil(divergence: Divergence, run: Run) -> tuple[Distillation, Trained]:
        draft = make_draft(cfg.draft, target, tokenizer, cfg.loop.seed)
        draft.set_gradient_checkpointing(cfg.gradient_checkpointing)
        distillation = Distillation(draft, signal, divergence, cfg.optim, cfg.loop.steps, accelerator)
        return distillation, train(distillation, data, run, cfg.loop, cfg.prove.num_speculative_tokens)

    ce_baseline = None
    if cfg.prove.ce_baseline:
        baseline, _ = distil(Divergence(name="cross_entropy"), run.beside("ce-baseline"))
        weights = baseline.weights()
        baseline.close()
        if judge:
            draft = make_draft(cfg.draft, target, tokenizer, cfg.loop.seed)
            draft.load_state_dict(weights)
            ce_baseline = judge.forecast(draft)
            leave_gpu(draft)
    distillation, trained = distil(cfg.divergence, run)

    # 5. proof: what is published is what is judged
    def write(weights: Mapping[str, Tensor], folder: Path) -> None:
        lm = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        untrained.export(folder, tokenizer, dtype=torch.bfloat16, weights=lm)

    folder = export_draft(distillation, run, data, cfg.target, write)
    distillation.close()
    if judge and before:
        published = StandaloneDraft.load(folder, torch.float32)
        after = judge.forecast(published)
        leave_gpu(target, published)
        served = {"method": "draft_model", "model": str(folder.absolute())}
        engine = prove_in_engine(cfg.prove, cfg.target, served, data.prompts, run.folder) if cfg.prove.engine else None
        page = report(
            run,
            target=cfg.target,
            before=before,
            after=after,
            ce_baseline=ce_baseline,
            engine=engine,
            trained=trained,
            started=started,
        )
        print(f"draft: {folder}\nreport: {page}")
    leave(accelerator)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
