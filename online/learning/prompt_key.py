"""The key that decides which conversations are held out.

Without the key, no one can find or construct a held-out prompt.

    held-out.key     the key
    held-out.json    the key's SHA-256, with a checksum, to notice that the key was replaced

With a plain hash, a client could find held-out prompts by trial, and supply all of the gate's
evidence.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from redraft.files.artifact import write_whole
from redraft.files.sealed import DamagedError, read_sealed_as, set_aside, write_sealed
from redraft.online.records.record import Record

KEY_BYTES = 32
KEY, NOTE = "held-out.key", "held-out.json"

MAX_EARLIER = 4096
"""Maximum number of places in a prompt at which an earlier prompt may end; the last ones are used.
A chat has a few per message.
"""


@dataclass(frozen=True, kw_only=True)
class Headers:
    """The tokens with which a target's chat template ends a prompt, before the answer."""

    marks: frozenset[int] = frozenset()
    """Ids of the tokens that mark roles and ends of messages, such as [/INST]."""
    tags: frozenset[bytes] = frozenset()
    """Reasoning tags at the end of a prompt, int32 ids, such as an empty <think> block."""


NO_HEADERS = Headers()


class Hashes(NamedTuple):
    """Keyed hashes of a record as signed 64-bit integers, which SQLite can store. Never 0."""

    prompt: int
    request: int


def is_held_out(conversation: int, fraction: float) -> bool:
    """Whether a conversation, given its hash, is among the `fraction` of them that is held out."""
    # Convert a signed to an unsigned number: the hash is spread evenly over 0 to 2^64 - 1.
    return conversation + 2**63 < fraction * 2**64


class PromptKey:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def make(cls) -> PromptKey:
        """Create a new key that lasts only as long as this process."""
        return cls(make_secret())

    def hash(self, record: Record) -> Hashes:
        # Hash the prompt only: answers to one prompt differ, and training on one answer would leak
        # into the evaluation on another.
        prompt = self._digest(record.prompt)
        # Clients choose part of a request's id; a server uses a new id at every start.
        request = self._digest(prompt + f"{record.server_id}\0{record.request_id}".encode())
        return Hashes(_to_integer(prompt), _to_integer(request))

    def hash_earlier(self, prompt: bytes, headers: Headers) -> Iterator[int]:
        """Yield the hashes of the prompts that this prompt (int32 ids) may continue, longest first.

        An earlier prompt ends with the header of its answer, so only the places after a mark, or
        after the last token of this prompt's header, are hashed. Tags after an earlier header may be
        missing in this prompt, because templates leave out the reasoning of earlier answers. Each
        place is therefore hashed with and without them.
        """
        ids_T = np.frombuffer(prompt, "<i4")
        tags = max(filter(prompt.endswith, headers.tags), key=len, default=b"")
        end = len(ids_T) - len(tags) // 4
        if not end:
            return
        is_end_T = np.isin(ids_T[:end], [*headers.marks, ids_T[end - 1]])
        running, begin = hmac.new(self._secret, digestmod="sha256"), 0
        found: list[int] = []
        for place in (np.flatnonzero(is_end_T)[-MAX_EARLIER:] + 1).tolist():
            running.update(prompt[4 * begin : 4 * place])
            begin = place
            found.append(_to_integer(running.digest()))
            for more in headers.tags:
                with_tags = running.copy()
                with_tags.update(more)
                found.append(_to_integer(with_tags.digest()))
        yield from reversed(found)

    def _digest(self, content: bytes) -> bytes:
        return hmac.digest(self._secret, content, "sha256")


@dataclass(frozen=True, kw_only=True)
class OpenedKey:
    key: PromptKey
    rehash_through: int
    """Records up to this number were hashed with a different key and get new hashes at every start.
    """
    damage: tuple[str, ...]
    """One message for each damaged or missing file."""


@dataclass(frozen=True, kw_only=True)
class _Note:
    key_sha256: str
    """Hash of the key; empty while a lost key is being replaced, so that no key matches."""
    rehash_through: int


def open_key(folder: Path, *, newest: int, has_hashes: bool) -> OpenedKey:
    """Open the key in the buffer's folder, or create one that only this user can read.

    A lost key is replaced, and the loss is reported. `newest` is the highest sequence number of a
    record so far; `has_hashes` means that a key has hashed some record.

    Raises:
        ValueError: a later release wrote held-out.json.
        OSError: a file cannot be read or written.
    """
    secret, damage = _read_secret(folder / KEY), list[str]()
    saved: _Note | None = None
    try:
        note = saved = read_sealed_as(folder / NOTE, _Note, None)
    except DamagedError as error:
        damage.append(f"{error}: the file was rewritten for the existing {KEY}")
        # The lost file may have said which records were hashed with a different key. Rehashing with
        # the same key gives the same hashes.
        note = _Note(key_sha256=_sha256(secret or b""), rehash_through=newest)
    if problem := _find_problem(secret, note, has_hashes):
        note, secret = _Note(key_sha256="", rehash_through=newest), None
        damage.append(_take_away(folder, problem, note))
    if secret is None:  # written before the key's hash, because a key without a hash is not damage
        secret = make_secret()
        write_whole(folder / KEY, secret, mode=0o600)
    # The number is kept, because the files contain hashes made with the lost key until these
    # records expire.
    wanted = _Note(key_sha256=_sha256(secret), rehash_through=note.rehash_through if note else 0)
    if wanted != saved:
        write_sealed(folder / NOTE, asdict(wanted), mode=0o600)
    return OpenedKey(
        key=PromptKey(secret), rehash_through=wanted.rehash_through, damage=tuple(damage)
    )


def make_secret() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def _find_problem(secret: bytes | None, note: _Note | None, has_hashes: bool) -> str:
    """Return why the key is not the one created here; empty if it is, or if there is none yet."""
    if secret is None:
        return "was missing" if note or has_hashes else ""
    if len(secret) != KEY_BYTES:
        return "did not contain a key"
    return (
        "was not the key that was created here"
        if note and note.key_sha256 != _sha256(secret)
        else ""
    )


def _take_away(folder: Path, problem: str, note: _Note) -> str:
    """Set the damaged key aside, and return a message about it."""
    # Written first, so that after a kill in between, the next start finds no matching key.
    write_sealed(folder / NOTE, asdict(note), mode=0o600)
    path = folder / KEY
    aside = f" (it is now {set_aside(path).name})" if path.exists() else ""
    return (
        f"{path} {problem}{aside}: a new key holds out different prompts, so until the "
        "old records have expired, candidates may be evaluated on prompts that were trained on"
    )


def _read_secret(path: Path) -> bytes | None:
    if not path.exists():
        return None
    path.chmod(0o600)
    return path.read_bytes()


def _sha256(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def _to_integer(digest: bytes) -> int:
    # 0 means no hash (`NO_HASHES`).
    return int.from_bytes(digest[:8], "big", signed=True) or 1
