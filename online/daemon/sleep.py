"""The learner's sleep on disk: a kill must not wake it, nor forget what the served draft was worth when promoted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from redraft.heads.files.artifact import write_whole
from redraft.online.learning.staleness import Sleep


def save_sleep(sleep: Sleep, path: Path) -> None:
    """Write the sleep atomically."""
    write_whole(path, json.dumps(asdict(sleep)))


def load_sleep(path: Path) -> Sleep:
    """The sleep saved last. Awake without a reference if there is none, or if the file cannot be read: the learner
    then measures a new reference, and trains meanwhile."""
    try:
        fields = dict(json.loads(path.read_text()))
        then = tuple((str(domain), float(drafts), float(accepted)) for domain, drafts, accepted in fields.pop("then"))
        return Sleep(**fields, then=then)
    except (OSError, ValueError, TypeError, KeyError):
        return Sleep()
