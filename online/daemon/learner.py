"""The learner daemon: it learns from the traffic of a fleet of vLLM servers and keeps the draft up to date.

    servers ─► spool ─► ingest ─► buffer ─► training ─► judging ─► publishing ─► canary ─► rolling ─► servers
       │                            └ held-out requests ──┘             └► registry           │
       └──────────── watch: versions, targets, acceptance ─► reconcile, halt, alarm ──────────┘

    task      consumes                     waits for                 stopped by
    ingest    spool files, or the log      a record                  nothing; a full disk pauses it
    cycle     records of the buffer        enough new records        a person, another target: `online.daemon.cycle`
    watch     status, counters             `fleet.poll_s`            nothing
    alarm     a report of the watch        a version to compare      nothing: `online.daemon.alarm`
    control   requests of a person         a connection              nothing

One asyncio process owns the buffer. torch has a separate thread there, and other ranks follow it. Serving goes on
whatever happens here: the learner only reads records that the servers leave behind, and takes back every swap that
does not prove itself. It may be killed at any moment and continues where it was.

    $ redraft learner --config learner.toml
    $ accelerate launch -m redraft.recipes.serve.learner --config learner.toml      # on several GPUs
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.eval.counts import AcceptanceCounts
from redraft.heads.catalog import find_family, require_head
from redraft.heads.doctor.shared import require_own_head
from redraft.heads.files.artifact import PROVENANCE, fingerprint, is_full
from redraft.heads.files.checkpoint import load_tokenizer
from redraft.heads.files.folder import find_quantization
from redraft.heads.files.folder import read_config as read_model_config
from redraft.heads.files.lock import own
from redraft.heads.files.tokenizers import check_same_tokenizer
from redraft.online.daemon import control
from redraft.online.daemon.alarm import Alarm
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.cycle import Cycle, copy_model
from redraft.online.fleet.discovery import Members, discover, list_servers, read_fleet
from redraft.online.fleet.registry import Registry, read_id
from redraft.online.fleet.server import STATUS_TIMEOUT_S, FleetServer
from redraft.online.fleet.watch import JournaledServer, Observation, Watch
from redraft.online.journal import Journal, to_stderr
from redraft.online.learning.anchors import read_anchors
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.buffer_file import BufferFullError
from redraft.online.learning.candidate import Candidate, Ranks, read_hidden_shape
from redraft.online.learning.clock import SteadyClock
from redraft.online.learning.forget import Forgotten, Reach
from redraft.online.learning.intake import Spool, Sums, Taken, add_acceptance
from redraft.online.learning.trainer import Trainer
from redraft.online.page.app import build_app, serve_in_background
from redraft.online.page.telemetry import Telemetry, to_wandb
from redraft.online.records.origin import list_stored_names
from redraft.online.records.spool import is_in_memory

if TYPE_CHECKING:
    from redraft.online.learning.stream import StreamSource

INGEST_POLL_S = 0.2
FULL_DISK_RETRY_S = 1.0
SERVER_FAULTS = ("server_unreachable", "server_nonsense")
"""Faults that a look at a server finds."""

REST_S = 60.0
"""Seconds between two orders to the other ranks, whose wait for one must not time out."""


def run(cfg: LearnerConfig) -> None:
    """Learn until SIGTERM or SIGINT.

    Raises:
        ValueError, OSError: for mistakes that the user can fix.
        AlreadyOwnedError: if another learner owns this draft or this folder.
    """
    token = cfg.fleet.token()  # a mistake in the fleet is reported now, not after minutes of loading
    if cfg.fleet.file is not None:
        read_fleet(cfg.fleet.file, cfg.domain, token)
    if cfg.zero_retention and not (cfg.spool and is_in_memory(cfg.spool)):
        raise ValueError("zero_retention keeps no text on a disk: it needs a spool in memory, such as /dev/shm/spool")
    candidate = Candidate(cfg.training, cfg.draft.family, cfg.target)
    if not candidate.accelerator.is_main_process:
        # Folders, locks and servers are rank 0's alone.
        Ranks(candidate).follow()
        return
    with opened(cfg) as (target, registry, buffer):
        asyncio.run(_until_signalled(cfg, target, registry, buffer, candidate))


@contextmanager
def opened(cfg: LearnerConfig) -> Iterator[tuple[str, Registry, Buffer]]:
    """The target's fingerprint, the registry and the buffer, owned while the block runs. Waits while a disk is full.

    Raises:
        ValueError, OSError, AlreadyOwnedError: as `run` does.
    """
    is_told = False
    with ExitStack() as stack:
        while True:
            try:
                found = _open(cfg, stack)
                break
            except OSError as error:
                # Locks taken on the way are released. A closed ExitStack can be filled again.
                stack.close()
                if not is_full(error):
                    raise
                if not is_told:
                    print(f"the learner waits, because a disk is full: {error}", file=sys.stderr, flush=True)
                is_told = True
                time.sleep(FULL_DISK_RETRY_S)
        yield found


def _open(cfg: LearnerConfig, stack: ExitStack) -> tuple[str, Registry, Buffer]:
    cfg.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it holds users' text
    registry = Registry(cfg.registry)
    stack.enter_context(own(cfg.folder / "learner.lock", "a learner"))
    stack.enter_context(registry.owned())
    target = fingerprint(cfg.target)
    provide_first_version(cfg, registry, target)
    return target, registry, stack.enter_context(open_buffer(cfg, registry, target))


def open_buffer(cfg: LearnerConfig, registry: Registry, target_fingerprint: str) -> Buffer:
    """The learner's buffer, for records the current version can learn from.

    Raises:
        ValueError: if this family of drafts cannot learn online.
        AlreadyOwnedError, BufferFullError: as `Buffer` does.
    """
    current = registry.current()
    assert current is not None, "the learner begins with a version"
    states = read_hidden_shape(cfg.draft.family, registry.path(current))
    return Buffer(cfg.buffer_config, target_fingerprint, states, cfg.domain)


def provide_first_version(cfg: LearnerConfig, registry: Registry, target_fingerprint: str) -> None:
    """Make sure the registry has a current version. In an empty registry, the initial draft becomes the first.

    Raises:
        ValueError: if there is no initial draft either, no version that was current is intact, or a draft is for
            another target or tokenizer.
    """
    if not registry.versions():
        if cfg.draft.initial is None:
            raise ValueError(f"{registry.folder} has no version yet: set draft.initial to the draft that is served now")
        initial = cfg.draft.initial
        if not _is_in_target(initial, cfg):
            _require_fitting(initial, cfg)
        registry.publish(
            lambda partial: _copy_draft(initial, partial, cfg),
            target_fingerprint=target_fingerprint,
            provenance={"copied_from": initial},
            evaluation={},
        )
    registry.repair()
    current = registry.current()
    assert current is not None
    trained_for = json.loads((registry.path(current) / PROVENANCE).read_text())["target_fingerprint"]
    if trained_for != target_fingerprint:
        raise ValueError(
            f"{current} of {registry.folder} was trained for target {trained_for[:12]}, {cfg.target} is "
            f"{target_fingerprint[:12]}: give each target its own registry and learner folder"
        )


def _is_in_target(draft: Path, cfg: LearnerConfig) -> bool:
    """Whether the draft is the part of the target's weights that the family trains."""
    return find_family(cfg.draft.family).is_in_target and draft.resolve() == cfg.target.resolve()


def _copy_draft(draft: Path, folder: Path, cfg: LearnerConfig) -> None:
    if _is_in_target(draft, cfg):
        find_family(cfg.draft.family).extract(draft, folder)
    else:
        copy_model(draft, folder)


def _require_fitting(draft: Path, cfg: LearnerConfig) -> None:
    family = find_family(cfg.draft.family)
    # the layer in a quantised target may be plain: whether it is, its tensors tell when they are read
    if not family.is_in_target and (method := find_quantization(read_model_config(draft))):
        raise ValueError(
            f"{draft} is quantised ({method}), and training needs the weights from before: set draft.initial to those, "
            "and serve with --draft-quantization, so that vLLM quantises every version when it is loaded"
        )
    if family.is_head:
        require_head(draft, family.name, cfg.target)
    else:
        check_same_tokenizer(load_tokenizer(cfg.target), load_tokenizer(draft))
    if family.trains_lm_head:
        require_own_head(draft, cfg.target)


async def _until_signalled(
    cfg: LearnerConfig, target: str, registry: Registry, buffer: Buffer, candidate: Candidate
) -> None:
    learning = asyncio.ensure_future(_learn(cfg, target, registry, buffer, candidate))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, learning.cancel)
    with suppress(asyncio.CancelledError):
        await learning


async def _learn(cfg: LearnerConfig, target: str, registry: Registry, buffer: Buffer, candidate: Candidate) -> None:
    telemetry = Telemetry()
    observers = [to_stderr, telemetry.observe, *([to_wandb(cfg.wandb, cfg.folder)] if cfg.wandb else [])]
    journal = Journal(cfg.folder / "journal", observers=observers)
    anchors = read_anchors(cfg.anchors, target, buffer.hidden_shape) if cfg.anchors else []
    trainer = Trainer(cfg.training, cfg.replay, buffer, registry, candidate, cfg.folder / "checkpoints", anchors)
    members = Members(lambda url, token, http: JournaledServer(url, token, http, journal, registry=registry))
    async with aclosing(members):
        for sentence in registry.mended:
            journal.write("fault", what="registry_damaged", reason=sentence)
        cycle = Cycle(cfg, target, registry, buffer, trainer, members.servers, journal)
        learner = Learner(cfg, target, buffer, cycle, members, journal)
        async with AsyncExitStack() as stack:
            if cfg.page.port:
                shown = build_app(cfg.folder / "journal", telemetry.registry)
                address = await stack.enter_async_context(serve_in_background(shown, cfg.page.host, cfg.page.port))
                print(f"live page: {address}", flush=True)
            # Last in, first out: the training is saved before the page ends and the clients of the servers close.
            stack.push_async_callback(cycle.close)
            await learner.run()


class Learner:
    """The tasks beside the cycle."""

    def __init__(
        self, cfg: LearnerConfig, target_fingerprint: str, buffer: Buffer, cycle: Cycle,
        members: Members[JournaledServer], journal: Journal,
    ) -> None:  # fmt: skip
        self.cfg, self.target_fingerprint, self.buffer, self.cycle = cfg, target_fingerprint, buffer, cycle
        self.journal, self.members = journal, members
        # With half a poll for the servers that hang, looks at the others keep their pace.
        self.watch = Watch(members.servers, min(STATUS_TIMEOUT_S, max(1.0, cfg.fleet.poll_s / 2)))
        self.alarm = Alarm(cycle, journal)
        self.vocab_size = read_vocab_size(cfg.target)
        self._accepted: Sums = {}
        self._lost = Counter[str]()
        self._intake = asyncio.Lock()
        self._faults: set[tuple[str, str]] = set()
        self._laggards: set[FleetServer] = set()
        if buffer.upgraded:
            self._fault("buffer_upgraded", "held-out.key", buffer.upgraded)
        # Arrivals and ages are by this clock. Only the event loop's thread reads it.
        # A gap above half the maximal age may expire half of the buffer at once: such a clock is doubted first.
        self.clock = SteadyClock(last_s=buffer.last_arrival_s(), max_gap_s=buffer.config.max_age_s / 2)
        self._stream = open_stream(cfg, buffer, self.vocab_size, self.clock.now_s) if cfg.ingest else None
        self._spool = Spool(cfg.spool, buffer, self.vocab_size) if cfg.spool else None

    async def run(self) -> None:
        """Run until cancelled. A defect in one task ends all of them: a supervisor restarts, and nothing is lost."""
        first_s = time.monotonic()
        await self._look()  # before anything is trained, because the servers may serve another target
        async with aclosing(self.watch), control.serve(self.cfg.folder, self.answer), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.cycle.run())
            tasks.create_task(self._ingest())
            tasks.create_task(self._watch(first_s))
            tasks.create_task(self.alarm.run())
            if not self.cycle.trainer.ranks.is_alone:
                tasks.create_task(self._keep_ranks_awake())

    # ----------------------------------------------------------------------------------------------- ingest

    async def _ingest(self) -> None:
        while True:
            try:
                # Held by `_forget` while it drains: two readers would take records from each other.
                async with self._intake:
                    taken = await self._take()
            except OSError as error:
                self._fault(_name_fault(error), str(error.errno), error.strerror or str(error))
                await asyncio.sleep(INGEST_POLL_S if isinstance(error, FileNotFoundError) else FULL_DISK_RETRY_S)
                continue
            self._heal("disk_full", "spool_missing", "spool_unreadable", "broker_unreachable")
            for key, accepted in taken.accepted.items():
                add_acceptance(self._accepted, key, accepted)
            if not taken.counts:
                await asyncio.sleep(INGEST_POLL_S)

    async def _take(self) -> Taken:
        if self._stream is not None:
            return await self._stream.take()
        assert self._spool is not None
        return await asyncio.to_thread(self._spool.take, self.clock.now_s())

    # ----------------------------------------------------------------------------------------------- watch

    async def _watch(self, next_s: float) -> None:
        """Look at the servers every `poll_s` seconds, the last time at `next_s`."""
        while True:
            # From start to start: the time spent on a server that hangs is not added to the pause.
            next_s = max(next_s + self.cfg.fleet.poll_s, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())
            await self._look()
            await asyncio.to_thread(self.buffer.expire, self.clock.now_s())

    async def _look(self) -> None:
        await self._find_servers()
        observed = await self.watch.look()
        await asyncio.to_thread(self.buffer.refresh_names)
        self._journal_observations(observed)
        problem = self._find_foreign_target(observed)
        # Reported even if empty: this ends a halt, or takes back a waiting one.
        self.cycle.report_problem(problem)
        if problem:
            await self.cycle.reconciler.stop()
        if problem or self.cycle.is_rolling_out:  # a rollout watches its servers itself
            return
        current = self.cycle.current
        answering = [one for one in observed if one.status is not None]
        behind = [one.server for one in answering if one.status and not one.server.serves(one.status, current)]
        self._report_laggards(behind)
        # A server on another version is brought to the current one below, whatever its acceptance.
        alarming = [one for one in answering if one.is_alarming and one.status and one.status.draft_version == current]
        self._report_alarm(alarming, current)
        self.cycle.reconcile(behind)

    async def _find_servers(self) -> None:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):  # a name server can hang too
                found = await discover(self.cfg.fleet, self.cfg.domain)
        except (OSError, ValueError) as error:  # keep the known servers
            self._fault("fleet_unknown", type(error).__name__)
            return
        self._heal("fleet_unknown")
        self.buffer.known_domains = frozenset(list_domains(self.cfg))
        if self.cycle.fleet.locked():  # a swap in progress relies on the present list of servers
            return
        known = set(self.members.servers)
        for server in self.members.update(found):
            self._heal(*SERVER_FAULTS, "server_behind", detail=server.url)
            self.cycle.reconciler.forget(server)
            self.journal.write("server", server=server.url, change="left")
            await server.http.aclose()
        for server in self.members.servers:
            if server not in known:
                self.journal.write("server", server=server.url, change="joined")

    def _report_laggards(self, behind: Sequence[FleetServer]) -> None:
        """Report servers of another version or bytes that the last push did not bring to the current one."""
        laggards = {server for server in behind if self.cycle.reconciler.is_failing(server)}
        for server in laggards:
            self._fault("server_behind", server.url)
        for server in self._laggards - laggards - set(behind):
            self._heal("server_behind", detail=server.url)
        # A laggard stays one while it is pushed to again: only the current version heals it.
        self._laggards = (self._laggards & set(behind)) | laggards

    def _find_foreign_target(self, observed: list[Observation]) -> str:
        """The reason to halt if a server serves another target; empty if none does."""
        for one in observed:
            theirs = one.status.target_fingerprint if one.status else self.target_fingerprint
            if theirs != self.target_fingerprint:
                self._fault("target_changed", one.server.url)
                return (
                    f"{one.server.url} serves target {theirs[:12]}, this learner is for "
                    f"{self.target_fingerprint[:12]}: its records are kept aside and nothing is swapped"
                )
        self._heal("target_changed")
        return ""

    def _report_alarm(self, alarming: Sequence[Observation], version: str) -> None:
        for one in alarming:
            self._fault("acceptance_alarm", one.server.url, f"it hardly accepts anything of {version}")
        if alarming:
            self.alarm.report(alarming[0].server.url, version)

    def _journal_observations(self, observed: list[Observation]) -> None:
        for one in observed:
            if one.fault:
                self._fault(one.fault, one.server.url, one.reason)
            self._heal(*(fault for fault in SERVER_FAULTS if fault != one.fault), detail=one.server.url)
            if one.status is None:
                continue
            if one.status.capture_off:
                self._fault(
                    "capture_off", one.server.url, f"{one.server.url} records nothing: {one.status.capture_off}"
                )
            else:
                self._heal("capture_off", detail=one.server.url)
            self._lost += one.lost
            self._journal_acceptance(one.since_last, one.status.draft_version, server=one.server.url)
        accepted, self._accepted = self._accepted, {}
        for (domain, version), count in accepted.items():
            self._journal_acceptance(count, version, domain=domain[:64])
        self._journal_buffer()

    def _journal_acceptance(self, accepted: AcceptanceCounts, version: str, **labels: Any) -> None:
        self.journal.write(
            "acceptance",
            draft_version=version or "none",
            drafts=accepted.num_drafts,
            accepted=accepted.num_accepted,
            accepted_at=accepted.accepted_per_position,
            tau=accepted.tau if accepted.num_drafts else None,
            **labels,
        )

    def _journal_buffer(self) -> None:
        while self.buffer.damage:
            self.journal.write("fault", what="buffer_damaged", reason=self.buffer.damage.pop(0))
        while self._stream is not None and self._stream.faults:
            name, reason = self._stream.faults.pop(0)
            self._fault(name, "log", reason)
        status, now_s = self.buffer.status(), self.clock.now_s()
        if self.clock.problem:
            self._fault("clock_jumped", "wall", self.clock.problem)
        else:
            self._heal("clock_jumped")
        untrained = self.buffer.fresh(self.cycle.trainer.progress.through, 1)
        self.journal.write(
            "buffer",
            records=sum(status.num_training.values()),
            bytes=status.num_bytes,
            max_bytes=self.buffer.config.max_bytes,
            held_out=sum(status.num_held_out.values()),
            dropped={**{name: count for name, count in status.counts.items() if name != "stored"}, **self._lost},
            oldest_s=None if status.oldest_s is None else now_s - status.oldest_s,
            lag_s=max(0.0, now_s - untrained[0].record.time_s) if untrained else None,
            lag_records=self.cycle.trainer.lag(),
        )

    def _fault(self, name: str, detail: str, reason: str = "") -> None:
        """Journal a fault once, when it begins."""
        if (name, detail) not in self._faults:
            self._faults.add((name, detail))
            self.journal.write("fault", what=name, detail=detail, reason=reason)

    def _heal(self, *names: str, detail: str | None = None) -> None:
        """Forget these faults, so that they are journaled when they begin again; only those of `detail` if given."""

        def is_healed(name: str, its_detail: str) -> bool:
            return name in names and detail in (None, its_detail)

        self._faults = {fault for fault in self._faults if not is_healed(*fault)}

    async def _keep_ranks_awake(self) -> None:
        while True:
            await asyncio.sleep(REST_S)
            await self.cycle.in_thread(self.cycle.trainer.ranks.do, "rest")

    # ----------------------------------------------------------------------------------------------- control

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a person's request: status, swap, rollback, judge or forget.

        Raises:
            ValueError, OSError, KeyError: if it is refused; the message is for the person.
        """
        match request.get("do"):
            case "status":
                state = self.cycle.state
                return {
                    "phase": state.phase.value,
                    "candidate": state.candidate,
                    "current": self.cycle.current,
                    "is_asleep": self.cycle.sleep.is_asleep_at(self.cycle.current),
                    "steps_saved": self.cycle.num_steps_saved,
                }
            case "swap":
                outcome = await self.cycle.request_swap(str(request["version"]))
                return {"passed": outcome.passed, "version": outcome.version, "reason": outcome.reason}
            case "rollback":
                back = await self.cycle.go_back("a person asked for it", str(request.get("to", "")))
                return {"version": back.version, **({} if back.is_complete else {"behind": str(back)})}
            case "judge":
                verdict = await self.cycle.judge_draft(Path(request["draft"]))
                return {"decision": verdict.decision.value, "reason": verdict.reason}
            case "forget":
                return asdict(await self._forget(str(request["tenant"]), is_dry=bool(request.get("dry_run"))))
            case other:
                raise ValueError(f"the learner does not know the request {other!r}")

    async def _forget(self, tenant: str, *, is_dry: bool) -> Forgotten:
        trainer = self.cycle.trainer
        async with self._intake:
            reach = Reach(
                buffer=self.buffer,
                registry=self.cycle.registry,
                anchors=self.cfg.anchors,
                spool=self._spool,
                stream=self._stream,
                through=trainer.progress.through,
                now_s=self.clock.now_s,
            )
            if is_dry:
                return await asyncio.to_thread(reach.preview, tenant)
            forgotten = await reach.forget(tenant)
        names = list_stored_names(tenant)
        # A new list, because a step on the trainer's thread may be reading the present one.
        trainer.anchors = [record for record in trainer.anchors if record.tenant not in names]
        return forgotten


def list_domains(cfg: LearnerConfig) -> set[str]:
    """The domains that an operator named, in the settings or in fleet.toml.

    Raises:
        ValueError, OSError: if fleet.toml cannot be read.
    """
    listed = [server.domain for server in list_servers(cfg.fleet.file)] if cfg.fleet.file else []
    return {cfg.domain, *cfg.judging.domains, *listed} - {""}


def open_stream(
    cfg: LearnerConfig, buffer: Buffer, vocab_size: int, now_s: Callable[[], float] = time.time
) -> StreamSource:
    from redraft.online.learning.stream import StreamSource  # nats-py is an extra

    return StreamSource(cfg.ingest, cfg.nats, cfg.stream, buffer, vocab_size, now_s, read_id(cfg.registry))


def _name_fault(error: OSError) -> str:
    if isinstance(error, BufferFullError):
        return "disk_full"
    if isinstance(error, FileNotFoundError):
        return "spool_missing"
    return "broker_unreachable" if isinstance(error, ConnectionError) else "spool_unreadable"


def read_vocab_size(target: Path) -> int:
    config = json.loads((target / "config.json").read_text())
    # Multimodal targets keep the sizes of the language model in `text_config`.
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
