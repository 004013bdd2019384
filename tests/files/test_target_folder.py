"""A target's files are read once, whatever type it computes in."""

from __future__ import annotations

import shutil
from pathlib import Path

from redraft.files.target_folder import TargetFolder


def test_the_same_target_in_another_type_reads_no_file_again(
    tiny_target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    target = TargetFolder.open(folder)
    read = target.config, target.fingerprint, target.tokenizer
    shutil.rmtree(folder)
    other = target.in_dtype("bfloat16")
    assert (other.dtype, target.dtype) == ("bfloat16", None)
    assert (other.config, other.fingerprint, other.tokenizer) == read
