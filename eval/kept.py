"""What was computed once, kept on disk under a hash of what it depends on: how an interrupted run goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from heads.artifact import write_whole

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


def file_print(name: str) -> str:
    """A hash of names, sizes and times of a folder's files, or of the file's; what is neither (a hub name) as it is."""
    path = Path(name)
    if not name or not path.exists():
        return name
    files = sorted(below for below in path.rglob("*") if below.is_file()) if path.is_dir() else [path]
    stats = [(str(file.relative_to(path)), file.stat()) for file in files]
    return key_hash([(below, stat.st_size, stat.st_mtime_ns) for below, stat in stats])
