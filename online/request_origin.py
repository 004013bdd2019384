"""Whom a request is from and whether it may be recorded, as its headers say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

EXTRA_ARGS_KEY = "redraft"
"""Under `SamplingParams.extra_args`: how the API process tells the worker."""

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


def origin_of_arguments(extra_args: Mapping[str, Any] | None) -> Origin:
    """What the API process wrote into the sampling parameters' extra arguments; nothing where there is none."""
    written = (extra_args or {}).get(EXTRA_ARGS_KEY)
    return Origin(**written) if isinstance(written, dict) else Origin()
