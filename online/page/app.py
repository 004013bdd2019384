"""The learner's live page, as an ASGI application for the daemon to serve.

It only reads the journal.

| path | answers with |
|---|---|
| `/` | the page; it requests only the paths listed here |
| `/overview.json?range_s=3600` | the data of the page, `online.page.overview.Overview` |
| `/metrics` | Prometheus text, if a registry was given |

There is no login, and the page shows addresses and numbers: serve it on a loopback address, or
behind a proxy that authenticates users. It is accessible only under IP addresses and local names,
so that no web site can read it from the operator's browser (`online.traffic.sockets`).
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from redraft.online.journal import Journal
from redraft.online.page.config import Page
from redraft.online.page.history import History
from redraft.online.page.overview import Overview, build_overview
from redraft.online.traffic.sockets import OperatorServer

FOLDER = Path(__file__).parent / "assets"
ASSETS = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "chart.js": "text/javascript",
}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a learner of a different release has different assets
}


class _JournalReader:
    """Reads the journal incrementally, under a lock, because several threads send requests."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._journal = Journal(folder)
        self._clock = clock
        self._history = History()
        self._offset = 0
        self._lock = threading.Lock()

    def overview(self, range_s: float) -> Overview:
        with self._lock:
            entries, offset = self._journal.read(self._offset)
            if offset < self._offset:  # the journal was removed
                self._history = History()
            self._history.extend(entries)
            self._offset = offset
            return build_overview(self._history, self._clock(), range_s)


def build_app(
    folder: Path,
    registry: CollectorRegistry | None = None,
    *,
    clock: Callable[[], float] = time.time,
) -> Starlette:
    """Build the application for the journal in `folder`, with `registry` under /metrics."""
    reader = _JournalReader(folder, clock)

    def asset(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in ASSETS:
            return Response(status_code=404)
        return Response((FOLDER / name).read_bytes(), media_type=ASSETS[name], headers=HEADERS)

    def overview_json(request: Request) -> Response:
        try:
            range_s = float(request.query_params.get("range_s", "0"))
        except ValueError:
            return Response("range_s must be a number of seconds\n", status_code=400)
        body = msgspec.json.encode(reader.overview(range_s))
        return Response(body, media_type="application/json", headers=HEADERS)

    def metrics(request: Request) -> Response:
        if registry is None:
            return Response(status_code=404)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/", asset),
            Route("/overview.json", overview_json),
            Route("/metrics", metrics),
            # Mounted last, because it matches every path.
            Route("/{name}", asset),
        ]
    )


@asynccontextmanager
async def serve_in_background(app: Starlette, page: Page) -> AsyncIterator[str]:
    """Serve `app` for as long as the context is open, and yield the address.

    Port 0 selects a free port.

    Raises:
        OSError: the port is taken, or the host is not an address of this machine.
    """
    server = OperatorServer(app, page.host, page.port, setting="page.port", hosts=page.hosts)
    serving = asyncio.create_task(server.serve([server.socket]))
    try:
        name = f"[{page.host}]" if ":" in page.host else page.host
        yield f"http://{name}:{server.socket.getsockname()[1]}/"
    finally:
        server.should_exit = True
        await serving
