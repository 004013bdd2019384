"""Compute which tau a head needs for a speed-up at one request, and which cost it may have.

$ python -m benchmarks.needed_tau docs/measurements.md     # recompute its tables

    speed-up(K) = tau(K) plain / (verify(K) + draft(K)),    tau(K) = 1 + a + a^2 + ... + a^K

The formula assumes that a draft token is accepted with the same probability a at each position if
all earlier tokens were. For SmolLM2, the times are measured. For an 8B target, they are counted: at
one request, a step takes as long as reading its weights from memory or computing its matrix
products, whichever is longer. The KV cache and kernel launches are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

from benchmarks.capacity import fill_tables
from redraft.distill.plan.counted_step import make_models
from redraft.distill.plan.operations import DEVICES, Device
from redraft.files.artifact import write_whole
from redraft.files.target_sizes import size_weights
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.plan.count import make_plan
from redraft.recipes.plan.plan import PlanConfig

GOAL = 1.5
MOST_TOKENS = 6

ROWS, STEPS_MS = (1, 5, 7), (15.7, 19.3, 22.7)
"""Duration of target steps in `make demo` at one request, by rows: plain, with n-grams of up to 4
tokens, and with counted answers of up to 6. Some of these steps proposed fewer tokens, so a full
step takes longer.
"""
DRAFT_TOKEN_MS = 2.3  # An EAGLE-3 draft token of the same run.
TAU_NOW, TOKENS_NOW = 1.70, 3  # The head of `make demo-up`, 2026-11-30, as the gate judged it.

COUNTED = "llama-3.1-8b"
GPUS = tuple(device for device in DEVICES if device.name in ("H100", "MI300X"))


@dataclass(frozen=True, kw_only=True)
class Config:
    page: Annotated[Path, tyro.conf.Positional]
    """Markdown file with tables between `<!-- table NAME -->` and `<!-- end -->`."""


def main(cfg: Config) -> None:
    write_whole(cfg.page, fill_tables(cfg.page.read_text(), TABLES))


@dataclass(frozen=True)
class Steps:
    """Durations by number of draft tokens, in any unit."""

    verify: Callable[[int], float]
    """Duration of a target step that verifies k draft tokens; 0 is a plain step."""
    draft: Callable[[int], float]
    """Duration of drafting k tokens."""

    def find_tau(self, num_tokens: int) -> float:
        """Return the tau that GOAL needs with this many draft tokens."""
        return GOAL * (self.verify(num_tokens) + self.draft(num_tokens)) / self.verify(0)

    def speed(self, acceptance: float, num_tokens: int, *, is_free: bool = False) -> float:
        """Return the speed-up; with `is_free`, the speed-up of a draft that takes no time."""
        draft = 0.0 if is_free else self.draft(num_tokens)
        tau = expected_tau(acceptance, num_tokens)
        return tau * self.verify(0) / (self.verify(num_tokens) + draft)

    def best(self, acceptance: float, *, is_free: bool = False) -> tuple[int, float]:
        """Return (best number of draft tokens, its speed-up)."""
        speeds = {k: self.speed(acceptance, k, is_free=is_free) for k in range(1, MOST_TOKENS + 1)}
        return max(speeds.items(), key=lambda item: item[1])

    def allowed(self, acceptance: float) -> float:
        """Return the maximum time of a draft token for GOAL; negative if no cost is low enough."""
        return max(
            (expected_tau(acceptance, k) * self.verify(0) / GOAL - self.verify(k)) / k
            for k in range(1, MOST_TOKENS + 1)
        )


def expected_tau(acceptance: float, num_tokens: int) -> float:
    return sum(acceptance**j for j in range(num_tokens + 1))


def find_acceptance(tau: float, num_tokens: int) -> float | None:
    """Return the acceptance probability that gives this tau, or None if there is none."""
    if tau > num_tokens + 1:
        return None
    # tau(a) - tau is a polynomial that increases from a = 0 on, so it has one root there.
    roots = np.roots([*[1.0] * num_tokens, 1.0 - tau])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-9))


def measured() -> Steps:
    """Return the durations of SmolLM2's steps, in ms."""
    return Steps(
        verify=lambda k: float(np.interp(k + 1, ROWS, STEPS_MS)), draft=lambda k: k * DRAFT_TOKEN_MS
    )


def one_pass() -> Steps:
    """Return SmolLM2's durations with a block drafter, which takes as long as one EAGLE-3 token."""
    return replace(measured(), draft=lambda _: DRAFT_TOKEN_MS)


@cache
def count_weights() -> tuple[int, int, int]:
    """Count the weights that a plain step reads, a drafted step once, and each draft token.

    An input embedding is one row per token, so it is not counted.
    """
    plan = make_plan(PlanConfig(family="eagle3", target=COUNTED, signal="endpoint"))
    head = make_models(plan, torch.device("meta"))[1]
    dtype = torch.bfloat16
    target = size_weights(plan.target, dtype).whole // dtype.itemsize
    if not plan.target.tie_word_embeddings:
        target -= plan.target.vocab_size * plan.target.hidden_size
    sizes = {name: weight.numel() for name, weight in head.named_parameters()}
    # The target's states go through `fc` once per step; later draft tokens read the head's own
    # state.
    once = sum(size for name, size in sizes.items() if name.startswith("fc"))
    return target, once, sum(sizes.values()) - once


def counted(device: Device) -> Steps:
    """Return the durations of an 8B target's steps in bfloat16, in ms."""
    target, once, each = count_weights()

    def take_ms(weights: int, rows: int) -> float:
        return 1e3 * max(2 * weights / device.bytes_per_s, 2 * weights * rows / device.flops_per_s)

    return Steps(
        verify=lambda k: take_ms(target, k + 1),
        # The first pass reads one row per newly emitted token, at most k + 1.
        draft=lambda k: (
            take_ms(once, k + 1) + take_ms(each, k + 1) + (k - 1) * take_ms(each, 1) if k else 0.0
        ),
    )


# ------------------------------------------------------------------------------------------------------
# the tables


def needed_table() -> Iterator[str]:
    smol, (h100, mi300x) = measured(), map(counted, GPUS)
    yield (
        "| draft tokens | SmolLM2, CPU: verify, draft | tau needed | acceptance needed "
        "| with one pass per block: tau, acceptance | 8B: step on H100, MI300X | tau needed | acceptance needed |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for k in range(1, MOST_TOKENS + 1):
        tau, other = smol.find_tau(k), h100.find_tau(k)
        block = one_pass().find_tau(k)
        steps = [steps.verify(k) + steps.draft(k) for steps in (h100, mi300x)]
        yield (
            f"| {k} | {smol.verify(k):.1f}, {smol.draft(k):.1f} ms | {tau:.2f} "
            f"| {_share(find_acceptance(tau, k))} "
            f"| {block:.2f}, {_share(find_acceptance(block, k))} | {steps[0]:.2f}, {steps[1]:.2f} ms "
            f"| {other:.2f} | {_share(find_acceptance(other, k))} |"
        )


def reached_table() -> Iterator[str]:
    acceptance = find_acceptance(TAU_NOW, TOKENS_NOW)
    assert acceptance is not None
    yield f"| acceptance {acceptance:.2f} at each position | SmolLM2, CPU | 8B, H100, by count |"
    yield "|---|---|---|"
    both = measured(), counted(GPUS[0])

    def row(name: str, tell: Callable[[Steps], str]) -> str:
        return f"| {name} | {' | '.join(map(tell, both))} |"

    def describe_best(steps: Steps, *, is_free: bool = False) -> str:
        k, speed = steps.best(acceptance, is_free=is_free)
        return f"{speed:.2f}x with {k} (tau {expected_tau(acceptance, k):.2f})"

    yield row("speed-up with the best number of draft tokens", describe_best)
    yield row(
        "the same for a draft that takes no time",
        lambda steps: describe_best(steps, is_free=True),
    )
    yield row(
        "a draft token takes, as a share of a plain step",
        lambda steps: f"{(steps.draft(2) - steps.draft(1)) / steps.verify(0):.3f}",
    )
    yield row(
        f"share at which this acceptance gives {GOAL}x",
        lambda steps: _allow(steps.allowed(acceptance) / steps.verify(0)),
    )


def _share(acceptance: float | None) -> str:
    return "none is enough" if acceptance is None else f"{acceptance:.2f}"


def _allow(share: float) -> str:
    return f"{share:.3f}" if share > 0 else "none: verification alone takes too long"


TABLES = {"needed_tau": needed_table, "reached_tau": reached_table}


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
