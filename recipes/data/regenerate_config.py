"""Have the target answer the prompts of a data set, as training data for a draft.

    $ redraft regenerate --target models/llama-8b --prompts HuggingFaceH4/ultrachat_200k \\
          --split train_sft --output outputs/answers.jsonl
    $ redraft train standalone --target models/llama-8b --data.source outputs/answers.jsonl

With --target, the engine is started here and stopped at the end. With --url, a running
server answers: any OpenAI-compatible one, e.g.
`python -m vllm.entrypoints.launchers.api_server.entry --model models/llama-8b`.

After an interruption, run the same command again to continue.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.distill.signal.storage import DEFAULT_STORAGE
from redraft.distill.signal.target_answers import Sampling
from redraft.files.setting_error import require_least


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig(Sampling):
    prompts: str
    """Conversations to answer: a hub name, a .jsonl or .parquet file, `stdlib`, or
    `stdlib-functions` (functions to complete). Their answers are ignored.
    """
    output: Path
    """JSONL file to write, one line per finished conversation. Existing lines are kept."""
    overwrite: bool = False
    """Regenerate all answers. Existing answers in --output are set aside until all new ones are
    complete.
    """
    split: str = "train"
    """Split of the data set."""
    num_conversations: int | None = None
    """Maximum number of conversations to use, from the start. Default: all."""
    target: str | None = None
    """Folder or hub name of the target. The command starts a vLLM server for it, in the dtype in
    which drafts are trained; `-- --dtype=bfloat16` overrides it.
    """
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Additional arguments for each vLLM server, after `--`: `-- --tensor-parallel-size=8`."""
    url: str | None = None
    """Address of a running server, instead of --target. Default without both:
    http://127.0.0.1:8000. If the variable OPENAI_API_KEY is set, it is sent as the API key of each
    request.
    """
    model: str | None = None
    """Name of the target at --url. Default: the first model that the server lists."""
    keep_states: str | None = None
    """Folder or fsspec URL in which hidden states of prompts and answers are stored for `redraft
    train --signal.kept`. --url must then be the address of a server started with `redraft
    serve-features`.
    """
    storage: str = DEFAULT_STORAGE
    """The `--storage` setting of the server that sends the hidden states."""
    concurrency: int = 64
    """Maximum number of concurrent requests."""

    def __post_init__(self) -> None:
        require_least(self, num_conversations=1, max_tokens=1, concurrency=1, temperature=0)
