"""Trainers of other projects on the rows of a course, with the settings that they have by default.

Each side keeps its own model, start, loss, optimizer, schedule and precision. What all share is what
is outside of a trainer: the rows, in one order, and the target's states, which are computed here and
counted for all. A project's own pipeline would read the states from a server or a disk.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

from benchmarks.time_to_tau.course import Training
from redraft.heads.draft import Batch, TargetSignal

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Peer:
    package: str
    """To import."""
    distribution: str
    """To install."""
    families: tuple[str, ...]
    train: Callable[[Training], None]

    def require(self, family: str, folder: Path | None) -> None:
        """Raise ValueError if it is neither installed nor in `folder`, or trains no such family."""
        if family not in self.families:
            raise ValueError(f"{self.distribution} is compared for {', '.join(self.families)} only")
        places = [str(folder)] if folder else []
        if not (
            importlib.util.find_spec(self.package) or PathFinder.find_spec(self.package, places)
        ):
            raise ValueError(
                f"there is no package {self.package}: pip install --no-deps --target "
                f"FOLDER {self.distribution}, and give --peers FOLDER; or leave it out of --trainers"
            )


def split_documents(batch: Batch, signal: TargetSignal) -> Iterator[Sample]:
    """The documents of a batch as speculators' data sets give them.

    The last of the target's layers in `signal` is the last one, before the final norm.
    """
    assert signal.aux_BTLD is not None
    for row, documents_T in enumerate(batch.document_BT):
        for document in range(int(documents_T.max()) + 1):
            at = (documents_T == document).nonzero().squeeze(-1)
            states_TLD = signal.aux_BTLD[row, at]
            yield {
                "hidden_states": states_TLD[:, :-1].flatten(1),
                "verifier_last_hidden_states": states_TLD[:, -1],
                "input_ids": batch.input_ids_BT[row, at],
                "loss_mask": batch.loss_mask_BT[row, at],
                "lengths": torch.tensor([len(at)]),
                "position_ids": torch.arange(len(at)),
            }


class _Rows:
    """What speculators' trainer takes for a data loader: the planned batches, in order."""

    batch_sampler = None

    def __init__(self, training: Training, states: Any, collate: Any, rows: int) -> None:
        self.training, self.states, self.collate, self.rows = training, states, collate, rows
        self.first, self.count = 0, 0
        self.latest: Batch | None = None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(self.first, self.first + self.count):
            self.latest = self.training.batch(index, self.rows)
            yield self.collate(list(split_documents(self.latest, self.states(self.latest))))


def train_speculators(training: Training) -> None:
    """speculators' `Trainer` with the defaults of `speculators train`.

    Different are what a CPU does not run: eager losses instead of Triton's, dense attention instead
    of flex attention, and no timing of GPU queues. `--max-steps` gives its schedule the length.
    """
    from speculators.model import SpeculatorModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import cli
    from speculators.train import trainer as its
    from speculators.train.config import TrainConfig
    from speculators.train.data import CollateFn

    logging.getLogger("speculators").setLevel(logging.WARNING)
    course, opened = training.course, training.run.opened
    its.get_local_rank = lambda: torch.device("cpu")
    its._StepTimer.reset = lambda self, enabled: None
    chosen = {
        "verifier_name_or_path": str(opened.folder),
        "speculator_type": course.family,
        "seed": course.seed,
        "loss_implementation": "eager",
        "draft_attn_impl": "sdpa",
        "save_path": str(Path(course.output) / "run" / "speculators"),
    }
    chosen |= dict(setting.split("=", 1) for setting in course.settings)
    defaults = TrainConfig.from_sources(cli=chosen, argv=[])
    rows = course.rows or max(1, defaults.data.total_seq_len // course.sequence_length)
    chosen["total_seq_len"] = rows * course.sequence_length

    def build(max_steps: int) -> tuple[Any, Any, _Rows]:
        args = argparse.Namespace(
            **TrainConfig.from_sources(cli=chosen | {"max_steps": max_steps}, argv=[]).flatten()
        )
        cli.set_seed(args.seed)
        family = SpeculatorModel.registry[args.speculator_type]
        vocabulary = opened.text_config.vocab_size
        model = cli.build_draft_model(args, family, None, None, vocabulary)
        call, _ = family.get_trainer_kwargs(**vars(args))
        names = its.TrainerConfig._fields
        config = its.TrainerConfig(
            num_epochs=args.epochs,
            train_call_kwargs=call,
            hidden_states_dtype=getattr(torch, args.hidden_states_dtype),
            **{
                name: getattr(args, name)
                for name in names
                if hasattr(args, name) and name != "hidden_states_dtype"
            },
        )
        layers = tuple(model.target_layer_ids)
        collate = CollateFn(
            args.total_seq_len,
            opened.text_config.hidden_size,
            len(layers),
            config.hidden_states_dtype,
            shift_batch if course.family == "eagle3" else None,
        )
        states = training.states((*layers, opened.text_config.num_hidden_layers))
        feed = _Rows(training, states, collate, rows)
        trainer = its.Trainer(model, config, feed)
        trainer.device_type = "cpu"
        training.settings = {
            "version": importlib.metadata.version("speculators"),
            "settings": vars(args),
        }
        return model, trainer, feed

    _, trial, feed = build(1000)

    def take(step: int) -> None:
        feed.first, feed.count = step, 1
        trial.train_epoch(0)

    training.plan(take)
    training.clock.start()
    model, trainer, feed = build(training.planned)
    training.clock.stop()
    feed.count = training.planned
    with training.marking(model.save_pretrained) as done:
        trainer.train_epoch(0, step_callback=lambda: done(feed.latest))


PEERS = {
    "speculators": Peer(
        package="speculators",
        distribution="speculators==0.9.0",
        families=("eagle3", "dflash"),
        train=train_speculators,
    ),
}
