"""The learner daemon: beside a fleet of vLLM servers it learns from their traffic and keeps their draft good.

    servers ─► spool ─► ingest ─► buffer ─► training ─► judging ─► publishing ─► canary ─► rolling ─► servers
       │                            └ held-out requests ──┘             └► registry           │
       └──────────── watch: versions, targets, acceptance ─► reconcile, halt, alarm ──────────┘

    task      consumes                     waits for                 what stops it
    ingest    spool files, or the log      a record                  nothing; a full disk pauses it
    cycle     records of the buffer        enough new records        a person, another target: `online.cycle`
    watch     status, counters             `fleet.poll_s`            nothing
    control   requests of a person         a connection              nothing

One asyncio process owns the buffer; torch has a thread of its own, and other ranks follow it. Whatever happens here,
serving goes on: the learner only reads what servers leave behind, and every swap is undone where it does not prove
itself. It may be killed at any moment and takes up where it was.

    $ redraft learner --config learner.toml
    $ accelerate launch -m online.learner --config learner.toml
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.artifact import PROVENANCE, fingerprint
from heads.check_shared import require_own_head
from heads.checkpoint import load_tokenizer
from heads.families import require_head
from heads.tokenizers import check_same_tokenizer
from online import control
from online.anchors import read_anchors
from online.buffer import Buffer
from online.buffer_file import BufferFullError
from online.candidate import Candidate, Ranks, hidden_shape
from online.config import LearnerConfig, load_config
from online.cycle import Cycle, copy_model
from online.discovery import Members, discover, read_fleet
from online.fleet import Server, reconcile
from online.ingest import Taken, take
from online.journal import Journal, to_stderr
from online.metrics import Acceptance
from online.page import page, served
from online.registry import Registry
from online.spool import is_in_memory
from online.telemetry import Telemetry, to_wandb
from online.trainer import Trainer
from online.watch import JournaledServer, Seen, Watch

if TYPE_CHECKING:
    from online.stream import StreamSource

INGEST_POLL_S = 0.2
FULL_DISK_RETRY_S = 1.0
DRAIN_S = 10.0
"""For what is on its way to be told in the count too; traffic may never pause."""

REST_S = 60.0
"""Other ranks wait for orders, but not for ever."""


def run(cfg: LearnerConfig) -> None:
    """Learn until SIGTERM or SIGINT.

    Raises: ValueError or OSError for what the user can mend; AlreadyOwnedError where a learner has this draft.
    """
    token = cfg.fleet.token()  # told now, not after minutes
    if cfg.fleet.file is not None:
        read_fleet(cfg.fleet.file, cfg.domain, token)
    if cfg.zero_retention and not (cfg.spool and is_in_memory(cfg.spool)):
        raise ValueError("zero_retention keeps no text on a disk: it needs a spool in memory, such as /dev/shm/spool")
    candidate = Candidate(cfg.training, cfg.draft.family, cfg.target)
    if not candidate.accelerator.is_main_process:
        Ranks(candidate).follow()
        return
    cfg.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it holds users' text
    registry = Registry(cfg.registry)
    with registry.owned():
        target = fingerprint(cfg.target)
        provide_first_version(cfg, registry, target)
        with open_buffer(cfg, registry, target) as buffer:
            asyncio.run(_until_signalled(cfg, target, registry, buffer, candidate))


def open_buffer(cfg: LearnerConfig, registry: Registry, target_fingerprint: str) -> Buffer:
    """The learner's buffer, for records that the current version can learn from. Raises: as `Buffer`; ValueError."""
    current = registry.current()
    assert current is not None, "the learner begins with a version"
    states = hidden_shape(cfg.draft.family, registry.path(current))
    return Buffer(cfg.buffer_config, target_fingerprint, states, cfg.domain)


def provide_first_version(cfg: LearnerConfig, registry: Registry, target_fingerprint: str) -> None:
    """Return where the registry has a current version for this target; the initial draft becomes its first.

    Raises: ValueError where there is none, or it is of another target or tokenizer.
    """
    if not registry.versions():
        if cfg.draft.initial is None:
            raise ValueError(f"{registry.folder} has no version yet: set draft.initial to the draft that is served now")
        initial = cfg.draft.initial
        _require_fitting(initial, cfg)
        registry.publish(
            lambda partial: copy_model(initial, partial),
            target_fingerprint=target_fingerprint,
            provenance={"copied_from": initial},
            evaluation={},
        )
    current = registry.current()
    if current is None:
        current = registry.versions()[-1]
        registry.promote(current)
    trained_for = json.loads((registry.path(current) / PROVENANCE).read_text())["target_fingerprint"]
    if trained_for != target_fingerprint:
        raise ValueError(
            f"{current} of {registry.folder} was trained for target {trained_for[:12]}, {cfg.target} is "
            f"{target_fingerprint[:12]}: give another target a registry and a learner folder of its own"
        )


def _require_fitting(draft: Path, cfg: LearnerConfig) -> None:
    if cfg.draft.family == "standalone":
        check_same_tokenizer(load_tokenizer(cfg.target), load_tokenizer(draft))
    else:
        require_head(draft, cfg.draft.family, cfg.target)
    if cfg.draft.family == "eagle3":  # the only one that trains its head
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
    members = Members(lambda url, token, http: JournaledServer(url, token, http, journal))
    async with aclosing(members):
        cycle = Cycle(cfg, target, registry, buffer, trainer, members.servers, journal)
        learner = Learner(cfg, target, buffer, cycle, members, journal)
        async with AsyncExitStack() as stack:
            if cfg.page.port:
                shown = page(cfg.folder / "journal", telemetry.registry)
                address = await stack.enter_async_context(served(shown, cfg.page.host, cfg.page.port))
                print(f"live page: {address}", flush=True)
            stack.push_async_callback(cycle.close)
            await learner.run()


class Learner:
    """The tasks beside the cycle."""

    def __init__(
        self, cfg: LearnerConfig, target_fingerprint: str, buffer: Buffer, cycle: Cycle,
        members: Members[JournaledServer], journal: Journal,
    ) -> None:  # fmt: skip
        self.cfg, self.target_fingerprint, self.buffer, self.cycle = cfg, target_fingerprint, buffer, cycle
        self.journal, self.members, self.watch = journal, members, Watch(members.servers)
        self.vocab_size = vocab_size(cfg.target)
        self._accepted: dict[tuple[str, str], Acceptance] = {}
        self._lost = Counter[str]()
        self._intake = asyncio.Lock()
        self._faults: set[tuple[str, str]] = set()
        self._behind: set[str] = set()
        self._stream = _stream(cfg, buffer, self.vocab_size) if cfg.ingest else None

    async def run(self) -> None:
        """Until cancelled. A defect in any task ends all: a supervisor starts anew, and nothing is lost."""
        await self._look()  # before anything is trained: the servers may serve another target
        async with control.served(self.cfg.folder, self.answer), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.cycle.run())
            tasks.create_task(self._ingest())
            tasks.create_task(self._watch())
            if not self.cycle.trainer.ranks.is_alone:
                tasks.create_task(self._keep_ranks_awake())

    # ----------------------------------------------------------------------------------------------- ingest

    async def _ingest(self) -> None:
        while True:
            try:
                async with self._intake:
                    taken = await self._take()
            except OSError as error:
                self._fault(_what_failed(error), str(error.errno))
                await asyncio.sleep(FULL_DISK_RETRY_S)
                continue
            self._heal("disk_full", "spool_unreadable", "broker_unreachable")
            for key, accepted in taken.accepted.items():
                self._accepted[key] = self._accepted.get(key, Acceptance()) + accepted
            if not taken.counts:
                await asyncio.sleep(INGEST_POLL_S)

    async def _take(self) -> Taken:
        if self._stream is not None:
            return await self._stream.take()
        assert self.cfg.spool is not None
        return await asyncio.to_thread(take, self.cfg.spool, self.buffer, self.vocab_size, time.time())

    # ----------------------------------------------------------------------------------------------- watch

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.cfg.fleet.poll_s)
            await self._look()
            await asyncio.to_thread(self.buffer.expire, time.time())

    async def _look(self) -> None:
        await self._find_servers()
        seen = await self.watch.look()
        self._note(seen)
        self.cycle.problem = self._foreign_target(seen)
        if self.cycle.problem or self.cycle.is_rolling_out:  # a rollout has a watch of its own
            return
        current = self.cycle.current
        answering = [server for server in seen if server.status is not None]
        self._note_behind(answering, current)
        alarming = [s for s in answering if s.is_alarming and s.status and s.status.draft_version == current]
        if alarming:
            await self._alarm(alarming[0].server, current)
        elif any(s.status and (s.status.draft_version != current or not s.status.is_intact) for s in answering):
            async with self.cycle.fleet:
                await reconcile([s.server for s in answering], self.cycle.current)

    async def _find_servers(self) -> None:
        try:
            found = await discover(self.cfg.fleet, self.cfg.domain)
        except (OSError, ValueError) as error:  # those that are known stay
            self._fault("fleet_unknown", type(error).__name__)
            return
        self._heal("fleet_unknown")
        if self.cycle.fleet.locked():  # whoever swaps drafts holds on to the servers there are
            return
        known = set(self.members.servers)
        for server in self.members.update(found):
            self._heal("server_unreachable", "server_behind", detail=server.url)
            self.journal.write("server", server=server.url, change="left")
            await server.http.aclose()
        for server in self.members.servers:
            if server not in known:
                self.journal.write("server", server=server.url, change="joined")

    def _note_behind(self, answering: list[Seen], current: str) -> None:
        """Report who was pushed to the current version at the look before and still has another."""
        behind = {s.server.url for s in answering if s.status and s.status.draft_version != current}
        for url in behind & self._behind:
            self._fault("server_behind", url)
        for url in self._behind - behind:
            self._heal("server_behind", detail=url)
        self._behind = behind

    def _foreign_target(self, seen: list[Seen]) -> str:
        for server in seen:
            theirs = server.status.target_fingerprint if server.status else self.target_fingerprint
            if theirs != self.target_fingerprint:
                self._fault("target_changed", server.server.url)
                return (
                    f"{server.server.url} serves target {theirs[:12]}, this learner is for "
                    f"{self.target_fingerprint[:12]}: its records are kept aside and nothing is swapped"
                )
        self._heal("target_changed")
        return ""

    async def _alarm(self, server: Server, version: str) -> None:
        self._fault("acceptance_alarm", server.url)
        try:
            await self.cycle.go_back(f"{server.url} hardly accepts anything of {version}")
        except (OSError, ValueError):  # the first version, or the one before is damaged: there is nothing better
            self._fault("nothing_to_go_back_to", version)

    def _note(self, seen: list[Seen]) -> None:
        for one in seen:
            if one.status is None:
                self._fault("server_unreachable", one.server.url)
                continue
            self._heal("server_unreachable", detail=one.server.url)
            self._lost += one.lost
            self._note_acceptance(one.since_last, one.status.draft_version, server=one.server.url)
        accepted, self._accepted = self._accepted, {}
        for (domain, version), count in accepted.items():
            self._note_acceptance(count, version, domain=domain[:64])
        self._note_buffer()

    def _note_acceptance(self, accepted: Acceptance, version: str, **of: Any) -> None:
        self.journal.write(
            "acceptance",
            draft_version=version or "none",
            drafts=accepted.drafts,
            accepted=accepted.accepted,
            accepted_at=accepted.accepted_at,
            tau=accepted.tau,
            **of,
        )

    def _note_buffer(self) -> None:
        status, now_s = self.buffer.status(), time.time()
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

    def _fault(self, what: str, detail: str) -> None:
        """Journal a fault when it begins, not for as long as it lasts."""
        if (what, detail) not in self._faults:
            self._faults.add((what, detail))
            self.journal.write("fault", what=what, detail=detail)

    def _heal(self, *whats: str, detail: str | None = None) -> None:
        self._faults = {(w, d) for w, d in self._faults if w not in whats or (detail is not None and d != detail)}

    async def _keep_ranks_awake(self) -> None:
        while True:
            await asyncio.sleep(REST_S)
            await self.cycle.in_thread(self.cycle.trainer.ranks.do, "rest")

    # ----------------------------------------------------------------------------------------------- control

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What a person asked for: status, swap, rollback, judge, forget.

        Raises: ValueError, OSError or KeyError with what to tell them.
        """
        match request.get("do"):
            case "status":
                state = self.cycle.state
                return {"phase": state.phase.value, "candidate": state.candidate, "current": self.cycle.current}
            case "swap":
                outcome = await self.cycle.request_swap(str(request["version"]))
                return {"passed": outcome.passed, "version": outcome.version, "reason": outcome.reason}
            case "rollback":
                return {"version": await self.cycle.go_back("a person asked for it")}
            case "judge":
                verdict = await self.cycle.in_thread(self.cycle.verdict_on, Path(request["draft"]))
                return {"decision": verdict.decision.value, "reason": verdict.reason}
            case "forget":
                return {"records": await self._forget(str(request["tenant"]))}
            case other:
                raise ValueError(f"the learner does not know what {other!r} is")

    async def _forget(self, tenant: str) -> int:
        """How many records of the tenant are gone; what arrives later of what was recorded until now is not stored."""
        async with self._intake:
            num_records = await asyncio.to_thread(self.buffer.delete_tenant, tenant, time.time())
            if self._stream is not None:
                await self._stream.purge_unread()
            until_s = time.monotonic() + DRAIN_S
            while (taken := await self._take()).counts and time.monotonic() < until_s:
                num_records += taken.counts["forgotten"]
            return num_records


def _stream(cfg: LearnerConfig, buffer: Buffer, vocab_size: int) -> StreamSource:
    from online.stream import StreamSource  # nats-py is an extra

    return StreamSource(cfg.ingest, cfg.nats, cfg.stream, buffer, vocab_size)


def _what_failed(error: OSError) -> str:
    if isinstance(error, BufferFullError):
        return "disk_full"
    return "broker_unreachable" if isinstance(error, ConnectionError) else "spool_unreadable"


def vocab_size(target: Path) -> int:
    config = json.loads((target / "config.json").read_text())
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", type=Path, required=True, help="TOML file; redraft learner --print-config shows one"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. training.lr=1e-3")
    arguments = parser.parse_args()
    try:
        cfg = load_config(arguments.config, arguments.set)
    except (ValueError, OSError) as error:
        parser.exit(2, f"redraft learner: {error}\n")
    run(cfg)


if __name__ == "__main__":
    main()
