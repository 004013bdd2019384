"""What the online demo's report says of its traffic, its learner and what capture costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.bootstrap import NUM_RESAMPLES, interval
from online.journal import AcceptanceEntry, Entry, SwapEntry
from recipes.demo_fleet import Traffic


def traffic_report(traffic: Traffic, journal: Sequence[Entry]) -> dict[str, Any]:
    """Failures, and how long clients had to wait for a chunk around swaps and in as much time before each."""
    swaps = [e for e in journal if isinstance(e, SwapEntry) and e.outcome in ("swapped", "rolled_back")]
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


def records_to_adapt(report: dict[str, Any]) -> int | None:
    """New records of B behind the first version that closed 70% of the gap; None where none did."""
    tau = report["tau"]
    wanted = tau["b_before"] + 0.7 * (tau["b_offline"] - tau["b_before"])
    learned = [v for v in report["versions"] if v["origin"] == "learned" and v["tau"] >= wanted]
    return learned[0]["records"] if learned else None


def timeline(journal: Sequence[Entry], shifted_s: float) -> dict[str, Any]:
    """What the page draws, in seconds since the shift."""
    accepted = [e for e in journal if isinstance(e, AcceptanceEntry) and e.server and e.tau is not None]
    swaps = [e for e in journal if isinstance(e, SwapEntry)]
    return {
        "acceptance": [{"s": e.time_s - shifted_s, "server": e.server, "tau": e.tau} for e in accepted],
        "swaps": [
            {"s": e.time_s - shifted_s, "server": e.server, "version": e.version, "outcome": e.outcome} for e in swaps
        ],
    }


def overhead(with_capture: Sequence[float], without: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """1 - the median of the pairs' ratios of tokens/s, and its 95% interval over pairs drawn with replacement."""
    cost_P = 1 - np.divide(with_capture, without)
    drawn_RP = np.random.default_rng(0).integers(len(cost_P), size=(NUM_RESAMPLES, len(cost_P)))
    return float(np.median(cost_P)), interval(np.median(cost_P[drawn_RP], axis=1))


def summary(report: dict[str, Any]) -> str:
    tau, (a, b) = report["tau"], report["domains"]
    gap = tau["b_offline"] - tau["b_before"]
    closed = f"{(tau['b_adapted'] - tau['b_before']) / gap:.0%} of the gap" if gap > 0 else "no gap to close"
    return "\n".join(
        [
            f"tau on {b}: {tau['b_before']:.3f} -> {tau['b_adapted']:.3f}, ceiling {tau['b_offline']:.3f}: "
            f"{closed}, after {report['records_to_adapt']} records for 70%",
            f"tau on {a}: {tau['a_before']:.3f} -> {tau['a_after']:.3f}",
            f"{report['swap']['count']} swaps, longest wait {report['swap']['pause_ms_max']:.0f} ms "
            f"(before: {report['swap']['pause_ms_max_before']:.0f} ms), {report['failed_requests']} failed requests of "
            f"{report['requests']}, lossless: {report['lossless']}",
            f"poisoned candidate rejected: {report['bad_candidate']['rejected_by_gate']}; bad draft rolled back: "
            f"{report['bad_draft']['rolled_back']} in {report['bad_draft']['rollback_s']} s",
            f"capture costs {report['capture']['overhead']:.1%} "
            f"(95% interval {report['capture']['overhead_interval'][0]:.1%} to "
            f"{report['capture']['overhead_interval'][1]:.1%}), of a tenth "
            f"{report['capture']['overhead_at_10_percent']:.1%}; {report['duration_s']} s in all",
        ]
    )
