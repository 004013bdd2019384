"""The versions of one draft: immutable folders, and which of them the fleet should serve.

    <root>/<draft>/                 what REDRAFT_REGISTRY names on the servers
        v000001/ v000002/ ...       weights, config, provenance.json, evaluation.json, STABLE, manifest.json (SHA-256)
        current -> v000002          replaced atomically
        promoted.json               the versions that were current, in order: what `rollback` goes back along
        lock                        held by the one learner of this draft

A version appears whole by one rename. STABLE is for copies that are made file by file: without it a folder is no
version. Promotion is not publication: a version that its canary refused was published, but never current.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heads import artifact
from online.lock import acquire

STABLE = "STABLE"
EVALUATION = "evaluation.json"

_VERSION = re.compile(r"v(\d{6,})")


class Registry:
    """One draft's folder. Any process may read, promote and roll back; the process that publishes owns it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the draft for one learner.

        Raises: AlreadyOwnedError naming the process and machine that have it.
        """
        descriptor = acquire(self.folder / "lock", "a learner")
        try:
            yield
        finally:
            os.close(descriptor)

    def versions(self) -> list[str]:
        """All complete versions, oldest first."""
        found = [path.name for path in self.folder.iterdir() if _VERSION.fullmatch(path.name)]
        return sorted((name for name in found if (self.folder / name / STABLE).is_file()), key=_number)

    def latest(self) -> str | None:
        return next(reversed(self.versions()), None)

    def current(self) -> str | None:
        """The version that was promoted last; None before the first."""
        link = self.folder / "current"
        return os.readlink(link) if link.is_symlink() else None

    def path(self, version: str) -> Path:
        """Raises: FileNotFoundError listing the newest versions there are."""
        if version not in self.versions():
            newest = ", ".join(self.versions()[-5:]) or "none"
            raise FileNotFoundError(f"{self.folder} has no version {version}: the newest are {newest}")
        return self.folder / version

    def publish(
        self,
        write: Callable[[Path], None],
        *,
        target_fingerprint: str,
        provenance: Mapping[str, Any],
        evaluation: Mapping[str, Any],
    ) -> str:
        """The new version, with what `write` puts into the folder it is given. It is not current yet.

        Servers with another target refuse it by `target_fingerprint`.

        Raises: FileExistsError where another process published at the same time; OSError where the disk is full.
        """
        # Incomplete folders count too: a number is never given twice.
        taken = [_number(path.name) for path in self.folder.iterdir() if _VERSION.fullmatch(path.name)]
        version = f"v{max(taken, default=0) + 1:06d}"

        def write_all(folder: Path) -> None:
            write(folder)
            (folder / EVALUATION).write_text(json.dumps(evaluation, indent=2) + "\n")
            (folder / STABLE).touch()

        artifact.publish(self.folder / version, write_all, {"target_fingerprint": target_fingerprint, **provenance})
        return version

    def promote(self, version: str) -> None:
        """Make a version current, after reading every byte of it.

        Raises: FileNotFoundError where it is not there; ValueError naming the file that is damaged.
        """
        artifact.verify(self.path(version))
        kept = [name for name in self.promoted() if name != version]
        artifact.write_whole(self.folder / "promoted.json", json.dumps([*kept, version]))
        # The list first: until the link follows, the list is read only up to what the link names.
        self._point_current_at(version)

    def previous(self) -> str | None:
        """The version that `rollback` would make current."""
        return next((name for name in self.promoted()[-2::-1] if name in self.versions()), None)

    def rollback(self) -> str:
        """The version that was current before the current one, made current again.

        Raises: FileNotFoundError where there is none; ValueError naming the file of it that is damaged.
        """
        previous = self.previous()
        if previous is None:
            raise FileNotFoundError(f"{self.folder} has no version before {self.current()} to go back to")
        artifact.verify(self.path(previous))
        self._point_current_at(previous)
        return previous

    def prune(self, keep: int, serving: Collection[str] = ()) -> list[str]:
        """Remove all but the newest `keep` versions, the current one, the one before it and those that some server has.

        A server whose version is gone could not put it back when a swap fails half-way. Returns what was removed.

        Raises: ValueError where `keep` is below 1.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least the newest version has to stay")
        needed = {*self.versions()[-keep:], self.current(), self.previous(), *serving}
        removed = [version for version in self.versions() if version not in needed]
        for version in removed:
            # Renamed first: a reader, or a kill on the way, never sees a version that is half there.
            (self.folder / version).rename(self.folder / f".{version}.removed")
        for rest in self.folder.glob(".v*.removed"):
            shutil.rmtree(rest)
        return removed

    def promoted(self) -> list[str]:
        """The versions that were current, in order, up to the one that is."""
        path, current = self.folder / "promoted.json", self.current()
        promoted: list[str] = json.loads(path.read_text()) if path.is_file() else []
        return promoted[: promoted.index(current) + 1] if current in promoted else []

    def _point_current_at(self, version: str) -> None:
        partial = self.folder / ".current.partial"
        partial.unlink(missing_ok=True)
        partial.symlink_to(version)  # relative: the registry may be moved
        partial.replace(self.folder / "current")
        artifact.sync(self.folder)


def _number(version: str) -> int:
    return int(version.removeprefix("v"))
