"""The learner's sleep on disk: a kill must not wake it, nor forget what the served draft was worth when promoted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from redraft.heads.files.sealed import DamagedError, read_sealed, write_sealed
from redraft.online.learning.staleness import Sleep


def save_sleep(sleep: Sleep, path: Path) -> None:
    """Write the sleep atomically."""
    write_sealed(path, asdict(sleep))


def load_sleep(path: Path) -> Sleep:
    """The sleep saved last; awake without a reference if there is none yet.

    Raises:
        DamagedError: if the file does not hold a sleep.
        ValueError: if a later release wrote it.
    """
    if not path.exists():
        return Sleep()
    content = read_sealed(path)
    try:
        fields = dict(content)
        then = tuple((str(domain), float(drafts), float(accepted)) for domain, drafts, accepted in fields.pop("then"))
        return Sleep(**fields, then=then)
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{path} does not hold a sleep ({error})") from error
