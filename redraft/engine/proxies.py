"""HTTP proxies of the environment. Requests to this machine go past them."""

import ipaddress
import os
from collections.abc import MutableMapping
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_local(host: str) -> bool:
    """Whether `host` is an address of the loopback interface."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_url(url: str) -> bool:
    try:
        return is_local(urlsplit(url).hostname or "")
    except ValueError:  # not a URL
        return False


def reach_loopback(environment: MutableMapping[str, str]) -> None:
    """Exempt this machine from the proxies for HTTP clients of this process and its children.

    A local engine is reached at 127.0.0.1, and a proxy cannot reach that address.
    """
    if not _variables(environment, "http", "https", "all"):
        return
    names = _variables(environment, "no")
    hosts = environment[names[0]].split(",") if names else []
    if "*" not in hosts:
        # Every client reads the name in small letters, and most prefer it.
        wanted = [*(host.strip() for host in hosts if host.strip()), *LOOPBACK]
        environment["no_proxy"] = ",".join(dict.fromkeys(wanted))


def describe_proxy(url: str) -> str:
    """A clause for an error that names the proxy used for `url`; empty if none is used."""
    parts = urlsplit(url)
    names = _variables(os.environ, parts.scheme, "all")
    if not names or is_local_url(url) or proxy_bypass(parts.hostname or ""):
        return ""
    # Not its value, which may hold a password.
    return f", through the proxy of {names[0]}: name {parts.hostname} in no_proxy to go past it"


def _variables(environment: MutableMapping[str, str], *kinds: str) -> list[str]:
    """The names of the proxy variables that are set, lower-case ones first."""
    names = [f"{kind}_proxy" for kind in kinds]
    return [name for name in (*names, *map(str.upper, names)) if environment.get(name, "").strip()]
