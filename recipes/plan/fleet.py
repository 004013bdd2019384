"""Calculate the network traffic, disk space and compute needed to learn from a fleet.

$ redraft plan fleet --tokens-per-s 250000 --fraction 0.01
$ redraft plan fleet --families eagle3 --traffic.prompt-tokens 4000

No server is needed. The plugin's code encodes the records, and a real buffer stores them. The FLOPs
are counted for a training step on these records. The command does not measure time.
docs/capacity.md explains the columns.
"""

from dataclasses import dataclass, field
from pathlib import Path

from redraft.heads.catalog import FamilyName, find_family
from redraft.recipes.plan.plan import print_report
from redraft.recipes.plan.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class FleetPlanConfig:
    tokens_per_s: float = 1000
    """Output tokens per second of the whole fleet."""
    fraction: float = 1.0
    """Fraction of the requests to capture, above 0 and at most 1: the servers' --capture.fraction."""
    target: str = "llama-3.1-8b"
    """Target whose sizes are used, named as for `redraft plan`."""
    draft: str = "llama-3.2-1b"
    """Standalone draft whose sizes are used."""
    families: tuple[FamilyName, ...] = ("standalone", "eagle1", "eagle3")
    """Draft families to compare. Of the built-in targets, only mimo-7b has an MTP layer."""
    traffic: Traffic = field(default_factory=Traffic)
    json: Path | None = None
    """File to write the costs per token to, as JSON."""

    def __post_init__(self) -> None:
        if not self.tokens_per_s > 0:
            raise ValueError(f"--tokens-per-s is {self.tokens_per_s:g}: it must be above 0")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"--fraction is {self.fraction:g}: it must be above 0 and at most 1")
        for name in self.families:
            if not find_family(name).learns_online:
                raise ValueError(f"--families {name}: this family cannot learn from live traffic")


def main(cfg: FleetPlanConfig) -> None:
    from redraft.recipes.plan.fleet_costs import report  # imported here, because it imports torch

    print_report(cfg, report)
