"""The tenant and domain of a request, and whether it may be recorded, from its headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

EXTRA_ARGS_KEY = "redraft"
"""Key in `SamplingParams.extra_args` under which the API process passes the origin to the worker."""

DOMAIN_HEADER = b"x-redraft-domain"
"""Header name as sent. The client, or the router in front, sets it."""

MAX_LABEL_CHARS = 64
"""Longest tenant or domain. They become columns of the buffer and labels of metrics."""


class Origin(NamedTuple):
    tenant: str = ""
    domain: str = ""
    opt_out: bool = False


def read_origin_headers(headers: Mapping[str, str]) -> Origin:
    """The origin in X-Redraft-Tenant, -Domain and -Opt-Out. Any opt-out value counts except 0, false and no."""
    return Origin(
        tenant=headers.get("x-redraft-tenant", "")[:MAX_LABEL_CHARS],
        domain=headers.get("x-redraft-domain", "")[:MAX_LABEL_CHARS],
        opt_out=headers.get("x-redraft-opt-out", "0").lower() not in ("", "0", "false", "no"),
    )


def is_label(domain: str) -> bool:
    """Whether a domain of this name can travel in a header."""
    return domain.isascii() and domain.isprintable() and domain == domain.strip() and len(domain) <= MAX_LABEL_CHARS


def require_label(domain: str) -> None:
    """Raise ValueError unless the name can travel in a header."""
    if not is_label(domain):
        raise ValueError(f"{domain!r} cannot be a domain: use at most {MAX_LABEL_CHARS} printable ASCII characters")


def read_origin_arguments(extra_args: Mapping[str, Any] | None) -> Origin:
    """The origin in the sampling parameters' extra arguments, as the API process wrote it; empty if there is none."""
    written = (extra_args or {}).get(EXTRA_ARGS_KEY)
    return Origin(**written) if isinstance(written, dict) else Origin()
