"""Train a draft, prove it in a real vLLM, and write a report.

$ redraft train eagle3 --target Qwen/Qwen3-8B --data.source answers.jsonl
$ redraft train eagle3 --config eagle3.toml --optim.lr 3e-4        # settings from a file; flags win
$ accelerate launch -m redraft.recipes.cli train dflash --target Qwen/Qwen3-8B           # on all GPUs
$ redraft train standalone --target Qwen/Qwen3-8B --draft.checkpoint Qwen/Qwen3-0.6B --loop.batch-size 2

The run folder receives the config, metrics, checkpoints, the exported draft and a report. After an
interruption, run the same command again to continue. At the end, vLLM serves the target with and
without the draft, unless --prove.no-engine is set. `recipes/accelerate` in the package contains
configurations that shard a draft over GPUs.
"""

import functools
from collections.abc import Sequence
from typing import Any

from redraft.distill.train.run_config import HeadConfig, StandaloneConfig, make_config
from redraft.heads.catalog import find_family, list_trained
from redraft.heads.family import Family
from redraft.recipes.cli.run import Recipe, run_choice
from redraft.recipes.cli.wrapping import wrap_prose

Config = HeadConfig[Any] | StandaloneConfig

COMMON = frozenset(
    {
        "TrainConfig.target",
        "TrainConfig.output",
        "TrainConfig.overwrite",
        "HeadConfig.init",
        "HeadConfig.draft_vocab_size",
        "Standalone.checkpoint",
        "Standalone.layers",
        "Data.source",
        "Signal.kind",
        "Signal.url",
        "Optim.lr",
        "Loop.steps",
        "Loop.batch_size",
        "Loop.sequence_length",
        "Prove.engine",
        "Prove.num_speculative_tokens",
    }
)
"""Flags that `--help` prints. `--help-all` prints all flags."""


def choose_recipe(args: Sequence[str], prog: str) -> tuple[Recipe, Sequence[str]]:
    """Return the recipe for the family that the first argument names, and the other arguments.

    Raises:
        ValueError: the first argument names no family.
        SystemExit: the help without a family was printed.
    """
    names = list_trained()
    if not args or args[0] in ("-h", "--help", "--help-all"):
        flags = (
            f"FAMILY is one of {', '.join(names)}. `{prog} FAMILY --help` prints the common flags, "
            "and --help-all all flags."
        )
        print(f"usage: {prog} FAMILY [flags]\n\n{wrap_prose(__doc__)}\n\n{wrap_prose(flags)}")
        raise SystemExit(0)
    name, choice = args[0], f"choose one of {', '.join(names)}"
    if name.startswith("-"):
        raise ValueError(f"{prog} needs the FAMILY first, before {name}: {choice}")
    if name not in names:
        raise ValueError(f"there is no family {name} to train: {choice}")
    family = find_family(name)
    recipe = Recipe(
        main=functools.partial(main, family),
        config_type=HeadConfig if family.is_head else StandaloneConfig,
        default=make_config(family),
        description=f"Train a draft ({family.title}), prove it in a real vLLM, and write a report.",
        common=COMMON,
        prog=f"{prog} {name}",
    )
    return recipe, args[1:]


def main(family: Family, cfg: Config) -> None:
    """Train a draft of the given family. Raises the same errors as `run`."""
    from redraft.distill.run.training_run import run  # imported here, because it imports torch

    run(family, cfg)


if __name__ == "__main__":
    run_choice(choose_recipe)
