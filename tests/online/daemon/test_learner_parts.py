"""The parts of the daemon: replayed batches, expected blocks, served distributions, settings."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_world import make_draft, make_records
from recorded_heads import make_record
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from benchmarks.soak.poison import i32
from redraft.distill.train.step import DistillStep
from redraft.engine.counts import AcceptanceCounts, simulate_blocks
from redraft.eval.forecast.sampled import sampled_topk
from redraft.files.settings import render_example
from redraft.heads.families.standalone import StandaloneDraft
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.learning.intake import count_acceptance, mark_unfit
from redraft.online.learning.replay import make_batches, select_texts, training_sequence
from redraft.online.learning.scoring import (
    RequestScore,
    score,
    score_rows,
    score_segment,
    sum_segments,
    walk_stretches,
)
from redraft.online.records.record import (
    CorruptRecordError,
    Record,
    Sampling,
    encode_record,
    read_frames,
)

# --- replay


def test_every_labelled_row_of_a_batch_has_what_its_record_says():
    texts = select_texts([make_record(), make_record()])
    assert [len(text.rows_R) for text in texts] == [6, 6]
    (batch,) = make_batches(texts, num_batches=1, sequence_length=64, seed=0)
    told = batch.signal.distribution
    for b, t in (batch.signal.distribution.ids_BTK[..., 0] >= 0).nonzero().tolist():
        follows = int(batch.input_ids_BT[b, t + 1])
        likeliest = int(told.ids_BTK[b, t, 0])
        assert follows == likeliest
        assert batch.loss_mask_BT[b, t + 1]
    assert int((told.ids_BTK[..., 0] >= 0).sum()) == int(batch.loss_mask_BT.sum()) == 12


def test_a_row_after_the_last_token_gets_a_filler_as_label():
    (text,) = select_texts([make_record(output=i32(11, 20, 21, 22, 23))])
    assert text.rows_R.tolist() == [3, 4, 5, 6, 7, 8]
    (batch,) = make_batches([text], num_batches=1, sequence_length=64, seed=0)
    assert batch.input_ids_BT[0, :10].tolist() == [5, 6, 7, 10, 11, 20, 21, 22, 23, 0]
    assert batch.loss_mask_BT[0].nonzero().flatten().tolist() == [4, 5, 6, 7, 8, 9]


def test_a_text_that_is_too_long_loses_its_beginning():
    (text,) = select_texts([make_record()])
    (batch,) = make_batches([text], num_batches=1, sequence_length=4, seed=0)
    assert batch.input_ids_BT[0, :4].tolist() == [21, 22, 23, 24]
    assert batch.signal.distribution.ids_BTK[0, :4, 0].tolist() == [22, 23, 24, -1]


def test_the_loss_is_the_divergence_from_what_was_recorded(random_target):
    draft = StandaloneDraft(LlamaForCausalLM.from_pretrained(random_target))
    record = make_record()
    (text,) = select_texts([record])
    (batch,) = make_batches([text], num_batches=1, sequence_length=64, seed=0)
    from redraft.distill.loss.choice import Divergence

    loss, _ = DistillStep(draft, Divergence())(batch, batch.signal, scale=1.0)
    logits_TV = draft.model(torch.tensor([text.input_ids_T.tolist()])).logits[0].double()
    expected = 0.0
    for row, ids, log_probs in zip(
        text.rows_R, text.topk_ids_RK, text.topk_log_probs_RK, strict=True
    ):
        log_q = logits_TV[int(row)].log_softmax(-1)[torch.tensor(ids).long()]
        p, q = np.exp(log_probs.astype(float)), log_q.exp().detach().numpy()
        tail_p, tail_q = 1 - p.sum(), 1 - q.sum()
        expected += (p * (np.log(p) - np.log(q))).sum() + tail_p * (np.log(tail_p) - np.log(tail_q))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


def test_batches_of_several_ranks_hold_every_row_once_in_one_shape():
    texts = select_texts([make_record()] * 7)
    batches = make_batches(texts, num_batches=4, sequence_length=64, seed=0)
    assert len({batch.input_ids_BT.shape for batch in batches}) == 1
    assert sum(int(batch.loss_mask_BT.sum()) for batch in batches) == 7 * 6


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"output": i32(11, 20, 21, 22, 23, 600)}, "vocabulary of 512"),
        ({"row_topk_ids": i32(*[-7] * 16)}, "vocabulary of 512"),
        ({"row_topk_log_probs": np.full(16, np.nan, "<f4").tobytes()}, "log-probabilities"),
        ({"row_topk_log_probs": np.full(16, 3.0, "<f4").tobytes()}, "log-probabilities"),
        ({}, None),
    ],
)
def test_a_record_that_would_break_training_counts_as_corrupt(changes, why):
    ((_, found),) = mark_unfit(read_frames(encode_record(make_record(**changes))), 512)
    assert (why in str(found)) if why else isinstance(found, Record)
    assert isinstance(found, CorruptRecordError) is (why is not None)


def test_acceptance_is_counted_by_steps():
    counted = count_acceptance(make_record())
    assert (counted.num_drafts, counted.num_accepted, counted.num_draft_tokens, counted.tau) == (
        2,
        4,
        6,
        3.0,
    )


# --- judging


def walk(*rows):
    return sum(walk_stretches(*rows).values(), AcceptanceCounts.zero())


@given(st.lists(st.booleans(), min_size=3, max_size=40), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_at_temperature_0_blocks_are_walked_as_the_engine_walks_them(matches, k):
    """Whole blocks are walked alike.

    If every block has all of its rows, the counts equal those of `eval`'s walk over the same
    matches.
    """
    padded = matches + [False] * k
    scored = walk(np.arange(len(padded)), np.tile(np.array(padded, float), (k, 1)))
    table = torch.tensor([padded[t : t + k] for t in range(len(padded) - k + 1)])
    walked = simulate_blocks(table, len(table) + 1)
    assert (scored.num_drafts, scored.num_accepted) == (walked.num_drafts, walked.num_accepted)


def test_blocks_are_expected_over_all_ways_to_get_there():
    scored = walk(np.arange(3), np.array([[0.5, 0.25, 0.8]]))
    # Row 0 begins a block; row 1 if it was refused (0.5); row 2 if row 0 was accepted, or row 1
    # refused.
    starts = [1.0, 0.5, 0.5 + 0.5 * 0.75]
    assert scored.num_drafts == pytest.approx(sum(starts))
    assert scored.num_accepted == pytest.approx(np.dot(starts, [0.5, 0.25, 0.8]))


def test_blocks_are_split_by_the_length_of_their_context():
    rng = np.random.default_rng(0)
    rows_R = np.array([*range(5, 20), *range(30, 36)])
    accepted_JR = rng.random((2, len(rows_R)))
    found = walk_stretches(rows_R, accepted_JR, 10)
    # Row r is at position r + 10, so a block that begins there has r + 11 tokens before it.
    assert found.keys() == {16, 32}
    brute = {16: [0.0, 0.0], 32: [0.0, 0.0]}
    for begin, end in ((0, 15), (15, 21)):
        chance = {begin: 1.0}
        for at in range(begin, end - 1):
            both = accepted_JR[0, at] * accepted_JR[1, at + 1]
            one = accepted_JR[0, at] - both
            for skip, share in ((1, 1 - accepted_JR[0, at]), (2, one), (3, both)):
                chance[at + skip] = chance.get(at + skip, 0.0) + chance[at] * share
            part = brute[16 if rows_R[at] + 11 < 32 else 32]
            part[0] += chance[at]
            part[1] += chance[at] * (one + 2 * both)
    for power, counts in found.items():
        assert (counts.num_drafts, counts.num_accepted) == pytest.approx(tuple(brute[power]))


def test_a_gap_in_the_rows_begins_a_new_walk():
    whole = walk(np.array([4, 5, 9, 10]), np.ones((2, 4)))
    assert (whole.num_drafts, whole.num_accepted) == (2, 4)


def test_the_later_tokens_of_a_block_have_probabilities_of_their_own():
    scored = walk(np.arange(3), np.array([[0.5, 0.4, 0.0], [0.0, 0.25, 0.8]]))
    # Blocks begin at row 0, and at row 1 if its first token was refused.
    assert scored.num_drafts == pytest.approx(1 + 0.5)
    assert scored.num_accepted == pytest.approx((0.5 + 0.5 * 0.25) + 0.5 * (0.4 + 0.4 * 0.8))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.3, 0.1]),
        (Sampling(temperature=0), [1, 0, 0]),
        (Sampling(temperature=0.5), [0.25 / 0.35, 0.09 / 0.35, 0.01 / 0.35]),
        (Sampling(top_k=2), [5 / 8, 3 / 8, 0]),
        (Sampling(top_p=0.6), [5 / 8, 3 / 8, 0]),
        (Sampling(min_p=0.5), [5 / 8, 3 / 8, 0]),
        (Sampling(top_k=2, top_p=0.6), [1, 0, 0]),
    ],
)
def test_the_served_distribution_is_the_recorded_one_after_the_requests_sampling(
    sampling, expected
):
    log_probs_NK = torch.tensor([[0.5, 0.3, 0.1]]).log()
    assert sampled_topk(log_probs_NK, sampling.served())[0].tolist() == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize(
    ("method", "temperature"), [("greedy", 0.0), ("greedy", 1.0), ("probabilistic", 0.7)]
)
def test_acceptance_is_that_of_the_drafts_own_distribution(
    random_target, tmp_path, method, temperature
):
    draft = StandaloneDraft.load(
        make_draft(random_target, tmp_path / "draft"), torch.float32
    ).eval()
    (record,) = make_records(random_target, 1, sampling=Sampling(temperature=temperature))
    text = training_sequence(record)
    (batch,) = make_batches([text], num_batches=1, sequence_length=64, seed=0)
    rows_R, found_JR = score_rows(draft, batch, record.sampling, method, 2)
    with torch.no_grad():
        logits_RV = draft.model(torch.tensor([text.input_ids_T.tolist()])).logits[0, text.rows_R]
    p_RK = sampled_topk(torch.tensor(text.topk_log_probs_RK), record.sampling.served())
    q_RV = (
        F.one_hot(logits_RV.argmax(-1), 512).float()
        if method == "greedy"
        else (logits_RV / temperature).softmax(-1)
    )
    ids_RK = torch.tensor(text.topk_ids_RK).long()
    expected_R = torch.minimum(p_RK, q_RV.gather(1, ids_RK)).sum(1)
    assert rows_R.tolist() == text.rows_R.tolist()
    assert found_JR == pytest.approx(np.tile(expected_R.numpy(), (2, 1)), abs=1e-5)


def test_the_target_itself_is_always_accepted_and_segments_of_a_request_are_added(random_target):
    target = StandaloneDraft.load(random_target, torch.float32).eval()
    records = make_records(random_target, 2)
    records[1] = msgspec.structs.replace(records[1], request_id=records[0].request_id, sequence=1)
    scored = score(target, records, num_speculative_tokens=3, method="greedy", sequence_length=64)
    assert all(one.num_accepted == 3 * one.num_drafts > 0 for one in scored)
    whole = AcceptanceCounts(
        num_drafts=scored[0].num_drafts + scored[1].num_drafts,
        num_accepted=scored[0].num_accepted + scored[1].num_accepted,
    )
    found = sum_segments(
        score_segment(target, one, num_speculative_tokens=3, method="greedy", sequence_length=64)
        for one in records
    )
    (one,) = found.values()
    assert found == {
        ("boot", records[0].request_id): RequestScore(
            "code", whole, records[0].target, by_context=one.by_context
        )
    }
    assert sum(one.by_context.values(), AcceptanceCounts.zero()) == whole
    assert {power < 64 for power in one.by_context} == {True}


# --- settings


def test_the_printed_example_is_complete_and_says_the_defaults(tmp_path):
    (tmp_path / "learner.toml").write_text(render_example(LearnerConfig))
    config = load_config(tmp_path / "learner.toml")
    default = LearnerConfig(
        target=config.target, registry=config.registry, spool=config.spool, folder=config.folder
    )
    assert config == default
    keys = {
        f"{section}."
        for section, value in tomllib.loads(render_example(LearnerConfig)).items()
        if isinstance(value, dict)
    }
    assert keys == {
        f"{f.name}."
        for f in dataclasses.fields(LearnerConfig)
        if dataclasses.is_dataclass(f.default_factory)
    }


def test_every_printed_setting_is_explained():
    lines = render_example(LearnerConfig).splitlines()
    keys = [i for i, line in enumerate(lines) if re.match(r"(# )?\w+ =", line)]
    assert len(keys) > 50
    assert [lines[i] for i in keys if not lines[i - 1].startswith("# ")] == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainig.lr=1", r"\btrainig\b.*\btraining\b"),
        ("training.lrr=1", r"\btraining\.lrr\b.*\btraining\.lr\b"),
        ("training.lr='high'", r"training\.lr: .*`float`.*`str`"),
        ("training.fresh_per_step=0", r"training\.fresh_per_step\b.*\b0\b.*\b1\b"),
        ("training.max_lag_records=3", r"max_lag_records is 3\b.*fresh_per_step, 4"),
        ("training.max_grad_norm=0", r"training\.lr\b.*\bmax_grad_norm is 0\b"),
        ("gate.confidence=2", r"confidence.*\b0\.5\b.*\b1\b"),
        ("registry=3", r"registry: .*path.*quotes"),
        ("folder=here", "quotes"),
    ],
)
def test_an_invalid_setting_is_refused_in_one_line(tmp_path, override, message):
    (tmp_path / "learner.toml").write_text(render_example(LearnerConfig))
    with pytest.raises(ValueError, match=message) as error:
        load_config(tmp_path / "learner.toml", [override])
    assert "\n" not in str(error.value)


def test_overrides_go_on_top_and_paths_begin_at_the_file(tmp_path):
    (tmp_path / "learner.toml").write_text(
        'target = "t"\nregistry = "/r"\nspool = "s"\n[training]\nlr = 1.0\nseed = 7\n'
    )
    config = load_config(
        tmp_path / "learner.toml", ["training.lr=2e-3", "fleet.servers=['http://a']"]
    )
    assert (config.training.lr, config.training.seed, config.fleet.servers) == (
        2e-3,
        7,
        ("http://a",),
    )
    assert (config.target, str(config.registry)) == (tmp_path / "t", "/r")
    assert config.folder == tmp_path / "learner"
    assert config.buffer_config.folder == tmp_path / "learner" / "buffer"
    assert dataclasses.replace(config, zero_retention=True).buffer_config.folder is None


def test_settings_load_neither_torch_nor_vllm():
    modules = "redraft.online.daemon.config, redraft.online.daemon.control"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
