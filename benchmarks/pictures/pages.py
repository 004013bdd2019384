"""Screenshots of redraft's pages in headless Chromium, from committed data."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from redraft.online.journal import Journal
from redraft.online.page.app import build_app, serve_in_background
from redraft.online.page.config import Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # The browser's own services would connect to the internet, so no name resolves here.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--virtual-time-budget=5000",
)
TIMEOUT_S = 300


def find_browser() -> str:
    """Find the path of a Chromium browser.

    Raises:
        FileNotFoundError: none is installed.
    """
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise FileNotFoundError("pages need Chromium: apt-get install chromium")
    return found


def shoot(address: str, picture: Path, size: tuple[int, int]) -> None:
    """Write a PNG of the top of the page at `address`, in a window of `size` pixels."""
    with tempfile.TemporaryDirectory() as profile:
        command = [find_browser(), *FLAGS, f"--user-data-dir={profile}"]
        command += [f"--screenshot={picture}", f"--window-size={size[0]},{size[1]}", address]
        # Clocks on the page show the browser's time.
        env = {**os.environ, "TZ": "UTC"}
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=TIMEOUT_S)


def shoot_learner(journal: Path, picture: Path, size: tuple[int, int]) -> None:
    """Take a screenshot of the learner's page as it was at the last entry of a journal."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(journal, Path(folder) / "journal-0000000000000000.jsonl")
        now_s = max(entry.time_s for entry in Journal(Path(folder)).read().entries)
        app = build_app(Path(folder), clock=lambda: now_s)

        async def main() -> None:
            async with serve_in_background(app, Page(port=0)) as url:
                await asyncio.to_thread(shoot, url, picture, size)

        asyncio.run(main())
