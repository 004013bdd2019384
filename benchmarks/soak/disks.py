"""Small disks that can fill up and hang: image files with ext4, mounted through a loop device.

Needs root.

fill     the rest of the disk is allocated, so every write fails with ENOSPC
freeze   every write waits, and so do fsync, create and unlink, as on a network disk without its server
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from redraft.engine.process import start_group

FILLER = "filler"

PIECES = (64 << 20, 1 << 20, 4 << 10)
"""Sizes of the pieces to allocate, from the largest to one block. Each is repeated until none fits.
"""


@dataclass(frozen=True)
class Disk:
    folder: Path
    is_real: bool
    """Whether the disk is a mount. If mounting failed, it is a plain folder, which can neither fill
    up nor hang.
    """

    def fill(self) -> None:
        """Allocate all free space."""
        assert self.is_real
        descriptor = os.open(self.folder / FILLER, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            for piece in PIECES:
                with contextlib.suppress(OSError):
                    while True:
                        # Allocating is instant even for gigabytes, and fills the disk as writing
                        # would.
                        os.posix_fallocate(descriptor, size, piece)
                        size += piece
        finally:
            os.close(descriptor)

    def free(self) -> None:
        (self.folder / FILLER).unlink(missing_ok=True)

    def freeze(self, seconds: float, log: Path) -> subprocess.Popen[bytes]:
        """Freeze the disk, and return the process that thaws it.

        That process thaws the disk even if this one is killed.
        """
        assert self.is_real
        # The shell ignores SIGTERM, which the kernel sends it when the soak dies. A disk left
        # frozen would hang every process that touches it.
        script = f'trap "" TERM; fsfreeze -f "$1" && sleep {seconds:.1f}; fsfreeze -u "$1"'
        return start_group(["sh", "-c", script, "freeze", str(self.folder)], log=log)


@contextlib.contextmanager
def mounted(image: Path, folder: Path, num_bytes: int) -> Iterator[Disk]:
    """Mount an empty disk of `num_bytes` at `folder`.

    If this machine does not allow mounts, make a plain folder.
    """
    folder.mkdir(parents=True, mode=0o700)
    tools = [
        shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        for name in ("mkfs.ext4", "mount")
    ]
    if (
        os.geteuid()
        or not all(tools)
        or not shutil.which("fsfreeze", path="/usr/sbin:/sbin:/usr/bin")
    ):
        yield Disk(folder, is_real=False)
        return
    with image.open("wb") as file:
        file.truncate(num_bytes)
    # -m 0 reserves no blocks for root, because the soak runs as root.
    make = [str(tools[0]), "-q", "-F", "-m", "0", str(image)]
    subprocess.run(make, check=True, capture_output=True)
    if subprocess.run(
        [str(tools[1]), "-o", "loop", image, folder], capture_output=True, check=False
    ).returncode:
        yield Disk(folder, is_real=False)
        return
    try:
        folder.chmod(0o700)
        yield Disk(folder, is_real=True)
    finally:
        _unmount(folder)
        image.unlink(missing_ok=True)


def unmount_below(folder: Path) -> None:
    """Unmount the disks that a killed soak left behind in the folder."""
    for mount in psutil.disk_partitions(all=True):
        if Path(mount.mountpoint).is_relative_to(folder):
            _unmount(Path(mount.mountpoint))


def _unmount(folder: Path) -> None:
    # Thaw first, because unmounting a frozen disk would hang. Unmount lazily, because a killed
    # process may still have a file open.
    for command in (["fsfreeze", "-u"], ["umount", "--lazy"]):
        subprocess.run([*command, folder], capture_output=True, check=False)
