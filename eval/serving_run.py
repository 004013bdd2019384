"""Run drafts in a real vLLM of a process of its own, and read back what its drafter was fed and put out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eval.acceptance import AcceptanceCounts
from eval.engine import engine_is_cpu, last_error
from eval.process import process_group


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """One engine and what it is asked."""

    target: str
    speculative_config: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    max_tokens: int = 12
    dtype: str = "float32"
    blocks_a_prompt: int = 4
    """Of each prompt's blocks, so many are recorded whole; of the others, the drafted tokens."""
    recorded_prompts: int = 4
    """Of so many prompts, the first ones."""
    kv_cache_bytes: int = 64 << 20
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `LLM`."""
    native_rotary: bool = False
    """vLLM's own PyTorch rotation in place of its CPU kernel."""

    @property
    def num_speculative_tokens(self) -> int:
        return int(self.speculative_config["num_speculative_tokens"])


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of draft tokens."""

    request: int
    """Which prompt."""
    num_output: int
    """Tokens emitted before it."""
    drafted: list[int]
    passes: list[dict[str, Any]]
    """The drafter's forward passes: `args` and keyword arguments by name, `out` a list; empty where not recorded."""


@dataclass(frozen=True, kw_only=True)
class Dump:
    """What one engine did."""

    run: EngineRun
    outputs: list[list[int]]
    blocks: list[Block]

    def prefix(self, block: Block) -> list[int]:
        """The tokens that the block was drafted after."""
        return [*self.run.prompts[block.request], *self.outputs[block.request][: block.num_output]]

    def recorded(self) -> list[Block]:
        """Blocks with passes, drafted while their request still ran."""
        return [b for b in self.blocks if b.passes and b.num_output <= len(self.outputs[b.request])]

    def counts(self) -> AcceptanceCounts:
        """The engine's acceptance, without the last block of each request: its end may have cut it."""
        pairs = zip(self.blocks, self.blocks[1:], strict=False)
        accepted = [after.num_output - b.num_output - 1 for b, after in pairs if b.request == after.request]
        return AcceptanceCounts.of_blocks(accepted, self.run.num_speculative_tokens)


def run_engine(runs: Sequence[EngineRun], folder: Path) -> list[Dump]:
    """What each run did, one after the other in one process; its files and log go to `folder`.

    Raises: ChildProcessError with the engine's own message.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outs = [folder / f"dump-{i}.pt" for i in range(len(runs))]
    jobs = [{**asdict(run), "out": str(out)} for run, out in zip(runs, outs, strict=True)]
    spec, log = folder / "runs.json", folder / "vllm.log"
    spec.write_text(json.dumps(jobs))
    # torch and vLLM in one process share OpenMP on a CPU: more threads than one wait for each other
    env = {"OMP_NUM_THREADS": "1"} if engine_is_cpu() else {}
    env |= {"VLLM_NO_USAGE_STATS": "1"}
    with process_group([sys.executable, "-m", "eval.serving_dump", str(spec)], log=log, env=env) as process:
        _wait(process)
        if process.returncode:
            raise ChildProcessError(f"vLLM did not run the draft: {last_error(log)} (whole log: {log})")
    return [_read(run, out) for run, out in zip(runs, outs, strict=True)]


def _wait(process: subprocess.Popen[bytes]) -> None:
    with tqdm(desc="vLLM runs the draft", bar_format="{desc}: {elapsed}", leave=False, disable=None) as bar:
        while True:
            try:
                process.wait(0.5)
                return
            except subprocess.TimeoutExpired:
                bar.refresh()


def _read(run: EngineRun, path: Path) -> Dump:
    saved = torch.load(path, weights_only=True)
    return Dump(run=run, outputs=saved["outputs"], blocks=[Block(**block) for block in saved["blocks"]])


def relative_difference(mine_ND: Tensor, its_ND: Tensor) -> Tensor:
    """max_D |mine - its| / max_D |its|, [N]; infinite where it is not a number."""
    apart_N = (mine_ND.float() - its_ND.float()).abs().amax(-1) / its_ND.float().abs().amax(-1).clamp(min=1e-12)
    return apart_N.nan_to_num(nan=torch.inf)
