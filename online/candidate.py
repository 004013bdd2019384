"""The draft in training on all ranks: begun from a version, stepped on records, written as checkpoint and as draft.

    rank 0   Ranks.do("step", records, seed) ──broadcast──► rank 1..n   Ranks.follow
                     └──────────── Candidate.step ─────────────┘

One process needs none of this and pays nothing for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, send_to_device
from torch import Tensor

from distill.loop import make_accelerator
from distill.losses import Divergence
from distill.ranks import leave
from distill.train import MAX_SKIPPED_IN_A_ROW, Distillation, Optim, StepStats, fits
from heads.checkpoint import load_tokenizer
from heads.draft import TargetSignal
from heads.families import family
from heads.standalone import StandaloneDraft
from heads.target import Target
from heads.tensors import read_config
from online.config import Training
from online.records import Record
from online.replay import Reads, RecordedBatch, batches_of, signal_of, texts_of


@dataclass(frozen=True)
class Learnable:
    """A kind of draft that can learn from records."""

    load: Callable[[Path, Callable[[], Target]], Any]
    """The draft of a folder, and the target whose embeddings a head borrows."""
    reads: Reads


def _head(name: str, reads: Reads) -> Learnable:
    return Learnable(lambda folder, target: family(name).head.load(folder, target()), reads)


FAMILIES = {
    "standalone": Learnable(lambda folder, target: StandaloneDraft.load(folder), "nothing"),
    "eagle1": _head("eagle1", "last"),
    "eagle3": _head("eagle3", "layers"),
}

STATE, DRAFT = "state", "draft"
"""Folders of a checkpoint: what training resumes from, and what would be served."""


class NotFiniteError(Exception):
    """The weights hold a NaN or an infinity: they must not be saved."""


def hidden_shape(name: str, folder: Path) -> tuple[int, int] | None:
    """The hidden states, how many of a token and their size, that the exported draft reads; None: it reads none.

    Raises: ValueError for a family that can not learn online.
    """
    if _learnable(name).reads == "nothing":
        return None
    config = read_config(folder)
    size = config.get("transformer_layer_config", config)["hidden_size"]
    layers = config["eagle_aux_hidden_state_layer_ids"] if FAMILIES[name].reads == "layers" else [None]
    return len(layers), size


def _learnable(name: str) -> Learnable:
    if name not in FAMILIES:
        raise ValueError(f"drafts of family {name} do not learn online: only {', '.join(FAMILIES)} do")
    return FAMILIES[name]


class Candidate:
    """One draft and its optimizer. Every method runs on all ranks alike; a loss that is not finite changes nothing."""

    def __init__(self, cfg: Training, name: str, target: Path) -> None:
        """`name` of the family; `target`: the folder whose embeddings a head borrows."""
        self.cfg, self.learnable, self.target = cfg, _learnable(name), target
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

    def load(self, folder: Path) -> Any:
        """The draft of a folder on this rank's device, in its own type.

        Raises: ValueError or OSError where it can not be read, or is of another family.
        """
        return self.learnable.load(folder, lambda: self._borrowed).to(self.accelerator.device)

    @cached_property
    def _borrowed(self) -> Target:
        """The target's embeddings and head, on this rank's device: read once for all heads."""
        found, device = Target.from_folder(self.target), self.accelerator.device
        return replace(found, embed_VD=found.embed_VD.to(device), head_VD=found.head_VD.to(device))

    def begin(self, version: Path) -> None:
        """The weights of a version, and an optimizer that has seen nothing."""
        if self._distillation is not None:
            self._distillation.close()
        draft = self.load(version)
        self.version = version
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
        """Where `checkpoint` was; `version` tells the shape. Of one that other ranks wrote only the draft can be taken
        up, with an optimizer that has seen nothing."""
        if fits(checkpoint / STATE, self.accelerator):
            self.begin(version)
            self.distillation.resume(checkpoint / STATE)
        else:
            self.begin(checkpoint / DRAFT)
            self.version = version

    def step(self, records: Sequence[Record], seed: int) -> StepStats:
        """One optimizer step on the records, shared among the ranks."""
        rng = np.random.default_rng(seed)
        reads = self.learnable.reads
        # Rejected branches were read by the target, but what it made of them is not in the records.
        branches = self.cfg.branches_per_record if reads == "nothing" else 0
        texts = texts_of(records, branches_per_record=branches, rng=rng)
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        batches = batches_of(
            texts,
            num_batches=ranks * self.cfg.accumulation,
            sequence_length=self.cfg.sequence_length,
            seed=seed,
            reads=reads,
        )
        mine = [on_device(batch, self.accelerator.device) for batch in batches[rank::ranks]]
        return self.distillation.step(mine)

    def write(self, folder: Path) -> None:
        """The checkpoint's STATE and DRAFT.

        Raises: NotFiniteError.
        """
        weights = self.distillation.weights()
        are_finite = [all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())]
        broadcast_object_list(are_finite)  # of what only the first rank may hold
        if not are_finite[0]:
            raise NotFiniteError
        self.distillation.save(folder / STATE)
        if self.accelerator.is_main_process:
            self._export(folder / DRAFT, weights)
            # A server takes only what has the very configuration it was started with.
            shutil.copy(self.version / "config.json", folder / DRAFT)

    def _export(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """As the version is exported: in its type, and a head in its layout."""
        draft, config = self.distillation.draft, read_config(self.version)
        dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype", "float32"))
        if isinstance(draft, StandaloneDraft):
            weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
            draft.export(folder, load_tokenizer(self.version), dtype=dtype, weights=weights)
        else:
            head = self.load(self.version)  # with all of the weights: the one in training may be sharded
            head.load_state_dict(weights)
            head.export(folder, dtype, **({"layout": "speculators"} if "speculators_model_type" in config else {}))

    def rest(self) -> None:
        """Nothing: an order now and then keeps the other ranks' wait from timing out."""


def on_device(batch: RecordedBatch, device: torch.device) -> RecordedBatch:
    signal = vars(batch.signal)
    distribution = type(batch.signal.distribution)(**send_to_device(vars(batch.signal.distribution), device))
    signal = send_to_device({name: value for name, value in signal.items() if name != "distribution"}, device)
    tensors = send_to_device({name: value for name, value in vars(batch).items() if name != "signal"}, device)
    return RecordedBatch(**tensors, signal=TargetSignal(distribution=distribution, **signal))


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
                leave(self.candidate.accelerator)
                return
            method, args = told[0]
            with suppress(NotFiniteError):  # of all ranks alike: the first one decides what then
                getattr(self.candidate, method)(*args)

    def dismiss(self) -> None:
        if not self.is_alone:
            broadcast_object_list([None])
            leave(self.candidate.accelerator)
