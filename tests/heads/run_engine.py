"""Generate with a real vLLM in this process and save what its drafter was given, computed and proposed.

    python run_engine.py '{"target": folder, "speculative_config": {...}, "prompts": [[ids]], "out": file}'

Saved: `outputs` (ids by prompt) and `blocks`, one for each block drafted: `request`, `num_output` (tokens emitted
before it), `drafted`, `passes` (the drafter's forward passes: what went in by name, what came out as a list). Optional:
`engine` (arguments of `LLM`), `native_rotary` (vLLM's own PyTorch rotation in place of its CPU kernel).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def copied(value: Any) -> Any:
    import torch

    if isinstance(value, list | tuple):
        return [copied(v) for v in value]
    return value.detach().clone() if torch.is_tensor(value) else value


def main(spec: dict[str, Any]) -> None:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    if spec.get("native_rotary"):
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native

    llm = LLM(
        model=spec["target"],
        speculative_config=spec["speculative_config"],
        dtype="float32",
        max_model_len=128,
        max_num_seqs=1,  # one request after the other: row and request of every pass are known
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
        **spec.get("engine", {}),
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    passes: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    num_output: dict[str, int] = {}
    order: list[str] = []
    model = runner.drafter.model
    forward, propose = model.forward, runner.propose_draft_token_ids

    def recording_forward(*args: Any, **kwargs: Any) -> Any:
        given = {"args": copied(args), **{name: copied(value) for name, value in kwargs.items()}}
        out = forward(*args, **kwargs)
        passes.append({**given, "out": copied(out if isinstance(out, list | tuple) else [out])})
        return out

    def recording_propose(scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        request = runner.input_batch.req_ids[0]
        if request not in num_output:
            order.append(request)
        emitted = [int(t) for t in sampled_token_ids[0] if int(t) >= 0]
        num_output[request] = num_output.get(request, 0) + len(emitted)
        passes.clear()
        drafted = propose(scheduler_output, sampled_token_ids, *args, **kwargs)
        block = {"request": order.index(request), "num_output": num_output[request], "passes": list(passes)}
        blocks.append({**block, "drafted": [int(t) for t in drafted[0]]})
        return drafted

    model.forward, runner.propose_draft_token_ids = recording_forward, recording_propose
    sampling = SamplingParams(temperature=0, max_tokens=spec["max_tokens"], ignore_eos=True, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in spec["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    torch.save({"outputs": [list(o.outputs[0].token_ids) for o in outputs], "blocks": blocks}, spec["out"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
