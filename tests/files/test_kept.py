"""Values that an interrupted run left on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from redraft.files.kept import compute_once


@dataclass(frozen=True, kw_only=True)
class Before:
    tau: float


@dataclass(frozen=True, kw_only=True)
class Now:
    tau: float
    num_drafts: int


def test_a_value_is_computed_once_for_a_key(tmp_path: Path) -> None:
    values = iter([1.5, 2.5])
    results = [
        compute_once(tmp_path, "tau", key, float, lambda: next(values)) for key in ("a", "a", "b")
    ]
    assert results == [1.5, 1.5, 2.5]


def test_a_value_whose_type_has_other_fields_by_now_is_computed_again(tmp_path: Path) -> None:
    compute_once(tmp_path, "counts", "key", Before, lambda: Before(tau=1.5))
    assert (
        compute_once(tmp_path, "counts", "key", Now, lambda: Now(tau=2.0, num_drafts=3)).num_drafts
        == 3
    )
    assert (
        compute_once(tmp_path, "counts", "key", Now, lambda: Now(tau=9.0, num_drafts=9)).num_drafts
        == 3
    )
