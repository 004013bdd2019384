"""Create a bearer token for the routes that swap drafts, in a file that only you can read.

    $ redraft fleet token FILE

The servers and the learner read the same file: `redraft serve --token-file FILE`, and `token_file`
in the section `[fleet]` of the learner's settings. An existing file is never overwritten.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.online.tokens import write_token


@dataclass(frozen=True, kw_only=True)
class TokenConfig:
    file: Annotated[Path, tyro.conf.Positional]
    """File to create, with a 256-bit token and mode 0600."""


def main(cfg: TokenConfig) -> None:
    write_token(cfg.file)
    print(f"wrote a new token to {cfg.file}")
