"""The flags that `redraft eval` and `redraft bench` share."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from redraft.engine.target_dtype import TargetDtype
from redraft.eval.forecast.draft_source import SampleMethod


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    target_dtype: TargetDtype | None = None
    """Type in which the target computes. By default as stored on a GPU. On a CPU bfloat16 if it is
    stored so and the CPU has instructions for bfloat16, else float32.
    """
    draft: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Draft to measure: a folder (a head, a standalone draft, a version of a registry), a hub name,
    `ngram` (prompt lookup), `suffix`, or `mtp` for the target's MTP layer. `ngram+HEAD` looks
    n-grams up first, `ANSWERS+HEAD:2` counted answers, and takes at most 2 tokens of the head.
    NAME=FOLDER gives it a name. Repeat the flag for more drafts.
    """
    top_p: float | None = None
    """Sample from the fewest tokens whose probabilities add up to this. By default as the target's
    generation_config.json says; 1 keeps all tokens."""
    top_k: int | None = None
    """Sample from this many tokens. By default as the target's generation_config.json says; 0 keeps
    all.
    """
    min_p: float | None = None
    """Sample from tokens with at least this share of the highest probability. By default as the
    target's generation_config.json says; 0 keeps all. With a draft, vLLM refuses any other
    value.
    """
    draft_sample_method: SampleMethod = "greedy"
    """How the server drafts at temperatures above 0: the most probable token, or a sampled one. The
    report of `redraft eval` says which is accepted more often.
    """
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Further arguments of every vLLM server, after `--`: `-- --tensor-parallel-size=8`."""
    overwrite: bool = False
    """Measure everything again."""
