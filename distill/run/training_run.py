"""A training run of a draft of any family.

    refuse ─► open ─► start ─► forecast ─► train ─► publish ─► prove
    flags     target  weights  of the      loop     folder     a real vLLM
    memory    data    (start)  start                forecast   report
    folder

The family's row in `heads.catalog` and its module define what differs: initial weights, defaults,
export layouts.
"""

import copy
import functools
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from redraft.distill.data.conversations import identify_conversations
from redraft.distill.data.day import choose_day
from redraft.distill.data.vocabulary import choose_size
from redraft.distill.launch.ranks import leave, require_whole_matrices, shards_parameters
from redraft.distill.plan.held import DraftSize, sketch_draft
from redraft.distill.plan.memory_check import plan_command, require_room
from redraft.distill.run.inputs import (
    live_signal,
    load_data,
    load_target,
    target_signal,
)
from redraft.distill.run.proof import (
    EngineProof,
    answer_prompts,
    describe_origin,
    leave_gpu,
    prove_in_engine,
    report,
    store,
)
from redraft.distill.run.start import start
from redraft.distill.signal.apart import padding_factor
from redraft.distill.signal.sharded import leading
from redraft.distill.signal.sources import EndpointTarget, InProcessTarget
from redraft.distill.train.loop import TrainingCost, make_accelerator, train
from redraft.distill.train.row_ranks import require_shares
from redraft.distill.train.run_config import HeadConfig, Loop, StandaloneConfig
from redraft.distill.train.run_folder import RunFolder, lasting
from redraft.distill.train.step import Distillation
from redraft.engine.hardware import Machine, launch_machine
from redraft.engine.head_size import require_draft_heads
from redraft.engine.server import require_runner
from redraft.engine.target_dtype import open_target
from redraft.eval.forecast.greedy import Continuation, Forecast, SignalFunction, forecast
from redraft.files.artifact import publish, publishing
from redraft.files.checkpoint import model_class, refuse_quantised
from redraft.files.folder import fetch_model, fingerprint, read_config, trained_with
from redraft.files.kept import compute_once, read_kept
from redraft.files.served_target import require_aux, require_positions
from redraft.files.target_folder import TargetFolder
from redraft.files.windows import (
    View,
    require_speculators,
    require_trained_window,
    target_window,
    trained_views,
)
from redraft.heads.catalog import require_head
from redraft.heads.families.mtp_folder import as_mimo, stitch
from redraft.heads.family import Family, Training
from redraft.heads.nn.causal_lm import require_parts
from redraft.heads.options import Windows
from redraft.heads.provenance import read_provenance
from redraft.heads.target import LoadedTarget

Config = HeadConfig[Any] | StandaloneConfig


def run(family: Family, cfg: Config, machine: Machine | None = None) -> None:
    """Train a draft of a family, publish it, prove it and write the report.

    `machine` is this machine by default. A refused run leaves nothing behind.

    Raises:
        ValueError, OSError: the flags contradict each other, or do not fit the target or the
            machine.
    """
    started_s = time.perf_counter()
    training = Run(family, cfg, machine)
    draft = start(training)
    training.folder.begin()
    before = training.forecast(draft, training.cfg)
    trained, cost = training.train(draft)
    folder = training.publish(trained)
    training.prove(folder, before, cost, started_s)


class Run:
    """The opened target, data and folder of a training run, and the steps after the start."""

    def __init__(self, family: Family, cfg: Config, machine: Machine | None = None) -> None:
        """Refuse settings that cannot work, then open the target, the data and the folder.

        Torch's random state is seeded at the end, so that the draft made next starts with the same
        weights in every run. Raises the same errors as `run`.
        """
        if isinstance(cfg, HeadConfig) and cfg.start_from is not None:
            # Either a hub name or a folder.
            cfg = replace(cfg, start_from=fetch_model(cfg.start_from))
        self.family, self.cfg = family, cfg
        self.forecasts: dict[Path, Forecast] = {}
        # 1. Check the flags against the target, before anything is joined, written or loaded.
        machine, files, sketch = refuse(family, cfg, machine)
        self.shape = files.text_config
        # 2. Set up the ranks, the memory check and the folder. A run that is too large creates no
        # folder.
        self.accelerator = make_accelerator(
            cfg.optim.accumulation, cfg.mixed_precision, cfg.wandb, machine
        )
        require_whole_matrices(cfg.optim.name, self.accelerator)
        require_shares(family, cfg.loop, cfg.signal, self.accelerator.num_processes)
        precision = torch.float32 if self.accelerator.mixed_precision == "no" else torch.bfloat16
        is_head = isinstance(cfg, HeadConfig)
        layers = getattr(sketch, "shape", files.text_config) if is_head else sketch.config
        require_draft_heads(family, "the draft", layers, precision, machine)
        if sketch is not None:
            require_room(
                files,
                cfg.signal,
                self.accelerator,
                DraftSize.of(sketch),
                machine=machine,
                optimizer=cfg.optim.name,
                command=plan_command(family, cfg),
            )
        self.folder = RunFolder.open(
            cfg.output,
            asdict(cfg),
            self.accelerator,
            overwrite=cfg.overwrite,
            date=choose_day(cfg.data.date, "--data.date"),
        )
        # Find the data before the target is loaded, which may take minutes.
        named = filter(None, (cfg.data.source, cfg.data.prompts))
        self.folder.on_main(
            lambda: [identify_conversations(name, cfg.data.split) for name in named]
        )
        # 3. Open the target, which may be converted, and the data.
        rewritten = self._rewrite(files) if sketch is None else None
        model = load_target(rewritten or files, cfg.signal, self.accelerator.device)
        if isinstance(cfg, HeadConfig):  # checked before the data is tokenised
            starts_as_target = cfg.start_from is None and cfg.init not in ("random", "native")
            require_parts(
                model,
                layers=family.reads == "layers" or starts_as_target,
                norm=starts_as_target,
                shared_passes=cfg.loop.context_parallel > 1 and cfg.signal.kind == "model",
            )
        self.target = LoadedTarget(files=files, model=model, rewritten=rewritten)
        self.data = load_data(cfg.data, files, cfg.loop, self.folder, is_head=family.is_head)
        # Count the batches before a start, a forecast or a cache takes hours.
        ranks = self.accelerator.num_processes // cfg.loop.context_parallel
        self.data.train.num_batches(cfg.loop.batch_size, ranks)
        source = cfg.start_from if isinstance(cfg, HeadConfig) else Path(str(cfg.draft))
        self.folder.confirm(
            lambda: {
                "target": files.fingerprint,
                "data": self.data.hash,
                "start": fingerprint(source) if source and source.is_dir() else "",
            }
        )
        torch.manual_seed(cfg.loop.seed)

    def _rewrite(self, files: TargetFolder) -> TargetFolder:
        folder, source = self.folder.folder / "target", files.fetch_and_check()
        made_of = {"target": files.name, "target_fingerprint": files.fingerprint}
        if (
            self.accelerator.is_main_process
            and read_provenance(folder).target_fingerprint != files.fingerprint
        ):
            publish(folder, lambda partial: as_mimo(source, partial), made_of, overwrite=True)
        self.accelerator.wait_for_everyone()
        return TargetFolder(name=str(folder), folder=folder, dtype=files.dtype)

    def load(self, folder: Path, *, has_moved: bool = False) -> Any:
        """Load the exported draft in `folder` on this run's target, in float32.

        `has_moved` has the same meaning as in `Target`.
        """
        target = self.target.borrowed
        target = replace(target, has_moved=has_moved or target.has_moved)
        return self.family.load(
            folder, lambda: target, None if self.family.is_head else torch.float32
        )

    # -------------------------------------------------------------------------------------------------------
    # forecast

    @functools.cached_property
    def signal(self) -> InProcessTarget | EndpointTarget:
        """The target's distribution, without the streams that a head reads."""
        return live_signal(self.cfg.signal, self.target, () if self.family.is_head else None)

    @functools.cached_property
    def answers(self) -> list[Continuation]:
        """The target's answers to the held-out prompts."""
        return answer_prompts(self)

    def forecast(self, draft: Any, start: Config | None = None) -> Forecast | None:
        """Forecast the draft's acceptance in the engine's dtype.

        Return None on all but the main process.

        The draft itself keeps its dtype. `start` are the settings of an untrained draft, whose
        forecast is kept for a resumed run.
        """

        def compute() -> Forecast:
            # The target may be on the CPU of a machine with a GPU (ACCELERATE_USE_CPU).
            device = self.accelerator.device
            answers, number = self.answers, self.cfg.prove.num_speculative_tokens
            copied, signal = self._in_engine(draft)
            return forecast(copied.to(device).eval(), signal, answers, number, device)

        found = None
        with leading(self.target.model) as leads:
            if leads:
                found = (
                    compute()
                    if start is None
                    else compute_once(*self._kept_as(start), Forecast, compute)
                )
        if draft is not None and not self.family.is_head:
            leave_gpu(draft)
        return found

    def has_passed(self, start: Config) -> bool:
        """Whether a checkpoint will replace the weights of this start, whose forecast is kept.

        All ranks must call this.
        """
        return self.folder.on_main(
            lambda: (
                self.folder.will_resume and read_kept(*self._kept_as(start), Forecast) is not None
            )
        )

    def _kept_as(self, start: Config) -> tuple[Path, str, Any]:
        """Return folder, name and key of the kept forecast of an untrained draft."""
        settings = lasting(json.loads(json.dumps(asdict(start), default=str)))
        asked = [start.prove.max_tokens, start.prove.num_speculative_tokens, self.data.prompts]
        return self.folder.folder, "start", [settings, self.folder.inputs, *asked]

    def _in_engine(self, draft: Any) -> tuple[Any, SignalFunction]:
        """Return a copy of a head in the engine's dtype, and the head's signal.

        A standalone draft is returned unchanged, with the target's distribution.
        """
        if not self.family.is_head:
            return draft, self.signal
        signal = live_signal(self.cfg.signal, self.target, draft.aux_layer_ids)
        return self._copy(draft).to(self.target.borrowed.head_VD.dtype), signal

    def _copy(self, draft: Any) -> Any:
        target = self.target.borrowed
        # These tensors take gigabytes. A head reads them but never changes them, so share them.
        shared = (target.embed_VD, target.head_VD)
        # `deepcopy` reuses objects that are in this memo.
        return copy.deepcopy(draft, {id(tensor): tensor for tensor in shared})

    # ----------------------------------------------------------------------------------------------------------
    # train

    def train(self, draft: Any) -> tuple[Any, TrainingCost]:
        """Train `draft`. Return a draft with the trained weights, and the cost.

        `distill.train.loop.train` does the work. The returned draft is complete even if the ranks
        sharded it during training. On all but the main process, it is None.
        """
        cfg, folder = self.cfg, self.folder
        # Do this before `Distillation`, because that may shard the draft in place.
        whole = self._copy(draft) if self.accelerator.is_main_process else None
        if cfg.gradient_checkpointing:
            draft.recomputes = True
        layers = draft.aux_layer_ids if self.family.is_head else None
        # A converted target has the same states as the original.
        signal = target_signal(
            cfg.signal, self.target, self.data, folder.folder, self.accelerator, layers
        )
        if (
            isinstance(signal, InProcessTarget)
            and not signal.packs
            and self.accelerator.is_main_process
        ):
            self._say_factor()
        distillation = Distillation(
            draft, signal, cfg.divergence, cfg.optim, cfg.loop.steps, self.accelerator
        )
        cost = train(distillation, self.data, folder, cfg.loop, cfg.prove.num_speculative_tokens)
        weights = distillation.weights()
        if whole is not None:
            whole.load_state_dict(weights)
        # Otherwise, the accelerator would save this draft into the checkpoints of a later training
        # run.
        distillation.close()
        if not shards_parameters(self.accelerator):
            leave_gpu(draft)  # the caller may hold it while vLLM uses the whole GPU
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

    # --------------------------------------------------------------------------------------------------------
    # publish

    def publish(self, draft: Any, name: str = "draft") -> Path:
        """Publish the draft, with provenance and forecast, as `name` in the run's folder.

        The main process writes, and the other processes wait for it.
        """
        folder = self.folder.folder / name
        with leading(self.target.model) as leads:
            if leads:
                with publishing(folder, describe_origin(self), overwrite=True) as new:
                    self._export(draft, new.path)
                    # Load the draft from the files instead of using the module, because the served
                    # draft is rounded to the exported dtype.
                    after = self.forecast(self.load(new.path))
                    assert after is not None, "the main process"
                    self.forecasts[folder] = after
                    new.provenance["forecast"] = store(after, self).to_json()
        self.accelerator.wait_for_everyone()
        return folder

    def _export(self, draft: Any, folder: Path) -> None:
        cfg, dtype = self.cfg, torch.bfloat16
        if not isinstance(cfg, HeadConfig):
            draft.export(folder, dtype, tokenizer=self.target.files.tokenizer)
        elif self.family.is_in_target:
            tensors = draft.checkpoint_tensors(dtype=dtype)
            # The weights contain one MTP layer, so the config must say 1, whatever the target's
            # number.
            changes = {draft.layout.count_key: 1, "redraft": draft.record()}
            stitch(self.target.source.folder, tensors, folder, changes)
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
        cost: TrainingCost,
        started_s: float,
    ) -> None:
        """Serve the published draft, write the report, and end this rank's part in the launch."""
        # Only on the main process.
        if before is not None:
            engine = self._serve(draft) if self.cfg.prove.engine else None
            page = report(
                self.folder,
                target=self.cfg.target,
                data=self.data.stats,
                before=before,
                after=self.forecasts[draft],
                engine=engine,
                cost=cost,
                started=started_s,
            )
            self.folder.complete()
            print(f"draft: {draft}\nreport: {page}")
            if engine:
                print(
                    f"measure its speed: redraft bench --target {self.cfg.target} --draft {draft}"
                )
        leave(self.accelerator)

    def _serve(self, draft: Path) -> EngineProof:
        cfg = self.cfg.prove
        # Drafts and the forecast share these two views of the target.
        target = self.target.borrowed
        leave_gpu(self.target.model, target.embed_VD, target.head_VD)
        speculative = self.family.speculative
        if not self.family.is_in_target:
            speculative = {**speculative, "model": str(draft.absolute())}
        return prove_in_engine(
            cfg,
            self.target.files,
            speculative,
            self.data.prompts,
            self.folder.folder,
            served=draft if self.family.is_in_target else None,
            dtype=self.cfg.target_dtype,
        )


def _training(family: Family) -> Training:
    assert family.training is not None
    return family.training


def refuse(
    family: Family, cfg: Config, machine: Machine | None = None
) -> tuple[Machine, TargetFolder, Any]:
    """Check the flags against each other, the family and the target's config.

    Returns the machine (by default, this one as far as accelerate may use it), the opened target,
    and an untrained draft for it without memory for its weights. If the target must be
    converted, the draft is None, because its layer depends on the new layout.

    Raises:
        FileNotFoundError: there is no such target.
        ValueError: a flag does not fit.
    """
    row = _training(family)
    if cfg.gradient_checkpointing and not family.can_recompute:
        raise ValueError(
            f"{family.title} does not support --gradient-checkpointing: remove the flag"
        )
    if isinstance(cfg, HeadConfig):
        _refuse_choices(family, row, cfg)
    machine = launch_machine(machine)
    target = open_target(cfg.target, cfg.target_dtype, on_cpu=machine.gpu is None, machine=machine)
    if cfg.signal.url and cfg.prove.engine and (method := target.quantization):
        raise ValueError(
            f"{cfg.target} is quantised ({method}), so this process could not tell ties from wrong answers "
            "in the engine: add --prove.no-engine, and run redraft eval --no-forecast afterwards"
        )
    if target.is_local:  # weights on the hub are fetched only after all checks
        target.fetch_and_check()
    model_class(target.config)
    length, shape = cfg.loop.sequence_length, target.text_config
    # The user did not choose this length. A longer row then contains several short conversations.
    if length != row.loop.get("sequence_length", Loop.sequence_length):
        require_positions(shape, length, "--loop.sequence-length", cfg.target)
    if isinstance(cfg, StandaloneConfig):
        return machine, target, sketch_draft(family, cfg.draft, shape)
    if cfg.start_from is not None:
        require_head(cfg.start_from, family.name, target)
        if family.layers_key:
            _refuse_start(family, cfg.start_from, target)
    sketch = _refuse_head(family, row, cfg, target)
    if cfg.prove.engine:
        require_runner(
            family.speculative,
            views=_views(cfg),
            way_out=", or leave the engine out with --prove.no-engine",
        )
    return machine, target, sketch


def _refuse_choices(family: Family, row: Training, cfg: HeadConfig[Any]) -> None:
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


def _refuse_start(family: Family, folder: Path, target: TargetFolder) -> None:
    """Refuse a head whose config.json has wrong windows or target layers, before it is loaded.

    Raises:
        ValueError: the windows cannot be read, a window is larger than in training, or the target
            does not have the layers.
    """
    config, count = read_config(folder), target.text_config.num_hidden_layers
    window = next((view.window for view in trained_views(config, folder) if view.window), None)
    require_trained_window(window, trained_with(config).get("window"), folder)
    layers = family.read_layers(config)
    if not layers:  # EAGLE-3 has default layers, and loading reports the other families'
        return
    first = family.layers_offset  # DFlash and DSpark cannot read the embeddings
    if layers != sorted({*layers}) or not first <= layers[0] <= layers[-1] <= count:
        raise ValueError(
            f"{folder} reads the layers {layers} (k is the state after k layers), but {target.name} "
            f"has {first} to {count}: engines count layers differently, so write the layers used in "
            "training into config.json, as vLLM counts them"
        )


def _views(cfg: HeadConfig[Any]) -> tuple[View, ...]:
    """Return the views of the head's layers; empty if the draft has no such layers."""
    if not isinstance(cfg.head, Windows):
        return ()
    if cfg.start_from is None:
        return cfg.head.views
    return trained_views(read_config(cfg.start_from), cfg.start_from)


def _refuse_head(family: Family, row: Training, cfg: HeadConfig[Any], target: TargetFolder) -> Any:
    """Check a head's options against the target's config. Returns the same as `refuse`.

    Raises:
        ValueError: an option does not fit.
    """
    options, shape = cfg.head, target.text_config
    size = choose_size(cfg.draft_vocab_size, row.draft_vocab_size, shape.vocab_size)
    if family.layers_key and cfg.prove.engine:
        require_aux(target, family.name)
    if getattr(options, "full_layers", ()) and (reach := target_window(shape)) is not None:
        raise ValueError(
            f"--head.full-layers: vLLM applies the window of {cfg.target} ({reach} positions) to "
            "these layers too, because all layers of the target have it: remove the flag"
        )
    asked = getattr(options, "window", None)
    if cfg.start_from is not None and asked is not None and options.views != _views(cfg):
        raise ValueError(
            f"--head.window {asked} does not match the head of --start-from, which has "
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
            "--init least_squares needs --head.fc-norm, because the head trains poorly "
            "without it: set it, or choose a different --init"
        )
    if cfg.init == "least_squares" and options.norm_before_residual:
        raise ValueError(
            "--init least_squares does not support --head.norm-before-residual: use "
            "--init last_layer"
        )
    if family.is_in_target:
        # The layer would be stored next to scales that belong to different weights.
        refuse_quantised(
            target, f"an MTP layer for {cfg.target}", "give the folder of the unquantised weights"
        )
        if options.as_mimo:
            return None
    return sketch_draft(family, options, shape, size)
