"""Learn from a running fleet's traffic.

Train the draft, prove every candidate, swap it in, watch, roll back.

    $ redraft learner --print-config > learner.toml      # all settings, with explanations
    $ redraft learner --config learner.toml
    $ redraft learner --config learner.toml --set training.lr=1e-3 --set fleet.poll_s=5

With two servers started by `redraft serve`, this is enough:

    target = "models/llama-8b"                  # the served model
    registry = "drafts/llama-8b"                # the servers' --registry: versions v000001, v000002, ...
    spool = "spool"                             # the servers' --capture.spool: records of traffic arrive here
    [draft]
    initial = "drafts/llama-8b-offline"         # becomes v000001
    [fleet]
    servers = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    token_file = "token"                        # the servers' --token-file

One learner owns a registry. It can be killed at any time: when restarted, it continues where it
stopped. On several GPUs, start it with `accelerate launch -m redraft.recipes.cli learner --config
learner.toml`. `redraft fleet versions`, `redraft fleet swap` and `redraft fleet rollback` talk to
the running learner.
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
        print(render_example(LearnerConfig))
        return
    settings = load_config(cfg.config, cfg.set)
    # The variables count only if they are set before torch's first operation, so the import stays
    # below.
    bound_caches()
    from redraft.online.daemon.learner import (
        run,
    )  # loads torch: a mistake in the file is told before

    run(settings)
