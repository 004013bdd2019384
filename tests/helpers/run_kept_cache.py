"""Swap drafts in a real vLLM inside this process with a prefix cache.

The swap comes between two steps of running requests.

    python run_kept_cache.py '{"target": folder, "draft": folder, "method": "draft_model", "cached": [[1, ...], ...],
                               "running": [[1, ...], ...], "swap": folder or null}'

The prompts `cached` are answered twice. Then those of `running` are answered, with the swap after
eight steps, and `cached` once more. Prints one line of JSON: of every round the `answers`, the
draft tokens `accepted`, and the tokens `found` in the cache; and the `status` at the end.
The setting swap.cache of REDRAFT_SETTINGS chooses the fate of the cache, if it names a registry.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("VLLM_PLUGINS", "redraft")

from run_swaps import load

STEPS_BEFORE = 8


def answer(
    llm: Any, prompts: list[list[int]], name: str, in_between: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Answer the prompts together, and call `in_between` after some steps."""
    from vllm import SamplingParams

    def count() -> float:
        return sum(
            m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"
        )

    engine, before, num_steps = llm.llm_engine, count(), 0
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
        engine.add_request(f"{name}-{i}", {"prompt_token_ids": prompt}, params)
    last: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        num_steps += 1
        if num_steps == STEPS_BEFORE and in_between:
            in_between()
    found = [last[f"{name}-{i}"] for i in range(len(prompts))]
    return {
        "answers": [list(output.outputs[0].token_ids) for output in found],
        "accepted": count() - before,
        "found": sum(output.num_cached_tokens for output in found),
    }


def main(spec: dict[str, Any]) -> None:
    from vllm import LLM

    llm = LLM(
        model=spec["target"],
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=32 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=spec.get("max_tokens", 128),
        block_size=32,
        disable_log_stats=False,
        enable_prefix_caching=True,
        speculative_config={
            "model": spec["draft"],
            "method": spec["method"],
            "num_speculative_tokens": 3,
        },
    )

    def swap() -> None:
        if spec["swap"]:
            # no pause in this process, which would clear: clear here
            if llm.collective_rpc("redraft_status")[0]["swap_cache"] == "clear":
                llm.llm_engine.engine_core.engine_core.reset_prefix_cache(
                    reset_running_requests=True
                )
            (loaded,) = llm.collective_rpc(load, args=(spec["swap"],))
            assert loaded["ok"], loaded

    rounds = {
        "first": answer(llm, spec["cached"], "first"),
        "again": answer(llm, spec["cached"], "again"),
        "running": answer(llm, spec["running"], "running", swap),
        "after": answer(llm, spec["cached"], "after"),
    }
    print("REPORT", json.dumps(rounds | {"status": llm.collective_rpc("redraft_status")[0]}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
