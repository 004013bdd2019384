"""The flags that `redraft eval` and `redraft bench` share."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from redraft.engine.target_dtype import TargetDtype
from redraft.eval.forecast.draft_source import SampleMethod


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    target_dtype: TargetDtype | None = None
    """Dtype for the target's computation. Default: on a GPU, the stored dtype; on a CPU, bfloat16
    if the weights are stored in bfloat16 and the CPU has bfloat16 instructions, otherwise float32.
    """
    draft: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Draft to measure: a folder (a head, a standalone draft, a version in a registry), a hub name,
    `ngram` (prompt lookup), `suffix`, or `mtp` for the target's MTP layer. `ngram+HEAD` tries
    n-grams before the head. `ANSWERS+HEAD:2` tries counted answers first, and the head drafts at
    most 2 tokens. NAME=FOLDER names the draft. Repeat the flag for more drafts.
    """
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probabilities add up to this value; 1 keeps all
    tokens. Default: the value in the target's generation_config.json.
    """
    top_k: int | None = None
    """Sample from this many of the most probable tokens; 0 keeps all. Default: the value in the
    target's generation_config.json.
    """
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the highest probability; 0 keeps all.
    Default: the value in the target's generation_config.json. With a draft, vLLM refuses any value
    above 0.
    """
    draft_sample_method: SampleMethod = "greedy"
    """How the server chooses draft tokens at temperatures above 0: the most probable token
    (greedy), or a sampled one. The report of `redraft eval` shows which is accepted more often.
    """
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Arguments for every vLLM server, after `--`: `-- --tensor-parallel-size=8`."""
    overwrite: bool = False
    """Measure everything again."""
