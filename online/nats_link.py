"""A connection to NATS, made anew by whoever holds it where it breaks: the client does nothing behind its back."""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats
from nats.errors import Error as NatsError
from nats.errors import NoServersError

from online.nats_config import Nats, addresses, shown

CONNECT_TIMEOUT_S = 5
RECONNECT_S = 0.2

PENDING_BYTES = 64 << 20
"""With the client's own 2 MiB every publish of large records waits for the socket."""


class BrokerError(ConnectionError):
    """NATS does not answer, or refuses."""


async def connect(ingest: str, config: Nats) -> Any:
    """A connected client of nats-py. Once it `is_closed` it stays so.

    Raises: BrokerError.
    """
    reasons: deque[Exception] = deque(maxlen=1)

    async def keep(error: Exception) -> None:
        reasons.append(error)

    tls = _tls(ingest, config)
    with named_broker_errors(ingest):
        try:
            client = await nats.connect(
                addresses(ingest),
                name="redraft",
                allow_reconnect=False,  # it would send again what we send again
                max_reconnect_attempts=1,  # of each server, before there is a connection; and without a word why
                reconnect_time_wait=RECONNECT_S,
                connect_timeout=CONNECT_TIMEOUT_S,
                pending_size=PENDING_BYTES,
                error_cb=keep,
                tls=tls,
                **_credentials(config.credentials),
            )
        except NoServersError as error:
            raise (reasons[0] if reasons else error) from error
    if tls is not None and not _is_encrypted(client):
        await client.close()
        raise BrokerError(f"{shown(ingest)} does not speak TLS, which tls:// and nats.ca ask for: nothing was sent")
    return client


def _is_encrypted(client: Any) -> bool:
    """Whether the client met TLS: where the server does not ask for it the client does without, and says nothing."""
    return client._transport._io_writer.get_extra_info("ssl_object") is not None


@contextmanager
def named_broker_errors(ingest: str) -> Iterator[None]:
    """Raises: BrokerError for whatever NATS or the network raise."""
    try:
        yield
    except BrokerError:
        raise
    except (NatsError, OSError) as error:  # the client's timeouts are OSErrors
        raise BrokerError(f"{shown(ingest)}: {str(error) or type(error).__name__}") from error


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
