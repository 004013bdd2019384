"""Pages in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"
)


def open_in_chromium(page: Path, folder: Path, *flags: str) -> tuple[str, list[str], list[str]]:
    """The rendered page, its console messages, and the addresses that it asked the network for."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
    ]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    # The browser's own services would like to call home: here no name resolves.
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"]
    command += [
        "--virtual-time-budget=5000",
        "--enable-logging=stderr",
        f"--log-net-log={folder / 'net.json'}",
    ]
    done = subprocess.run(
        [*command, *flags, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    events = (
        event.get("params", {}) for event in json.loads((folder / "net.json").read_text())["events"]
    )
    asked = [
        e["url"]
        for e in events
        if "url" in e and e.get("initiator", "not an origin") != "not an origin"
    ]
    return done.stdout, re.findall(r"CONSOLE[^\n]*", done.stderr), asked


def words(html: str, tag: str) -> str:
    """The text of the first element with this tag."""
    begin, end = re.search(rf"<{tag}[^>]*>", html), html.index(f"</{tag}>")
    assert begin is not None
    return " ".join(re.sub(r"<[^>]+>", "", html[begin.end() : end]).split())
