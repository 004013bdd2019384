"""vLLM's OpenAI server with the plugin switched on.

`redraft serve TARGET --draft D -- any vLLM argument`.

    $ redraft serve meta-llama/Llama-3.1-8B-Instruct --registry drafts/llama8b --capture.spool spool \
    -- --port 8001

Everything after `--` goes to vLLM unchanged. The plugin reads its settings from the environment
variable REDRAFT_SETTINGS, a JSON object, which this command writes. A deployment that starts vLLM
itself sets VLLM_PLUGINS=redraft and that variable instead (docs/online.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from redraft.engine.live_file import LiveConfig
from redraft.eval.forecast.draft_source import SampleMethod, require_tokens
from redraft.heads.catalog import Method
from redraft.heads.family import NUM_TOKENS
from redraft.online.engine.config import CaptureConfig, SwapConfig


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    target: Annotated[str, tyro.conf.Positional]
    """Folder or hub name of the target."""
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Further arguments of vLLM's server, after `--`."""
    draft: str | None = None
    """Folder or hub name of the draft, `ngram`, `suffix`, or `mtp` for the target's MTP layer.
    `live` counts this server's answers, as `redraft data count` counts a file.
    `LOOKUP+HEAD:2` looks tokens up first, and takes at most 2 tokens per step from HEAD
    (EAGLE-1, EAGLE-3 or MTP) if none is found. LOOKUP is `ngram` (the last 2 to 4 tokens),
    `live` or a folder of counted answers. By default the current version of the registry.
    """
    registry: Path | None = None
    """Folder of the draft's versions (v000001, ..., current). Required for swapping."""
    num_speculative_tokens: int = NUM_TOKENS
    """Draft tokens per step."""
    pace: str = "off"
    """Draft tokens of a step, at most --num-speculative-tokens. `auto` measures as it serves, and
    drafts fewer or none where that is faster; where vLLM's adaptive verification is known to work
    (NVIDIA GPUs of capability 9, or --attention-backend TRITON_ATTN), vLLM chooses how many tokens
    of which request are verified, and `auto` whether a step drafts. `adaptive` is vLLM's choice
    alone. A number is for all steps; with `off` all steps have --num-speculative-tokens, as with
    vLLM alone. With any pace but `off`, sampled requests with a seed are not drafted for, so their
    answers stay the same. On a GPU, vLLM captures CUDA graphs for each number; with Mamba layers,
    only piecewise ones.
    """
    method: Method | None = None
    """vLLM's method for the draft. By default it follows from the draft's tensors."""
    draft_sample_method: SampleMethod = "greedy"
    """How draft tokens are chosen. With `greedy` the acceptance is p(argmax q); with
    `probabilistic` it is sum min(p, q), which is higher at temperatures above 0.
    """
    rejection_sample_method: Literal["standard", "block"] = "standard"
    """How vLLM verifies sampled draft tokens: one by one, or as a block, which accepts at least as
    many. The report of `redraft eval` says how many more. `block` needs the V2 model runner.
    """
    head_requests: int | None = None
    """With a lookup before the head: with more requests than this at once, only lookups draft."""
    verify_cost: float | None = None
    """For counted answers: cost of verifying one more token, in target steps of one request. A
    token is proposed if its probability is at least this times the requests in the step. By
    default as for `redraft data count`, else 0.05.
    """
    token_file: Path | None = None
    """File with the bearer token that protects /redraft/... Without it, the variable REDRAFT_TOKEN
    holds the token.
    """
    allow_remote: bool = False
    """Allow other machines to use /redraft/... as well."""
    targets: tuple[Path, ...] = ()
    """Folders from which a trainer may load target weights (`POST /redraft/target`). By default
    none.
    """
    live: LiveConfig = field(default_factory=LiveConfig)
    swap: SwapConfig = field(default_factory=SwapConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)

    def __post_init__(self) -> None:
        require_tokens(self.num_speculative_tokens)
