"""Who may read the files of a spool."""

from __future__ import annotations

import os

import pytest

from redraft.online.records.spool import SpoolWriter, spool_files


@pytest.mark.parametrize(
    ("folder_mode", "file_mode"),
    [(None, 0o600), (0o700, 0o600), (0o755, 0o600), (0o777, 0o660), (0o2770, 0o660)],
)
def test_records_are_for_their_owner_or_for_a_group_that_may_write_the_folder(
    tmp_path, folder_mode, file_mode
):
    folder = tmp_path / "spool"
    if folder_mode is not None:
        folder.mkdir()
        folder.chmod(folder_mode)
    before = os.umask(0o022)
    try:
        SpoolWriter(folder, "server", 1 << 20).write([b"RDR1"])
    finally:
        os.umask(before)
    (file,) = spool_files(folder)
    assert file.stat().st_mode & 0o777 == file_mode
    if folder_mode is None:
        assert folder.stat().st_mode & 0o777 == 0o700
