"""The learner's journal.

It records actions and observations as lines of JSON, for the page, the metrics and debugging.

    learner ─ write ─► journal-<offset>.jsonl ─ full ─► next file ─ over budget ─► the oldest is unlinked
                 └───► observers: metrics, the process's log, wandb
    page ◄─ read(after) ─ any process, at any time

| kind | written |
|---|---|
| `acceptance` | for every server, and every domain, at the end of every counting window |
| `buffer` | at every poll of the servers |
| `training` | at every optimizer step |
| `gate`, `swap`, `state`, `server` | when it happens; `state` also when the learner starts |
| `staleness` | when the served draft is compared with its past results, and when the learner sleeps or wakes |
| `fault` | when something failed and the learner continues |

No entry can contain a user's text: fields are numbers, identifiers without spaces, and short
labels. An unknown field is refused. Reasons are sentences written by the learner.

An offset counts bytes from the beginning of the journal, including unlinked files, so it stays
valid across rotation and restarts. Only one process writes. Every line ends with a checksum. A line
torn by a kill or damaged is skipped.
"""

import json
import logging
import numbers
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

import msgspec

from redraft.files.printable import printable

logger = logging.getLogger("redraft.journal")

NUM_FILES = 8  # Number of files in a full journal. Deleting the oldest one removes an eighth of it.
MAX_REASON_CHARS = 500  # Longer reasons are truncated, because they may quote a server's response.
_NOT_ASCII = re.compile(r"[^ -~]")

Identifier = Annotated[str, msgspec.Meta(pattern=r"^[^\s\x00-\x1f\x7f-\x9f]+\Z", max_length=200)]
"""An address, a version or a code, without spaces or control characters."""
MAX_LABEL_CHARS = 64
# A name given by a client, e.g. a domain; empty if there is none.
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL_CHARS)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]

Phase = Literal["idle", "training", "judging", "publishing", "canary", "rolling", "halted"]
Verdict = Literal["promote", "reject", "inconclusive"]
SwapOutcome = Literal["swapped", "refused", "unreachable", "rolled_back"]


class _Entry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    time_s: float = 0.0
    """End of the entry's window in seconds since the epoch; set by `Journal.write`."""


class AcceptanceEntry(_Entry, frozen=True, kw_only=True, tag="acceptance"):
    """Acceptance since the previous entry for the same server and domain.

    Without a domain, these are the engine's counters for all traffic. With a domain, they are
    counted on captured records, by thinking mode, e.g. `code, thinking`.
    """

    server: Identifier | None = None  # None if several servers' records are counted together
    draft_version: Identifier
    # The target's present version; None for the weights in its folder.
    target_version: Identifier | None = None
    # Number of draft tokens by batch size, for a server that chooses it at run time.
    pace: str = ""
    domain: Label | None = None
    drafts: float  # Target steps that verified a draft.
    accepted: float  # Draft tokens accepted.
    accepted_at: tuple[float, ...] = ()  # Accepted tokens by draft position.
    # 1 + accepted / drafts, including the bonus token; None if there are no drafts.
    tau: float | None
    served_drafts: float | None = None
    """Counts from the engine's own /metrics: drafts, accepted tokens and generated tokens,
    including lookups, and the number of seconds. None if unknown.
    """
    served_accepted: float | None = None
    served_tokens: float | None = None
    served_s: float | None = None


class BufferEntry(_Entry, frozen=True, kw_only=True, tag="buffer"):
    records: int
    bytes: int
    max_bytes: int | None = None  # Size above which the oldest records are dropped.
    held_out: int  # Records to judge by.
    dropped: dict[Identifier, int] = {}
    """Records dropped since the learner started, by reason: duplicate, foreign, corrupt, expired,
    evicted, queue_full, ...
    """
    oldest_s: float | None = None  # age of the oldest record, in seconds
    # Age of the oldest untrained record, in seconds; None if there is none.
    lag_s: float | None = None
    lag_records: int = 0  # Records not trained yet.


class TrainingEntry(_Entry, frozen=True, kw_only=True, tag="training"):
    step: int  # Optimizer steps of this draft.
    loss: float | None  # loss in nats per position; None if it was not finite
    alpha: float | None = None
    alpha_greedy: float | None = None
    grad_norm: float | None = None
    """Norm of the gradient before clipping; None if the step was skipped because it was not finite.
    """
    lr: float | None = None  # Learning rate of the step.
    tokens_per_s: float | None = None
    # Fresh records trained on, including for abandoned drafts; 0 if there is no checkpoint.
    records_seen: int
    # Mean age of the step's fresh records when it began, in seconds.
    waited_s: float | None = None
    step_s: float | None = None  # Duration of the step, in seconds.
    paused_s: float | None = None  # Part of the duration that was a pause for running requests.
    skipped: int = 0  # fresh records skipped because training was slower than traffic


class DomainGain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gain: float
    low: float
    high: float
    requests: int


class GateEntry(_Entry, frozen=True, kw_only=True, tag="gate"):
    verdict: Verdict
    candidate: Identifier
    incumbent: Identifier
    # tau(candidate) - tau(incumbent); None if there were too few requests.
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    tau_candidate: float | None = None
    tau_incumbent: float | None = None
    requests: int = 0
    # Part of the evaluation time that was a pause for running requests.
    paused_s: float | None = None
    domains: dict[Label, DomainGain] = {}
    contexts: dict[Label, DomainGain] = {}  # by context length, e.g. "1,024 to 2,047 tokens"
    reason: Reason = ""


class SwapEntry(_Entry, frozen=True, kw_only=True, tag="swap"):
    """A server was requested to serve a different version."""

    server: Identifier
    version: Identifier  # The version that it was requested to serve.
    from_version: Identifier | None = None
    outcome: SwapOutcome  # `rolled_back` means a swap from a newer version back to `version`.
    duration_ms: float | None = None
    reason: Reason = ""


class StateEntry(_Entry, frozen=True, kw_only=True, tag="state"):
    phase: Phase
    candidate: Identifier | None = None
    reason: Reason = ""
    # Measured after each phase, once freed memory has been returned to the system.
    resident_bytes: int | None = None
    # Number of versions promoted since the folder was created, after each phase.
    promoted: int | None = None


class StalenessEntry(_Entry, frozen=True, kw_only=True, tag="staleness"):
    """The served draft on new held-out requests, compared with the same draft at its promotion."""

    version: Identifier
    # Tau at the promotion, weighted by the current mix of domains; None if it is not comparable.
    tau_then: float | None = None
    tau_now: float | None = None
    loss: float | None = None  # tau_then - tau_now.
    low: float | None = None
    high: float | None = None
    requests: int = 0  # New held-out requests.
    is_asleep: bool  # Training is not worth its cost, and the learner waits until acceptance falls.
    # Number of optimizer steps skipped during sleep, since the folder was created.
    steps_saved: int = 0
    reason: Reason = ""


class FaultEntry(_Entry, frozen=True, kw_only=True, tag="fault"):
    what: Identifier  # `disk_full`, `loss_not_finite`, `server_unreachable`, `target_changed`, ...
    detail: Identifier | None = None  # identifies the cause: an errno, a server or a version
    reason: Reason = ""


class ServerEntry(_Entry, frozen=True, kw_only=True, tag="server"):
    """A new server was found, or a known one is no longer listed."""

    server: Identifier
    change: Literal["joined", "left"]


Entry = (
    AcceptanceEntry
    | BufferEntry
    | TrainingEntry
    | GateEntry
    | SwapEntry
    | StateEntry
    | StalenessEntry
    | FaultEntry
    | ServerEntry
)
E = TypeVar("E", bound=Entry)
Observer = Callable[[Entry], None]


class Entries(NamedTuple):
    entries: list[Entry]
    offset: int
    """Offset after the last entry, where the next read starts."""


class Journal:
    """The journal of one learner, in `folder`.

    Several threads of one process may write, and any process may read.
    """

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
        self.num_lost = 0  # Entries lost because the disk was full.
        self._clock = clock
        self._lock = threading.Lock()

    def write(self, entry: E) -> E:
        """Write an entry with the current time, and return it as written.

        Non-finite numbers become None, and long reasons are truncated. If the disk is full, the
        entry is lost and counted, but learning continues and observers still receive the entry.

        Raises:
            ValueError: a field is neither a number nor an identifier; the message names it.
        """
        fields = msgspec.to_builtins(entry, enc_hook=_to_python) | {"time_s": self._clock()}
        if "reason" in fields:
            reason = printable(" ".join(fields["reason"].split()))
            fields["reason"] = reason[:MAX_REASON_CHARS]
        try:
            # Encode and decode, because msgspec validates only when it decodes. NaN and infinities
            # become null.
            entry = cast(E, _decoder.decode(_encoder.encode(fields)))
        except msgspec.ValidationError as error:
            raise ValueError(
                f"this is not a {fields['kind']!r} entry of the journal: {error}"
            ) from error
        with self._lock:
            try:
                self._append(_seal(_encoder.encode(entry)))
            except OSError as error:
                # Logged once, because a full disk would repeat it every second.
                if not self.num_lost:
                    logger.warning(
                        "the journal in %s cannot be written: %s", self.folder, error.strerror
                    )
                self.num_lost += 1
        for observe in self.observers:
            try:
                observe(entry)
            except Exception as error:  # an observer must never stop the learner
                logger.warning("an observer of the journal failed: %s", type(error).__name__)
        return entry

    def read(self, after: int = 0) -> Entries:
        """Return the entries after offset `after`, in writing order, and the offset after the last.

        Torn, damaged or unknown lines are skipped. An offset beyond the end belongs to a journal
        that was removed, so reading starts from the beginning.
        """
        files = self._files()
        if not files or after > files[-1][0] + files[-1][1].stat().st_size:
            after = 0
        entries: list[Entry] = []
        for begin, path in files:
            after = max(after, begin)  # entries before the oldest file have been deleted
            lines = _read_complete_lines(path, after - begin)
            entries += [entry for line in lines if (entry := decode(line)) is not None]
            after += sum(map(len, lines))
        return Entries(entries, after)

    def _append(self, line: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files = self._files() or [(0, self.folder / _file_name(0))]
        begin, path = files[-1]
        size = path.stat().st_size if path.exists() else 0
        if size >= self.max_bytes // NUM_FILES:
            # The name contains the offset, so a reader finds its place even after older files were
            # deleted.
            path = self.folder / _file_name(begin + size)
            for _, oldest in files[: max(0, len(files) + 1 - NUM_FILES)]:
                oldest.unlink(missing_ok=True)
        elif size and not _ends_a_line(path):
            line = (
                b"\n" + line
            )  # the last line is torn: the writer was killed, or found the disk full
        # Unbuffered, so that a line is one write, and a reader never gets a later line before an
        # earlier one.
        with path.open("ab", buffering=0) as file:
            file.write(line)

    def _files(self) -> list[tuple[int, Path]]:
        names = [
            (_FILE_NAME.fullmatch(path.name), path) for path in self.folder.glob("journal-*.jsonl")
        ]
        return sorted((int(name[1]), path) for name, path in names if name)


def to_stderr(entry: Entry) -> None:
    """An observer that writes the journal to stderr, as the log of the process.

    The lines are the same, but in ASCII for any log collector, because clients choose the domain
    names.
    """
    line = _encoder.encode(entry).decode()
    sys.stderr.write(_NOT_ASCII.sub(lambda char: json.dumps(char[0])[1:-1], line) + "\n")


def _to_python(value: object) -> Any:
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        return value.item()
    raise ValueError(
        f"the journal accepts only numbers and identifiers, not {type(value).__name__}"
    )


_encoder = msgspec.json.Encoder(enc_hook=_to_python)
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"\}\n$')
_FILE_NAME = re.compile(r"journal-(\d+)\.jsonl")


def _file_name(begin: int) -> str:
    return f"journal-{begin:016d}.jsonl"


def _read_complete_lines(path: Path, begin: int) -> list[bytes]:
    """Read the lines from byte `begin` on, without the last one if it is incomplete."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:  # deleted by the rotation in the meantime
        return []
    # An incomplete line does not count for the offset either, so the next read gets the whole line.
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _seal(line: bytes) -> bytes:
    """Append a CRC-32 to the JSON object as its last field, and end the line."""
    # E.g. {"a":1} becomes {"a":1,"crc32":"561bacaf"}, which is still one JSON object. The CRC
    # covers {"a":1}.
    return b'%b,"crc32":"%08x"}\n' % (line[:-1], zlib.crc32(line))


def decode(line: bytes) -> Entry | None:
    """Decode one line; None if it is damaged or of an unknown kind.

    Lines from earlier releases have no checksum.
    """
    if sealed := _CHECKSUM.search(line):
        line = line[: sealed.start()] + b"}"
        if zlib.crc32(line) != int(sealed[1], 16):
            return None
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
