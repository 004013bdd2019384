"""Replace the results of an earlier run, which stay usable until the new ones are complete.

    OUT/draft/, OUT/report.json    results, by the names that their command writes
    OUT/.previous/                 results of the earlier run, until the new ones are complete

    find_obstacle     before any work: finds files that would be lost and are not redraft's results
    keep_previous     after the last check that could refuse the run
    drop_previous     when the new results are complete

A failed or killed run leaves the earlier results in .previous, and the next --overwrite keeps them.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

from redraft.files.artifact import find_foreign, require_free, sync
from redraft.files.kept import find_not_kept

PREVIOUS = ".previous"
RESULTS = ("output", "json")
"""Settings of commands that contain the paths of outputs."""


def require_replaceable(folder: Path, reads: object, *, overwrite: bool) -> None:
    """Raise FileExistsError like `require_free`, or if the command reads from `folder`.

    `reads` are the command's settings, which may contain paths.
    """
    if obstacle := find_obstacle([folder], reads, lambda _: None):
        raise FileExistsError(f"{obstacle}: choose a different output folder")
    require_free(folder, overwrite=overwrite)


def require_apart(file: Path | None, reads: object) -> None:
    """Refuse to write `file` over a folder or over a file that the command reads.

    Raises:
        ValueError: `file` is a folder, or is in the command's settings `reads`.
    """
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"{file} is a folder: give the name of a file")
    for flag, read in _find_paths(reads, "-") if file.exists() else ():
        ends = _places(Path(read))
        if any({place, *place.parents} & ends for place in _places(file)):
            raise ValueError(
                f"{file} is an input ({flag} {read}): choose a different name for the results"
            )


def find_obstacle(
    results: Iterable[Path],
    reads: object,
    find_foreign: Callable[[Path], Path | None] = find_foreign,
) -> str:
    """Return why `results` may not be replaced, or an empty string.

    `reads` contains the command's settings, as a mapping or a dataclass. No path in them may be
    inside the results, not even through links. Nor may `find_foreign` find a file in any results
    folder.
    """
    results = [path for path in results if os.path.lexists(path)]
    if not results:  # return early, because the input paths may be large folders
        return ""
    for path in results:
        if path.is_dir() and (foreign := find_foreign(path)) is not None:
            return f"{foreign} was not written by redraft"
    places = {place for path in results for place in _places(path)}
    for flag, read in _find_paths(reads, "-"):
        if any(
            place == end or place in end.parents
            for end in _list_ends(Path(read))
            for place in places
        ):
            return f"{flag} {read} would be replaced by the results"
    return ""


def start_over(folder: Path, name: str, reads: object) -> None:
    """Set the cached values in `folder`/`name` aside until `drop_previous` on `folder`/.previous.

    Raises:
        ValueError: the folder contains other files, or a file that a path in `reads` refers to.
    """
    if obstacle := find_obstacle([folder / name], reads, find_not_kept):
        raise ValueError(f"{obstacle}: choose a different --output")
    keep_previous([folder / name], folder / PREVIOUS)


def keep_previous(results: Iterable[Path], previous: Path) -> None:
    """Move `results` into the folder `previous`.

    If `previous` already exists, `results` belong to a replacement that was never completed, and
    are removed.
    """
    undo_move(previous)
    results = [path for path in results if os.path.lexists(path)]
    if not results:
        return
    if previous.is_dir():
        for path in results:
            _remove(path)
    else:
        moving = _moving(previous)
        moving.mkdir(parents=True)
        for path in results:
            path.rename(moving / path.name)
        moving.rename(previous)
        sync(previous.parent)
    print(f"the earlier results are kept in {previous} until the new ones are complete", flush=True)


def undo_move(previous: Path) -> None:
    """Undo a `keep_previous` that was killed midway."""
    moving = _moving(previous)
    if moving.is_dir():
        for path in moving.iterdir():
            path.rename(previous.parent / path.name)
        moving.rmdir()


def drop_previous(previous: Path) -> None:
    """Remove the earlier results once the new ones are complete."""
    shutil.rmtree(previous, ignore_errors=True)


def _moving(previous: Path) -> Path:
    return previous.with_name(f"{previous.name}.partial")


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _places(path: Path) -> set[Path]:
    """Return a path in its resolved parent folder, and the path with all links resolved."""
    return {path.parent.resolve() / path.name, path.resolve()}


def _list_ends(read: Path) -> Iterator[Path]:
    """Yield all paths whose files are used when `read` is read."""
    yield from _places(read)
    for folder, names, files in os.walk(read):
        for name in (*names, *files):
            if (inside := Path(folder, name)).is_symlink():
                yield inside.resolve()


def _find_paths(value: object, flag: str) -> Iterator[tuple[str, str]]:
    """Yield (flag, path as given) for every file and folder in a command's settings."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if flag != "-" or name not in RESULTS:
                key = str(name).replace("_", "-")
                yield from _find_paths(inner, f"{flag}{'-' if flag == '-' else '.'}{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _find_paths(inner, flag)
    elif isinstance(value, str | Path) and str(value):
        # A draft may be given with a name: NAME=FOLDER.
        for text in (str(value), str(value).partition("=")[2]):
            if text and os.path.exists(text):
                yield flag, text
