"""Swap drafts in a real vLLM inside this process, and print every result.

In this process failures can be injected.

    python run_swaps.py '[{"target": folder, "draft": folder, "method": "eagle3", "swaps": [["load", folder], ...]}]'

Runs one engine after the other. `speculative` adds to vLLM's --speculative-config. Swaps:
    load FOLDER         swap
    fail FOLDER         the disk goes away after three tensors
    restore             load the last good draft
    forget FOLDER       the worker's memory holds that draft, and it does not know
    damage FOLDER       a bit on the disk is another one
    sleep LEVEL FOLDER  sleep, and wake up part by part; a CPU worker keeps its memory, so level 2 forgets here
    push FOLDER         vLLM's own update of the draft, tensor by tensor as over NCCL
    reload FOLDER       vLLM's own reload of the target

Prints one line of JSON: for each engine a list of reports, of the start and of each swap, with
`result` (what the worker said), `status`, `output` (token ids), `drafted` (the token ids of every
block) and `accepted`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("VLLM_PLUGINS", "redraft")

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from redraft.engine.parity.dump import keep_imports_frozen
from redraft.online.engine.swap import load_draft


def stage(worker: Any, folder: str | None) -> dict[str, Any]:
    """Read a draft into memory; here nothing is served meanwhile, so this may wait."""
    worker.redraft_stage(folder, "test")
    while not (staged := worker.redraft_staged())["done"]:
        time.sleep(0.01)
    return {"ok": not staged["error"], "touched": False, "error": staged["error"]}


def load(worker: Any, folder: str) -> dict[str, Any]:
    staged = stage(worker, folder)
    if not staged["ok"]:
        return staged
    loaded = worker.redraft_load(folder)
    worker.redraft_commit("swapped")
    return loaded


def restore(worker: Any) -> dict[str, Any]:
    stage(worker, None)
    return worker.redraft_restore()


def fail(worker: Any, folder: str) -> dict[str, Any]:
    draft = worker.model_runner.get_draft_model()
    whole = draft.load_weights

    def load_some(weights: Any) -> Any:
        def some() -> Any:
            for index, item in enumerate(weights):
                if index == 3:
                    raise OSError("the disk went away")
                yield item

        return whole(some())

    draft.load_weights = load_some
    stage(worker, folder)
    try:
        return worker.redraft_load(folder)
    finally:
        draft.load_weights = whole


def forget(worker: Any, folder: str) -> None:
    load_draft(worker, load_file(Path(folder) / "model.safetensors"))


def damage(worker: Any, folder: str) -> None:
    file = Path(folder) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def push(worker: Any, folder: str) -> None:
    worker.start_draft_weight_update()
    worker.update_weights({"path": f"{folder}/model.safetensors"})
    worker.finish_weight_update()


def reload(worker: Any, folder: str) -> None:
    worker.reload_weights(weights_path=folder)


def forget_in_sleep(worker: Any, folder: str) -> None:
    fall_asleep = worker.sleep

    def fall_asleep_and_forget(level: int = 1) -> None:
        fall_asleep(level)
        if level == 2:
            forget(worker, folder)

    worker.sleep = fall_asleep_and_forget


def sleep(llm: Any, level: int, folder: str) -> dict[str, Any]:
    llm.collective_rpc(forget_in_sleep, args=(folder,))
    llm.collective_rpc(stage, args=(folder,))
    llm.sleep(level)
    (load,) = llm.collective_rpc("redraft_load", args=(folder,))
    (staged,) = llm.collective_rpc("redraft_stage", args=(folder, "test"))
    (asleep,) = llm.collective_rpc("redraft_status")
    llm.wake_up(["weights"])
    (half_awake,) = llm.collective_rpc("redraft_status")
    llm.wake_up(["kv_cache"])
    return {"staged": staged, "load": load, "asleep": asleep, "half_awake": half_awake}


def watch_drafts(worker: Any, drafted: list[list[int]]) -> None:
    """Append every block that is drafted from now on."""
    runner = worker.model_runner
    owner, name = (
        (runner.speculator, "propose")
        if hasattr(runner, "speculator")
        else (runner, "propose_draft_token_ids")
    )
    propose = getattr(owner, name)

    def propose_and_note(*args: Any, **options: Any) -> Any:
        blocks = propose(*args, **options)
        drafted.extend([int(token) for token in block] for block in blocks)
        return blocks

    setattr(owner, name, propose_and_note)


METHODS = {
    "load": load,
    "fail": fail,
    "restore": restore,
    "forget": forget,
    "damage": damage,
    "push": push,
    "reload": reload,
}


def run(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The reports of one engine."""
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
        weight_transfer_config={"backend": "as_nccl"},
        speculative_config={
            "model": spec["draft"],
            "method": spec["method"],
            "num_speculative_tokens": 3,
        }
        | spec.get("speculative", {}),
    )
    total, drafted = 0, []
    llm.collective_rpc(watch_drafts, args=(drafted,))

    def report(result: Any) -> dict[str, Any]:
        nonlocal total
        drafted.clear()
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        (response,) = llm.generate(
            {"prompt_token_ids": list(range(10, 40))}, sampling, use_tqdm=False
        )
        counters = {
            metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
        }
        before, total = total, counters["vllm:spec_decode_num_accepted_tokens"]
        return {
            "result": result,
            "status": llm.collective_rpc("redraft_status")[0],
            "output": list(response.outputs[0].token_ids),
            "drafted": list(drafted),
            "accepted": total - before,
        }

    reports = [report(None)]
    for name, *arguments in spec["swaps"]:
        if name == "sleep":
            result = sleep(llm, *arguments)
        else:
            (result,) = llm.collective_rpc(METHODS[name], args=tuple(arguments))
        reports.append(report(result))
    return reports


def main(specs: list[dict[str, Any]]) -> None:
    import vllm.entrypoints.llm  # noqa: F401
    from vllm.distributed import cleanup_dist_env_and_memory

    keep_imports_frozen()
    WeightTransferEngineFactory.register_engine("as_nccl", "weight_transfers", "AsNccl")
    reports = []
    for spec in specs:
        reports.append(run(spec))
        cleanup_dist_env_and_memory()
    print("REPORT", json.dumps(reports))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
