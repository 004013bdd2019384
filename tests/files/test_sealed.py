"""A file with layout and checksum is read back as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft.files.sealed import DamagedError, read_sealed, write_sealed


def test_numbers_as_keys_are_read_back_as_text(tmp_path: Path) -> None:
    write_sealed(tmp_path / "counts.json", {"counts": {2: "a", 10: "b"}})
    assert read_sealed(tmp_path / "counts.json") == {"counts": {"2": "a", "10": "b"}}


def test_an_altered_value_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    write_sealed(path, {"counts": {"2": "a"}})
    path.write_text(path.read_text().replace('"a"', '"b"'))
    with pytest.raises(DamagedError, match=r"counts\.json .*checksum"):
        read_sealed(path)
