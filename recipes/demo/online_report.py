"""The parts of the online demo's report about traffic, learner and the cost of capture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from redraft.eval.intervals import CONFIDENCE
from redraft.online.journal import AcceptanceEntry, Entry, SwapEntry
from redraft.recipes.demo.fleet import Traffic


def summarise_traffic(traffic: Traffic, journal: Sequence[Entry]) -> dict[str, Any]:
    """Failed requests, and the longest waits for a streamed chunk: around each swap, and in an equal time before it."""
    swaps = [e for e in journal if isinstance(e, SwapEntry) and e.outcome in ("swapped", "rolled_back")]
    # the journal has wall-clock times, the traffic monotonic ones
    monotonic = time.monotonic() - time.time()
    around, before = [], []
    for swap in swaps:
        begin_s = swap.time_s + monotonic - (swap.duration_ms or 0) / 1e3 - 0.5
        end_s = swap.time_s + monotonic + 1.5
        around.append(traffic.longest_gap_ms(swap.server, begin_s, end_s))
        before.append(traffic.longest_gap_ms(swap.server, 2 * begin_s - end_s, begin_s))
    return {
        "failed_requests": len(traffic.failures),
        "requests": len(traffic.answers),
        "failures": traffic.failures[:5],
        "swap": {
            "count": len(swaps),
            "pause_ms_max": max(around, default=0.0),
            "pause_ms_max_before": max(before, default=0.0),
        },
    }


def count_records_to_adapt(report: dict[str, Any]) -> int | None:
    """Records of B that the first version to close 70% of the gap had learned from; None if no version did."""
    tau = report["tau"]
    wanted = tau["b_before"] + 0.7 * (tau["b_offline"] - tau["b_before"])
    learned = [v for v in report["versions"] if v["origin"] == "learned" and v["tau"] >= wanted]
    return learned[0]["records"] if learned else None


def build_timeline(journal: Sequence[Entry], shifted_s: float) -> dict[str, Any]:
    """Acceptance and swaps for the page's chart; `s` is in seconds since the traffic changed."""
    acceptance: list[dict[str, Any]] = []
    swaps: list[dict[str, Any]] = []
    for entry in journal:
        s = entry.time_s - shifted_s
        if isinstance(entry, AcceptanceEntry) and entry.server and entry.tau is not None:
            acceptance.append({"s": s, "server": entry.server, "tau": entry.tau})
        elif isinstance(entry, SwapEntry):
            swaps.append({"s": s, "server": entry.server, "version": entry.version, "outcome": entry.outcome})
    return {"acceptance": acceptance, "swaps": swaps}


def estimate_overhead(with_capture: Sequence[float], without: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Cost of capture as a share of tokens/s: the median over pairs of runs, with a bootstrapped 95% interval."""
    cost_P = 1 - np.divide(with_capture, without)
    drawn_RP = np.random.default_rng(0).integers(len(cost_P), size=(4_000, len(cost_P)))
    low, high = np.quantile(np.median(cost_P[drawn_RP], axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(np.median(cost_P)), (float(low), float(high))


def summarise_report(report: dict[str, Any]) -> str:
    """The lines printed at the end of the demo."""
    tau, (a, b) = report["tau"], report["domains"]
    gap = tau["b_offline"] - tau["b_before"]
    closed = f"{(tau['b_adapted'] - tau['b_before']) / gap:.0%} of the gap closed" if gap > 0 else "no gap to close"
    capture = report["capture"]
    low, high = capture["overhead_interval"]
    return "\n".join(
        [
            f"tau on {b}: {tau['b_before']:.3f} -> {tau['b_adapted']:.3f}, distilled offline {tau['b_offline']:.3f}: "
            f"{closed} (70% after {report['records_to_adapt']} records)",
            f"tau on {a}: {tau['a_before']:.3f} -> {tau['a_after']:.3f}",
            f"{report['swap']['count']} swaps; longest wait for a chunk {report['swap']['pause_ms_max']:.0f} ms around "
            f"them, {report['swap']['pause_ms_max_before']:.0f} ms before them",
            f"{report['failed_requests']} of {report['requests']} requests failed; lossless: {report['lossless']}",
            f"poisoned candidate rejected: {report['bad_candidate']['rejected_by_gate']}; bad draft rolled back: "
            f"{report['bad_draft']['rolled_back']}, after {report['bad_draft']['rollback_s']} s",
            f"capturing every request costs {capture['overhead']:.1%} of tokens/s (95% interval {low:.1%} to "
            f"{high:.1%}); capturing one in ten, {capture['overhead_at_10_percent']:.1%}",
            f"duration: {report['duration_s']} s",
        ]
    )
