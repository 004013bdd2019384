"""Settings of the live page.

This module loads no web server, because every command reads the settings.
"""

from dataclasses import dataclass

from redraft.files.settings import require_port


@dataclass(frozen=True, kw_only=True)
class Page:
    host: str = "127.0.0.1"
    """Address on which the live page and /metrics listen. They require no login, so keep a loopback
    address, or put a proxy with a login in front.
    """
    port: int = 8400
    """Port of the live page and /metrics; 0 disables both."""
    hosts: tuple[str, ...] = ()
    """Additional host names under which browsers and Prometheus may access the page, such as that
    of your proxy. IP addresses, names without a dot, and names below .svc, .cluster.local,
    .internal and .localhost are always accepted.
    """

    def __post_init__(self) -> None:
        require_port("port", self.port)
