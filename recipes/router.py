"""Send every request to the servers that have the draft of its domain: one OpenAI-compatible address for all of them.

    $ redraft domains --data prompts.jsonl --output outputs/domains     # what kinds of prompts there are
    $ redraft router --print-config > router.toml                      # every setting with its meaning
    $ redraft router --config router.toml
    $ redraft router --config router.toml --set port=8080 --set poll_s=1

A small router.toml, and the fleet.toml that it shares with the learners:

    fleet = "fleet.toml"                  [[servers]]
    clusters = "outputs/domains"          url = "http://10.0.0.5:8000"
    target = "models/llama-8b"            domain = "code"
    [aliases]                             [[servers]]
    llama-code = "code"                   url = "http://10.0.0.6:8000"
                                          domain = "prose"

A request is of the domain that its header X-Redraft-Domain says, else that the model it asks for stands for, else that
its text is like. It goes to the server of this domain with the fewest requests under way; where none of these takes a
connection, to one without a domain, then to any. /metrics is Prometheus's, /redraft/router has every server's state.

Each domain has a learner of its own, with `domain = "code"`, a registry and a spool (or a shared ingest log).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from online.config import example, read_toml
from online.proxy import serve
from online.router import RouterConfig, router, servers
from recipes.cli import run_recipe
from recipes.settings_file import SettingsFile


@dataclass(frozen=True, kw_only=True)
class Config(SettingsFile):
    config: Path = Path("router.toml")
    """The TOML file."""


def main(cfg: Config) -> None:
    if cfg.print_config:
        print(example(RouterConfig))
        return
    settings = read_toml(cfg.config, RouterConfig, cfg.set)
    app = router(settings)
    by_domain = Counter(domain or "any" for _, domain in servers(settings.fleet))
    shown = ", ".join(f"{count} for {domain}" for domain, count in sorted(by_domain.items()))
    print(f"router: http://{settings.host}:{settings.port}, servers: {shown}", flush=True)
    serve(app, settings.host, settings.port)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
