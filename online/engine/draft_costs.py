"""Describe a draft's indirect costs, in lines for the log at the server's start."""

from collections.abc import Iterator
from typing import Any

MEASURE = "`redraft bench` measures this draft against plain vLLM"


def describe_cache(vllm_config: Any, share: float) -> str:
    """Describe how many cached tokens the draft costs, and its `share` of the KV cache."""
    cache, speculative = vllm_config.cache_config, vllm_config.speculative_config
    taken = f"the draft takes {share:.1%} of the KV cache"
    if not cache.enable_prefix_caching:
        return f"the prefix cache is off; {taken}"
    # vLLM 0.33 includes the token after a block in the block's hash, and then drops no block.
    looks_ahead = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
    drops = speculative.use_eagle_block_drop() and not looks_ahead
    lost = f"its last block, {cache.block_size} tokens," if drops else "nothing"
    return (
        f"the prefix cache has blocks of {cache.block_size} tokens; a hit loses {lost} with "
        f"this draft; {taken}"
    )


def list_losses(vllm_config: Any, *, on_cpu: bool) -> Iterator[str]:
    """Yield the vLLM features that this draft disables on a GPU, with remedies.

    On a CPU there are none.
    """
    if on_cpu:
        return
    if not vllm_config.scheduler_config.async_scheduling:
        yield (
            "plain vLLM may be faster: steps are not scheduled ahead, because a lookup "
            f"reads each token before the next step: remove the lookup (--draft head); {MEASURE}"
        )
    mode = vllm_config.compilation_config.cudagraph_mode
    if not vllm_config.model_config.enforce_eager and not mode.has_full_cudagraphs():
        yield (
            f"plain vLLM may be faster: steps have no full CUDA graphs ({mode.name}): serve a draft "
            f"of another family, or none; {MEASURE}"
        )
