"""The training loop of every recipe.

It takes steps, logs, evaluates on held-out text, writes checkpoints, and resumes after a kill.
"""

import datetime
import netrc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
)

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import SampleStats
from redraft.distill.launch.ranks import (
    LONGEST_WAIT,
    die_with_launcher,
    join_on_cpu,
    keep_models_whole,
    require_gpus,
    uses_deepspeed,
)
from redraft.distill.train.row_ranks import RowRanks
from redraft.distill.train.run_config import Loop
from redraft.distill.train.run_folder import RunFolder
from redraft.distill.train.step import Distillation, StepOutcome
from redraft.engine.hardware import Machine, launch_machine
from redraft.engine.prompts import Prompt
from redraft.files.progress import Progress
from redraft.heads.draft import Batch

PRECISIONS = {"no": "float32", "bf16": "bfloat16, weights in float32,"}
# Number of steps used to measure the training speed, after a first step that warms up.
TIMED_STEPS = 3
MEASURED = ("loss", "alpha", "alpha_greedy", "grad_norm")
"""Results of a step that a skipped step does not have."""


@dataclass(frozen=True, kw_only=True)
class LoadedData:
    train: PackedDataset
    held_out: PackedDataset
    prompts: list[Prompt]
    stats: SampleStats
    hash: str
    end_ids: tuple[int, ...]
    """Token ids that end an answer."""
    date: datetime.date = field(default_factory=datetime.date.today)
    """Date for chat templates that contain today's date."""


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    tokens_per_s: float
    peak_rss_mib: float
    skipped_steps: int
    exported_step: int
    """Step whose draft is exported: the last step, or the step with the best evaluation."""


def write_offline_unless_logged_in() -> None:
    """Keep wandb from asking for a login in the middle of a run."""
    if not (os.environ.get("WANDB_API_KEY") or _has_login()):
        os.environ.setdefault("WANDB_MODE", "offline")


def _has_login() -> bool:
    """Whether ~/.netrc has a login for wandb's host, rather than only for other hosts."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and host in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, ValueError, netrc.NetrcParseError):  # the file is missing or cannot be read
        return False


def choose_precision(asked: str | None, launched: str | None, machine: Machine) -> tuple[str, str]:
    """Return (mixed precision on this machine, the line that reports it).

    `asked` is the user's choice, and `launched` is set by `accelerate launch` (no, bf16, fp16 or
    fp8). Each is None if there is none.
    """
    # fp16 is not supported: a step that overflows is skipped here, and its loss scale never falls.
    default = launched if launched and launched != "fp16" else "no"
    # Without a config, `accelerate launch` also passes "no", so then "no" is not the user's choice.
    if machine.gpu and machine.has_bfloat16 and default == "no":
        default = "bf16"
    precision = asked or default
    is_refused = precision == "bf16" and not machine.has_bfloat16
    if is_refused:
        precision = "no"
    line = f"training in {PRECISIONS.get(precision, precision)} on {machine.gpu or 'the CPU'}"
    if precision == "no" and not machine.has_bfloat16 and (is_refused or machine.gpu):
        line = f"warning: {line}, which has no hardware for bfloat16"
    return precision, line


def make_accelerator(
    accumulation: int,
    mixed_precision: str | None,
    wandb_project: str | None,
    machine: Machine | None = None,
) -> Accelerator:
    """Return the accelerator for this launch. `machine` defaults to `launch_machine()`.

    The main process prints the precision (`choose_precision`). Without a login, wandb logs offline.

    Raises:
        ValueError: wandb refuses the project.
    """
    machine = machine or launch_machine()
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION")
    precision, line = choose_precision(mixed_precision, launched, machine)
    # If neither the user nor the launcher has chosen, a process's second accelerator uses the
    # precision of the first.
    is_wish = mixed_precision is not None or precision != (launched or "no")
    if wandb_project:
        write_offline_unless_logged_in()
    die_with_launcher()
    if machine.gpu:
        require_gpus()
    # Do this before the Accelerator, because it takes over the process state made here.
    if machine.gpu is None or not torch.cuda.is_available():
        join_on_cpu()
    accelerator = Accelerator(
        # The launcher's config would override the plain argument `gradient_accumulation_steps`.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation),
        mixed_precision=precision if is_wish else None,
        log_with="wandb" if wandb_project else None,
        # It would wrap the module, and rename everything in checkpoints and exports.
        dynamo_backend="no",
        kwargs_handlers=[
            # Keep gradients only in DDP's buckets, without a second copy.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=LONGEST_WAIT),
        ],
    )
    if accelerator.is_main_process:
        print(line)
        if (backend := os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()) != "no":
            print(
                f"accelerate's dynamo_backend {backend} is ignored: use --loop.compile to compile"
            )
    if uses_deepspeed():
        keep_models_whole()
    if wandb_project:
        _start_wandb(accelerator, wandb_project)
    return accelerator


def _start_wandb(accelerator: Accelerator, project: str) -> None:
    """Log to a project, or to ENTITY/PROJECT.

    Raises:
        ValueError: wandb refuses it.
    """
    from wandb.errors import Error  # an optional package

    entity, _, name = project.rpartition("/")
    try:
        accelerator.init_trackers(
            name, init_kwargs={"wandb": {"entity": entity}} if entity else None
        )
    except Error as error:
        raise ValueError(f"wandb refuses --wandb {project}: {error}") from None


def train(
    distillation: Distillation,
    data: LoadedData,
    run: RunFolder,
    loop: Loop,
    num_speculative_tokens: int,
) -> TrainingCost:
    """Train from the newest checkpoint in `run` until `loop.steps` or `loop.stop_by` ends it.

    Losses and held-out acceptance go to the metrics. Raises the same errors as `RunFolder.restore`.
    """
    accelerator = distillation.accelerator
    if loop.compile:
        distillation.compile_layers()
    run.restore(distillation.resume)
    ranks = RowRanks.of(accelerator, loop, distillation.draft)
    trainer = _Trainer(distillation, data, run, num_speculative_tokens, ranks)
    if loop.minutes is not None:
        loop = replace(loop, steps=trainer.plan_steps(loop))
    elif loop.epochs is not None:
        micro_batches = data.train.num_batches(loop.batch_size, ranks.data_ranks)
        loop = replace(
            loop, steps=max(1, round(loop.epochs * micro_batches / distillation.optim.accumulation))
        )
    distillation.num_steps = loop.steps
    if accelerator.is_main_process:
        rows = loop.batch_size * distillation.optim.accumulation * ranks.data_ranks
        print(describe_length(loop, rows, data))
        if distillation.step_index >= loop.steps or _is_past_its_best(run.metrics, loop):
            print("the training run was already complete: publishing and proving its draft again")
    trainer.train_until(loop.steps, loop)
    if loop.stop_by == "acceptance":
        # All ranks must take part, because the weights of a sharded draft are spread over them.
        run.restore_best(distillation.resume)
        if accelerator.is_main_process:
            print(
                f"the draft of step {distillation.step_index} is kept, because no later "
                "evaluation had a higher tau"
            )
    # Read it from the metrics, because a run resumed after the last step trains nothing and
    # measures no speed.
    tokens_per_s = next(
        entry["tokens_per_s"] for entry in reversed(run.metrics) if "tokens_per_s" in entry
    )
    return TrainingCost(
        tokens_per_s=tokens_per_s,
        peak_rss_mib=peak_rss_mib(),
        skipped_steps=distillation.skipped,
        exported_step=distillation.step_index,
    )


def describe_length(loop: Loop, rows: int, data: LoadedData) -> str:
    num_rows = len(data.train.rows)
    tokens, passes = loop.steps * rows * loop.sequence_length, loop.steps * rows / num_rows
    beyond = (
        f", without the {data.stats.share_beyond:.1%} of the labels that lie beyond a row"
        if data.stats.labels_beyond
        else ""
    )
    return (
        f"{loop.steps:,} steps of {rows:,} rows of {loop.sequence_length:,} tokens: up to "
        f"{tokens:,} tokens, {passes:,.3g} passes over the {num_rows:,} rows of the data{beyond}"
    )


class _Trainer:
    """A training run, in one or several parts.

    With several parts, the speed of the first steps determines how many steps follow.
    """

    def __init__(
        self,
        distillation: Distillation,
        data: LoadedData,
        run: RunFolder,
        num_speculative_tokens: int,
        ranks: RowRanks,
    ) -> None:
        self.distillation, self.data, self.run, self.ranks = distillation, data, run, ranks
        self.num_speculative_tokens = num_speculative_tokens
        self.meter = _Meter()

    def plan_steps(self, loop: Loop) -> int:
        """Train the first steps, and plan the total.

        Returns the total number of steps that fill `loop.minutes`. The main process's number
        applies to every rank, and is logged for resumed runs. The first steps have the learning
        rate planned for `loop.steps`.
        """
        planned = [entry["planned_steps"] for entry in self.run.metrics if "planned_steps" in entry]
        if planned:
            return int(planned[-1])
        assert loop.minutes is not None
        first, started = self.distillation.step_index, time.perf_counter()
        # The first step also allocates and compiles, so it is outside the measured time.
        self.train_until(first + 1, loop, desc="first step")
        timed = time.perf_counter()
        self.train_until(first + 1 + TIMED_STEPS, loop, desc="speed")
        now = time.perf_counter()
        left_s = 60 * loop.minutes - (now - started)
        steps = [first + 1 + TIMED_STEPS + max(1, round(left_s * TIMED_STEPS / (now - timed)))]
        # A list, because it is filled in place on the other ranks.
        broadcast_object_list(steps)
        self.run.log(self.distillation.step_index, planned_steps=steps[0])
        return steps[0]

    def train_until(self, last: int, loop: Loop, desc: str | None = None) -> None:
        """Train up to step `last`, or until `loop.stop_by` ends the run as acceptance falls."""
        distillation, run = self.distillation, self.run
        accelerator = distillation.accelerator
        held_out = _take_held_out(self.data.held_out, loop, self.ranks, accelerator.device)
        steps = range(distillation.step_index, last)
        bar = Progress(
            steps,
            desc=desc or distillation.divergence.name,
            unit="step",
            initial=steps.start,
            total=last,
            disable=not accelerator.is_main_process,
        )
        # Keep the batch instead of making it again, because the signal ahead is found by the
        # batch's identity.
        upcoming: list[Batch] = []
        for step in bar:
            if _is_past_its_best(
                run.metrics, loop
            ):  # this ends a resumed run at once if it had already stopped for this reason
                bar.close()
                break
            batches = upcoming or self._batches(loop, step)
            upcoming = self._batches(loop, step + 1) if step + 1 < last else []
            unread = distillation.take_step(batches, *upcoming[:1])
            self.meter.add(unread)
            done = step + 1
            if loop.eval_every and (done % loop.eval_every == 0 or done == loop.steps):
                with self.meter.paused():
                    _evaluate(distillation, held_out, run, loop, self.num_speculative_tokens)
            is_last = done == loop.steps or _is_past_its_best(run.metrics, loop)
            if done % loop.log_every == 0 or is_last:
                # All ranks read the results only now, and before the clock, because this waits for
                # a GPU.
                stats = distillation.read(unread)
                rate = self.meter.rate()
                # The loss of a skipped step covers only a part of its labels, and the step has no norm.
                measured = () if stats.skipped else MEASURED
                run.log(
                    done,
                    **{name: getattr(stats, name) for name in measured},
                    lr=stats.lr,
                    tokens_per_s=rate,
                )
                bar.set_postfix(
                    loss=f"{stats.loss:.3f}", alpha=f"{stats.alpha[0]:.3f}", tok_s=f"{rate:,.0f}"
                )
            # Save after logging, so that a run killed right after the checkpoint still has this
            # step's line.
            if loop.save_every and (done % loop.save_every == 0 or is_last):
                with self.meter.paused():
                    run.save(done, distillation.save)

    def _batches(self, loop: Loop, step: int) -> list[Batch]:
        """Return this rank's micro-batches for `step`.

        They depend only on the step, so a resumed run gets the same batches.
        """
        accumulation = self.distillation.optim.accumulation
        batches = [
            self.data.train.batch(
                step * accumulation + micro,
                batch_size=loop.batch_size,
                rank=self.ranks.data_rank,
                num_ranks=self.ranks.data_ranks,
            )
            for micro in range(accumulation)
        ]
        device = self.distillation.accelerator.device
        return [self.ranks.place(batch, device) for batch in batches]


def _evaluate(
    distillation: Distillation, held_out: list[Batch], run: RunFolder, loop: Loop, num_tokens: int
) -> None:
    """Log the acceptance on held-out text after the newest step.

    With --loop.stop-by acceptance, also save the draft if it is the best so far.
    """
    done, metrics = distillation.step_index, distillation.evaluate(held_out, num_tokens)
    run.log(
        done,
        held_out_alpha=metrics.alpha,
        held_out_alpha_greedy=metrics.alpha_greedy,
        held_out_tau=metrics.tau,
    )
    if loop.stop_by == "acceptance" and _find_best(run.metrics) == done:
        run.save_best(done, distillation.save)


def _find_best(metrics: Sequence[Mapping[str, Any]]) -> int:
    """Return the step of the evaluation with the highest held-out tau (the first of equals), or 0.

    It is computed from the metrics, which a resumed run truncates.
    """
    taus = [(entry["held_out_tau"], -entry["step"]) for entry in metrics if "held_out_tau" in entry]
    return -max(taus)[1] if taus else 0


def _is_past_its_best(metrics: Sequence[Mapping[str, Any]], loop: Loop) -> bool:
    if loop.stop_by != "acceptance":
        return False
    best = _find_best(metrics)
    later = [entry for entry in metrics if "held_out_tau" in entry and entry["step"] > best]
    return len(later) >= loop.patience


def _take_held_out(
    held_out: PackedDataset, loop: Loop, ranks: RowRanks, device: torch.device
) -> list[Batch]:
    batches = held_out.in_order(loop.batch_size, rank=ranks.data_rank, num_ranks=ranks.data_ranks)
    return [ranks.place(batch, device) for batch in islice(batches, loop.eval_batches)]


def peak_rss_mib() -> float:
    """The peak resident memory of this process so far, in MiB."""
    # `ru_maxrss` is not used, because a process inherits the peak of a larger process that started
    # it.
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if "VmHWM" in line)


class _Meter:
    """Measures tokens per second of training steps, without evaluations and checkpoints."""

    def __init__(self) -> None:
        self.tokens, self.started = 0, time.perf_counter()

    def add(self, outcome: StepOutcome) -> None:
        self.tokens += outcome.tokens

    def rate(self) -> float:
        return self.tokens / (time.perf_counter() - self.started)

    @contextmanager
    def paused(self) -> Iterator[None]:
        paused_at = time.perf_counter()
        yield
        self.started += time.perf_counter() - paused_at
