"""A stand-in for SGLang 0.5.23: the routes and keys of its source that redraft reads, not run.

`/server_info`   entrypoints/http_server.py: the resolved arguments, and the version
`/generate`      managers/tokenizer_manager.py: `output_ids`, and `meta_info` with the counts of a request
`/v1/...`        entrypoints/openai/protocol.py, serving_chat.py: ids if `return_token_ids` is set
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from local_server import serve_handler

FIELDS = {
    *("text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len"),
    *("top_logprobs_num", "token_ids_logprob", "stream", "rid", "return_hidden_states"),
}
"""Fields of a request; the real one ignores others, this one refuses them."""

Answer = Callable[[Sequence[int], Mapping[str, Any]], dict[str, Any]]
"""(token ids of the prompt, the request) -> the answer."""


OPENAI = {
    *("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "stream"),
    "return_token_ids",
}
PROMPT_IDS, OUTPUT_IDS = [5, 6, 7], [8, 9]


def answer_openai(path: str, asked: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    is_chat = path == "/v1/chat/completions"
    if not asked.keys() <= OPENAI or (
        is_chat and asked.get("stream") and "return_token_ids" in asked
    ):
        return 400, {"error": sorted(asked.keys() - OPENAI)}
    has_ids = bool(asked.get("return_token_ids"))
    text = {"message": {"role": "assistant", "content": "x"}} if is_chat else {"text": "x"}
    ids = "response_token_ids" if is_chat else "token_ids"
    choice = {"index": 0, **text, "finish_reason": "length"}
    choice |= {"prompt_token_ids": PROMPT_IDS if has_ids else None}
    return 200, {"id": "a", "choices": [choice | {ids: OUTPUT_IDS if has_ids else None}]}


@contextmanager
def sglang_server(answer: Answer, version: str = "0.5.23") -> Iterator[str]:
    """The address of a server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            info = {"speculative_algorithm": "EAGLE3", "version": version, "frontend": "python"}
            found = {"/server_info": info, "/v1/models": {"data": [{"id": "m"}]}, "/health": {}}
            self.send(200 if self.path in found else 404, found.get(self.path, {}))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path.startswith("/v1/"):
                self.send(*answer_openai(self.path, asked))
                return
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

    with serve_handler(Handler) as url:
        yield url
