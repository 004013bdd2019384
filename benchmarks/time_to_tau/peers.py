"""Run the trainers of other projects on the rows of a course, with their default settings.

Each side keeps its own model, start, loss, optimizer, schedule and precision. All sides share
everything outside the trainer: the rows, in the same order, and the target's states. The states are
computed here, and their time counts for every side. A project's own pipeline would read the states
from a server or a disk.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import importlib.resources
import importlib.util
import io
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.time_to_tau.course import Training
from redraft.engine.hardware import this_machine
from redraft.files.folder import CONFIG
from redraft.heads.draft import Batch, ExactTarget, TargetSignal
from redraft.heads.target import aux_layers

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
        """Raise ValueError if the trainer is not installed, or does not train this family.

        It may be installed in `folder`.
        """
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
    """Return the documents of a batch in the form of speculators' data sets.

    The last layer in `signal` is the target's last layer, before the final norm.
    """
    assert signal.aux_BTLD is not None
    for row, at in list_documents(batch):
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
    """Replacement for the data loader of speculators' trainer: the planned batches, in order."""

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
    """Train with the `Trainer` of speculators and the defaults of `speculators train`.

    The only differences are those that a CPU requires: eager losses instead of Triton's, dense
    attention instead of flex attention, no timing of GPU queues, and float32 on a CPU without
    bfloat16. `--max-steps` sets the length of its schedule.
    """
    from speculators.model import SpeculatorModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import cli
    from speculators.train import trainer as its
    from speculators.train.config import TrainConfig
    from speculators.train.data import CollateFn

    logging.getLogger("speculators").setLevel(logging.WARNING)
    course, opened = training.course, training.run.target.files
    its.get_local_rank = lambda: torch.device("cpu")
    its._StepTimer.reset = lambda self, enabled: None
    chosen = {
        "verifier_name_or_path": str(opened.folder),
        "speculator_type": course.family,
        "seed": course.seed,
        "loss_implementation": "eager",
        "draft_attn_impl": "sdpa",
        "hidden_states_dtype": "bfloat16" if this_machine().has_bfloat16 else "float32",
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


def train_modelopt(training: Training) -> None:
    """Train ModelOpt's EAGLE-3 model in the trainer of transformers, as its example does.

    Each step trains on one document, padded to a row. The head's sizes come from the target,
    because the defaults are for a target with 8B parameters. The head is exported without YaRN,
    which is not part of training, and it is not compiled, because on a CPU, choosing kernels takes
    longer than it saves in half an hour.
    """
    import modelopt.torch.speculative as speculative
    from modelopt.torch.export.plugins.hf_spec_export import EagleExporter
    from transformers import Trainer, TrainerCallback, TrainingArguments

    course, config = training.course, training.run.target.files.text_config
    recipe = read_modelopt_recipe()
    layers = aux_layers((), config.num_hidden_layers)
    options = recipe["eagle"] | {
        "eagle_offline": True,
        "eagle_use_torch_compile": False,
        "eagle_export_rope_scaling": {},
        "eagle_architecture_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "use_last_layernorm": True,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_scaling": {
                "rope_type": "default",
                "rope_theta": config.rope_parameters["rope_theta"],
            },
        },
    }
    rates = recipe["training"]
    states, rows = training.states(layers), course.rows or 1

    class Documents(torch.utils.data.IterableDataset[Sample]):
        def __init__(self, first: int) -> None:
            self.first, self.latest = first, training.batch(first, rows)

        def __iter__(self) -> Iterator[Any]:
            for index in itertools.count(self.first):
                batch = training.batch(index, rows)
                signal = states(batch)
                for row, at in list_documents(batch):
                    ids, mask = batch.input_ids_BT[row, at], batch.loss_mask_BT[row, at]
                    self.latest = Batch.packed([[(ids, mask)]], width=len(ids))
                    yield take_offline(signal, row, at, ids, course.sequence_length)

    class Done(TrainerCallback):  # type: ignore[misc]
        def __init__(self, call: Callable[[], object]) -> None:
            self.call = call

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.call()

    def build(max_steps: int, first: int, call: Callable[[], object]) -> tuple[Any, Any, Documents]:
        torch.manual_seed(course.seed)
        model = copy.deepcopy(training.run.target.model)
        with contextlib.redirect_stdout(io.StringIO()):
            speculative.convert(model, [("eagle", options)])
        # Otherwise, it would be created at the first step, with an argument that transformers 5.19
        # has removed.
        model.eagle_module.rotary_emb = LlamaRotaryEmbedding(model.eagle_config)
        arguments = TrainingArguments(
            output_dir=str(Path(course.output) / "run" / "modelopt"),
            per_device_train_batch_size=rates["per_device_train_batch_size"],
            learning_rate=rates["learning_rate"],
            warmup_steps=rates["warmup_steps"],
            lr_scheduler_type=rates["lr_scheduler_type"],
            weight_decay=rates["weight_decay"],
            bf16=rates["bf16"],
            max_steps=max_steps,
            seed=course.seed,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        rows_of = Documents(first)
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows_of,
            data_collator=lambda items: items[0],
            callbacks=[Done(call)],
        )
        return model, trainer, rows_of

    per = 16  # Each call of the trainer has a fixed cost.
    _, trial, seen = build(per, 0, lambda: None)

    def take(step: int) -> None:
        seen.first = step
        trial.train()

    training.plan(take, per)
    training.settings = {
        "version": importlib.metadata.version("nvidia-modelopt"),
        "settings": {"training": rates, "eagle": options},
    }
    done_with: list[Callable[..., None]] = []
    training.clock.start()
    model, trainer, documents = build(training.planned, 0, lambda: done_with[0](documents.latest))
    training.clock.stop()

    def export(folder: Path) -> None:
        EagleExporter(model).export(folder, torch.bfloat16)
        described = json.loads((folder / CONFIG).read_text())
        # vLLM's V2 runner reads the layer ids only from here, and ModelOpt counts layers
        # differently.
        described["eagle_aux_hidden_state_layer_ids"] = list(layers)
        (folder / CONFIG).write_text(json.dumps(described))

    with training.marking(export) as done:
        done_with.append(done)
        trainer.train()


def read_modelopt_recipe() -> dict[str, Any]:
    """Read ModelOpt's EAGLE-3 recipe from its package."""
    import yaml  # type: ignore[import-untyped]

    files = importlib.resources.files("modelopt_recipes")
    path = files / "general" / "speculative_decoding" / "eagle3.yaml"
    return dict(yaml.safe_load(path.read_text()))


def list_documents(batch: Batch) -> Iterator[tuple[int, torch.Tensor]]:
    """List (row, positions) for each document in a batch."""
    for row, documents_T in enumerate(batch.document_BT):
        for document in range(int(documents_T.max()) + 1):
            yield row, (documents_T == document).nonzero().squeeze(-1)


def take_offline(
    signal: TargetSignal, row: int, at: torch.Tensor, ids: torch.Tensor, width: int
) -> dict[str, Any]:
    """Return a document in the form that ModelOpt's offline training reads, padded to `width`."""
    assert isinstance(signal.distribution, ExactTarget)
    assert signal.aux_BTLD is not None
    room = width - len(ids)
    last_TD = signal.distribution.hidden_BTD[row, at]
    states = {
        "base_model_hidden_states": last_TD,
        "aux_hidden_states": signal.aux_BTLD[row, at].flatten(1),
    }
    return {
        "input_ids": pad(ids, (0, room))[None],
        "attention_mask": pad(torch.ones_like(ids), (0, room))[None],
        "base_model_outputs": {
            name: pad(state_TD, (0, 0, 0, room))[None] for name, state_TD in states.items()
        },
    }


PEERS = {
    "speculators": Peer(
        package="speculators",
        distribution="speculators==0.9.0",
        families=("eagle3", "dflash"),
        train=train_speculators,
    ),
    "modelopt": Peer(
        package="modelopt",
        distribution="nvidia-modelopt==0.47.0 omegaconf antlr4-python3-runtime==4.9.3 pulp "
        "nvidia-ml-py",
        families=("eagle3",),
        train=train_modelopt,
    ),
}
