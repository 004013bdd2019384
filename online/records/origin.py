"""The tenant and domain of a request, and whether it may be recorded, from its headers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from starlette.datastructures import Headers

EXTRA_ARGS_KEY = "redraft"  # key in `SamplingParams.extra_args` that carries the origin
# Maximum length of a tenant or domain, which is a column of the buffer and a label of metrics.
MAX_LABEL_CHARS = 64
# Maximum length of the template arguments as JSON; longer ones are omitted.
MAX_ARGUMENTS_CHARS = 200
NOT_ARGUMENTS = {"add_generation_prompt", "continue_final_message", "cohere_format"}
"""Arguments that vLLM adds to each request's own. The last one selects a renderer."""


class Origin(NamedTuple):
    tenant: str = ""
    domain: str = ""
    opt_out: bool = False
    cache_salt: str = ""
    """`hash_salt` of vLLM's cache salt. Requests with different salts share no cached text."""
    arguments: str = ""
    """`pack_arguments` of the request's template arguments."""


OPT_OUT_NO = ("", "0", "false", "no")


def read_origin_headers(headers: Headers) -> Origin:
    """Read the origin from the X-Redraft-Tenant, -Domain and -Opt-Out headers.

    Any opt-out value counts except an empty one, 0, false and no. If there are several values, one
    such value is enough, because a gateway may have added it.
    """
    opt_outs = ",".join(headers.getlist("x-redraft-opt-out")).lower().split(",")
    return Origin(
        tenant=to_label(_decode(headers.get("x-redraft-tenant", ""))),
        domain=headers.get("x-redraft-domain", "")[:MAX_LABEL_CHARS],
        opt_out=any(value.strip() not in OPT_OUT_NO for value in opt_outs),
    )


def pack_arguments(arguments: Mapping[str, Any]) -> str:
    """Pack the template's arguments that are numbers, booleans or strings as JSON sorted by name.

    Empty if there are no such arguments, or if they are too long for a record.
    """
    kept = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, bool | int | float | str) and name not in NOT_ARGUMENTS
    }
    packed = json.dumps(kept, sort_keys=True) if kept else ""
    return packed if len(packed) <= MAX_ARGUMENTS_CHARS else ""


def unpack_arguments(packed: str) -> dict[str, Any]:
    """Unpack the result of `pack_arguments`; return an empty dict for any other text."""
    try:
        arguments = json.loads(packed or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def to_label(name: str) -> str:
    """Return the name under which a tenant's records are stored.

    This is the name itself or, if the name is long, its beginning and a hash.
    """
    if len(name) <= MAX_LABEL_CHARS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{name[: MAX_LABEL_CHARS - 1 - len(digest)]}-{digest}"


def hash_salt(salt: str | None) -> str:
    """Hash vLLM's `cache_salt`, a secret that must not reach a log; empty if there is no salt."""
    return hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest() if salt else ""


def stored_name(tenant: str) -> str:
    """Return the name under which the records of the tenant to delete are stored.

    Records without a tenant have the empty name.

    Raises:
        ValueError: the name is empty.
    """
    if not tenant.strip():
        raise ValueError(
            "the tenant's name is empty: give the tenant whose records should be deleted"
        )
    return to_label(tenant)


def _decode(header: str) -> str:
    """Decode a header's text: HTTP libraries read bytes as Latin-1, but clients send UTF-8."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        return header


def read_origin_arguments(extra_args: Mapping[str, Any] | None) -> Origin | None:
    """Read the origin that the API process put into the sampling parameters' extra arguments.

    Return None if it wrote no origin. In this case, the request's headers have not been read, so an
    opt-out would go unnoticed.
    """
    written = (extra_args or {}).get(EXTRA_ARGS_KEY)
    if not isinstance(written, dict) or written.keys() != set(Origin._fields):
        return None
    return Origin(**written)
