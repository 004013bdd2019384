"""Whether a broker still stores: by a real publish, for a full disk can leave NATS silent behind a good health page."""

from __future__ import annotations

import asyncio

from nats.js.errors import NotFoundError

from online.nats_config import Nats
from online.nats_link import connect, named_broker_errors

TIMEOUT_S = 5.0


async def probe(ingest: str, config: Nats, timeout_s: float = TIMEOUT_S) -> None:
    """Return where the fleet's stream acknowledges an empty message, or there is no stream yet to be silent.

    The learner takes the message and finds no record in it. A broker that fails has to be restarted: it does not
    recover by itself when there is space again.

    Raises: BrokerError.
    """
    with named_broker_errors(ingest):
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
