"""`redraft plan fleet` and `capture`.

The counts against counting by hand, and the capacity page, whose tables they make.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.capacity import TABLES, Config, count_long_row, fill_tables
from redraft.distill.plan.counted_step import count_flops
from redraft.heads.catalog import FamilyName
from redraft.online.learning.config import Training
from redraft.online.learning.replay import select_texts
from redraft.online.records.record import encode_record
from redraft.recipes.cli.run import dispatch
from redraft.recipes.plan.fleet import FleetPlanConfig
from redraft.recipes.plan.fleet_costs import (
    all_costs,
    count_learner,
    count_texts,
    fleet_table,
    passes,
    plan_learner,
    two,
    with_states,
)
from redraft.recipes.plan.traffic import Traffic, make_record

PAGE = Path(__file__).parents[3] / "docs" / "capacity.md"
SMALL = Traffic(prompt_tokens=20, output_tokens=10)


@pytest.mark.slow
def test_the_page_holds_what_is_counted_now() -> None:
    tables = {name: TABLES[name] for name in Config(page=PAGE).tables}
    assert fill_tables(PAGE.read_text(), tables) == PAGE.read_text(), (
        "python -m benchmarks.capacity docs/capacity.md"
    )


@pytest.mark.slow
def test_the_page_holds_what_is_counted_of_a_long_row() -> None:
    assert f"\n{count_long_row('eagle3', 'llama-3.1-8b', 8192)}\n" in PAGE.read_text(), (
        "python -m benchmarks.capacity docs/capacity.md --tables long_rows"
    )


def test_the_command_prints_the_tables_and_writes_the_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--families", "standalone", "--traffic.prompt-tokens", "20"]
    flags += ["--traffic.output-tokens", "10", "--json", str(tmp_path / "costs.json")]
    assert dispatch(["plan", "fleet", "--tokens-per-s", "2e6", "--fraction", "0.5", *flags]) == 0
    cfg = FleetPlanConfig(tokens_per_s=2e6, fraction=0.5, families=("standalone",), traffic=SMALL)
    (cost,) = json.loads((tmp_path / "costs.json").read_text())
    assert cost == asdict(all_costs(cfg)[0])
    assert "\n".join(fleet_table(cfg, all_costs(cfg))) in capsys.readouterr().out
    assert dispatch(["plan", "fleet", "--families", "medusa"]) == 2
    assert "--families medusa: this family cannot learn" in capsys.readouterr().err


def test_capture_is_counted_at_the_sizes_of_the_target(tmp_path: Path) -> None:
    path = str(tmp_path / "capture.json")
    assert (
        dispatch(["plan", "capture", "--target", "qwen3-8b", "--requests", "2", "--json", path])
        == 0
    )
    standalone, *heads = json.loads(Path(path).read_text())
    assert (standalone["requests"], standalone["vocab_size"]) == (2, 151_936)
    # 4 rows of each of 2 requests, whose logits in bfloat16 are read
    assert standalone["bytes_moved"] > 2 * 8 * 151_936
    # 3 states of 4,096 numbers in bfloat16 for each of 8 rows
    eagle3 = next(row for row in heads if "eagle3" in row["families"])
    assert eagle3["bytes_queued"] - standalone["bytes_queued"] == 2 * 3 * 8 * 4096


def test_the_weights_that_a_token_meets_are_those_of_the_modules() -> None:
    standalone, eagle1, eagle3 = all_costs(FleetPlanConfig(traffic=SMALL))
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
    """6 for each weight and token.

    Padding is included, and so is each number of the labelled rows' logits.
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


@pytest.mark.parametrize("family", ["standalone", "eagle1", "eagle3"])
def test_a_step_has_the_learners_optimizer_and_loss(family: FamilyName) -> None:
    plan = plan_learner(family, "llama-3.1-8b", "llama-3.2-1b")
    learner = Training()
    assert (plan.optimizer, plan.divergence.name) == (learner.optimizer, learner.divergence)


def test_the_learners_memory_is_that_of_its_whole_step_and_of_one_row() -> None:
    (cost,) = all_costs(FleetPlanConfig(families=("eagle3",), target="qwen3-0.6b", traffic=SMALL))
    plan = plan_learner("eagle3", "qwen3-0.6b", "llama-3.2-1b")
    texts = [with_states(make_record(seed, SMALL), (3, 1024), seed) for seed in range(32)]
    counted, _ = count_learner(plan, texts, "layers")
    assert cost.step_memory_bytes == pytest.approx(sum(counted.memory.values()), rel=0.01)
    assert cost.row_memory_bytes < cost.step_memory_bytes


@pytest.mark.parametrize(("state_bytes", "texts"), [(0, 32), (18 << 20, 4 + 10), (400 << 20, 2)])
def test_a_learners_step_has_as_many_texts_as_it_may_read(state_bytes: int, texts: int) -> None:
    assert count_texts(state_bytes) == texts


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
    cfg = FleetPlanConfig(tokens_per_s=2e6, fraction=0.5, families=("standalone",), traffic=SMALL)
    found = all_costs(cfg)
    row = list(fleet_table(cfg, found))[2]
    assert f"{two(found[0].learner_flops * 1e6 / 1e12)} TFLOP/s" in row


@pytest.mark.parametrize(("family", "target"), [("mtp", "mimo-7b"), ("dspark", "qwen3-0.6b")])
def test_every_family_that_learns_is_counted(family: str, target: str) -> None:
    (cost,) = all_costs(FleetPlanConfig(families=(family,), target=target, traffic=SMALL))
    assert cost.learner_flops > 6 * passes() * cost.weights, (
        "more than the tokens of the answer are read"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.00421, "0.0042"), (0.4, "0.4"), (4.25, "4.2"), (42.4, "42"), (12345, "12,000"), (10, "10")],
)
def test_numbers_have_two_digits(number: float, text: str) -> None:
    assert two(number) == text
