"""Count the work that capture adds to a server's step, without a GPU and before anything runs.

$ redraft plan capture --requests 32 256
$ redraft plan capture --target qwen3-8b --num-speculative-tokens 5

The real hook runs on a step of the real sizes, with tensors that take no memory. The command counts
the bytes that the hook leaves in the queue, the bytes that it moves on the GPU, and the kernels
that it launches. It does not measure time.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from redraft.distill.train.run_config import require_least
from redraft.files.artifact import write_whole
from redraft.files.replaced import require_apart
from redraft.heads.family import NUM_TOKENS


@dataclass(frozen=True, kw_only=True)
class CapturePlanConfig:
    target: str = "llama-3.1-8b"
    """Target whose sizes are used, named as for `redraft plan`."""
    requests: tuple[int, ...] = (1, 32, 256)
    """Numbers of requests per step; all of them are captured."""
    num_speculative_tokens: int = NUM_TOKENS
    """Draft tokens to verify per request. They count as sampled, because greedy drafts need less
    work.
    """
    json: Path | None = None
    """File to write the numbers to, as JSON."""

    def __post_init__(self) -> None:
        if min(self.requests, default=0) < 1:
            raise ValueError(f"--requests {self.requests}: give numbers of at least 1")
        require_least(self, num_speculative_tokens=1)


def main(cfg: CapturePlanConfig) -> None:
    # Imported here, because they import torch.
    from redraft.distill.plan.sizes import find_sizes
    from redraft.recipes.plan.hook_work import count_work, format_work

    require_apart(cfg.json, cfg)
    target = find_sizes(cfg.target).get_text_config()
    rows = list(
        count_work(
            requests=cfg.requests,
            vocabularies=(target.vocab_size,),
            num_drafts=cfg.num_speculative_tokens,
            hidden_size=target.hidden_size,
        )
    )
    print(*format_work(rows), sep="\n")
    if cfg.json is not None:
        write_whole(cfg.json, json.dumps(rows, indent=2) + "\n")
