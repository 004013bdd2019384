"""The draft in training, on all ranks.

The draft starts from a version, is trained on records, and is written to checkpoints.

rank 0   Ranks.do(Candidate.step, records, seed) ──broadcast──► rank 1..n   Ranks.follow
                 └──────────────── Candidate.step ─────────────────┘
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from redraft.distill.launch.ranks import leave
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.transfer import to_device
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import MAX_SKIPPED_IN_A_ROW, Distillation, StepStats, fits
from redraft.engine.hardware import Machine, launch_machine
from redraft.engine.head_size import require_draft_heads
from redraft.files.checkpoint import load_text_config
from redraft.files.folder import read_config
from redraft.files.printable import shorten
from redraft.files.served_target import visible_length
from redraft.heads.catalog import find_family, list_learning
from redraft.heads.draft import Batch, Draft, TargetSignal
from redraft.heads.family import Family, Reads
from redraft.heads.target import Target
from redraft.online.learning.config import Training
from redraft.online.learning.replay import (
    RecordedBatch,
    make_batches,
    read_signal,
    select_texts,
)
from redraft.online.records.record import Record

P = ParamSpec("P")
T = TypeVar("T")
# Folders of a checkpoint: to resume training, and to serve the draft.
STATE, DRAFT = "state", "draft"


class NotFiniteError(Exception):
    """The weights contain NaN or infinity, and must not be saved."""


def read_hidden_shape(name: str, folder: Path) -> tuple[int, int] | None:
    """Return (number per token, size) of the hidden states that the exported draft reads.

    None if it reads none.

    Raises:
        ValueError: drafts of this family cannot learn online.
    """
    family = _find_learning(name)
    return None if family.reads == "nothing" else family.states_shape(read_config(folder))


def choose_reads(family: Family, draft: Draft) -> Reads:
    """Return the field of a signal that holds the recorded states.

    This is `Family.reads`, or "layers" if this draft reads states of the target's layers.
    """
    return "layers" if draft.aux_layer_ids else family.reads


def _find_learning(name: str) -> Family:
    if name not in list_learning():
        raise ValueError(
            f"drafts of family {name} cannot learn online: only {', '.join(list_learning())} can"
        )
    return find_family(name)


class Candidate:
    """One draft and its optimizer. Each method runs on all ranks together."""

    def __init__(
        self, cfg: Training, name: str, target: Path, machine: Machine | None = None
    ) -> None:
        """Prepare a candidate of the draft family `name`.

        `target` is the folder of the target, whose embeddings a head shares.
        """
        self.family, self.target = _find_learning(name), target
        self.cfg = replace(
            cfg,
            sequence_length=visible_length(
                load_text_config(target), cfg.sequence_length, is_head=self.family.is_head
            ),
        )
        self._machine = launch_machine(machine)
        self.wait_for_servers: Callable[[], float] | None = None
        """Set it to `Pauses.wait` if the servers compute on this device."""
        self.paused_s = 0.0  # Seconds spent in `pause`.
        self.accelerator = make_accelerator(
            cfg.accumulation, cfg.mixed_precision, None, self._machine
        )
        self._distillation: Distillation | None = None

    @property
    def distillation(self) -> Distillation:
        assert self._distillation is not None, "begin comes first"
        return self._distillation

    @property
    def is_hopeless(self) -> bool:
        """Whether too many steps in a row were non-finite for training to recover."""
        # Half of the limit, because at the limit, `Distillation.step` raises an error, which would
        # end the learner.
        return self.distillation.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW // 2

    def load(self, folder: Path) -> Any:
        """Load the draft in a folder onto this rank's device, in the dtype in which it was saved.

        Raises:
            ValueError, OSError: if it cannot be read, or belongs to a different family.
        """
        return self.family.load(folder, lambda: self._borrowed).to(self.accelerator.device)

    @cached_property
    def _borrowed(self) -> Target:
        """Return the target's embeddings and output head on this rank's device.

        They are read once and shared by all heads.
        """
        found, device = Target.from_folder(self.target), self.accelerator.device
        return replace(found, embed_VD=found.embed_VD.to(device), head_VD=found.head_VD.to(device))

    def begin(self, version: Path) -> None:
        """Start from the weights of a version, with a fresh optimizer.

        Raises:
            ValueError: the draft's attention would not launch on the GPU.
        """
        self._require_attention(version)
        if self._distillation is not None:
            self._distillation.close()  # free the memory before the next draft is loaded
        draft = self.load(version)
        self.version = version
        cfg = self.cfg
        optim = Optim(
            name=cfg.optimizer,
            lr=cfg.lr,
            weight_decay=cfg.weight_decay,
            schedule="constant",
            # A fraction of `warmup_steps`, which is the only length in the schedule.
            warmup_fraction=1.0,
            max_grad_norm=cfg.max_grad_norm,
            # Larger than `cfg.accumulation` if a step did not fit into memory.
            accumulation=self.accelerator.gradient_accumulation_steps,
        )
        divergence = Divergence(name=cfg.divergence)
        # The weights are float32, because a small step of AdamW is lost in bf16's 8 bits.
        self._distillation = Distillation(
            draft.float(), self._read_signal, divergence, optim, cfg.warmup_steps, self.accelerator
        )

    def _read_signal(self, batch: Batch) -> TargetSignal:
        self.pause()
        return read_signal(batch)

    def pause(self) -> None:
        """Pause, to leave the device to the servers, if they compute on it and are busy."""
        if self.wait_for_servers is None:
            return
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()  # or queued kernels would run during the pause
        self.paused_s += self.wait_for_servers()

    def _require_attention(self, version: Path) -> None:
        config = load_text_config(self.target if self.family.is_head else version)
        dtype = torch.float32 if self.accelerator.mixed_precision == "no" else torch.bfloat16
        require_draft_heads(self.family, f"the draft {version.name}", config, dtype, self._machine)

    def resume(self, version: Path, checkpoint: Path) -> None:
        """Continue from `checkpoint`, with the config and layout of `version`.

        The optimizer state is reset if the checkpoint was written with a different optimizer or
        number of ranks.
        """
        if fits(checkpoint / STATE, self.accelerator, self.cfg.optimizer):
            self.begin(version)
            self.distillation.resume(checkpoint / STATE)
        else:
            self.begin(checkpoint / DRAFT)
            # Use the version's folder: the checkpoint's folder, which `begin` recorded, is deleted
            # later.
            self.version = version

    def step(self, records: Sequence[Record], seed: int) -> StepStats:
        """Take one optimizer step on the records, divided among the ranks.

        If the step does not fit into the GPU's memory, it is taken in twice as many micro-batches,
        and so are all later steps.

        Raises:
            ValueError: a micro-batch of one row does not fit, or several ranks would have to agree
                on a number.
        """
        while True:
            batches = self._make_batches(records, seed)
            try:
                return self.distillation.step(
                    [to_device(batch, self.accelerator.device) for batch in batches]
                )
            except torch.OutOfMemoryError as error:
                full = shorten(str(error))
            # This is outside the handler, because the error's traceback keeps the step's tensors.
            rows, width = batches[0].input_ids_BT.shape
            self._divide(rows, width, full)

    def _divide(self, rows: int, width: int, full: str) -> None:
        """Take steps in twice as many micro-batches from now on."""
        ranks, count = self.accelerator.num_processes, self.distillation.optim.accumulation
        does_not_fit = (
            f"a micro-batch of {rows} x {width} tokens does not fit into the GPU's memory"
        )
        if ranks > 1 or rows == 1:
            change = "raise training.accumulation" if rows > 1 else "lower training.sequence_length"
            raise ValueError(
                f"{does_not_fit}: {change} in learner.toml, or give the server less "
                f"--gpu-memory-utilization ({full})"
            )
        print(f"{does_not_fit}: a step now has {2 * count} micro-batches ({full})", flush=True)
        self.distillation.divide(2 * count)
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()

    def _make_batches(self, records: Sequence[Record], seed: int) -> list[RecordedBatch]:
        """Return this rank's micro-batches of a step."""
        rng = np.random.default_rng(seed)
        reads = choose_reads(self.family, cast(Draft, self.distillation.draft))
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        batches = make_batches(
            select_texts(records),
            num_batches=ranks * self.distillation.optim.accumulation,
            sequence_length=self.cfg.sequence_length,
            seed=seed,
            # The seed is drawn, because step seeds are multiples of the number of records per step,
            # and some multiples hardly change a choice.
            salt=int(rng.integers(1 << 31)),
            reads=reads,
            needed_states=self.family.needed_states(read_config(self.version)),
        )
        # Every rank has packed all batches with the same seed, and keeps its share.
        return batches[rank::ranks]

    def write(self, folder: Path) -> None:
        """Write the STATE and DRAFT folders of a checkpoint.

        Raises:
            NotFiniteError: on every rank, if the weights are not finite.
            Exception: on the first rank only, the error that kept a rank from writing.
        """
        weights = self.distillation.weights()
        are_finite = [all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())]
        broadcast_object_list(are_finite)  # other ranks may not have the weights
        # All ranks raise the error or none does, because a rank that continued alone would wait in
        # `save` for the others.
        if not are_finite[0]:
            raise NotFiniteError
        failed: list[Exception] = []
        try:
            self.distillation.save(folder / STATE)
            if self.accelerator.is_main_process:
                self._export(folder / DRAFT, weights)
                # A server accepts only drafts with the config it was started with.
                shutil.copy(self.version / "config.json", folder / DRAFT)
        except (
            Exception
        ) as error:  # e.g. a full disk: torch and safetensors then raise errors of their own
            failed.append(error)
        # Every rank waits here until all have written; then the first rank seals the folder.
        if (failed := gather_object(failed)) and self.accelerator.is_main_process:
            raise failed[0]

    def _export(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Export in the version's dtype and, for a head, also in the version's layout.

        The servers expect both.
        """
        config = read_config(self.version)
        dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype", "float32"))
        draft: Any = self.distillation.draft
        draft.export(folder, dtype, weights=weights, like=self.version)

    def rest(self) -> None:
        """Do nothing. An occasional call keeps the other ranks from timing out while they wait."""


class Ranks:
    """Runs methods of the candidate on every rank.

    Only rank 0 calls `do`, and only from one thread.
    """

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.is_alone = candidate.accelerator.num_processes == 1

    def do(
        self, method: Callable[Concatenate[Candidate, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of `Candidate` on all ranks; return rank 0's result."""
        if not self.is_alone:
            broadcast_object_list([(method, args, kwargs)])  # methods are sent by name
        return method(self.candidate, *args, **kwargs)

    def follow(self) -> None:
        """Run the loop of every rank but 0: execute rank 0's calls until it calls `dismiss`."""
        while True:
            order: list[Any] = [None]
            broadcast_object_list(order)
            if order[0] is None:
                leave(self.candidate.accelerator)
                return
            method, args, kwargs = order[0]
            # The error is raised on all ranks, and rank 0 decides how to continue.
            with suppress(NotFiniteError):
                method(self.candidate, *args, **kwargs)

    def dismiss(self) -> None:
        if not self.is_alone:
            broadcast_object_list([None])
            leave(self.candidate.accelerator)
