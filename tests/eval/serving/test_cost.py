"""The cost model against values computed by hand, and its advice as the engine reads it."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from positions import cumulative

from redraft.engine.counts import tau
from redraft.eval.serving.cost import Advice, StepCosts, advise, predict_speed

ACCEPTANCE = (0.8, 0.5, 0.2)


def make_costs(**changes: object) -> StepCosts:
    """With one request, further rows cost next to nothing.

    With 9, every row costs as much as the first.
    """
    values = {
        "target_s": {1: {0: 0.010, 3: 0.013}, 9: {0: 0.020, 3: 0.080}},
        "draft_s": {1: 0.001, 9: 0.003},
    }
    return StepCosts(**{**values, **changes})  # type: ignore[arg-type]


def best(advice: Advice, batch_size: int) -> int:
    """The number of draft tokens that vLLM takes: above the last range that of the largest."""
    inside = (r.num_speculative_tokens for r in advice.schedule if batch_size <= r.last)
    return next(inside, advice.schedule[-1].num_speculative_tokens)


def test_the_speed_of_a_row_equals_a_hand_computed_one() -> None:
    row = predict_speed(ACCEPTANCE, make_costs(), batch_size=1, num_speculative_tokens=2)
    # target 0.010 + 2/3 * 0.003 = 0.012, two draft steps 0.002; tokens 1 + 0.8 + 0.5
    assert row.step_s == pytest.approx(0.014)
    assert row.tau == pytest.approx(2.3)
    assert row.tokens_per_s == pytest.approx(2.3 / 0.014)
    assert row.speedup == pytest.approx(2.3 * 0.010 / 0.014)


def test_between_measured_batch_sizes_a_step_time_is_interpolated() -> None:
    # halfway: target (0.013 + 0.080) / 2, three draft steps of (0.001 + 0.003) / 2
    assert make_costs().step_s(5, 3) == pytest.approx(0.0465 + 0.006)
    assert make_costs().step_s(17, 0) == pytest.approx(0.030), "extrapolated after the last"
    assert (
        make_costs(target_s={2: {0: 1.0}, 4: {0: 3.0}}, draft_s={2: 0, 4: 0}).step_s(1, 0) == 1.0
    ), "constant before the first"


@given(alpha=st.floats(0, 0.99), c=st.floats(0, 0.5), k=st.integers(1, 10))
def test_with_independent_acceptance_it_is_leviathans_formula(
    alpha: float, c: float, k: int
) -> None:
    costs = StepCosts(
        target_s={1: {0: 1.0}}, draft_s={1: c}
    )  # verifying is free: one point, so no slope
    row = predict_speed(cumulative([alpha] * k), costs, batch_size=1, num_speculative_tokens=k)
    assert row.speedup == pytest.approx((1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1)))
    assert row.tau == pytest.approx(tau(cumulative([alpha] * k)))


def test_the_advice_is_the_best_of_each_batch_size() -> None:
    advice = advise(ACCEPTANCE, make_costs())
    # b = 1: k=1 1.8/0.012=150, k=2 2.3/0.014=164.3, k=3 2.5/0.016=156; b = 9: 1/0.020 against at
    # best 1.8/0.043
    assert (best(advice, 1), best(advice, 9), best(advice, 1000)) == (2, 0, 0)
    rows = {(row.batch_size, row.num_speculative_tokens): row for row in advice.table}
    assert rows[1, 3].tokens_per_s == pytest.approx(156.25)
    assert rows[9, 1].speedup == pytest.approx(1.8 * 0.020 / 0.043)
    assert [row.num_speculative_tokens for row in advice.table] == [0, 1, 2, 3] * 2
    assert [r.first for r in advice.schedule] == [1] + [r.last + 1 for r in advice.schedule[:-1]]
    for batch_size in range(1, 10):
        speeds = [
            predict_speed(
                ACCEPTANCE, make_costs(), batch_size=batch_size, num_speculative_tokens=k
            ).tokens_per_s
            for k in range(4)
        ]
        assert best(advice, batch_size) == speeds.index(max(speeds))


def test_only_the_offered_numbers_are_advised() -> None:
    assert best(advise(ACCEPTANCE, make_costs(), choices=[1, 3]), 1) == 3
    with pytest.raises(ValueError, match=r"1.*3.*\[2, 4\]"):
        advise(ACCEPTANCE, make_costs(), choices=[2, 4])


def make_advice(*schedule: tuple[int, int, int]) -> Advice:
    """Advice with this schedule, from steps that are fast only for the best k of a batch size."""
    target_s = {
        b: {0: 1.0 if not k else 2.0, **{j: 1e-6 if j == k else 1e3 for j in (2, 4)}}
        for first, last, k in schedule
        for b in range(first, last + 1)
    }
    return advise(
        (0.9, 0.8, 0.7, 0.6),
        StepCosts(target_s=target_s, draft_s=dict.fromkeys(target_s, 0.0)),
        choices=[2, 4],
    )


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (
            [(1, 8, 4), (9, 16, 2), (17, 20, 0)],
            "best k = 4 up to 8 requests, k = 2 up to 16, off above 16",
        ),
        ([(1, 8, 4), (9, 20, 0)], "best k = 4 up to 8 requests, off above 8"),
        ([(1, 8, 4)], "best k = 4 up to 8 requests, the largest number measured"),
        ([(1, 8, 0)], "speculation does not pay at any batch size up to 8: leave it off"),
        ([(1, 2, 0), (3, 8, 2)], "off up to 2 requests, k = 2 above 2"),
    ],
)
def test_the_sentence_says_the_schedule(
    schedule: list[tuple[int, int, int]], sentence: str
) -> None:
    advice = make_advice(*schedule)
    assert [(r.first, r.last, r.num_speculative_tokens) for r in advice.schedule] == schedule
    assert advice.sentence == sentence


def test_the_engine_reads_the_schedule_from_the_configuration() -> None:
    dynamic = pytest.importorskip(
        "vllm.v1.spec_decode.dynamic.utils", reason="vLLM is not installed"
    )

    advice = make_advice((1, 8, 4), (9, 16, 2), (17, 20, 0))
    config = json.loads(
        json.dumps(advice.speculative_config({"method": "draft_model", "model": "d"}))
    )
    assert config == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 16, 2], [17, 20, 0]],
    }
    lookup = dynamic.build_dynamic_sd_schedule_lookup(
        config["num_speculative_tokens_per_batch_size"], 64, 4
    )
    assert lookup[1:] == [4] * 8 + [2] * 8 + [0] * 48


@pytest.mark.parametrize("method", ["medusa", "suffix"])
def test_a_method_with_a_fixed_number_of_draft_tokens_gets_one(method: str) -> None:
    config = make_advice((1, 4, 4), (5, 20, 2), (21, 24, 0)).speculative_config({"method": method})
    assert config == {"method": method, "num_speculative_tokens": 2}


def test_one_number_for_all_batch_sizes_needs_no_schedule_and_no_speculation_no_configuration() -> (
    None
):
    assert make_advice((1, 8, 2)).speculative_config({"model": "d"}) == {
        "model": "d",
        "num_speculative_tokens": 2,
    }
    assert make_advice((1, 8, 0)).speculative_config({"model": "d"}) is None


def test_step_times_of_a_server_are_split_into_target_and_draft() -> None:
    # a target step takes 1 + 0.1 per row, a draft step 0.25 + 0.01 per request
    def whole(b: int, k: int) -> float:
        return 1 + 0.1 * b * (k + 1) + k * (0.25 + 0.01 * b)

    step_s = {b: {k: whole(b, k) for k in (0, 1, 2, 5)} for b in (1, 4, 16, 96)}
    costs = StepCosts.from_steps(step_s)
    for b in step_s:
        assert costs.draft_s[b] == pytest.approx(0.25 + 0.01 * b)
        for k in (0, 1, 2, 3, 4, 5):  # interpolated values too, because the times are linear in k
            assert costs.step_s(b, k) == pytest.approx(whole(b, k))


def test_the_split_of_a_step_adds_up_to_the_measured_step() -> None:
    noisy = {1: {0: 1.0, 1: 0.7, 5: 9.0}, 4: {0: 0.9, 1: 5.0, 5: 5.1}}
    costs = StepCosts.from_steps(noisy)
    for b, by_k in noisy.items():
        assert {k: costs.step_s(b, k) for k in by_k} == pytest.approx(by_k)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ({"target_s": {1: {1: 0.1}}, "draft_s": {1: 0.1}}, r"size 1\b.*k = 0"),
        ({"target_s": {1: {0: 0.1}}, "draft_s": {2: 0.1}}, r"sizes.*\[1\].*\[2\]"),
        ({"target_s": {}, "draft_s": {}}, r"sizes.*\[\].*\[\]"),
        ({"target_s": {1: {0: 0.0}}, "draft_s": {1: 0.1}}, "positive"),
    ],
)
def test_incomplete_costs_are_refused(costs: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_costs(**costs)


@pytest.mark.parametrize("rates", [[], [1.2], [0.5, 0.6], [0.5, -0.1]])
def test_malformed_acceptance_is_refused(rates: list[float]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{rates}")):
        advise(rates, make_costs())
