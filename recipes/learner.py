"""Learn from a running fleet's traffic: train its draft, prove every candidate, swap it in, watch, roll back.

    $ redraft learner --print-config > learner.toml      # every setting with its meaning
    $ redraft learner --config learner.toml
    $ redraft learner --config learner.toml --set training.lr=1e-3 --set fleet.poll_s=5

Beside two servers that `redraft serve` started, this is enough:

    target = "models/llama-8b"                  # what the servers serve
    registry = "drafts/llama-8b"                # their --registry: versions v000001, v000002, ...
    spool = "spool"                             # their --capture.spool: where records of traffic arrive
    [draft]
    initial = "drafts/llama-8b-offline"         # becomes v000001
    [fleet]
    servers = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    token_file = "token"                        # their --token-file

One learner owns a registry. It may be killed at any moment and goes on where it was; on several GPUs start it with
`accelerate launch -m online.learner --config learner.toml`. `redraft versions`, `redraft swap` and `redraft rollback`
talk to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from online.config import example, load_config
from recipes.cli import run_recipe
from recipes.settings_file import SettingsFile


@dataclass(frozen=True, kw_only=True)
class Config(SettingsFile):
    config: Path = Path("learner.toml")
    """The TOML file."""


def main(cfg: Config) -> None:
    if cfg.print_config:
        print(example())
        return
    settings = load_config(cfg.config, cfg.set)
    from online.learner import run  # loads torch: a mistake in the file is told before

    run(settings)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
