"""The parts of a head's recipe shared by all families.

HeadConfig   flags of every head's recipe
DEMO         settings of every head's `--preset demo`
HeadRun      target, data and folder of a run;  forecast -> train -> publish -> prove, in this order
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn

from redraft.distill.count_command import count_command
from redraft.distill.data.vocabulary import require_smaller
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
from redraft.distill.plan.held import count_head
from redraft.distill.prove import (
    EngineProof,
    Forecaster,
    Prove,
    check_num_tokens,
    leave_gpu,
    prove_by_reference,
    prove_in_engine,
    publish_draft,
    report,
)
from redraft.distill.signal.parts import is_whole, last_layers, read_last_layers, read_stream_norms, stream_scales
from redraft.distill.signal.sharded import leading
from redraft.distill.signal.transfer import to_device
from redraft.distill.train.loop import Loop, TrainingCost, make_accelerator, train
from redraft.distill.train.optim import Optim
from redraft.distill.train.ranks import leave
from redraft.distill.train.run import Run
from redraft.distill.train.step import Distillation, require_whole_matrices
from redraft.eval.engine.target_dtype import TargetDtype
from redraft.eval.forecast.calibration import Calibration
from redraft.eval.forecast.greedy import Forecast, SignalFunction
from redraft.heads.catalog import find_family, require_head
from redraft.heads.draft import Batch, TargetSignal
from redraft.heads.families.standalone import StandaloneDraft
from redraft.heads.files.artifact import publish
from redraft.heads.files.checkpoint import load_text_config
from redraft.heads.files.folder import check_model_folder, model_folder
from redraft.heads.files.served_target import require_aux
from redraft.heads.nn.masks import choose_mask_token
from redraft.heads.progress import Progress
from redraft.heads.target import Target, aux_layers


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    target: str = "meta-llama/Llama-3.1-8B-Instruct"
    """Model on your server, for the head to speed up: a folder or a hub name."""
    target_dtype: TargetDtype | None = None
    """Type in which the target computes, here and in the engine of the proof. By default as stored on a GPU. On a CPU
    bfloat16 if it is stored so and the CPU has instructions for bfloat16, else float32, in which outputs with and
    without a draft are compared token for token."""
    start_from: Path | None = None
    """Continue training this exported head instead of a new one. It must be of the same family and target; the
    options in it replace those of --head."""
    data: Data = field(default_factory=Data)
    signal: Signal = field(default_factory=Signal)
    divergence: Divergence = field(default_factory=Divergence)
    optim: Optim = field(default_factory=Optim)
    loop: Loop = field(default_factory=Loop)
    prove: Prove = field(default_factory=Prove)
    output: Path = Path("outputs/head")
    """Folder of the run. It receives the config, metrics, checkpoints, the exported draft and the report."""
    resume: bool = False
    """Continue the run in --output from the newest checkpoint."""
    overwrite: bool = False
    """Delete the run in --output and start again."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Precision of training; by default as `accelerate config` says. bf16 keeps the weights in float32."""
    wandb: str | None = None
    """Weights & Biases project to log to; by default none. Without a login the log is kept offline."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(HeadConfig):
    """Flags of the heads of several layers that draft all tokens in one pass."""

    init: Literal["last_layers", "random"] = "last_layers"
    """Initial weights of the head's layers: copies of the target's last layers, or random. If the target is in shards
    or on servers, its layers are read from its files."""
    draft_vocab_size: int = 32000
    """Size of the head's vocabulary: the tokens most frequent as labels. A smaller vocabulary makes drafting faster; 0
    keeps all of the target's."""
    divergence: Divergence = field(default_factory=lambda: Divergence(name="lk_hybrid"))
    optim: Optim = field(default_factory=lambda: Optim(lr=6e-4, max_grad_norm=0.5))
    loop: Loop = field(default_factory=lambda: Loop(steps=20000, sequence_length=2048))

    def check(self, head: Any, shape: Any) -> None:
        """Raise ValueError if the options of the head do not fit a target of this config."""
        aux_layers(head.aux_layer_ids, shape.num_hidden_layers)
        require_smaller(self.draft_vocab_size, shape.vocab_size)
        if self.init == "last_layers" and head.num_layers > shape.num_hidden_layers:
            raise ValueError(
                f"--head.num-layers {head.num_layers} is more than the target's {shape.num_hidden_layers}: "
                "give fewer, or --init random"
            )


DEMO: dict[str, Any] = {
    "target": "tests/assets/tiny-target",
    "target_dtype": "float32",  # to compare outputs token for token on every CPU
    "data": Data(source="stdlib", held_out=0.05, max_prompt_tokens=512),
    "divergence": Divergence(name="forward_kl"),
    "optim": Optim(lr=2e-3),
    "loop": Loop(steps=64, batch_size=4, sequence_length=1024, eval_every=16, eval_batches=1, save_every=64),
    "prove": Prove(num_speculative_tokens=3, speed_rounds=8),
    "mixed_precision": "bf16",
}
"""Fields of a `HeadConfig` for a run of minutes on two CPU cores. All families share them, so the results compare."""


def target_config(name: str) -> Any:
    """The config of a target's text model, without the weights.

    Raises: FileNotFoundError or ValueError if there is no such model.
    """
    check_model_folder(name)
    return load_text_config(name)


class HeadRun:
    """The target, the data and the folder of a run, and the steps of every head."""

    def __init__(
        self, cfg: HeadConfig, name: str, num_steps: int, convert: Callable[[Path, Path], None] | None = None
    ) -> None:
        """`name` is the family and `num_steps` the number of draft tokens to learn. `convert(source, folder)` rewrites
        the target into a layout with room for the head, if the target's has none.

        Torch's random state is seeded at the end, so a head made next starts the same in every run.

        Raises: ValueError or FileNotFoundError if the flags do not fit the target, or the target not the machine's
        memory, before any work.
        """
        # 1. Flags against each other, before anything is joined, written or loaded.
        check_num_tokens(cfg.prove.num_speculative_tokens, num_steps)
        if cfg.loop.on_policy and cfg.signal.kind != "model":
            raise ValueError("only a target in this process writes text to learn on: --signal.kind model")
        if cfg.loop.on_policy and cfg.signal.shard:
            raise ValueError("a target in shards writes no text: --loop.on-policy 0")
        require_no_engine(cfg.signal, engine=cfg.prove.engine)
        if cfg.start_from is not None:
            require_head(cfg.start_from, name, model_folder(cfg.target))
        self.cfg, self.family, self.started = cfg, find_family(name), time.perf_counter()
        if self.family.layers_key and cfg.prove.engine:
            require_aux(cfg.target, name)
        self.forecasts: dict[Path, Forecast] = {}
        self.calibrations: dict[Path, Calibration] = {}
        # 2. The ranks, the memory, the folder of the run.
        self.accelerator = make_accelerator(cfg.optim.accumulation, cfg.mixed_precision, cfg.wandb)
        require_whole_matrices(cfg.optim, self.accelerator)
        if convert is None:  # a converted target is one of the right layout, and its head has yet to be sized
            vocabulary = getattr(cfg, "draft_vocab_size", 0)
            size = functools.partial(count_head, name, cfg.head, vocabulary)  # type: ignore[attr-defined]
            tell = functools.partial(count_command, name, cfg, self.accelerator)
            require_room(
                cfg.target, cfg.signal, self.accelerator, size, cfg.target_dtype, optimizer=cfg.optim.name, tell=tell
            )
        self.run = Run.open(cfg.output, asdict(cfg), self.accelerator, resume=cfg.resume, overwrite=cfg.overwrite)
        self.target_name = cfg.target if convert is None else str(self._convert_target(convert))
        # 3. The target and the data.
        self.model, self.tokenizer = load_target(
            self.target_name, cfg.signal, self.accelerator.device, cfg.target_dtype
        )
        self.target = Target.from_model(self.model)
        self.data = load_data(cfg.data, cfg.target, self.tokenizer, cfg.loop, self.run)
        torch.manual_seed(cfg.loop.seed)

    def _convert_target(self, convert: Callable[[Path, Path], None]) -> Path:
        folder = self.run.folder / "target"
        if self.accelerator.is_main_process and not folder.exists():
            publish(folder, lambda partial: convert(model_folder(self.cfg.target), partial), {"from": self.cfg.target})
        self.accelerator.wait_for_everyone()
        return folder

    def load(self, folder: Path) -> Any:
        """The exported head in `folder`, on this run's target."""
        return self.family.load(folder, lambda: self.target)

    def start(self) -> Any:
        """The head of `--start-from`. Options are those of its training, but for `--head.recompute` of this run."""
        assert self.cfg.start_from is not None
        head, options = self.load(self.cfg.start_from), vars(self.cfg)["head"]
        if hasattr(options, "recompute"):  # e.g. not of Medusa
            head.config = dataclasses.replace(head.config, recompute=options.recompute)
        return head

    def last_layer(self) -> tuple[nn.Module, nn.Module]:
        """The target's last decoder layer and final norm, with all of its tensors.

        Raises: ValueError if the weights are on another machine, or in shards.
        """
        if not is_whole(self.model):
            raise ValueError("the target's layers are not in this process: choose another --init")
        (layer,), norm = last_layers(self.model, 1)
        return layer, norm

    def start_as_layers(self, head: Any, count: int) -> None:
        """Give an untrained head the weights of the target's last `count` layers, and say so.

        If this process does not hold them, the main process reads them from the target's files, and shares the head. If
        it cannot, the head keeps its random weights, and the line says why.
        """
        layers = f"the last {'layer' if count == 1 else f'{count} layers'} of {self.target_name}"
        if is_whole(self.model):
            head.init_from_layers(*last_layers(self.model, count))
            self.say_start(layers)
            return
        read = functools.partial(read_last_layers, self.target_name, self.model.dtype, count)
        try:
            self.run.on_main(lambda: head.init_from_layers(*read()))
        except (ValueError, OSError) as error:
            self.say_start(f"random weights: {error}")
        else:
            self.share(head)
            self.say_start(f"{layers}, read from its files, for this process does not hold them")

    def say_start(self, start: str) -> None:
        """Print the start of a head, on the main process."""
        if self.accelerator.is_main_process:
            print(f"the head starts from {start}")

    def share(self, head: Any) -> None:
        """Give every rank the weights of a head of the main process. All ranks must call this."""
        head.to(self.accelerator.device)
        broadcast([parameter.data for parameter in head.parameters()])
        head.cpu()

    def stream_scales(self, layer_ids: Sequence[int]) -> list[Tensor]:
        """For each stream, after k layers, the factors of the norm in the target's layer that reads it, [D].

        Raises: ValueError if a stream is not read by an RMS norm, or the target ends with another norm.
        """
        name = self.cfg.target
        if is_whole(self.model):
            return stream_scales(self.model, layer_ids, name)
        read = functools.partial(read_stream_norms, self.target_name, self.model.dtype, layer_ids)
        return self.run.on_main(lambda: stream_scales(read(), layer_ids, name))

    def last_signals(self, layer_ids: Sequence[int], num_tokens: int) -> list[tuple[Batch, TargetSignal]]:
        """The last batches of the first epoch with the target's states: `num_tokens` tokens, or all if there are fewer.

        The last ones, because training meets them late: a head learns little from text that its start was fitted to.
        They are the same on every rank.
        """
        source = live_signal(self.cfg.signal, self.model, layer_ids)
        train, size = self.data.train, self.cfg.loop.batch_size
        total = train.num_batches(size)
        first = max(0, total - math.ceil(num_tokens / (size * train.sequence_length)))
        bar = Progress(
            range(first, total),
            desc="states to start from",
            unit="batch",
            disable=not self.accelerator.is_main_process,
        )
        batches = (to_device(train.batch(number, batch_size=size), self.accelerator.device) for number in bar)
        return [(batch, source(batch)) for batch in batches]

    def mask_token(self, given: int | None) -> int:
        """The token for the slots to fill of a parallel drafter, unless it is given. Raises: as `choose_mask_token`."""
        if given is not None:
            return given
        pad_id = self.tokenizer.pad_token_id
        # A padding token that ends answers is no free token.
        free = None if pad_id in self.data.end_ids else pad_id
        return choose_mask_token(len(self.target.embed_VD), len(self.tokenizer), free)

    @functools.cached_property
    def forecaster(self) -> Forecaster:
        signal = live_signal(self.cfg.signal, self.model, ())
        return Forecaster(self.cfg.prove, self.cfg.target, self.model, signal, self.data, self.run)

    def forecast(self, head: Any) -> Forecast | None:
        """Expected acceptance of the head in the engine's dtype, on the main process; None on the others. The head
        itself stays as it is."""
        with leading(self.model) as leads:
            return self.forecaster.forecast(*self._in_engine(head)) if leads else None

    def _in_engine(self, head: Any) -> tuple[Any, SignalFunction]:
        """A copy of the head in the engine's dtype, and its signal."""
        signal = live_signal(self.cfg.signal, self.model, head.aux_layer_ids)
        return self._copy(head).to(self.target.head_VD.dtype), signal

    def _copy(self, head: Any) -> Any:
        shared = (self.target.embed_VD, self.target.head_VD)  # gigabytes, which a head reads and never changes
        # `deepcopy` takes an object found in this memo as it is.
        return copy.deepcopy(head, {id(tensor): tensor for tensor in shared})

    def train(
        self, head: Any, *, divergence: Divergence | None = None, loop: Loop | None = None, stage: str | None = None
    ) -> tuple[Any, TrainingCost]:
        """Train `head` (`distill.train.loop.train`) and return it with trained weights, and the cost.

        `divergence` and `loop` replace those of the flags. A `stage` before the main training has separate
        checkpoints and metrics, in a folder of this name.

        The returned head is whole even if the ranks shared it in training; on all but the main process it is None.
        """
        cfg, loop, run = self.cfg, loop or self.cfg.loop, self.run.beside(stage) if stage else self.run
        # Before `Distillation`, which may shard `head` in place.
        whole = self._copy(head) if self.accelerator.is_main_process else None
        signal = target_signal(
            cfg.signal, self.model, self.target_name, self.data, run.folder, self.accelerator, head.aux_layer_ids
        )
        distillation = Distillation(head, signal, divergence or cfg.divergence, cfg.optim, loop.steps, self.accelerator)
        writer = StandaloneDraft(self.model) if loop.on_policy else None
        cost = train(distillation, self.data, run, loop, cfg.prove.num_speculative_tokens, writer)
        weights = distillation.weights()
        if whole is not None:
            whole.load_state_dict(weights)
        distillation.close()
        return whole, cost

    def publish(self, write: Callable[[Path], None], name: str = "draft") -> Path:
        """Publish the files written by `write(folder)`, with provenance and forecast, as the folder `name` of the run.

        The main process writes, the others wait for it. A head's estimates of acceptance are corrected first.
        """

        def write_corrected(partial: Path) -> None:
            write(partial)
            found = (
                self.forecaster.calibrate(*self._in_engine(self.load(partial)))
                if self.family.estimates_acceptance
                else None
            )
            if found is not None:
                correction = found.correction
                self.family.draft_class().correct_estimates(partial, correction.scale, correction.shift)
                self.calibrations[self.run.folder / name] = found

        def forecast(partial: Path) -> Forecast:
            after = self.forecast(self.load(partial))
            assert after is not None, "the main process"
            return after

        folder, after = publish_draft(
            self.cfg.prove, self.run, self.data, self.cfg.target, write_corrected, forecast, name, model=self.model
        )
        if after is not None:
            self.forecasts[folder] = after
        return folder

    def prove(
        self,
        before: Forecast | None,
        draft: Path,
        cost: TrainingCost,
        speculative: Mapping[str, Any] | None,
        served: Path | None = None,
    ) -> None:
        """Serve the published draft, write the report, and end this rank's part of the launch.

        `before` is the forecast before training. `speculative` and `served` are those of `prove_in_engine`; without
        `speculative`, the reference decoder takes vLLM's place.
        """
        # On the main process only.
        if before is not None:
            after = self.forecasts[draft]
            engine = self._serve(draft, speculative, served) if self.cfg.prove.engine else None
            page = report(
                self.run,
                target=self.cfg.target,
                before=before,
                after=after,
                ce_baseline=None,
                engine=engine,
                cost=cost,
                started=self.started,
                calibration=self.calibrations.get(draft),
            )
            print(f"draft: {draft}\nreport: {page}")
        leave(self.accelerator)

    def _serve(self, draft: Path, speculative: Mapping[str, Any] | None, served: Path | None) -> EngineProof:
        cfg = self.cfg.prove
        if speculative is None:
            head = self.load(draft).to(self.target.head_VD.dtype).to(self.forecaster.device).eval()
            return prove_by_reference(cfg, self.model, head, self.forecaster.continuations)
        leave_gpu(self.model)
        return prove_in_engine(
            cfg,
            self.cfg.target,
            speculative,
            self.data.prompts,
            self.run.folder,
            served=served,
            dtype=self.cfg.target_dtype,
        )
