"""Make the pictures of README and docs, list the stale ones, or record a terminal again.

$ python -m benchmarks.pictures                      # make all
$ python -m benchmarks.pictures --only speeds.svg    # or some
$ python -m benchmarks.pictures --check              # exit status 1 if one is older than its code or data
$ python -m benchmarks.pictures --record terminal    # run its commands, then draw it
"""

import sys
from dataclasses import dataclass
from typing import Literal

from benchmarks.pictures.catalog import DATA, RECORDINGS, ROOT, find_stale, make
from benchmarks.pictures.terminal import record
from redraft.recipes.cli.run import run_recipe


@dataclass(frozen=True, kw_only=True)
class PicturesConfig:
    only: tuple[str, ...] = ()
    """Names of the pictures to make, e.g. `speeds.svg`. By default, all are made."""
    check: bool = False
    """Make nothing. Print the stale pictures; the exit status is 1 if there are any."""
    record: Literal["terminal"] | None = None
    """First make this recording again, by running its commands."""


def main(cfg: PicturesConfig) -> None:
    if cfg.check:
        stale = find_stale()
        print("\n".join([*stale, "run `make pictures`"]) if stale else "no picture is stale")
        sys.exit(1 if stale else 0)
    if cfg.record:
        record(RECORDINGS[cfg.record], ROOT, DATA / f"{cfg.record}.cast")
        make((f"{cfg.record}.svg",))
        return
    make(cfg.only)


if __name__ == "__main__":
    run_recipe(main, PicturesConfig, __doc__)
