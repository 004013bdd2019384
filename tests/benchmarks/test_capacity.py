"""The capacity page.

Its tables as they are counted now, and the counts against counting by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.capacity import (
    Fleet,
    all_costs,
    count_learner,
    fill_tables,
    fleet_table,
    passes,
    plan_learner,
    two,
    with_states,
)
from benchmarks.traffic import Traffic, make_record
from redraft.distill.plan.counted_step import count_flops
from redraft.online.learning.replay import select_texts
from redraft.online.records.record import encode_record

PAGE = Path(__file__).parents[2] / "docs" / "capacity.md"
SMALL = Traffic(prompt_tokens=20, output_tokens=10)


@pytest.mark.slow
def test_the_page_holds_what_is_counted_now() -> None:
    assert fill_tables(PAGE.read_text()) == PAGE.read_text(), (
        "python -m benchmarks.capacity docs/capacity.md"
    )


def test_the_weights_that_a_token_meets_are_those_of_the_modules() -> None:
    standalone, eagle1, eagle3 = all_costs(Fleet(traffic=SMALL))
    d, inner, keys = 4096, 14336, 8 * 128
    layer = 2 * d * d + 2 * d * keys + 3 * d * inner
    small = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    assert standalone.weights == 16 * small
    assert eagle1.weights == 4 * (2 * d * d + layer), (
        "its projection of two and one layer, in four draft steps"
    )
    # The projection of three states once; queries, keys and values read two vectors.
    assert eagle3.weights == 3 * d * d + 7 * (layer + d * d + 2 * d * keys)


def test_the_flops_of_a_learners_step_are_those_of_a_count_by_hand() -> None:
    """6 for each weight and token, padding included, and for each number of the labelled rows'
    logits.
    """
    records = [make_record(number, SMALL) for number in range(4)]
    plan = plan_learner("standalone", "llama-3.1-8b", "llama-3.2-1b")
    counted, tokens = count_learner(plan, records, "nothing")
    texts = select_texts(records)
    rows = sum(len(text.rows_R) for text in texts)
    products = sum(
        work.flops * n for work, n in counted.operations.items() if work.kind == "product"
    )
    small = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    assert products == 6 * (16 * small * tokens + rows * 128_256 * 2048)
    assert products < count_flops(counted) < 1.1 * products, "and attention"
    assert passes() == 8


def test_rows_follow_from_draft_tokens_and_acceptance() -> None:
    traffic = Traffic(output_tokens=2000)
    rows = len(make_record(0, traffic).positions)
    assert rows / 2000 == pytest.approx(
        (traffic.num_speculative_tokens + 1) / traffic.tau, rel=0.05
    )


def test_more_tokens_than_were_drafted_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4\.5.*3.*4"):
        Traffic(tau=4.5)


def test_a_records_bytes_are_bounded_by_its_columns() -> None:
    record = make_record(1, Traffic())
    raw = len(record.positions) * (21 + 8 * record.top_k) + 4 * 750
    assert 0.6 * raw < len(encode_record(record)) < raw + 500


def test_hidden_states_are_nearly_all_of_a_heads_record() -> None:
    record = make_record(1, SMALL)
    stateful = with_states(record, (3, 256), 0)
    assert len(stateful.hidden) == 2 * 3 * 256 * 29
    assert (
        0.7 * len(stateful.hidden)
        < len(encode_record(stateful)) - len(encode_record(record))
        <= 1.01 * len(stateful.hidden)
    )


def test_a_fleets_row_is_the_tokens_times_its_rate() -> None:
    cfg = Fleet(tokens_per_s=2e6, fraction=0.5, traffic=SMALL)
    found = all_costs(cfg)
    row = list(fleet_table(cfg, found))[2]
    assert f"{two(found[0].learner_flops * 1e6 / 1e12)} TFLOP/s" in row


@pytest.mark.parametrize(("family", "target"), [("mtp", "mimo-7b"), ("dspark", "qwen3-0.6b")])
def test_every_family_that_learns_is_counted(family: str, target: str) -> None:
    (cost,) = all_costs(Fleet(families=(family,), target=target, traffic=SMALL))
    assert cost.learner_flops > 6 * passes() * cost.weights, (
        "more than the tokens of the answer are read"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.00421, "0.0042"), (0.4, "0.4"), (4.25, "4.2"), (42.4, "42"), (12345, "12,000"), (10, "10")],
)
def test_numbers_have_two_digits(number: float, text: str) -> None:
    assert two(number) == text
