"""Judge how well three drafts follow a policy that reinforcement learning changes.

The drafts are judged on the records of the policy's rollouts, each with the weights that the record
names. This shows how many tokens of each draft these weights would have accepted, and whether the
recorded distributions belong to these weights.

R = rows of a record, K = kept top-k ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.demo.online_config import MAX_MODEL_LEN
from redraft.engine.counts import AcceptanceCounts
from redraft.eval.intervals import Estimate, estimate_ratio, estimate_tau_gain
from redraft.eval.report.charts import Spec, color, panel, tips, to_spec
from redraft.files.checkpoint import load_causal_lm
from redraft.heads.catalog import detect_family
from redraft.heads.target import Target
from redraft.online.learning import gate
from redraft.online.learning.candidate import choose_reads
from redraft.online.learning.scoring import score
from redraft.online.records.record import Record

DRAFTS = ("frozen", "once", "learning")

LIMIT = 1e-6
"""Largest KL of a row, in nats, between a record and the weights that it names. Engine and
`transformers` are closer in float32, and successive policies are further apart; `would_be_noticed`
counts for how many records they are.
"""

NUM_BLOCKS = 20
"""Number of blocks of successive updates. Intervals use blocks as units, because neighbouring
updates are alike.
"""


@dataclass(kw_only=True)
class Judged:
    """The records of one update."""

    update: int
    counts: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Expected drafts and accepted tokens, by draft. `learning` is the version that was served."""
    engine: tuple[float, float] = (0, 0)
    """The same counts, as the engine counted them with that version."""
    records: int = 0
    misnamed: int = 0
    would_be_noticed: int = 0
    """Number of records that do not fit the previous weights."""
    largest_kl: float = 0.0
    """Largest KL of the records that are not misnamed, in nats."""


class Policy:
    """A target's model, which can load any of the pushed weights."""

    def __init__(self, target: Path, weights: Path) -> None:
        self.model = load_causal_lm(target, torch.float32).eval()
        self.weights, self.version = weights, ""
        self._start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def load(self, version: str) -> bool:
        """Load a version into the model that the drafts share; return False if it was not kept."""
        path = self.weights / f"{version}.safetensors"
        if version and not path.is_file():
            return False
        if version != self.version:
            self.model.load_state_dict(load_file(path) if version else self._start)
        self.version = version
        return True

    @torch.no_grad()
    def measure_kl(self, record: Record) -> float:
        """Return the largest KL, in nats, between a row of the record's text and the model.

        It covers the recorded tokens. Its terms are p log(p / q) - p + q: no term is below 0, so
        even a part of the vocabulary shows a difference.
        """
        text_R = record.branches == 0
        ids_T = [*record.context_ids.tolist(), *record.output_ids.tolist()]
        rows_R = torch.from_numpy(record.positions[text_R] - 1).long()
        ids_RK = torch.from_numpy(record.topk_ids[text_R]).long()
        log_p_RK = torch.from_numpy(record.topk_log_probs[text_R]).double()
        log_q_RK = (
            self.model(torch.tensor([ids_T]))
            .logits[0, rows_R]
            .double()
            .log_softmax(-1)
            .gather(1, ids_RK)
        )
        terms_RK = log_p_RK.exp() * (log_p_RK - log_q_RK) - log_p_RK.exp() + log_q_RK.exp()
        return float(terms_RK.sum(-1).max()) if len(terms_RK) else 0.0


def judge(
    records: Iterable[Record],
    policy: Policy,
    before: Policy,
    drafts: Mapping[str, Path],
    updates: Mapping[str, int],
) -> list[Judged]:
    """Judge the records of each update.

    `policy` and `before` are two models of one target, `drafts` the folders of `frozen`, `once` and
    all versions that were served, and `updates` the numbers of the versions of the target, in
    order.
    """

    @cache
    def load(name: str) -> Any:
        family = detect_family(drafts[name])
        draft: Any = family.load(drafts[name], lambda: Target.from_model(policy.model)).eval()
        return draft, choose_reads(family, draft)

    def count(name: str, record: Record) -> AcceptanceCounts:
        draft, reads = load(name)
        settings: Any = {
            "num_speculative_tokens": 3,
            "method": "greedy",
            "sequence_length": MAX_MODEL_LEN,
        }
        return score(draft, [record], reads=reads, **settings)[0]

    versions, found = list(updates), dict[int, Judged]()
    for version, group in groupby(records, lambda record: record.target_version):
        is_known = version in updates and policy.load(version)
        number = updates.get(version, 0)
        seen = found.setdefault(number, Judged(update=number))
        for record in group:
            seen.records += 1
            if not is_known or (kl := policy.measure_kl(record)) > LIMIT:
                seen.misnamed += 1
                continue
            seen.largest_kl = max(seen.largest_kl, kl)
            earlier = versions[max(0, versions.index(version) - 1)]
            seen.would_be_noticed += before.load(earlier) and before.measure_kl(record) > LIMIT
            if record.draft_version in drafts:
                names = {"frozen": "frozen", "once": "once", "learning": record.draft_version}
                for name, source in names.items():
                    seen.counts[name] = _add(seen.counts.get(name, (0, 0)), count(source, record))
                seen.engine = _add(seen.engine, count_engine(record))
    return [found[number] for number in sorted(found)]


def _add(pair: tuple[float, float], counts: AcceptanceCounts) -> tuple[float, float]:
    return pair[0] + counts.num_drafts, pair[1] + counts.num_accepted


def count_engine(record: Record) -> AcceptanceCounts:
    """Count the drafts of a record, and their tokens accepted by the engine."""
    # A step has a row for each of its draft tokens, followed by one without a draft token.
    is_draft_R = record.draft_ids >= 0
    begins_R = is_draft_R & ~np.append(False, is_draft_R[:-1])
    return AcceptanceCounts(num_drafts=int(begins_R.sum()), num_accepted=int(record.accepted.sum()))


def summarise(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return tau of each draft, the gain over adapting once, and the share of misnamed records.

    The gain is paired by block of updates.
    """
    rows = [one for one in judged if len(one.counts) == len(DRAFTS)]
    size = max(1, len(rows) // NUM_BLOCKS)
    blocks = [rows[first : first + size] for first in range(0, len(rows), size)]

    def total(pairs: Iterable[tuple[float, float]]) -> AcceptanceCounts:
        drafts, accepted = map(sum, zip(*pairs, strict=True))
        return AcceptanceCounts(num_drafts=drafts, num_accepted=accepted)

    by_draft = {
        name: [total(one.counts[name] for one in block) for block in blocks] for name in DRAFTS
    }
    gains = {
        name: estimate_tau_gain(by_draft[name], by_draft["once"]) for name in ("learning", "frozen")
    }
    num_records = sum(one.records for one in judged)
    return {
        "tau": {name: _describe(_estimate_tau(counts)) for name, counts in by_draft.items()},
        "tau_engine": total(one.engine for one in rows).tau,
        "gain": {name: _describe(gain) for name, gain in gains.items()},
        "records": {
            "stored": num_records,
            "misnamed": sum(one.misnamed for one in judged) / num_records,
            "would_be_noticed": sum(one.would_be_noticed for one in judged) / num_records,
            "largest_kl": max(one.largest_kl for one in judged),
        },
    }


def _estimate_tau(counts: Sequence[AcceptanceCounts]) -> Estimate:
    accepted_N, drafts_N = (
        np.array([getattr(c, n) for c in counts], float) for n in ("num_accepted", "num_drafts")
    )
    rate = estimate_ratio(accepted_N, drafts_N)
    return Estimate(1 + rate.value, rate.error, rate.freedom)


def _describe(estimate: Estimate) -> dict[str, Any]:
    """Describe an estimate, with None instead of an interval if a single block shows no spread."""
    interval = estimate.interval() if np.isfinite(estimate.error) else None
    return {"value": estimate.value, "interval": interval}


def decide(gain: Mapping[str, Any]) -> str:
    """Return the sentence that answers the demo's question.

    A gain that is too small for the gate to promote a candidate counts as none. If the interval
    contains the gain that the gate requires, both answers are possible.
    """
    if gain["interval"] is None:
        return f"too few updates to decide: learning gains {gain['value']:+.2f}"
    low, high = gain["interval"]
    verdict = "whether adapting once is enough is undecided"
    if low > gate.Policy.min_gain:
        verdict = "adapting once is not enough"
    elif high <= gate.Policy.min_gain:
        verdict = "adapting once is enough"
    return (
        f"{verdict}; learning gains {gain['value']:+.2f} [{low:+.2f}, {high:+.2f}] tokens per "
        "target step"
    )


def build_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Build the charts of the page, by element id."""
    rows = [
        {**row, "series": name, "value": row[name]}
        for row in report["curve"]
        for name in DRAFTS
        if name in row
    ]
    speed = [{**row, "series": "rollouts", "value": row["tokens_per_s"]} for row in report["curve"]]
    curves = report["adapt"]["curves"]
    labels = [
        {"labels": x, "value": tau, "series": name}
        for name, curve in curves.items()
        for x, tau in curve
    ]
    updates, tau = ("update", "update of the policy"), "tokens per target step"
    return {
        "tau": _draw(rows, updates, tau, near=4),
        "speed": _draw(speed, updates, "tokens per second", near=4),
        "adapt": _draw(labels, ("labels", "labels of the fine-tune's answers"), tau, near=0),
    }


def _draw(rows: Sequence[Mapping[str, Any]], x: tuple[str, str], title: str, near: int) -> Spec:
    """Draw points, and the mean of each point with `near` points on both sides."""
    base = panel(rows).encode(
        x=alt.X(f"{x[0]}:Q", title=x[1], axis=alt.Axis(grid=False)),
        color=color(list(dict.fromkeys(row["series"] for row in rows))),
        tooltip=tips((f"{x[0]}:Q", x[1]), ("series:N", "of"), ("value:Q", title, ".3f")),
    )
    y = alt.Y("mean:Q", title=title, scale=alt.Scale(zero=False))
    means = base.transform_window(
        mean="mean(value)", frame=[-near, near], groupby=["series"], sort=[alt.SortField(x[0])]
    )
    points = base.mark_point(size=8, filled=True, opacity=0.35).encode(y=alt.Y("value:Q"))
    return to_spec(points + means.mark_line(strokeWidth=2.5).encode(y=y))
