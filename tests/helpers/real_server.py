"""A real vLLM server with the plugin, started by `redraft serve`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from redraft.engine.process import free_port
from redraft.online.records.record import Record, join_text, read_frames
from redraft.online.records.spool import spool_files

TOKEN = "a-token-for-tests"
RANDOM, COPY, NOISY, CORRUPT, WIDER, FOREIGN, FIRST = (f"v{i:06d}" for i in range(1, 8))
START_TIMEOUT_S = 600


class Server:
    """A running vLLM with the plugin."""

    token = TOKEN
    random, copy, noisy, corrupt, wider, foreign = RANDOM, COPY, NOISY, CORRUPT, WIDER, FOREIGN

    def __init__(self, url: str, registry: Path, spool: Path, log: Path) -> None:
        self.url, self.registry, self.spool, self.log = url, registry, spool, log
        self.http = httpx.Client(
            base_url=url,
            timeout=600,
            headers={"Authorization": f"Bearer {TOKEN}"},
            limits=httpx.Limits(keepalive_expiry=2),  # uvicorn closes idle connections after 5 s
        )

    def swap(self, version: str) -> dict[str, Any]:
        answer = self.http.post("/redraft/swap", json={"version": version})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self) -> dict[str, Any]:
        answer = self.http.get("/redraft/status")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(
        self, prompt: list[int], *, headers: dict[str, str] | None = None, **parameters: Any
    ) -> dict[str, Any]:
        """The response to one prompt of token ids: 24 greedy tokens, including the token ids."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = self.http.post("/v1/completions", json=body | parameters, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def records(
        self, responses: list[dict[str, Any]], *, timeout_s: float = 30, may_lack_last: bool = False
    ) -> list[Record]:
        """The records of these responses, as soon as they contain every token.

        A swap that makes the target read again may leave a request's last token to that reading. It
        verifies nothing, so there is no row and no record of that token. `may_lack_last` allows for
        it.
        """
        wanted = {
            response["id"]: len(response["choices"][0]["token_ids"]) for response in responses
        }
        deadline = time.monotonic() + timeout_s
        while True:
            found = [
                record
                for record in self.all_records()
                if record.request_id.startswith(tuple(wanted))
            ]
            arrived = {
                i: sum(
                    len(record.output_ids) for record in found if record.request_id.startswith(i)
                )
                for i in wanted
            }
            lacking = {wanted[i] - arrived[i] for i in wanted}
            if lacking <= ({0, 1} if may_lack_last else {0}):
                return list(
                    join_segments(
                        sorted(found, key=lambda record: (record.request_id, record.sequence))
                    )
                )
            assert time.monotonic() < deadline, (
                f"{arrived} of {wanted} tokens; {self.status()['capture']}"
            )
            time.sleep(0.1)

    def has_shipped(self) -> dict[str, Any] | None:
        """Capture's counters, once nothing is left to write."""
        capture = self.status()["capture"]
        gone = sum(capture.get(name, 0) for name in ("shipped_records", "dropped_records_spool"))
        return (
            capture if not capture["open_requests"] and capture.get("records", 0) == gone else None
        )

    def all_records(self) -> list[Record]:
        frames = [
            frame for path in spool_files(self.spool) for frame in read_frames(path.read_bytes())
        ]
        assert all(isinstance(record, Record) for _, record in frames)
        return [record for _, record in frames]


def join_segments(records: Iterable[Record]) -> Iterator[Record]:
    """Self-contained records, of all segments of some requests in order."""
    texts: dict[str, bytes] = {}
    for record in records:
        whole = join_text(record, texts[record.previous_id]) if record.context_begin else record
        texts[record.record_id] = whole.context + whole.output
        yield whole


@contextlib.contextmanager
def running_server(
    target: Path,
    registry: Path,
    folder: Path,
    options: list[str],
    ingest: str = "",
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run `redraft serve` with these options and arguments of vLLM while the block runs.

    The log, and the spool if any, are in `folder`.
    """
    port = free_port()
    records = ("--capture.ingest", ingest) if ingest else ("--capture.spool", str(folder / "spool"))
    command = [
        *(
            sys.executable,
            "-m",
            "redraft.recipes.cli",
            "serve",
            str(target),
            "--registry",
            str(registry),
            *options,
        ),
        *(*records, "--", "--port", str(port), "--host", "127.0.0.1"),
        *(
            "--served-model-name",
            "m",
            "--dtype",
            "float32",
            "--max-model-len",
            "512",
            "--enforce-eager",
        ),
        *(
            "--max-num-seqs",
            "8",
            "--max-num-batched-tokens",
            "64",
            "--kv-cache-memory-bytes",
            str(64 << 20),
        ),
        *("--max-logprobs", "40", "--per-request-spec-decode-metrics", "summary"),
        *arguments,
    ]
    variables = (
        os.environ | {"REDRAFT_TOKEN": TOKEN, "VLLM_LOGGING_LEVEL": "INFO"} | (environment or {})
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, process_group=0)
    server = Server(f"http://127.0.0.1:{port}", registry, folder / "spool", folder / "log")
    try:
        wait_until_healthy(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=600)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the remaining workers
                os.killpg(process.pid, signal.SIGKILL)


def wait_until_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if server.http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        tail = server.log.read_text()[-3000:]
        assert process.poll() is None, f"the server ended:\n{tail}"
        assert time.monotonic() < deadline, f"the server did not start:\n{tail}"
        time.sleep(0.3)
