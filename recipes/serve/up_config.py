"""Serve a target in place of `vllm serve`, and train a draft for it from the traffic.

    $ redraft up Qwen/Qwen3-8B -- --port 8000
    $ redraft up Qwen/Qwen3-8B --join redraft-Qwen3-8B -- --port 8001     # one more server for the same learner

All files are in one folder: the token, versions of the draft, records of the traffic, and the
learner's settings and logs. One request in ten is recorded as text for the learner
(--capture.fraction). Run the same command again to continue. Ctrl-C stops the server, then the
learner. If the learner crashes, it is restarted while the server keeps serving. To operate the
learner, use `redraft fleet` with `--config FOLDER/learner.toml`.
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
    """Arguments for vLLM's server, after `--`."""
    draft: str | None = None
    """First draft: a folder or hub name, or `ngram`, `suffix` or `live`, which need no training.
    Default: a new EAGLE-3 head, which drafts once that is faster than not drafting, or `live` if
    the target has too few layers for a head. On a CPU, `live` also drafts before an EAGLE or MTP
    head. On a GPU it does not, because vLLM would disable asynchronous scheduling. `head` means a
    new EAGLE-3 head without `live`.
    """
    folder: Path | None = None
    """Folder for all files. Default: `redraft-` and the target's name."""
    join: Path | None = None
    """Folder of a running `redraft up` on this machine, to which this server is added. Choose its
    GPUs with CUDA_VISIBLE_DEVICES.
    """
    num_speculative_tokens: int = ServeConfig.num_speculative_tokens
    """Maximum number of draft tokens per step."""
    pace: str = "auto"
    """How many tokens to draft per step, as for `redraft serve --pace`: `auto`, `adaptive`, `off`
    or a number.
    """
    capture: ServerSample = field(default_factory=lambda: ServerSample(fraction=0.1))
    """Which requests to record. With a fraction of 0, nothing is recorded or trained; the server
    drafts with the newest version in the folder, with --draft or with `live`.
    """

    def __post_init__(self) -> None:
        require_tokens(self.num_speculative_tokens)
