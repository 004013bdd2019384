"""Run drafts in a real vLLM in a separate process, and read back the drafter's data."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from redraft.engine.counts import AcceptanceCounts, add_by_context
from redraft.engine.engine_log import why_ended
from redraft.engine.machine import ENGINE_IS_CPU
from redraft.engine.process import process_group
from redraft.files.progress import Progress


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    target: str
    speculative_config: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    max_tokens: int = 12
    end_ids: Sequence[int] = ()
    """Token ids that end an answer. Without any, every answer has `max_tokens` tokens."""
    dtype: str = "float32"
    blocks_a_prompt: int = 4
    """Number of blocks per prompt that are recorded with their forward passes. For later blocks,
    only tokens are recorded.
    """
    recorded_prompts: int = 4
    kv_cache_bytes: int = 64 << 20
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments for `LLM`."""
    native_rotary: bool = False
    """Compute rotary embeddings in PyTorch instead of in vLLM's CPU kernel."""

    @property
    def num_speculative_tokens(self) -> int:
        return int(self.speculative_config["num_speculative_tokens"])


@dataclass(frozen=True, kw_only=True)
class Block:
    request: int
    """Index of the prompt."""
    num_output: int
    """Number of tokens emitted before the block."""
    drafted: list[int]
    passes: list[dict[str, Any]]
    """The drafter's forward passes: `args` and keyword arguments by name, `out` as a list. Empty if
    they were not recorded.
    """
    confidence: list[float] = field(default_factory=list)
    """The estimated acceptance of every drafted token. Empty if the drafter has no estimates or
    they were not recorded.
    """


@dataclass(frozen=True, kw_only=True)
class Dump:
    run: EngineRun
    outputs: list[list[int]]
    blocks: list[Block]

    def prefix(self, block: Block) -> list[int]:
        return [*self.run.prompts[block.request], *self.outputs[block.request][: block.num_output]]

    def recorded(self) -> list[Block]:
        """Return the blocks with passes that were drafted while their request was running."""
        # The step that ends a request may emit more tokens than the answer keeps.
        return [b for b in self.blocks if b.passes and b.num_output <= len(self.outputs[b.request])]

    def counts_by_prompt(self) -> list[AcceptanceCounts]:
        """Return the engine's counts for each prompt. A request's last block is never verified."""
        accepted: list[list[int]] = [[] for _ in self.run.prompts]
        for block, num_accepted in self._verified():
            accepted[block.request].append(num_accepted)
        return [
            AcceptanceCounts.from_blocks(each, self.run.num_speculative_tokens) for each in accepted
        ]

    def counts_by_context(self, first: int = 0) -> dict[int, AcceptanceCounts]:
        """Return the engine's counts from prompt `first` on, split like `split_by_context`."""
        return add_by_context(
            {
                1 << (len(self.prefix(block)).bit_length() - 1): AcceptanceCounts.from_blocks(
                    [num_accepted], self.run.num_speculative_tokens
                )
            }
            for block, num_accepted in self._verified()
            if block.request >= first
        )

    def _verified(self) -> Iterator[tuple[Block, int]]:
        """Yield every verified block with the number of its accepted tokens."""
        for block, after in zip(self.blocks, self.blocks[1:], strict=False):
            # With asynchronous scheduling, vLLM runs one more step after the end of a request, and
            # neither emits nor counts its tokens.
            has_ended = block.num_output >= len(self.outputs[block.request])
            if block.request == after.request and not has_ended:
                # Between two blocks, a request emits the first block's accepted tokens and one
                # token of the target.
                yield block, after.num_output - block.num_output - 1

    def counts(self) -> AcceptanceCounts:
        return sum(self.counts_by_prompt(), AcceptanceCounts.zero(self.run.num_speculative_tokens))


def run_engine(
    runs: Sequence[EngineRun], folder: Path, environment: Mapping[str, str] | None = None
) -> list[Dump]:
    """Run the engines one after another in a child process. Its files and log go to `folder`.

    `environment` is added to the child's environment variables.

    Raises:
        ChildProcessError: vLLM failed to run a draft.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outs = [folder / f"dump-{i}.pt" for i in range(len(runs))]
    spec, log = folder / "runs.json", folder / "vllm.log"
    spec.write_bytes(msgspec.json.encode(runs))
    # On a CPU, torch and vLLM share OpenMP in this process, and several threads would wait for each
    # other.
    threads = {"OMP_NUM_THREADS": "1"} if ENGINE_IS_CPU else {}
    env = {
        **(environment or {}),
        **threads,
        "VLLM_NO_USAGE_STATS": "1",
        # On a GPU, vLLM computes attention in float32 in Triton, which uses TF32 by default.
        "TRITON_F32_DEFAULT": "ieee",
    }
    with process_group(
        [sys.executable, "-m", "redraft.engine.parity.dump", str(spec)], log=log, env=env
    ) as process:
        _wait(process)
        if process.returncode:
            raise ChildProcessError(
                f"vLLM did not run the draft: {why_ended(process, log)} (whole log: {log})"
            )
    return [_read(run, out) for run, out in zip(runs, outs, strict=True)]


def _wait(process: subprocess.Popen[bytes]) -> None:
    with Progress(
        desc="running the draft in vLLM", bar_format="{desc}: {elapsed}", leave=False, disable=None
    ) as bar:
        while True:
            try:
                process.wait(0.5)
                return
            except subprocess.TimeoutExpired:
                bar.refresh()


def _read(run: EngineRun, path: Path) -> Dump:
    # The file has only tensors, lists and numbers, so the loader can refuse all other objects.
    saved = torch.load(path, weights_only=True)
    return Dump(
        run=run, outputs=saved["outputs"], blocks=[Block(**block) for block in saved["blocks"]]
    )


def relative_difference(mine_ND: Tensor, other_ND: Tensor) -> Tensor:
    """Return max_D |mine - other| / max_D |other|, [N], and infinity where it would be NaN."""
    apart_N = (mine_ND.float() - other_ND.float()).abs().amax(-1) / other_ND.float().abs().amax(
        -1
    ).clamp(min=1e-12)
    return apart_N.nan_to_num(nan=torch.inf)
