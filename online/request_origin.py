"""Whom a request is from and whether it may be recorded, as its headers say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

EXTRA_ARGS_KEY = "redraft"
"""Under `SamplingParams.extra_args`: how the API process tells the worker."""

DOMAIN_HEADER = b"x-redraft-domain"
"""As it travels; set by whoever tells domains apart."""

MAX_LABEL_CHARS = 64
"""Of a tenant or domain: they become columns of the buffer and labels of metrics."""


class Origin(NamedTuple):
    tenant: str = ""
    domain: str = ""
    opt_out: bool = False


def origin_of(headers: Mapping[str, str]) -> Origin:
    """X-Redraft-Tenant, X-Redraft-Domain and X-Redraft-Opt-Out, of which any value but an explicit no counts."""
    return Origin(
        tenant=headers.get("x-redraft-tenant", "")[:MAX_LABEL_CHARS],
        domain=headers.get("x-redraft-domain", "")[:MAX_LABEL_CHARS],
        opt_out=headers.get("x-redraft-opt-out", "0").lower() not in ("", "0", "false", "no"),
    )


def is_label(domain: str) -> bool:
    """Whether a domain of this name can travel in a header."""
    return domain.isascii() and domain.isprintable() and domain == domain.strip() and len(domain) <= MAX_LABEL_CHARS


def require_label(domain: str) -> None:
    """Raises: ValueError where a domain can not be called so."""
    if not is_label(domain):
        raise ValueError(f"{domain!r} can be no domain: it travels in a header, at most {MAX_LABEL_CHARS} of ASCII")


def origin_of_arguments(extra_args: Mapping[str, Any] | None) -> Origin:
    """What the API process wrote into the sampling parameters' extra arguments; nothing where there is none."""
    written = (extra_args or {}).get(EXTRA_ARGS_KEY)
    return Origin(**written) if isinstance(written, dict) else Origin()
