"""`--gradient-checkpointing` by count: heads keep less for the backward pass, and compute more."""

from __future__ import annotations

import pytest

from redraft.distill.plan.counted_step import Counted, count_step
from redraft.distill.plan.weightless import ACTIVATIONS
from redraft.recipes.plan.count import make_plan
from redraft.recipes.plan.plan import PlanConfig


def count(family: str, *, recomputed: bool) -> Counted:
    asked = PlanConfig(
        family=family,  # type: ignore[arg-type]
        signal="endpoint",
        batch_size=1,
        sequence_length=8192,
        documents=1,
        gradient_checkpointing=recomputed,
    )
    return count_step(make_plan(asked))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "share"),
    [
        ("eagle1", 0.9),
        ("eagle3", 0.5),
        ("mtp", 0.9),
        ("peagle", 0.5),
        ("dflash", 0.5),
        ("dspark", 0.6),
    ],
)
def test_a_head_that_computes_again_keeps_less(family: str, share: float) -> None:
    kept, again = (count(family, recomputed=recomputed) for recomputed in (False, True))
    before, after = (step.memory[ACTIVATIONS] / 1e9 for step in (kept, again))
    print(f"{family}: {before:.1f} GB of activations, {after:.1f} GB computed again")
    assert after < share * before
    flops = [
        sum(work.flops * times for work, times in step.operations.items()) for step in (kept, again)
    ]
    assert flops[0] < flops[1] < 1.5 * flops[0]
