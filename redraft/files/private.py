"""Folders that only their owner may open, because they hold users' text, tokens or keys."""

import os
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make the folder with mode 0700, and take the rights of others from one that exists.

    A folder of another user stays as it is: a volume of Kubernetes belongs to root.

    Raises:
        OSError
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)


def require_own(folder: Path) -> None:
    """Refuse a folder that another user made, or in which another user has made something.

    Its token, spool and settings could be the other user's.

    Raises:
        PermissionError
    """
    try:
        names = [folder, *folder.iterdir()]
    except FileNotFoundError:
        return
    for path in names:
        # The folder itself may be a link to a larger disk.
        owner = path.stat().st_uid if path == folder else path.lstat().st_uid
        if owner != os.geteuid():
            raise PermissionError(
                f"{path} belongs to the user {owner}, who could read or replace what this one "
                "writes: give a folder of your own, or chown it"
            )
