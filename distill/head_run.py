"""One run of a head's recipe: what is the same whatever the head.

HeadConfig   the flags that every head's recipe has
HeadRun      target, data and folder of a run;  forecast -> train -> publish -> prove, in this order
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from distill.loop import Loop, Trained, make_accelerator, train
from distill.losses import Divergence
from distill.prove import (
    EngineProof,
    Judge,
    Prove,
    check_num_tokens,
    export_draft,
    leave_gpu,
    prove_by_reference,
    prove_in_engine,
    report,
)
from distill.ranks import leave
from distill.run import Run
from distill.setup import Data, Signal, live_signal, load_data, load_target, target_signal
from distill.train import Distillation, Optim
from eval.forecast import Forecast
from heads.artifact import publish
from heads.checkpoint import check_model_folder, model_folder
from heads.families import family, require_head
from heads.standalone import StandaloneDraft
from heads.target import Target


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    target: str = "meta-llama/Llama-3.1-8B-Instruct"
    """Folder or hub name of the model whose server is to be sped up."""
    start_from: Path | None = None
    """Begin as this exported head of the same family and target, and with its options in place of `head`."""
    data: Data = field(default_factory=Data)
    signal: Signal = field(default_factory=Signal)
    divergence: Divergence = field(default_factory=Divergence)
    optim: Optim = field(default_factory=Optim)
    loop: Loop = field(default_factory=Loop)
    prove: Prove = field(default_factory=Prove)
    output: Path = Path("outputs/head")
    """Folder of the run: config, metrics, checkpoints, the exported draft, the report."""
    resume: bool = False
    """Go on with the run in `output`."""
    overwrite: bool = False
    """Replace the run in `output`."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Unset: what the accelerate config says."""
    wandb: str | None = None
    """Project to log to; offline where nobody is logged in."""


def target_config(name: str) -> Any:
    """The config of a target's text model, without its weights.

    Raises: FileNotFoundError or ValueError where there is no such model.
    """
    check_model_folder(name)
    return AutoConfig.from_pretrained(name).get_text_config()


MakeHead = Callable[[], nn.Module]
Export = Callable[[Any, Path], None]
"""Writes a head into a folder as the engine loads it."""


@dataclass(frozen=True, kw_only=True)
class TrainedHead:
    make: MakeHead
    start: Path | None
    distillation: Distillation
    cost: Trained


class HeadRun:
    """Target, data and folder of a run, and the stations that every head passes."""

    def __init__(
        self, cfg: HeadConfig, name: str, num_steps: int, convert: Callable[[Path, Path], None] | None = None
    ) -> None:
        """`name`: the family; `num_steps`: the draft tokens that the head learns; `convert`: puts the target, given
        its folder and one to write, into a layout that has room for the head.

        Raises: ValueError, FileNotFoundError where the flags do not fit the target, before any work.
        """
        check_num_tokens(cfg.prove.num_speculative_tokens, num_steps)
        if cfg.loop.on_policy and cfg.signal.kind != "model":
            raise ValueError("only a target in this process writes text to learn on: --signal.kind model")
        if cfg.start_from is not None:
            require_head(cfg.start_from, name, model_folder(cfg.target))
        self.cfg, self.family, self.started = cfg, family(name), time.perf_counter()
        self.accelerator = make_accelerator(cfg.optim.accumulation, cfg.mixed_precision, cfg.wandb)
        self.run = Run.open(cfg.output, asdict(cfg), self.accelerator, resume=cfg.resume, overwrite=cfg.overwrite)
        self.target_name = cfg.target if convert is None else str(self._converted(convert))
        self.model, self.tokenizer = load_target(self.target_name, cfg.signal, self.accelerator.device)
        self.target = Target.of(self.model)
        self.data = load_data(cfg.data, cfg.target, self.tokenizer, cfg.loop)

    def _converted(self, convert: Callable[[Path, Path], None]) -> Path:
        folder = self.run.folder / "target"
        if self.accelerator.is_main_process and not folder.exists():
            publish(folder, lambda partial: convert(model_folder(self.cfg.target), partial), {"from": self.cfg.target})
        self.accelerator.wait_for_everyone()
        return folder

    def new(self, make: MakeHead, start: Path | None = None) -> Any:
        """An untrained head, the same one at every call; or an exported one: `start`, or the flags' `start_from`."""
        torch.manual_seed(self.cfg.loop.seed)
        start = start or self.cfg.start_from
        return self.family.head.load(start, self.target) if start else make()

    def last_layer(self) -> tuple[nn.Module, nn.Module]:
        """The target's last decoder layer and its final norm, for a head to begin as.

        Raises: ValueError where their weights are not here.
        """
        layer, norm = self.model.base_model.layers[-1], self.model.base_model.norm
        if next(layer.parameters()).is_meta:
            raise ValueError("the target's layers stay on its server: begin at random with --init random")
        return layer, norm

    @functools.cached_property
    def judge(self) -> Judge:
        signal = live_signal(self.cfg.signal, self.model, ())
        return Judge(self.cfg.prove, self.cfg.target, self.model, signal, self.data, self.run)

    def forecast(self, head: Any) -> Forecast | None:
        """What an engine would accept of the head, in the type that it serves it in; None but on the main process."""
        if not self.accelerator.is_main_process:
            return None
        signal = live_signal(self.cfg.signal, self.model, head.aux_layer_ids)
        return self.judge.forecast(head.to(self.target.head_VD.dtype), signal)

    def train(
        self,
        make: MakeHead,
        *,
        divergence: Divergence | None = None,
        loop: Loop | None = None,
        stage: str | None = None,
        start: Path | None = None,
    ) -> TrainedHead:
        """A head trained as the flags say; in a `stage` before that by another divergence and loop, in a folder of its
        own; from `start`, what an earlier stage published."""
        cfg, loop, head = self.cfg, loop or self.cfg.loop, self.new(make, start)
        run = self.run.beside(stage) if stage else self.run
        signal = target_signal(
            cfg.signal, self.model, self.target_name, self.data, run.folder, self.accelerator, head.aux_layer_ids
        )
        distillation = Distillation(head, signal, divergence or cfg.divergence, cfg.optim, loop.steps, self.accelerator)
        writer = StandaloneDraft(self.model) if loop.on_policy else None
        cost = train(distillation, self.data, run, loop, cfg.prove.num_speculative_tokens, writer)
        return TrainedHead(make=make, start=start, distillation=distillation, cost=cost)

    def publish(self, trained: TrainedHead, export: Export, name: str = "draft") -> Path:
        """The published folder `name` of the run, and the accelerator free for another stage."""

        def write(weights: Mapping[str, Tensor], folder: Path) -> None:
            head = self.new(trained.make, trained.start)  # whole, where the trained one is sharded
            head.load_state_dict(weights)
            export(head, folder)

        folder = export_draft(trained.distillation, self.run, self.data, self.cfg.target, write, name)
        trained.distillation.close()
        return folder

    def prove(
        self,
        before: Forecast | None,
        trained: TrainedHead,
        draft: Path,
        speculative: Mapping[str, Any] | None,
        served: Path | None = None,
    ) -> None:
        """Report what the published draft is worth; `speculative` and `served` as for `prove_in_engine`, None where
        the reference decoder stands in for it."""
        cfg = self.cfg
        if before is not None:
            head = self.family.head.load(draft, self.target)
            after = self.forecast(head)
            assert after is not None, "the main process"
            engine = self._proof(head, speculative, served) if cfg.prove.engine else None
            page = report(
                self.run,
                target=cfg.target,
                before=before,
                after=after,
                ce_baseline=None,
                engine=engine,
                trained=trained.cost,
                started=self.started,
            )
            print(f"draft: {draft}\nreport: {page}")
        leave(self.accelerator)

    def _proof(self, head: Any, speculative: Mapping[str, Any] | None, served: Path | None) -> EngineProof:
        cfg = self.cfg.prove
        if speculative is None:
            return prove_by_reference(cfg, self.model, head, self.judge.continuations)
        leave_gpu(self.model, head)
        return prove_in_engine(cfg, self.cfg.target, speculative, self.data.prompts, self.run.folder, served)
