"""The alarm, raised if a server accepts hardly any draft tokens of the current version.

Held-out requests decide whether to roll back.

    watch ─ counters below the limit ─► report ─► compare with the previous version ─► roll back or stay

A server's counters include the requests of all clients, and a few clients at temperature 2 can
lower them for any draft. They therefore only trigger the comparison. After a promotion, there is at
most one automatic rollback: one version can be bad, but if the previous version looks bad as well,
the traffic has changed. After a rollout, no server runs the previous version, so there is no
control group; the held-out requests replace it.
"""

import asyncio
import time
from collections import Counter

from redraft.online.daemon.account import Account
from redraft.online.daemon.cycle import Cycle
from redraft.online.records.guard import Guard

# Minimum seconds between two comparisons, because scoring two drafts interrupts training.
REST_S = 600.0


class Alarm:
    def __init__(self, cycle: Cycle, account: Account, guard: Guard) -> None:
        self.cycle, self.account, self.guard = cycle, account, guard
        self._reported = asyncio.Event()
        self._server = self._version = ""
        self._looks = Counter[str]()
        # The monotonic clock may start near 0, so the first report is handled at once.
        self._answered_s = -REST_S
        self._told = ""

    def report(self, server: str, version: str) -> None:
        """Report that a server accepts hardly any draft tokens from this version.

        Returns at once; `run` investigates.
        """
        if version != self._version:
            self._answered_s = -REST_S
        if time.monotonic() - self._answered_s >= REST_S:
            self._server, self._version = server, version
            self._reported.set()

    async def run(self) -> None:
        while True:
            await self._reported.wait()
            with self.guard.round("alarm"):
                await self._answer(self._server, self._version)
            self._answered_s = time.monotonic()
            # Cleared last, so that reports made during the comparison do not trigger another one.
            self._reported.clear()

    async def _answer(self, server: str, version: str) -> None:
        cycle = self.cycle
        previous = cycle.registry.previous()
        if previous is None:
            self._fault("nothing_to_go_back_to", version)
            return
        if cycle.state.has_gone_back:
            self._tell(
                f"stays on {version}: the fleet was already rolled back, which happens at "
                "most once after a promotion"
            )
            return
        self._looks[version] += 1
        try:
            is_worse, why = await cycle.in_thread(
                cycle.judge.find_loss, version, previous, self._looks[version]
            )
            # The comparison took time, so a rollout may have started or ended since.
            if is_worse and version == cycle.current and not cycle.state.is_rolling_out:
                reason = f"{server} accepts hardly any draft tokens of {version}, and {why}"
                await cycle.rollouts.go_back(reason, alarmed=version)
            elif not is_worse:
                self._tell(
                    f"stays on {version}, although {server} accepts hardly any of its tokens: {why}"
                )
        except (OSError, ValueError):  # the previous version is missing or damaged
            self._fault("nothing_to_go_back_to", version)

    def _tell(self, sentence: str) -> None:
        if sentence != self._told:
            self._told = sentence
            self.account.state(self.cycle.state, sentence)

    def _fault(self, name: str, detail: str) -> None:
        if name + detail != self._told:
            self._told = name + detail
            self.account.fault(name, detail=detail)
