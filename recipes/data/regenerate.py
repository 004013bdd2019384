"""Have the target answer the prompts of a data set, as training data for a draft.

    $ redraft regenerate --target models/llama-8b --data HuggingFaceH4/ultrachat_200k --split train_sft \\
          --output outputs/answers.jsonl
    $ redraft train standalone --target models/llama-8b --data.source outputs/answers.jsonl

With --target, the engine is started here and stopped at the end. With --url, a server that runs already answers: any
OpenAI-compatible one, e.g. `python -m vllm.entrypoints.openai.api_server --model models/llama-8b`.

It can be interrupted at any time: the same command continues.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import tyro

from redraft.distill.data.conversations import load_conversations
from redraft.distill.data.regenerate import Sampling, regenerate
from redraft.distill.signal.endpoint import Endpoint
from redraft.eval.engine.server import vllm_server
from redraft.heads.files.checkpoint import load_text_config
from redraft.recipes.cli import run_recipe

MAX_MODEL_LEN = 8192
"""Longest prompt and answer together, in tokens, if the target allows more: each running request reserves memory."""

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, kw_only=True)
class Config:
    data: str
    """Conversations to answer: a hub name, a .jsonl or .parquet file, `stdlib`, or `stdlib-functions` (functions to
    complete). The answers in them are dropped."""
    output: Path
    """JSONL file to write, one line per finished conversation. Existing lines are kept."""
    split: str = "train"
    """Split of a hub data set."""
    num_conversations: int | None = None
    """Highest number of conversations to take, from the beginning; by default all."""
    target: str | None = None
    """Folder or hub name of the target. A vLLM server of it is started for this run, in the type in which drafts are
    trained for it; `-- --dtype=bfloat16` chooses another."""
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Further arguments of every vLLM server, after `--`: `-- --tensor-parallel-size=8`."""
    url: str | None = None
    """Address of a running server, instead of --target; without both, http://127.0.0.1:8000. If the variable
    OPENAI_API_KEY is set, it is sent as the key of each request."""
    model: str | None = None
    """The name of the target at --url; by default, the first model that the server lists."""
    concurrency: int = 64
    """Number of requests in flight at once."""
    sampling: Sampling = field(default_factory=Sampling)


def main(cfg: Config) -> None:
    """Answer the data set.

    Raises:
        ChildProcessError: the engine did not start.
        ConnectionError: the server does not answer.
        ValueError: --target and --url are both given, or the output was written with other settings.
    """
    if cfg.target is not None and cfg.url is not None:
        raise ValueError("give --target to start a server of it, or --url to ask a running one: not both")
    conversations = load_conversations(cfg.data, split=cfg.split)[: cfg.num_conversations]
    with serve_answers(cfg) as (url, model):
        endpoint = Endpoint(url, model=model, concurrency=cfg.concurrency, api_key=os.environ.get("OPENAI_API_KEY"))
        print(f"{regenerate(conversations, endpoint, cfg.output, cfg.sampling)} -> {cfg.output}")


@contextmanager
def serve_answers(cfg: Config) -> Iterator[tuple[str, str | None]]:
    """(URL, model name) of the server to ask: a vLLM server of the target, stopped on exit, or the running one."""
    if cfg.target is None:
        yield cfg.url or DEFAULT_URL, cfg.model
        return
    limit = load_text_config(cfg.target).max_position_embeddings
    log = cfg.output.with_suffix(".vllm.log")
    print(f"vLLM serves {cfg.target}, log in {log}")
    with vllm_server(
        cfg.target,
        log=log,
        max_model_len=min(limit, MAX_MODEL_LEN),
        max_num_seqs=cfg.concurrency,
        # Of a CPU's memory. `vllm_server` ignores this number on a GPU, which vLLM fills by itself.
        kv_cache_bytes=psutil.virtual_memory().available // 4,
        extra_args=cfg.vllm_args,
    ) as server:
        yield server.url, server.model


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
