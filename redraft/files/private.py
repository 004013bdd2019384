"""Create folders that only their owner may open. They contain users' text, tokens or keys."""

import os
from pathlib import Path


def make_private(folder: Path) -> None:
    """Create the folder with mode 0700, or revoke other users' access to an existing folder.

    A folder that a different user owns is left unchanged, because a Kubernetes volume belongs to
    root.

    Raises:
        OSError: the folder cannot be created or changed.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)


def require_own(folder: Path) -> None:
    """Refuse a folder that a different user owns, or in which a different user owns a file.

    Its token, spool and settings could come from that user.

    Raises:
        PermissionError: a different user owns the folder or a file in it.
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
                f"{path} belongs to user {owner}, who could read or replace the files written to it: "
                "choose a folder of your own, or chown it"
            )
