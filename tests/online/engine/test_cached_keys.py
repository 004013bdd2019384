"""Cached blocks of a prompt, and the draft that wrote its keys into them."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_server import running_server

from benchmarks.fleet import Config, make_registry, parse_prefix_cache

BLOCK_TOKENS = 128  # of vLLM on a CPU


@pytest.mark.slow
@pytest.mark.vllm
def test_a_block_is_found_by_requests_of_the_draft_that_wrote_its_keys_alone(
    tiny_target: Path, tmp_path: Path
) -> None:
    prompt = [100 + number % 97 for number in range(2 * BLOCK_TOKENS + 20)]
    with (
        make_registry(Config(), tmp_path) as registries,
        running_server(tiny_target, registries["eagle3"], tmp_path, []) as server,
    ):

        def count_hits() -> int:
            before, _, after = (
                server.http.get("/metrics").text,
                server.complete(prompt),
                server.http.get("/metrics").text,
            )
            return parse_prefix_cache(after).hits - parse_prefix_cache(before).hits

        assert [count_hits(), count_hits()] == [0, 2 * BLOCK_TOKENS]
        server.swap("v000002")
        assert [count_hits(), count_hits()] == [0, 2 * BLOCK_TOKENS]
        server.swap("v000001")  # back to the draft whose blocks are still there
        assert count_hits() == 2 * BLOCK_TOKENS
