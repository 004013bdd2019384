"""Simulate a policy that chooses the number of draft tokens of every step, against invented machines.

$ python -m benchmarks.studies.pace                  # 120 loads, one seed each: two minutes on one core
$ python -m benchmarks.studies.pace --seeds 4        # 480 loads

A load is a machine, a draft, a number of clients over time, noise and a seed. The machine's speed drifts, and other
work slows it down now and then. The output has the speed against no draft over all steps, and against the best fixed
number of draft tokens after 2,000 steps. No vLLM uses the policy yet.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.studies.pace_policy import Policy
from redraft.heads.files.artifact import write_whole
from redraft.heads.progress import Progress
from redraft.recipes.cli import run_recipe

DRAFTS = {
    "useless": (0.01,) * 5,
    "weak": (0.25, 0.2, 0.2, 0.2, 0.2),
    "fair": (0.5, 0.45, 0.4, 0.4, 0.4),
    "good": (0.75, 0.7, 0.7, 0.65, 0.65),
}
"""Chance that a draft token is accepted if the tokens before it are, by position."""
MOST = 5
LEARNED_STEPS = 2000
"""Steps after which the policy is compared with the best fixed number."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds of a step: 1 + `per_token` for every token above `free_tokens`, and the draft's own time."""

    per_token: float
    free_tokens: int
    first_draft: float
    next_draft: float

    def step_s(self, size: int, num_tokens: int) -> float:
        """Seconds of a step of `size` requests with `num_tokens` draft tokens each."""
        drafting = self.first_draft + self.next_draft * (num_tokens - 1) if num_tokens else 0.0
        return 1 + self.per_token * max(size * (1 + num_tokens) - self.free_tokens, 0) + drafting


MACHINES = {
    "cpu": Machine(per_token=0.08, free_tokens=4, first_draft=0.1, next_draft=0.08),
    "gpu": Machine(per_token=0.004, free_tokens=64, first_draft=0.03, next_draft=0.02),
    "dear draft": Machine(per_token=0.08, free_tokens=4, first_draft=0.3, next_draft=0.15),
}


def wander(seed: int) -> Callable[[int], int]:
    """Between 1 and 64 clients, another number every seven steps."""
    rng, sizes, size = random.Random(seed), list[int](), 8.0
    for _ in range(3000):
        size = min(64.0, max(1.0, size * math.exp(rng.gauss(0, 0.25))))
        sizes.append(max(1, round(size)))
    return lambda step: sizes[step // 7 % len(sizes)]


CLIENTS: dict[str, Callable[[int], Callable[[int], int]]] = {
    "1": lambda _: lambda step: 1,
    "8": lambda _: lambda step: 8,
    "1-16-1": lambda _: lambda step: 16 if 1000 <= step % 3000 < 2000 else 1,
    "1..8": lambda _: lambda step: 1 + step // 7 * 2654435761 % 8,
    "1..64": wander,
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One load."""

    machine: str
    noise: float
    draft: str
    clients: str
    seed: int
    speed: float
    """Tokens per second against no draft, over all steps."""
    learned: float
    """Against the best fixed number of draft tokens, after `LEARNED_STEPS`."""
    explored: float
    """Share of the time lost in probes."""


def simulate(machine: str, noise: float, draft: str, clients: str, seed: int, steps: int = 6000) -> Result:
    """Run a load. Times of the result are without noise, but with the machine's drift and stalls."""
    rng, policy, cost, rates = random.Random(seed), Policy(MOST), MACHINES[machine], DRAFTS[draft]
    taus = [1 + sum(math.prod(rates[: i + 1]) for i in range(k)) for k in range(MOST + 1)]
    size_of, verified, drift, stall = CLIENTS[clients](seed), 0, 1.0, 0
    busy_s, off_s = [0.0, 0.0], [0.0, 0.0]
    fixed_s = dict.fromkeys(policy.arms, 0.0)
    for step in range(steps):
        size, is_late = size_of(step), step >= LEARNED_STEPS
        drafted = policy.choose(size)
        if rng.random() < 0.002:
            stall = rng.randrange(5, 60)
        stall -= 1
        drift = min(max(drift * math.exp(rng.gauss(0, 0.01)), 0.7), 1.5)
        slow = drift * (1.6 if stall > 0 else 1)
        # A step verifies the tokens drafted before it and drafts those of the next one: half of the cost each.
        seconds = slow * (cost.step_s(size, verified) + cost.step_s(size, drafted)) / 2
        for _ in range(size if verified else 0):
            accepted = next((i for i in range(verified) if rng.random() >= rates[i]), verified)
            policy.accept(verified, accepted)
        noisy = seconds * math.exp(rng.gauss(0, noise) - noise**2 / 2)
        policy.step(size, drafted, verified, noisy, is_decode=rng.random() > min(0.02 * size, 0.6))
        busy_s[is_late] += seconds
        off_s[is_late] += taus[verified] * slow * cost.step_s(size, 0)
        if is_late:
            for arm in policy.arms:
                fixed_s[arm] += taus[verified] * slow * cost.step_s(size, arm) / taus[arm]
        verified = drafted
    return Result(
        machine=machine,
        noise=noise,
        draft=draft,
        clients=clients,
        seed=seed,
        speed=sum(off_s) / sum(busy_s),
        learned=min(fixed_s.values()) / busy_s[1],
        explored=policy.lost_s / policy.busy_s,
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: int = 1
    """Seeds of every load."""
    output: Path = Path("outputs/pace.json")
    """File that receives the results."""


def list_loads(seeds: int) -> Iterator[tuple[str, float, str, str, int]]:
    """Machine, noise, draft, clients and seed of every load."""
    return itertools.product(MACHINES, (0.05, 0.25), DRAFTS, CLIENTS, range(seeds))


def main(cfg: Config) -> None:
    loads = list(list_loads(cfg.seeds))
    results = [simulate(*load) for load in Progress(loads, desc="loads", unit="load")]
    write_whole(cfg.output, json.dumps([asdict(result) for result in results], indent=1) + "\n")
    for (machine, noise), group in itertools.groupby(results, lambda result: (result.machine, result.noise)):
        some = list(group)
        speeds, learned = [one.speed for one in some], [one.learned for one in some]
        print(
            f"{machine:<10} noise {noise:<4}  against no draft {min(speeds):.3f} to {max(speeds):.3f},  "
            f"against the best fixed number {min(learned):.3f} to {max(learned):.3f}"
        )
    print(f"{len(results)} loads, written to {cfg.output}")


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
