"""HTTP proxies and certificates from the environment.

Requests to this machine bypass the proxies.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import ssl
from collections.abc import MutableMapping
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_local(host: str) -> bool:
    """Whether `host` is an address of the loopback interface."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    # A server with `--host ::` sees an IPv4 client as ::ffff:127.0.0.1, which is no loopback address
    # before Python 3.13.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_local_url(url: str) -> bool:
    try:
        return is_local(urlsplit(url).hostname or "")
    except ValueError:  # not a URL
        return False


def reach_loopback(environment: MutableMapping[str, str]) -> None:
    """Exempt this machine from the proxies, for HTTP clients in this process and its children.

    A local engine listens on 127.0.0.1, which a proxy cannot reach.
    """
    if not _variables(environment, "http", "https", "all"):
        return
    names = _variables(environment, "no")
    hosts = environment[names[0]].split(",") if names else []
    if "*" not in hosts:
        # Every client reads the lower-case name, and most prefer it.
        wanted = [*(host.strip() for host in hosts if host.strip()), *LOOPBACK]
        environment["no_proxy"] = ",".join(dict.fromkeys(wanted))


def describe_proxy(url: str) -> str:
    """Return a clause for errors that names the proxy used for `url`. Empty if there is none."""
    parts = urlsplit(url)
    names = _variables(os.environ, parts.scheme, "all")
    if not names or is_local_url(url) or proxy_bypass(parts.hostname or ""):
        return ""
    # Omit the variable's value, which may contain a password.
    return f", through the proxy in {names[0]}; to bypass it, add {parts.hostname} to no_proxy"


def load_certificates(url: str) -> ssl.SSLContext | Literal[False]:
    """Return the trusted authorities for a server, also on this machine; False without TLS.

    The authorities come from SSL_CERT_FILE or SSL_CERT_DIR, or else from certifi, because a
    container may have none of its own. The system's authorities are always added, as OpenSSL finds
    them.

    Raises:
        ValueError: SSL_CERT_FILE or SSL_CERT_DIR cannot be read.
    """
    return urlsplit(url).scheme == "https" and _load_authorities(
        os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    )


@functools.cache  # because it takes 50 ms
def _load_authorities(*_: str | None) -> ssl.SSLContext:
    import httpx  # takes a tenth of a second: not for --help

    try:
        context = httpx.create_ssl_context()
    except OSError as error:
        raise ValueError(f"SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {error}") from error
    context.load_default_certs()
    return context


def _variables(environment: MutableMapping[str, str], *kinds: str) -> list[str]:
    """Return the names of the proxy variables that are set, lower-case names first."""
    names = [f"{kind}_proxy" for kind in kinds]
    return [name for name in (*names, *map(str.upper, names)) if environment.get(name, "").strip()]
