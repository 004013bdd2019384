"""The router: one OpenAI-compatible address for servers with drafts of different domains.

    fleet.toml ─► pools ◄─ every poll_s: reread the file, check servers that are down
    clients ─► proxy: domain ─► pool ─► server ; X-Redraft-Domain tells the server, whose records
    carry it
    operators ─► admin port: /metrics, /redraft/router, /redraft/tap

    [[servers]]                              router.toml     fleet = "fleet.toml"
    url = "http://10.0.0.5:8000"                             clusters = "outputs/domains"
    domain = "code"                                          [aliases]
    ...                                                      llama-code = "code"

The domain of a request comes from the header, else from an alias of the model, else from the text.
Servers without a domain take requests without a domain, of a domain without servers, and of
unreachable pools.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from redraft.eval.engine.sampling import read_defaults
from redraft.heads.files.folder import fingerprint
from redraft.online.fleet.discovery import list_servers
from redraft.online.records.guard import Guard
from redraft.online.records.origin import require_label
from redraft.online.traffic.domains import Clusters, Domains, load_token_decoder
from redraft.online.traffic.front import FrontConfig
from redraft.online.traffic.pools import Pools
from redraft.online.traffic.proxy import Proxy
from redraft.online.traffic.tap import Tap, TapConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig(FrontConfig):
    fleet: Path = field(metadata={"example": "fleet.toml"})
    """Path of fleet.toml, which lists the url of every server and the domain of its draft. Learners
    read the same file. The router rereads it every poll_s seconds.
    """
    clusters: Path | None = None
    """Folder made by `redraft data domains`. If set, requests without a label or alias get a domain
    from the text.
    """
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Domain by model name, for clients choosing a domain by the model they ask for. Every server
    must accept these names: list them in vLLM's --served-model-name.
    """
    target: Path | None = None
    """Folder of the target model. Needed to record traffic, and to read prompts sent as token ids.
    """
    port: int = 8080
    """Port on which clients are accepted."""
    admin_port: int = 8081
    """Port of /metrics, /redraft/router and /redraft/tap. They name the servers, so clients do not
    get them; 0 turns the port off.
    """
    poll_s: float = 2.0
    """Seconds between two reads of fleet.toml, and between two health checks of servers that are
    down.
    """
    tap: TapConfig = field(default_factory=TapConfig)
    """Recording in the router, for servers without the plugin. Set tap.spool or tap.ingest to turn
    it on.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for domain in self.aliases.values():
            require_label(domain)
        if self.poll_s <= 0:
            raise ValueError(f"poll_s is {self.poll_s}: it must be above 0 seconds")
        if self.tap.is_on and self.target is None:
            raise ValueError(
                "recording needs the fingerprint of the target: set target to the folder of the "
                "model"
            )


def build_router(cfg: RouterConfig, guard: Guard | None = None) -> tuple[Router, Router]:
    """Build the application for clients, which forwards requests, and the one for operators, with
    the router's state.

    Raises:
        ValueError, OSError: for a mistake in the settings or files.
    """
    guard = guard or Guard()
    pools = Pools(lambda: read_servers(cfg.fleet), cfg.poll_s, guard)
    domains = Domains(
        aliases=cfg.aliases,
        clusters=Clusters.read(cfg.clusters) if cfg.clusters else None,
        decode=load_token_decoder(cfg.target) if cfg.clusters and cfg.target else None,
    )
    tap = None
    if cfg.tap.is_on and cfg.target:
        tap = Tap(cfg.tap, fingerprint(cfg.target), read_defaults(cfg.target), guard)
    proxy = Proxy(pools, domains=domains, tap=tap, max_body_bytes=cfg.max_body_bytes)
    metrics = CollectorRegistry()
    metrics.register(PoolCollector(pools))

    async def show_servers(request: Request) -> Response:
        shown = [
            {
                "url": m.url,
                "domain": m.domain,
                "is_down": m.is_down,
                "problem": m.problem,
                "requests": m.requests,
            }
            for m in pools.upstreams
        ]
        return JSONResponse({"servers": shown, "failed_rounds": guard.failures})

    routes = [Route("/redraft/router", show_servers)]
    return proxy.app(hidden=["/metrics", "/metrics/{path:path}"]), proxy.admin_app(routes, metrics)


def read_servers(fleet: Path) -> list[tuple[str, str]]:
    """Address and domain of every server in fleet.toml.

    Raises: ValueError, also if it lists none; OSError.
    """
    found = [(server.url, server.domain) for server in list_servers(fleet)]
    if not found:
        raise ValueError(f"{fleet} lists no servers: begin each with [[servers]] and give it a url")
    return found


class PoolCollector(Collector):
    def __init__(self, pools: Pools) -> None:
        self.pools = pools

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "redraft_router_requests", "Requests taken by a server", labels=["domain", "pool"]
        )
        for (domain, pool), count in self.pools.requests.items():
            requests.add_metric([domain, pool], count)
        fallbacks = CounterMetricFamily(
            "redraft_router_fallbacks",
            "Requests of a domain with a pool that a server outside the pool took",
            labels=["domain"],
        )
        # All pools, also those at 0: a counter that begins with the first event shows no increase.
        for domain in self.pools.domains:
            fallbacks.add_metric([domain], self.pools.fallbacks[domain])
        refused = CounterMetricFamily(
            "redraft_router_refused_connections",
            "Connections that failed, per server",
            labels=["server"],
        )
        under_way = GaugeMetricFamily(
            "redraft_router_requests_under_way", "Requests in flight", labels=["server", "pool"]
        )
        up = GaugeMetricFamily(
            "redraft_router_server_up",
            "1 if the server takes requests, 0 if it is down",
            labels=["server", "pool"],
        )
        waits = CounterMetricFamily(
            "redraft_router_waits_for_files",
            "Connections to servers that waited for a free file descriptor",
        )
        waits.add_metric([], self.pools.waits_for_files)
        for upstream in self.pools.upstreams:
            refused.add_metric([upstream.url], self.pools.refused_connections[upstream.url])
            under_way.add_metric([upstream.url, upstream.domain], upstream.requests)
            up.add_metric([upstream.url, upstream.domain], not upstream.is_down)
        return [requests, fallbacks, refused, under_way, up, waits]
