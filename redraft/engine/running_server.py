"""A server that redraft did not start: its engine, and its greedy answers with draft counts.

                     asks                       counts of an answer
    vLLM             /v1/completions            /metrics, before and after
    llama.cpp        /completion                `timings`
    SGLang           /generate                  `meta_info` (read in 0.5.23, not run)

Requests contain token ids, and only fields that the engine supports. They run one at a time,
because vLLM's counters cannot be split by request.
"""

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from redraft.engine.counters import parse_counts
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.proxies import load_certificates

EngineName = Literal["vllm", "sglang", "llama.cpp"]

TIMEOUT_S = 300.0
COUNTERS_S = 5.0
"""Time in seconds to wait for vLLM's counters, which include the last step only shortly after the
client has received its tokens.
"""

UNIX_SOCKET = (
    "redraft connects to servers over TCP, not a Unix socket: start vLLM with --host and "
    "--port instead of --uds"
)
LOST = "the server stopped responding"


@dataclass(frozen=True, kw_only=True)
class CountedAnswer:
    token_ids: list[int]
    counts: AcceptanceCounts


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    url: str
    engine: EngineName
    version: str
    """Version that the server reports. Empty if it reports none."""
    model: str
    """The model name that the server's API requires. Empty if it requires none."""

    @property
    def drafts_to_the_end(self) -> bool:
        """Whether drafts stop at the end of the longest answer (`counts.simulate_blocks`)."""
        return self.engine == "llama.cpp"

    def answer(self, prompt: Sequence[int], max_tokens: int) -> CountedAnswer:
        """Return the greedy answer to a prompt, with the draft counts for this answer.

        Raises:
            ConnectionError: the server stopped responding.
            ValueError: the server rejects the request, drafts nothing, or also serves other
                clients.
        """
        ask = {"vllm": _ask_vllm, "sglang": _ask_sglang, "llama.cpp": _ask_llama_cpp}[self.engine]
        return ask(self, list(prompt), max_tokens)


def read_address(url: str) -> httpx.URL:
    """Parse the address of a server.

    Raises:
        ValueError: it cannot be one.
    """
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        address = httpx.URL("")
    is_port = (address.port or 0) < 1 << 16
    if address.scheme not in ("http", "https") or not address.host or not is_port:
        shown = re.sub("//[^/]*@", "//", str(url))  # without a password
        is_socket = shown.startswith("/") or "unix" in address.scheme
        cure = UNIX_SOCKET if is_socket else "it must have the form http://HOST:PORT"
        raise ValueError(f"{shown!r} is not the address of a server: {cure}")
    return address


def find_server(url: str) -> RunningServer:
    """Identify the server at an address.

    Raises:
        ConnectionError: no server responds.
        ValueError: the server is not one of the three engines.
    """
    url = url.rstrip("/")
    if (props := _get(url, "/props")) and "build_info" in props:
        build = str(props["build_info"]).partition("-")[0]
        # A build without git history reports the version b0.
        version = "" if build == "b0" else build
        return RunningServer(url=url, engine="llama.cpp", version=version, model="")
    if (info := _get(url, "/server_info")) and "speculative_algorithm" in info:
        version = str(info.get("version", ""))
        return RunningServer(url=url, engine="sglang", version=version, model="")
    models = (_get(url, "/v1/models") or {}).get("data") or []
    if (found := _get(url, "/version")) and "version" in found and models:
        name = str(models[0]["id"])
        return RunningServer(url=url, engine="vllm", version=str(found["version"]), model=name)
    raise ValueError(
        f"{url} is not a vLLM, SGLang or llama.cpp server: it has neither /props nor /server_info nor "
        "/version with /v1/models"
    )


def _get(url: str, path: str) -> dict[str, Any] | None:
    response = _send("GET", url, path)
    return read_object(response) if response.is_success else None


def _post(url: str, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    response = _send("POST", url, path, asked)
    if not response.is_success:
        raise ValueError(f"{url}{path} answers {response.status_code}: {response.text[:200]}")
    if (found := read_object(response)) is None:
        raise ValueError(f"{url}{path} did not answer with a JSON object")
    return found


def _send(method: str, url: str, path: str, asked: dict[str, Any] | None = None) -> httpx.Response:
    try:
        return httpx.request(
            method, f"{url}{path}", json=asked, timeout=TIMEOUT_S, trust_env=False,
            verify=load_certificates(url),
        )  # fmt: skip
    except httpx.TransportError as error:
        raise ConnectionError(f"{url}: {LOST} ({error or type(error).__name__})") from error


def _ask_llama_cpp(server: RunningServer, prompt: list[int], max_tokens: int) -> CountedAnswer:
    asked = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0.0, "return_tokens": True}
    # A cached prefix may contain a draft key that was computed with a different token.
    answer = _post(server.url, "/completion", {**asked, "cache_prompt": False})
    timings = require_part(server.url, answer, "timings")
    token_ids = list(require_part(server.url, answer, "tokens"))
    accepted = int(timings.get("draft_n_accepted", 0))
    # The prefill produces the first token, and every step produces one token in addition to the
    # accepted ones.
    num_drafts = max(len(token_ids) - 1 - accepted, 0)
    drafted = int(timings.get("draft_n", 0))
    return _counted(server, token_ids, num_drafts, accepted, drafted)


def _ask_sglang(server: RunningServer, prompt: list[int], max_tokens: int) -> CountedAnswer:
    sampling = {"temperature": 0.0, "max_new_tokens": max_tokens}
    asked = {"input_ids": prompt, "sampling_params": sampling}
    answer = _post(server.url, "/generate", asked)
    info = require_part(server.url, answer, "meta_info")
    token_ids = list(require_part(server.url, answer, "output_ids"))
    counts = [
        int(info.get(name, 0))
        for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
    ]
    return _counted(server, token_ids, *counts)


def _ask_vllm(server: RunningServer, prompt: list[int], max_tokens: int) -> CountedAnswer:
    asked: dict[str, Any] = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens}
    before = parse_counts(_send("GET", server.url, "/metrics").text)
    asked |= {"temperature": 0.0, "return_token_ids": True, "cache_salt": secrets.token_hex(8)}
    answer = _post(server.url, "/v1/completions", asked)
    token_ids = list(require_part(server.url, answer, "choices", 0, "token_ids"))
    deadline = time.monotonic() + COUNTERS_S
    while True:
        now = parse_counts(_send("GET", server.url, "/metrics").text).since(before)
        emitted = 0 if now is None else 1 + now.num_drafts + now.num_accepted
        if now is not None and emitted >= len(token_ids):
            break
        if time.monotonic() > deadline:
            raise ValueError(
                f"{server.url} answered in steps without a draft, or its counters are off: serve the "
                "head alone, with --pace off"
            )
        time.sleep(0.05)
    # The last block may extend beyond the end of the answer, by at most its own length.
    if emitted > len(token_ids) + now.num_draft_tokens / max(now.num_drafts, 1):
        raise ValueError(
            f"{server.url} counted {emitted} tokens for an answer of {len(token_ids)}: "
            f"another client is using this server; try again while it is idle"
        )
    counts = now.num_drafts, now.num_accepted, now.num_draft_tokens
    return _counted(server, token_ids, *map(int, counts))


def read_object(response: httpx.Response) -> dict[str, Any] | None:
    """Return the JSON object in a response's body, or None if there is none."""
    try:
        answer = response.json()
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def find_part(answer: Any, *path: str | int) -> Any:
    """Return the part of a response at `path`; None if it is missing."""
    try:
        for key in path:
            answer = answer[key]
        return answer
    except (LookupError, TypeError):
        return None


def require_part(url: str, answer: Any, *path: str | int) -> Any:
    """Return a part of a response that the engine sends, but a gateway in front of it may drop.

    Raises:
        ValueError: it is missing.
    """
    if (found := find_part(answer, *path)) is None:
        raise ValueError(
            f"{url} sends no `{path[-1]}`: give the address of the engine itself, not of a gateway "
            "in front of it"
        )
    return found


def _counted(
    server: RunningServer, token_ids: list[int], drafts: int, accepted: int, drafted: int
) -> CountedAnswer:
    if len(token_ids) > 2 and not drafted:
        raise ValueError(f"{server.url} proposes no tokens: it was started without a draft")
    counts = AcceptanceCounts(num_drafts=drafts, num_accepted=accepted, num_draft_tokens=drafted)
    return CountedAnswer(token_ids=token_ids, counts=counts)
