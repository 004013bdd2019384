"""The buffer's checkpoints, deleted tenants and past weights, in two files with checksums.

    cursor.json       commits of checkpoints, the deleted tenants, and target weights whose records are excluded
    forgotten.json    a copy of the deleted tenants, which must survive one damaged file

A damaged file is set aside and reported. Checkpoints and versions then show how far training had
progressed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from redraft.files.lock import own
from redraft.files.sealed import DamagedError, read_sealed_as, set_aside, write_sealed

MAX_COMMITS = 1000
SERVED = "served"  # commit without a checkpoint: training began again from the served version
CURSOR, FORGOTTEN = "cursor.json", "forgotten.json"


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A valid checkpoint. Every record up to `through` was trained on or skipped before it."""

    checkpoint_id: str
    through: int


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """The content of both files; forgotten.json contains only the tenants."""

    trained: tuple[Commit, ...] = ()
    """Commits of checkpoints, newest first."""
    forgotten: dict[str, float] = {}
    past: frozenset[str] = frozenset()


class Cursor:
    """Commits, deleted tenants and past weights. Not thread-safe.

    Everything is kept in memory if `folder` is None.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.commits: tuple[Commit, ...] = ()  # Newest first.
        self.forgotten: dict[str, float] = {}  # Time of deletion, by SHA-256 of the tenant's name.
        self.past: frozenset[str] = frozenset()  # weights whose records are excluded
        self.damage: list[str] = []  # One message for each file that was damaged or missing.
        if folder is not None:
            self._read(folder)

    def commit(self, commit: Commit) -> None:
        """Add a commit.

        Raises:
            OSError: the disk cannot be written to. The commit then does not count.
        """
        commits = (commit, *self.commits)[:MAX_COMMITS]
        # The disk is written first: if it is full, the memory still agrees with the file.
        self._write(commits, self.forgotten)
        self.commits = commits

    def forget(self, tenant_sha256: str, time_s: float) -> None:
        """Add a tenant to the deleted ones.

        Raises:
            OSError: the disk cannot be written to.
        """
        forgotten = {**self.forgotten, tenant_sha256: time_s}
        if self.folder is not None:
            # After a kill between the two files, the tenant is in one of them, which is enough.
            write_sealed(self.folder / FORGOTTEN, {"forgotten": forgotten})
        self._write(self.commits, forgotten)
        self.forgotten = forgotten

    def leave_behind(self, past: frozenset[str]) -> None:
        """Replace `past`.

        Raises:
            OSError: the disk cannot be written to. The new value then lasts only until the process
                ends.
        """
        self.past = past
        self._write(self.commits, self.forgotten)

    def _write(self, commits: tuple[Commit, ...], forgotten: Mapping[str, float]) -> None:
        if self.folder is not None:
            trained = [asdict(commit) for commit in commits]
            write_sealed(
                self.folder / CURSOR,
                {"trained": trained, "forgotten": forgotten, "past": sorted(self.past)},
            )

    def _read(self, folder: Path) -> None:
        cursor, again = self._read_one(folder / CURSOR), self._read_one(folder / FORGOTTEN)
        if cursor:
            self.commits, self.past = cursor.trained, cursor.past
        # Take the union: a tenant counts as deleted if either file lists it, at the later of the
        # two times.
        for file in filter(None, (cursor, again)):
            for tenant_sha256, time_s in file.forgotten.items():
                self.forgotten[tenant_sha256] = max(
                    time_s, self.forgotten.get(tenant_sha256, time_s)
                )
        if cursor and again:
            return
        # A folder without records has nothing to lose: a learner may have stopped between writing
        # the two files. In a folder with records, a missing file is damage, and is reported.
        is_new = not (
            self.forgotten or self.commits or self.damage or any(folder.glob("records-*.db"))
        )
        if not is_new:
            self._tell(folder, "" if cursor else CURSOR, "" if again else FORGOTTEN)
        write_sealed(folder / FORGOTTEN, {"forgotten": self.forgotten})
        self._write(self.commits, self.forgotten)

    def _tell(self, folder: Path, *lost: str) -> None:
        consequences = {
            CURSOR: "the training position was recovered from checkpoints or versions",
            FORGOTTEN: f"the {len(self.forgotten)} deleted tenants were read from {CURSOR}",
        }
        for name in filter(None, lost):
            self.damage.append(f"{folder / name} was missing or damaged: {consequences[name]}")
        if all(lost):
            self.damage.append(
                "the list of deleted tenants is lost: repeat `redraft fleet forget` for each of "
                "them"
            )

    def _read_one(self, path: Path) -> _Fields | None:
        """Return the file's fields; None if it is missing or damaged."""
        try:
            return read_sealed_as(path, _Fields, None)
        except DamagedError as error:
            self.damage.append(f"{error}: it is now {set_aside(path).name}")
            return None


def begin_training_again(folder: Path | None) -> None:
    """Make the next learner start at the served version, after the records already trained on.

    No learner may be using the folder.

    Raises:
        AlreadyOwnedError: a learner has the buffer open.
    """
    if folder is None or not folder.is_dir():
        return
    with own(folder / "lock", "a learner's buffer"):
        cursor = Cursor(folder)
        if cursor.commits:
            cursor.commit(Commit(checkpoint_id=SERVED, through=cursor.commits[0].through))
