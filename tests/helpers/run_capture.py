"""Answer prompts in a real vLLM inside this process, and capture them.

The states that a head reads are captured too.

    python run_capture.py '{"target": folder, "draft": folder, "method": "eagle3", "spool": folder, "engine": {...},
                            "rounds": [{"prompts": [[1, 2, ...], ...], "sampling": [{...}, ...], "aborted": []}, ...]}'

The prompts of a round are answered together; a later round may find earlier prompts in the cache.
`engine` and `sampling` are options of vLLM, the latter one for each prompt, perhaps with the folder of
an `adapter`. Requests whose index is
in `aborted` are given up after eight tokens. Prints one line of JSON: `answers`, the token ids of
every answer by round, prompt and n, `status`, the worker's, `counted_drafts`, the scheduler's,
`batches_at_once`, above 1 if steps are scheduled ahead, and `preemptions`. With a pace in REDRAFT_SETTINGS, a
round with a `pace` takes it from its first step on, `seen` has by round the calls of the draft and
the numbers of draft tokens scheduled, and `pace` is the engine's word at the end.
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

from redraft.engine.settings import read_settings, write_settings
from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin

ABORT_AFTER = 8


def make_params(options: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if grammar := options.get("structured_outputs"):
        options = options | {"structured_outputs": StructuredOutputsParams(**grammar)}
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": 16, "ignore_eos": True, "detokenize": False} | options
    )
    params.extra_args = {EXTRA_ARGS_KEY: Origin()._asdict()}
    return params


def answer(llm: Any, asked: dict[str, Any], name: str) -> list[list[list[int]]]:
    """Run the engine until all requests of a round have ended, and return the answers."""
    from vllm.lora.request import LoRARequest

    engine, prompts = llm.llm_engine, asked["prompts"]
    for i, (prompt, chosen) in enumerate(
        zip(prompts, asked.get("sampling") or [{}] * len(prompts), strict=True)
    ):
        adapter = chosen.get("adapter")
        params = make_params({key: chosen[key] for key in chosen if key != "adapter"})
        engine.add_request(
            f"{name}-{i}",
            {"prompt_token_ids": prompt},
            params,
            lora_request=LoRARequest(Path(adapter).name, 1, adapter) if adapter else None,
        )
    answers: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for found in engine.step():
            answers[found.request_id] = [list(output.token_ids) for output in found.outputs]
            index = int(found.request_id.rpartition("-")[2])
            if (
                index in asked.get("aborted", [])
                and len(answers[found.request_id][0]) >= ABORT_AFTER
            ):
                engine.abort_request([found.request_id])
    engine.step()  # the worker learns of the last ends only now
    return [answers[f"{name}-{i}"] for i in range(len(prompts))]


def count_preemptions(llm: Any) -> list[str]:
    """Ids of the requests that are preempted from now on."""
    scheduler, preempted = llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return preempted


def count_calls(core: Any) -> tuple[list[int], list[int]]:
    """An entry per call of the draft, and the draft tokens scheduled in each step, from now on."""
    runner = core.model_executor.driver_worker.worker.model_runner
    calls: list[int] = []
    numbers: list[int] = []
    schedule = core.scheduler.schedule
    if hasattr(runner, "drafter"):
        propose = runner.drafter.propose

        def proposed(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return propose(*args, **kwargs)

        runner.drafter.propose = proposed
    else:  # V2's proposal is wrapped already: count each forward pass
        runner.speculator.model.register_forward_pre_hook(lambda *_: calls.append(1))

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            numbers.append(output.num_spec_tokens_to_schedule)
        return output

    core.scheduler.schedule = scheduled
    return calls, numbers


def wait_until_shipped(llm: Any) -> dict[str, Any]:
    """The status once no request is open and all records are written."""
    deadline_s = time.monotonic() + 600
    while True:
        status: dict[str, Any] = llm.collective_rpc("redraft_status")[0]
        counts = status["capture"]
        if (
            not counts["open_requests"]
            and counts.get("records", 0) == counts.get("shipped_records", 0) > 0
        ):
            return status
        assert time.monotonic() < deadline_s, counts
        time.sleep(0.1)


def main(spec: dict[str, Any]) -> None:
    capture = {"spool": spec["spool"], "hidden_states": True}
    os.environ |= write_settings(read_settings(), {"capture": capture})
    is_paced = "pace" in read_settings()
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": spec["target"],
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 32 << 20,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 32,  # small blocks, so that a short prompt can be found in the cache
        "speculative_config": {
            "model": spec["draft"],
            "method": spec["method"],
            "num_speculative_tokens": 3,
        }
        | spec.get("speculative", {}),
    }
    llm = LLM(**settings | spec.get("engine", {}))
    preempted = count_preemptions(llm)
    core, answers, seen = llm.llm_engine.engine_core.engine_core, [], []
    calls, numbers = count_calls(core) if is_paced else ([], [])
    for number, asked in enumerate(spec["rounds"]):
        if "pace" in asked:
            core.redraft_pace(asked["pace"])
        calls.clear()
        numbers.clear()
        answers.append(answer(llm, asked, f"round{number}"))
        seen.append({"calls": len(calls), "numbers": sorted(set(numbers))})
    report: dict[str, Any] = {
        "answers": answers,
        "seen": seen,
        "pace": core.redraft_pace() if is_paced else None,
        "status": wait_until_shipped(llm),
        "batches_at_once": llm.llm_engine.vllm_config.max_concurrent_batches,
        "preemptions": len(preempted),
        "counted_drafts": sum(
            c[1] for c in llm.llm_engine.engine_core.engine_core.redraft_domains().values()
        ),
    }
    print("REPORT", json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
