"""The training step.

Its loss, its reduction over micro-batches and processes, and what it does with a NaN.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from divergences import define, exact_log_probs
from make_heads import take_rows
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.distill.loss.choice import Divergence
from redraft.distill.train.objective import StepResult, distill_loss, find_rows
from redraft.distill.train.optim import BETAS, Optim
from redraft.distill.train.step import MAX_SKIPPED_IN_A_ROW, Distillation
from redraft.heads.draft import Batch, DraftStep, ExactTarget, TargetSignal, label_rows
from redraft.heads.families.standalone import StandaloneDraft

VOCABULARY = 40


def make_model(seed: int, hidden_size: int = 16) -> StandaloneDraft:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.5,
        attn_implementation="sdpa",
    )
    return StandaloneDraft(LlamaForCausalLM(config).double())


def make_batch(lengths: list[int], seed: int = 0, width: int = 24) -> Batch:
    """One document a row; the first third of each is the prompt."""
    generator = torch.Generator().manual_seed(seed)
    position_T = torch.arange(width)
    end_B1 = torch.tensor(lengths)[:, None]
    return Batch(
        input_ids_BT=torch.randint(3, VOCABULARY, (len(lengths), width), generator=generator),
        loss_mask_BT=(position_T >= end_B1 // 3) & (position_T < end_B1),
        document_BT=torch.where(position_T < end_B1, 0, -1),
        position_ids_BT=position_T.expand(len(lengths), width).contiguous(),
    )


@torch.no_grad()
def make_signal(target: StandaloneDraft, batch: Batch) -> TargetSignal:
    step = target.draft_steps(batch)[0]
    return TargetSignal(distribution=ExactTarget(hidden_BTD=step.hidden_BTD, head_VD=step.head_WD))


def make_distillation(
    draft: StandaloneDraft,
    target: StandaloneDraft,
    *,
    accumulation: int = 1,
    steps: int = 100,
    **optim: float,
) -> Distillation:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    return Distillation(
        draft,
        lambda batch: make_signal(target, batch),
        Divergence(name="forward_kl"),
        Optim(accumulation=accumulation, lr=1e-2, **optim),
        steps,
        accelerator,
    )


def weights(distillation: Distillation) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in distillation.draft.parameters()])


def test_the_loss_of_a_batch_equals_the_plain_divergence_over_its_labelled_rows():
    target, draft, batch = make_model(0), make_model(1), make_batch([24, 13])
    signal, steps = make_signal(target, batch), draft.draft_steps(batch)
    result = distill_loss(steps, batch, signal, Divergence(name="forward_kl"), scale=0.25)
    rows_BT = label_rows(batch, 0)
    p_logits_MV = (
        make_signal(target, batch).distribution.hidden_BTD[rows_BT] @ target.model.lm_head.weight.T
    )
    q_logits_MV = steps[0].hidden_BTD[rows_BT] @ draft.model.lm_head.weight.T
    plain = (
        define(Divergence(name="forward_kl"), *exact_log_probs(p_logits_MV, q_logits_MV)).sum()
        * 0.25
    )
    torch.testing.assert_close(result.loss, plain, rtol=1e-10, atol=0)
    assert result.sums_S3[0, 2] == rows_BT.sum()
    gradient, expected = (
        torch.autograd.grad(loss, draft.parameters(), retain_graph=True)
        for loss in (result.loss, plain)
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-12)


def test_each_target_row_of_a_step_is_compared_with_some_draft_row():
    batch = make_batch([24, 13])
    masks = [label_rows(batch, shift) for shift in (0, 1, 2)]
    masks[0][:, ::3] = False
    steps = [
        DraftStep(
            hidden_BTD=torch.randn(1, 40, 16),
            head_WD=torch.randn(VOCABULARY, 16),
            shift=shift,
            mask_BT=mask_BT,
        )
        for shift, mask_BT in enumerate(masks)
    ]
    for chunk_tokens in (1, 5, 1000):
        rows = find_rows(steps, chunk_tokens)
        assert torch.cat([row.target_row_M for row in rows.of_steps]).unique().tolist() == list(
            range(len(rows.kept_N))
        )
        for row, step in zip(rows.of_steps, steps, strict=True):
            assert row.place_M.tolist() == step.mask_BT.flatten().nonzero().flatten().tolist()
            assert torch.equal(rows.kept_N[row.target_row_M], row.place_M + step.shift)
            chunks = range(0, len(rows.kept_N) + chunk_tokens, chunk_tokens)
            assert row.bounds == [int((row.target_row_M < first).sum()) for first in chunks]


def test_a_step_of_shift_two_learns_from_the_targets_row_two_further_on():
    target, batch = make_model(0), make_batch([20])
    signal = make_signal(target, batch)
    own = torch.randn(1, 24, 16, dtype=torch.float64)
    step = DraftStep(
        hidden_BTD=own,
        head_WD=torch.randn(VOCABULARY, 16).double(),
        shift=2,
        mask_BT=label_rows(batch, 2),
        weight=0.5,
    )
    result = distill_loss([step], batch, signal, Divergence(name="total_variation"), scale=1.0)
    target_hidden_BTD, head_VD = signal.distribution.hidden_BTD, signal.distribution.head_VD
    expected = 0.0
    for row in range(24 - 3):
        if batch.loss_mask_BT[0, row + 3]:
            p_V = (head_VD @ target_hidden_BTD[0, row + 2]).softmax(-1)
            q_V = (step.head_WD @ own[0, row]).softmax(-1)
            expected += 0.5 * float((p_V - q_V).abs().sum() / 2)
    assert result.loss.item() == pytest.approx(expected, rel=1e-9)


def test_cross_entropy_learns_the_texts_next_token():
    target, draft, batch = make_model(0), make_model(1), make_batch([17])
    steps = draft.draft_steps(batch)
    result = distill_loss(
        steps, batch, make_signal(target, batch), Divergence(name="cross_entropy"), scale=1.0
    )
    rows_T = label_rows(batch, 0)[0]
    log_q_MV = (steps[0].hidden_BTD[0, rows_T] @ draft.model.lm_head.weight.T).log_softmax(-1)
    labels_M = batch.input_ids_BT[0].roll(-1)[rows_T]
    assert result.loss.item() == pytest.approx(
        -log_q_MV.gather(1, labels_M[:, None]).sum().item(), rel=1e-9
    )


def test_micro_batches_with_unequal_labels_make_the_same_step_as_one_batch():
    target = make_model(0)
    whole, parts = make_batch([24, 5]), [make_batch([24, 5])] * 2
    parts = [take_rows(part, slice(row, row + 1)) for row, part in enumerate(parts)]
    one = make_distillation(make_model(1), target)
    stats_one = one.step([whole])
    two = make_distillation(
        make_model(1), target, accumulation=2
    )  # accelerate shares its state: after `one` is done
    stats_two = two.step(parts)
    assert stats_one.labels == stats_two.labels == int(label_rows(whole, 0).sum())
    assert stats_two.loss == pytest.approx(stats_one.loss, rel=1e-10)
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-9)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_are_those_of_a_plain_loop_bit_for_bit(accumulation: int):
    target, plain, draft = make_model(0), make_model(1), make_model(1)
    optim = Optim(lr=1e-2, warmup_fraction=0.0, accumulation=accumulation)
    adamw = torch.optim.AdamW(
        plain.parameters(),
        lr=optim.lr,
        betas=BETAS,
        weight_decay=0.0,
        fused=True,
    )
    distillation = make_distillation(draft, target, accumulation=accumulation, warmup_fraction=0.0)
    for step in range(3):
        batches = [
            make_batch([24, 5 + micro], seed=2 * step + micro) for micro in range(accumulation)
        ]
        scale = accumulation / sum(int(label_rows(batch, 0).sum()) for batch in batches)
        adamw.param_groups[0]["lr"] = optim.lr * optim.rate(step, 100)
        wanted = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            signal = make_signal(target, batch)
            loss = distill_loss(
                plain.draft_steps(batch, signal), batch, signal, distillation.divergence, scale
            ).loss
            (loss / accumulation).backward()
            wanted += loss.detach() / accumulation
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), optim.max_grad_norm)
        adamw.step()
        adamw.zero_grad()
        stats = distillation.step(batches)
        assert (stats.loss, stats.grad_norm) == (float(wanted), float(norm))
        assert torch.equal(
            weights(distillation), torch.cat([p.detach().flatten() for p in plain.parameters()])
        )


def test_results_that_are_read_late_are_those_that_are_read_at_once():
    batches, target = [make_batch([24, 5 + step], seed=step) for step in range(4)], make_model(0)
    one = make_distillation(make_model(1), target)
    early = [one.step([batch]) for batch in batches]
    two = make_distillation(make_model(1), target)
    unread = [two.take_step([batch]) for batch in batches]
    assert torch.equal(weights(two), weights(one))
    assert [two.read(each) for each in unread] == early
    assert len({stats.loss for stats in early}) == len(batches)


@pytest.mark.parametrize("first_bad", [0, 1, 2])
def test_a_micro_batch_whose_loss_is_nan_drops_the_whole_step(first_bad: int):
    """The loss of such a step is that of the micro-batches before.

    The next one finds neither gradient nor momentum.
    """
    target, batches = make_model(0), [make_batch([24, 5 + micro], seed=micro) for micro in range(3)]
    options = {"accumulation": 3, "warmup_fraction": 0.0, "schedule": "constant"}

    def signal(batch: Batch) -> TargetSignal:
        known = make_signal(target, batch).distribution
        factor = math.nan if batch is batches[first_bad] else 1.0
        return TargetSignal(distribution=replace(known, hidden_BTD=known.hidden_BTD * factor))

    twin = make_distillation(make_model(1), target, **options)
    healthy = twin.step(batches)
    distillation = make_distillation(make_model(1), target, **options)
    before, distillation.target = weights(distillation), signal
    dropped = distillation.step(batches)
    assert dropped.skipped
    assert dropped.grad_norm == 0
    assert torch.equal(weights(distillation), before)
    draft, scale = make_model(1), 3 / healthy.labels
    known = [(batch, make_signal(target, batch)) for batch in batches[:first_bad]]
    steps = [(draft.draft_steps(batch), batch, signal) for batch, signal in known]
    parts = [distill_loss(*each, distillation.divergence, scale).loss.item() / 3 for each in steps]
    assert dropped.loss == pytest.approx(sum(parts), rel=1e-12)
    distillation.target = twin.target
    assert distillation.step(batches) == healthy
    assert torch.equal(weights(distillation), weights(twin))


def test_an_infinite_loss_with_a_finite_gradient_is_skipped(monkeypatch: pytest.MonkeyPatch):
    def raised(*args: object) -> StepResult:
        result = distill_loss(*args)
        return replace(result, loss=result.loss + math.inf)

    distillation = make_distillation(make_model(1), make_model(0))
    before = weights(distillation)
    with monkeypatch.context() as patched:
        patched.setattr("redraft.distill.train.step.distill_loss", raised)
        stats = distillation.step([make_batch([24])])
    assert (stats.skipped, stats.loss, distillation.skipped) == (True, 0.0, 1)
    assert torch.equal(weights(distillation), before)
    assert not distillation.step([make_batch([24])]).skipped


def test_a_batch_whose_loss_is_nan_is_skipped_counted_and_changes_no_weight():
    target, distillation = make_model(0), make_distillation(make_model(1), make_model(0))
    before = weights(distillation)
    healthy = distillation.target
    distillation.target = lambda batch: TargetSignal(
        distribution=ExactTarget(
            hidden_BTD=healthy(batch).distribution.hidden_BTD * math.nan,
            head_VD=target.model.lm_head.weight.detach(),
        )
    )
    stats = distillation.step([make_batch([24])])
    assert stats.skipped
    assert distillation.skipped == 1
    assert torch.equal(weights(distillation), before)
    distillation.target = healthy
    assert not distillation.step([make_batch([24])]).skipped
    assert not torch.equal(weights(distillation), before)


def test_training_that_only_ever_sees_nan_stops_with_a_reason():
    distillation = make_distillation(make_model(1), make_model(0))
    for parameter in distillation.draft.parameters():
        parameter.data.fill_(math.nan)
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        distillation.step([make_batch([24])])
    with pytest.raises(ValueError, match="non-finite"):
        distillation.step([make_batch([24])])


def test_the_rate_warms_up_then_falls_along_a_cosine_to_its_floor():
    optim = Optim(warmup_fraction=0.1)
    assert [optim.rate(step, 100) for step in (0, 9)] == [0.1, 1.0]
    assert optim.rate(55, 100) == pytest.approx(0.1 + 0.9 / 2)
    assert optim.rate(100, 100) == pytest.approx(0.1)
    assert Optim(schedule="constant").rate(90, 100) == 1.0


def test_training_on_one_batch_drives_alpha_towards_one():
    distillation = make_distillation(make_model(1, hidden_size=32), make_model(0))
    batch = make_batch([24, 24])
    first = distillation.step([batch]).alpha[0]
    for _ in range(99):
        last = distillation.step([batch]).alpha[0]
    assert first < 0.6
    assert last > 0.9


@pytest.mark.slow
def test_two_processes_with_unequal_labels_make_the_step_of_one(tmp_path: Path):
    worker = Path(__file__).with_name("two_process_worker.py")
    folders = os.pathsep.join([str(Path.cwd()), str(Path.cwd() / "tests/helpers")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders}
    launch = ["torchrun", "--standalone", "--nproc_per_node", "2"]
    subprocess.run(
        [
            str(Path(sys.executable).with_name("torchrun")),
            *launch[1:],
            str(worker),
            str(tmp_path / "two.pt"),
        ],
        check=True,
        env=environment,
        timeout=1200,
    )
    subprocess.run(
        [sys.executable, str(worker), str(tmp_path / "one.pt")],
        check=True,
        env=environment,
        timeout=1200,
    )
    one, two = (
        torch.load(tmp_path / "one.pt", weights_only=True),
        torch.load(tmp_path / "two.pt", weights_only=True),
    )
    torch.testing.assert_close(two["weights"], one["weights"], rtol=0, atol=1e-9)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-9)
