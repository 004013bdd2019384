"""A hub on this machine with one model, and processes that ask it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from local_server import serve_handler

NAME = "owner/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOWHERE = "http://127.0.0.1:9"


@contextlib.contextmanager
def serve_model(files: Mapping[str, bytes], broken: str = "", model: str = NAME) -> Iterator[str]:
    """The address of a hub with one model. The file `broken` is answered with an error."""

    class Hub(BaseHTTPRequestHandler):
        """The routes of the hub's interface that a download of a model asks."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            # A file that is asked for alone is one of the branch.
            repository, _, name = path.replace("/resolve/main/", f"/resolve/{COMMIT}/").partition(
                f"/resolve/{COMMIT}/"
            )
            if path == f"/api/models/{model}/tree/{COMMIT}":
                tree = [
                    {"type": "file", "path": one, "size": len(files[one]), "oid": one}
                    for one in files
                ]
                self.answer(json.dumps(tree).encode())
            elif path in (f"/api/models/{model}", f"/api/models/{model}/revision/main"):
                siblings = [{"rfilename": one} for one in files]
                self.answer(json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}).encode())
            elif repository == f"/{model}" and name in files and name != broken:
                self.answer(files[name], etag=f'"{name}"')
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()

        def answer(self, body: bytes, etag: str = '"info"') -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", etag)
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with serve_handler(Hub) as url:
        yield url


def keep_in_cache(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a folder the only model in the hub's cache of this process, which is offline.

    Returns its hub name.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    kept = cache / f"models--{NAME.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text(COMMIT)
    shutil.copytree(model, kept / "snapshots" / COMMIT)
    return NAME


def run_with_hub(
    code: str, endpoint: str, home: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run Python code with the hub at `endpoint` and the cache in `home`.

    The hub's library reads both once.
    """
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(home),
    }
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
