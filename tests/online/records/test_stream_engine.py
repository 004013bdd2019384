"""A real vLLM that records into the ingest log, and keeps serving when the log is gone."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from real_broker import running_broker
from real_server import running_server
from run_stream import VOCAB
from waiting import PATIENCE_S, in_event_loop, until

from redraft.files.folder import fingerprint
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.stream import StreamSource
from redraft.online.records.nats_config import Nats, StreamLimits
from redraft.online.records.nats_link import BrokerError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


async def take_until(source, buffer, request_ids):
    """Wait until records of all these requests are in the buffer."""

    def are_stored():
        stored = [s.record.request_id for s in buffer.fresh(0, 1000)]
        return all(any(one.startswith(i) for one in stored) for i in request_ids)

    async with asyncio.timeout(PATIENCE_S):
        while not are_stored():
            with contextlib.suppress(BrokerError):
                await source.take()


@in_event_loop
async def test_serving_goes_on_without_the_log_and_capture_with_it(
    random_target, registry, tmp_path
):
    config = BufferConfig(held_out_fraction=0)
    with (
        running_broker(tmp_path / "nats") as broker,
        Buffer(config, fingerprint(random_target)) as buffer,
    ):
        source = StreamSource(broker.url, Nats(), StreamLimits(max_bytes=1 << 28), buffer, VOCAB)
        await source.take()
        with running_server(random_target, registry, tmp_path, [], ingest=broker.url) as server:
            before = server.complete([5, 6, 7])
            await take_until(source, buffer, [before["id"]])
            broker.kill()
            answers = [
                server.complete([5, 6, 7, number]) for number in range(8)
            ]  # each is asserted to succeed
            assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 8
            broker.start()
            await take_until(source, buffer, [answer["id"] for answer in answers])
            # counted after the broker's receipt, which may follow the delivery
            await until(lambda: server.status()["capture"].get("published_records", 0) >= 9)
        await source.close()
