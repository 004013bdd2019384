"""What a draft costs vLLM's prefix cache, in a line of the log at a server's start."""

from typing import Any


def describe_cache(vllm_config: Any, share: float) -> str:
    """Blocks that a hit loses beside the draft, and the `share` of the cache that its keys take."""
    cache, speculative = vllm_config.cache_config, vllm_config.speculative_config
    taken = f"the draft's keys take {share:.1%} of the cache"
    if not cache.enable_prefix_caching:
        return f"the prefix cache is off; {taken}"
    # vLLM 0.33 hashes the token after a block with it, and then drops none.
    looks_ahead = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
    drops = speculative.use_eagle_block_drop() and not looks_ahead
    lost = f"its last block, {cache.block_size} tokens," if drops else "nothing"
    return (
        f"the prefix cache has blocks of {cache.block_size} tokens; a hit loses {lost} beside "
        f"this draft; {taken}"
    )
