"""The load of the router's benchmark.

It measures the gaps that a server leaves, and counts what failed.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import streams
from benchmarks.router import stream_lines
from benchmarks.streams import EVENTS_PER_CLIENT, Gaps, StreamingServer, load


def test_every_gap_of_every_stream_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "EVENTS_PER_S", 50.0)

    async def main() -> Gaps:
        server = await asyncio.get_running_loop().create_server(StreamingServer, "127.0.0.1", 0)
        gaps = Gaps()
        async with server:
            await load(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 20, gaps)
        return gaps

    gaps = asyncio.run(main())
    assert gaps.failed == 0
    assert len(gaps.first_s) == 2 * 20
    # Two streams have two gaps fewer than events. Chunks that arrive together count as one.
    assert 0.5 * 20 * (EVENTS_PER_CLIENT - 2) < len(gaps.between_s) <= 20 * (EVENTS_PER_CLIENT - 2)
    assert gaps.summarize()["gap_ms_p50"] > 0


def test_a_server_that_is_gone_counts_as_failed() -> None:
    gaps = Gaps()
    asyncio.run(load("http://127.0.0.1:1", 3, gaps))
    assert gaps.failed == 2 * 3


def test_the_verdict_needs_short_gaps_and_whole_streams() -> None:
    side = {
        "gap_ms_p50": 500.0,
        "gap_ms_p99": 510.0,
        "gap_ms_p99_9": 520.0,
        "first_event_ms_p50": 5.0,
        "failed": 0,
    }

    def verdict(ratio: float, failed: int) -> str:
        result = {"direct": side, "router": side | {"failed": failed}, "gap_ratio_p99_9": ratio}
        return stream_lines(600, result)[-1]

    assert "PASS" in verdict(1.3, 0)
    assert "BELOW TARGET" in verdict(1.31, 0)
    assert "BELOW TARGET" in verdict(1.0, 1)
