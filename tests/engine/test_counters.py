"""Parsing the engine's counters, from text written by vLLM's own metrics library."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from redraft.engine.counters import parse_counts
from redraft.engine.counts import AcceptanceCounts


def make_engine_text(engines):
    """The text of vLLM's /metrics, from the library that vLLM uses.

    Each engine is (drafts, accepted at 0, at 1).
    """
    registry = CollectorRegistry()
    names = {
        name: Counter(f"vllm:spec_decode_num_{name}", name, ["engine"], registry=registry)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    per_position = Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "p",
        ["engine", "position"],
        registry=registry,
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
    acceptance = parse_counts(make_engine_text([(100, 80, 50), (60, 30, 10)]))
    assert acceptance == AcceptanceCounts(
        num_drafts=160, num_accepted=170, num_draft_tokens=320, accepted_per_position=(110, 60)
    )
    assert acceptance.tau == pytest.approx(1 + 170 / 160)


def test_a_window_is_a_difference_of_counters():
    earlier, later = (
        parse_counts(make_engine_text([counts])) for counts in [(100, 80, 50), (140, 100, 60)]
    )
    assert later.since(earlier) == AcceptanceCounts(
        num_drafts=40, num_accepted=30, num_draft_tokens=80, accepted_per_position=(20, 10)
    )
    assert earlier.since(later) is None, "the engine restarted if its counters fell"
    assert (earlier + later).num_drafts == 240


def test_a_server_without_a_draft_is_told_from_one_without_traffic():
    assert parse_counts(make_engine_text([(0, 0, 0)])).num_drafts == 0
    with pytest.raises(ValueError, match="without a draft"):
        parse_counts("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n")
    with pytest.raises(ValueError, match="without a draft"):
        parse_counts("<html>not found</html>")


def test_llama_cpps_counters_are_read_too():
    """As its server writes them (`server_task_result_metrics::to_metrics`)."""
    values = {"draft_tokens": 30, "accepted_tokens": 7, "drafts": 10}
    text = "".join(
        f"# HELP llamacpp:spec_decode_num_{name}_total Speculative\n"
        f"# TYPE llamacpp:spec_decode_num_{name}_total counter\n"
        f"llamacpp:spec_decode_num_{name}_total {value}\n"
        for name, value in values.items()
    )
    expected = AcceptanceCounts(num_drafts=10, num_accepted=7, num_draft_tokens=30)
    assert parse_counts(text) == expected
