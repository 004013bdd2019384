"""The learner daemon.

It learns from the traffic of a fleet of vLLM servers and keeps the draft up to date.

    servers ─► spool ─► ingest ─► buffer ─► training ─► judging ─► publishing ─► canary ─► rolling ─► servers
       │                            └ held-out requests ──┘             └► registry           │
       └──────────── watch: versions, targets, acceptance ─► reconcile, halt, alarm ──────────┘

    task      consumes                     waits for                 stopped by
    ingest    spool files, or the log      a record                  nothing; a full disk pauses it
    cycle     records of the buffer        enough new records        a person, a new target (`online.daemon.cycle`)
    watch     status, counters             `fleet.poll_s`            nothing
    buffer    ages and sizes of records    `fleet.poll_s`            nothing
    alarm     a report of the watch        a version to compare      nothing (`online.daemon.alarm`)
    control   requests of a person         a connection              nothing

One asyncio process owns the buffer. torch runs on a separate thread of it, and the other ranks
follow that thread. Serving continues whatever happens to the learner: it only reads the records
that servers store, and reverts a swap that fails its canary. It can be killed at any moment, and
resumes after a restart.

    $ redraft learner --config learner.toml
    $ accelerate launch -m redraft.recipes.cli learner --config learner.toml      # on several GPUs
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from redraft.engine.process import exiting_on_sigterm
from redraft.online.daemon import control
from redraft.online.daemon.account import Account
from redraft.online.daemon.alarm import Alarm
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.cycle import Cycle
from redraft.online.daemon.opening import FULL_DISK_RETRY_S, open_stream, opened, read_vocab_size
from redraft.online.fleet.discovery import Members, discover, read_fleet
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.server import STATUS_TIMEOUT_S, FleetServer
from redraft.online.fleet.watch import SERVER_FAULTS, JournaledServer, Observation, Watch
from redraft.online.journal import BufferEntry, Journal, ServerEntry, to_stderr
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.buffer_file import BufferFullError
from redraft.online.learning.candidate import Candidate, Ranks
from redraft.online.learning.clock import SteadyClock
from redraft.online.learning.forget import Forgotten, Reach
from redraft.online.learning.intake import Spool, Sums, add_acceptance
from redraft.online.learning.pauses import Pauses
from redraft.online.learning.trainer import Trainer
from redraft.online.page.app import build_app, serve_in_background
from redraft.online.page.telemetry import Telemetry, to_wandb
from redraft.online.records.guard import Guard
from redraft.online.records.nats_config import hide_credentials
from redraft.online.records.spool import is_in_memory

INGEST_POLL_S = 0.2
REST_S = 60.0  # between two commands to the other ranks, whose wait must not time out
RECORDS = "records"  # detail of a fault for which the ingest waits


def run(cfg: LearnerConfig) -> None:
    """Learn until SIGTERM or SIGINT.

    Raises:
        ValueError, OSError: for errors that the user can fix.
        AlreadyOwnedError: another learner owns this draft or this folder.
    """
    token = (
        cfg.fleet.token()
    )  # report a mistake in the fleet file now, not after minutes of loading
    if cfg.fleet.file is not None:
        read_fleet(cfg.fleet.file, token)
    if cfg.zero_retention and not (cfg.spool and is_in_memory(cfg.spool)):
        raise ValueError(
            "zero_retention stores no text on disk: put the spool into memory, e.g. /dev/shm/spool"
        )
    candidate = Candidate(cfg.training, cfg.draft.family, cfg.target)
    if not candidate.accelerator.is_main_process:
        # Only rank 0 uses folders, locks and servers.
        Ranks(candidate).follow()
        return
    # Until the loop handles SIGTERM, the first process of a container would ignore it.
    with exiting_on_sigterm(), opened(cfg) as (target, registry, buffer):
        asyncio.run(_until_signalled(cfg, target, registry, buffer, candidate))


async def _until_signalled(
    cfg: LearnerConfig, target: str, registry: Registry, buffer: Buffer, candidate: Candidate
) -> None:
    learning = asyncio.ensure_future(learn(cfg, target, registry, buffer, candidate))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, learning.cancel)
    with suppress(asyncio.CancelledError):
        await learning


async def learn(
    cfg: LearnerConfig, target: str, registry: Registry, buffer: Buffer, candidate: Candidate
) -> None:
    """Run a learner until it is cancelled."""
    telemetry = Telemetry()
    observers = [
        to_stderr,
        telemetry.observe,
        *([to_wandb(cfg.wandb, cfg.folder)] if cfg.wandb else []),
    ]
    journal = Journal(cfg.folder / "journal", observers=observers)
    trainer = Trainer(
        cfg.training, cfg.replay, buffer, registry, candidate, cfg.folder / "checkpoints"
    )
    account = Account(journal)
    members = Members(
        lambda url, token, http: JournaledServer(url, token, http, journal, registry=registry)
    )
    if cfg.fleet.shares_device:
        candidate.wait_for_servers = Pauses(lambda: [server.url for server in members.servers]).wait
    async with aclosing(members):
        for sentence in registry.mended:
            account.fault("registry_damaged", sentence)
        cycle = Cycle(cfg, target, registry, buffer, trainer, members.servers, account)
        guard = Guard(lambda task, reason: account.fault("task_failed", f"{task}: {reason}", task))
        telemetry.registry.register(guard)  # type: ignore[arg-type]  # only `collect` is called
        telemetry.registry.register(account)  # type: ignore[arg-type]
        learner = Learner(cfg, target, buffer, trainer, cycle, members, account, guard)
        async with AsyncExitStack() as stack:
            if cfg.page.port:
                shown = build_app(cfg.folder / "journal", telemetry.registry)
                address = await stack.enter_async_context(serve_in_background(shown, cfg.page))
                print(f"live page: {address}", flush=True)
            # These close in reverse order: training is saved before the page and the servers'
            # clients are closed.
            stack.push_async_callback(cycle.close)
            await learner.run()


class Learner:
    """The tasks that run alongside the cycle."""

    def __init__(
        self,
        cfg: LearnerConfig,
        target_fingerprint: str,
        buffer: Buffer,
        trainer: Trainer,
        cycle: Cycle,
        members: Members[JournaledServer],
        account: Account,
        guard: Guard,
    ) -> None:
        self.cfg, self.target_fingerprint = cfg, target_fingerprint
        self.buffer, self.trainer, self.cycle, self.rollouts = (
            buffer,
            trainer,
            cycle,
            cycle.rollouts,
        )
        self.members, self.account, self.guard = members, account, guard
        # Servers that hang are given half a poll interval, so that polls of the others stay on
        # schedule.
        self.watch = Watch(members.servers, min(STATUS_TIMEOUT_S, max(1.0, cfg.fleet.poll_s / 2)))
        self.alarm = Alarm(cycle, account, guard)
        self.vocab_size = read_vocab_size(cfg.target)
        self._accepted: Sums = {}
        self._lost = Counter[str]()
        self._intake = asyncio.Lock()
        self._laggards: set[FleetServer] = set()
        # Arrivals and ages use this clock, which only the event loop's thread reads. A jump of more
        # than half the maximum age could expire half of the buffer at once, so such a jump is
        # checked first.
        self.clock = SteadyClock(
            last_s=buffer.last_arrival_s(), max_gap_s=buffer.config.max_age_s / 2
        )
        now_s = self.clock.now_s
        self._reach = Reach(
            buffer=buffer,
            registry=cycle.registry,
            spool=Spool(cfg.spool, buffer, self.vocab_size) if cfg.spool else None,
            stream=open_stream(cfg, buffer, self.vocab_size, now_s) if cfg.ingest else None,
            now_s=now_s,
        )

    async def run(self) -> None:
        """Run until cancelled.

        An unexpected error in a task alongside the cycle does not stop that task. An error in the
        cycle stops the learner; a supervisor can restart it from the saved state, so nothing is
        lost.
        """
        first_s = time.monotonic()
        await self._look()  # before training, because the servers may serve a different target
        await self._journal_buffer()
        async with (
            aclosing(self.watch),
            control.serve(self.cfg.folder, self.answer),
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self.cycle.run())
            tasks.create_task(self._ingest())
            tasks.create_task(self._watch(first_s))
            tasks.create_task(self._tend_buffer())
            tasks.create_task(self.alarm.run())
            if not self.trainer.ranks.is_alone:
                tasks.create_task(self._keep_ranks_awake())

    # -----------------------------------------------------------------------------------------------
    # ingest

    async def _ingest(self) -> None:
        while True:
            pause_s = FULL_DISK_RETRY_S
            with self.guard.round("ingest"):
                pause_s = await self._ingest_once()
            await asyncio.sleep(pause_s)

    async def _ingest_once(self) -> float:
        """Ingest the records waiting in the spool or the log.

        Returns the pause in seconds before the next attempt.
        """
        try:
            # `_forget` holds this lock while it drains, because two readers would take records from
            # each other.
            async with self._intake:
                taken = await self._reach.take()
        except OSError as error:
            self.account.begin_fault(_name_fault(error), RECORDS, error.strerror or str(error))
            return INGEST_POLL_S if isinstance(error, FileNotFoundError) else FULL_DISK_RETRY_S
        # Only this task's own, because a phase may wait for a full disk too.
        names = ("disk_full", "spool_missing", "spool_unreadable", "broker_unreachable")
        self.account.end_faults(*names, detail=RECORDS)
        for key, accepted in taken.accepted.items():
            add_acceptance(self._accepted, key, accepted)
        return 0 if taken.counts else INGEST_POLL_S

    # -----------------------------------------------------------------------------------------------
    # watch

    async def _watch(self, next_s: float) -> None:
        while True:
            # Measured from start to start, so the time spent on a server that hangs is not added to
            # the pause.
            next_s = max(next_s + self.cfg.fleet.poll_s, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())
            with self.guard.round("watch"):
                await self._look()

    async def _look(self) -> None:
        await self._find_servers()
        observed = await self.watch.look()
        self._journal_observations(observed)
        problem = self._find_foreign_target(observed)
        # Reported even if empty, because an empty finding ends a halt or withdraws a pending one.
        self.cycle.report_problem(problem)
        if problem:
            await self.rollouts.reconciler.stop()
        # During a rollout, the rollout itself watches the servers.
        if problem or self.cycle.state.is_rolling_out:
            return
        current = self.cycle.current
        answering = [one for one in observed if one.status is not None]
        behind = [
            one.server
            for one in answering
            if one.status and not one.server.serves(one.status, current)
        ]
        self._report_laggards(behind)
        # A server with a different version is swapped to the current one below, whatever its
        # acceptance is.
        alarming = [
            one
            for one in answering
            if one.is_alarming and one.status and one.status.draft_version == current
        ]
        if (
            self.rollouts.registry.previous() is None
        ):  # a new head, which a paced server does not use until it has been trained
            alarming = [one for one in alarming if one.status and not one.status.is_paced]
        self._report_alarm(alarming, current)
        self.rollouts.reconcile(behind)

    async def _find_servers(self) -> None:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):  # name resolution can hang too
                found = await discover(self.cfg.fleet)
        except (OSError, ValueError) as error:  # keep the known servers
            self.account.begin_fault("fleet_unknown", type(error).__name__)
            return
        self.account.end_faults("fleet_unknown")
        # A swap in progress depends on the current list of servers.
        if self.rollouts.fleet.locked():
            self.members.renew(found)
            return
        known = set(self.members.servers)
        for server in self.members.update(found):
            # All of them, because a restarted pod has a new address.
            self.account.end_faults(detail=server.url)
            self.rollouts.reconciler.forget(server)
            self.account.journal.write(ServerEntry(server=server.url, change="left"))
            await server.http.aclose()
        for server in self.members.servers:
            if server not in known:
                self.account.journal.write(ServerEntry(server=server.url, change="joined"))

    def _report_laggards(self, behind: Sequence[FleetServer]) -> None:
        """Report servers whose version or bytes differ from the current version.

        Only servers that the last push failed to bring to the current version count.
        """
        laggards = {server for server in behind if self.rollouts.reconciler.is_failing(server)}
        for server in laggards:
            self.account.begin_fault("server_behind", server.url)
        for server in self._laggards - laggards - set(behind):
            self.account.end_faults("server_behind", detail=server.url)
        # A laggard remains one while the push is retried: only the current version ends the fault.
        self._laggards = (self._laggards & set(behind)) | laggards

    def _find_foreign_target(self, observed: list[Observation]) -> str:
        """Return the reason to halt: a server serves a different target. Empty if none does."""
        for one in observed:
            theirs = one.status.target_fingerprint if one.status else self.target_fingerprint
            if theirs != self.target_fingerprint:
                self.account.begin_fault("target_changed", one.server.url)
                return (
                    f"{one.server.url} serves target {theirs[:12]}, but this learner is "
                    f"for {self.target_fingerprint[:12]}: the server's records are set aside "
                    "and nothing is swapped"
                )
        self.account.end_faults("target_changed")
        return ""

    def _report_alarm(self, alarming: Sequence[Observation], version: str) -> None:
        for one in alarming:
            self.account.begin_fault(
                "acceptance_alarm",
                one.server.url,
                f"it accepts hardly any draft tokens of {version}",
            )
        if alarming:
            self.alarm.report(alarming[0].server.url, version)

    def _journal_observations(self, observed: list[Observation]) -> None:
        for one in observed:
            if one.fault:
                self.account.begin_fault(one.fault, one.server.url, one.reason)
            self.account.end_faults(
                *(fault for fault in SERVER_FAULTS if fault != one.fault), detail=one.server.url
            )
            if one.status is None:
                continue
            url, status = one.server.url, one.status
            self._report_off("capture_off", url, f"{url} records nothing", status.capture_off)
            self._report_off("swap_off", url, f"{url} cannot swap drafts", status.swap_off)
            self._report_off("server_note", url, url, "; ".join(status.notes))
            self._lost += one.lost
            if one.is_alarming is False:
                self.account.end_faults("acceptance_alarm", detail=url)
            self.account.acceptance(
                one.since_last,
                status.draft_version,
                server=url,
                target_version=status.target_version,
                pace=status.pace,
                served=one.served,
            )
        accepted, self._accepted = self._accepted, {}
        for (domain, version), count in accepted.items():
            self.account.acceptance(count, version, domain=domain)
        self.account.remind()

    def _report_off(self, what: str, url: str, problem: str, reason: str) -> None:
        if reason:
            self.account.begin_fault(what, url, f"{problem}: {reason}")
        else:
            self.account.end_faults(what, detail=url)

    # -----------------------------------------------------------------------------------------------
    # the buffer

    async def _tend_buffer(self) -> None:
        """Expire records, and report the buffer's contents.

        This is a task of its own, because the buffer may be locked for minutes while it rewrites a
        file, and the watch must not wait for that.
        """
        while True:
            await asyncio.sleep(self.cfg.fleet.poll_s)
            with self.guard.round("expiry"):
                await asyncio.to_thread(self.buffer.expire, self.clock.now_s())
            with self.guard.round("buffer"):
                await self._journal_buffer()

    async def _journal_buffer(self) -> None:
        while self.buffer.damage:
            self.account.fault("buffer_damaged", self.buffer.damage.pop(0))
        while (stream := self._reach.stream) is not None and stream.faults:
            name, reason = stream.faults.pop(0)
            self._report_off(name, "log", hide_credentials(stream.ingest), reason)
        now_s = self.clock.now_s()
        if self.clock.problem:
            self.account.begin_fault("clock_jumped", "wall", self.clock.problem)
        else:
            self.account.end_faults("clock_jumped")
        # In a thread, so that the event loop does not wait for the buffer's lock: a liveness probe
        # that gets no metrics in the meantime would kill the learner.
        found = await asyncio.to_thread(self._describe_buffer, now_s, dict(self._lost))
        self.account.journal.write(found)

    def _describe_buffer(self, now_s: float, lost: Mapping[str, int]) -> BufferEntry:
        self.buffer.refresh_names()
        status, untrained = self.buffer.status(), self.trainer.oldest_untrained()
        return BufferEntry(
            records=sum(status.num_training.values()),
            bytes=status.num_bytes,
            max_bytes=self.buffer.config.max_bytes,
            held_out=sum(status.num_held_out.values()),
            dropped={
                **{name: count for name, count in status.counts.items() if name != "stored"},
                **lost,
            },
            oldest_s=None if status.oldest_s is None else now_s - status.oldest_s,
            lag_s=max(0.0, now_s - untrained.time_s) if untrained else None,
            lag_records=self.trainer.lag(),
        )

    async def _keep_ranks_awake(self) -> None:
        while True:
            await asyncio.sleep(REST_S)
            with self.guard.round("rank-orders"):
                await self.cycle.in_thread(self.trainer.ranks.do, Candidate.rest)

    # -----------------------------------------------------------------------------------------------
    # control

    async def answer(self, request: Mapping[str, Any]) -> object:
        """Answer a user's request: status, swap, rollback, judge or forget.

        Raises:
            ValueError, OSError, KeyError: the request is rejected; the message is meant for the
                user.
        """
        match request.get("do"):
            case "status":
                return control.Standing(
                    phase=self.cycle.state.phase.value,
                    candidate=self.cycle.state.candidate,
                    current=self.cycle.current,
                    is_asleep=self.cycle.sleeper.sleep.is_asleep_at(self.cycle.current),
                    steps_saved=self.cycle.sleeper.num_steps_saved,
                    failed_rounds=dict(self.guard.failures),
                )
            case "swap":
                return await self.rollouts.request_swap(str(request["version"]))
            case "rollback":
                back = await self.rollouts.go_back(
                    "requested by a user", str(request.get("to", ""))
                )
                return control.WentBack(
                    version=back.version, behind="" if back.is_complete else str(back)
                )
            case "judge":
                verdict = await self.cycle.judge_draft(Path(request["draft"]))
                return control.Judged(decision=verdict.decision, reason=verdict.reason)
            case "forget":
                return await self._forget(
                    str(request["tenant"]), is_dry=bool(request.get("dry_run"))
                )
            case other:
                raise ValueError(f"unknown request {other!r} to the learner")

    async def _forget(self, tenant: str, *, is_dry: bool) -> Forgotten:
        async with self._intake:
            reach = replace(self._reach, through=self.trainer.progress.through)
            if is_dry:
                return await asyncio.to_thread(reach.preview, tenant)
            forgotten = await reach.forget(tenant)
        self.cycle.judge.forget()
        return forgotten


def _name_fault(error: OSError) -> str:
    if isinstance(error, BufferFullError):
        return "disk_full"
    if isinstance(error, FileNotFoundError):
        return "spool_missing"
    return "broker_unreachable" if isinstance(error, ConnectionError) else "spool_unreadable"
