"""The origin of a published folder: the keys of provenance.json that programs read.

Each writer sets some of them, and adds others for human readers. Missing keys get their defaults,
and unknown keys of a later release are ignored. Other packages convert their own sections, which
are kept raw here.
"""

import math
from pathlib import Path
from typing import Any

import msgspec

from redraft.files.artifact import PROVENANCE
from redraft.files.folder import read_as
from redraft.heads.options import Standalone


class Data(msgspec.Struct, frozen=True, kw_only=True):
    source: str = ""
    """Empty if unknown."""
    split: str = "train_sft"
    held_out: float = 0.01
    max_prompt_tokens: int = 1024


class Loop(msgspec.Struct, frozen=True, kw_only=True):
    sequence_length: int | None = None


class Prove(msgspec.Struct, frozen=True, kw_only=True):
    num_speculative_tokens: int | None = None


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of a training run."""

    data: Data = Data()
    loop: Loop = Loop()
    prove: Prove = Prove()
    draft: Standalone | None = None


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    # Fields for a draft.
    target: str = ""
    target_fingerprint: str = ""
    target_lineage: str = ""
    # Fields for a training run.
    config: Flags = Flags()
    date: str | None = None
    template_arguments: dict[str, Any] = {}
    label_probe: dict[str, list[int]] | None = None
    metrics: list[dict[str, Any]] = []
    """The last lines of the run's metrics.jsonl."""
    forecast: dict[str, Any] | None = None
    """The forecast, an `eval.forecast.stored.StoredForecast`."""
    # Keys of a learner's versions and checkpoints.
    adapter: str = ""
    """Name of the target's adapter whose requests the draft was trained on."""
    copied_from: str = ""
    trained_from: str = ""
    trained_through: float = math.inf
    progress: dict[str, Any] = {}
    """The learner's progress, an `online.learning.trainer.Progress`."""
    # Fields for a target.
    imported_from: dict[str, Any] = {}
    downloaded_from: dict[str, Any] = {}

    def names_lineage(self, lineage: str) -> bool:
        """Whether the draft is for this lineage of targets.

        An empty lineage is unknown and matches nothing.
        """
        return bool(lineage) and self.target_lineage == lineage


def read_provenance(folder: Path) -> Provenance:
    """Read the provenance of a folder. Without a file, everything is unknown.

    Raises:
        ValueError: the file is corrupt.
    """
    path = folder / PROVENANCE
    return read_as(path, Provenance) if path.is_file() else Provenance()
