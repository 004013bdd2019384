"""Calculate the work that capture adds to a server's step, without a GPU or a server.

$ redraft plan capture --requests 32 256
$ redraft plan capture --target qwen3-8b --num-speculative-tokens 5

The real hook runs on a step of the real sizes, with tensors that take no memory. The command counts
the bytes that the hook leaves in the queue, the bytes that it moves on the GPU, and the kernels
that it launches. It does not measure time.
"""

from dataclasses import dataclass
from pathlib import Path

from redraft.files.setting_error import require_least
from redraft.heads.family import NUM_TOKENS
from redraft.recipes.plan.plan import print_report


@dataclass(frozen=True, kw_only=True)
class CapturePlanConfig:
    target: str = "llama-3.1-8b"
    """Target whose sizes are used, named as for `redraft plan`."""
    requests: tuple[int, ...] = (1, 32, 256)
    """Numbers of requests per step; all of them are captured."""
    num_speculative_tokens: int = NUM_TOKENS
    """Draft tokens to verify per request. They are assumed to be sampled, because greedy drafts
    need less work.
    """
    json: Path | None = None
    """File to write the numbers to, as JSON."""

    def __post_init__(self) -> None:
        if min(self.requests, default=0) < 1:
            raise ValueError(f"--requests {self.requests}: give numbers of at least 1")
        require_least(self, num_speculative_tokens=1)


def main(cfg: CapturePlanConfig) -> None:
    from redraft.recipes.plan.hook_work import report  # here, because it imports torch

    print_report(cfg, report)
