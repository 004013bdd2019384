"""Small JSON files with a layout number and a CRC-32, which reveals damage.

Layout number and checksum are stored next to the other fields.

    {"layout": 1, "crc32": "5d41a0c2", "phase": "idle", ...}

Files from earlier releases have neither, and are read without a check.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from redraft.files.artifact import write_whole

T = TypeVar("T")
D = TypeVar("D")
LAYOUT, CRC = "layout", "crc32"


class DamagedError(ValueError):
    """The file is truncated, altered or empty."""


def write_sealed(
    path: Path, fields: Mapping[str, Any], layout: int = 1, *, mode: int | None = None
) -> None:
    """Write the fields with their layout and checksum, completely or not at all.

    `mode` is the file's mode, regardless of the umask.
    """
    sealed = {LAYOUT: layout, CRC: _checksum({LAYOUT: layout, **fields}), **fields}
    write_whole(path, json.dumps(sealed), mode=mode)


def read_sealed(path: Path, layout: int = 1) -> Any:
    """Read the fields that `write_sealed` wrote.

    For a file with neither layout nor checksum, return the JSON value unchanged.

    Raises:
        DamagedError: the file differs from what was written.
        ValueError: a later release wrote it.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged ({error})") from error
    # Either of the two marks a sealed file. If only one is present, the file is damaged.
    if not isinstance(content, dict) or not {LAYOUT, CRC} & content.keys():
        return content
    checksum = content.pop(CRC, None)
    if checksum != _checksum(content):
        raise DamagedError(f"{path} is damaged (its checksum differs)")
    # Check this after the checksum, which covers the layout: a flipped bit in the layout is damage,
    # not a later release.
    written = content.pop(LAYOUT, layout)
    if written > layout:
        raise ValueError(
            f"{path} was written by a later release of redraft (layout {written}): upgrade this one"
        )
    return content


def read_sealed_as(path: Path, kind: type[T], otherwise: D) -> T | D:
    """Read the fields as a record. Return `otherwise` if there is no file.

    Raises:
        DamagedError: the file differs from what was written, or the fields have the wrong type.
        ValueError: a later release wrote it.
        OSError: it cannot be read.
    """
    if not path.exists():
        return otherwise
    content = read_sealed(path)
    try:
        return msgspec.convert(content, kind)
    except ValueError as error:
        name = kind.__name__.strip("_").lower()
        raise DamagedError(f"{path} is damaged (it does not contain a {name}: {error})") from error


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that it can be inspected, and return the new path.

    A file that was set aside earlier is replaced.
    """
    aside = path.with_name(f"{path.name}.damaged")
    return path.replace(aside)


def _checksum(fields: Mapping[str, Any]) -> str:
    # Convert to JSON and back first, so that all keys are strings, as they are when read from a
    # file: json sorts the number 2 before 10, but the string "10" before "2".
    canonical = json.dumps(json.loads(json.dumps(fields)), sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(canonical.encode()):08x}"
