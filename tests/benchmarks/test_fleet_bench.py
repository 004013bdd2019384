"""The parts of the benchmark of capture and swaps that need no engine."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, generate_latest
from transformers import LlamaForCausalLM

from benchmarks import fleet
from benchmarks.fleet import (
    Config,
    Sent,
    Stream,
    Swapped,
    add_noise,
    choose_texts,
    describe_records,
    lines,
    make_registry,
    summarize,
    turn_keys,
)
from redraft.engine.counters import PrefixCache, parse_prefix_cache
from redraft.files import artifact

EAGLE3 = Path(__file__).parents[1] / "assets/tiny-eagle3"


@torch.no_grad()
def test_the_turned_draft_computes_the_same_from_other_keys(random_target: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(random_target).eval()
    ids = torch.arange(10, 40)[None]
    before = model(ids, use_cache=True)
    model.load_state_dict(turn_keys(model.state_dict()))
    after = model(ids, use_cache=True)
    assert torch.equal(before.logits, after.logits)
    for old, new in zip(before.past_key_values.layers, after.past_key_values.layers, strict=True):
        assert torch.equal(old.keys, -new.keys)
        assert torch.equal(old.values, -new.values)
    mixed = model(ids[:, -1:], past_key_values=before.past_key_values).logits
    assert (mixed - after.logits[:, -1:]).abs().max() > 0.1


def test_noise_leaves_names_and_types() -> None:
    tensors = {"a": torch.randn(8, 8).bfloat16(), "norm": torch.ones(8)}
    noisy = add_noise(tensors)
    assert {name: (t.dtype, t.shape) for name, t in noisy.items()} == {
        name: (t.dtype, t.shape) for name, t in tensors.items()
    }
    assert torch.equal(noisy["norm"], tensors["norm"])
    assert 0.05 < float((noisy["a"] - tensors["a"]).float().std()) < 0.2


def test_a_published_head_gives_two_intact_versions(random_target: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    artifact.publish(head, lambda folder: shutil.copytree(EAGLE3, folder, dirs_exist_ok=True), {})
    (tmp_path / "registries").mkdir()
    with make_registry(Config(target=random_target, head=head), tmp_path / "registries") as drafts:
        assert list(drafts) == ["standalone", "eagle3"]
        for registry in drafts.values():
            for version in ("v000001", "v000002"):
                artifact.verify(registry / version)


def test_tokens_found_in_the_cache_are_summed_over_engines_and_not_with_those_of_other_servers() -> (
    None
):
    registry = CollectorRegistry()
    for name, values in {"queries": (60, 40), "hits": (50, 5)}.items():
        for prefix, factor in (("", 1), ("external_", 7)):
            counter = Counter(
                f"vllm:{prefix}prefix_cache_{name}", name, ["engine"], registry=registry
            )
            for engine, value in enumerate(values):
                counter.labels(engine).inc(factor * value)
    assert parse_prefix_cache(generate_latest(registry).decode()) == PrefixCache(
        queries=100, hits=55
    )
    assert parse_prefix_cache("") == PrefixCache(queries=0, hits=0)


def make_swap(after: Sent, pause_s: float = 0.08) -> Swapped:
    """Steps of 20 ms, of four tokens before the swap and one after it; the swap begins at 1 s."""
    before = [0.02 * i for i in range(50)]
    later = [before[-1] + 0.02 + pause_s + 0.02 * i for i in range(20)]
    stream = Stream([*before, *later], [[1] * 4] * 50 + [[1]] * 10 + [[1, 1]] * 10)
    report = {"pause_ms": 1e3 * pause_s, "load_ms": 30.0}
    return Swapped(report, 0.99, 0.99 + pause_s, [stream], after, texts_equal=True)


def test_the_figures_of_a_swap() -> None:
    before = Sent([[1, 2]], alpha=0.8, hits=0.9)
    found = summarize(
        before, [make_swap(Sent([[1, 2]], 0.8, 0.9)), make_swap(Sent([[1, 2]], 0.6, 0.45))]
    )
    assert found["blocks_kept"] == pytest.approx(0.75)
    assert found["pause_over_step_ms"] == pytest.approx(80)
    assert found["step_ms"] == pytest.approx(20)
    assert (found["alpha_before"], found["alpha_after"]) == (0.8, pytest.approx(0.7))
    assert found["alpha_running"]["before"] == 1.0
    assert found["alpha_running"]["steps 1 to 8"] == 0.0
    assert 0 < found["alpha_running"]["9 to 32"] <= 1 / 3
    assert found["lossless"]
    assert not summarize(before, [make_swap(Sent([[1, 3]], 0.8, 0.9))])["lossless"]


def test_requests_run_on_other_texts_than_those_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [150] * 3 + [
        600
    ] * 20  # in words: the first three are long enough to run, and too short to be compared
    texts = [{"messages": f"{number} " * length} for number, length in enumerate(lengths)]
    monkeypatch.setattr(fleet, "stdlib_conversations", lambda: texts)
    compared, running = choose_texts(Config(clients=4))
    assert ({len(p.token_ids) for p in compared}, {len(p.token_ids) for p in running}) == (
        {400},
        {100},
    )
    assert (len(compared), len(running)) == (8, 4)
    assert not {tuple(p.token_ids[:100]) for p in compared} & {tuple(p.token_ids) for p in running}


def test_the_lines_say_what_falls_short() -> None:
    good = summarize(Sent([], 0.8, 0.9), [make_swap(Sent([], 0.8, 0.9), pause_s=0.04)])
    bad = summarize(Sent([], 0.8, 0.9), [make_swap(Sent([], 0.7, 0.9), pause_s=0.04)])
    report = {
        "records": {"v1_equals_v2": None, "reason": "no Triton", "tests": 0},
        "capture": {"bytes_per_step": 266_240, "bytes_by_reference": 262_668_288}
        | {
            "ratio_all": 0.98,
            "interval_all": (-0.01, 0.05),
            "ratio_tenth": 1.0,
            "interval_tenth": None,
        },
        "swap": good,
    }
    told = list(lines(report))
    assert told[0] == "records of V1 and V2: not compared: no Triton"
    assert told[1].startswith(
        "queue, 256 requests, vocabulary 128k: 0.27 MB a step on a GPU, 263 MB by reference"
    )
    assert "0.980 of tokens/s, cost equal to no capture" in told[2]
    assert "unknown, too few rounds" in told[3]
    assert len(told) == 4
    line = fleet.describe_swap(good)
    assert line.startswith(
        "blocks kept 100.0%, pause 40 ms over a step of 20 ms, cached prompts accepted 0.800 before"
    )
    assert line.endswith("running requests before 1.000, steps 1 to 8 0.000, 9 to 32 0.300: PASS")
    assert fleet.describe_swap(bad).endswith("BELOW TARGET")


PASSED, FAILED = "<testcase/>", "<testcase><failure/></testcase>"
SKIPPED = '<testcase><skipped message="no Triton"/></testcase>'


@pytest.mark.parametrize(
    ("cases", "is_equal", "told"),
    [
        (PASSED + PASSED, True, "equal in 2 tests"),
        (PASSED + FAILED, False, "NOT EQUAL in 2 tests"),
        (PASSED + "<testcase><error/></testcase>", False, "NOT EQUAL in 2 tests"),
        (SKIPPED + SKIPPED, None, "not compared: 2 of 2 tests were skipped: no Triton"),
        (PASSED + SKIPPED, None, "not compared: 1 of 2 tests were skipped: no Triton"),
        (FAILED + SKIPPED, False, "NOT EQUAL in 1 tests"),
        ("", None, "not compared: no test was found"),
    ],
)
def test_records_are_compared_by_the_tests_of_both_runners(
    cases: str, is_equal: bool | None, told: str
) -> None:
    found = fleet.judge_tests(
        ET.fromstring(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    )
    assert found["v1_equals_v2"] is is_equal
    assert describe_records(found) == told


def test_without_the_tests_no_records_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RUNNER_TESTS", tmp_path / "test_some.py")
    assert describe_records(fleet.compare_records()).startswith("not compared: no ")


def test_a_part_that_fails_leaves_the_results_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise ValueError("no kernel")

    monkeypatch.setattr(fleet, "compare_records", lambda: {"v1_equals_v2": True, "tests": 35})
    monkeypatch.setattr(fleet, "count_queued", fail)
    output = tmp_path / "report.json"
    with pytest.raises(ValueError, match="kernel"):
        fleet.main(Config(output=output, head=EAGLE3, target=EAGLE3, parts=("records", "bytes")))
    assert json.loads(output.read_text())["records"]["tests"] == 35


def test_a_missing_target_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--target"):
        fleet.main(Config(target=tmp_path, parts=()))
