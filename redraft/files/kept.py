"""A disk cache that lets an interrupted run continue. Its keys are hashes of a value's inputs."""

import contextlib
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from redraft.files.artifact import write_whole
from redraft.files.folder import is_hub_name, model_folder

T = TypeVar("T")

KEPT = re.compile(r"(.+-)?[0-9a-f]{16}\.json")
"""File names of cached values, with the first 64 bits of the hash of their key."""


def compute_once(
    folder: Path, name: str, key: object, kind: type[T], compute: Callable[[], T]
) -> T:
    """Return the result of `compute()`, or the one that an earlier run with an equal `key` cached.

    The result is stored in `folder` as `name`-HASH.json.
    """
    if (kept := read_kept(folder, name, key, kind)) is not None:
        return kept
    value = compute()
    write_whole(_find_path(folder, name, key), msgspec.json.encode(value))
    return value


def read_kept(folder: Path, name: str, key: object, kind: type[T]) -> T | None:
    """Return the value that `compute_once` cached with an equal `key`, or None.

    None also for a value from a version of redraft whose `kind` has different fields.
    """
    path = _find_path(folder, name, key)
    if path.is_file():
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.json.decode(path.read_bytes(), type=kind)
    return None


def _find_path(folder: Path, name: str, key: object) -> Path:
    # 64 bits of the hash are enough for the few values in a folder.
    return folder / f"{name}-{hash_key(key)[:16]}.json"


def find_not_kept(folder: Path) -> Path | None:
    """Return the first file in `folder` whose name is not that of a cached value, or None."""
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return next((path for path in files if not KEPT.fullmatch(path.name)), None)


def hash_key(key: object) -> str:
    """Return the SHA-256, in hex, of any JSON-serialisable value."""
    return hashlib.sha256(msgspec.json.encode(key)).hexdigest()


def fingerprint_path(name: str) -> str:
    """Return a hash of the names, sizes and times of the files at a path.

    For a hub name, return the name with the commit in the hub's cache, or `name` itself if the
    model is not cached.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):
        if is_hub_name(name):
            return f"{name}@{model_folder(name).name}"
    path = Path(name)
    if not name or not path.exists():
        return name
    files = (
        sorted(below for below in path.rglob("*") if below.is_file()) if path.is_dir() else [path]
    )
    # Use size and time instead of the bytes, which would take minutes to read for a large model.
    stats = [(str(file.relative_to(path)), file.stat()) for file in files]
    return hash_key([(below, stat.st_size, stat.st_mtime_ns) for below, stat in stats])
