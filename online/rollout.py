"""The rollout: one version onto a running fleet, proven on live traffic first, and taken back from every server if not.

                     ┌─ control group, still on the incumbent ─┐
    candidate ─► canary ─► warm-up ─► the same window on both ─► compare ─► wave ─► watch ─► wave ─► ... ─► whole fleet
                     │                                             │                  │
                     └──────────────── any failure ────────────────┴──────────────────┴─► every server to the incumbent

    stage        consumes                 waits for                              unblocked by
    align        list of servers          every server that answers              all of them on the incumbent
    canary       candidate                one server to swap                     its own status
    warm-up      nothing                  caches and running requests to turn    a fixed time
    window       counters of both groups  enough drafts in both groups           counts, or the timeout: rolled back
    waves        the other servers        every server of the wave to swap       their own status, and no alarm

Before and after are never compared where there is a control group: traffic changes by the minute, and a harder one
would be held against the candidate. Neither function raises for what servers do; both can be run again after a kill.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from online.fleet import Convergence, Server, Window, converge, is_alarming
from online.metrics import Acceptance


@dataclass(frozen=True, kw_only=True)
class RolloutPolicy:
    warm_up_s: float = 30
    """Not counted after a swap: requests that were running hold keys and values of the draft before."""
    min_drafts: int = 2000
    """Of each group, before they are compared: the error of tau is then about 0.03."""
    window_timeout_s: float = 900
    """Less traffic than `min_drafts` in this time proves nothing, and the canary is taken back."""
    poll_s: float = 5
    max_loss: float = 0.1
    """The canary may be this much below the control group, in tau. The gain was the gate's to prove."""
    waves: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Share of the fleet that has the candidate after each wave."""
    watch_s: float = 30
    """Between waves, for alarms."""
    swap_timeout_s: float = 120
    """For a server that does not answer to come back, before the rollout goes on without it."""
    rollback_timeout_s: float = 300
    max_absent_share: float = 0.1
    """More servers than this that do not answer, and the trouble is not theirs: rolled back."""

    def __post_init__(self) -> None:
        if not self.waves or list(self.waves) != sorted(self.waves) or self.waves[-1] != 1.0 or self.waves[0] <= 0:
            raise ValueError(f"waves must rise from above 0 to 1.0, got {self.waves}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    passed: bool
    version: str
    """What the fleet should serve now: the argument of `reconcile` from here on."""
    reason: str
    refused: dict[str, str] = field(default_factory=dict)
    """Servers that answer and still have another version: these need a person."""
    absent: dict[str, str] = field(default_factory=dict)
    """Servers that did not answer: `reconcile` brings them along."""
    tau_candidate: float | None = None
    tau_control: float | None = None


async def try_canary(servers: Sequence[Server], candidate: str, incumbent: str, policy: RolloutPolicy) -> Outcome:
    """Passed: the first server that answers has the candidate, and accepts about as much as the others or more.

    Otherwise every server is back on the incumbent. A fleet of one has no control group: there, and only there, the
    canary is compared with itself before the swap.
    """
    aligned = await converge(servers, incumbent, policy.swap_timeout_s, insist=False)
    present = [server for server in servers if server.url not in {**aligned.refused, **aligned.absent}]
    if not present or aligned.refused:
        return _outcome(False, f"the fleet is not on {incumbent} to begin with: {aligned}", aligned)
    canary, control = present[0], present[1:]
    before = None if control else await _window(canary, [], policy)
    if before is not None and before.problem:
        return _outcome(False, f"{canary.url} before the swap: {before.problem}", aligned)

    swapped = await converge([canary], candidate, policy.swap_timeout_s, insist=False)
    if not swapped.is_complete:
        return await _roll_back(servers, incumbent, f"the canary did not take {candidate}: {swapped}", policy)
    await asyncio.sleep(policy.warm_up_s)
    compared = await _window(canary, control, policy)
    if before is not None:
        compared = Comparison(compared.canary, before.canary, compared.problem)
    problem = compared.problem or _worse(compared, policy)
    if problem:
        return await _roll_back(servers, incumbent, f"canary {canary.url}: {problem}", policy, compared)
    against = "the control group" if control else "itself before (no control group)"
    return _outcome(True, f"canary {canary.url} against {against}: {compared}", aligned, candidate, compared)


async def roll_waves(servers: Sequence[Server], candidate: str, incumbent: str, policy: RolloutPolicy) -> Outcome:
    """Passed: every server that answers has the candidate. Otherwise every server is back on the incumbent."""
    done: list[Server] = []
    absent: dict[str, str] = {}
    for wave in _waves(servers, policy):
        swapped = await converge(wave, candidate, policy.swap_timeout_s, insist=False)
        if swapped.refused:
            return await _roll_back(servers, incumbent, f"refused {candidate}: {swapped}", policy)
        done += [server for server in wave if server.url not in swapped.absent]
        absent |= swapped.absent
        if _are_too_many(absent, servers, policy):
            return await _roll_back(servers, incumbent, f"{len(absent)} servers are gone: {swapped}", policy)
        alarm = await _watch(done, policy)
        if alarm:
            return await _roll_back(servers, incumbent, alarm, policy)
    # Some restarted meanwhile and came back with the draft of their command line.
    final = await converge(servers, candidate, policy.swap_timeout_s, insist=False)
    if final.refused or _are_too_many(final.absent, servers, policy):
        return await _roll_back(servers, incumbent, f"the fleet did not come together: {final}", policy)
    return _outcome(True, f"{len(servers) - len(final.absent)} of {len(servers)} servers on {candidate}", final)


@dataclass(frozen=True)
class Comparison:
    """What canary and control group accepted over one window, or why there is nothing to compare."""

    canary: Acceptance
    control: Acceptance
    problem: str = ""

    def __str__(self) -> str:
        shown = [f"{a.tau:.3f} ({a.drafts:.0f} drafts)" if a.tau else "no drafts" for a in (self.canary, self.control)]
        return f"tau {shown[0]} against {shown[1]}"


async def _window(canary: Server, control: Sequence[Server], policy: RolloutPolicy) -> Comparison:
    """Both groups over the same time, until each has `min_drafts` or the canary raises the alarm."""
    window = await Window.open([canary, *control])
    deadline_s = time.monotonic() + policy.window_timeout_s
    while True:
        await asyncio.sleep(policy.poll_s)
        counted = await window.read()
        if canary not in counted:
            return Comparison(Acceptance(), Acceptance(), "it restarted, lost its draft or stopped answering")
        compared = Comparison(
            counted[canary], sum((counted[server] for server in control if server in counted), Acceptance())
        )
        groups = [compared.canary, compared.control] if control else [compared.canary]
        # Waiting longer on an alarm would only slow more requests down.
        if is_alarming(compared.canary) or min(group.drafts for group in groups) >= policy.min_drafts:
            return compared
        if time.monotonic() > deadline_s:
            too_few = f"fewer than {policy.min_drafts} drafts in {policy.window_timeout_s:.0f} s: {compared}"
            return Comparison(compared.canary, compared.control, too_few)


def _worse(compared: Comparison, policy: RolloutPolicy) -> str:
    """What speaks against the canary, or nothing."""
    if is_alarming(compared.canary):
        return f"its draft is hardly accepted: {compared}"
    assert compared.canary.tau is not None
    assert compared.control.tau is not None
    loss = compared.control.tau - compared.canary.tau
    return f"{loss:.3f} worse, {policy.max_loss} allowed: {compared}" if loss > policy.max_loss else ""


async def _watch(servers: Sequence[Server], policy: RolloutPolicy) -> str:
    """The first alarm within `watch_s`, or nothing."""
    window = await Window.open(servers)
    await asyncio.sleep(policy.watch_s)
    for server, acceptance in (await window.read()).items():
        if is_alarming(acceptance):
            return (
                f"{server.url} hardly accepts its draft: tau {acceptance.tau:.3f} over {acceptance.drafts:.0f} drafts"
            )
    return ""


def _are_too_many(absent: dict[str, str], servers: Sequence[Server], policy: RolloutPolicy) -> bool:
    """Whether so many do not answer that the fault is hardly theirs. One may be away, unless it is the only one."""
    return len(absent) == len(servers) or len(absent) > max(1, policy.max_absent_share * len(servers))


def _waves(servers: Sequence[Server], policy: RolloutPolicy) -> Iterator[Sequence[Server]]:
    begin = 0
    for share in policy.waves:
        end = max(begin, round(share * len(servers)))
        if end > begin:
            yield servers[begin:end]
        begin = end


async def _roll_back(
    servers: Sequence[Server], incumbent: str, why: str, policy: RolloutPolicy, compared: Comparison | None = None
) -> Outcome:
    back = await converge(servers, incumbent, policy.rollback_timeout_s)
    return _outcome(False, why, back, incumbent, compared)


def _outcome(
    passed: bool, reason: str, fleet: Convergence, version: str | None = None, compared: Comparison | None = None
) -> Outcome:
    return Outcome(
        passed=passed,
        version=version or fleet.version,
        reason=reason,
        refused=fleet.refused,
        absent=fleet.absent,
        tau_candidate=compared.canary.tau if compared else None,
        tau_control=compared.control.tau if compared else None,
    )
