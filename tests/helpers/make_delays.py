"""A journal of one learner with a rejected and a served candidate, and its account of delays."""

from __future__ import annotations

from typing import Any, Literal

from benchmarks.demo.delays import account
from redraft.online.journal import Entry, GateEntry, StateEntry, SwapEntry, TrainingEntry

A, B = "http://a:1", "http://b:1"


def make_entries() -> list[Entry]:
    """Four records a step. Steps begin at 6, 12 and 35 s, after waits of 1, 3 and 1 s.

    The second one pauses for half of its time, the first judging for two of five seconds, and the
    second judging for half of its time.
    """
    return [
        StateEntry(time_s=0, phase="idle", reason="training continues from served"),
        StateEntry(time_s=6, phase="training"),
        TrainingEntry(time_s=10, step=1, loss=1.0, records_seen=4, waited_s=1.0, step_s=4.0),
        TrainingEntry(
            time_s=20, step=2, loss=1.0, records_seen=8, waited_s=3.0, step_s=8.0, paused_s=4.0
        ),
        StateEntry(time_s=22, phase="judging", candidate="checkpoint-000001"),
        make_verdict(27, "inconclusive", paused_s=2.0),
        StateEntry(time_s=27, phase="idle", reason="too little evidence"),
        StateEntry(time_s=30, phase="training"),
        TrainingEntry(time_s=40, step=3, loss=1.0, records_seen=12, waited_s=1.0, step_s=5.0),
        StateEntry(time_s=41, phase="judging", candidate="checkpoint-000002"),
        make_verdict(44, "promote", paused_s=1.5),
        StateEntry(time_s=44, phase="publishing", candidate="checkpoint-000002"),
        StateEntry(time_s=45, phase="canary", candidate="v000002"),
        SwapEntry(time_s=47, server=A, version="v000002", outcome="swapped", duration_ms=500),
        StateEntry(time_s=70, phase="rolling", candidate="v000002"),
        SwapEntry(time_s=72, server=B, version="v000002", outcome="swapped", duration_ms=500),
        StateEntry(time_s=73, phase="idle", reason="rolled out"),
        StateEntry(time_s=74, phase="training"),
        TrainingEntry(time_s=80, step=4, loss=1.0, records_seen=16, waited_s=2.0),
        StateEntry(time_s=81, phase="idle", reason="training begins again from v000002"),
        TrainingEntry(time_s=90, step=1, loss=1.0, records_seen=20, waited_s=2.0),
    ]


def make_verdict(
    time_s: float, verdict: Literal["promote", "inconclusive"], paused_s: float
) -> Entry:
    return GateEntry(
        time_s=time_s, verdict=verdict, candidate="c", incumbent="v000001", paused_s=paused_s
    )


def make_delays() -> dict[str, Any]:
    return account(make_entries())
