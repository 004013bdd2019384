"""Route requests to the servers with the draft of the right domain, behind one OpenAI-compatible
address.

    $ redraft data domains --prompts prompts.jsonl --output outputs/domains  # find the domains
    $ redraft router --print-config > router.toml                      # all settings, with explanations
    $ redraft router --config router.toml
    $ redraft router --config router.toml --set port=8080 --set poll_s=1

A small router.toml, and the fleet.toml shared with the learners:

    fleet = "fleet.toml"                  [[servers]]
    clusters = "outputs/domains"          url = "http://10.0.0.5:8000"
    target = "models/llama-8b"            domain = "code"
    [aliases]                             [[servers]]
    llama-code = "code"                   url = "http://10.0.0.6:8000"
                                          domain = "prose"

The header X-Redraft-Domain decides a request's domain; without it the model name, if it is an
alias; without that the text of the prompt. The request goes to the server of this domain with the
fewest requests in flight. If no server of the domain accepts a connection, it goes to one without a
domain, then to any. Clients get the servers' API and nothing else: /metrics (Prometheus) and
/redraft/router (the state of every server) are on admin_port, on this machine only.

Each domain needs a learner, with `domain = "code"`, a registry, and a spool (or a shared ingest
log).
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from redraft.online.records.guard import Guard
from redraft.online.settings import SettingsFile, read_toml, render_example
from redraft.online.traffic.front import AdminServer, serve
from redraft.online.traffic.router import RouterConfig, build_router, read_servers


@dataclass(frozen=True, kw_only=True)
class Config(SettingsFile):
    config: Path = Path("router.toml")
    """TOML file with the router's settings."""


def main(cfg: Config) -> None:
    if cfg.print_config:
        print(render_example(RouterConfig))
        return
    settings = read_toml(cfg.config, RouterConfig, cfg.set)
    guard = Guard()
    app, admin_app = build_router(settings, guard)
    admin = (
        AdminServer(admin_app, settings.admin_host, settings.admin_port)
        if settings.admin_port
        else None
    )
    by_domain = Counter(domain or "any" for _, domain in read_servers(settings.fleet))
    shown = ", ".join(f"{count} for {domain}" for domain, count in sorted(by_domain.items()))
    print(f"router: http://{settings.host}:{settings.port}, servers: {shown}", flush=True)
    serve(app, settings.host, settings.port, admin, guard)
