"""Record the traffic of an unmodified vLLM, SGLang or llama.cpp server through a proxy.

Point the clients at the proxy's address instead of the server's.

    $ redraft tap http://127.0.0.1:8000 --target /models/llama --spool spool --port 8001
    $ redraft tap http://127.0.0.1:8080 --target /models/llama --spool ids --engine llama.cpp

vLLM returns at most --max-logprobs probabilities per token (20 by default). Draft tokens do not
pass through the proxy, so its records can train a draft but do not show its acceptance. Start one
tap per server.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.engine.sampling import read_defaults
from redraft.files.folder import fingerprint
from redraft.files.settings import require_port
from redraft.online.fleet.server import require_address
from redraft.online.records.guard import Guard
from redraft.online.traffic.front import FrontConfig, serve
from redraft.online.traffic.proxy import Proxy
from redraft.online.traffic.sockets import OperatorServer
from redraft.online.traffic.tap import Tap, TapConfig
from redraft.online.traffic.upstream import Upstream


@dataclass(frozen=True, kw_only=True)
class TapCommandConfig(TapConfig, FrontConfig):
    upstream: Annotated[str, tyro.conf.Positional]
    """Address of the server, http://HOST:PORT."""
    target: Path
    """Folder of the served model. Every record contains the folder's fingerprint. Its
    generation_config.json supplies the sampling parameters that requests leave out.
    """
    port: int = 8001
    """Port on which the proxy accepts clients."""
    admin_port: int = 8082
    """Port for /redraft/tap, which counts recorded and lost answers, and for /metrics; 0 disables
    both.
    """

    def __post_init__(self) -> None:
        # Both parent classes check their settings, but Python would call only the first one's
        # check.
        TapConfig.__post_init__(self)
        FrontConfig.__post_init__(self)
        require_port("port", self.port)
        require_port("admin_port", self.admin_port)


def main(cfg: TapCommandConfig) -> None:
    require_address(cfg.upstream)
    cfg.make_spool()
    guard = Guard()
    tap = Tap(cfg, fingerprint(cfg.target), read_defaults(cfg.target), guard)
    proxy = Proxy(Upstream(cfg.upstream, guard), tap, max_body_bytes=cfg.max_body_bytes)
    admin = None
    if cfg.admin_port:
        admin = OperatorServer(
            proxy.admin_app(),
            cfg.admin_host,
            cfg.admin_port,
            setting="admin_port",
            hosts=cfg.admin_hosts,
        )
    print(f"tap: http://{cfg.host}:{cfg.port}, in front of {cfg.upstream}", flush=True)
    serve(proxy.app(), cfg.host, cfg.port, admin, guard)
