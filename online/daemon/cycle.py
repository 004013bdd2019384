"""The learner's cycle through the phases.

Each phase does its work and ends with an event (`state` has the table of transitions).

    phase        work                                            ends with
    idle         waits for new records or a request to swap, or  begin, swap requested
                 sleeps while training is not worth it
    training     steps until enough new records are trained      trained; failed: not finite, interrupted
    judging      candidate and incumbent on held-out requests    promoted, rejected, inconclusive
    publishing   copies the checkpoint's draft to the registry   published; rejected: the checkpoint is damaged
    canary       one server, against the others                  passed, rolled back, recalled
    rolling      the other servers in waves                      rolled out and current, rolled back, recalled
    halted       waits until the servers serve our target        resume

The work of every phase can be repeated from the start, and is repeated if the learner was killed.
While a disk cannot be written, the phase waits. A finding of the watch or a user's request waits in
the `inbox` until a phase can take it: `report_problem`, and `rollouts.request_swap` and
`rollouts.go_back`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from redraft.files.artifact import FileEntry, manifest, verify
from redraft.files.target_folder import TargetFolder
from redraft.online.daemon.account import Account, name_disk_fault
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.inbox import Inbox
from redraft.online.daemon.judging import Judge
from redraft.online.daemon.memory import release_memory
from redraft.online.daemon.rollouts import Rollouts
from redraft.online.daemon.sleep import Sleeper
from redraft.online.daemon.state import (
    AFTER_DAMAGE,
    TRANSITIONS,
    Event,
    Move,
    Phase,
    SavedState,
    State,
    advance,
    load,
)
from redraft.online.fleet.registry import Registry, copy_model
from redraft.online.fleet.rollout import Outcome, roll_waves
from redraft.online.fleet.server import ask_drafting
from redraft.online.fleet.watch import JournaledServer
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.candidate import DRAFT, NotFiniteError
from redraft.online.learning.cursor import SERVED
from redraft.online.learning.gate import Decision, Verdict
from redraft.online.learning.trainer import Trainer

T = TypeVar("T")
POLL_S = 0.1  # Seconds between two checks for work.
DISK_RETRY_S = 10.0
CYCLE = "cycle"  # detail of a disk's fault for which a phase waits
GOES_ON = "training continues from"  # beginning of the journal entry for a learner's start


class Cycle:
    def __init__(
        self, cfg: LearnerConfig, target_fingerprint: str, registry: Registry, buffer: Buffer, trainer: Trainer,
        servers: Sequence[JournaledServer], account: Account,
    ) -> None:  # fmt: skip
        self.cfg, self.target_fingerprint = cfg, target_fingerprint
        self.registry, self.trainer, self.servers, self.account = (
            registry,
            trainer,
            servers,
            account,
        )
        self.inbox = Inbox()
        self.judge = Judge(cfg, registry, buffer, trainer.candidate)
        state_path = cfg.folder / "state.json"
        # Starting in idle is always safe, because the watch brings every server to the current
        # version.
        state = account.load_or_set_aside(
            load, state_path, AFTER_DAMAGE, "the learner starts in the idle phase"
        )
        self.saved = SavedState(path=state_path, state=state)
        self.rollouts = Rollouts(cfg, registry, trainer, servers, self.saved, self.inbox, account)
        # torch runs on a separate thread, so that ingest and watch continue during a training step.
        self._thread = ThreadPoolExecutor(1, "trainer")
        self.sleeper = Sleeper(cfg, self.judge, account)
        self._num_without_gain = 0
        """Number of candidates without a gain since the last promotion, sleep or rollout without a
        result. At `patience`, BEGIN_AGAIN is posted.
        """
        self._phases: dict[Phase, Callable[[], Awaitable[Move | None]]] = {
            Phase.IDLE: self._idle,
            Phase.TRAINING: self._train,
            Phase.JUDGING: self._judge,
            Phase.PUBLISHING: self._publish,
            Phase.CANARY: self._canary,
            Phase.ROLLING: self._roll,
            Phase.HALTED: self._wait_for_resume,
        }

    @property
    def state(self) -> State:
        return self.saved.state

    @property
    def current(self) -> str:
        return self.rollouts.current

    async def run(self) -> None:
        began_from = await self.in_thread(self.trainer.start)
        for problem in self.trainer.damage:
            self.account.fault("checkpoint_damaged", problem)
        self.account.state(
            self.state,
            f"{GOES_ON} {self.current if began_from == SERVED else began_from}",
            promoted=self.rollouts.count_promoted(),
        )
        if began_from == SERVED and self.state.phase in (Phase.JUDGING, Phase.PUBLISHING):
            await self._advance(
                Move(
                    Event.REJECTED, reason=f"training has begun again since {self.saved.candidate}"
                )
            )
        while True:
            # Both events are handled between phases only. Training checks for them before every
            # step, and stops early.
            if halt := self.inbox.take(Event.HALT):
                await self._advance(halt)
            if (self.state.phase, Event.BEGIN_AGAIN) in TRANSITIONS and self.inbox.take(
                Event.BEGIN_AGAIN
            ):
                await self._until_written(lambda: self.in_thread(self.trainer.begin_again))
                await self._advance(
                    Move(Event.BEGIN_AGAIN, reason=f"training begins again from {self.current}")
                )
            move = await self._phases[self.state.phase]()
            if move is not None:
                await self._advance(move)

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` on the thread that owns the draft in training."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def close(self) -> None:
        """Save the training done since the last checkpoint, and let the other ranks exit."""
        await self.rollouts.reconciler.stop()
        await self.rollouts.stop_measuring()
        try:
            # `_save_checkpoint` waits for the current step, because the thread runs one job at a
            # time.
            if self.trainer.num_steps:
                await self._save_checkpoint()
        finally:
            await self.in_thread(self.trainer.ranks.dismiss)
            self._thread.shutdown()

    # -----------------------------------------------------------------------------------------------
    # from outside

    def report_problem(self, problem: str) -> None:
        """Report the watch's latest finding.

        The finding is a reason to halt, or an empty string if there is none. Only the latest
        finding counts: a problem that disappears before the current phase ends does not halt the
        learner.
        """
        is_halted = self.state.phase is Phase.HALTED
        self.inbox.settle(Event.HALT)
        self.inbox.settle(Event.RESUME)
        if problem and not is_halted:
            self.inbox.post(Move(Event.HALT, reason=problem))
        elif is_halted and not problem:
            self.inbox.post(Move(Event.RESUME))

    async def judge_draft(self, draft: Path) -> Verdict:
        """Return the gate's verdict on the draft in a folder, compared with the current version.

        Both are evaluated with the servers' drafting settings.
        """
        drafting = self.judge.draft_as(await ask_drafting(self.servers))
        verdict = await self.in_thread(
            self.judge.judge_draft, draft, self.current, self.state.num_looks + 1
        )
        return replace(verdict, reason=f"{verdict.reason} ({drafting})")

    # -----------------------------------------------------------------------------------------------
    # the phases

    async def _idle(self) -> Move | None:
        if swap := self.rollouts.find_swap():
            return swap
        newest, num_waiting = await self.in_thread(self.trainer.find_waiting)
        if self.sleeper.sleep.is_asleep_at(self.current):
            if num_waiting >= self.cfg.training.records_per_candidate:
                return await self._look_around(newest, num_waiting)
        elif num_waiting >= self.cfg.training.fresh_per_step:
            return Move(Event.BEGIN)
        await asyncio.sleep(POLL_S)
        return None

    async def _look_around(self, newest: int, num_waiting: int) -> Move | None:
        """Decide whether a sleeping learner with enough new records for a candidate should wake.

        If the learner stays asleep, it skips the records up to `newest`. Records that arrive during
        this check are considered in the next one.
        """
        sleeper, current = self.sleeper, self.current
        self.judge.draft_as(await ask_drafting(self.servers))
        staleness = await self.in_thread(sleeper.measure, current)
        if reason := sleeper.find_reason_to_wake(staleness, num_waiting):
            sleeper.save(
                sleeper.sleep.wake(), current, staleness, f"training begins again: {reason}"
            )
            return Move(Event.BEGIN, reason=reason)
        await self._until_written(lambda: self.in_thread(self.trainer.pass_over, newest))
        sleeper.save(
            sleeper.sleep.pass_over(num_waiting), current, staleness, "training is not worth it"
        )
        return None

    async def _train(self) -> Move | None:
        trainer, began_s, saved_s = self.trainer, time.monotonic(), time.monotonic()
        # After a kill, counting restarts at the resumed checkpoint, so a candidate may be trained
        # on more records, but not on fewer.
        wanted = trainer.progress.records + self.cfg.training.records_per_candidate
        while Event.BEGIN_AGAIN not in self.inbox:
            if trainer.progress.records >= wanted:
                return await self._end_training()
            if waiting := self.inbox.find(Event.HALT, Event.SWAP_REQUESTED):
                await self._save_checkpoint()
                is_halt = waiting.event is Event.HALT
                reason = (
                    waiting.reason if is_halt else "interrupted by a swap that a user requested"
                )
                return Move(Event.FAILED, reason=reason)
            stats = await self.in_thread(trainer.step)
            if stats is None:
                await asyncio.sleep(POLL_S)
                continue
            # Measured from the end of one step to the end of the next, so tokens/s falls while new
            # records are scarce.
            now_s = time.monotonic()
            self.account.step(stats, trainer, now_s - began_s)
            began_s = now_s
            if trainer.has_diverged:
                return await self._discard("the loss was not finite")
            if time.monotonic() - saved_s > self.cfg.training.save_every_s:
                await self._save_checkpoint()
                saved_s = time.monotonic()
        return None

    async def _end_training(self) -> Move:
        try:
            name = await self._until_written(lambda: self.in_thread(self.trainer.checkpoint))
        except NotFiniteError:
            return await self._discard("the weights are not finite")
        return Move(Event.TRAINED, name, f"{self.trainer.progress.records} records")

    async def _judge(self) -> Move:
        name, learning = self.saved.candidate, self.trainer.candidate
        paused_s = learning.paused_s
        self.rollouts.begin_measuring()
        try:
            verdict = await self.judge_draft(self.trainer.folder / name / DRAFT)
        except (OSError, ValueError) as error:
            return Move(Event.REJECTED, reason=f"{name} cannot be read: {error}")
        self.account.verdict(verdict, name, self.current, learning.paused_s - paused_s)
        if (
            verdict.overall is not None
        ):  # saved with the event, so that a kill before it repeats the same comparison
            self.saved.state = replace(self.state, num_looks=self.state.num_looks + 1)
        if verdict.decision is Decision.PROMOTE:
            return Move(Event.PROMOTED, reason=verdict.reason)
        if verdict.overall is not None:
            staleness = await self.in_thread(
                self.sleeper.measure, self.current
            )  # may set the reference
            self.sleeper.save(self.sleeper.sleep, self.current, staleness, "")
        is_rejected = verdict.decision is Decision.REJECT
        # This applies whether or not a small gain is proven: a candidate without even an estimated
        # gain shows no promise.
        if is_rejected or (
            verdict.overall is not None and verdict.overall.value <= self.cfg.gate.min_gain
        ):
            self._count_without_gain()
        return Move(Event.REJECTED if is_rejected else Event.INCONCLUSIVE, reason=verdict.reason)

    async def _publish(self) -> Move | None:
        try:
            version = await self._until_written(lambda: asyncio.to_thread(self._publish_candidate))
        except (FileNotFoundError, ValueError) as error:
            return Move(
                Event.REJECTED, reason=f"{self.saved.candidate} cannot be published: {error}"
            )
        # Also without a promotion: in light traffic, canary after canary may end without a result.
        await self.rollouts.prune()
        async with (
            self.rollouts.fleet
            # A rollback in progress must end first, because it does not withdraw a waiting canary.
        ):
            return None if Event.BEGIN_AGAIN in self.inbox else Move(Event.PUBLISHED, version)

    async def _canary(self) -> Move:
        event, outcome = await self.rollouts.try_canary()
        if event is not Event.PASSED:
            return self._end_rollout(event, outcome)
        return Move(Event.PASSED, reason=outcome.reason)

    async def _roll(self) -> Move:
        version = self.saved.candidate
        event, outcome = await self.rollouts.run(roll_waves)
        if event is not Event.PASSED:
            return self._end_rollout(event, outcome)
        try:
            # Promoted last: until then, `current` names the version to return to after a failure.
            await self._until_written(
                lambda: asyncio.to_thread(self.registry.promote, version), unless=Event.RECALLED
            )
        # The version was damaged after the servers read it, or a recall ended the wait for a disk.
        except (OSError, ValueError) as error:
            return self._end_rollout(Event.ROLLED_BACK, await self.rollouts.take_back(str(error)))
        self._num_without_gain = 0
        await self.rollouts.prune()
        if self.state.is_by_person:
            await self.rollouts.leave_training()
        self.rollouts.answer_swap(outcome)
        return Move(Event.ROLLED_OUT, reason=outcome.reason)

    async def _wait_for_resume(self) -> Move | None:
        await self.inbox.wait_for(Event.RESUME)
        return self.inbox.take(Event.RESUME)

    # -----------------------------------------------------------------------------------------------
    # their helpers

    async def _discard(self, why: str) -> Move:
        self.account.fault("loss_not_finite")
        await self._until_written(lambda: self.in_thread(self.trainer.discard))
        return Move(Event.FAILED, reason=f"{why}: the candidate was discarded")

    async def _save_checkpoint(self) -> None:
        """Write a checkpoint if there is anything to save.

        A failure is only reported, and training continues without the checkpoint.
        """
        if not self.trainer.num_steps or Event.BEGIN_AGAIN in self.inbox:
            return
        try:
            await self.in_thread(self.trainer.checkpoint)
        except NotFiniteError:
            self.account.fault("loss_not_finite")
        except OSError as error:
            self.account.disk_fault(error)

    async def _until_written(
        self, work: Callable[[], Awaitable[T]], unless: Event | None = None
    ) -> T:
        """Return the result of `work`, repeated while a disk cannot be written.

        Raises:
            FileNotFoundError, ValueError, NotFiniteError: if `work` raises it, because waiting
                would not help.
            OSError: the disk cannot be written, and the event `unless` waits in the inbox.
        """
        told = ""
        try:
            while True:
                try:
                    return await work()
                # Caught first, because FileNotFoundError is an OSError too.
                except FileNotFoundError:
                    raise
                except OSError as error:
                    if unless and unless in self.inbox:
                        raise
                    # The first error stays the reason, because later ones may name other files.
                    told = told or str(error)
                    self.account.begin_fault(name_disk_fault(error), CYCLE, told)
                    await asyncio.sleep(DISK_RETRY_S)
        finally:
            self.account.end_faults("disk_full", "disk_unwritable", detail=CYCLE)

    def _count_without_gain(self) -> None:
        """Count a candidate without a gain; after `patience` of them, post BEGIN_AGAIN.

        Training then restarts from the served version, after a sleep if the settings enable it.
        """
        self._num_without_gain += 1
        if self._num_without_gain < self.cfg.training.patience:
            return
        self._num_without_gain = 0
        self.inbox.post(Move(Event.BEGIN_AGAIN))
        self.sleeper.fall_asleep(self.current)

    def _publish_candidate(self) -> str:
        """Return the version that contains the candidate's draft; publish it unless it exists."""
        folder, prefix = self.trainer.folder / self.saved.candidate, f"{DRAFT}/"
        # Check every byte, because publishing computes a new manifest, which would hide any
        # corruption.
        files = {
            name[len(prefix) :]: entry
            for name, entry in verify(folder).items()
            if name.startswith(prefix)
        }
        latest = self.registry.latest()
        if latest and self._holds(latest, files):
            return latest  # the learner was killed between publishing and saving the state
        return self.registry.publish(
            lambda partial: copy_model(folder / DRAFT, partial),
            target_fingerprint=self.target_fingerprint,
            provenance={
                "target_lineage": TargetFolder.open(self.cfg.target).lineage,
                "adapter": self.cfg.draft.adapter,
                "target_version": "".join(self.judge.buffer.served_target().rpartition("@")[1:]),
                "trained_from": self.current,
                "records": self.trainer.progress.records,
                "trained_until_s": self.trainer.progress.until_s,
                "trained_through": self.trainer.progress.through,
            },
            evaluation={
                "verdict": self.state.reason,
                "judging": asdict(self.judge.judging),
                "gate": asdict(self.cfg.gate),
            },
        )

    def _holds(self, version: str, files: Mapping[str, FileEntry]) -> bool:
        """Return whether the version contains these files; False if the version is damaged."""
        try:
            # Check for a subset: the version also has the files added at publication, e.g. STABLE.
            return files.items() <= manifest(self.registry.path(version)).items()
        except (OSError, ValueError):
            return False

    def _end_rollout(self, event: Event, outcome: Outcome) -> Move:
        # A version that a user chose is no evidence about the training.
        if not self.state.is_by_person:
            if event is Event.INCONCLUSIVE:  # only the gate has a result: a proven gain
                self._num_without_gain = 0
            else:
                self._count_without_gain()
        self.rollouts.answer_swap(outcome)
        return Move(event, reason=outcome.reason)

    async def _advance(self, move: Move) -> None:
        state = advance(self.state, move.event, candidate=move.candidate, reason=move.reason)

        # Nothing is awaited here, so that code that receives the event finds the new state.
        async def write() -> None:
            self.saved.write(state)

        await self._until_written(write)
        if state.phase not in (Phase.PUBLISHING, Phase.CANARY):
            await self.rollouts.stop_measuring()
        resident_bytes = await self.in_thread(release_memory)
        self.account.state(state, state.reason, resident_bytes, self.rollouts.count_promoted())
        if not state.is_rolling_out:  # otherwise, a late recall would end the next rollout
            self.inbox.settle(Event.RECALLED)
