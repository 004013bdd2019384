"""A step that does not fit into a GPU's memory is taken in smaller micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recorded_heads import make_head, make_record, with_states

from redraft.heads.draft import Batch
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.config import Training

FULL = (
    "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 80 GiB of which 1 GiB is free. See docs"
)


@pytest.fixture
def begin(random_target: Path, tmp_path: Path) -> Callable[[int], Candidate]:
    version = make_head("eagle3", random_target, tmp_path / "v000001")

    def begin(accumulation: int) -> Candidate:
        cfg = Training(sequence_length=64, accumulation=accumulation, mixed_precision="no")
        candidate = Candidate(cfg, "eagle3", random_target)
        candidate.begin(version)
        return candidate

    return begin


def fail(candidate: Candidate, fits: Callable[[int], bool]) -> list[int]:
    """Let steps fail unless `fits` says of a micro-batch's rows that they fit; returns all rows."""
    draft, seen = candidate.distillation.draft, list[int]()
    draft_steps = draft.draft_steps

    def limited(batch: Batch, *rest: object) -> object:
        seen.append(len(batch.input_ids_BT))
        if not fits(seen[-1]):
            raise torch.OutOfMemoryError(FULL)
        return draft_steps(batch, *rest)

    draft.draft_steps = limited
    return seen


@pytest.fixture
def records(random_target: Path) -> list:
    """Texts for three rows of 64 tokens."""
    return [with_states(make_record(request_id=f"{n}"), random_target, "eagle3") for n in range(18)]


def test_a_step_that_does_not_fit_is_repeated_in_smaller_micro_batches(
    begin, records, capsys
) -> None:
    def take(candidate: Candidate) -> list:
        stats = [candidate.step(records, seed) for seed in range(2)]
        weights = candidate.distillation.weights()
        candidate.distillation.close()
        return [stats, {name: tensor.tolist() for name, tensor in weights.items()}]

    wanted = take(begin(4))
    capsys.readouterr()
    candidate = begin(1)
    # three rows do not fit; two do once, and the second micro-batch fails after a backward pass
    seen = fail(candidate, lambda rows: rows == 1 or (rows == 2 and seen.count(2) == 1))
    assert take(candidate) == wanted
    assert seen == [3, 2, 2, *[1] * 8]
    lines = [line for line in capsys.readouterr().out.splitlines() if "memory" in line]
    assert lines == [
        f"a micro-batch of {rows} x 64 tokens does not fit into the GPU's memory: a step now has "
        f"{count} micro-batches (CUDA out of memory. Tried to allocate 2 GiB)"
        for rows, count in ((3, 2), (2, 4))
    ]


def test_the_next_candidate_keeps_the_smaller_micro_batches(begin, records) -> None:
    candidate = begin(1)
    fail(candidate, lambda rows: rows < 3)
    candidate.step(records, 0)
    candidate.begin(candidate.version)
    seen = fail(candidate, lambda rows: rows < 3)
    candidate.step(records, 0)
    candidate.distillation.close()
    assert seen == [2, 2]


def test_a_row_that_does_not_fit_ends_with_the_setting_to_change(begin, records) -> None:
    candidate = begin(4)
    fail(candidate, lambda rows: False)
    with pytest.raises(ValueError, match=r"1 x 64 tokens .* lower training\.sequence_length"):
        candidate.step(records, 0)
    candidate.distillation.close()


def test_a_state_that_an_interrupted_first_update_left_is_dropped_after_a_skipped_step(
    begin, records
) -> None:
    candidate = begin(1)
    distillation = candidate.distillation
    distillation.step_index = distillation.skipped = 1  # no update was taken yet
    parameter = distillation.optimizers[0].param_groups[0]["params"][0]
    distillation.optimizers[0].state[parameter] = {"step": torch.zeros([])}
    distillation.divide(2)
    assert not distillation.optimizers[0].state
    assert candidate.step(records, 0).skipped is False
    candidate.distillation.close()
