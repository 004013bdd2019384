"""Count the work of capture's hook in a server's step, before anything runs and without a GPU.

$ redraft plan capture --requests 32 256
$ redraft plan capture --target qwen3-8b --num-speculative-tokens 5

The real hook runs on a step of the real sizes, on tensors without memory: bytes that it leaves in
the queue, bytes that it moves on the GPU, and kernels that it launches. Nothing is timed.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from redraft.distill.train.run_config import require_least
from redraft.files.artifact import write_whole
from redraft.heads.family import NUM_TOKENS


@dataclass(frozen=True, kw_only=True)
class CapturePlanConfig:
    target: str = "llama-3.1-8b"
    """Sizes of the target, named as for `redraft plan`."""
    requests: tuple[int, ...] = (1, 32, 256)
    """Requests in a step, all of them captured."""
    num_speculative_tokens: int = NUM_TOKENS
    """Draft tokens that each request verifies. They are sampled: greedy ones need less."""
    json: Path | None = None
    """File that receives the numbers as JSON."""

    def __post_init__(self) -> None:
        if min(self.requests, default=0) < 1:
            raise ValueError(f"--requests {self.requests}: it must be at least 1")
        require_least(self, num_speculative_tokens=1)


def main(cfg: CapturePlanConfig) -> None:
    # Here, because they import torch.
    from redraft.distill.plan.sizes import find_sizes
    from redraft.recipes.plan.hook_work import count_work, format_work

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
