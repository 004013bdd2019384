"""Prometheus text, read and written, against the client library's own writer and parser."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from online.buffer import BufferStatus
from online.metrics import Acceptance, ServerState, Snapshot, read_acceptance, render
from online.state import Phase


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


def test_what_is_written_reads_back():
    snapshot = Snapshot(
        phase=Phase.CANARY,
        version="v000002",
        buffer=BufferStatus(
            num_bytes=1234, num_files=1, num_training={"code": 5, 'pro"se\n': 2}, num_held_out={"code": 1},
            num_foreign=3, oldest_s=1.0, counts={"stored": 8, "corrupt": 1},
        ),
        lag_records=4,
        steps=17,
        loss=0.5,
        verdicts={"promote": 2, "reject": 1},
        rollouts={"rolled out": 1},
        servers=(
            ServerState(url="http://a", draft_version="v000002", acceptance=Acceptance(drafts=10, accepted=15)),
            ServerState(url="http://b", draft_version="v000001", is_alarming=True),
            ServerState(url="http://c", draft_version=None),
        ),
    )  # fmt: skip
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(render(snapshot).decode())
        for sample in family.samples
    }
    assert samples["redraft_phase", "canary"] == 1
    assert sum(value for key, value in samples.items() if key[0] == "redraft_phase") == 1
    assert samples["redraft_buffer_training_records", 'pro"se\n'] == 2
    assert samples["redraft_records_total", "corrupt"] == 1
    assert samples["redraft_verdicts_total", "promote"] == 2
    assert samples["redraft_train_steps_total",] == 17
    assert samples["redraft_server_draft", "http://b", "v000001"] == 1
    assert samples["redraft_server_acceptance_length", "http://a"] == 2.5
    assert ("redraft_server_acceptance_length", "http://b") not in samples, "no drafts is not tau = 1"
    assert [samples["redraft_server_in_step", f"http://{s}"] for s in "abc"] == [1, 0, 0]
    assert [samples["redraft_server_up", f"http://{s}"] for s in "abc"] == [1, 1, 0]
    assert samples["redraft_server_alarm", "http://b"] == 1
