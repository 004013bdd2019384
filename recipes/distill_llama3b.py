"""Train a standalone draft model on its target's predictions, prove it in a real vLLM, and report.

On two CPU cores, the small target of tests/assets:
$ redraft distill --preset demo

On one GPU of 80 GB:
$ redraft distill --target Qwen/Qwen3-8B --draft.checkpoint Qwen/Qwen3-0.6B --loop.batch-size 2

On eight of them the default, Llama-3.1-70B-Instruct -> Llama-3.2-3B-Instruct, which does not fit one:
$ accelerate launch --config_file recipes/accelerate/zero2.yaml \\
  recipes/distill_llama3b.py --signal.shard --prove.no-engine --loop.batch-size 2 --gradient-checkpointing
"""

from __future__ import annotations

import functools
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from redraft.distill.count_command import count_command
from redraft.distill.fit import require_room
from redraft.distill.inputs import (
    Data,
    Signal,
    live_signal,
    load_data,
    load_target,
    require_no_engine,
    target_signal,
)
from redraft.distill.loss.divergences import Divergence
from redraft.distill.plan.held import count_standalone
from redraft.distill.prove import Forecaster, Prove, leave_gpu, prove_in_engine, publish_draft, report
from redraft.distill.signal.sharded import leading
from redraft.distill.train.loop import Loop, TrainingCost, make_accelerator, train
from redraft.distill.train.optim import Optim
from redraft.distill.train.ranks import leave
from redraft.distill.train.run import Run
from redraft.distill.train.step import Distillation, require_whole_matrices
from redraft.eval.engine.target_dtype import TargetDtype
from redraft.eval.forecast.greedy import Forecast
from redraft.heads.families.standalone import Init, StandaloneDraft, make_draft
from redraft.recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str = "meta-llama/Llama-3.1-70B-Instruct"
    """Model on your server, for the draft to speed up: a folder or a hub name."""
    target_dtype: TargetDtype | None = None
    """Type in which the target computes, here and in the engine of the proof. By default as stored on a GPU. On a CPU
    bfloat16 if it is stored so and the CPU has instructions for bfloat16, else float32, in which outputs with and
    without a draft are compared token for token."""
    draft: Init = field(default_factory=lambda: Init(checkpoint="meta-llama/Llama-3.2-3B-Instruct"))
    data: Data = field(default_factory=Data)
    signal: Signal = field(default_factory=Signal)
    divergence: Divergence = field(default_factory=lambda: Divergence(name="lk_hybrid"))
    optim: Optim = field(default_factory=Optim)
    loop: Loop = field(default_factory=Loop)
    prove: Prove = field(default_factory=Prove)
    output: Path = Path("outputs/distill-llama3b")
    """Folder of the run. It receives the config, metrics, checkpoints, the exported draft and the report."""
    resume: bool = False
    """Continue the run in --output from the newest checkpoint."""
    overwrite: bool = False
    """Delete the run in --output and start again."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Precision of training; by default as `accelerate config` says. bf16 keeps the weights in float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third slower, with far less memory."""
    wandb: str | None = None
    """Weights & Biases project to log to; by default none. Without a login the log is kept offline."""


PRESETS = {
    "demo": Config(
        target="tests/assets/tiny-target",
        target_dtype="float32",  # to compare outputs token for token on every CPU
        draft=Init(layers=(0, 6)),
        data=Data(source="stdlib", held_out=0.05, max_prompt_tokens=512),
        divergence=Divergence(name="forward_kl"),
        optim=Optim(lr=3e-3),
        loop=Loop(steps=400, batch_size=2, sequence_length=1024, eval_every=100, eval_batches=8, save_every=200),
        prove=Prove(ce_baseline=True, speed_rounds=8),
        output=Path("outputs/demo-tiny"),
        mixed_precision="bf16",
    )
}


def main(cfg: Config) -> None:
    started = time.perf_counter()
    accelerator = make_accelerator(cfg.optim.accumulation, cfg.mixed_precision, cfg.wandb)
    # Refuse before `Run.open`: a run too large for the machine leaves no folder to overwrite.
    require_whole_matrices(cfg.optim, accelerator)
    require_no_engine(cfg.signal, engine=cfg.prove.engine)
    size = functools.partial(count_standalone, cfg.draft)
    tell = functools.partial(count_command, "standalone", cfg, accelerator)
    require_room(cfg.target, cfg.signal, accelerator, size, cfg.target_dtype, optimizer=cfg.optim.name, tell=tell)
    run = Run.open(cfg.output, asdict(cfg), accelerator, resume=cfg.resume, overwrite=cfg.overwrite)

    # 1. Models.
    target, tokenizer = load_target(cfg.target, cfg.signal, accelerator.device, cfg.target_dtype)
    untrained = make_draft(cfg.draft, target, tokenizer, cfg.loop.seed)
    print(f"draft: begins as {cfg.draft}")

    # 2. Data, and the source of the target's distribution on it.
    data = load_data(cfg.data, cfg.target, tokenizer, cfg.loop, run)
    signal = target_signal(cfg.signal, target, cfg.target, data, run.folder, accelerator)

    # 3. Forecast of the untrained draft. Only the main process has a forecaster.
    forecaster, before = None, None
    with leading(target) as leads:
        if leads:
            forecaster = Forecaster(cfg.prove, cfg.target, target, live_signal(cfg.signal, target), data, run)
            before = forecaster.forecast(untrained)
    # On the CPU, not deleted: step 5 exports the trained weights through this module.
    leave_gpu(untrained)

    # 4. Optimizer, `prepare` and the loop; for the baseline first, if there is one.
    def distil(divergence: Divergence, run: Run) -> tuple[dict[str, torch.Tensor], TrainingCost]:
        # A new draft for each training, from the same seed: the baseline differs in the divergence only.
        draft = make_draft(cfg.draft, target, tokenizer, cfg.loop.seed)
        draft.set_gradient_checkpointing(cfg.gradient_checkpointing)
        distillation = Distillation(draft, signal, divergence, cfg.optim, cfg.loop.steps, accelerator)
        cost = train(distillation, data, run, cfg.loop, cfg.prove.num_speculative_tokens)
        weights = distillation.weights()
        # Before the next training: the accelerator would save this one into the checkpoints of the next.
        distillation.close()
        return weights, cost

    ce_baseline = None
    if cfg.prove.ce_baseline:
        weights, _ = distil(Divergence(name="cross_entropy"), run.beside("ce-baseline"))
        with leading(target):
            if forecaster:
                draft = make_draft(cfg.draft, target, tokenizer, cfg.loop.seed)
                draft.load_state_dict(weights)
                ce_baseline = forecaster.forecast(draft)
                leave_gpu(draft)
    weights, cost = distil(cfg.divergence, run)

    # 5. The proof: publish the draft with its forecast, serve it in vLLM, report.
    def write(folder: Path) -> None:
        untrained.export(folder, torch.bfloat16, tokenizer=tokenizer, weights=weights)

    def forecast(folder: Path) -> Forecast:
        assert forecaster is not None, "the main process"
        published = StandaloneDraft.load(folder, dtype=torch.float32)
        after = forecaster.forecast(published)
        leave_gpu(published)
        return after

    folder, after = publish_draft(cfg.prove, run, data, cfg.target, write, forecast, model=target)
    # Forecasts exist on the main process alone. All ranks meet again in `leave`.
    if before and after:
        if cfg.prove.engine:
            leave_gpu(target)
        served = {"method": "draft_model", "model": str(folder.absolute())}
        engine = (
            prove_in_engine(cfg.prove, cfg.target, served, data.prompts, run.folder, dtype=cfg.target_dtype)
            if cfg.prove.engine
            else None
        )
        page = report(
            run,
            target=cfg.target,
            before=before,
            after=after,
            ce_baseline=ce_baseline,
            engine=engine,
            cost=cost,
            started=started,
        )
        print(f"draft: {folder}\nreport: {page}")
    leave(accelerator)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
