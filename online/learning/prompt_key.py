"""The key that decides which prompts are held out. Without it nobody can find or make such a prompt.

With a plain hash, a client could find held-out prompts by trying, and so supply all of the gate's evidence.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from redraft.heads.files.artifact import sync
from redraft.online.records.record import Record

KEY_BYTES = 32


class Hashes(NamedTuple):
    """Keyed hashes of a record as signed 64-bit integers, which SQLite can store. Never 0."""

    prompt: int
    request: int

    def is_held_out(self, fraction: float) -> bool:
        """True for `fraction` of all prompts. All segments and repetitions of a request get the same answer."""
        return self.prompt + 2**63 < fraction * 2**64


class PromptKey:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def make(cls) -> PromptKey:
        """A new key that ends with this process."""
        return cls(make_secret())

    @classmethod
    def open(cls, path: Path) -> PromptKey:
        """The key in `path`, made if there is none; only this user can read it.

        Raises:
            ValueError: if the file does not hold a key.
            OSError: if it cannot be read or written.
        """
        if not path.exists():
            _write(path)
        path.chmod(0o600)
        secret = path.read_bytes()
        if len(secret) != KEY_BYTES:
            raise ValueError(
                f"{path} does not hold a key: restore it, or remove it and a new one is made, which holds out other "
                "prompts from then on"
            )
        return cls(secret)

    def hash(self, record: Record) -> Hashes:
        # The prompt only: answers of one prompt differ, and training on one would leak into judging by another.
        prompt = self._digest(record.context[: 4 * record.num_prompt_tokens])  # int32 ids
        request = self._digest(prompt + f"{record.server_id}\0{record.request_id}".encode())
        return Hashes(_to_integer(prompt), _to_integer(request))

    def _digest(self, content: bytes) -> bytes:
        return hmac.digest(self._secret, content, "sha256")


def make_secret() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def _to_integer(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True) or 1


def _write(path: Path) -> None:
    """Write a new key. It appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(make_secret())
    sync(partial)
    partial.replace(path)
    sync(path.parent)
