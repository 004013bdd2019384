"""The training step of every draft: target signal -> draft steps -> divergence -> optimizer.

S = draft steps, N = micro-batches."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from redraft.distill.launch.compiled import compile_in_place, draft_layers
from redraft.distill.launch.ranks import (
    describe_layout,
    fit_deepspeed,
    fit_fsdp,
    require_whole_matrices,
    uses_deepspeed,
)
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.ahead import OneAhead
from redraft.distill.signal.sharded import is_sharded
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.muon import Muon, split
from redraft.distill.train.objective import distill_loss
from redraft.distill.train.optim import BETAS, Optim
from redraft.distill.train.unpickle import without_code
from redraft.eval.forecast.greedy import QuickMetrics, metric_sums, quick_metrics
from redraft.heads.draft import Batch, Draft, TargetSignal, label_rows, token_rows

# File in a checkpoint with the number of steps and the layout of the ranks.
PROGRESS = "progress.json"
# A run stops after this many non-finite steps in a row, because it will not recover.
MAX_SKIPPED_IN_A_ROW = 20


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """The numbers of a step that every rank has as soon as the step is taken."""

    tokens: int
    """Number of tokens read on all ranks, excluding padding."""
    labels: int
    """Number of labels on all ranks and in all micro-batches."""
    grad_norm: float
    """Norm of the gradient before clipping. 0 for a skipped step."""
    lr: float
    skipped: bool
    """Whether the loss or the gradient was not finite, so that the weights stayed unchanged."""


@dataclass(frozen=True, kw_only=True)
class UnreadStats(StepOutcome):
    """A step's results, summed over this rank's micro-batches. They are still on the device."""

    loss: Tensor
    """This rank's part of the loss per label, float64 []."""
    sums_S3: Tensor
    """For each draft step: sum of alpha, sum of alpha_greedy, number of labelled rows."""


@dataclass(frozen=True, kw_only=True)
class StepStats(StepOutcome):
    """One step's results over the labelled rows of all ranks and micro-batches.

    Each list has one entry per draft step.
    """

    loss: float
    """Loss per label, over the micro-batches before the first one with a non-finite loss."""
    alpha: list[float]
    alpha_greedy: list[float]


class DistillStep(nn.Module):
    """A module in which all reads of the draft's parameters happen in one `forward`.

    Outside `forward`, FSDP2 and ZeRO-3 hold only shards of the parameters, and they track gradients
    only through plain tensors.
    """

    def __init__(self, draft: nn.Module, divergence: Divergence) -> None:
        super().__init__()
        self.draft = draft
        self.divergence = divergence
        names = getattr(getattr(draft, "model", None), "_no_split_modules", None) or ()
        # FSDP2 gathers a model's layers one by one. It gathers a head, which has one or two layers,
        # as a whole.
        self._no_split_modules = sorted(
            {type(module).__name__ for module in draft.modules()}.intersection(names)
        )

    def compile_loss(self) -> None:
        """Compile the divergence from now on, unless its form is set or a kernel computes it."""
        if self.divergence.form == "auto" and next(self.parameters()).device.type == "cpu":
            self.divergence = replace(self.divergence, form="compiled")

    def forward(
        self,
        batch: Batch,
        signal: TargetSignal,
        *,
        scale: float | Tensor = 1.0,
        num_speculative_tokens: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Return (loss times `scale`, sums by draft step) for training.

        With `num_speculative_tokens`, return (`metric_sums`,) instead, for an evaluation.
        """
        draft = cast(Draft, self.draft)
        if num_speculative_tokens is not None:
            return (metric_sums(draft, batch, signal, num_speculative_tokens),)
        result = distill_loss(
            draft.draft_steps(batch, signal), batch, signal, self.divergence, scale
        )
        return result.loss, result.sums_S3


def fits(checkpoint: Path, accelerator: Accelerator, optimizer: str) -> bool:
    """Whether ranks in this layout, with this optimizer, wrote the checkpoint."""
    progress = json.loads((checkpoint / PROGRESS).read_text())
    return bool(_written_by(progress) == (describe_layout(accelerator), optimizer))


def _written_by(progress: Mapping[str, Any]) -> tuple[str, str]:
    return progress["ranks"], progress["optimizer"]


def make_optimizers(module: nn.Module, optim: Optim) -> list[torch.optim.Optimizer]:
    """Create optimizers that together update every trained parameter of the module exactly once."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices, rest = split(module) if optim.name == "muon" else ([], trained)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            Muon(matrices, lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay)
        )
    if rest:
        adamw = torch.optim.AdamW(
            rest,
            lr=optim.lr,
            betas=BETAS,
            weight_decay=optim.weight_decay,
            fused=True,  # makes one pass over each parameter instead of a dozen, even on a CPU
        )
        optimizers.append(adamw)
    return optimizers


def compile_layers(draft: nn.Module, target: Callable[[Batch], TargetSignal] | None = None) -> None:
    """Compile the layers of a draft, and of a target that is whole in this process.

    `distill.launch.compiled` determines which layers.
    """
    compile_in_place(draft_layers(draft), recomputed=getattr(draft, "recomputes", False))
    if isinstance(target, InProcessTarget):
        target.compile_layers()


class Distillation:
    """A draft in training.

    It holds the module, its optimizers and learning rate schedule, and the number of steps done.
    """

    def __init__(
        self,
        draft: nn.Module,
        target: Callable[[Batch], TargetSignal],
        divergence: Divergence,
        optim: Optim,
        num_steps: int,
        accelerator: Accelerator,
    ) -> None:
        if optim.accumulation != accelerator.gradient_accumulation_steps:
            raise ValueError(
                f"accumulation {optim.accumulation} differs from the accelerator's value: "
                f"pass the same value to both"
            )
        self.target, self.divergence, self.optim, self.accelerator = (
            target,
            divergence,
            optim,
            accelerator,
        )
        # The parameters are whole unless the ranks shard them (`shards_parameters`).
        self.draft = draft
        module = DistillStep(draft, divergence)
        if uses_deepspeed():
            fit_deepspeed(accelerator, optim.max_grad_norm)
        if accelerator.distributed_type == DistributedType.FSDP:
            fit_fsdp(accelerator, module)
        require_whole_matrices(optim.name, accelerator)
        optimizers = make_optimizers(module, optim)
        # The main process may arrive hours later, after caching the target. Wait here, where the
        # timeout is a day. Inside `prepare`, a sharded module's wait would time out after minutes.
        accelerator.wait_for_everyone()
        self.module, *self.optimizers = accelerator.prepare(module, *optimizers)
        self.num_steps, self.step_index, self.skipped, self.skipped_in_a_row = num_steps, 0, 0, 0

    def compile_layers(self) -> None:
        compile_layers(self.draft, self.target)
        self.accelerator.unwrap_model(self.module).compile_loss()
        is_left = isinstance(self.target, InProcessTarget) and is_sharded(self.target.model)
        if is_left and self.accelerator.is_main_process:
            print(
                "--loop.compile: only the draft's layers are compiled, because the target's layers "
                "are sharded"
            )

    def divide(self, accumulation: int) -> None:
        """Take steps in this many micro-batches from now on. An interrupted step is discarded."""
        self.optim = replace(self.optim, accumulation=accumulation)
        self.accelerator.gradient_accumulation_steps = accumulation
        self.accelerator.step = 0  # accelerate counts micro-batches
        self.module.zero_grad()  # accelerate's optimizers ignore `zero_grad` between micro-batches
        if self.step_index == self.skipped:
            # An interrupted first update may have left the optimizer state of some parameters
            # incomplete.
            for optimizer in self.optimizers:
                optimizer.state.clear()

    def weights(self) -> dict[str, Tensor]:
        """Return the draft's state dict: complete on the main process, even if ranks shard it.

        All ranks must call this.
        """
        state = self.accelerator.get_state_dict(self.module)
        # The keys are the draft's own names, without the prefix of the wrapper `DistillStep`. Ranks
        # other than the first may get None.
        return {name.removeprefix("draft."): tensor for name, tensor in (state or {}).items()}

    def step(self, batches: Sequence[Batch], upcoming: Batch | None = None) -> StepStats:
        """Take one optimizer step (`take_step`) and read its results (`read`).

        All ranks must call this.
        """
        return self.read(self.take_step(batches, upcoming))

    def take_step(self, batches: Sequence[Batch], upcoming: Batch | None = None) -> UnreadStats:
        """Take one optimizer step over this rank's micro-batches. Results stay on the device.

        If the loss or a gradient is not finite, the step is skipped and counted. `upcoming` is the
        first batch of the next step. A target that can work ahead fetches its signal meanwhile.

        Raises:
            ValueError: MAX_SKIPPED_IN_A_ROW steps in a row were skipped, or DeepSpeed cannot skip
                this one.
        """
        assert len(batches) == self.optim.accumulation, "the step uses all of its micro-batches"
        # Do not use a scheduler: accelerate would step it once per process, and DeepSpeed would
        # step it too late.
        lr = self.optim.lr * self.optim.rate(self.step_index, self.num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        counts_2 = self._count(batches)
        # accelerate averages over ranks and micro-batches. We want the sum over all rows, divided
        # by the labels of all ranks: otherwise, the labels of a rank with few labels would weigh
        # more. E.g. for two ranks with 10 and 30 labels and one batch each, the scale is 2 / 40 on
        # both, and the mean of both losses is the sum / 40. The scale stays on the device, because
        # reading it on the host would wait for the previous step.
        scale = self.accelerator.num_processes * len(batches) / counts_2[1].clamp(min=1).double()
        losses: list[Tensor] = []
        sums: list[Tensor] = []
        has_gradient = True
        self.module.train()
        # Batches a, b and upcoming c give the pairs (a, b) and (b, c).
        for batch, following in zip(batches, [*batches[1:], upcoming], strict=True):
            # Fetch before `start`, because `start` drops a signal in flight.
            signal = self.target(batch)
            if following is not None and isinstance(self.target, OneAhead):
                self.target.start(following)
            with self.accelerator.accumulate(self.module):
                loss, batch_sums_S3 = self.module(batch, signal, scale=scale)
                losses.append(loss.detach())
                sums.append(batch_sums_S3)
                has_gradient = self._backward(loss)
        grad_norm, num_finite, tokens, labels = (
            self._update(losses, counts_2) if has_gradient else (None, 0, *counts_2.tolist())
        )
        self._note(skipped=grad_norm is None)
        return UnreadStats(
            tokens=tokens,
            labels=labels,
            grad_norm=grad_norm or 0.0,
            lr=lr,
            skipped=grad_norm is None,
            loss=self._add_up(losses[:num_finite]),
            sums_S3=sum(sums[1:], sums[0]),
        )

    def read(self, unread: UnreadStats) -> StepStats:
        """Return the results of a step, over all ranks.

        All ranks must call this. It waits for the device.
        """
        # Use a single sum over the ranks, and a single read from the device.
        results = torch.cat([unread.sums_S3.double().flatten(), unread.loss[None]])
        *sums, loss = self._sum_over_ranks(results).tolist()
        return StepStats(
            tokens=unread.tokens,
            labels=unread.labels,
            grad_norm=unread.grad_norm,
            lr=unread.lr,
            skipped=unread.skipped,
            loss=loss,
            alpha=[alpha / max(1, rows) for alpha, rows in zip(sums[::3], sums[2::3], strict=True)],
            alpha_greedy=[
                alpha / max(1, rows) for alpha, rows in zip(sums[1::3], sums[2::3], strict=True)
            ],
        )

    def _count(self, batches: Sequence[Batch]) -> Tensor:
        """Tokens and labels of all ranks and micro-batches, int64 [2]."""
        counts = [torch.stack([token_rows(b).sum(), label_rows(b, 0).sum()]) for b in batches]
        return self._sum_over_ranks(torch.stack(counts).sum(0))

    def _backward(self, loss: Tensor) -> bool:
        """Add the gradient of a micro-batch.

        With DeepSpeed, a non-finite loss is not backpropagated, and the result is False.

        Raises:
            ValueError: the loss is not finite, but DeepSpeed already holds earlier gradients.
        """
        # DeepSpeed takes the step within `backward`, so the loss must be read first. Without
        # DeepSpeed, `_update` reads the loss together with the norm, and clears a non-finite
        # gradient.
        if uses_deepspeed() and int(self._count_not_finite([loss.detach()])):
            if self.optim.accumulation > 1:
                raise ValueError(
                    "a loss is not finite, and DeepSpeed cannot skip a step that has started: resume with "
                    "a lower --optim.lr, or with --optim.accumulation 1"
                )
            return False
        # All ranks or none must do this, because they wait for each other when gradients are
        # reduced.
        self.accelerator.backward(loss)
        return True

    def _update(
        self, losses: Sequence[Tensor], counts_2: Tensor
    ) -> tuple[float | None, int, int, int]:
        """Take the optimizer's step unless a loss or the gradient is not finite.

        Returns the norm of the gradient, or None if no step was taken; the number of losses before
        the first one that is non-finite on any rank; and the two counts, which are read together
        with the norm.
        """
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.optim.max_grad_norm)
        if uses_deepspeed():  # `backward` has already taken the step
            # DeepSpeed may not provide the norm.
            grad_norm, num_finite = float(norm or 0.0), len(losses)
            tokens, labels = counts_2.tolist()
            (optimizer,) = self.optimizers
            finite = math.isfinite(grad_norm) and not optimizer.step_was_skipped
            if not finite and not optimizer.step_was_skipped:
                raise ValueError(
                    "DeepSpeed applied a step with a non-finite gradient: resume with a lower "
                    "--optim.lr"
                )
        else:
            grad_norm, num_finite, tokens, labels = self._read_norm(norm, losses, counts_2)
            finite = math.isfinite(grad_norm) and num_finite == len(losses)
        for optimizer in self.optimizers:
            if finite:
                optimizer.step()
            optimizer.zero_grad()
        return grad_norm if finite else None, num_finite, tokens, labels

    def _read_norm(
        self, norm: Tensor, losses: Sequence[Tensor], counts_2: Tensor
    ) -> tuple[float, int, int, int]:
        """Return (norm, number of losses before the first non-finite one, and the two counts).

        All are read from the device at once.
        """
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        not_finite_N = self._count_not_finite(losses)
        device = not_finite_N.device
        results = [
            norm[None].to(device).double(),
            counts_2.to(device).double(),
            not_finite_N.double(),
        ]
        grad_norm, tokens, labels, *counts = torch.cat(results).tolist()
        num_finite = next((index for index, count in enumerate(counts) if count), len(counts))
        return grad_norm, num_finite, int(tokens), int(labels)

    def _count_not_finite(self, losses: Sequence[Tensor]) -> Tensor:
        """Count, for each loss, the ranks on which it is not finite, int64 [N]."""
        return self._sum_over_ranks((~torch.stack(list(losses)).isfinite()).long())

    def _add_up(self, losses: Sequence[Tensor]) -> Tensor:
        """This rank's part of the loss per label, float64 []."""
        total = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        for loss in losses:
            # The factor `scale` is removed, so that the sum over ranks is the loss per label.
            total += loss / (self.accelerator.num_processes * self.optim.accumulation)
        return total

    def _note(self, *, skipped: bool) -> None:
        """Count the step.

        Raises:
            ValueError: MAX_SKIPPED_IN_A_ROW steps in a row were skipped.
        """
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise ValueError(
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row had a non-finite loss or gradient: lower "
                "--optim.lr, and run the same command again with a different --output"
            )
        self.step_index += 1

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        return cast(
            Tensor, self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum")
        )

    def evaluate(self, batches: Sequence[Batch], num_speculative_tokens: int) -> QuickMetrics:
        """Held-out acceptance, as `redraft.eval.forecast` defines it, over all ranks' batches."""
        # Use `self.module`, not `self.draft`: outside the wrapped forward, a rank may have only
        # shards.
        self.module.eval()
        sums = torch.zeros(4 + num_speculative_tokens, dtype=torch.float64)
        with torch.no_grad():
            for batch in batches:
                sums += self.module(
                    batch, self.target(batch), num_speculative_tokens=num_speculative_tokens
                )[0]
        return quick_metrics(self._sum_over_ranks(sums))

    def close(self) -> None:
        """Release the weights and the optimizers, and remove them from the accelerator.

        Otherwise, the accelerator would save them into the checkpoints of the next distillation.
        """
        del self.draft, self.module, self.optimizers
        self.accelerator.free_memory()

    def save(self, folder: Path) -> None:
        """Write into `folder` the state for an exact resume. All ranks must call this."""
        self.accelerator.save_state(str(folder))
        if self.accelerator.is_main_process:
            progress = {
                "step_index": self.step_index,
                "skipped": self.skipped,
                "ranks": describe_layout(self.accelerator),
                "optimizer": self.optim.name,
            }
            (folder / PROGRESS).write_text(json.dumps(progress))

    def resume(self, folder: Path) -> None:
        """Continue from a folder written by `save`.

        Raises:
            ValueError: ranks in a different layout wrote it, with different batches and shards; a
                different optimizer wrote it; or it contains anything but tensors and numbers, which
                could be code to run.
        """
        progress = json.loads((folder / PROGRESS).read_text())
        if not fits(folder, self.accelerator, self.optim.name):
            ranks, optimizer = _written_by(progress)
            here = f"{describe_layout(self.accelerator)} with {self.optim.name}"
            raise ValueError(
                f"{folder} was written by {ranks} with {optimizer}: resume with the same setup, "
                f"not with {here}"
            )
        with without_code(folder, deepspeed=uses_deepspeed()):
            self.accelerator.load_state(str(folder))
        self.step_index, self.skipped = progress["step_index"], progress["skipped"]
