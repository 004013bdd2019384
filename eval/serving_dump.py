"""Generate with a real vLLM in this process, and save what its drafter was fed, computed and proposed.

    python -m eval.serving_dump runs.json

The file holds a list of `eval.serving_run.EngineRun` as JSON objects; each is saved to its `out` with torch: `outputs`
(token ids by prompt) and `blocks`, one for each block drafted: `request`, `num_output` (tokens emitted before it),
`drafted`, and for the first ones of a prompt `passes` (the drafter's forward passes: what went in by name, what came
out as a list). One request runs after the other, so that the rows and the request of every pass are known.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# in this process, where the drafter can be reached; the other runner has none of these names
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch


class Recorder:
    """Between an engine's model runner and its drafter: passes calls on and keeps copies of what crossed."""

    def __init__(self, runner: Any, prompts: int, blocks_a_prompt: int) -> None:
        self._runner, self._prompts, self._blocks_a_prompt = runner, prompts, blocks_a_prompt
        self._model = runner.drafter.model
        self._forward, self._propose = self._model.forward, runner.propose_draft_token_ids
        self._passes: list[dict[str, Any]] | None = None
        self._num_output: dict[str, int] = {}
        self._order: list[str] = []
        self.blocks: list[dict[str, Any]] = []
        self._model.forward, runner.propose_draft_token_ids = self.forward, self.propose

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._passes is None:
            return self._forward(*args, **kwargs)
        given = {"args": copied(args), **{name: copied(value) for name, value in kwargs.items()}}
        out = self._forward(*args, **kwargs)
        self._passes.append({**given, "out": copied(out if isinstance(out, list | tuple) else [out])})
        return out

    def propose(self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        request = self._runner.input_batch.req_ids[0]
        if request not in self._num_output:
            self._order.append(request)
        index = self._order.index(request)
        emitted = sum(int(token) >= 0 for token in sampled_token_ids[0])
        self._num_output[request] = self._num_output.get(request, 0) + emitted
        before = sum(block["request"] == index for block in self.blocks)
        self._passes = [] if index < self._prompts and before < self._blocks_a_prompt else None
        drafted = self._propose(scheduler_output, sampled_token_ids, *args, **kwargs)
        self.blocks.append(
            {
                "request": index,
                "num_output": self._num_output[request],
                "drafted": [int(token) for token in drafted[0]],
                "passes": self._passes or [],
            }
        )
        return drafted


def copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [copied(v) for v in value]
    return value.detach().cpu().clone() if torch.is_tensor(value) else None


def dump(run: dict[str, Any]) -> dict[str, Any]:
    """The outputs and drafted blocks of one engine."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    longest = max(map(len, run["prompts"]))
    max_model_len = longest + run["max_tokens"] + run["speculative_config"]["num_speculative_tokens"]
    llm = LLM(
        model=run["target"],
        speculative_config=run["speculative_config"],
        dtype=run["dtype"],
        max_model_len=max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=max(2048, max_model_len),  # no prompt in pieces
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=run["kv_cache_bytes"],
        **run["engine"],
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    recorder = Recorder(runner, run["recorded_prompts"], run["blocks_a_prompt"])
    sampling = SamplingParams(temperature=0, max_tokens=run["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in run["prompts"]], sampling, use_tqdm=False)
    return {"outputs": [list(o.outputs[0].token_ids) for o in outputs], "blocks": recorder.blocks}


def rotate_in_pytorch() -> None:
    """vLLM's own PyTorch rotation in place of its CPU kernel."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def main(runs: list[dict[str, Any]]) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    for run in runs:
        if run["native_rotary"]:
            rotate_in_pytorch()
        torch.save(dump(run), run["out"])
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
