"""Publish folders and files atomically: write them aside, flush them to disk, and rename them.

    with publishing(folder) as new:             one folder, one rename
        .<folder>.<random>.partial/             the block fills it; a killed writer leaves only this
            ... the files of the block ...
            provenance.json                     origin: target, draft, configuration
            manifest.json                       size and SHA-256 of every other file, written last
        _seal(partial, folder)                  manifest, flush, rename
    verify(folder)                              names the first missing, truncated or altered file
    write_whole(path, content)                  one file, one rename

This module uses only the standard library, because control planes without torch also publish and
verify.
"""

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.files.lock import suppress_missing_locks

MANIFEST = "manifest.json"
PROVENANCE = "provenance.json"

LAYOUT = 1
"""Layout version of manifests. The manifest contains the digests of all other files."""

POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the file that a clone without Git LFS contains in place of a large file."""

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ABANDONED_S = 3600
"""Age in seconds above which an unfinished file is assumed to be left over from a killed writer."""

SAMPLE_BYTES = 4096
"""Number of bytes that `fingerprint` reads at the start, middle and end of every tensor. For a 70B
model with 723 tensors, it reads 9 MB in total.
"""

VOLATILE_CONFIG_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype"}
)
"""Keys of config.json that may change when the same model is saved again."""


@dataclass(frozen=True, kw_only=True)
class NewFolder:
    """A folder that is being published."""

    path: Path
    """Folder to write the files to. At the end, it is renamed to the published folder."""
    provenance: dict[str, Any]
    """Content of provenance.json, written at the end."""


@contextmanager
def publishing(
    folder: Path, provenance: Mapping[str, Any] | None = None, *, overwrite: bool = False
) -> Iterator[NewFolder]:
    """Create `folder` atomically.

    The block writes files and adds to the provenance. Then the manifest is written, and the folder
    is renamed. If the block raises an exception, `folder` is unchanged. With `overwrite`, the new
    folder replaces one that redraft published.

    Raises:
        FileExistsError: `folder` is not empty, or contains files that redraft did not publish.
        OSError: the disk is full (ENOSPC).
    """
    require_free(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    with _partial_folder(folder) as partial:
        new = NewFolder(path=partial, provenance=dict(provenance or {}))
        yield new
        # Write the provenance before sealing, because the manifest lists the files that exist at
        # that moment.
        write_json(partial / PROVENANCE, new.provenance)
        _seal(partial, folder, overwrite=overwrite)


def publish(
    folder: Path,
    write: Callable[[Path], object],
    provenance: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Apply `publishing` to the files that `write(folder)` creates. Raises the same errors."""
    with publishing(folder, provenance, overwrite=overwrite) as new:
        write(new.path)


def write_whole(path: Path, content: bytes | str, *, mode: int | None = None) -> None:
    """Write `content` to `path` completely or not at all, even if the process or machine crashes.

    `mode` is the file's mode, regardless of the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write next to the file, because a rename is atomic only within a file system. The id keeps
    # processes apart.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    remove_abandoned(path.parent, f".{glob.escape(path.name)}.*.partial")
    try:
        with naming(path), partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # does nothing if the file was renamed
    # The rename changes the folder. Without this flush, a power cut could restore the old file.
    sync(path.parent)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove the unfinished files that killed writers left in a folder."""
    for left in folder.glob(pattern):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > ABANDONED_S:
                left.unlink()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError from the block, because a failed write does not set it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_free(folder: Path, *, overwrite: bool = False) -> None:
    """Raise FileExistsError unless `folder` may be written.

    It may be written if it is absent or empty, or if `overwrite` is set and redraft published
    everything in it.

    Call this before hours of work, not after.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: choose a different output folder")
    # A mistyped --output must not delete someone's home folder.
    if (foreign := find_foreign(folder)) is not None:
        raise FileExistsError(
            f"{foreign} was not published by redraft: move it away, or choose a different "
            f"output folder"
        )
    if not overwrite:
        raise FileExistsError(
            f"{folder} contains an earlier run: choose a different output folder, or pass "
            f"--overwrite"
        )


def find_foreign(folder: Path) -> Path | None:
    """Return the first file in a folder that redraft did not publish, or None.

    Return `folder` itself if it is not empty and was never published.
    """
    if not (folder / MANIFEST).is_file():
        return folder if any(folder.iterdir()) else None
    try:
        entries = manifest(folder)
    except ValueError:  # redraft published the folder, but its manifest is damaged
        return None
    ours = {folder / name for name in (*entries, MANIFEST)}
    return next(
        (
            path
            for path in sorted(folder.rglob("*"))
            if path not in ours and (path.is_symlink() or not path.is_dir())
        ),
        None,
    )


def require_space(path: Path, num_bytes: int) -> None:
    """Raise OSError (ENOSPC), with both figures, unless `num_bytes` are free on the disk of `path`.

    `path` need not exist yet.
    """
    existing = next(
        parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()
    )
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"no space left: {path} needs {num_bytes / 1e9:.1f} GB, but its disk has only "
            f"{free / 1e9:.1f} GB free",
        )


@dataclass(frozen=True)
class FileEntry:
    """A file's entry in a manifest."""

    bytes: int
    sha256: str


def manifest(folder: Path) -> dict[str, FileEntry]:
    """Return the manifest of a published folder: its files, by relative name.

    Raises:
        FileNotFoundError: there is no manifest.
        ValueError: the manifest cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST}: it was not published by redraft, or not completely"
        )
    try:
        content = json.loads(path.read_text())
        if content.get("layout", LAYOUT) > LAYOUT:
            raise ValueError("it was written by a later release of redraft")
        entries = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        if not entries:
            raise ValueError("it lists no files")
        return entries
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is corrupt ({error}): publish the folder again") from error


AGAIN = "copy or publish the folder again"


def verify(folder: Path, cure: str = AGAIN) -> dict[str, FileEntry]:
    """Compare every file of a published folder with the manifest, and return the manifest.

    All sizes are compared first, so a truncated file is detected immediately. Errors end with
    `cure`.

    Raises:
        FileNotFoundError: there is no manifest.
        ValueError: a file is missing, truncated or altered; the message names the first one.
    """
    entries = manifest(folder)
    require_sizes(folder, entries, cure)
    for name, entry in entries.items():
        if sha256(folder / name) != entry.sha256:
            raise ValueError(f"{folder / name} is corrupt (its SHA-256 differs): {cure}")
    return entries


def require_sizes(folder: Path, entries: Mapping[str, FileEntry], cure: str = AGAIN) -> None:
    """Refuse a folder in which a file is missing or has a different size than in `entries`.

    Raises:
        ValueError: the message names the first such file.
    """
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: {cure}")
        size = path.stat().st_size
        if size != entry.bytes:
            raise ValueError(f"{path} has {size} bytes instead of {entry.bytes}: {cure}")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_pointer(path: Path, start: bytes) -> None:
    """Raise ValueError if a file that begins with `start` is a Git LFS pointer."""
    if start.startswith(POINTER):
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`")


def safetensors_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file.

    It maps each tensor's name to `{"dtype", "shape", "data_offsets"}`. The contents are not
    checked.

    Raises:
        ValueError: the file is truncated, or is not a safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        # A file of fewer than 8 bytes is padded with 0xff, so that the length exceeds any file's
        # size.
        length = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))[0]
        if length > size - 8:
            file.seek(0)
            refuse_pointer(path, file.read(len(POINTER)))
            raise ValueError(
                f"{path} is truncated or not a safetensors file ({size} bytes): download it again"
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            data_bytes = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is corrupt (its header cannot be read): download it again"
            ) from error
    needed = 8 + length + data_bytes
    if size < needed:
        raise ValueError(f"{path} is truncated: {size} bytes of {needed}; download it again")
    return header


def safetensors_samples(path: Path) -> Iterator[bytes]:
    header = safetensors_header(path)
    yield json.dumps(header, sort_keys=True).encode()
    with path.open("rb") as file:
        data = 8 + struct.unpack("<Q", file.read(8))[0]
        for name in sorted(header):
            start, end = header[name]["data_offsets"]
            # E.g. a tensor of 10,000 bytes is read at 0, 2,952 and 5,904. A tensor smaller than
            # SAMPLE_BYTES is read completely, three times.
            last = max(start, end - SAMPLE_BYTES)
            for offset in (start, (start + last) // 2, last):
                file.seek(data + offset)
                yield file.read(min(SAMPLE_BYTES, end - start))


FULL_WORDS = re.compile(
    rf"os error ({'|'.join(map(str, map(int, FULL_ERRNOS)))})\b"
    r"|unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing"
)
"""Words in errors from safetensors and torch's writer, whose exceptions are not OSErrors."""


def is_full(error: BaseException) -> bool:
    """Whether the error means that a disk is full, or a quota or file-size limit is reached."""
    return getattr(error, "errno", None) in FULL_ERRNOS or bool(FULL_WORDS.search(str(error)))


FULL_BYTES = 16 << 20
"""If a write fails and fewer bytes than this are free, the full disk is reported as the reason."""


@contextmanager
def _partial_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder next to `folder`, locked as long as its writer runs.

    It is removed if the writer fails.
    """
    partial, lock = _make_locked(folder)
    try:
        # mkdtemp's mode 0o700 would hide the result from a server that a different user runs.
        partial.chmod(0o755)
        yield partial
    except Exception as error:
        if is_full(error) or shutil.disk_usage(partial).free < FULL_BYTES:
            raise OSError(
                errno.ENOSPC,
                f"no space left on the disk of {folder}, or your quota or file size limit was "
                f"reached ({error}): nothing was published",
            ) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # does nothing if the folder was renamed
        os.close(lock)


def _make_locked(folder: Path) -> tuple[Path, int]:
    while True:
        partial = Path(
            tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent)
        )
        # Until the folder is locked, a concurrent publisher may consider it abandoned and remove
        # it. In that case, create a new one.
        with suppress(FileNotFoundError):
            lock = os.open(partial, os.O_RDONLY)
            # The kernel releases the lock even after SIGKILL, so the lock distinguishes a running
            # writer from a killed one.
            with suppress_missing_locks():
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.lexists(partial):
                return partial, lock
            os.close(lock)


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders of killed writers, whose locks the kernel has released."""
    for partial in _siblings(folder, "partial"):
        try:
            lock = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue  # its writer has published it in the meantime
        try:
            # Without locks, it is unknown whether a running process is writing to it.
            with suppress_missing_locks(), suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            os.close(lock)


def _seal(partial: Path, folder: Path, *, overwrite: bool) -> None:
    """Write the manifest of `partial`, flush it to disk and rename it to `folder`.

    An old `folder` is moved aside first. The result is made readable by all users, because a server
    often runs as a different user than the trainer; only hard links keep their mode.
    """
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    files = {
        path.relative_to(partial).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in paths
    }
    write_json(partial / MANIFEST, {"layout": LAYOUT, "files": files})
    for path in partial.rglob("*"):
        if path.is_symlink():
            continue
        if path.is_dir():
            path.chmod(0o755)
        # A hard link shares its mode with a file that may belong to a different user
        # (`mtp_folder.link`).
        elif path.stat().st_nlink == 1:
            path.chmod(0o644)  # safetensors writes 0600
    _flush(partial)
    if overwrite and folder.exists():
        # A folder cannot be replaced with a single rename. A kill before the next rename leaves no
        # `folder`.
        folder.rename(partial.with_suffix(".previous"))
    try:
        # This replaces an empty folder and fails for any other, so two writers cannot both succeed.
        partial.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(
                f"{folder} was published by another process in the meantime"
            ) from error
        raise
    sync(folder.parent)
    for previous in _siblings(folder, "previous"):  # a writer killed at this point left one too
        shutil.rmtree(previous, ignore_errors=True)


def _siblings(folder: Path, kind: str) -> list[Path]:
    return list(folder.parent.glob(f".{glob.escape(folder.name)}.*{kind}"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, without the guarantees of `write_whole`."""
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync(path)
