"""What was computed once, kept on disk under a hash of what it depends on: how an interrupted run goes on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def kept(folder: Path, name: str, key: object, kind: type[T], compute: Callable[[], T]) -> T:
    """`compute()`, or what a run with an equal `key` left of it in `folder` as `name`-HASH.json."""
    path = folder / f"{name}-{key_hash(key)[:16]}.json"
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=kind)
    value = compute()
    write_whole(path, msgspec.json.encode(value))
    return value


def key_hash(key: object) -> str:
    """SHA-256 (hex) of anything that JSON can hold."""
    return hashlib.sha256(msgspec.json.encode(key)).hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, whole or not at all, whenever the process or the machine dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
