"""Settings for training runs of a few minutes on two CPU cores, for the small target of the tests.

All families share these settings, so that their results can be compared.

$ python -m benchmarks.studies.presets eagle3 --loop.steps 32      # `redraft train eagle3` with these defaults
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from redraft.distill.loss.choice import Divergence
from redraft.distill.train.optim import Optim
from redraft.distill.train.run_config import (
    Data,
    HeadConfig,
    Loop,
    Prove,
    StandaloneConfig,
    make_config,
)
from redraft.heads.catalog import find_family
from redraft.heads.options import Standalone
from redraft.recipes import train
from redraft.recipes.cli.run import Recipe, run_choice

SHARED: dict[str, Any] = {
    "target": "tests/assets/tiny-target",
    "target_dtype": "float32",  # to compare outputs token for token on every CPU
    "data": Data(source="stdlib", held_out=0.05, max_prompt_tokens=512),
    "divergence": Divergence(name="forward_kl"),
    "mixed_precision": "bf16",
}
HEADS: dict[str, Any] = {
    "optim": Optim(lr=2e-3),
    "loop": Loop(
        steps=64, batch_size=4, sequence_length=1024, eval_every=16, eval_batches=1, save_every=64
    ),
    "prove": Prove(num_speculative_tokens=3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle1": {"num_steps": 3},
    "eagle3": {"aux_layer_ids": (2, 4, 7), "num_steps": 3, "fc_norm": False},
    "peagle": {"aux_layer_ids": (2, 4, 7), "num_layers": 2, "num_steps": 3},
    "dflash": {
        "aux_layer_ids": (2, 4, 7),
        "num_layers": 2,
        "block_size": 4,
        "num_anchors": 256,
        "gamma": 4.0,
    },
    "dspark": {
        "aux_layer_ids": (2, 4, 7),
        "num_layers": 2,
        "block_size": 3,
        "num_anchors": 256,
        "markov_rank": 64,
    },
    "medusa": {"num_heads": 3},
    "mtp": {"num_steps": 3, "as_mimo": True},
}


def make_preset(family: str) -> HeadConfig[Any] | StandaloneConfig:
    """Return the settings of a family's demo."""
    row = find_family(family)
    usual = make_config(row)
    if isinstance(usual, StandaloneConfig):
        return replace(
            usual,
            **SHARED,
            draft=Standalone(layers=(0, 6)),
            optim=Optim(lr=3e-3),
            loop=Loop(
                steps=400,
                batch_size=2,
                sequence_length=1024,
                eval_every=100,
                eval_batches=8,
                save_every=200,
            ),
            prove=Prove(num_speculative_tokens=4),
            output=Path("outputs/demo-tiny"),
        )
    changes = {**SHARED, **HEADS, "head": replace(usual.head, **OPTIONS[family])}
    changes["output"] = Path("outputs/demo-heads") / family
    if row.training and row.training.draft_vocab_size:
        changes["draft_vocab_size"] = 2048
    if family == "dspark":
        changes["prove"] = replace(changes["prove"], engine=False)
    if family in ("mtp", "eagle3"):
        changes["init"] = "last_layer"  # as other families: a better start would hide the rest
    return replace(usual, **changes)


def choose_recipe(args: Sequence[str], prog: str) -> tuple[Recipe, Sequence[str]]:
    """Choose the recipe of `redraft train` with these defaults.

    Raises the errors of `recipes.train.choose_recipe`.
    """
    recipe, rest = train.choose_recipe(args, prog)
    return replace(recipe, default=make_preset(args[0].replace("-", "_"))), rest


if __name__ == "__main__":
    run_choice(choose_recipe)
