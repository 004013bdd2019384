"""Serve a target in place of `vllm serve`, and train a draft for it from the traffic.

    $ redraft up Qwen/Qwen3-8B -- --port 8000
    $ redraft up Qwen/Qwen3-8B --join redraft-Qwen3-8B -- --port 8001     # one more server for the same learner

Everything is in one folder: token, versions of the draft, records of the traffic, the learner's
settings and logs. Of the requests, one in ten is recorded as text, for the learner:
--capture.fraction. The same command continues there. Ctrl-C ends the server, then the learner. A
learner that dies is started again, while the server serves on. `redraft fleet` operates it with
`--config FOLDER/learner.toml`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from redraft.eval.forecast.draft_source import require_tokens
from redraft.online.engine.config import ServerSample
from redraft.recipes.serve.serve_config import ServeConfig


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    target: Annotated[str, tyro.conf.Positional]
    """Folder or hub name of the target."""
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Arguments of vLLM's server, after `--`."""
    draft: str | None = None
    """First draft: a folder or hub name, or `ngram`, `suffix` or `live`, which train nothing. By
    default a new EAGLE-3 head, which drafts once it is faster, or `live` if the target has too
    few layers for a head. On a CPU, `live` also drafts before an EAGLE or MTP head. On a GPU it
    does not: vLLM would lose asynchronous scheduling. `head`: the default's head without `live`,
    on a CPU too.
    """
    folder: Path | None = None
    """Folder for everything. By default `redraft-` and the name of the target."""
    join: Path | None = None
    """Folder of a running `redraft up` on this machine, to which this server is added. Choose its
    GPUs by CUDA_VISIBLE_DEVICES.
    """
    num_speculative_tokens: int = ServeConfig.num_speculative_tokens
    """Maximum number of draft tokens per step."""
    pace: str = "auto"
    """Draft tokens of a step, as `redraft serve --pace`: `auto`, `adaptive`, `off` or a number."""
    capture: ServerSample = field(default_factory=lambda: ServerSample(fraction=0.1))
    """The recorded part of the traffic. With a fraction of 0 nothing is recorded and nothing trained:
    the server drafts with the newest version in the folder, with --draft or with `live`.
    """

    def __post_init__(self) -> None:
        require_tokens(self.num_speculative_tokens)
