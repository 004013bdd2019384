"""All pictures, with their sources and the code that draws them.

| data in docs/pictures | from |
|---|---|
| journal.jsonl | the learner's journal of a soak on 2026-11-29 (383 s), without a line with a path |
| terminal.cast | `python -m benchmarks.pictures --record terminal`: the output of a terminal, with times |
| up.log | output of `redraft up` in `make demo-up` on 2026-11-30, until the demo's kill |
| manifest.json | `make pictures`: digests of every picture and of its sources |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pictures import charts, pages, terminal
from benchmarks.pictures.tables import MEASUREMENTS
from redraft.files.artifact import sha256, write_whole

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs/pictures"
MANIFEST = DATA / "manifest.json"

RECORDINGS = {
    "terminal": (
        "redraft data count \\\n"
        "    --target outputs/parts/smollm2-135m-instruct \\\n"
        "    --data recipes/demo/assets/smollm2-answers.jsonl.zst \\\n"
        "    --output outputs/counted",
        "redraft plan --target qwen3-8b",
    ),
}
"""The commands of each recording."""

UP = (
    "make demo-up, 2026-11-30, two CPU cores of an AMD EPYC",
    "redraft up outputs/parts/smollm2-135m-instruct --folder outputs/demo-up/up "
    "--capture.fraction 1 -- ...",
)
"""The title of the picture that shows up.log, and the command that printed the log."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    path: str
    draw: Callable[[Path], None]
    """Writes the picture to a file."""
    files: tuple[str, ...]
    """Code and data from which the picture is made, as patterns below the root."""
    rows: Callable[[], object] = lambda: None
    """Function that returns the figures of a table shown in the picture."""

    def digest(self) -> str:
        """Return the SHA-256 of everything from which the picture is made."""
        found = hashlib.sha256(json.dumps(self.rows()).encode())
        for pattern in self.files:
            named = sorted(path for path in ROOT.glob(pattern) if path.is_file())
            if not named:
                raise FileNotFoundError(f"{self.path} is made from {pattern}, which does not exist")
            for path in named:
                found.update(f"{path.relative_to(ROOT)} {sha256(path)}\n".encode())
        return found.hexdigest()


def _page() -> str:
    return MEASUREMENTS.read_text()


CHARTS = ("benchmarks/pictures/charts.py", "benchmarks/svg.py")
PICTURES = (
    Picture(
        path="docs/speeds.svg",
        draw=lambda path: write_whole(path, charts.draw_speeds(charts.read_speeds(_page()))),
        files=CHARTS,
        rows=lambda: charts.read_speeds(_page()),
    ),
    Picture(
        path="docs/learning.svg",
        draw=lambda path: write_whole(path, charts.draw_learning(charts.read_learning(_page()))),
        files=CHARTS,
        rows=lambda: charts.read_learning(_page()),
    ),
    Picture(
        path="docs/training.svg",
        draw=lambda path: write_whole(path, charts.draw_training(charts.read_training(_page()))),
        files=(*CHARTS, "benchmarks/time_to_tau/charts.py"),
        rows=lambda: charts.read_training(_page()),
    ),
    Picture(
        path="docs/terminal.svg",
        draw=lambda path: write_whole(path, terminal.draw(DATA / "terminal.cast")),
        files=("benchmarks/pictures/terminal.py", "docs/pictures/terminal.cast"),
    ),
    Picture(
        path="docs/up.svg",
        draw=lambda path: write_whole(path, terminal.draw_log(DATA / "up.log", *UP)),
        files=("benchmarks/pictures/terminal.py", "docs/pictures/up.log"),
        rows=lambda: UP,
    ),
    Picture(
        path="docs/page-learner.png",
        draw=lambda path: pages.shoot_learner(DATA / "journal.jsonl", path, (1180, 1040)),
        files=(
            *("benchmarks/pictures/pages.py", "docs/pictures/journal.jsonl"),
            *("online/page/assets/*", "online/page/h*.py", "online/page/overview.py"),
        ),
    ),
)


def read_manifest() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(MANIFEST.read_text())
    return found


def find_stale() -> list[str]:
    """Return a line for each picture that differs from what the current code and data make."""
    kept, lines = read_manifest(), []
    for picture in PICTURES:
        path, entry = ROOT / picture.path, kept.get(picture.path, {})
        if not path.is_file():
            lines.append(f"{picture.path} is missing")
        elif entry.get("made_from") != picture.digest():
            lines.append(f"{picture.path} is older than the code or data that it is made from")
        elif entry.get("sha256") != sha256(path):
            lines.append(f"{picture.path} was not made by `make pictures`")
    return lines


def make(names: tuple[str, ...] = ()) -> None:
    """Make the named pictures, or all, and record the digests of their sources."""
    kept = read_manifest() if MANIFEST.is_file() else {}
    for picture in PICTURES:
        path = ROOT / picture.path
        if not names or path.name in names:
            picture.draw(path)
            kept[picture.path] = {"made_from": picture.digest(), "sha256": sha256(path)}
            print(f"made {picture.path}", flush=True)
    kept = {picture.path: kept[picture.path] for picture in PICTURES if picture.path in kept}
    write_whole(MANIFEST, json.dumps(kept, indent=2) + "\n")
