"""Compare tau of every version of `redraft up`, by minutes and records, with an offline head.

    ceiling   starts from the first version, and trains for the same number of steps as the last
              promoted version, on random samples of the same records

All versions and the ceiling are scored on the same held-out requests, as the gate scores drafts.
The learner must have stopped.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo.online import read_provenance
from benchmarks.demo.online_charts import draw_versions
from benchmarks.demo.online_replay import train_from
from benchmarks.demo.online_report import count_minutes_to_adapt, find_minutes
from redraft.eval.report.charts import Spec, to_spec
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.judging import Judge
from redraft.online.daemon.opening import opened
from redraft.online.journal import Entry
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.config import Replay

UNIFORM = Replay(half_life_s=1e15, surprise=0.0)
"""Replay settings that draw every record with the same probability."""


def compare_versions(
    cfg: LearnerConfig, journal: Sequence[Entry], ready_s: float
) -> dict[str, Any]:
    """Return tau by version, and tau of the ceiling with its gain over the last version.

    `ready_s` is the time from which minutes count, in seconds since the epoch. A tau is None if
    there are too few held-out requests for the gate.
    """
    minutes = find_minutes(journal, ready_s)
    with opened(cfg) as (_, registry, buffer), tempfile.TemporaryDirectory() as scratch:
        judge = Judge(cfg, registry, buffer, Candidate(cfg.training, cfg.draft.family, cfg.target))
        kept = set(registry.versions())
        versions = [version for version in registry.promoted() if version in kept]
        rows = []
        for version in versions:
            _, scored = judge.score_since(version, 0)
            provenance = read_provenance(registry, version)
            is_first = "records" not in provenance
            rows.append(
                {
                    "version": version,
                    "origin": "first" if is_first else "learned",
                    "records": provenance.get("records", 0),
                    "minutes": 0.0 if is_first else minutes.get(version),
                    "requests": len(scored),
                    "tau": find_tau([row[1:] for row in scored]),
                }
            )
        found: dict[str, Any] = {"versions": rows, "tau_offline": None, "gain_offline": None}
        if rows[-1]["origin"] != "learned" or rows[-1]["tau"] is None:
            return found | {"minutes_to_adapt": None}
        steps = -(-rows[-1]["records"] // cfg.training.fresh_per_step)
        batches = (
            buffer.replay(
                cfg.training.fresh_per_step + cfg.training.replay_per_step,
                through=provenance["trained_through"],
                now_s=time.time(),
                seed=step,
                policy=UNIFORM,
            )
            for step in range(steps)
        )
        first, title = registry.path(versions[0]), "a head trained offline"
        ceiling = train_from(judge.candidate, first, batches, steps, Path(scratch), title)
        gain = judge.judge_draft(ceiling, versions[-1], 1).overall
    if gain is not None:
        found |= {"tau_offline": gain.tau_candidate, "gain_offline": [gain.lower, gain.upper]}
        found["steps"] = steps
    adapted = {"tau": {"b_offline": found["tau_offline"] or float("inf")}, "versions": rows}
    return found | {"minutes_to_adapt": count_minutes_to_adapt(adapted)}


def draw_learning(learning: Mapping[str, Any]) -> dict[str, Spec]:
    """Draw the charts of tau by version, by element id."""
    served = [row for row in learning["versions"] if None not in (row["tau"], row["minutes"])]
    offline = learning["tau_offline"]
    return {
        "minutes": to_spec(
            draw_versions(served, "minutes", "minutes since the server was ready", offline)
        ),
        "records": to_spec(draw_versions(served, "records", "records learned from", offline)),
    }


def find_tau(counts: Sequence[tuple[float, float]]) -> float | None:
    """Return tau of (drafts, accepted tokens) by request."""
    drafts = sum(drafts for drafts, _ in counts)
    return 1 + sum(accepted for _, accepted in counts) / drafts if drafts else None
