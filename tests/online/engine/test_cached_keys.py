"""Cached blocks of a prompt, and the draft that wrote its keys into them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from real_server import running_server

from benchmarks.fleet import Config, make_registry
from redraft.engine.counters import parse_prefix_cache
from redraft.online.engine.draft_costs import describe_cache, list_losses
from redraft.recipes.serve.up_parts import TOLD

BLOCK_TOKENS = 128  # of vLLM on a CPU


@pytest.mark.parametrize(
    ("drops", "ahead", "is_on", "said"),
    [(True, 0, True, "loses its last block, 16 tokens, with"), (False, 0, True, "loses nothing"),
     (True, 1, True, "loses nothing"), (True, 0, False, "is off")],
)  # fmt: skip
def test_a_line_tells_what_the_draft_costs_the_cache(
    drops: bool, ahead: int, is_on: bool, said: str
) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=is_on, block_size=16),
        speculative_config=SimpleNamespace(use_eagle_block_drop=lambda: drops),
        num_hash_lookahead_tokens=ahead,
    )
    line = describe_cache(config, 0.031)
    assert said in line
    assert "the draft takes 3.1% of the KV cache" in line
    assert TOLD.match(f"redraft: {line}")


@pytest.mark.parametrize(
    ("on_cpu", "is_ahead", "has_graphs", "said"),
    [(False, True, True, []), (True, False, False, []), (False, False, True, ["--draft head"]),
     (False, False, False, ["--draft head", "no full CUDA graphs (PIECEWISE)"])],
)  # fmt: skip
def test_what_vllm_does_without_beside_a_draft_is_said_with_the_remedy(
    on_cpu: bool, is_ahead: bool, has_graphs: bool, said: list[str]
) -> None:
    mode = SimpleNamespace(name="PIECEWISE", has_full_cudagraphs=lambda: has_graphs)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=is_ahead),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        model_config=SimpleNamespace(enforce_eager=False),
    )
    lines = list(list_losses(config, on_cpu=on_cpu))
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert part in line
        assert "redraft bench" in line
        assert TOLD.match(f"redraft: {line}")


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

        assert f"blocks of {BLOCK_TOKENS} tokens; a hit loses nothing" in server.log.read_text()
        assert [count_hits(), count_hits()] == [0, 2 * BLOCK_TOKENS]
        server.swap("v000002")
        assert [count_hits(), count_hits()] == [0, 2 * BLOCK_TOKENS]
        server.swap("v000001")  # back to the draft whose blocks are still there
        assert count_hits() == 2 * BLOCK_TOKENS
