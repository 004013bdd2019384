"""Rollouts of a version to the servers, by a promotion or a user, and rollbacks.

Only one swap runs at a time. Whoever swaps drafts holds the lock `fleet`. The reconciler does not
hold it, but starts nothing while it is locked.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from redraft.online.daemon.account import Account
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.inbox import Inbox
from redraft.online.daemon.state import Event, Move, SavedState
from redraft.online.fleet.reconciler import Reconciler
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.rollout import Finding, Outcome, Polls, measure_alone, try_canary
from redraft.online.fleet.server import Convergence, FleetServer
from redraft.online.fleet.watch import JournaledServer
from redraft.online.learning.trainer import Trainer


class Rollouts:
    def __init__(
        self, cfg: LearnerConfig, registry: Registry, trainer: Trainer,
        servers: Sequence[JournaledServer], saved: SavedState, inbox: Inbox, account: Account,
    ) -> None:  # fmt: skip
        self.cfg, self.registry, self.trainer, self.servers = cfg, registry, trainer, servers
        self.saved, self.inbox, self.account = saved, inbox, account
        self.fleet = asyncio.Lock()
        self.reconciler = Reconciler()
        self._measured: asyncio.Task[Polls | tuple[Finding, str]] | None = None

    @property
    def current(self) -> str:
        """The version that the fleet should serve."""
        current = self.registry.current()
        assert current is not None, "the learner begins with a version"
        return current

    def count_promoted(self) -> int | None:
        """The number of versions promoted after the first, not counting those rolled back.

        None if the registry cannot be read.
        """
        with suppress(OSError):
            return max(0, len(self.registry.promoted()) - 1)
        return None

    def reconcile(self, servers: Sequence[FleetServer]) -> None:
        """Start swapping these servers to the current version, unless a rollout is in progress."""
        if not self.fleet.locked():
            self.reconciler.push(servers, self.current)

    # ------------------------------------------------------------------------------------ a rollout

    def begin_measuring(self) -> None:
        """Measure a server before its swap to a candidate, while the candidate is evaluated."""
        if len(self.servers) == 1:
            only = measure_alone(self.servers[0], self.current, self.cfg.rollout)
            self._measured = asyncio.ensure_future(only)

    async def stop_measuring(self) -> None:
        measured, self._measured = self._measured, None
        if measured is not None:
            measured.cancel()
            await asyncio.gather(measured, return_exceptions=True)

    async def try_canary(self) -> tuple[Event, Outcome]:
        return await self.run(partial(try_canary, measured=self._measured))

    async def run(self, part: Callable[..., Coroutine[Any, Any, Outcome]]) -> tuple[Event, Outcome]:
        """Run one part of the rollout until it ends or a recall reverts it."""
        async with self.fleet:
            await self.reconciler.stop()
            # The pushes must have ended, because a push in progress would put the incumbent back on
            # the canary.
            outcome = await self._run_unless_recalled(
                lambda: part(self.servers, self.saved.candidate, self.current, self.cfg.rollout)
            )
            if outcome is not None:
                failed = Event.INCONCLUSIVE if outcome.is_inconclusive else Event.ROLLED_BACK
                return Event.PASSED if outcome.passed else failed, outcome
        # Outside the block, because `take_back` acquires the same lock, which is not re-entrant.
        return Event.RECALLED, await self.take_back("recalled")

    async def take_back(self, why: str) -> Outcome:
        """Swap every server to the current version."""
        async with self.fleet:
            back = await self.reconciler.bring_all(
                self.servers, self.current, self.cfg.rollout.rollback_timeout_s
            )
            return Outcome(passed=False, version=self.current, reason=f"{why}: {back}")

    async def _run_unless_recalled(
        self, start: Callable[[], Coroutine[Any, Any, Outcome]]
    ) -> Outcome | None:
        """Return the outcome of the rollout, or None if a recall ended it first."""
        if Event.RECALLED in self.inbox:
            return None
        running = asyncio.ensure_future(start())
        recall = asyncio.ensure_future(self.inbox.wait_for(Event.RECALLED))
        try:
            await asyncio.wait({running, recall}, return_when=asyncio.FIRST_COMPLETED)
            # If both happen at once, the outcome takes precedence, and the recall ends the next
            # part, if any.
            return running.result() if running.done() else None
        finally:
            running.cancel()
            recall.cancel()
            # The last request to a server must have ended before another swap starts.
            await asyncio.gather(running, recall, return_exceptions=True)

    async def prune(self) -> None:
        """Remove old versions.

        Old versions only take up space, so after a failure the next rollout tries again.
        """
        in_use = {server.seen for server in self.servers if server.seen}
        # A checkpoint contains the config and layout of the version that its training started from.
        in_use.add(self.trainer.candidate.version.name)
        if (swap := self.inbox.find(Event.SWAP_REQUESTED)) and swap.candidate:
            in_use.add(swap.candidate)
        try:
            await asyncio.to_thread(self.registry.prune, self.cfg.keep_versions, in_use)
        except OSError as error:
            self.account.disk_fault(error)

    # ------------------------------------------------------------------------------ a person's swap

    async def request_swap(self, version: str) -> Outcome:
        """Roll out a version that a user chose; this bypasses the gate but not the canary.

        The rollout starts when the learner is next idle. The call returns when the rollout has
        ended.

        Raises:
            FileNotFoundError: the version does not exist.
            ValueError: another swap has been requested and has not ended.
        """
        self.registry.path(version)
        if pending := self.inbox.find(Event.SWAP_REQUESTED):
            raise ValueError(
                f"{pending.candidate} is already requested and being rolled out: wait for it"
            )
        settled = self.inbox.post(Move(Event.SWAP_REQUESTED, version, "chosen by a user"))
        try:
            # Without the shield, a cancellation would end the future but leave the request.
            outcome: Outcome = await asyncio.shield(settled)
            return outcome
        finally:
            if (
                not settled.done()
            ):  # cancelled; after the rollout, a waiting request would be another caller's
                self.inbox.settle(Event.SWAP_REQUESTED)

    def find_swap(self) -> Move | None:
        """Return the swap to start now, if a user is waiting for one."""
        # It stays in the inbox until the rollout has ended, so that it is resumed after a halt.
        swap = self.inbox.find(Event.SWAP_REQUESTED)
        if swap is None or swap.candidate != self.current:
            return swap
        already = Outcome(
            passed=True, version=self.current, reason="it is already the current version"
        )
        self.inbox.settle(Event.SWAP_REQUESTED, already)
        return None

    def answer_swap(self, outcome: Outcome) -> None:
        """Report the outcome to the user who is waiting for this rollout, if any."""
        swap = self.inbox.find(Event.SWAP_REQUESTED)
        if swap and swap.candidate == self.saved.state.candidate:
            self.inbox.settle(Event.SWAP_REQUESTED, outcome)

    # ----------------------------------------------------------------------------------------- back

    async def go_back(self, reason: str, to: str = "", *, alarmed: str = "") -> Convergence:
        """Take back the candidate of the running rollout, or otherwise the current version.

        Return the version that is served afterwards. With `to`, go back to that version, which may
        be the current one, and restart training from it. `alarmed` is the version that an alarm
        withdraws; it may have been withdrawn by a user in the meantime. The call does not wait for
        servers that hang: they are swapped to that version in the background.

        Raises:
            FileNotFoundError: there is no version before the current one, or `to` was never
                current.
        """
        if self.saved.state.is_rolling_out:
            candidate = self.saved.candidate
            # Shielded, because two requests may wait for one recall, and one of them may be
            # cancelled.
            await asyncio.shield(self.inbox.post(Move(Event.RECALLED, reason=reason)))
            if self.current != candidate and not to:
                # Otherwise, the recall came after the promotion.
                return Convergence(version=self.current)
        async with self.fleet:
            if alarmed and alarmed != self.current:
                return Convergence(version=self.current)
            await self.reconciler.stop()
            # Done first, so that an interrupted rollback ends at the same version after a restart.
            # Rolling back reads the whole version.
            version = await self._roll_registry_back(to, is_automatic=bool(alarmed))
            await self.leave_training()
            back = await self.reconciler.bring_all(
                self.servers, version, self.cfg.rollout.rollback_timeout_s
            )
        why = f"went back to {version} ({back}): {reason}"
        self.account.state(self.saved.state, why, promoted=self.count_promoted())
        return back

    async def leave_training(self) -> None:
        """Reset training, so that no weights trained from the withdrawn version are published."""
        self.inbox.post(Move(Event.BEGIN_AGAIN))
        try:
            await asyncio.to_thread(self.trainer.give_up)
        except OSError as error:  # a full disk must not stop a rollback
            self.account.disk_fault(error)

    async def _roll_registry_back(self, to: str, *, is_automatic: bool) -> str:
        """Roll the registry back; return the version that is now current.

        A second automatic rollback is allowed only after another promotion.
        """
        if (
            is_automatic
        ):  # saved first, because after a kill, a missing rollback is better than a second one
            self._note_rollback(True)
        try:
            return await asyncio.to_thread(self.registry.rollback, to)
        except (OSError, ValueError):
            if is_automatic:
                self._note_rollback(False)
            raise

    def _note_rollback(self, has_gone_back: bool) -> None:
        self.saved.state = replace(self.saved.state, has_gone_back=has_gone_back)
        try:
            self.saved.write(self.saved.state)
        except OSError as error:  # a full disk must not stop a rollback
            self.account.disk_fault(error)
