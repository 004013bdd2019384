"""The tables of docs/capacity.md, as `redraft plan fleet` counts them.

$ python -m benchmarks.capacity docs/capacity.md      # count its tables again
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import tyro

from redraft.files.artifact import write_whole
from redraft.online.records.record import encode_record
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.plan.fleet import FleetPlanConfig
from redraft.recipes.plan.fleet_costs import (
    NUM_RECORDS,
    all_costs,
    fleet_table,
    format_bytes,
    token_table,
    two,
)
from redraft.recipes.plan.traffic import Traffic, make_record


@dataclass(frozen=True, kw_only=True)
class Config:
    page: Annotated[Path, tyro.conf.Positional]
    """Markdown file with tables between `<!-- table NAME -->` and `<!-- end -->`."""


def main(cfg: Config) -> None:
    write_whole(cfg.page, fill_tables(cfg.page.read_text()))


@cache
def captured_bytes(traffic: Traffic) -> float:
    """Bytes of a record without hidden states, per token."""
    sizes = [len(encode_record(make_record(number, traffic))) for number in range(NUM_RECORDS)]
    return statistics.mean(sizes) / traffic.output_tokens


def traffic_table(traffic: Traffic) -> Iterator[str]:
    """Captured bytes per token with other settings of capture."""
    yield "| standalone draft, per token captured | captured | of the table above |"
    yield "|---|---|---|"
    others = {
        f"{traffic.top_k} probabilities, {traffic.num_speculative_tokens} draft tokens, tau "
        f"{traffic.tau}": traffic,
        "8 probabilities a row": replace(traffic, top_k=8),
        "7 draft tokens, tau 3.5": replace(traffic, num_speculative_tokens=7, tau=3.5),
        "prompts of 4,000 tokens": replace(traffic, prompt_tokens=4000),
    }
    for name, other in others.items():
        num_bytes = captured_bytes(other)
        yield f"| {name} | {format_bytes(num_bytes)} | {two(num_bytes / captured_bytes(traffic))} |"


def fleet(tokens_per_s: float, fraction: float) -> Iterator[str]:
    cfg = FleetPlanConfig(tokens_per_s=tokens_per_s, fraction=fraction)
    return fleet_table(cfg, all_costs(cfg))


TABLES = {
    "token": lambda: token_table(all_costs(FleetPlanConfig())),
    "thousand": lambda: fleet(1000, 1.0),
    "traffic": lambda: traffic_table(Traffic()),
    "fleet": lambda: fleet(1_000_000, 0.002),
}


def fill_tables(page: str) -> str:
    """The page with every table computed again."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n" + "\n".join(TABLES[match[2]]()) + f"\n{match[3]}"

    return re.sub(r"(<!-- table (\w+) -->).*?(<!-- end -->)", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
