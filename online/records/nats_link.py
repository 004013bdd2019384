"""Connections to NATS, and a probe of whether NATS still stores messages.

A connection belongs to one of two users: the servers, which publish, and the learner, which reads.
Each user has a separate inbox, i.e. a subject for the replies it receives. Records reach the
learner through its inbox, so a user that may subscribe to `_INBOX.>` can read all records.

The owner of a connection reconnects. nats-py's automatic reconnection is off, because it would
resend messages silently.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoServersError
from nats.js.errors import NotFoundError

from redraft.files.printable import printable
from redraft.online.records.nats_config import Nats, hide_credentials, parse_addresses

CONNECT_TIMEOUT_S = 5
PROBE_TIMEOUT_S = 5.0
RECONNECT_S = 0.2
PENDING_BYTES = 64 << 20  # with nats-py's 2 MiB, every publish of large records would wait


User = Literal["servers", "learner"]


class BrokerError(ConnectionError):
    """NATS does not answer, or it refuses the connection or an operation."""


class _Client(Client):  # type: ignore[misc]
    """nats-py's client, which survives a malformed header or subject.

    Otherwise the client would silently stop reading, and any publisher can send such a message.
    """

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            found: dict[str, str] | None = await super()._process_headers(headers)
        except Exception:
            return None
        return found

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Any
    ) -> Any:
        return super()._build_message(
            sid, subject.decode(errors="replace").encode(), reply, data, headers
        )


async def connect(ingest: str, config: Nats, user: User = "servers") -> Any:
    """Connect with the inbox of `user`. Once closed, the connection stays closed.

    Raises:
        BrokerError
    """
    reasons: deque[Exception] = deque(maxlen=1)

    async def keep(error: Exception) -> None:
        reasons.append(error)

    tls = _tls(ingest, config)
    with wrap_broker_errors(ingest):
        client: Any = _Client()
        try:
            await client.connect(
                parse_addresses(ingest),
                name="redraft",
                # With reconnection, nats-py would resend records that we resend ourselves.
                allow_reconnect=False,
                # Save each server's last error during the first connection, because nats-py does
                # not report why it failed.
                max_reconnect_attempts=1,
                reconnect_time_wait=RECONNECT_S,
                connect_timeout=CONNECT_TIMEOUT_S,
                pending_size=PENDING_BYTES,
                error_cb=keep,
                inbox_prefix=f"_INBOX.{user}",
                tls=tls,
                **_credentials(config.credentials),
            )
        except NoServersError as error:
            raise (reasons[0] if reasons else error) from error
    # If the server does not require TLS, nats-py silently connects without TLS.
    if tls is not None and client._transport._io_writer.get_extra_info("ssl_object") is None:
        await client.close()
        raise BrokerError(
            f"{hide_credentials(ingest)} does not speak TLS, but tls:// or nats.ca requires "
            f"TLS: nothing was sent"
        )
    return client


async def probe(ingest: str, config: Nats, timeout_s: float = PROBE_TIMEOUT_S) -> None:
    """Check that the fleet's stream acknowledges an empty message.

    The check passes if there is no stream yet. Only a real publish shows whether the stream still
    stores messages: on a full disk, NATS can stay silent while its health page reports ok. NATS
    does not recover when space is freed, and must be restarted. The learner consumes the message,
    which contains no record.

    Raises:
        BrokerError: the message is not acknowledged within `timeout_s` seconds.
    """
    with wrap_broker_errors(ingest):
        async with asyncio.timeout(timeout_s):
            client = await connect(ingest, config)
            try:
                stream = client.jetstream(timeout=timeout_s)
                try:
                    await stream.stream_info(config.stream)
                except NotFoundError:
                    return
                await stream.publish(config.subject(""), b"")
            finally:
                await client.close()


@contextmanager
def wrap_broker_errors(ingest: str) -> Iterator[None]:
    """Raise BrokerError instead of any NATS or network error."""
    try:
        yield
    except BrokerError:
        raise
    except (NatsError, OSError) as error:  # nats-py's timeouts are OSErrors
        raise BrokerError(
            f"{hide_credentials(ingest)}: {printable(str(error)) or type(error).__name__}"
        ) from error


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
