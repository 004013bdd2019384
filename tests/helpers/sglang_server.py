"""A stand-in for SGLang 0.5.23: the routes and keys of its source that redraft reads, not run.

`/server_info`   entrypoints/http_server.py: the resolved arguments, and the version
`/generate`      managers/tokenizer_manager.py: `output_ids`, and `meta_info` with the counts of a request
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FIELDS = {
    *("text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len"),
    *("top_logprobs_num", "token_ids_logprob", "stream", "rid", "return_hidden_states"),
}
"""Fields of a request; the real one ignores others, this one refuses them."""

Answer = Callable[[Sequence[int], Mapping[str, Any]], dict[str, Any]]
"""(token ids of the prompt, the request) -> the answer."""


@contextmanager
def sglang_server(answer: Answer, version: str = "0.5.23") -> Iterator[str]:
    """The address of a server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            info = {"speculative_algorithm": "EAGLE3", "version": version, "frontend": "python"}
            self.send(200 if self.path == "/server_info" else 404, info)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path != "/generate" or not asked.keys() <= FIELDS:
                self.send(400, {"error": sorted(asked.keys() - FIELDS)})
                return
            self.send(200, answer(asked["input_ids"], asked))

        def send(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
