"""Swap drafts in a real vLLM inside this process, which allows failures to be injected, and print every result.

    python run_swaps.py '{"target": folder, "draft": folder, "method": "eagle3", "swaps": [["load", folder], ...]}'

Swaps: `load FOLDER`, `fail FOLDER` (the disk goes away after three tensors), `restore`. Prints one line of JSON: for
the start and for each swap `result` (the worker's answer), `status`, `output` (token ids) and `accepted`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("VLLM_PLUGINS", "redraft")


def stage(worker: Any, folder: str | None) -> dict[str, Any]:
    """Read a draft into memory; here nothing is served meanwhile, so this may wait."""
    worker.redraft_stage(folder)
    while not (staged := worker.redraft_staged())["done"]:
        time.sleep(0.01)
    return {"ok": not staged["error"], "touched": False, "error": staged["error"]}


def load(worker: Any, folder: str) -> dict[str, Any]:
    staged = stage(worker, folder)
    if not staged["ok"]:
        return staged
    loaded = worker.redraft_load(folder)
    worker.redraft_commit(folder, "swapped")
    return loaded


def restore(worker: Any) -> dict[str, Any]:
    stage(worker, None)
    return worker.redraft_restore()


def fail(worker: Any, folder: str) -> dict[str, Any]:
    draft = type(worker.model_runner.get_draft_model())
    whole = draft.load_weights

    def load_some(self: Any, weights: Any) -> Any:
        def some() -> Any:
            for index, item in enumerate(weights):
                if index == 3:
                    raise OSError("the disk went away")
                yield item

        return whole(self, some())

    draft.load_weights = load_some
    stage(worker, folder)
    try:
        return worker.redraft_load(folder)
    finally:
        draft.load_weights = whole


def main(spec: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=spec["target"],
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=32 << 20,
        max_num_seqs=2,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={"model": spec["draft"], "method": spec["method"], "num_speculative_tokens": 3},
    )
    total = 0

    def report(result: Any) -> dict[str, Any]:
        nonlocal total
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        (response,) = llm.generate({"prompt_token_ids": list(range(10, 40))}, sampling, use_tqdm=False)
        counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        before, total = total, counters["vllm:spec_decode_num_accepted_tokens"]
        return {
            "result": result,
            "status": llm.collective_rpc("redraft_status")[0],
            "output": list(response.outputs[0].token_ids),
            "accepted": total - before,
        }

    reports = [report(None)]
    for name, *arguments in spec["swaps"]:
        method = {"load": load, "fail": fail, "restore": restore}[name]
        reports.append(report(llm.collective_rpc(method, args=tuple(arguments))[0]))
    print("REPORT", json.dumps(reports))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
