"""Start a real vLLM inside this process while parts of the plugin fail.

What it says and answers is printed.

    python run_install.py '{"target": folder, "draft": folder, "spool": folder, "failures": ["fingerprint", ...]}'

The draft "ngram" is a lookup. The engine starts with the first failure; the worker is set up again
with each of the others, and at last with none. Prints one line of JSON: for each `status` (the
worker's) and `output` (token ids of an answer without a mark of its origin), and at the end
`recorded`, the prompt lengths of the requests recorded when one of two had the mark.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "redraft",
    "OMP_NUM_THREADS": "1",
}

from redraft.engine.settings import read_settings, write_settings
from redraft.online.engine import runner_v1, worker
from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin
from redraft.online.records.record import read_frames
from redraft.online.records.spool import spool_files

LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}


@contextmanager
def failing(name: str, engine_worker: Any = None) -> Iterator[None]:
    """Let one part fail: a function of the worker's module, or one of three conditions."""
    if name == "unknown runner":
        plant = mock.patch.object(runner_v1, "RUNNER", "vllm.v3.Runner")
    elif name == "remote target":
        plant = mock.patch.object(
            engine_worker.vllm_config.model_config, "model", "s3://bucket/target"
        )
    elif name == "setting":
        plant = mock.patch.dict(
            os.environ, write_settings(read_settings(), {"capture": {"fraction": 3}})
        )
    elif name == "fingerprint":
        plant = mock.patch.object(
            worker, "TargetFolder", side_effect=RuntimeError(f"{name} is broken")
        )
    else:
        plant = mock.patch.object(worker, name, side_effect=RuntimeError(f"{name} is broken"))
    with plant:
        yield


def read_records(spool: Path) -> list[Any]:
    return [record for path in spool_files(spool) for _, record in read_frames(path.read_bytes())]


def main(spec: dict[str, Any]) -> None:
    os.environ |= write_settings({"capture": {"spool": spec["spool"]}})
    from vllm import LLM, SamplingParams

    start: dict[str, Any] = {
        "model": spec["target"],
        "dtype": "float32",
        "max_model_len": 128,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 32 << 20,
        "max_num_seqs": 2,
        "speculative_config": LOOKUP
        if spec["draft"] == "ngram"
        else {"model": spec["draft"], "method": "draft_model", "num_speculative_tokens": 3},
    }
    first, *others = spec["failures"] or [""]
    with failing(first) if first else nullcontext():
        llm = LLM(**start)
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)

    def answer(*lengths: int, params: Any = sampling) -> list[list[int]]:
        prompts: Any = [{"prompt_token_ids": list(range(10, 10 + length))} for length in lengths]
        return [
            list(found.outputs[0].token_ids)
            for found in llm.generate(prompts, params, use_tqdm=False)
        ]

    def report() -> dict[str, Any]:
        return {"status": llm.collective_rpc("redraft_status")[0], "output": answer(30)[0]}

    def set_up_again(wrapper: Any, failure: str = "") -> None:
        with failing(failure, wrapper.worker) if failure else nullcontext():
            worker.install(wrapper.worker)

    reports = [report()]
    for failure in others:
        llm.collective_rpc(set_up_again, args=(failure,))
        reports.append(report())
    if first:
        llm.collective_rpc(set_up_again)
        reports.append(report())
    marked = sampling.clone()
    marked.extra_args = {EXTRA_ARGS_KEY: Origin()._asdict()}
    answer(20, 25, params=[sampling, marked])
    deadline_s = time.monotonic() + 600
    while not (records := read_records(Path(spec["spool"]))):
        assert time.monotonic() < deadline_s, "no record arrived"
        time.sleep(0.1)
    counts = llm.collective_rpc("redraft_status")[0]["capture"]
    recorded = [record.num_prompt_tokens for record in records]

    print("REPORT", json.dumps({"reports": reports, "recorded": recorded, "counts": counts}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
