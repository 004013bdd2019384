"""`redraft up` whose server and learner are stand-ins.

This file with `serve` or `learner` as the first argument.
"""

from __future__ import annotations

import http.server
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

METRICS = b"""vllm:request_success_total{finished_reason="stop"} 5
vllm:num_requests_running 2
vllm:generation_tokens_total 640
"""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(METRICS)))
        self.end_headers()
        self.wfile.write(METRICS)


def serve(arguments: list[str]) -> None:
    port = int(arguments[arguments.index("--port") + 1])
    folder = Path(arguments[arguments.index("--token-file") + 1]).parent
    print("(Worker pid=7) INFO 11-28 [worker.py:9] redraft: the draft takes 0.1 GB", flush=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    begin(folder, f"server {port}")
    while True:
        server.handle_request()


def publish_first(settings: Path) -> None:
    folder, initial = settings.parent, tomllib.loads(settings.read_text())["draft"]["initial"]
    if "broken" in initial:
        raise ValueError("the draft does not fit")
    (folder / "registry/v000001").mkdir(parents=True)
    (folder / "registry/current").symlink_to("v000001")
    note(folder, "v000001 is published")


def learn(arguments: list[str]) -> None:
    begin(Path(arguments[arguments.index("--config") + 1]).parent, "learner")
    print('{"kind":"state","phase":"training"}', flush=True)
    print('{"kind":"fault","what":"disk_full","detail":"28"}', flush=True)
    while True:
        time.sleep(0.05)


def begin(folder: Path, name: str) -> None:
    """Note the begin with the process id, and the end at SIGTERM."""

    def end(*_: object) -> None:
        note(folder, f"{name} ends")
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    note(folder, f"{name} begins {os.getpid()}")


def note(folder: Path, event: str) -> None:
    with (folder / "events").open("a") as file:
        file.write(f"{event}\n")


def up(arguments: list[str]) -> None:
    from redraft.recipes.cli import run
    from redraft.recipes.serve import up as module

    module.COMMAND, module.LOOK_S = (sys.executable, __file__), 0.05
    module.publish_first = publish_first
    sys.argv[1:] = ["up", *arguments]
    run.main()


if __name__ == "__main__":
    {"serve": serve, "learner": learn, "up": up}[sys.argv[1]](sys.argv[2:])
