"""Heads learn from refused drafts: the rows of a record that follow tokens in no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded_heads import make_head, make_record, with_states
from torch import Tensor

from redraft.distill.loss.divergences import Divergence
from redraft.distill.train.step import DistillStep
from redraft.heads.catalog import find_family
from redraft.heads.families import eagle1, eagle3, mtp
from redraft.heads.families.mtp_folder import as_mimo
from redraft.heads.nn.attention import KeyCache
from redraft.heads.target import Target
from redraft.online.learning.candidate import Candidate, choose_reads
from redraft.online.learning.config import Training
from redraft.online.learning.replay import RecordedBatch, make_batches, select_head_texts
from redraft.online.records.record import Record
from redraft.online.records.sequences import refused_drafts, training_sequences

HEADS = {"eagle1": eagle1.Eagle1, "eagle3": eagle3.Eagle3, "mtp": mtp.Mtp}


def make_batch(record: Record, count: int, reads: str = "layers", length: int = 64) -> RecordedBatch:
    texts = select_head_texts([record], branches_per_record=count, rng=np.random.default_rng(0))
    (batch,) = make_batches(texts, num_batches=1, sequence_length=length, seed=0, reads=reads)  # type: ignore[arg-type]
    return batch


@pytest.fixture
def record(random_target: Path) -> Record:
    """Text 5 6 7 10 11 20 21 22 23 24. Of drafts 11, 12, 13 at place 4 the first was accepted, later ones all were."""
    return with_states(make_record(), random_target, "eagle3")


def test_a_refused_draft_says_what_was_drafted_from_where_and_what_the_target_said(record: Record) -> None:
    (draft,) = refused_drafts(record)
    # Row 2 holds token 7. It reads token 10 and proposes place 4, which is 11.
    assert (draft.row, draft.draft_ids_S.tolist(), draft.num_accepted) == (2, [11, 12, 13], 1)
    assert draft.topk_ids_QK.tolist() == [[30, 3], [31, 4]]
    np.testing.assert_allclose(np.exp(draft.topk_log_probs_QK), [[0.6, 0.3]] * 2, rtol=1e-6)


def test_the_branches_of_a_batch_stand_where_the_text_was_packed(record: Record) -> None:
    branches = make_batch(record, 9).signal.branches
    assert branches is not None
    assert branches.row_BN.tolist() == [[2]]
    assert branches.ids_BNS.tolist() == [[[11, 12, 13]]]
    assert branches.mask_BNS.tolist() == [[[False, True, True]]]
    assert branches.ids_BNSK.tolist() == [[[[-1, -1], [30, 3], [31, 4]]]]
    assert make_batch(record, 0).signal.branches is None
    # Two texts in one row: the second begins behind the first, whose 10 tokens end with one that has no state.
    texts = select_head_texts([record, record], branches_per_record=9, rng=np.random.default_rng(0))
    (both,) = make_batches(texts, num_batches=1, sequence_length=64, seed=0, reads="layers")
    assert both.signal.branches is not None
    for row_N, document_T in zip(both.signal.branches.row_BN, both.document_BT, strict=True):
        starts = [int((document_T == d).nonzero()[0]) for d in document_T[document_T >= 0].unique()]
        assert row_N.tolist() == [start + 2 for start in starts]


def test_every_rank_takes_as_many_draft_steps(record: Record) -> None:
    with_draft, without = (
        select_head_texts([record], branches_per_record=count, rng=np.random.default_rng(0)) for count in (9, 0)
    )
    # A row each: the sequence is too short for both.
    batches = make_batches([*with_draft, *without], num_batches=2, sequence_length=10, seed=0, reads="layers")
    found = [batch.signal.branches for batch in batches]
    assert [None if one is None else one.ids_BNS.shape for one in found] == [(1, 1, 3)] * 2
    assert sorted(int(one.mask_BNS.sum()) for one in found if one is not None) == [0, 2]


def test_a_draft_from_a_row_without_states_or_before_the_cut_is_left_out(random_target: Path, record: Record) -> None:
    assert make_batch(with_states(make_record(), random_target, "eagle3", begin=3), 9).signal.branches is None
    assert make_batch(record, 9, length=7).signal.branches is None  # the text begins at token 3
    kept = make_batch(record, 9, length=9).signal.branches
    assert kept is not None
    assert kept.row_BN.tolist() == [[1]]  # the text begins at token 1


@pytest.mark.parametrize("name", HEADS)
def test_training_on_a_refused_draft_equals_decoding_it(name: str, random_target: Path, tmp_path: Path) -> None:
    target = random_target
    if name == "mtp":
        as_mimo(random_target, target := tmp_path / "mimo")
    head = HEADS[name].load(make_head(name, target, tmp_path / "head"), Target.from_folder(target)).eval()
    record = with_states(make_record(), target, name)
    batch = make_batch(record, 9, choose_reads(find_family(name), head))
    steps = [step for step in head.draft_steps(batch, batch.signal, 4) if step.target is not None]
    assert [int(step.mask_BT.sum()) for step in steps] == [0, 1, 1], "a step for each token that is read"

    # Decode: rows 0, 1 and 2 read tokens 1, 2 and 3 of the text beside the target's features, then the draft is read.
    text, (draft,) = training_sequences(record)[0].input_ids_T, refused_drafts(record)
    rows = draft.row + 1
    memory, feature_BTD = KeyCache(), head.feature(batch.signal)[:1, :rows]
    ids_BT, position_BT = torch.from_numpy(text[None, 1 : rows + 1]).long(), torch.arange(rows)[None]
    _, feature_BTD = head.step(ids_BT, feature_BTD, position_BT, memory)
    for token, step in zip(draft.draft_ids_S, steps, strict=True):
        position_BT, feature_BTD = position_BT[:, -1:] + 1, feature_BTD[:, -1:]
        hidden_BTD, feature_BTD = head.step(torch.tensor([[int(token)]]), feature_BTD, position_BT, memory)
        torch.testing.assert_close(step.hidden_BTD[:1, :1], hidden_BTD, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_loss_adds_the_divergence_from_the_targets_answers_to_the_draft(
    recompute: bool, random_target: Path, record: Record, tmp_path: Path
) -> None:
    head = eagle3.Eagle3.load(make_head("eagle3", random_target, tmp_path / "head"), Target.from_folder(random_target))
    head.config = replace(head.config, num_steps=4, recompute=recompute)
    text, both = make_batch(record, 0), make_batch(record, 9)

    def run(batch: RecordedBatch) -> tuple[Tensor, Tensor, Tensor]:
        head.zero_grad()
        loss, sums_S3 = DistillStep(head, Divergence())(batch, batch.signal)
        loss.backward()
        assert head.fc.weight.grad is not None
        return loss.detach(), sums_S3, head.fc.weight.grad.clone()

    text_loss, text_sums, text_gradient = run(text)
    loss, sums, gradient = run(both)
    assert torch.equal(sums, text_sums), "the acceptance that is reported is that of the text"

    head.zero_grad()
    added = torch.zeros(())
    ((draft,), steps) = list(refused_drafts(record)), head.draft_steps(both, both.signal)
    for k, step in enumerate([step for step in steps if step.target is not None], 1):
        if k > draft.num_accepted:
            row = k - 1 - draft.num_accepted
            p = torch.from_numpy(np.exp(draft.topk_log_probs_QK[row].astype(np.float64)))
            ids = torch.from_numpy(draft.topk_ids_QK[row].astype(np.int64))
            q = (step.hidden_BTD[0, 0].double() @ step.head_WD.double().T).softmax(-1)[ids]
            divergence = (p * (p / q).log()).sum() + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()
            added = added + head.config.step_decay**k * divergence
    added.backward()
    assert float(loss - text_loss) == pytest.approx(float(added.detach()), rel=1e-4)
    torch.testing.assert_close(gradient - text_gradient, head.fc.weight.grad, atol=1e-5, rtol=1e-3)


def test_a_candidate_learns_from_refused_drafts_if_it_is_told_to(
    random_target: Path, record: Record, tmp_path: Path
) -> None:
    version = make_head("eagle3", random_target, tmp_path / "v000001")
    batch = make_batch(record, 9)

    def divergence(head: eagle3.Eagle3) -> float:
        module = DistillStep(head.eval(), Divergence())
        text = replace(batch, signal=replace(batch.signal, branches=None))
        with torch.no_grad():
            return float(module(batch, batch.signal)[0] - module(text, text.signal)[0])

    found = {}
    for count in (0, 1):
        settings = Training(lr=3e-3, warmup_steps=1, sequence_length=64, head_branches_per_record=count)
        candidate = Candidate(settings, "eagle3", random_target)
        candidate.begin(version)
        for seed in range(4):
            candidate.step([record], seed)
        found[count] = divergence(candidate.distillation.draft)  # type: ignore[arg-type]
        candidate.distillation.close()
    assert found[1] < 0.9 * found[0]
