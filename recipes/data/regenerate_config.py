"""Have the target answer the prompts of a data set, as training data for a draft.

    $ redraft regenerate --target models/llama-8b --prompts HuggingFaceH4/ultrachat_200k \\
          --split train_sft --output outputs/answers.jsonl
    $ redraft train standalone --target models/llama-8b --data.source outputs/answers.jsonl

With --target, the engine is started here and stopped at the end. With --url, a server that runs
already answers: any OpenAI-compatible one, e.g. `python -m vllm.entrypoints.launchers.api_server.entry
--model models/llama-8b`.

It can be interrupted at any time: the same command continues.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.distill.signal.storage import DEFAULT_STORAGE
from redraft.distill.signal.target_answers import Sampling


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig(Sampling):
    prompts: str
    """Conversations to answer: a hub name, a .jsonl or .parquet file, `stdlib`, or
    `stdlib-functions` (functions to complete). The answers in them are dropped.
    """
    output: Path
    """JSONL file to write, one line per finished conversation. Existing lines are kept."""
    overwrite: bool = False
    """Answer everything again. The answers in --output are set aside at the first new one, and
    deleted when all new ones are there.
    """
    split: str = "train"
    """Split of a hub data set."""
    num_conversations: int | None = None
    """Highest number of conversations to take, from the beginning; by default all."""
    target: str | None = None
    """Folder or hub name of the target. A vLLM server of it is started for this run, in the type in
    which drafts are trained for it; `-- --dtype=bfloat16` chooses another.
    """
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Further arguments of every vLLM server, after `--`: `-- --tensor-parallel-size=8`."""
    url: str | None = None
    """Address of a running server, instead of --target; without both, http://127.0.0.1:8000. If the
    variable OPENAI_API_KEY is set, it is sent as the key of each request.
    """
    model: str | None = None
    """The name of the target at --url; by default, the first model that the server lists."""
    keep_states: str | None = None
    """Folder or fsspec URL in which to keep the hidden states of prompts and answers, for
    `redraft train --signal.kept`. --url is then a server of `redraft serve-features`.
    """
    storage: str = DEFAULT_STORAGE
    """The `--storage` of that server."""
    concurrency: int = 64
    """Number of requests in flight at once."""
