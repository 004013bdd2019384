"""Create the keys for the two users of an ingest log, in a new folder.

    $ redraft fleet keys keys

    servers.nk    private key of the servers: they may publish records, and read nothing (nats.credentials)
    learner.nk    private key of the learner: it reads records, and manages their stream (nats.credentials)
    users.conf    both public keys, which the broker's nats.conf includes; not secret

The keys are NKeys: the broker has only their public halves, and a private key is never sent over
the network. Only the file's owner can read a private key. `recipes/deploy/compose/nats.conf` in the
package grants both users their permissions.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.files.private import make_private


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    folder: Annotated[Path, tyro.conf.Positional]
    """Folder for the three files. Existing keys are never replaced."""


def main(cfg: KeysConfig) -> None:
    """Write the keys.

    Raises:
        FileExistsError: the folder already contains one of the files.
    """
    import nkeys  # optional dependency

    for name in ("servers.nk", "learner.nk", "users.conf"):
        if (cfg.folder / name).exists():
            raise FileExistsError(f"{cfg.folder / name} exists: keys are never replaced")
    if not cfg.folder.exists():  # an existing folder keeps its mode, and the keys have their own
        make_private(cfg.folder)
    lines = []
    for user in ("servers", "learner"):
        seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
        public = nkeys.from_seed(bytearray(seed)).public_key.decode()
        # Without a newline, because nats-py treats every byte of the file as part of the key.
        _write_new(cfg.folder / f"{user}.nk", seed, 0o600)
        lines.append(f"{user.upper()}: {public}\n")
    _write_new(cfg.folder / "users.conf", "".join(lines).encode(), 0o644)
    print(f"{cfg.folder}: servers.nk, learner.nk and users.conf")


def _write_new(path: Path, content: bytes, mode: int) -> None:
    # O_EXCL refuses an existing file. With a later chmod, others could read the key in between.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
