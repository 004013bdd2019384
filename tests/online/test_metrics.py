"""The engine's counters, read from text that the client library wrote."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from online.metrics import Acceptance, read_acceptance


def make_engine_text(engines):
    """What vLLM's /metrics shows, written by the library that vLLM writes it with; (drafts, accepted at 0, at 1)."""
    registry = CollectorRegistry()
    names = {
        name: Counter(f"vllm:spec_decode_num_{name}", name, ["engine"], registry=registry)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    per_position = Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "p", ["engine", "position"], registry=registry
    )
    Gauge("vllm:num_requests_running", "other", registry=registry).set(3)
    for engine, (drafts, *accepted_at) in enumerate(engines):
        names["drafts"].labels(engine).inc(drafts)
        names["draft_tokens"].labels(engine).inc(2 * drafts)
        names["accepted_tokens"].labels(engine).inc(sum(accepted_at))
        for position, accepted in enumerate(accepted_at):
            per_position.labels(engine, position).inc(accepted)
    return generate_latest(registry).decode()


def test_counters_are_summed_over_engines():
    acceptance = read_acceptance(make_engine_text([(100, 80, 50), (60, 30, 10)]))
    assert acceptance == Acceptance(drafts=160, accepted=170, drafted=320, accepted_at=(110, 60))
    assert acceptance.tau == pytest.approx(1 + 170 / 160)


def test_a_window_is_a_difference_of_counters():
    earlier, later = (read_acceptance(make_engine_text([counts])) for counts in [(100, 80, 50), (140, 100, 60)])
    assert later.since(earlier) == Acceptance(drafts=40, accepted=30, drafted=80, accepted_at=(20, 10))
    assert earlier.since(later) is None, "counters that fell belong to another start of the engine"
    assert (earlier + later).drafts == 240


def test_a_server_without_a_draft_is_told_from_one_without_traffic():
    assert read_acceptance(make_engine_text([(0, 0, 0)])).tau is None
    with pytest.raises(ValueError, match="without a draft"):
        read_acceptance("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n")
    with pytest.raises(ValueError, match="without a draft"):
        read_acceptance("<html>not found</html>")
