"""The learner's way round its phases: what is done in each, and which event comes of it (`online.state` has the table).

    phase        does                                            ends with
    idle         waits for fresh records or a person's wish      begin, swap requested
    training     steps until enough new records are trained      trained; failed: not finite, interrupted
    judging      candidate and incumbent on held-out requests    promoted, rejected, inconclusive
    publishing   copies the checkpoint's draft to the registry   published; a full disk is waited for
    canary       one server, against the others                  passed, rolled back
    rolling      the other servers in waves                      rolled out and current, rolled back
    halted       waits until the servers serve our target        resume

Every phase can be done again from its start, which is what happens after a kill. Meanwhile, from outside: `problem`
halts, `request_swap` goes past the gate, `go_back` returns the fleet to the version before.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from distill.train import StepStats
from heads.artifact import manifest
from online.buffer import Buffer
from online.candidate import DRAFT, NotFiniteError
from online.config import LearnerConfig
from online.fleet import converge
from online.gate import Decision, Scored, Verdict, judge
from online.journal import Journal
from online.judge import by_request, score
from online.records import Record
from online.registry import Registry
from online.rollout import Outcome, roll_waves, try_canary
from online.state import Event, Phase, advance, load, save
from online.trainer import SERVED, Trainer
from online.watch import JournaledServer

T = TypeVar("T")

POLL_S = 0.1
"""Between two looks at whether there is anything to do."""

DISK_RETRY_S = 10.0


class Move(NamedTuple):
    event: Event
    candidate: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class SwapRequest:
    version: str
    done: asyncio.Future[Outcome]


class Cycle:
    def __init__(
        self, cfg: LearnerConfig, target_fingerprint: str, registry: Registry, buffer: Buffer, trainer: Trainer,
        servers: Sequence[JournaledServer], journal: Journal,
    ) -> None:  # fmt: skip
        self.cfg, self.target_fingerprint = cfg, target_fingerprint
        self.registry, self.buffer, self.trainer, self.servers, self.journal = (
            registry, buffer, trainer, servers, journal,
        )  # fmt: skip
        self.problem = ""
        """Why the learner must not go on; empty where it may."""
        self.fleet = asyncio.Lock()
        """Held by whoever swaps drafts."""
        self._state_path = cfg.folder / "state.json"
        self.state = load(self._state_path)
        self._thread = ThreadPoolExecutor(1, "trainer")  # torch's own, so that ingest and watch go on beside it
        self._swap: SwapRequest | None = None
        self._rollout: asyncio.Future[Outcome] | None = None
        self._is_recalled = self._is_to_begin_again = False
        self._num_without_gain = 0
        self._phases: dict[Phase, Callable[[], Awaitable[Move | None]]] = {
            Phase.IDLE: self._idle,
            Phase.TRAINING: self._train,
            Phase.JUDGING: self._judge,
            Phase.PUBLISHING: self._publish,
            Phase.CANARY: self._canary,
            Phase.ROLLING: self._roll,
            Phase.HALTED: self._wait,
        }

    @property
    def current(self) -> str:
        """The version that the fleet should serve."""
        current = self.registry.current()
        assert current is not None, "the learner begins with a version"
        return current

    @property
    def is_rolling_out(self) -> bool:
        return self.state.phase in (Phase.CANARY, Phase.ROLLING)

    async def run(self) -> None:
        """Go round for ever."""
        began_from = await self.in_thread(self.trainer.start)
        self._note(f"training goes on from {self.current if began_from == SERVED else began_from}")
        while True:
            if self.problem and self.state.phase is not Phase.HALTED:
                self._advance(Move(Event.HALT, reason=self.problem))
            move = await self._phases[self.state.phase]()
            if move is not None:
                self._advance(move)

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """What `work` returns on the thread that owns the draft in training."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def close(self) -> None:
        """Keep what was trained since the last checkpoint, and let the other ranks go."""
        try:
            if self.trainer.num_steps:
                await self._checkpoint()
        finally:
            await self.in_thread(self.trainer.ranks.dismiss)
            self._thread.shutdown()

    # ----------------------------------------------------------------------------------------------- from outside

    async def request_swap(self, version: str) -> Outcome:
        """How the rollout of a version that a person chose has ended: past the gate, but never past the canary.

        It begins when the learner has ended what it is at. Raises: FileNotFoundError for a version that is not there;
        ValueError where another one was asked for.
        """
        self.registry.path(version)
        if self._swap is not None:
            raise ValueError(f"{self._swap.version} was asked for and is on its way: wait for it")
        self._swap = SwapRequest(version, asyncio.get_running_loop().create_future())
        try:
            return await self._swap.done
        finally:
            self._swap = None

    async def go_back(self, reason: str) -> str:
        """What the fleet serves after the candidate of a running rollout, or else the current version, was taken back.

        Raises: FileNotFoundError where there is no version before the current one.
        """
        if self.is_rolling_out:
            candidate, self._is_recalled = self._candidate(), True
            if self._rollout is not None:
                self._rollout.cancel()
            while self.is_rolling_out:
                await asyncio.sleep(POLL_S)
            self._is_recalled = False  # it may have come too late for this one, and is not for the next
            if self.current != candidate:
                return self.current
        async with self.fleet:
            version = self.registry.rollback()  # first, so that a restart on the way ends at the same version
            self._is_to_begin_again = True
            back = await converge(self.servers, version, self.cfg.rollout.rollback_timeout_s)
        self._note(f"went back to {version} ({back}): {reason}")
        return version

    def verdict_on(self, draft: Path) -> Verdict:
        """The gate's verdict on the draft in a folder against the current version. Blocking."""
        cfg = self.cfg.judging
        records = [stored.record for stored in self.buffer.held_out(cfg.held_out_per_domain)]
        candidate, incumbent = (self._score(folder, records) for folder in (draft, self.registry.path(self.current)))
        domains = {(record.server_id, record.request_id): record.domain or "all" for record in records}
        return judge(
            list(candidate.values()), list(incumbent.values()), [domains[key] for key in incumbent], self.cfg.gate
        )

    # ----------------------------------------------------------------------------------------------- the phases

    async def _idle(self) -> Move | None:
        await self._begin_again_where_asked()
        if self._swap is not None and not self._swap.done.done():
            if self._swap.version != self.current:
                return Move(Event.SWAP_REQUESTED, self._swap.version, "a person chose it")
            self._swap.done.set_result(Outcome(passed=True, version=self.current, reason="it is current already"))
        if await self.in_thread(self.trainer.lag) >= self.cfg.training.fresh_per_step:
            return Move(Event.BEGIN)
        await asyncio.sleep(POLL_S)
        return None

    async def _train(self) -> Move | None:
        trainer, began_s, saved_s = self.trainer, time.monotonic(), time.monotonic()
        wanted = trainer.progress.records + self.cfg.training.records_per_candidate
        while trainer.progress.records < wanted:
            await self._begin_again_where_asked()
            if self.problem or self._swap is not None:
                await self._checkpoint()
                return Move(Event.FAILED, reason=self.problem or "interrupted by a swap that a person asked for")
            stats = await self.in_thread(trainer.step)
            if stats is None:
                await asyncio.sleep(POLL_S)
                continue
            began_s = self._note_step(stats, began_s)
            if trainer.has_diverged:
                return await self._discard("the loss was not finite")
            if time.monotonic() - saved_s > self.cfg.training.save_every_s:
                await self._checkpoint()
                saved_s = time.monotonic()
        try:
            name = await self.in_thread(trainer.checkpoint)
        except NotFiniteError:
            return await self._discard("the weights are not finite")
        except OSError as error:
            self._fault("disk_full", error)
            await asyncio.sleep(DISK_RETRY_S)
            return Move(Event.FAILED, reason=f"no checkpoint could be written: {error}")
        return Move(Event.TRAINED, name, f"{trainer.progress.records} records")

    async def _judge(self) -> Move:
        name = self._candidate()
        try:
            verdict = await self.in_thread(self.verdict_on, self.trainer.folder / name / DRAFT)
        except (OSError, ValueError) as error:
            return Move(Event.REJECTED, reason=f"{name} can not be read: {error}")
        self._note_verdict(name, verdict)
        if verdict.decision is Decision.PROMOTE:
            self._num_without_gain = 0
            return Move(Event.PROMOTED, reason=verdict.reason)
        if verdict.decision is Decision.INCONCLUSIVE:
            return Move(Event.INCONCLUSIVE, reason=verdict.reason)
        self._count_without_gain()
        return Move(Event.REJECTED, reason=verdict.reason)

    async def _publish(self) -> Move:
        while True:
            try:
                return Move(Event.PUBLISHED, await asyncio.to_thread(self._published_version))
            except OSError as error:
                self._fault("disk_full", error)
                await asyncio.sleep(DISK_RETRY_S)

    async def _canary(self) -> Move:
        outcome = await self._roll_out(try_canary)
        if outcome.passed:
            return Move(Event.PASSED, reason=outcome.reason)
        return self._rolled_back(outcome)

    async def _roll(self) -> Move:
        version = self._candidate()
        outcome = await self._roll_out(roll_waves)
        if not outcome.passed:
            return self._rolled_back(outcome)
        await asyncio.to_thread(self.registry.promote, version)
        serving = {server.versions["seen"] for server in self.servers if server.versions}
        await asyncio.to_thread(self.registry.prune, self.cfg.keep_versions, serving)
        if self._swap is not None and self._swap.version == version:  # it does not descend from what is in training
            self._is_to_begin_again = True
        self._end_swap(outcome)
        return Move(Event.ROLLED_OUT, reason=outcome.reason)

    async def _wait(self) -> Move | None:
        if not self.problem:
            return Move(Event.RESUME)
        await asyncio.sleep(POLL_S)
        return None

    # ----------------------------------------------------------------------------------------------- their parts

    def _candidate(self) -> str:
        assert self.state.candidate is not None
        return self.state.candidate

    async def _begin_again_where_asked(self) -> None:
        if self._is_to_begin_again:
            self._is_to_begin_again = False
            await self.in_thread(self.trainer.begin_again)
            self._note(f"training begins again from {self.current}")

    async def _discard(self, why: str) -> Move:
        self._fault("loss_not_finite")
        await self.in_thread(self.trainer.discard)
        return Move(Event.FAILED, reason=f"{why}: the candidate was thrown away")

    async def _checkpoint(self) -> None:
        """One more, where there is anything to keep and it can be kept."""
        if not self.trainer.num_steps:
            return
        try:
            await self.in_thread(self.trainer.checkpoint)
        except NotFiniteError:
            self._fault("loss_not_finite")
        except OSError as error:
            self._fault("disk_full", error)

    def _score(self, folder: Path, records: Sequence[Record]) -> dict[tuple[str, str], Scored]:
        candidate = self.trainer.candidate
        draft = candidate.load(folder)
        scored = score(
            (draft.float() if candidate.accelerator.device.type == "cpu" else draft).eval(),
            records,
            num_speculative_tokens=self.cfg.judging.num_speculative_tokens,
            method=self.cfg.judging.draft_sample_method,
            sequence_length=self.cfg.training.sequence_length,
            reads=candidate.learnable.reads,
        )
        return by_request(records, scored)

    def _count_without_gain(self) -> None:
        """Training that leads nowhere begins again at the served version."""
        self._num_without_gain += 1
        if self._num_without_gain >= self.cfg.training.patience:
            self._num_without_gain = 0
            self._is_to_begin_again = True

    def _published_version(self) -> str:
        """The version with the candidate's draft: published now, or already before a kill."""
        folder = self.trainer.folder / self._candidate()
        files = {name.removeprefix(f"{DRAFT}/"): entry for name, entry in manifest(folder).items() if DRAFT in name}
        latest = self.registry.latest()
        if latest and files.items() <= manifest(self.registry.path(latest)).items():
            return latest
        return self.registry.publish(
            lambda partial: copy_model(folder / DRAFT, partial),
            target_fingerprint=self.target_fingerprint,
            provenance={"trained_from": self.current, "records": self.trainer.progress.records},
            evaluation={
                "verdict": self.state.reason,
                "judging": asdict(self.cfg.judging),
                "gate": asdict(self.cfg.gate),
            },
        )

    async def _roll_out(self, rollout: Callable[..., Coroutine[Any, Any, Outcome]]) -> Outcome:
        """What the rollout comes to; a recall ends it with every server on the current version."""
        async with self.fleet:
            if not self._is_recalled:
                self._rollout = asyncio.ensure_future(
                    rollout(self.servers, self._candidate(), self.current, self.cfg.rollout)
                )
                try:
                    return await self._rollout
                except asyncio.CancelledError:
                    if not self._is_recalled:
                        raise
                finally:
                    self._rollout = None
            self._is_recalled = False
            back = await converge(self.servers, self.current, self.cfg.rollout.rollback_timeout_s)
            return Outcome(passed=False, version=self.current, reason=f"recalled: {back}")

    def _rolled_back(self, outcome: Outcome) -> Move:
        self._count_without_gain()
        self._end_swap(outcome)
        return Move(Event.ROLLED_BACK, reason=outcome.reason)

    def _end_swap(self, outcome: Outcome) -> None:
        if self._swap is not None and self._swap.version == self.state.candidate and not self._swap.done.done():
            self._swap.done.set_result(outcome)

    def _advance(self, move: Move) -> None:
        self.state = advance(self.state, move.event, candidate=move.candidate, reason=move.reason)
        save(self.state, self._state_path)
        self._note(self.state.reason)

    # ----------------------------------------------------------------------------------------------- the journal

    def _note(self, reason: str) -> None:
        self.journal.write("state", phase=self.state.phase.value, candidate=self.state.candidate, reason=reason)

    def _fault(self, what: str, error: OSError | None = None) -> None:
        self.journal.write("fault", what=what, detail=None if error is None else f"errno-{error.errno}")

    def _note_step(self, stats: StepStats, began_s: float) -> float:
        now_s = time.monotonic()
        self.journal.write(
            "training",
            step=self.trainer.candidate.distillation.step_index,
            loss=None if stats.skipped else stats.loss,
            alpha=stats.alpha[0],
            alpha_greedy=stats.alpha_greedy[0],
            tokens_per_s=stats.tokens / (now_s - began_s),
            records_seen=self.trainer.progress.records,
            skipped=self.trainer.progress.skipped,
        )
        return now_s

    def _note_verdict(self, candidate: str, verdict: Verdict) -> None:
        gain = verdict.overall
        numbers = {} if gain is None else {
            "gain": gain.tau_candidate - gain.tau_incumbent,
            "low": gain.lower,
            "high": gain.upper,
            "tau_candidate": gain.tau_candidate,
            "tau_incumbent": gain.tau_incumbent,
            "requests": gain.num_requests,
        }  # fmt: skip
        domains = {
            name[:64]: {
                "gain": its.tau_candidate - its.tau_incumbent,
                "low": its.lower,
                "high": its.upper,
                "requests": its.num_requests,
            }
            for name, its in verdict.domains.items()
        }
        self.journal.write(
            "gate", verdict=verdict.decision.value, candidate=candidate, incumbent=self.current, domains=domains,
            reason=verdict.reason, **numbers,
        )  # fmt: skip


def copy_model(source: Path, folder: Path) -> None:
    """The model's own files, without what a publication put beside them."""
    for path in source.iterdir():
        if path.is_file() and path.name not in ("manifest.json", "provenance.json", "evaluation.json", "STABLE"):
            shutil.copy(path, folder)
