"""The capacity page: its tables as they are computed now, and what they are computed by, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft.online.records.record import encode_record
from redraft.recipes.cli import dispatch
from redraft.recipes.decide import capacity
from redraft.recipes.decide.capacity import Config, costs, drafts, fill_tables, fleet_table, with_states
from redraft.recipes.demo.traffic import Traffic, make_record

PAGE = Path(__file__).parents[3] / "docs" / "capacity.md"
SMALL = Traffic(prompt_tokens=20, output_tokens=10)


def test_the_page_holds_what_is_computed_now():
    assert fill_tables(PAGE.read_text()) == PAGE.read_text(), "redraft capacity --page docs/capacity.md"


def test_weights_are_those_of_the_modules():
    standalone, eagle1, eagle3 = drafts()
    d, inner, keys = 4096, 14336, 8 * 128
    layer = 2 * d * d + 2 * d * keys + 3 * d * inner
    assert standalone.layer + standalone.head == 1_235_814_400, "Llama-3.2-1B's own count"
    assert eagle1.layer == 2 * d * d + layer + d, "its projection of two, one layer, one norm"
    assert (eagle3.once, eagle3.head) == (3 * d * d, 32_000 * d)
    assert eagle3.layer == layer + d * d + 2 * d * keys + 4 * d, "queries, keys and values read two vectors; four norms"


def test_the_flops_of_a_text_are_six_a_weight_and_token_and_attentions_own():
    draft = capacity.Draft(name="d", once=5, layer=7, head=11, is_head_trained=True, num_steps=2, layers=3, width=4)
    assert draft.training_flops(10, 6) == 6 * (5 + 2 * 7) * 10 + 6 * 2 * 3 * 4 * 10 * 10 + 6 * 2 * 11 * 6
    frozen = capacity.Draft(name="d", layer=0, head=11, is_head_trained=False, width=0)
    assert frozen.training_flops(10, 6) == 4 * 11 * 6


def test_rows_follow_from_draft_tokens_and_acceptance():
    traffic = Traffic(output_tokens=2000)
    rows = len(make_record(0, traffic).positions)
    assert rows / 2000 == pytest.approx((traffic.num_speculative_tokens + 1) / traffic.tau, rel=0.05)


def test_more_tokens_than_were_drafted_are_refused():
    with pytest.raises(ValueError, match=r"3.*1.*4"):
        Traffic(tau=4.5)


def test_a_records_bytes_are_bounded_by_its_columns():
    record = make_record(1, Traffic())
    raw = len(record.positions) * (21 + 8 * record.top_k) + 4 * 750
    assert 0.6 * raw < len(encode_record(record)) < raw + 500


def test_hidden_states_are_nearly_all_of_a_heads_record():
    record = make_record(1, SMALL)
    stateful = with_states(record, (3, 256), 0)
    assert len(stateful.hidden) == 2 * 3 * 256 * 29
    assert (
        0.7 * len(stateful.hidden)
        < len(encode_record(stateful)) - len(encode_record(record))
        <= 1.01 * len(stateful.hidden)
    )


def test_a_fleets_row_is_the_tokens_times_its_rate(capsys):
    cost = costs(drafts()[0], SMALL)
    row = list(fleet_table(2e6, 0.5, SMALL))[2]
    assert f"{capacity._two(cost.learner_flops * 1e6 / 1e12)} TFLOP/s" in row
    capacity.main(Config(tokens_per_s=2e6, fraction=0.5, traffic=SMALL))
    assert row in capsys.readouterr().out.splitlines()


def test_the_command_prints_a_row_for_every_family(capsys):
    assert dispatch(["capacity", "--traffic.prompt-tokens", "20", "--traffic.output-tokens", "10"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(drafts())


@pytest.mark.parametrize(
    ("number", "text"), [(0.00421, "0.0042"), (0.4, "0.4"), (4.25, "4.2"), (42.4, "42"), (12345, "12,000"), (10, "10")]
)
def test_numbers_have_two_digits(number, text):
    assert capacity._two(number) == text
