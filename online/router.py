"""The router: one OpenAI-compatible address for servers that have drafts of different domains.

    fleet.toml ─► pools ◄─ every poll_s: read again, and who was down is asked for its health
    clients ─► proxy: domain ─► pool ─► server ; X-Redraft-Domain tells the server, whose records carry it

    [[servers]]                              router.toml     fleet = "fleet.toml"
    url = "http://10.0.0.5:8000"                             clusters = "outputs/domains"
    domain = "code"                                          [aliases]
    ...                                                      llama-code = "code"

A request's domain is what its header says, else what the model it asks for stands for, else what its text is like.
Servers without a domain take requests of no domain, of a domain without servers, and of a pool that is down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from heads.artifact import fingerprint
from online.discovery import listed
from online.domains import Clusters, Domains, token_decoder
from online.pools import Pools
from online.proxy import Proxy
from online.request_origin import require_label
from online.tap import Tap, TapConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    fleet: Path
    """fleet.toml: every server's url, and the domain whose draft it serves. It is read again whenever it may have
    changed; learners read the same file."""
    clusters: Path | None = None
    """Folder that `redraft domains` made, to tell the domain of a request that says none."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Domain by the name of a model that clients ask for. Every server has to know it: vLLM's --served-model-name takes
    several."""
    target: Path | None = None
    """Folder of the model that is served: needed for records, and to read prompts that come as token ids."""
    host: str = "127.0.0.1"
    port: int = 8080
    poll_s: float = 2.0
    """Between two looks at fleet.toml and at servers that were down."""
    tap: TapConfig = field(default_factory=TapConfig)
    """Records from here, where the servers have no plugin that makes them: with a spool or an ingest log."""

    def __post_init__(self) -> None:
        for domain in self.aliases.values():
            require_label(domain)
        if self.poll_s <= 0:
            raise ValueError(f"poll_s is {self.poll_s}: it must be above 0")
        if self.tap.is_on and self.target is None:
            raise ValueError("records name their target by its fingerprint: set target to the folder of the model")


def router(cfg: RouterConfig) -> Router:
    """The application: /metrics and /redraft/router are its own, the rest is passed on.

    Raises: ValueError, OSError for what the user can mend.
    """
    pools = Pools(lambda: servers(cfg.fleet), cfg.poll_s)
    domains = Domains(
        aliases=cfg.aliases,
        clusters=Clusters.read(cfg.clusters) if cfg.clusters else None,
        decode=token_decoder(cfg.target) if cfg.clusters and cfg.target else None,
    )
    tap = Tap(cfg.tap, fingerprint(cfg.target)) if cfg.tap.is_on and cfg.target else None
    metrics = CollectorRegistry()
    metrics.register(Counts(pools))

    async def show_metrics(request: Request) -> Response:
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    async def show_servers(request: Request) -> Response:
        shown = [
            {"url": m.url, "domain": m.domain, "is_down": m.is_down, "requests": m.requests} for m in pools.members
        ]
        return JSONResponse({"servers": shown})

    own = [Route("/metrics", show_metrics), Route("/redraft/router", show_servers)]
    return Proxy(pools, domains=domains, tap=tap).app(own)


def servers(fleet: Path) -> list[tuple[str, str]]:
    """Address and domain of every server of fleet.toml. Raises: ValueError, also where there is none; OSError."""
    found = [(server.url, server.domain) for server in listed(fleet)]
    if not found:
        raise ValueError(f"{fleet} lists no servers: begin each with [[servers]] and give it a url")
    return found


class Counts(Collector):
    """What the pools counted, in Prometheus's form."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "redraft_router_requests", "Requests that a server took", labels=["domain", "pool"]
        )
        for (domain, pool), count in self.pools.requests.items():
            requests.add_metric([domain, pool], count)
        fallbacks = CounterMetricFamily(
            "redraft_router_fallbacks", "Requests that no server of their own pool took", labels=["domain"]
        )
        for domain in self.pools.domains:
            fallbacks.add_metric([domain], self.pools.fallbacks[domain])
        refused = CounterMetricFamily(
            "redraft_router_refused_connections", "Connections that a server did not take", labels=["server"]
        )
        under_way = GaugeMetricFamily(
            "redraft_router_requests_under_way", "Requests that are being answered", labels=["server", "pool"]
        )
        up = GaugeMetricFamily(
            "redraft_router_server_up", "0 for a server that is passed over", labels=["server", "pool"]
        )
        for member in self.pools.members:
            refused.add_metric([member.url], self.pools.refused_connections[member.url])
            under_way.add_metric([member.url, member.domain], member.requests)
            up.add_metric([member.url, member.domain], not member.is_down)
        return [requests, fallbacks, refused, under_way, up]
