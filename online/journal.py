"""The learner's journal: what it did and saw, one line of JSON each, for the page, the metrics and whoever debugs it.

    learner ─ write ─► journal-<offset>.jsonl ─ full ─► next file ─ over budget ─► the oldest is unlinked
                 └───► observers: metrics, the process's log, wandb
    page ◄─ read(after) ─ any process, at any time

| kind | written |
|---|---|
| `acceptance` | for every server (and every domain) at the end of every window of counting |
| `buffer`, `training` | every few seconds |
| `gate`, `swap`, `state`, `server` | when it happens, and `state` also when the learner starts |
| `fault` | when something went wrong that was survived |

No entry can hold a user's text: fields are numbers, identifiers without spaces, and labels that the writer chose; an
unknown field is refused. Reasons are the learner's own sentences.

An offset counts bytes from the journal's beginning, those that are unlinked included, so it stays true over rotation
and restarts. One process writes; a line that it left torn when it was killed is skipped.
"""

from __future__ import annotations

import logging
import numbers
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

logger = logging.getLogger("redraft.journal")

NUM_FILES = 8
"""A full journal is about this many files: one unlink forgets an eighth of it."""

MAX_REASON_CHARS = 500
"""Longer ones are cut: a server's answer may be quoted in them."""

Identifier = Annotated[str, msgspec.Meta(pattern=r"^\S+$", max_length=200)]
"""An address, a version, a code: no spaces."""
Label = Annotated[str, msgspec.Meta(max_length=64)]
"""A domain as its client named it; empty where it named none."""
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]

Phase = Literal["idle", "training", "judging", "publishing", "canary", "rolling", "halted"]
Verdict = Literal["promote", "reject", "inconclusive"]
SwapOutcome = Literal["swapped", "refused", "unreachable", "rolled_back"]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    time_s: float
    """Seconds since the epoch; the end of the window where there is one."""


class AcceptanceEntry(_Entry, frozen=True, kw_only=True, tag="acceptance"):
    """What was accepted since the entry before of the same server and domain.

    With `domain` None: the engine's own counters of all traffic. With a domain: counted on captured records.
    """

    server: Identifier | None = None
    """None where the records of several servers are counted together."""
    draft_version: Identifier
    domain: Label | None = None
    drafts: float
    """Target steps that verified a draft."""
    accepted: float
    """Draft tokens accepted."""
    accepted_at: tuple[float, ...] = ()
    """Accepted tokens by draft position."""
    tau: float | None
    """1 + accepted / drafts, bonus token included; None without drafts."""


class BufferEntry(_Entry, frozen=True, kw_only=True, tag="buffer"):
    records: int
    """To train on."""
    bytes: int
    max_bytes: int | None = None
    """Where the oldest go."""
    held_out: int
    """Records to judge by."""
    dropped: dict[Identifier, int] = {}
    """By reason, since the learner started: duplicate, foreign, corrupt, expired, evicted, queue_full, ..."""
    oldest_s: float | None = None
    """Age of the oldest record."""
    lag_s: float | None = None
    """Age of the oldest record that was not trained yet; None where it is not known, or all were."""
    lag_records: int = 0
    """Records that were not trained yet."""


class TrainingEntry(_Entry, frozen=True, kw_only=True, tag="training"):
    step: int
    """Optimizer steps of this draft."""
    loss: float | None
    """Nats per position; None where it was not finite."""
    alpha: float | None = None
    alpha_greedy: float | None = None
    tokens_per_s: float | None = None
    records_seen: int
    """Fresh ones, since the learner started."""
    skipped: int = 0
    """Fresh records passed over because training was slower than traffic, since the learner started."""


class DomainGain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gain: float
    low: float
    high: float
    requests: int


class GateEntry(_Entry, frozen=True, kw_only=True, tag="gate"):
    verdict: Verdict
    candidate: Identifier
    incumbent: Identifier
    gain: float | None = None
    """tau(candidate) - tau(incumbent) on held-out requests; None, with its bounds, where there were too few."""
    low: float | None = None
    high: float | None = None
    tau_candidate: float | None = None
    tau_incumbent: float | None = None
    requests: int = 0
    domains: dict[Label, DomainGain] = {}
    reason: Reason = ""


class SwapEntry(_Entry, frozen=True, kw_only=True, tag="swap"):
    """One server was asked to serve another version."""

    server: Identifier
    version: Identifier
    """That it was asked to take."""
    from_version: Identifier | None = None
    outcome: SwapOutcome
    """`rolled_back`: it was brought back to `version`, the one before."""
    duration_ms: float | None = None
    reason: Reason = ""


class StateEntry(_Entry, frozen=True, kw_only=True, tag="state"):
    phase: Phase
    candidate: Identifier | None = None
    reason: Reason = ""


class FaultEntry(_Entry, frozen=True, kw_only=True, tag="fault"):
    what: Identifier
    """`disk_full`, `loss_not_finite`, `server_unreachable`, `target_changed`, ..."""
    detail: Identifier | None = None
    """A code or name: an errno, a server, a version."""


class ServerEntry(_Entry, frozen=True, kw_only=True, tag="server"):
    """A server was found that was not known, or is not there any more where servers are looked for."""

    server: Identifier
    change: Literal["joined", "left"]


Entry = AcceptanceEntry | BufferEntry | TrainingEntry | GateEntry | SwapEntry | StateEntry | FaultEntry | ServerEntry
Kind = Literal["acceptance", "buffer", "training", "gate", "swap", "state", "fault", "server"]
Observer = Callable[[Entry], None]


class Entries(NamedTuple):
    entries: list[Entry]
    offset: int
    """Behind the last of them: what to read after next time."""


class Journal:
    """One learner's journal in `folder`. Any number of threads may write, any number of processes read."""

    def __init__(
        self,
        folder: Path,
        observers: Sequence[Observer] = (),
        *,
        max_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.observers = tuple(observers)
        self.max_bytes = max_bytes
        self.num_lost = 0
        """Entries that could not be written: the disk is full."""
        self._clock = clock
        self._lock = threading.Lock()

    def write(self, kind: Kind, **fields: Any) -> Entry:
        """The entry, written with the time. A disk that is full loses it and counts it: learning goes on.

        Numbers that are not finite become None, and long reasons are cut.

        Raises: ValueError that names the field which is missing, unknown, or neither a number nor an identifier.
        """
        if "reason" in fields:
            fields["reason"] = " ".join(str(fields["reason"]).split())[:MAX_REASON_CHARS]
        try:
            entry = _decoder.decode(_encoder.encode({"kind": kind, "time_s": self._clock(), **fields}))
        except msgspec.ValidationError as error:
            raise ValueError(f"this is no {kind!r} entry of the journal: {error}") from error
        with self._lock:
            try:
                self._append(_encoder.encode(entry) + b"\n")
            except OSError:
                self.num_lost += 1
        self._tell(entry)
        return entry

    def read(self, after: int = 0) -> Entries:
        """All entries behind offset `after`, in the order they were written, and the offset behind them.

        What is torn, damaged or of another release is passed over. An offset beyond the end is that of a journal that
        was removed: reading begins anew.
        """
        files = self._files()
        if not files or after > files[-1][0] + files[-1][1].stat().st_size:
            after = 0
        entries: list[Entry] = []
        for begin, path in files:
            after = max(after, begin)
            lines = _complete_lines(path, after - begin)
            entries += [entry for line in lines if (entry := _decoded(line)) is not None]
            after += sum(map(len, lines))
        return Entries(entries, after)

    def _append(self, line: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files = self._files() or [(0, self.folder / _name(0))]
        begin, path = files[-1]
        size = path.stat().st_size if path.exists() else 0
        if size >= self.max_bytes // NUM_FILES:
            path = self.folder / _name(begin + size)
            for _, oldest in files[: max(0, len(files) + 1 - NUM_FILES)]:
                oldest.unlink(missing_ok=True)
        elif size and not _ends_a_line(path):
            line = b"\n" + line  # a writer was killed, or found the disk full, within its last line
        with path.open("ab", buffering=0) as file:
            file.write(line)

    def _files(self) -> list[tuple[int, Path]]:
        """Every file with the offset of its first byte, the oldest first."""
        return sorted((int(path.stem.split("-")[1]), path) for path in self.folder.glob("journal-*.jsonl"))

    def _tell(self, entry: Entry) -> None:
        for observe in self.observers:
            try:
                observe(entry)
            except Exception as error:  # whatever watches must not stop what learns
                logger.warning("an observer of the journal failed: %s", type(error).__name__)


def to_stderr(entry: Entry) -> None:
    """The observer that makes the journal the process's log: the same lines, for whoever collects them."""
    sys.stderr.write(_encoder.encode(entry).decode() + "\n")


def _plain(value: object) -> Any:
    """A numpy number as Python's own."""
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        return value.item()
    raise ValueError(f"the journal takes numbers and identifiers, not {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def _name(begin: int) -> str:
    return f"journal-{begin:016d}.jsonl"


def _complete_lines(path: Path, begin: int) -> list[bytes]:
    """The lines from byte `begin` on, without the last where it does not end yet."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:  # rotated away meanwhile
        return []
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _decoded(line: bytes) -> Entry | None:
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
