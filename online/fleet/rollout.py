"""The rollout of one version onto a running fleet.

The version is tested on live traffic first, and withdrawn if it fails.

                     ┌─ control group, still on the incumbent ─┐
    candidate ─► canary ─► warm-up ─► the same window on both ─► compare ─► wave ─► watch ─► wave ─► ... ─► whole fleet
                     │                                             │                  │
                     └──────────────── any failure ────────────────┴──────────────────┴─► every server to the incumbent

    stage        consumes                 waits for                              unblocked by
    align        list of servers          every answering server                 all of them on the incumbent
    canary       candidate                one server to swap                     the server's status
    warm-up      nothing                  caches and running requests to turn    a fixed time
    window       counters of both groups  an interval of the loss that decides   counts, or the timeout: inconclusive
    waves        the other servers        every server of the wave to swap       their status, and no alarm that
                                                                                 the remaining servers lack

The interval is computed from the spread between polls, not between drafts: all drafts of a request
are similar, so 2000 drafts of 70 requests are much weaker evidence than 2000 separate ones. The
groups are compared domain by domain, so that the mix of domains in the canary's traffic makes no
difference. Servers that miscount domains are compared by their totals. The number of draft tokens,
which follows the load with `--pace auto`, makes no difference either, because tau is compared as if
both groups had drafted equally many tokens.

With adaptive verification, every number depends on the load, because vLLM does not verify the
tokens that are least likely to be accepted: as the load rises, tau falls, and the accepted share of
the verified tokens rises. Such servers are therefore compared within a domain and a load, i.e. the
number of requests in a step, rounded to half an octave. A request runs at several loads, so these
comparisons are not independent of each other.

A trainer may change the target's weights during the comparison. A poll counts only if all servers
have the same weights at its start and the same weights at its end, so a fleet that changes together
is compared normally.

Servers with `--pace auto` may draft little or nothing. If there is nothing to compare, or not
enough before time is up, the candidate passes, because a server drafts with it only while that is
faster. It also passes if someone sets a different pace for a moment (`POST /redraft/pace`), because
one reading with the server's own pace is enough. A server that was set to draft nothing is treated
like a server with `--pace auto`.

With a control group, the time before the swap is never compared with the time after it: traffic
changes by the minute, and the candidate would be blamed for harder traffic. Neither function raises
an error for a server's failure; both can be repeated after a kill.
"""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from redraft.engine.counts import AcceptanceCounts
from redraft.eval.intervals import (
    Estimate,
    estimate_ratio,
    subtract_independent,
    sum_correlated,
    sum_weighted,
)
from redraft.files.setting_error import SettingError
from redraft.online.fleet.server import (
    ALARM_DRAFTS,
    AT_LOAD,
    Convergence,
    FleetServer,
    Window,
    WindowCounts,
    converge,
    is_alarming,
)

Array = NDArray[np.float64]
ByDomain = Mapping[str, Array]
Groups = tuple[Array, Array]
"""(accepted, drafts) per block, [2, B], of the control group and the canary."""

MIN_POLLS = 16  # Number of polls before the groups are first compared: 8 blocks of two.
# Minimum number of drafts that each group must have in a domain to compare it.
MIN_DOMAIN_DRAFTS = 200
ALL = f"{AT_LOAD}all"  # Key for the counts of all domains and loads together.

MIN_BLOCKS, MAX_BLOCKS = 8, 16
"""Number of blocks into which polls are divided: for fewer than 64 polls, and for 64 or more. Fewer
blocks would estimate the spread poorly; with more, a block would be shorter than a long request.
"""


@dataclass(frozen=True, kw_only=True)
class RolloutPolicy:
    warm_up_s: float = 30
    """Seconds after a swap that are not counted, because running requests still use the previous
    draft's KV cache.
    """
    min_drafts: int = 5000
    """Minimum number of drafts in each group before the first comparison."""
    window_timeout_s: float = 900
    """Maximum time to compare the groups, in seconds. If there is no result by then, for example
    because traffic was too light, the rollout is inconclusive.
    """
    keep_inconclusive: bool = False
    """Leave an inconclusive candidate on the canary and continue to compare until there is a
    result. By default, the canary returns to the incumbent.
    """
    confidence: float = 0.995
    """Confidence level of the interval of the loss. The canary passes if the whole interval is
    below `max_loss`, and is rolled back if the whole interval is above it. If the interval is
    narrower than `max_loss`, the estimate decides.
    """
    poll_s: float = 5
    """Seconds between reads of the counters while groups are compared."""
    max_loss: float = 0.1
    """Maximum loss in tau (mean tokens per step) of the canary against the control group. The gate
    has already proven the gain; the canary only guards against harm.
    """
    waves: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Fraction of the fleet that runs the candidate after each wave. Must increase to 1.0."""
    watch_s: float = 30
    """Seconds to watch for alarms after each wave except the last. The remaining servers are the
    control group.
    """
    swap_timeout_s: float = 120
    """The rollout continues without a server that has not responded for this many seconds. If it is
    the canary, the rollout fails.
    """
    rollback_timeout_s: float = 300
    """Seconds to keep trying to return every server to the old version after a failed rollout."""
    max_absent_share: float = 0.1
    """Maximum fraction of servers that may stop responding. Above it, the draft is a likely cause,
    and the rollout is reverted. One absent server is always tolerated, unless it is the only one.
    Servers that have not responded for `swap_timeout_s` when the waves begin are not counted.
    """

    def __post_init__(self) -> None:
        if (
            not self.waves
            or list(self.waves) != sorted(self.waves)
            or self.waves[-1] != 1.0
            or self.waves[0] <= 0
        ):
            raise SettingError(
                f"{{waves}} must increase, start above 0 and end at 1.0, got {self.waves}"
            )
        if not 0.5 < self.confidence < 1 or self.max_loss <= 0:
            raise SettingError(
                "{confidence} must be between 0.5 and 1 and {max_loss} above 0, got "
                f"{self.confidence} and {self.max_loss}"
            )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    passed: bool
    version: str
    """Version that the fleet should serve now; `reconcile` maintains it from here on."""
    reason: str
    refused: dict[str, str] = field(default_factory=dict)
    """Last error by address, of servers that respond but run a different version. These servers
    need manual action.
    """
    absent: dict[str, str] = field(default_factory=dict)
    """Last error by address, of servers that do not respond. `reconcile` will update them later."""
    is_inconclusive: bool = False
    """Whether nothing is known about the candidate: it was not swapped, or there was no result in
    time.
    """


async def try_canary(
    servers: Sequence[FleetServer],
    candidate: str,
    incumbent: str,
    policy: RolloutPolicy,
    measured: "Awaitable[Polls | tuple[Finding, str]] | None" = None,
) -> Outcome:
    """Swap the candidate onto the first server that answers, and compare it with the others.

    The candidate passes if its acceptance is at most `max_loss` worse. Otherwise, or if time runs
    out before this is known, every server returns to the incumbent. A fleet of one server has no
    control group; only in this case is the canary compared with its own results before the swap.
    `measured` is this measurement (`measure_alone`), if it began earlier.
    """
    # Alignment makes repeating after a kill safe: a canary that already has the candidate returns
    # to the incumbent.
    aligned = await converge(servers, incumbent, policy.swap_timeout_s, insist=False)
    present = [
        server for server in servers if server.url not in {**aligned.refused, **aligned.absent}
    ]
    # A silent server is left out. If a server refuses the incumbent, someone must fix that server
    # before anything else is swapped.
    if not present or aligned.refused:
        reason = f"the fleet is not on {incumbent} to begin with: {aligned}"
        return _outcome(Finding.INCONCLUSIVE, reason, aligned)
    canary, control = present[0], present[1:]
    # Only a fleet of one server is compared with its own earlier minutes, so it measures the
    # incumbent before the swap.
    before = None if control else await _measure_before(canary, incumbent, policy, measured)
    if isinstance(before, tuple):
        _, reason = before
        reason = f"{canary.url} before the swap: {reason}"
        return _outcome(Finding.INCONCLUSIVE, reason, aligned)

    swapped = await converge([canary], candidate, policy.swap_timeout_s, insist=False)
    if not swapped.is_complete:
        return await _roll_back(
            servers, incumbent, f"the canary did not swap to {candidate}: {swapped}", policy
        )
    await asyncio.sleep(policy.warm_up_s)
    finding, reason = await _compare(canary, candidate, control, incumbent, before, policy)
    if finding is not Finding.PASSED:
        return await _roll_back(
            servers, incumbent, f"canary {canary.url}: {reason}", policy, finding
        )
    against = "the control group" if control else "its own earlier results (no control group)"
    return _outcome(finding, f"canary {canary.url} against {against}: {reason}", aligned, candidate)


async def roll_waves(
    servers: Sequence[FleetServer], candidate: str, incumbent: str, policy: RolloutPolicy
) -> Outcome:
    """Swap the other servers to the candidate, wave by wave.

    The rollout passes if every server that answers has the candidate. Otherwise every server
    returns to the incumbent.
    """
    done: list[FleetServer] = []
    absent: dict[str, str] = {}
    # A server that was gone before the waves says nothing about the draft.
    silent_s = time.monotonic() - policy.swap_timeout_s
    known = [server for server in servers if server.answered_s >= silent_s]
    for wave in _split_into_waves(servers, policy):
        swapped = await converge(wave, candidate, policy.swap_timeout_s, insist=False)
        if swapped.refused:
            return await _roll_back(servers, incumbent, f"refused {candidate}: {swapped}", policy)
        done += [server for server in wave if server.url not in swapped.absent]
        absent |= swapped.absent
        if _are_too_many(absent, known, policy):
            return await _roll_back(
                servers, incumbent, f"{len(absent)} servers are gone: {swapped}", policy
            )
        # The control group shrinks with every wave: all servers swapped so far are compared with
        # the rest.
        others = [server for server in servers if server not in done and server.url not in absent]
        alarm = await _watch(done, others, policy)
        if alarm:
            return await _roll_back(servers, incumbent, alarm, policy)
    # Some servers may have restarted in the meantime, with the draft on their command line.
    final = await converge(servers, candidate, policy.swap_timeout_s, insist=False)
    if final.refused or _are_too_many(final.absent, known, policy):
        return await _roll_back(
            servers, incumbent, f"the servers do not all serve the same version: {final}", policy
        )
    return _outcome(
        Finding.PASSED,
        f"{len(servers) - len(final.absent)} of {len(servers)} servers on {candidate}",
        final,
    )


class Finding(Enum):
    PASSED = "passed"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"  # The canary cannot be measured.


def estimate_loss(canary_PK2: Array, control_PK2: Array, *, is_paired: bool = True) -> Estimate:
    """Estimate tau of the control group minus tau of the canary.

    The groups are compared as if both had drafted equally many tokens. The counts are (tried,
    accepted) by poll, in order, and by position. A request lasts for several polls, so neighbouring
    polls are correlated: they are merged into blocks, whose length grows with the number of polls.
    If the polls of both groups cover the same time (`is_paired`), their blocks are paired.
    """
    return _sum_losses([_equalise_groups(canary_PK2, control_PK2)], [1], is_paired=is_paired)


def _equalise_groups(canary_PK2: Array, control_PK2: Array) -> Groups:
    common = min(canary_PK2.shape[1], control_PK2.shape[1])
    groups_2BK2 = [_merge_polls(polls_PK2[:, :common]) for polls_PK2 in (control_PK2, canary_PK2)]
    # 1 / (1/n + 1/m), as for domains: a position's weight depends on how many drafts both groups
    # have with a token there.
    had_2K = np.array([_count_had(blocks_BK2) for blocks_BK2 in groups_2BK2])
    weights_K = had_2K.prod(0) / np.maximum(had_2K.sum(0), 1)
    control, canary = (
        _equalise(blocks_BK2, weights_K / weights_K[0]) for blocks_BK2 in groups_2BK2
    )
    return control, canary


def _sum_losses(loads: Sequence[Groups], weights: Sequence[float], *, is_paired: bool) -> Estimate:
    """Return the weighted sum of the losses at these loads, within the same blocks of time.

    A request runs at several loads, so the errors at these loads are not independent.
    """
    control, canary = zip(*loads, strict=True)
    if is_paired:  # both groups have the same P, so block b covers the same minutes in both
        # The control group comes first: the gain of the first group over the second is the canary's
        # loss.
        return sum_correlated([*control, *canary], [*weights, *(-weight for weight in weights)])
    return subtract_independent(sum_correlated(control, weights), sum_correlated(canary, weights))


def _count_had(blocks_BK2: Array) -> Array:
    """Estimate the number of drafts that had a token at each position, [K].

    Among drafts that were rejected earlier, the share with a token at a position is assumed to be
    the same as among the others. This is the estimator of Kaplan and Meier (1958): a draft that is
    too short is a censored observation.
    """
    tried_K, accepted_K = blocks_BK2.sum(0).T
    had_K: Array = tried_K.copy()
    for j in range(1, len(had_K)):
        had_K[j] = had_K[j - 1] * (tried_K[j] / accepted_K[j - 1] if accepted_K[j - 1] else 1)
    return had_K


def _equalise(blocks_BK2: Array, shares_K: Array) -> Array:
    """Compute (accepted, drafts) per block, [2, B], for equal shares of drafts with a token.

    `shares_K` is the share of drafts that have a token at each position. With the shares that a
    block actually had, the results equal its counts.
    """
    tried_BK, accepted_BK = np.moveaxis(blocks_BK2, -1, 0)
    drafts_B, rates_K = tried_BK[:, 0], accepted_BK.sum(0) / np.maximum(tried_BK.sum(0), 1)
    rate, worth_K = 0.0, shares_K.copy()
    for j in reversed(range(len(shares_K))):  # the value of a token includes that of later tokens
        worth_K[j] += rate
        rate = rates_K[j] * worth_K[j]
    # This is the rate over all blocks. A block's deviation counts for more if few drafts had a
    # token.
    worth_K *= drafts_B.sum() / np.maximum(_count_had(blocks_BK2), 1)
    surprises_BK = accepted_BK - rates_K * tried_BK
    return np.stack([rate * drafts_B + surprises_BK @ worth_K, drafts_B])


def estimate_loss_by_domain(
    canary: ByDomain, control: ByDomain, *, is_paired: bool = True
) -> Estimate:
    """Estimate the loss of tau from the (tried, accepted) counts, [P, K, 2], of each domain.

    A key may also contain a load (AT_LOAD). Domains and loads are weighted as in Cochran (1954) and
    Mantel and Haenszel (1959): by how many drafts both groups have in each. Those with few drafts
    in either group, or with drafts in only one block, are left out. If none is left, the error is
    infinite.
    """
    by_domain = defaultdict[str, list[tuple[Groups, float]]](list)
    for name in canary.keys() & control.keys():
        drafts, others = (float(group[name][:, :1, 0].sum()) for group in (canary, control))
        if min(drafts, others) < MIN_DOMAIN_DRAFTS:
            continue
        groups = _equalise_groups(canary[name], control[name])
        # The spread within a single block is unknown: one burst of traffic would make the whole
        # interval infinite.
        if min(np.count_nonzero(drafts_B) for _, drafts_B in groups) > 1:
            # 1 / (1/n + 1/m) is the inverse variance of a difference, if every draft has the same
            # variance.
            weight = drafts * others / (drafts + others)
            by_domain[name.partition(AT_LOAD)[0]].append((groups, weight))
    losses, totals = [], []
    for found in by_domain.values():
        loads, weights = zip(*found, strict=True)
        totals.append(sum(weights))
        shares = [weight / totals[-1] for weight in weights]
        losses.append(_sum_losses(loads, shares, is_paired=is_paired))
    if not losses:
        # `decide` finds an infinite interval inconclusive.
        return Estimate(0.0, math.inf, 1.0)
    return sum_weighted(losses, [total / sum(totals) for total in totals])


def estimate_accepted(polls_PK2: Array) -> Estimate:
    """Estimate one group's accepted tokens per draft, tau - 1.

    Variation in the draft length does not count as error.
    """
    blocks_BK2 = _merge_polls(polls_PK2)
    had_K = _count_had(blocks_BK2)
    return estimate_ratio(*_equalise(blocks_BK2, had_K / np.maximum(had_K[0], 1)))


def decide(loss: Estimate, policy: RolloutPolicy) -> Finding:
    """Decide on a loss of tau. The result is inconclusive while the interval is too wide."""
    low, high = loss.interval(policy.confidence)
    # With a `max_loss` of 0.1: -0.02 to 0.08 passes, 0.12 to 0.30 is worse, -0.10 to 0.30 is
    # inconclusive, and for 0.07 to 0.15 the estimate decides.
    if high <= policy.max_loss:
        return Finding.PASSED
    if low > policy.max_loss:
        return Finding.WORSE
    if (
        high - low < policy.max_loss
    ):  # the loss is close to max_loss, so more traffic would hardly change the decision
        return Finding.PASSED if loss.value <= policy.max_loss else Finding.WORSE
    return Finding.INCONCLUSIVE


def _merge_polls(polls_PK2: Array) -> Array:
    """Merge the polls into at most 8 or 16 blocks of equal length; the last may be shorter."""
    # E.g. 16 polls make 8 blocks of 2; 20 polls, 6 blocks of 3 and one of 2; 64 polls, 16 blocks of
    # 4.
    num_blocks = MIN_BLOCKS if len(polls_PK2) < 4 * MAX_BLOCKS else MAX_BLOCKS
    size = -(-len(polls_PK2) // num_blocks)
    merged_BK2: Array = np.add.reduceat(polls_PK2, np.arange(0, len(polls_PK2), size))
    return merged_BK2


class Polls:
    """The counts of a group for each interval between two readings."""

    def __init__(self, servers: Sequence[FleetServer]) -> None:
        self.servers = servers
        self.rows: list[dict[str, AcceptanceCounts]] = []  # Counts by domain, a row for every poll.
        self.has_domains = True  # Whether all servers count by domain.
        # Versions of the target's weights that were reported.
        self.targets: set[str | None] = set()
        self._last: dict[FleetServer, dict[str, AcceptanceCounts]] = {}
        # Servers that have reported that they choose their own pace.
        self._paced: set[FleetServer] = set()

    def add(self, counted: Mapping[FleetServer, WindowCounts], *, is_usable: bool = True) -> None:
        """Add a reading. The interval since the previous one counts only if it `is_usable`."""
        zero = AcceptanceCounts.zero()
        row = {ALL: zero}
        for server in self.servers:
            if server not in counted:  # an excluded server keeps its earlier counts, but adds none
                continue
            now, earlier = counted[server], self._last.get(server, {})
            counts = self._last[server] = {ALL: now.total, **now.by_domain}
            self.targets.add(now.target)
            if now.is_paced:
                self._paced.add(server)
            # If there are no drafts, an empty `by_domain` is not a miscount.
            self.has_domains &= bool(now.by_domain) or not now.total.num_drafts
            for domain, one in counts.items():
                # Counts only increase, except on a faulty server, whose counts are not added.
                more = one.since(earlier.get(domain, zero)) or zero
                row[domain] = row.get(domain, zero) + more
        if is_usable:
            self.rows.append(row)

    def select(self, domain: str) -> Array:
        """Return (tried, accepted) per poll and position, [P, K, 2]."""
        counts = [row.get(domain, AcceptanceCounts.zero()) for row in self.rows]
        polls = (
            zip(one.tried_per_position, one.accepted_per_position, strict=True) for one in counts
        )
        polls_KP2 = np.array([*zip_longest(*polls, fillvalue=(0, 0))], np.float64)
        return polls_KP2.reshape(-1, len(counts), 2).swapaxes(0, 1)

    @property
    def by_domain(self) -> dict[str, Array]:
        """(tried, accepted) per poll and position, [P, K, 2], for each domain."""
        names = dict.fromkeys(name for row in self.rows for name in row if name != ALL)
        return {name: self.select(name) for name in names}

    @property
    def can_be_compared(self) -> bool:
        """Whether this group has enough drafts in some domain for a comparison by domain."""
        return not self.has_domains or any(
            polls_PK2[:, :1, 0].sum() >= MIN_DOMAIN_DRAFTS for polls_PK2 in self.by_domain.values()
        )

    @property
    def is_paced(self) -> bool:
        """Whether all servers draft only while that is faster, unless someone sets a pace."""
        return self._paced.issuperset(self._last)

    @property
    def is_off(self) -> bool:
        """Whether the servers draft only while that is faster, and hardly draft at all.

        In that case, there is nothing to compare.
        """
        is_seen = bool(self._last) and len(self.rows) >= MIN_POLLS
        return is_seen and self.is_paced and self.total.num_drafts < MIN_DOMAIN_DRAFTS

    @property
    def total(self) -> AcceptanceCounts:
        return sum((row[ALL] for row in self.rows), AcceptanceCounts.zero())


def _describe(counts: AcceptanceCounts) -> str:
    return (
        f"{counts.tau:.3f} ({counts.num_drafts:.0f} drafts)" if counts.num_drafts else "no drafts"
    )


async def _measure_before(
    canary: FleetServer,
    incumbent: str,
    policy: RolloutPolicy,
    measured: Awaitable[Polls | tuple[Finding, str]] | None,
) -> Polls | tuple[Finding, str]:
    """Return the earlier measurement; measure again if the server restarted or was replaced."""
    found = None if measured is None else await measured
    if (isinstance(found, Polls) and found.servers == [canary]) or (
        isinstance(found, tuple) and found[0] is Finding.INCONCLUSIVE
    ):
        return found
    return await measure_alone(canary, incumbent, policy)


async def measure_alone(
    server: FleetServer, incumbent: str, policy: RolloutPolicy
) -> Polls | tuple[Finding, str]:
    """Count until one server's tau is known to within half of `max_loss`, or time is up.

    Return the counts, or why they cannot be measured.
    """
    window = await Window.open([server], server, policy.swap_timeout_s)
    polls = Polls([server])
    if not window.began_with(server, incumbent):
        return Finding.FAILED, f"it does not serve {incumbent}"
    deadline_s = time.monotonic() + policy.window_timeout_s
    while True:
        await asyncio.sleep(policy.poll_s)
        counted = await window.read()
        if server not in counted:
            return Finding.FAILED, "it restarted, lost its draft or stopped answering"
        polls.add(counted)
        if polls.is_off:
            return polls
        has_enough = polls.total.num_drafts >= policy.min_drafts
        if has_enough and polls.can_be_compared and len(polls.rows) >= MIN_POLLS:
            low, high = estimate_accepted(polls.select(ALL)).interval(policy.confidence)
            if high - low < policy.max_loss:
                return polls
        if time.monotonic() > deadline_s:
            if has_enough or polls.is_paced:
                return polls
            too_few = f"fewer than {policy.min_drafts} drafts in {policy.window_timeout_s:.0f} s"
            return Finding.INCONCLUSIVE, f"inconclusive: {too_few}: tau {_describe(polls.total)}"


async def _compare(
    canary: FleetServer,
    candidate: str,
    control: Sequence[FleetServer],
    incumbent: str,
    before: Polls | None,
    policy: RolloutPolicy,
) -> tuple[Finding, str]:
    """Compare both groups' counts over the same time; return the finding and the reason.

    `before` contains counts from before the swap, and replaces a control group.
    """
    window = await Window.open([canary, *control], canary, policy.swap_timeout_s)
    # A server that restarted after the alignment may serve the draft of its command line.
    control = [server for server in control if window.began_with(server, incumbent)]
    ours, theirs = Polls([canary]), before or Polls(control)
    deadline_s = time.monotonic() + policy.window_timeout_s
    # If every poll were tested, an equal draft would be found worse sooner or later, so the groups
    # are compared again only once the number of polls has doubled. With a poll every 5 s, this is
    # after 80, 160, 320 and 640 s at the earliest, and once more at the timeout.
    next_look = MIN_POLLS
    was_one_target = _are_one(window.targets)
    while True:
        await asyncio.sleep(policy.poll_s)
        counted = await window.read()
        # The canary's counters restarted now or during its warm-up, so nothing is known about the
        # candidate.
        if canary not in counted or not window.began_with(canary, candidate):
            return Finding.FAILED, "it restarted, lost its draft or stopped answering"
        is_one_target = _are_one({one.target for one in counted.values()})
        is_usable, was_one_target = is_one_target and was_one_target, is_one_target
        ours.add(counted, is_usable=is_usable)
        if before is None:
            theirs.add(counted, is_usable=is_usable)
        taus = f"tau {_describe(ours.total)} against {_describe(theirs.total)}"
        # On an alarm, waiting for more drafts would only slow down more requests.
        if is_worse_than_control(ours.total, theirs.total):
            return Finding.WORSE, f"hardly any of its draft tokens are accepted: {taus}"
        if theirs.is_off and ours.is_paced:
            # The gate has proven the gain, and a server drafts only while that is faster.
            return Finding.PASSED, f"almost nothing is drafted: {taus}"
        is_late = time.monotonic() > deadline_s
        has_enough = min(ours.total.num_drafts, theirs.total.num_drafts) >= policy.min_drafts
        if has_enough and before is not None and len(ours.targets | before.targets) > 1:
            # The gate has proven the gain, and a rollback because of the trainer's update would
            # lose it.
            return (
                Finding.PASSED,
                f"the target's weights changed, so only an alarm was checked: {taus}",
            )
        reason = f"fewer than {policy.min_drafts} drafts in {policy.window_timeout_s:.0f} s: {taus}"
        # Time is up and the control group has restarted, so its counts can no longer be compared.
        is_lost = deadline_s == math.inf and before is None and counted.keys().isdisjoint(control)
        if has_enough and (len(ours.rows) >= next_look or is_late or is_lost):
            next_look = 2 * len(ours.rows)
            finding, reason = _look(ours, theirs, taus, policy, is_paired=before is None)
            if finding is not Finding.INCONCLUSIVE:
                return finding, reason
        if is_late and ours.is_paced and theirs.is_paced:
            return Finding.PASSED, f"too little is drafted to compare: {taus}"
        if is_lost or (is_late and not policy.keep_inconclusive):
            return Finding.INCONCLUSIVE, f"inconclusive: {reason}"
        # With `keep_inconclusive`, compare until the interval decides.
        if is_late:
            deadline_s = math.inf


def _are_one(targets: set[str | None]) -> bool:
    return len(targets) == 1 and None not in targets


def _look(
    ours: Polls, theirs: Polls, taus: str, policy: RolloutPolicy, *, is_paired: bool
) -> tuple[Finding, str]:
    by_domain = ours.has_domains and theirs.has_domains
    canary, control = (
        polls.by_domain if by_domain else {ALL: polls.select(ALL)} for polls in (ours, theirs)
    )
    loss = estimate_loss_by_domain(canary, control, is_paired=is_paired)
    finding = decide(loss, policy)
    low, high = loss.interval(policy.confidence)
    what = "interval of the loss by position" + " and domain" * by_domain
    spread = f"{100 * policy.confidence:g}% {what} {low:+.3f} to {high:+.3f}"
    if finding is Finding.WORSE:
        return finding, f"{loss.value:.3f} worse, {policy.max_loss} allowed: {taus}, {spread}"
    return finding, f"{taus}, {spread}"


async def _watch(
    done: Sequence[FleetServer], control: Sequence[FleetServer], policy: RolloutPolicy
) -> str:
    """Return the reason for an alarm after `watch_s`; empty if there is no alarm.

    Afterwards, the learner's own watch takes over.
    """
    if not control:
        return ""
    window = await Window.open([*done, *control])
    await asyncio.sleep(policy.watch_s)
    counted = await window.read()
    # A single server that a trainer updated late or early is no reason to roll back.
    common = Counter(one.target for one in counted.values()).most_common(1)
    counted = {server: one for server, one in counted.items() if one.target == common[0][0]}
    ours, theirs = (
        sum(
            (counted[server].total for server in group if server in counted),
            AcceptanceCounts.zero(),
        )
        for group in (done, control)
    )
    if is_worse_than_control(ours, theirs):
        taus = f"tau {_describe(ours)} against {_describe(theirs)} on the other servers"
        return f"{len(done)} servers accept hardly any draft tokens: {taus}"
    return ""


def is_worse_than_control(ours: AcceptanceCounts, control: AcceptanceCounts) -> bool:
    """Whether hardly any of our draft's tokens are accepted, unlike the control group's.

    If neither is accepted, the cause is the traffic: a few clients at temperature 2 lower any
    draft's acceptance.
    """
    return is_alarming(ours) and control.num_drafts >= ALARM_DRAFTS and not is_alarming(control)


def _are_too_many(
    absent: dict[str, str], servers: Sequence[FleetServer], policy: RolloutPolicy
) -> bool:
    """Whether more servers than chance explains have stopped answering.

    One of several is tolerated.
    """
    num_absent = sum(server.url in absent for server in servers)
    # With a share of 0.1, one of 10 servers may be silent, or 4 of 40.
    return num_absent == len(servers) or num_absent > max(1, policy.max_absent_share * len(servers))


def _split_into_waves(
    servers: Sequence[FleetServer], policy: RolloutPolicy
) -> Iterator[Sequence[FleetServer]]:
    # E.g. 10 servers and waves up to 0.1, 0.5 and 1.0 give waves of 1, 4 and 5 servers. With 3
    # servers, the first wave is empty, and the others have 2 and 1.
    # A wave includes the canary, which already has the candidate and is not swapped again.
    begin = 0
    for share in policy.waves:
        end = max(begin, round(share * len(servers)))
        if end > begin:
            yield servers[begin:end]
        begin = end


async def _roll_back(
    servers: Sequence[FleetServer],
    incumbent: str,
    why: str,
    policy: RolloutPolicy,
    finding: Finding = Finding.FAILED,
) -> Outcome:
    return _outcome(finding, why, await converge(servers, incumbent, policy.rollback_timeout_s))


def _outcome(finding: Finding, reason: str, fleet: Convergence, version: str = "") -> Outcome:
    return Outcome(
        passed=finding is Finding.PASSED,
        version=version or fleet.version,
        reason=reason,
        refused=fleet.refused,
        absent=fleet.absent,
        is_inconclusive=finding is Finding.INCONCLUSIVE,
    )
