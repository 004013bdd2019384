"""Run the llama-server of the package `xllamacpp`, for benchmarks and tests on a CPU.

    python -m benchmarks.llama_server TARGET.gguf [--draft DRAFT.gguf --type draft-eagle3 --tokens 3]

It prints its address, and serves until its standard input closes. It uses one slot, one thread and
a float32 cache, because the forecasts that the counts are compared with are in float32.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

CONTEXT = 2048


@contextmanager
def serving(
    target: Path, *, draft: Path | None = None, kind: str = "", tokens: int = 3
) -> Iterator[httpx.Client]:
    """Start a server in a separate process, and yield a client for it.

    A failed assertion in llama.cpp then ends only that process.

    Raises:
        ChildProcessError: the server did not start; the message is its last line of output.
    """
    command = [sys.executable, "-m", "benchmarks.llama_server", str(target)]
    if draft is not None:
        command += [f"--draft={draft}", f"--type={kind}", f"--tokens={tokens}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        if not address:
            *_, last = ["nothing", *process.stderr.read().splitlines()]
            raise ChildProcessError(f"llama-server did not start: {last}")
        try:
            with httpx.Client(base_url=address, timeout=300) as client:
                yield client
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def complete(client: httpx.Client, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return the greedy answer to a prompt of token ids, with its ids (`tokens`) and `timings`."""
    asked = {"prompt": list(prompt), "n_predict": max_tokens, "temperature": 0.0}
    answer = client.post(
        "/completion", json={**asked, "return_tokens": True, "cache_prompt": False}
    )
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def main() -> None:
    import xllamacpp as llama

    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--type", default="")
    parser.add_argument("--tokens", type=int, default=3)
    args = parser.parse_args()
    params = llama.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = args.target, CONTEXT, 1
    params.warmup = params.fit_params = False
    params.verbosity, params.endpoint_metrics = 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if args.draft:
        kind = args.type.upper().replace("-", "_")
        types = llama.common_speculative_type
        params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        draft = params.speculative.draft
        draft.mparams.path = args.draft
        draft.n_max, draft.n_min, draft.p_min = args.tokens, 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
        draft.cache_type_k = draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    server = llama.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
