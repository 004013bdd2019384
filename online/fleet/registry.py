"""The registry: the versions of one draft, and a link to the version to serve.

Each version is an immutable folder.

    <root>/<draft>/                 the servers' --registry
        v000001/ v000002/ ...       weights, config, provenance.json, evaluation.json, STABLE, manifest.json (SHA-256)
        current -> v000002          replaced atomically
        promoted.json               the versions that were current, in order, with the current one last
        registry.json               the registry's id, and the highest version number given so far
        lock                        held by the one learner of this draft

A version appears complete, by one rename. STABLE protects registries that are copied file by file:
a folder without it is not a version. Publication is not promotion: a version that failed its canary
was published, but never current. In a copy without links, e.g. in object storage, the last version
in promoted.json is current.

`repair` restores a registry from its intact files: the versions name their parents, both JSON files
contain the id, and a damaged current version is replaced with the previous one.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from redraft.files import artifact
from redraft.files.lock import own
from redraft.files.sealed import DamagedError, read_sealed_as, set_aside, write_sealed
from redraft.heads.provenance import Provenance, read_provenance

T = TypeVar("T")
STABLE = "STABLE"
EVALUATION = "evaluation.json"
REGISTRY = "registry.json"
PROMOTED = "promoted.json"

_VERSION = re.compile(r"v(\d{6,})")
_Id = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]


class _Promoted(msgspec.Struct, frozen=True):
    """The content of promoted.json."""

    registry: _Id = ""
    """The registry's id."""
    versions: list[Annotated[str, msgspec.Meta(pattern=rf"^{_VERSION.pattern}\Z")]] = []


class _Numbers(msgspec.Struct, frozen=True):
    """The content of registry.json."""

    id: _Id = ""
    highest_number: int = 0


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identifies a version, even among registries that use the same version names.

    Unknown fields are empty.
    """

    manifest_sha256: str = ""
    registry: str = ""


def read_id(folder: Path) -> str:
    """Return the id of the registry in `folder`.

    Empty if it has no id because no learner has owned it so far.

    Raises:
        OSError: the file exists but cannot be read.
    """
    # This is a second copy of the id, because servers refuse versions from a registry with a
    # different id.
    return (
        _read_or_empty(folder / REGISTRY, _Numbers).id
        or _read_or_empty(folder / PROMOTED, _Promoted).registry
    )


def hash_manifest(version: Path) -> str:
    """Return the SHA-256 of a version's manifest, in hex.

    It identifies every byte of the version.

    Raises:
        OSError: there is no manifest, or it cannot be read.
    """
    return hashlib.sha256((version / artifact.MANIFEST).read_bytes()).hexdigest()


class Registry:
    """The folder for one draft.

    Any process may read, promote and roll back, but only the owner may publish.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        # Independent of the learner's umask, because its servers may run as a different user.
        for path in missing:
            path.chmod(0o755)
        self.mended: list[str] = []
        """One message for each damaged file that the owner found and repaired."""

    @classmethod
    def open(cls, folder: Path) -> "Registry":
        """Open a registry that exists.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        if not folder.is_dir():
            raise FileNotFoundError(
                f"there is no registry {folder}: the learner creates it when it first starts"
            )
        return cls(folder)

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Own the draft while the block runs.

        Raises:
            AlreadyOwnedError: another learner owns it; the message names the process and the
                machine.
        """
        with own(self.folder / "lock", "a learner"):
            self._note_numbers()
            yield

    def identify(self, version: str) -> Identity:
        """Identify a version's bytes and registry, for the servers that load it.

        A field is empty if its file cannot be read.
        """
        manifest_sha256 = registry = ""
        with suppress(OSError):
            manifest_sha256 = hash_manifest(self.folder / version)
        with suppress(OSError):
            registry = read_id(self.folder)
        return Identity(manifest_sha256=manifest_sha256, registry=registry)

    def versions(self) -> list[str]:
        """All complete versions, oldest first."""
        found = [path.name for path in self.folder.iterdir() if _VERSION.fullmatch(path.name)]
        return sorted(
            (name for name in found if (self.folder / name / STABLE).is_file()), key=_number
        )

    def latest(self) -> str | None:
        return next(reversed(self.versions()), None)

    def current(self) -> str | None:
        """Return the current version, or None before the first promotion.

        If the link is missing, because the registry was copied by a tool that drops links, this is
        the last promoted version. The newest version would be wrong, because it may have failed its
        canary.
        """
        link = self.folder / "current"
        if link.is_symlink():
            return os.readlink(link)
        known = self.versions()
        return next(
            (version for version in reversed(self._read_promoted()) if version in known), None
        )

    def current_path(self) -> Path:
        """Return the folder of the current version; a learner's registry always has one."""
        current = self.current()
        assert current is not None, "the learner begins with a version"
        return self.path(current)

    def repair(self) -> None:
        """Ensure that `current` is a link to an intact version.

        Only for the owner of a registry that has at least one version.

        Raises:
            ValueError: it is unknown which of several versions was current, or no version that was
                ever current is intact.
        """
        # Read the list first: the link is restored from it, and so is the way back from a damaged
        # version.
        is_damaged = self._is_damaged(PROMOTED, _Promoted)
        # The first promotion writes the list before the link.
        is_lost = (self.folder / "current").is_symlink() and not (self.folder / PROMOTED).exists()
        if is_damaged or is_lost:
            promoted = self.promoted()
            consequence = f"the versions to roll back to are now {', '.join(promoted) or 'none'}"
            if is_damaged:
                self._set_aside(PROMOTED, consequence)
            else:
                self.mended.append(f"{self.folder / PROMOTED} was missing: {consequence}")
            self._write_promoted(promoted)
        self._restore_link()
        current = self.current()
        assert current is not None
        try:
            artifact.verify(self.path(current))
        except (FileNotFoundError, ValueError) as error:
            self.mended.append(
                f"{current} is damaged, so {self._leave(current, error)} is current again: {error}"
            )

    def _leave(self, current: str, error: Exception) -> str:
        """Roll back from a damaged version to the newest intact one before it; return its name."""
        while previous := self.previous():
            try:
                return self.rollback()
            except (FileNotFoundError, ValueError):  # damaged too
                # Removed from the list, so that `previous` names the version before it in the next
                # iteration.
                self._write_promoted([name for name in self.promoted() if name != previous])
        raise ValueError(
            f"{error}. No version before {current} is intact either: copy one back"
        ) from error

    def choose_current(self) -> str:
        """Return the current version, even if the link `current` is missing, as in some copies.

        Raises:
            FileNotFoundError: there is no version.
            ValueError: it is unknown which of several versions was current.
        """
        if current := self.current():
            return current
        versions = self.versions()
        if not versions:
            raise FileNotFoundError(
                f"{self.folder} has no version yet: start its learner first, or set --draft"
            )
        if len(versions) > 1:
            raise ValueError(
                f"{self.folder} has {len(versions)} versions, but neither the link `current` nor "
                f"{PROMOTED}: choose one, e.g. ln -s {versions[0]} {self.folder / 'current'}"
            )
        return versions[0]

    def _restore_link(self) -> None:
        if not (self.folder / "current").is_symlink():
            self.promote(self.choose_current())

    def path(self, version: str) -> Path:
        """Return the folder of a version.

        Raises:
            FileNotFoundError: there is no such version; the message lists the newest ones.
        """
        if version not in self.versions():
            newest = ", ".join(self.versions()[-5:]) or "none"
            raise FileNotFoundError(
                f"{self.folder} has no version {version}: the newest are {newest}"
            )
        return self.folder / version

    def publish(
        self,
        write: Callable[[Path], None],
        *,
        target_fingerprint: str,
        provenance: Mapping[str, Any],
        evaluation: Mapping[str, Any],
    ) -> str:
        """Publish a new version without making it current, and return its name.

        `write` writes the draft into the folder given to it. Servers whose target does not have the
        fingerprint `target_fingerprint` refuse the version.

        Raises:
            FileExistsError: another process published at the same time.
            OSError: the disk is full.
        """
        version = f"v{self._highest_number() + 1:06d}"

        def write_all(folder: Path) -> None:
            write(folder)
            (folder / EVALUATION).write_text(json.dumps(evaluation, indent=2) + "\n")
            (folder / STABLE).touch()

        artifact.publish(
            self.folder / version,
            write_all,
            {"target_fingerprint": target_fingerprint, **provenance},
        )
        self._note_numbers()
        return version

    def promote(self, version: str) -> None:
        """Make a version current, after verifying every byte of it.

        Raises:
            FileNotFoundError: there is no such version.
            ValueError: it is damaged; the message names the file.
        """
        artifact.verify(self.path(version))
        self._write_promoted([*(name for name in self.promoted() if name != version), version])
        # The list comes first: it is read only up to the version named by the link, so a kill at
        # this point changes nothing.
        self._point_current_at(version)

    def previous(self) -> str | None:
        """The version that `rollback` would make current; None if there is none."""
        # Searches backwards from the version before the current one. With v1, v2, v3 and v2 pruned,
        # this is v1.
        return next((name for name in self.promoted()[-2::-1] if name in self.versions()), None)

    def rollback(self, to: str = "") -> str:
        """Make the previously current version, or the earlier version `to`, current again.

        Returns the name of that version.

        Raises:
            FileNotFoundError: there is no such version, or `to` was never current.
            ValueError: the version is damaged; the message names the file.
        """
        if to and to not in self.promoted():
            current, known = self.current(), ", ".join(self.promoted()) or "none"
            never = f"not current before {current}" if current else "never current"
            raise FileNotFoundError(f"{to} was {never}: choose from {known}")
        previous = to or self.previous()
        if not previous:
            raise FileNotFoundError(
                f"{self.folder} has no version before {self.current() or 'its first promotion'} to "
                "roll back to"
            )
        artifact.verify(self.path(previous))
        kept = self.promoted()
        kept = kept[: kept.index(previous) + 1]
        self._point_current_at(previous)
        # For copies without links. A full disk must not prevent a rollback: with the link, the
        # longer list is also valid.
        with suppress(OSError):
            self._write_promoted(kept)
        return previous

    def prune(self, keep: int, in_use: Collection[str] = ()) -> list[str]:
        """Remove old versions and return their names.

        The newest `keep` versions are kept, and so are the current version, the one before it and
        those in `in_use`. A server needs the files of the version that it serves, to restore the
        draft if a swap fails halfway.

        Raises:
            ValueError: `keep` is below 1.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}: it must be at least 1")
        needed = {*self.versions()[-keep:], self.current(), self.previous(), *in_use}
        removed = [version for version in self.versions() if version not in needed]
        for version in removed:
            # Renamed first, so that no reader finds a partial version, and no kill leaves one.
            (self.folder / version).rename(self.folder / f".{version}.removed")
        # Removes all such folders, because a kill may have left some from an earlier call.
        for rest in self.folder.glob(".v*.removed"):
            shutil.rmtree(rest)
        return removed

    def promoted(self) -> list[str]:
        """Return all versions that have been current, in order, ending with the current one."""
        promoted, current = self._read_promoted(), self.current()
        return promoted[: promoted.index(current) + 1] if current in promoted else []

    def list_training_ends(self) -> dict[str, float]:
        """Return, for each version, the number of the last record it may have been trained on.

        Numbers are sequence numbers in the learner's buffer. The number is 0 for a draft that was
        copied from elsewhere, and therefore not trained on any record, and infinite if the version
        does not record it. These are numbers rather than times, because a clock may be set back
        between a record's arrival and its training.
        """
        made = {version: self._read_provenance(version) for version in self.versions()}
        return {
            version: 0.0 if known.copied_from else known.trained_through
            for version, known in made.items()
        }

    def _read_provenance(self, version: str) -> Provenance:
        """Read a version's provenance; it is empty if the file cannot be read."""
        try:
            return read_provenance(self.folder / version)
        except (OSError, ValueError):
            return Provenance()

    def _read_promoted(self) -> list[str]:
        promoted = None
        with suppress(DamagedError):
            promoted = read_sealed_as(self.folder / PROMOTED, _Promoted, None)
        return promoted.versions if promoted else self._guess_promoted()

    def _guess_promoted(self) -> list[str]:
        """Infer which versions were current, in order, from the rest of the folder.

        Every version was trained from the version that was current at the time. If the versions do
        not record this, all versions up to the one that the link points to count.
        """
        link, known = self.folder / "current", self.versions()
        current = os.readlink(link) if link.is_symlink() else None
        if current not in known:
            return []
        # E.g. if v4 was trained from v2, and v2 from v1, then v1, v2, v4. v3 was published, but
        # never current.
        found = [current]
        # A version found twice would form a cycle, which only damage can cause.
        while (
            parent := self._read_provenance(found[0]).trained_from
        ) in known and parent not in found:
            found.insert(0, parent)
        return found if len(found) > 1 else known[: known.index(current) + 1]

    def _write_promoted(self, versions: list[str]) -> None:
        content = {"registry": read_id(self.folder), "versions": versions}
        write_sealed(self.folder / PROMOTED, content, mode=0o644)

    def _is_damaged(self, name: str, kind: type) -> bool:
        try:
            read_sealed_as(self.folder / name, kind, None)
        except DamagedError:
            return True
        return False

    def _set_aside(self, name: str, consequence: str) -> None:
        aside = set_aside(self.folder / name)
        self.mended.append(
            f"{self.folder / name} was damaged and is now {aside.name}: {consequence}"
        )

    def _point_current_at(self, version: str) -> None:
        link = self.folder / "current"
        if link.is_dir() and not link.is_symlink():
            # `cp -rL` turns the link into a folder, which is moved aside rather than removed,
            # because it contains a whole draft.
            link.rename(self.folder / f".current.copied.{uuid.uuid4().hex[:8]}")
        artifact.remove_abandoned(self.folder, ".current.*.partial")
        # The id keeps the files of different processes apart.
        partial = self.folder / f".current.{os.getpid()}.partial"
        partial.unlink(missing_ok=True)
        partial.symlink_to(version)  # relative, so that the registry can be moved
        partial.replace(link)
        artifact.sync(self.folder)

    def _highest_number(self) -> int:
        """Return the highest version number ever assigned, as far as the folder shows it.

        No number is assigned twice, because a server identifies a version by its name.
        """
        # Incomplete folders also count, and so do versions that were deleted by hand.
        names = [*(path.name for path in self.folder.iterdir()), *self._read_promoted()]
        given = [_number(name) for name in names if _VERSION.fullmatch(name)]
        return max(
            [*given, _read_or_empty(self.folder / REGISTRY, _Numbers).highest_number], default=0
        )

    def _note_numbers(self) -> None:
        """Write the registry's id and its highest version number.

        If the disk is full, the write is attempted again with the next version.
        """
        noted, highest = _read_or_empty(self.folder / REGISTRY, _Numbers), self._highest_number()
        if noted.id and highest == noted.highest_number:
            return
        with suppress(OSError):
            known = noted.id or read_id(self.folder) or uuid.uuid4().hex
            if self._is_damaged(REGISTRY, _Numbers):
                self._set_aside(
                    REGISTRY, f"the registry's id is {known}, its highest version number {highest}"
                )
            write_sealed(
                self.folder / REGISTRY, {"id": known, "highest_number": highest}, mode=0o644
            )


def _read_or_empty(path: Path, kind: type[T]) -> T:
    """Read the record in a file; it is empty if the file is missing or damaged."""
    try:
        return read_sealed_as(path, kind, None) or kind()
    except ValueError:
        return kind()


def _number(version: str) -> int:
    return int(version.removeprefix("v"))


def copy_model(source: Path, folder: Path) -> None:
    """Copy the model's files, except those that publication adds."""
    added = (artifact.MANIFEST, artifact.PROVENANCE, EVALUATION, STABLE)
    for path in source.iterdir():
        if path.is_file() and path.name not in added:
            shutil.copy(path, folder)
