"""Train a standalone draft for Llama-3.1-70B-Instruct from Llama-3.2-3B-Instruct.

It needs eight GPUs of 80 GB.

$ recipes=$(python -c 'from redraft import recipes; print(*recipes.__path__)')
$ accelerate launch --config_file $recipes/accelerate/zero2.yaml -m redraft.recipes.distill_llama3b

This is a preset of `redraft train standalone`, so every flag of that command works here. The target
is sharded over the devices, which leaves no room for an engine: run `redraft eval` afterwards.
"""

from dataclasses import replace

from redraft.distill.train.run_config import StandaloneConfig, make_config
from redraft.heads.catalog import find_family
from redraft.recipes import train
from redraft.recipes.cli.run import run_recipe

FAMILY = find_family("standalone")
DEFAULTS = make_config(FAMILY)
assert isinstance(DEFAULTS, StandaloneConfig)


def main(cfg: StandaloneConfig) -> None:
    train.main(FAMILY, cfg)


if __name__ == "__main__":
    cfg = replace(
        DEFAULTS,
        signal=replace(DEFAULTS.signal, shard=True),
        prove=replace(DEFAULTS.prove, engine=False),
        loop=replace(DEFAULTS.loop, batch_size=2),
        gradient_checkpointing=True,
    )
    run_recipe(main, StandaloneConfig, __doc__, default=cfg)
