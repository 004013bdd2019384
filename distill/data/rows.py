"""Read rows of data files.

The files are JSON Lines, JSON lists or Parquet, plain or compressed, on disk or on the hub.

Instead of a damaged row, an `UnusableRowError` is yielded, so that the caller decides whether to
continue.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import zstandard

from redraft.distill.data.splits import choose_files, find_split, is_split
from redraft.files.artifact import POINTER, refuse_pointer
from redraft.files.setting_error import SettingError

if TYPE_CHECKING:
    import datasets

SPLITS = "dataset_dict.json"  # `save_to_disk` lists the splits in this file.
COMPRESSIONS = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
"""The first bytes of a compressed file, by suffix."""
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # marks the end of a stream of record batches
BATCH_ROWS = 1000
# Number of compressed bytes read at a time. Small, because a block may grow ten thousandfold.
ZSTD_BLOCK = 1 << 14
OTHER_PACKED = (".bz2", ".xz", ".zip", ".7z", ".tar", ".tgz", ".lz4", ".br")
TABLES = (".jsonl", ".ndjson", ".json", ".parquet")
TEXTS = (".txt", ".md")


class UnusableRowError(ValueError):
    """A row that is not a conversation to learn from.

    `reason` is short and identical for all rows with the same fault, so that they can be counted.
    `detail` describes the individual row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Row:
    place: str
    """Location in the source, for error messages: `row 7`, or `part.jsonl, line 7` in a folder."""
    values: dict[str, Any] | UnusableRowError
    domain: str = "all"
    """Domain of the row. Without a domain column, it is the first folder below the source."""


def read_rows(source: str, split: str) -> Iterator[Row]:
    """Yield all rows of a file, or of one `split` of a folder or of a data set on the hub.

    Raises:
        FileNotFoundError: the file or folder does not exist.
        ValueError: a file is corrupt, or there is no such data set.
    """
    path = Path(source)
    if is_saved(path):
        yield from _numbered(map(_without_missing, _load_saved(path, split)))
    elif path.is_dir():
        for file in choose_files(path, find_files(path, TABLES), split)[0]:
            for row in _file_rows(file):
                place = f"{file.relative_to(path).as_posix()}, {row.place}"
                yield Row(place, row.values, folder_domain(path, file))
    elif _is_on_hub(source):
        yield from _numbered(map(_without_missing, _load_hub(source, split)))
    elif not path.exists():
        raise FileNotFoundError(f"{source}: no such file")
    else:
        yield from _file_rows(path)


def identify_source(source: str, split: str) -> list[Any]:
    """Return the files' names, sizes and times, or a data set's fingerprint.

    Raises the same errors as `read_rows`.
    """
    path = Path(source)
    if is_saved(path):
        return [split, _load_saved(path, split)._fingerprint]
    if path.is_dir():
        files = find_files(path, TABLES) or find_files(path, TEXTS)
        files, _ = choose_files(path, files, split)
        return [[file.relative_to(path).as_posix(), *_stamp(file)] for file in files]
    if _is_on_hub(source):
        return [split, _load_hub(source, split)._fingerprint]
    if not path.exists():
        raise FileNotFoundError(f"{source}: no such file")
    return _stamp(path)


def _is_on_hub(source: str) -> bool:
    """Whether a source that is not a folder is the name of a data set.

    Raises:
        ValueError: it is a web address, or a file of a different kind.
    """
    if "://" in source:
        raise ValueError(f"{source} is a web address: download the data, and give the file")
    path = Path(source)
    if table_format(path) is None and path.is_file():
        cure = (
            f"to train on texts, give its folder, {path.parent}; to use prompts, write them to a "
            '.jsonl file with a line {"prompt": ...} for each'
            if table_format(path, TEXTS)
            else f"unpack it, or pack it as {' or '.join(COMPRESSIONS)}"
            if path.suffix.lower() in OTHER_PACKED
            else "convert it, for example with datasets.Dataset.from_csv(FILE).to_json('FILE.jsonl')"
        )
        raise ValueError(f"{path} is not a {', '.join(TABLES)} file: {cure}")
    return table_format(path) is None


def is_saved(folder: Path) -> bool:
    return (folder / SPLITS).is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def _load_saved(folder: Path, split: str) -> datasets.Dataset:
    import datasets  # imported here, because it takes a second, too long for --help

    # Pyarrow reads a stream that was cut between two batches as complete.
    for file in folder.rglob("*.arrow"):
        with file.open("rb") as data:
            data.seek(max(0, file.stat().st_size - len(ARROW_END)))
            if data.read() != ARROW_END:
                raise ValueError(f"{file} is truncated: save or download it again")
    saved = datasets.load_from_disk(str(folder))
    return saved if isinstance(saved, datasets.Dataset) else _take_split(saved, str(folder), split)


def _take_split(saved: datasets.DatasetDict, source: str, split: str) -> datasets.Dataset:
    """Return the requested split, or otherwise the only split of its kind (`find_split`).

    Raises:
        SettingError: there is no such split, or there are several.
    """
    if (found := find_split(split, saved)) is None:
        raise SettingError(
            f"{source} has no split {split}, only {', '.join(saved)}: choose one with {{split}}"
        )
    return saved[found]


def _stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def find_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the visible files below `folder` with these suffixes, compressed or not, sorted."""
    return sorted(path for path in _visible_files(folder) if table_format(path, suffixes))


def folder_domain(folder: Path, file: Path) -> str:
    """Return the first folder between `folder` and a file that names no split, or `all`."""
    names = file.relative_to(folder).parts[:-1]
    return next((name for name in names if not is_split(name)), "all")


def count_others(folder: Path, suffixes: tuple[str, ...]) -> Counter[str]:
    """Count the visible files below `folder` with none of these suffixes, by suffix or name."""
    others = (path for path in _visible_files(folder) if not table_format(path, suffixes))
    return Counter(path.suffix or path.name for path in others)


def _visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, and below the folders to which its links point.

    Raises:
        FileNotFoundError: the link to a data file is broken.
        OSError: a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    entered = {folder.resolve()}
    for place, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        parent = Path(place)
        # A snapshot from the hub contains .cache/huggingface, which has JSON files of its own.
        below = {name: (parent / name).resolve() for name in folders if not name.startswith(".")}
        folders[:] = sorted(name for name, real in below.items() if real not in entered)
        entered |= set(below.values())
        for path in (parent / name for name in files if not name.startswith(".")):
            if table_format(path, (*TABLES, *TEXTS)) and not path.exists():
                raise FileNotFoundError(
                    f"{path} is a link to {path.readlink()}, which does not exist: download it again"
                )
            if path.is_file():
                yield path


def table_format(path: Path, suffixes: tuple[str, ...] = TABLES) -> str | None:
    """Return a file's suffix in lower case, without compression, if it is one of `suffixes`."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    suffix = name.suffix.lower()
    return suffix if suffix in suffixes else None


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a file's uncompressed content.

    Raises:
        ValueError: the content is corrupt or truncated, or is only a pointer to the data.
    """
    try:
        with path.open("rb") as file:
            start = file.peek(len(POINTER))
            refuse_pointer(path, start)
            compression = _find_compression(path, start)
            if compression == ".gz":
                if not path.stat().st_size:  # some readers treat this as the end of a complete file
                    raise EOFError("it is empty")
                yield cast(BinaryIO, gzip.GzipFile(fileobj=file))
            elif compression == ".zst":
                yield io.BufferedReader(_Blocks(_zstd_blocks(file)))
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise ValueError(f"{path} is corrupt or truncated ({error}): download it again") from error


def _find_compression(path: Path, start: bytes) -> str:
    """Return the suffix for a file's compression; empty for plain content.

    The compression is detected from the content before the file name, because a browser may
    unpack a .gz file and keep its name.
    """
    packed = (suffix for suffix, magic in COMPRESSIONS.items() if start.startswith(magic))
    is_plain_json = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")
    suffix = path.suffix.lower()
    return next(packed, suffix if suffix in COMPRESSIONS and not is_plain_json else "")


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of all frames.

    zstandard's own reader does not distinguish a frame without an end from a complete one.

    Raises:
        EOFError: the last frame has no end.
    """
    block = file.read(ZSTD_BLOCK)
    while True:
        # This is the largest window (`zstd --long=31`).
        frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        while not frame.eof:
            if not block:
                raise EOFError("the end of a zstd frame is missing")
            yield frame.decompress(block)
            block = frame.unused_data or file.read(ZSTD_BLOCK)
        if not block:
            return


class _Blocks(io.RawIOBase):
    """A stream over blocks of bytes."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (block := next(self._blocks, None)) is None:
                return 0
            self._rest = memoryview(block)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _file_rows(path: Path) -> Iterator[Row]:
    kind = table_format(path)
    if kind == ".parquet":
        yield from _numbered(_parquet_rows(path))
        return
    with open_plain(path) as file:
        start = cast(io.BufferedReader, file).peek(len(codecs.BOM_UTF32))
        if b"\0" in start[:4] or start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(
                f"{path} is UTF-16 or UTF-32 text: convert it with `iconv -f UTF-16 -t UTF-8`"
            )
        is_list = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
        yield from _json_rows(path, file) if kind == ".json" or is_list else _json_lines(file)


def _numbered(rows: Iterable[Any]) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        yield Row(
            f"row {number}", row if isinstance(row, dict) else UnusableRowError("not a JSON object")
        )


def _json_rows(path: Path, file: BinaryIO) -> Iterator[Row]:
    """Yield the rows of a JSON list, a single object, or JSON Lines in a file named .json."""
    content = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        # JSON Lines under this name fail at the second line, and are then read line by line below.
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, list):
        yield from _numbered(value)
    elif value is None and table_format(path) == ".json" and content.lstrip()[:1] == b"[":
        raise ValueError(f"{path} is an invalid or truncated JSON list: download it again")
    else:
        yield from _json_lines(io.BytesIO(content)) if value is None else _numbered([value])


def _json_lines(file: Iterable[bytes]) -> Iterator[Row]:
    """Yield the rows of JSON Lines.

    The lines are parsed here, because `datasets` would fail on a field that is missing in the first
    rows.
    """
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            yield Row(place, UnusableRowError("not JSON", f"{error.msg} at character {error.pos}"))
        except UnicodeDecodeError as error:
            yield Row(place, UnusableRowError("not UTF-8", f"{error.reason} at byte {error.start}"))
        # e.g. a number of 5,000 digits, or 5,000 brackets.
        except (ValueError, RecursionError) as error:
            yield Row(place, UnusableRowError("not readable as JSON", str(error)))
        else:
            yield Row(
                place, value if isinstance(value, dict) else UnusableRowError("not a JSON object")
            )


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    # The import takes a tenth of a second, too long for --help.
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with path.open("rb") as data:
            refuse_pointer(path, data.peek(len(POINTER)))
            with ParquetFile(data) as file:
                for batch in file.iter_batches(BATCH_ROWS):
                    yield from map(_without_missing, batch.to_pylist(maps_as_pydicts="lossy"))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {_first_line(error)}") from error


def _load_hub(source: str, split: str) -> datasets.Dataset:
    """Load one split of a data set, or otherwise the only split of its kind.

    The data set is named `owner/name`, or `owner/name:config` if it has several configs.

    Raises:
        ValueError: the data set cannot be loaded.
        SettingError: it has no such split.
    """
    name, _, config = source.partition(":")
    import datasets  # imported here, because it takes a second, too long for --help

    try:
        try:  # a part of a split, such as `train[:1000]`, works too
            return datasets.load_dataset(name, config or None, split=split)
        except ValueError as error:
            if "[" in split or not str(error).startswith("Unknown split"):
                raise
        saved = datasets.load_dataset(name, config or None)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = _first_line(error)
        if any(words in reason for words in ("Config name is missing", "BuilderConfig")):
            # A later line contains the names of the configs.
            reason = f"{' '.join(str(error).split())}: give {name}:CONFIG"
        raise ValueError(
            f"{source} is neither a {', '.join(TABLES)} file nor a folder, and cannot be loaded "
            f"from the hub: {reason}"
        ) from error
    return _take_split(saved, source, split)


def _without_missing(value: Any) -> Any:
    """Return a table's value without any None in it.

    A table gives every struct all fields, e.g. the fields of a different tool's call.
    """
    if isinstance(value, dict):
        return {key: _without_missing(field) for key, field in value.items() if field is not None}
    return [_without_missing(item) for item in value] if isinstance(value, list) else value


def _first_line(error: Exception) -> str:
    return str(error.__cause__ or error).splitlines()[0]
