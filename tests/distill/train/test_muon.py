"""Muon: orthogonal steps for matrices, AdamW for the rest, in one training."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from make_heads import make_signal
from torch import Tensor, nn
from train_on_ranks import FAMILIES, make_family_target, micro_batches

from redraft.distill.launch.ranks import require_whole_matrices
from redraft.distill.loss.choice import Divergence
from redraft.distill.train.muon import Muon, orthogonalise, split
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation, make_optimizers


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_a_matrix_keeps_its_directions_and_loses_its_scales(
    shape: tuple[int, int], dtype: torch.dtype, off: float
) -> None:
    u, s, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    s = torch.logspace(0, -1.3, len(s), dtype=torch.float64)  # 1 to 0.05
    found = orthogonalise(7 * u @ s.diag() @ v, dtype)
    assert found.dtype == torch.float64
    # In the directions of the matrix it is diagonal, and nearly the identity.
    scales = u.mT @ found @ v.mT
    assert (scales - scales.diag().diag()).abs().max() < off
    assert 0.65 < scales.diag().min() <= scales.diag().max() < 1.25


def test_a_matrix_of_zeros_stays_one() -> None:
    assert torch.equal(orthogonalise(torch.zeros(3, 5)), torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)])
def test_steps_are_those_of_pytorchs_muon_but_for_the_scale(shape: tuple[int, int]) -> None:
    """PyTorch's computes in bfloat16 everywhere, and scales by sqrt(max(1, R / C))."""
    # Ours in float32 on any CPU: the difference is then the rounding of one side, and the same
    # everywhere.
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    lr, scale = 0.01, math.sqrt(max(shape)) / math.sqrt(max(1, shape[0] / shape[1]))
    mine = Muon([ours], lr=lr, momentum=0.9, weight_decay=0.1)
    mine.dtype = torch.float32
    # Its weight decay is multiplied by its learning rate, ours by ours.
    peer = torch.optim.Muon([theirs], lr=lr * scale, momentum=0.9, weight_decay=0.1 / scale)
    for _ in range(4):
        before = ours.detach().clone()
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        mine.step()
        peer.step()
        assert (ours - before).square().mean().sqrt().item() == pytest.approx(lr, rel=0.3)
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=0.15 * lr)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_has_matrices_for_muon_and_no_parameter_is_left_out(name: str) -> None:
    target = make_family_target(name)
    draft: Any = FAMILIES[name](target)
    matrices, rest = split(draft)
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    assert matrices
    assert sorted(map(id, [*matrices, *rest])) == sorted(map(id, trained))
    assert all(min(matrix.shape) > 1 for matrix in matrices)
    # None has a row for each token: embeddings, output heads, the bias of DSpark.
    (batch,) = micro_batches(0, 0, 1, 1)
    steps = draft.draft_steps(
        batch, make_signal(target, batch, getattr(draft, "aux_layer_ids", ()))
    )
    of_tokens = [module.weight for module in draft.modules() if isinstance(module, nn.Embedding)]
    of_tokens += [
        head
        for made in steps
        for head in (made.head_WD, made.bias and made.bias.head_WR)
        if head is not None
    ]
    assert not {weight.data_ptr() for weight in of_tokens} & {
        matrix.data_ptr() for matrix in matrices
    }


def make_training(name: str, target: Any, **optim: Any) -> Distillation:
    torch.manual_seed(1)
    draft: Any = FAMILIES[name](target)
    aux = getattr(draft, "aux_layer_ids", ())
    return Distillation(
        draft,
        lambda batch: make_signal(target, batch, aux),
        Divergence(name="forward_kl"),
        Optim(name="muon", warmup_fraction=0.0, **optim),
        8,
        Accelerator(cpu=True),
    )


def flat(distillation: Distillation) -> Tensor:
    return torch.cat([p.detach().flatten() for p in distillation.draft.parameters()])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_learns_with_it_at_the_rate_that_is_asked(name: str) -> None:
    target = make_family_target(name)
    training = make_training(name, target, lr=2e-3)
    batches = micro_batches(0, 0, 1, 1)
    losses = [training.step(batches).loss for _ in range(6)]
    assert losses[-1] < losses[0]
    rates = {group["lr"] for optimizer in training.optimizers for group in optimizer.param_groups}
    assert rates == {training.optim.lr * training.optim.rate(5, 8)}


def test_a_resumed_training_is_the_unbroken_one(tmp_path: Path) -> None:
    target = make_family_target("eagle3")
    whole = make_training("eagle3", target, lr=2e-3)
    for index in range(4):
        if index == 2:
            whole.save(tmp_path / "state")
        whole.step(micro_batches(index, 0, 1, 1))
    expected = flat(whole)
    whole.close()
    resumed = make_training("eagle3", target, lr=2e-3)
    resumed.resume(tmp_path / "state")
    for index in (2, 3):
        resumed.step(micro_batches(index, 0, 1, 1))
    assert torch.equal(flat(resumed), expected)


def test_a_step_that_is_not_finite_moves_nothing_and_leaves_no_momentum() -> None:
    target = make_family_target("eagle3")
    training = make_training("eagle3", target, lr=2e-3)
    known, before = training.target, flat(training)
    batches = micro_batches(0, 0, 1, 1)

    def poisoned(batch: Any) -> Any:
        signal = known(batch)
        signal.distribution.hidden_BTD.fill_(math.nan)
        return signal

    training.target = poisoned
    assert training.step(batches).skipped
    assert torch.equal(flat(training), before)
    assert not any(optimizer.state for optimizer in training.optimizers)


def test_adamw_alone_is_the_default() -> None:
    draft = FAMILIES["eagle3"](make_family_target("eagle3"))
    (only,) = make_optimizers(draft, Optim())
    assert isinstance(only, torch.optim.AdamW)


@pytest.mark.parametrize(("kind", "stage"), [("FSDP", 0), ("DEEPSPEED", 2), ("DEEPSPEED", 3)])
def test_ranks_that_share_the_matrices_out_are_refused_with_the_way_out(
    kind: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    plugin = SimpleNamespace(zero_stage=stage)
    ranks: Any = SimpleNamespace(
        distributed_type=DistributedType[kind], num_processes=8, deepspeed_plugin=plugin
    )
    with pytest.raises(ValueError, match=r"8.*--multi_gpu.*adamw"):
        require_whole_matrices("muon", ranks)
    require_whole_matrices("adamw", ranks)


def test_whole_matrices_on_every_rank_are_moved_by_muon() -> None:
    ranks: Any = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, num_processes=8)
    require_whole_matrices("muon", ranks)
