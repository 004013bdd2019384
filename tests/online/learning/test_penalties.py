"""Penalties on recorded distributions, against vLLM's own function."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from learner_world import make_records

from redraft.heads.families.standalone import StandaloneDraft
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.penalties import count_before, is_undecided, penalise
from redraft.online.learning.scoring import score
from redraft.online.records.record import Record, Sampling, encode_record

PENALTIES = [
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.8),
    Sampling(presence_penalty=0.7),
    Sampling(frequency_penalty=-0.4),
    Sampling(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.5),
]


def make_record(
    target, sampling: Sampling, *, top_k: int = 512, seed: int = 0
) -> tuple[Record, torch.Tensor]:
    """A record of made-up logits with much repetition, and the logits of its rows."""
    rng = np.random.default_rng(seed)
    (record,) = make_records(target, 1, sampling=sampling)
    num_rows = len(record.positions)
    logits_RV = rng.normal(0, 3, (num_rows, 512))
    total_R = np.logaddexp.reduce(logits_RV, axis=1)
    order_RK = np.argsort(-logits_RV, 1)[:, :top_k]
    log_probs_RK = np.take_along_axis(logits_RV, order_RK, 1) - total_R[:, None]
    output = rng.integers(8, 20, len(record.output_ids))
    changed = msgspec.structs.replace(
        record,
        top_k=top_k,
        output=output.astype("<i4").tobytes(),
        row_topk_ids=order_RK.astype("<i4").tobytes(),
        row_topk_log_probs=log_probs_RK.astype("<f4").tobytes(),
        row_log_sum_exp=total_R.astype("<f4").tobytes(),
    )
    return changed, torch.tensor(logits_RV)


def apply_vllm(record: Record, logits_RV: torch.Tensor) -> torch.Tensor:
    """vLLM's log-probabilities after its penalties, row by row, [R, V]."""
    pytest.importorskip("vllm")  # the tests with the oldest versions have no engine
    from vllm.model_executor.layers.utils import get_token_bin_counts_and_mask

    text_T = np.concatenate([record.context_ids, record.output_ids])
    prompt = torch.tensor(text_T[: record.num_prompt_tokens])[None].long()
    sampling, found = record.sampling, []
    for position, logits_V in zip(record.positions, logits_RV.clone(), strict=True):
        output = torch.tensor(text_T[record.num_prompt_tokens : position])[None].long()
        counts_V, is_output_V = (x[0] for x in get_token_bin_counts_and_mask(output, 512, 1))
        is_seen_V = is_output_V | get_token_bin_counts_and_mask(prompt, 512, 1)[1][0]
        factor_V = torch.where(is_seen_V, sampling.repetition_penalty, 1.0)
        logits_V = torch.where(logits_V > 0, logits_V / factor_V, logits_V * factor_V)
        logits_V -= sampling.frequency_penalty * counts_V + sampling.presence_penalty * is_output_V
        found.append(logits_V.log_softmax(-1))
    return torch.stack(found)


@pytest.mark.parametrize("sampling", PENALTIES)
def test_a_record_of_the_whole_vocabulary_is_penalised_as_in_vllm(random_target, sampling):
    record, logits_RV = make_record(random_target, sampling)
    expected_RV = apply_vllm(record, logits_RV).numpy()
    found = penalise(record)
    expected_RK = np.take_along_axis(expected_RV, found.topk_ids.astype(np.int64), 1)
    np.testing.assert_allclose(found.topk_log_probs, expected_RK, atol=2e-5)
    assert (np.diff(found.topk_log_probs, axis=1) <= 0).all()
    assert abs(expected_RV - logits_RV.log_softmax(-1).numpy()).max() > 0.1, (
        "the penalties change something"
    )


@pytest.mark.parametrize("sampling", PENALTIES)
def test_with_the_most_probable_ids_only_the_error_is_that_of_the_rest(random_target, sampling):
    record, logits_RV = make_record(random_target, sampling, top_k=64)
    p_RV = apply_vllm(record, logits_RV).exp().numpy()
    found = penalise(record)
    p_RK = np.take_along_axis(p_RV, found.topk_ids.astype(np.int64), 1)
    rest_R = 1 - np.exp(record.topk_log_probs.astype(float)).sum(1)
    error_R = abs(np.exp(found.topk_log_probs) - p_RK).sum(1)
    assert (error_R <= 2 * rest_R + 1e-4).all()
    assert error_R.max() < 0.2


def test_ids_are_counted_before_the_row():
    tokens = np.array([5, 6, 5, 5, 7], np.int32)
    ids = np.array([[5, 6], [5, 7], [7, 5]], np.int32)
    assert count_before(tokens, np.array([0, 3, 5], np.int32), ids).tolist() == [
        [0, 0],
        [2, 0],
        [1, 3],
    ]


def test_without_penalties_nothing_changes(random_target):
    (record,) = make_records(random_target, 1)
    assert penalise(record) is record


def test_a_forecast_knows_the_penalties(random_target):
    """The greedy target itself is always accepted.

    It is not where penalties make the server write something else.
    """
    target = StandaloneDraft.load(random_target, torch.float32).eval()
    (record,) = make_records(random_target, 1)
    penalised = msgspec.structs.replace(
        record, sampling=Sampling(temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    )
    settings = {"num_speculative_tokens": 1, "method": "greedy", "sequence_length": 64}
    (plain,), (scored,) = (score(target, [one], **settings) for one in (record, penalised))
    assert plain.num_accepted == plain.num_drafts > 0
    rows = penalise(penalised).topk_ids[:, 0] == record.topk_ids[:, 0]
    assert not rows.all()
    # one draft token a block: every row that is accepted ends a block of two tokens
    row = drafts = accepted = 0
    while row < len(rows):
        drafts, accepted = drafts + 1, accepted + int(rows[row])
        row += 1 + int(rows[row])
    assert (scored.num_drafts, scored.num_accepted) == (drafts, accepted)


def test_a_held_out_record_whose_penalty_cannot_be_applied_is_counted_and_not_stored(
    random_target, tmp_path
):
    """A tap knows no logits. Such a record still trains."""
    records = make_records(random_target, 40, sampling=Sampling(repetition_penalty=1.05))
    assert all(map(is_undecided, records))
    assert not any(
        map(is_undecided, make_records(random_target, 1, sampling=Sampling(presence_penalty=1)))
    )
    fingerprint = records[0].target_fingerprint
    with Buffer(
        BufferConfig(folder=tmp_path, held_out_fraction=0.5), target_fingerprint=fingerprint
    ) as buffer:
        counts = buffer.append([(encode_record(record), record) for record in records], now_s=0.0)
        assert counts["unknown_penalty"] + counts["stored"] == 40
        assert 8 < counts["unknown_penalty"] < 32
        status = buffer.status()
        assert sum(status.num_held_out.values()) == 0
        assert status.counts["unknown_penalty"] == counts["unknown_penalty"]
