"""Train a draft from the traffic of a running fleet.

The learner trains the draft, evaluates every candidate, swaps it in, monitors it, and rolls it back
if acceptance falls.

    $ redraft learner --print-config > learner.toml      # all settings, with explanations
    $ redraft learner --config learner.toml
    $ redraft learner --config learner.toml --set training.lr=1e-3 --set fleet.poll_s=5

For two servers started with `redraft serve`, this file is enough:

    target = "models/llama-8b"                  # the served model
    registry = "drafts/llama-8b"                # the servers' --registry: versions v000001, v000002, ...
    spool = "spool"                             # the servers' --capture.spool: records of traffic arrive here
    [draft]
    initial = "drafts/llama-8b-offline"         # becomes v000001
    [fleet]
    servers = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    token_file = "token"                        # the servers' --token-file

Only one learner can use a registry at a time. It can be killed at any time; after a restart, it
continues where it stopped. On several GPUs, start it with `accelerate launch -m redraft.recipes.cli
learner --config learner.toml`. `redraft fleet versions`, `redraft fleet swap` and `redraft fleet
rollback` send their requests to the running learner.
"""

from dataclasses import dataclass
from pathlib import Path

from redraft.files.settings import SettingsFile, render_example
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.daemon.memory import bound_caches


@dataclass(frozen=True, kw_only=True)
class LearnerCommandConfig(SettingsFile):
    config: Path = Path("learner.toml")
    """TOML file with the learner's settings."""


def main(cfg: LearnerCommandConfig) -> None:
    if cfg.print_config:
        print(render_example(LearnerConfig, cfg.set))
        return
    settings = load_config(cfg.config, cfg.set)
    # torch reads these variables at its first operation, so they must be set before the import
    # below.
    bound_caches()
    # This module imports torch, so it is imported after the settings have been checked.
    from redraft.online.daemon.learner import run

    run(settings)
