"""The draft in training on all ranks: begun from a version, stepped on records, written as checkpoint and as draft.

    rank 0   Ranks.do("step", records, seed) ──broadcast──► rank 1..n   Ranks.follow
                     └──────────── Candidate.step ─────────────┘

One process needs none of this and pays nothing for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, send_to_device

from distill.loop import make_accelerator
from distill.losses import Divergence
from distill.train import MAX_SKIPPED_IN_A_ROW, Distillation, Optim, StepStats
from heads.checkpoint import load_tokenizer
from heads.standalone import StandaloneDraft
from online.config import Training
from online.records import Record
from online.replay import RecordedBatch, batches_of, signal_of, texts_of

FAMILIES: dict[str, Callable[[Path], StandaloneDraft]] = {"standalone": StandaloneDraft.load}
"""The kinds of draft that can learn from records. A head joins them when records hold the hidden states it reads."""

STATE, DRAFT = "state", "draft"
"""Folders of a checkpoint: what training resumes from, and what would be served."""


class NotFiniteError(Exception):
    """The weights hold a NaN or an infinity: they must not be saved."""


def load_draft(family: str, folder: Path) -> StandaloneDraft:
    """The draft of a folder.

    Raises: ValueError for a family that can not learn online; as `heads.checkpoint.load_causal_lm`.
    """
    if family not in FAMILIES:
        raise ValueError(f"drafts of family {family} do not learn online yet: only {', '.join(FAMILIES)} do")
    return FAMILIES[family](folder)


class Candidate:
    """One draft and its optimizer. Every method runs on all ranks alike; a loss that is not finite changes nothing."""

    def __init__(self, cfg: Training, family: str) -> None:
        self.cfg, self.family = cfg, family
        self.accelerator = make_accelerator(cfg.accumulation, cfg.mixed_precision, None)
        self._distillation: Distillation | None = None

    @property
    def distillation(self) -> Distillation:
        assert self._distillation is not None, "begin comes first"
        return self._distillation

    @property
    def is_hopeless(self) -> bool:
        """So many steps in a row were not finite that the next ones will not be."""
        return self.distillation.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW // 2

    def begin(self, version: Path) -> None:
        """The weights of a version, and an optimizer that has seen nothing."""
        if self._distillation is not None:
            self._distillation.close()
        draft = load_draft(self.family, version)
        self.version, self.dtype = version, draft.model.dtype
        cfg = self.cfg
        optim = Optim(
            lr=cfg.lr,
            weight_decay=cfg.weight_decay,
            schedule="constant",
            warmup_fraction=1.0,
            max_grad_norm=cfg.max_grad_norm,
            accumulation=cfg.accumulation,
        )
        divergence = Divergence(name=cfg.divergence)
        # In float32: a small step of AdamW is lost in bf16's 8 bits.
        self._distillation = Distillation(
            draft.float(), signal_of, divergence, optim, cfg.warmup_steps, self.accelerator
        )

    def resume(self, version: Path, checkpoint: Path) -> None:
        """Where `checkpoint` was; `version` tells the shape."""
        self.begin(version)
        self.distillation.resume(checkpoint / STATE)

    def step(self, records: Sequence[Record], seed: int) -> StepStats:
        """One optimizer step on the records, shared among the ranks."""
        rng = np.random.default_rng(seed)
        texts = texts_of(records, branches_per_record=self.cfg.branches_per_record, rng=rng)
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        batches = batches_of(
            texts, num_batches=ranks * self.cfg.accumulation, sequence_length=self.cfg.sequence_length, seed=seed
        )
        return self.distillation.step([self._on_device(batch) for batch in batches[rank::ranks]])

    def write(self, folder: Path) -> None:
        """The checkpoint's STATE and DRAFT.

        Raises: NotFiniteError.
        """
        weights = self.accelerator.get_state_dict(self.distillation.module)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
            raise NotFiniteError
        self.distillation.save(folder / STATE)
        if self.accelerator.is_main_process:
            draft = cast(StandaloneDraft, self.distillation.draft)
            weights = {name.removeprefix("draft.model."): tensor for name, tensor in weights.items()}
            draft.export(folder / DRAFT, load_tokenizer(self.version), dtype=self.dtype, weights=weights)
            # A server takes only what has the very configuration it was started with.
            shutil.copy(self.version / "config.json", folder / DRAFT)

    def rest(self) -> None:
        """Nothing: an order now and then keeps the other ranks' wait from timing out."""

    def _on_device(self, batch: RecordedBatch) -> RecordedBatch:
        signal = batch.signal
        distribution = type(signal.distribution)(**send_to_device(vars(signal.distribution), self.accelerator.device))
        tensors = {name: value for name, value in vars(batch).items() if name != "signal"}
        moved = send_to_device(tensors, self.accelerator.device)
        return RecordedBatch(**moved, signal=type(signal)(distribution=distribution))


class Ranks:
    """Calls a method of every rank's candidate. `do` is rank 0's alone, and from one thread."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.is_alone = candidate.accelerator.num_processes == 1

    def do(self, method: str, *args: Any) -> Any:
        """What the method returns on rank 0."""
        if not self.is_alone:
            broadcast_object_list([(method, args)])
        return getattr(self.candidate, method)(*args)

    def follow(self) -> None:
        """What the other ranks do until rank 0 calls `dismiss`."""
        while True:
            told: list[Any] = [None]
            broadcast_object_list(told)
            if told[0] is None:
                return
            method, args = told[0]
            getattr(self.candidate, method)(*args)

    def dismiss(self) -> None:
        if not self.is_alone:
            broadcast_object_list([None])
