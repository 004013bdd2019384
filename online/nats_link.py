"""A connection to NATS, made anew by whoever holds it where it breaks: the client does nothing behind its back."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats
from nats.errors import Error as NatsError

from online.nats_config import Nats, addresses, shown

CONNECT_TIMEOUT_S = 5

PENDING_BYTES = 64 << 20
"""With the client's own 2 MiB every publish of large records waits for the socket."""


class BrokerError(ConnectionError):
    """NATS does not answer, or refuses."""


async def connect(ingest: str, config: Nats) -> Any:
    """A connected client of nats-py. Once it `is_closed` it stays so.

    Raises: BrokerError.
    """
    with named_broker_errors(ingest):
        return await nats.connect(
            addresses(ingest),
            name="redraft",
            allow_reconnect=False,  # it would try for ever without saying why, and send again what we send again
            connect_timeout=CONNECT_TIMEOUT_S,
            pending_size=PENDING_BYTES,
            error_cb=_ignore,  # what matters is raised too
            tls=_tls(ingest, config),
            **_credentials(config.credentials),
        )


@contextmanager
def named_broker_errors(ingest: str) -> Iterator[None]:
    """Raises: BrokerError for whatever NATS or the network raise."""
    try:
        yield
    except BrokerError:
        raise
    except (NatsError, OSError) as error:  # the client's timeouts are OSErrors
        raise BrokerError(f"{shown(ingest)}: {str(error) or type(error).__name__}") from error


async def _ignore(error: Exception) -> None:
    pass


def _tls(ingest: str, config: Nats) -> ssl.SSLContext | None:
    if not (config.ca or config.certificate or "tls://" in ingest):
        return None
    context = ssl.create_default_context(cafile=config.ca)
    if config.certificate:
        context.load_cert_chain(config.certificate)
    return context


def _credentials(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    is_token = "BEGIN NATS USER JWT" in path.read_text()
    return {"user_credentials" if is_token else "nkeys_seed": str(path)}
