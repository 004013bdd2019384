"""The parts of the online demo's report about traffic, learner and the cost of capture."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.demo.fleet import Traffic
from redraft.eval.intervals import UNBOUNDED, Estimate, median_interval, subtract_independent
from redraft.online.journal import AcceptanceEntry, Entry, GateEntry, SwapEntry

Array = NDArray[np.float64]


def summarise_traffic(traffic: Traffic, journal: Sequence[Entry]) -> dict[str, Any]:
    """Summarise failed requests and the longest waits for a streamed chunk.

    The waits are those around each swap, and in a period of equal length before it.
    """
    swaps = [
        e for e in journal if isinstance(e, SwapEntry) and e.outcome in ("swapped", "rolled_back")
    ]
    # The journal has wall-clock times, but the traffic has monotonic times.
    monotonic = time.monotonic() - time.time()
    around, before = [], []
    for swap in swaps:
        # The journal notes a swap when it is complete.
        begin_s = swap.time_s + monotonic - (swap.duration_ms or 0) / 1e3 - 0.5
        end_s = swap.time_s + monotonic + 1.5
        around.append(traffic.longest_gap_ms(swap.server, begin_s, end_s))
        # The period of the same length right before: (begin - (end - begin), begin].
        before.append(traffic.longest_gap_ms(swap.server, 2 * begin_s - end_s, begin_s))
    first_s = next(
        (e.time_s for e in journal if isinstance(e, GateEntry) and e.gain is not None), None
    )
    answered_s = [answer.times_s[-1] - monotonic for answer in traffic.answers]
    return {
        "failed_requests": len(traffic.failures),
        "requests": len(traffic.answers),
        "first_verdict_requests": None
        if first_s is None
        else sum(s <= first_s for s in answered_s),
        "failures": traffic.failures[:5],
        "swap": {
            "count": len(swaps),
            "pause_ms_max": max(around, default=0.0),
            "pause_ms_max_before": max(before, default=0.0),
        },
    }


def count_records_to_adapt(report: dict[str, Any]) -> int | None:
    """Count the records of B that the first version to close 70% of the gap was trained on.

    None if no version closed it.
    """
    tau = report["tau"]
    wanted = tau["b_before"] + 0.7 * (tau["b_offline"] - tau["b_before"])
    learned = [v for v in report["versions"] if v["origin"] == "learned" and v["tau"] >= wanted]
    return learned[0]["records"] if learned else None


ENOUGH = 0.9
"""Share of the offline draft's tau that should be reached soon after a shift."""


def find_minutes(journal: Sequence[Entry], shifted_s: float) -> dict[str, float]:
    """Return the minutes from the shift to the first swap to each version."""
    minutes: dict[str, float] = {}
    for entry in journal:
        if isinstance(entry, SwapEntry) and entry.outcome == "swapped":
            minutes.setdefault(entry.version, (entry.time_s - shifted_s) / 60)
    return minutes


def count_minutes_to_adapt(report: dict[str, Any]) -> float | None:
    """Return the minutes from the shift to the first version with 90% of the offline tau on B.

    None if no version reaches it.
    """
    wanted = ENOUGH * report["tau"]["b_offline"]
    served = [
        v["minutes"]
        for v in report["versions"]
        if v["origin"] == "learned" and v["tau"] >= wanted and v["minutes"] is not None
    ]
    return min(served, default=None)


def build_timeline(journal: Sequence[Entry], shifted_s: float) -> dict[str, Any]:
    """Collect acceptance and swaps for the page's chart; `s` is seconds since the traffic changed."""
    acceptance: list[dict[str, Any]] = []
    swaps: list[dict[str, Any]] = []
    for entry in journal:
        s = entry.time_s - shifted_s
        if isinstance(entry, AcceptanceEntry) and entry.server and entry.tau is not None:
            acceptance.append({"s": s, "server": entry.server, "tau": entry.tau})
        elif isinstance(entry, SwapEntry):
            swaps.append(
                {"s": s, "server": entry.server, "version": entry.version, "outcome": entry.outcome}
            )
    return {"acceptance": acceptance, "swaps": swaps}


def estimate_overhead(
    with_capture: Sequence[float], without: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Estimate the cost of capture as a share of tokens/s.

    Returns the median over interleaved pairs of runs, with its 95% interval, or None instead of the
    interval if there are too few pairs for one.
    """
    cost, interval = median_interval(1 - np.divide(with_capture, without))
    return cost, None if interval == UNBOUNDED else interval


def describe_cost(cost: float, interval: Sequence[float] | None) -> str:
    """Describe the cost in words. A cost whose interval includes 0 is called equal."""
    if interval is None:
        return "unknown, too few rounds"
    low, high = interval
    spread = f"95% interval {low:.1%} to {high:.1%}"
    return f"equal to no capture ({spread})" if low <= 0 <= high else f"{cost:.1%} ({spread})"


def estimate_speed(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Compare the tokens/s with the draft `adapted` and with the draft `before`.

    The ratio is the median over six rounds or more, with its interval.
    """
    ratio, interval = median_interval(np.divide(rates["adapted"], rates["before"]))
    return {
        "adapted_over_before": ratio,
        "interval": interval,
        "tokens_per_s": {name: list(some) for name, some in rates.items()},
    }


def describe_speed(speed: Mapping[str, Any]) -> str:
    """Describe the ratio in words, with its interval."""
    low, high = speed["interval"]
    return (
        f"{speed['adapted_over_before']:.2f}x the tokens/s of the first draft (95% interval "
        f"{low:.2f}x to {high:.2f}x)"
    )


def describe_outputs(outputs: Mapping[str, Any], dtype: str) -> str:
    """Describe in words how far the answers are from the target's greedy tokens."""
    if dtype == "float32":
        return f"lossless: {outputs['lossless']}"
    alone = outputs["target_alone"]
    return (
        f"{outputs['parted']} of {outputs['answers']} answers part from the target in float32, by "
        "up to "
        f"{outputs['widest_gap']:.2f} in logits; the target in {dtype} alone in {alone['parted']}, "
        f"by up to {alone['widest_gap']:.2f}"
    )


def estimate_share(before_N2: Array, learned_SN2: Array, ceiling_SN2: Array) -> dict[str, Any]:
    """Estimate the share of the gap between two drafts that learning closed.

    The arrays hold accepted draft tokens and drafts of every prompt. The 95% interval is over seeds
    and prompts. `share` and `interval` are None unless the ceiling is above the first draft.
    """
    learned_S, ceiling_S, share_S = _share_by_seed(before_N2, learned_SN2, ceiling_SN2)
    report: dict[str, Any] = {
        "tau_before": _tau(before_N2),
        "tau_learned": learned_S.tolist(),
        "tau_ceiling": ceiling_S.tolist(),
        "shares": None,
        "share": None,
        "interval": None,
    }
    if not (ceiling_S > _tau(before_N2)).all():
        return report
    num_seeds, num_prompts = len(learned_SN2), len(before_N2)
    # The jackknife over prompts is the mean share without each prompt in turn. Axis -2 is N in [N,
    # 2] and in [S, N, 2].
    left_out_N = np.array(
        [
            _share_by_seed(
                *(np.delete(counts, n, axis=-2) for counts in (before_N2, learned_SN2, ceiling_SN2))
            )[2].mean()
            for n in range(num_prompts)
        ]
    )
    prompt_error = np.sqrt(
        (num_prompts - 1) / num_prompts * np.square(left_out_N - share_S.mean()).sum()
    )
    # A single seed shows no spread: the error is infinite, and no interval is reported.
    seed_error = share_S.std(ddof=1) / np.sqrt(num_seeds) if num_seeds > 1 else np.inf
    # Seeds and prompts vary independently, so their errors add up in squares.
    share = subtract_independent(
        Estimate(float(share_S.mean()), float(seed_error), max(1.0, num_seeds - 1.0)),
        Estimate(0.0, float(prompt_error), max(1.0, num_prompts - 1.0)),
    )
    interval = share.interval() if np.isfinite(share.error) else None
    return report | {"shares": share_S.tolist(), "share": share.value, "interval": interval}


def _share_by_seed(
    before_N2: Array, learned_SN2: Array, ceiling_SN2: Array
) -> tuple[Array, Array, Array]:
    """Return tau of the learned drafts, tau of the ceilings, and the share of the gap; [S] each."""
    before = _tau(before_N2)
    learned_S, ceiling_S = (
        np.array([_tau(counts_N2) for counts_N2 in runs]) for runs in (learned_SN2, ceiling_SN2)
    )
    gap_S = ceiling_S - before
    return (
        learned_S,
        ceiling_S,
        np.divide(learned_S - before, gap_S, out=np.zeros_like(gap_S), where=gap_S != 0),
    )


def _tau(counts_N2: Array) -> float:
    accepted, drafts = counts_N2.sum(0)
    return float(1 + accepted / drafts)


def describe_gap(gap: Mapping[str, Any]) -> str:
    """Describe the share of the gap closed, in words."""
    if gap["share"] is None:
        return "no gap to close"
    seeds = len(gap["seeds"])
    if gap["interval"] is None:
        return f"{gap['share']:.0%} of the gap closed (one seed, no interval)"
    low, high = gap["interval"]
    return (
        f"{gap['share']:.0%} of the gap closed (95% interval {low:.0%} to {high:.0%} over "
        f"{seeds} seeds)"
    )


def summarise_report(report: dict[str, Any]) -> str:
    """Return the lines printed at the end of the demo."""
    tau, (a, b) = report["tau"], report["domains"]
    capture, adapted = report["capture"], report["records_to_adapt"]
    when = "never" if adapted is None else f"after {adapted} records"
    minutes = report["minutes_to_adapt"]
    soon = "never" if minutes is None else f"after {minutes:.1f} minutes"
    whole = describe_cost(capture["overhead"], capture["overhead_interval"])
    tenth = describe_cost(
        capture["overhead_at_10_percent"], capture["overhead_at_10_percent_interval"]
    )
    return "\n".join(
        [
            f"tau on {b}: {tau['b_before']:.3f} -> {tau['b_adapted']:.3f}, trained offline on the "
            f"same answers for as many steps {tau['b_offline']:.3f} (70% of the gap: {when}; "
            f"{ENOUGH:.0%} of that tau: {soon})",
            f"the same training replayed offline, by the forecast: {describe_gap(report['gap'])}",
            f"tau on {a}: {tau['a_before']:.3f} -> {tau['a_after']:.3f}",
            f"speed on {b}: {describe_speed(report['speed'])}",
            f"{report['swap']['count']} swaps; longest wait for a chunk "
            f"{report['swap']['pause_ms_max']:.0f} ms around "
            f"them, {report['swap']['pause_ms_max_before']:.0f} ms before them",
            f"{report['failed_requests']} of {report['requests']} requests failed; "
            f"{describe_outputs(report['outputs'], report['dtype'])}",
            f"poisoned candidate rejected: {report['bad_candidate']['rejected_by_gate']}; bad "
            "draft rolled back: "
            f"{report['bad_draft']['rolled_back']}, after {report['bad_draft']['rollback_s']} s",
            f"cost in tokens/s of capturing every request: {whole}; one in ten: {tenth}",
            f"first verdict of the gate after {report['first_verdict_requests']} requests",
            f"duration: {report['duration_s']} s",
        ]
    )
