"""One training of a draft, of any family.

    refuse ─► open ─► start ─► forecast ─► train ─► publish ─► prove
    flags     target   weights   of the      loop     folder     a real vLLM
    memory    data     (start)   start                forecast   report
    folder

The family's row in `heads.catalog` and its module say what differs: initial weights, defaults,
export layouts.
"""

import copy
import functools
import itertools
import shlex
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from redraft.distill.data.vocabulary import choose_size
from redraft.distill.launch.ranks import leave
from redraft.distill.loss.choice import Divergence
from redraft.distill.plan.held import count_head, count_standalone, standalone_config
from redraft.distill.plan.memory_check import require_room
from redraft.distill.run.inputs import (
    live_signal,
    load_data,
    load_target,
    require_no_engine,
    target_signal,
)
from redraft.distill.run.proof import (
    EngineProof,
    Forecaster,
    check_num_tokens,
    describe_origin,
    leave_gpu,
    prove_in_engine,
    report,
    store,
)
from redraft.distill.run.start import start
from redraft.distill.signal.apart import padding_factor
from redraft.distill.signal.sharded import leading
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.loop import TrainingCost, make_accelerator, train
from redraft.distill.train.row_ranks import require_shares
from redraft.distill.train.run_config import HeadConfig, Loop, StandaloneConfig, make_config
from redraft.distill.train.run_folder import RunFolder
from redraft.distill.train.step import Distillation, require_whole_matrices
from redraft.engine.hardware import Machine, this_machine
from redraft.engine.head_size import require_draft_heads
from redraft.engine.server import require_runner
from redraft.engine.target_dtype import default_target_dtype
from redraft.eval.forecast.greedy import Forecast, SignalFunction
from redraft.files.artifact import publish, publishing
from redraft.files.checkpoint import model_class, refuse_quantised
from redraft.files.folder import check_model_folder, fetch_model, fingerprint, read_config
from redraft.files.served_target import require_aux, require_positions
from redraft.files.target_folder import TargetFolder
from redraft.files.windows import View, require_speculators, target_window, trained_views
from redraft.heads.catalog import require_head
from redraft.heads.families.mtp_folder import as_mimo, stitch
from redraft.heads.families.mtp_layouts import detect_layout
from redraft.heads.family import Family, Training
from redraft.heads.nn.causal_lm import decoder_layers, final_norm, require_shared_passes
from redraft.heads.nn.layers import LlamaShape
from redraft.heads.nn.masks import check_mask_token
from redraft.heads.options import LayerSizes, Windows
from redraft.heads.provenance import read_provenance
from redraft.heads.target import Target, aux_layers

Config = HeadConfig[Any] | StandaloneConfig


def run(family: Family, cfg: Config, machine: Machine | None = None) -> None:
    """Train a draft of a family, publish it, prove it and write the report.

    `machine` is this machine by default. A refused run leaves nothing behind.

    Raises:
        ValueError, OSError: the flags do not fit each other, the target or the machine.
    """
    started_s = time.perf_counter()
    training = Run(family, cfg, machine)
    draft = start(training)
    training.folder.begin()
    before = training.forecast(draft)
    baseline = training.train_baseline(draft)
    trained, cost = training.train(draft, cfg.divergence, cfg.loop)
    folder = training.publish(trained)
    training.prove(folder, before, baseline, cost, started_s)


class Run:
    """The opened target, data and folder of a training run, and the steps after the start."""

    def __init__(self, family: Family, cfg: Config, machine: Machine | None = None) -> None:
        """Refuse settings that cannot work, then open the target, the data and the folder.

        Torch's random state is seeded at the end, so that a draft made next starts with the same
        weights in every run. Raises the same errors as `run`.
        """
        if isinstance(cfg, HeadConfig) and cfg.start_from is not None:
            cfg = replace(cfg, start_from=fetch_model(cfg.start_from))  # a hub name, or a folder
        self.family, self.cfg = family, cfg
        self.forecasts: dict[Path, Forecast] = {}
        # 1. Flags against each other and against the target, before anything is joined, written or
        #    loaded.
        self.opened = refuse(family, cfg)
        self.shape = self.opened.text_config
        # 2. The ranks, the memory, the folder: a run that is too large creates none.
        self.accelerator = make_accelerator(
            cfg.optim.accumulation, cfg.mixed_precision, cfg.wandb, machine
        )
        dtype = cfg.target_dtype or default_target_dtype(
            self.opened.folder, on_cpu=self.accelerator.device.type == "cpu", machine=machine
        )
        self.opened = self.opened.in_dtype(dtype)
        self._require_attention(machine or this_machine())
        require_whole_matrices(cfg.optim, self.accelerator)
        require_shares(family, cfg.loop, cfg.signal, self.accelerator.num_processes)
        self._require_room(machine)
        self.folder = RunFolder.open(
            cfg.output, asdict(cfg), self.accelerator, overwrite=cfg.overwrite
        )
        # 3. The target, perhaps rewritten, and the data.
        rewritten = self._rewrite_target() if self._rewrites else None
        self.teacher = (
            replace(self.opened, name=str(rewritten), folder=rewritten)
            if rewritten
            else self.opened
        )
        self.model = load_target(self.teacher, cfg.signal, self.accelerator.device)
        self._require_parts()
        self.target = Target.from_model(self.model)
        self.data = load_data(cfg.data, self.opened, cfg.loop, self.folder, is_head=family.is_head)
        source = cfg.start_from if isinstance(cfg, HeadConfig) else Path(str(cfg.draft))
        begins = fingerprint(source) if source and source.is_dir() else ""
        self.inputs = {"target": self.opened.fingerprint, "data": self.data.hash, "start": begins}
        self.folder.on_main(lambda: self.folder.confirm(self.inputs))
        torch.manual_seed(cfg.loop.seed)

    @property
    def _rewrites(self) -> bool:
        """Whether the target is rewritten into a layout with room for the head."""
        return isinstance(self.cfg, HeadConfig) and getattr(self.cfg.head, "as_mimo", False)

    def _require_parts(self) -> None:
        """Refuse a target without the parts that a head reads, before the data is tokenised."""
        cfg = self.cfg
        if not isinstance(cfg, HeadConfig):
            return
        starts_as_target = cfg.start_from is None and cfg.init not in ("random", "native")
        if cfg.loop.context_parallel > 1 and cfg.signal.kind == "model":
            require_shared_passes(self.model)
        if self.family.reads == "layers" or starts_as_target:
            decoder_layers(self.model)
        if starts_as_target:
            final_norm(self.model)

    def _require_attention(self, machine: Machine) -> None:
        if parse_flag_from_env("ACCELERATE_USE_CPU"):
            return
        cfg, dtype = (
            self.cfg,
            torch.float32 if self.accelerator.mixed_precision == "no" else torch.bfloat16,
        )
        config = self.shape
        if isinstance(cfg, StandaloneConfig):
            config = standalone_config(cfg.draft, self.shape)
        elif isinstance(cfg.head, LayerSizes):
            config = LlamaShape.of_head(cfg.head, self.shape)
        require_draft_heads(self.family, "the draft", config, dtype, machine)

    def _require_room(self, machine: Machine | None) -> None:
        cfg = self.cfg
        if self._rewrites:  # the layer's size follows from the new layout, which is not there yet
            return
        if isinstance(cfg, StandaloneConfig):
            size = functools.partial(count_standalone, cfg.draft)
        else:
            vocabulary = choose_size(
                cfg.draft_vocab_size,
                _training(self.family).draft_vocab_size,
                self.shape.vocab_size,
            )
            size = functools.partial(count_head, self.family.name, cfg.head, vocabulary)
        family = self.family.name.replace("_", "-")
        counted = {"--target": self.opened.name, "--family": family, "--optim": cfg.optim.name}
        counted |= {
            "--batch-size": str(cfg.loop.batch_size),
            "--sequence-length": str(cfg.loop.sequence_length),
        }
        command = shlex.join(["redraft", "plan", *itertools.chain(*counted.items())])
        optimizer = cfg.optim.name
        require_room(
            self.opened,
            cfg.signal,
            self.accelerator,
            size,
            machine=machine,
            optimizer=optimizer,
            command=command,
        )

    def _rewrite_target(self) -> Path:
        folder, source = self.folder.folder / "target", fetch_model(self.opened.name)
        made_of = {"target": self.opened.name, "target_fingerprint": self.opened.fingerprint}
        if (
            self.accelerator.is_main_process
            and read_provenance(folder).target_fingerprint != self.opened.fingerprint
        ):
            publish(folder, lambda partial: as_mimo(source, partial), made_of, overwrite=True)
        self.accelerator.wait_for_everyone()
        return folder

    def load(self, folder: Path, *, has_moved: bool = False) -> Any:
        """The exported draft in `folder`, built on this run's target, in float32.

        `has_moved` is as in `Target`.
        """
        target = replace(self.target, has_moved=True) if has_moved else self.target
        return self.family.load(
            folder, lambda: target, None if self.family.is_head else torch.float32
        )

    # -------------------------------------------------------------------------------------------------------
    # forecast

    @functools.cached_property
    def forecaster(self) -> Forecaster:
        signal = live_signal(
            self.cfg.signal, self.model, self.opened, () if self.family.is_head else None
        )
        return Forecaster(
            self.cfg.prove,
            self.opened.fingerprint,
            self.model,
            signal,
            self.data,
            self.folder,
            is_head=self.family.is_head,
        )

    def forecast(self, draft: Any) -> Forecast | None:
        """The draft's expected acceptance in the engine's dtype; None on all but the main process.

        The draft itself keeps its dtype.
        """
        with leading(self.model) as leads:
            found = self.forecaster.forecast(*self._in_engine(draft)) if leads else None
        if draft is not None and not self.family.is_head:
            leave_gpu(draft)
        return found

    def _in_engine(self, draft: Any) -> tuple[Any, SignalFunction | None]:
        """A copy of a head in the engine's dtype, and the head's signal.

        A standalone draft is returned unchanged, without a signal of its own.
        """
        if not self.family.is_head:
            return draft, None
        signal = live_signal(self.cfg.signal, self.model, self.opened, draft.aux_layer_ids)
        return self._copy(draft).to(self.target.head_VD.dtype), signal

    def _copy(self, draft: Any) -> Any:
        shared = (
            self.target.embed_VD,
            self.target.head_VD,
        )  # gigabytes, which a head reads and never changes
        # `deepcopy` reuses an object that is in this memo.
        return copy.deepcopy(draft, {id(tensor): tensor for tensor in shared})

    # ----------------------------------------------------------------------------------------------------------
    # train

    def train(
        self, draft: Any, divergence: Divergence, loop: Loop, stage: str | None = None
    ) -> tuple[Any, TrainingCost]:
        """Train `draft`; returns a draft with the trained weights, and the cost.

        `distill.train.loop.train` does the work. A `stage` beside the main training has its own
        checkpoints and metrics, in a folder of that name. The returned draft is whole even if the
        ranks sharded it during training; on all but the main process it is None.
        """
        cfg, folder = self.cfg, self.folder.beside(stage) if stage else self.folder
        # Before `Distillation`, which may shard the draft in place.
        whole = self._copy(draft) if self.accelerator.is_main_process else None
        if cfg.gradient_checkpointing:
            draft.recomputes = True
        layers = draft.aux_layer_ids if self.family.is_head else None
        # A rewritten target has the states of the opened one.
        signal = target_signal(
            cfg.signal, self.model, self.opened, self.data, folder.folder, self.accelerator, layers
        )
        if (
            isinstance(signal, InProcessTarget)
            and not signal.packs
            and self.accelerator.is_main_process
        ):
            self._say_factor()
        distillation = Distillation(
            draft, signal, divergence, cfg.optim, loop.steps, self.accelerator
        )
        cost = train(distillation, self.data, folder, loop, cfg.prove.num_speculative_tokens)
        weights = distillation.weights()
        if whole is not None:
            whole.load_state_dict(weights)
        # Before the next training: the accelerator would save this one into the checkpoints of the
        # next.
        distillation.close()
        return whole, cost

    def _say_factor(self) -> None:
        train, size = self.data.train, self.cfg.loop.batch_size
        numbers = range(min(8, train.num_batches(size)))
        factor = fmean(
            padding_factor(train.batch(number, batch_size=size).document_BT) for number in numbers
        )
        print(
            f"target: one document per row, because packed documents would attend to each other; this "
            f"takes {factor:.2f} times the tokens"
        )

    def train_baseline(self, draft: Any) -> Forecast | None:
        """The forecast for a copy of the draft trained by cross-entropy.

        None without --prove.ce-baseline.
        """
        if not self.cfg.prove.ce_baseline:
            return None
        trained, _ = self.train(
            self._copy(draft), Divergence(name="cross_entropy"), self.cfg.loop, "ce-baseline"
        )
        return self.forecast(trained)

    # --------------------------------------------------------------------------------------------------------
    # publish

    def publish(self, draft: Any, name: str = "draft") -> Path:
        """Publish the draft, with provenance and forecast, as `name` in the run's folder.

        The main process writes, and the others wait for it.
        """
        folder = self.folder.folder / name
        with leading(self.model) as leads:
            if leads:
                with publishing(folder, describe_origin(self), overwrite=True) as new:
                    self._export(draft, new.path)
                    # From the files, not the module, because the served draft is rounded to the
                    # exported dtype.
                    after = self.forecast(self.load(new.path))
                    assert after is not None, "the main process"
                    self.forecasts[folder] = after
                    new.provenance["forecast"] = store(after, self).to_json()
        self.accelerator.wait_for_everyone()
        return folder

    def _export(self, draft: Any, folder: Path) -> None:
        cfg, dtype = self.cfg, torch.bfloat16
        if not isinstance(cfg, HeadConfig):
            draft.export(folder, dtype, tokenizer=self.opened.tokenizer)
        elif self.family.is_in_target:
            tensors = {
                name: tensor.to(dtype) for name, tensor in draft.checkpoint_tensors().items()
            }
            # The weights contain one MTP layer, so the config must say 1, however many the target
            # had.
            changes = {draft.layout.count_key: 1, "redraft": draft.record()}
            stitch(self.teacher.folder, tensors, folder, changes)
        elif len(_training(self.family).layouts) > 1:
            tokens = cfg.prove.num_speculative_tokens
            draft.export(
                folder,
                dtype,
                layout=cfg.layout,
                target_name=cfg.target,
                num_speculative_tokens=tokens,
            )
        else:
            draft.export(folder, dtype)

    # ----------------------------------------------------------------------------------------------------------
    # prove

    def prove(
        self,
        draft: Path,
        before: Forecast | None,
        baseline: Forecast | None,
        cost: TrainingCost,
        started_s: float,
    ) -> None:
        """Serve the published draft, write the report, and end this rank's part of the launch."""
        # On the main process only.
        if before is not None:
            engine = self._serve(draft) if self.cfg.prove.engine else None
            page = report(
                self.folder,
                target=self.cfg.target,
                data=self.data.stats,
                before=before,
                after=self.forecasts[draft],
                ce_baseline=baseline,
                engine=engine,
                cost=cost,
                started=started_s,
            )
            self.folder.complete()
            print(f"draft: {draft}\nreport: {page}")
            if engine:
                print(f"its speed: redraft bench --target {self.cfg.target} --draft {draft}")
        leave(self.accelerator)

    def _serve(self, draft: Path) -> EngineProof:
        cfg = self.cfg.prove
        # Drafts and the forecaster share the target's two views.
        leave_gpu(self.model, self.target.embed_VD, self.target.head_VD)
        speculative = self.family.speculative
        if not self.family.is_in_target:
            speculative = {**speculative, "model": str(draft.absolute())}
        return prove_in_engine(
            cfg,
            self.opened,
            speculative,
            self.data.prompts,
            self.folder.folder,
            served=draft if self.family.is_in_target else None,
            dtype=self.cfg.target_dtype,
        )


def _training(family: Family) -> Training:
    assert family.training is not None
    return family.training


def refuse(family: Family, cfg: Config) -> TargetFolder:
    """Check the flags against each other, the family and the target's config.

    Returns the opened target.

    Raises:
        FileNotFoundError: there is no such target.
        ValueError: a flag does not fit.
    """
    row = _training(family)
    require_no_engine(cfg.signal, engine=cfg.prove.engine)
    if cfg.gradient_checkpointing and not family.can_recompute:
        raise ValueError(
            f"{family.title} does not support --gradient-checkpointing: remove the flag"
        )
    if isinstance(cfg, StandaloneConfig):
        return _open(family, cfg)
    check_num_tokens(cfg.prove.num_speculative_tokens, cfg.head.num_tokens)
    if cfg.init not in row.starts:
        raise ValueError(
            f"{family.title} does not support --init {cfg.init}: choose {' or '.join(row.starts)}"
        )
    if cfg.layout not in row.layouts:
        raise ValueError(
            f"{family.title} does not support --layout {cfg.layout}: its exports have only one layout"
        )
    if cfg.draft_vocab_size and row.draft_vocab_size is None:
        raise ValueError(
            f"{family.title} does not support --draft-vocab-size: it uses the target's vocabulary"
        )
    target = _open(family, cfg)
    if cfg.start_from is not None:
        require_head(cfg.start_from, family.name, target)
    _refuse_head(family, cfg, target)
    if cfg.prove.engine:
        require_runner(
            family.speculative,
            views=_views(cfg),
            way_out=", or leave the engine out with --prove.no-engine",
        )
    return target


def _open(family: Family, cfg: Config) -> TargetFolder:
    check_model_folder(cfg.target)
    target = TargetFolder.open(cfg.target)
    model_class(target.config)
    length = cfg.loop.sequence_length
    # The user did not choose the default: a longer row then contains several short conversations.
    if length != make_config(family).loop.sequence_length:
        require_positions(target.text_config, length, "--loop.sequence-length", cfg.target)
    return target


def _views(cfg: HeadConfig[Any]) -> tuple[View, ...]:
    """The views of the head's layers; empty for a draft without such layers."""
    if not isinstance(cfg.head, Windows):
        return ()
    if cfg.start_from is None:
        return cfg.head.views
    return trained_views(read_config(cfg.start_from), cfg.start_from)


def _refuse_head(family: Family, cfg: HeadConfig[Any], target: TargetFolder) -> None:
    """Check a head's options against the target's config.

    Raises:
        ValueError: if one does not fit.
    """
    options, shape = cfg.head, target.text_config
    if isinstance(options, LayerSizes):
        LlamaShape.of_head(options, shape)
    choose_size(cfg.draft_vocab_size, _training(family).draft_vocab_size, shape.vocab_size)
    if family.layers_key and cfg.prove.engine:
        require_aux(target, family.name)
    if family.reads == "layers":
        aux_layers(options.aux_layer_ids, shape.num_hidden_layers)
    check_mask_token(getattr(options, "mask_token_id", None), shape.vocab_size)
    if getattr(options, "full_layers", ()) and (reach := target_window(shape)) is not None:
        raise ValueError(
            f"--head.full-layers: vLLM applies the window of {cfg.target} ({reach} positions) to "
            "these layers too, because all layers of the target have it: remove the flag"
        )
    asked = getattr(options, "window", None)
    if cfg.start_from is not None and asked is not None and options.views != _views(cfg):
        raise ValueError(
            f"--head.window {asked} differs from the head of --start-from, which has "
            f"{'; '.join(dict.fromkeys(map(str, _views(cfg))))}: remove the flag"
        )
    if cfg.layout == "speculators" and family.name in ("dflash", "dspark"):
        require_speculators(family.name, _views(cfg))
    begins_anew = cfg.start_from is None
    num_layers = getattr(options, "num_layers", 1)
    if begins_anew and cfg.init.startswith("last_layer") and num_layers > shape.num_hidden_layers:
        raise ValueError(
            f"--head.num-layers {num_layers} is more than the target's {shape.num_hidden_layers}: "
            "give fewer, or --init random"
        )
    if cfg.init == "least_squares" and num_layers > 1:
        raise ValueError("--init least_squares supports only one layer: use --init last_layer")
    if cfg.init == "least_squares" and not options.fc_norm:
        raise ValueError(
            "--init least_squares needs --head.fc-norm, because the head trains badly without "
            "it: set it, or choose another --init"
        )
    if cfg.init == "least_squares" and options.norm_before_residual:
        raise ValueError(
            "--init least_squares does not support --head.norm-before-residual: use "
            "--init last_layer"
        )
    if family.is_in_target:
        # The layer would be stored next to scales for other weights.
        refuse_quantised(
            target, f"an MTP layer for {cfg.target}", "give the folder of the plain weights"
        )
        if not options.as_mimo:
            detect_layout(shape)  # refuses a target without MTP layers
