"""Start vLLM's OpenAI server with the redraft plugin.

    $ redraft serve meta-llama/Llama-3.1-8B-Instruct --registry drafts/llama8b --capture.spool spool -- --port 8001

Everything after `--` is passed to vLLM unchanged. The plugin reads its settings from the
environment variable REDRAFT_SETTINGS, a JSON object that this command writes. A deployment that
starts vLLM itself sets VLLM_PLUGINS=redraft and that variable instead (docs/online.md).
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
    """Arguments for vLLM's server, after `--`."""
    draft: str | None = None
    """Folder or hub name of the draft, or `ngram`, `suffix`, or `mtp` for the target's MTP layer.
    `live` drafts from this server's own answers, as `redraft data count` does from a file.
    `LOOKUP+HEAD:2` tries a lookup first; if it finds nothing, HEAD (EAGLE-1, EAGLE-3 or MTP) drafts
    at most 2 tokens per step. LOOKUP is `ngram` (the last 2 to 4 tokens), `live` or a folder of
    counted answers. Default: the current version in the registry.
    """
    registry: Path | None = None
    """Folder with the versions of the draft (v000001, ..., current). Required for swaps."""
    num_speculative_tokens: int = NUM_TOKENS
    """Maximum number of draft tokens per step."""
    pace: str = "off"
    """How many tokens to draft per step, at most --num-speculative-tokens. `auto` measures during
    serving, and drafts fewer tokens or none if that is faster. If vLLM's adaptive verification is
    known to work (on NVIDIA GPUs of compute capability 9, or with --attention-backend TRITON_ATTN),
    vLLM chooses how many tokens of each request are verified, and `auto` only chooses whether a
    step drafts. `adaptive` leaves the choice to vLLM alone. A number applies to all steps. With
    `off`, all steps draft --num-speculative-tokens tokens, as in plain vLLM. With any value except
    `off`, sampled requests with a seed get no drafts, so that their answers stay reproducible. On a
    GPU, vLLM captures CUDA graphs for each number of tokens; for targets with Mamba layers, it
    captures piecewise graphs only.
    """
    method: Method | None = None
    """vLLM's method for the draft. Default: detected from the draft's tensors."""
    draft_sample_method: SampleMethod = "greedy"
    """How draft tokens are chosen. The acceptance rate is p(argmax q) with `greedy`, and sum min(p,
    q), which is higher at temperatures above 0, with `probabilistic`.
    """
    rejection_sample_method: Literal["standard", "block"] = "standard"
    """How vLLM verifies sampled draft tokens: one by one, or as a block, which accepts at least as
    many tokens. The report of `redraft eval` shows the difference. `block` needs the V2 model
    runner.
    """
    head_requests: int | None = None
    """For a head after a lookup: maximum number of concurrent requests for which the head drafts.
    With more requests, only the lookup drafts. Default: no limit.
    """
    verify_cost: float | None = None
    """For counted answers: cost of verifying one more token, as a fraction of a target step for one
    request. Tokens are proposed while they raise the expected speed at this cost. Default: the
    value given to `redraft data count`, otherwise 0.05.
    """
    token_file: Path | None = None
    """File with the bearer token that protects /redraft/... By default, the token is read from the
    environment variable REDRAFT_TOKEN.
    """
    allow_remote: bool = False
    """Allow requests from other machines to /redraft/..."""
    targets: tuple[Path, ...] = ()
    """Folders from which a trainer may load target weights (`POST /redraft/target`)."""
    live: LiveConfig = field(default_factory=LiveConfig)
    swap: SwapConfig = field(default_factory=SwapConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)

    def __post_init__(self) -> None:
        require_tokens(self.num_speculative_tokens)
