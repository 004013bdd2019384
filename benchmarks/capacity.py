"""Compute the tables of docs/capacity.md with `redraft plan` and `redraft plan fleet`.

$ python -m benchmarks.capacity docs/capacity.md                     # recompute its tables
$ python -m benchmarks.capacity docs/capacity.md --tables long_rows  # three minutes on one core
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import tyro

from redraft.distill.plan.counted_step import count_flops
from redraft.distill.plan.weightless import ACTIVATIONS
from redraft.files.artifact import write_whole
from redraft.heads.catalog import FamilyName, find_family
from redraft.online.records.record import encode_record
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.plan.count import count
from redraft.recipes.plan.fleet import FleetPlanConfig
from redraft.recipes.plan.fleet_costs import (
    NUM_RECORDS,
    all_costs,
    fleet_table,
    format_bytes,
    token_table,
    two,
)
from redraft.recipes.plan.plan import PlanConfig
from redraft.recipes.plan.traffic import Traffic, make_record


@dataclass(frozen=True, kw_only=True)
class Config:
    page: Annotated[Path, tyro.conf.Positional]
    """Markdown file with tables between `<!-- table NAME -->` and `<!-- end -->`."""
    tables: tuple[Literal["token", "thousand", "traffic", "fleet", "long_rows"], ...] = (
        *("token", "thousand", "traffic", "fleet"),
    )
    """Names of the tables to compute; the others stay as they are."""


def main(cfg: Config) -> None:
    chosen = {str(name): TABLES[name] for name in cfg.tables}
    write_whole(cfg.page, fill_tables(cfg.page.read_text(), chosen))


ROWS, TARGETS = (8192, 32768, 131072), ("llama-3.1-8b", "llama-3.3-70b")
FAMILIES: tuple[FamilyName, ...] = ("eagle3", "peagle", "dflash", "dspark", "standalone")


def long_rows_table() -> Iterator[str]:
    """Yield a table row for each training step on one long conversation, on one device.

    The target runs on other devices.
    """
    yield (
        "| draft | target | row | step | target's prefill | states read | activations "
        "| peak memory |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for family, target, tokens in itertools.product(FAMILIES, TARGETS, ROWS):
        yield count_long_row(family, target, tokens)


def count_long_row(family: FamilyName, target: str, tokens: int) -> str:
    cfg = PlanConfig(
        family=family,
        target=target,
        signal="endpoint",
        batch_size=1,
        documents=1,
        sequence_length=tokens,
    )
    counted = count(cfg)
    assert counted.served is not None, "the target is elsewhere"
    work = [count_flops(counted.step), count_flops(counted.served)]
    memory = counted.step.memory
    sizes = [counted.step.signal_bytes, memory[ACTIVATIONS], memory.total()]
    numbers = [
        *(f"{flops / 1e15:,.2f} PFLOP" for flops in work),
        *(f"{num_bytes / 1e9:,.1f} GB" for num_bytes in sizes),
    ]
    return f"| {find_family(family).title} | {target} | {tokens:,} | {' | '.join(numbers)} |"


@cache
def captured_bytes(traffic: Traffic) -> float:
    """Return the bytes per token of a record without hidden states."""
    sizes = [len(encode_record(make_record(number, traffic))) for number in range(NUM_RECORDS)]
    return statistics.mean(sizes) / traffic.output_tokens


def traffic_table(traffic: Traffic) -> Iterator[str]:
    """Return a table of captured bytes per token under different capture settings."""
    yield "| standalone draft, per captured token | captured | relative to the first row |"
    yield "|---|---|---|"
    others = {
        f"{traffic.top_k} probabilities, {traffic.num_speculative_tokens} draft tokens, tau "
        f"{traffic.tau}": traffic,
        "8 probabilities per row": replace(traffic, top_k=8),
        "7 draft tokens, tau 3.5": replace(traffic, num_speculative_tokens=7, tau=3.5),
        "prompts of 4,000 tokens": replace(traffic, prompt_tokens=4000),
    }
    for name, other in others.items():
        num_bytes = captured_bytes(other)
        yield f"| {name} | {format_bytes(num_bytes)} | {two(num_bytes / captured_bytes(traffic))} |"


def fleet(tokens_per_s: float, fraction: float) -> Iterator[str]:
    cfg = FleetPlanConfig(tokens_per_s=tokens_per_s, fraction=fraction)
    return fleet_table(cfg, all_costs(cfg))


TABLES: Mapping[str, Callable[[], Iterable[str]]] = {
    "token": lambda: token_table(all_costs(FleetPlanConfig())),
    "thousand": lambda: fleet(1000, 1.0),
    "traffic": lambda: traffic_table(Traffic()),
    "fleet": lambda: fleet(1_000_000, 0.002),
    "long_rows": long_rows_table,
}


def fill_tables(page: str, tables: Mapping[str, Callable[[], Iterable[str]]]) -> str:
    """Return the page with these tables recomputed."""

    def table(match: re.Match[str]) -> str:
        if match[2] not in tables:
            return match[0]
        return f"{match[1]}\n" + "\n".join(tables[match[2]]()) + f"\n{match[3]}"

    return re.sub(r"(<!-- table (\w+) -->).*?(<!-- end -->)", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
