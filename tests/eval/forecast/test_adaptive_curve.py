"""The forecast of adaptive verification, by threshold, against drawn blocks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_verification import (
    MAX_TOKENS,
    K,
    forecast_of,
    make_draft,
    make_heads,
    make_table,
    write_text,
)

from redraft.engine.counts import THRESHOLDS, expected_blocks, walk_adaptive
from redraft.eval.forecast.rows import read_log_odds


def draw_blocks(accept_TK, confidence_TK, threshold, rng):
    """(steps, accepted, verified rows) of one pass over a text."""
    steps = accepted = rows = at = 0
    while at < len(accept_TK):
        admitted = int((np.cumprod(confidence_TK[at]) >= threshold).sum())
        hits = rng.random(admitted) < accept_TK[at, :admitted]
        length = int(np.cumprod(hits).sum())
        steps, accepted, rows = steps + 1, accepted + length, rows + 1 + admitted
        at += length + 1
    return steps, accepted, rows


def test_adaptive_counts_are_those_of_drawn_blocks_at_each_threshold():
    rng = np.random.default_rng(0)
    accept_TK, confidence_TK = rng.random((2, 30, 3))
    points = walk_adaptive(accept_TK, confidence_TK)
    for point in points:
        drawn = np.array(
            [draw_blocks(accept_TK, confidence_TK, point.threshold, rng) for _ in range(1500)]
        )
        told = (point.num_steps, point.num_accepted, point.num_rows)
        error = drawn.std(0) / len(drawn) ** 0.5
        assert (np.abs(drawn.mean(0) - told) <= 4 * error + 1e-9).all()


def test_an_adaptive_curve_runs_from_all_tokens_verified_to_none():
    rng = np.random.default_rng(1)
    accept_TK, confidence_TK = rng.random((2, 40, 4))
    points = walk_adaptive(accept_TK, confidence_TK)
    whole = expected_blocks(accept_TK, 41)
    assert points[0].num_accepted == pytest.approx(whole.num_accepted)
    assert points[0].num_rows == pytest.approx(5 * whole.num_drafts)
    assert (points[-1].num_accepted, points[-1].num_rows) == (0, 40)
    per_step = [one.num_rows / one.num_steps for one in points]
    assert per_step == sorted(per_step, reverse=True)
    assert [one.threshold for one in points] == list(THRESHOLDS)


def test_adaptive_confidences_are_those_of_vllms_estimator_at_its_start():
    logits_NW = torch.tensor([[2.0, 1.0, 0.0], [50.0, -60.0, -60.0]])
    q_N = logits_NW.double().softmax(-1).amax(-1)
    told_N = read_log_odds(logits_NW, 1.0)
    assert float(told_N[0]) == pytest.approx(float((q_N[0] / (1 - q_N[0])).log()), rel=1e-5)
    assert float(told_N[1]) == 40
    torch.testing.assert_close(read_log_odds(logits_NW, 0.0), told_N)
    torch.testing.assert_close(read_log_odds(logits_NW, 0.5), read_log_odds(2 * logits_NW, 1.0))


@pytest.mark.parametrize("is_sampled", [False, True])
def test_an_adaptive_forecast_orders_the_tokens_of_a_text_by_confidence(is_sampled):
    target_SV, draft_SV = make_table(4), 3 * make_table(4) + make_table(5)
    text = write_text(target_SV, 1.0, torch.Generator().manual_seed(0))
    draft = make_draft(draft_SV, is_sampled=is_sampled)
    found = forecast_of(draft, target_SV, text, 1.0)
    tokens = [*text.prompt.token_ids, *text.output_ids, *text.beyond_ids]
    begin = len(text.prompt.token_ids)
    q_SV, p_SV = draft_SV.double().softmax(-1), target_SV.double().softmax(-1)
    confidence_S = (0.5 * (q_SV.amax(-1) / (1 - q_SV.amax(-1))).log() - 0.2).sigmoid()
    accept_TK, confidence_TK = np.zeros((2, MAX_TOKENS - 1, K))
    for t in range(MAX_TOKENS - 1):
        for j in range(K):
            before, token = tokens[begin + t + j], tokens[begin + t + j + 1]
            ratio = float(q_SV[before, token] / p_SV[before, token])
            is_best = float(int(q_SV[before].argmax()) == token)
            accept_TK[t, j] = min(1, ratio) if is_sampled else is_best
            confidence_TK[t, j] = float(confidence_S[before])
    for told, wanted in zip(found.adaptive, walk_adaptive(accept_TK, confidence_TK), strict=True):
        assert told.num_accepted == pytest.approx(wanted.num_accepted, rel=1e-5, abs=1e-9)
        assert told.num_rows == pytest.approx(wanted.num_rows, rel=1e-5)
    assert found.adaptive[0].num_accepted == pytest.approx(found.counts[K].num_accepted)


def test_a_confidence_head_is_read_in_place_of_the_estimator_by_an_adaptive_forecast():
    target_SV, tables = make_table(4), [make_table(4) + make_table(5 + i) for i in range(K)]
    text = write_text(target_SV, 1.0, torch.Generator().manual_seed(0))
    heads = make_heads(tables, is_sampled=False)

    def with_confidence(batch, signal, most):
        return [
            replace(step, confidence_BT=torch.full(batch.input_ids_BT.shape, logit))
            for step, logit in zip(heads.steps(batch, signal, most), (2.0, 0.0, -9.0), strict=True)
        ]

    found = forecast_of(replace(heads, steps=with_confidence), target_SV, text, 1.0)
    by_threshold = {one.threshold: one.num_rows / one.num_steps for one in found.adaptive}
    assert by_threshold[0.0] == pytest.approx(1 + K)
    assert by_threshold[0.4] == pytest.approx(3)  # 0.88 and 0.44 of the first two tokens
    assert by_threshold[0.6] == pytest.approx(2)
