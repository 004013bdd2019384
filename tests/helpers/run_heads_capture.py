"""Answer prompts in a real vLLM inside this process with a head as draft, and capture the states it reads.

    python run_heads_capture.py '{"target": folder, "draft": folder, "method": "eagle3", "spool": folder,
                                  "rounds": [[[1, 2, ...], ...], ...]}'

The prompts of a round are answered together; a later round may find earlier prompts in the cache. Prints one line of
JSON: the token ids of every answer, by round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "redraft", "OMP_NUM_THREADS": "1"}

from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin


def wait_until_shipped(llm: Any, num_records: int) -> None:
    deadline_s = time.monotonic() + 60
    while (counts := llm.collective_rpc("redraft_status")[0]["capture"]).get("shipped_records", 0) < num_records:
        assert time.monotonic() < deadline_s, counts
        time.sleep(0.1)


def main(spec: dict[str, Any]) -> None:
    os.environ |= {"REDRAFT_CAPTURE_SPOOL": spec["spool"], "REDRAFT_CAPTURE_HIDDEN_STATES": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=spec["target"],
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=32 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=32,  # small blocks, so that a short prompt can be found in the cache
        speculative_config={"model": spec["draft"], "method": spec["method"], "num_speculative_tokens": 3},
    )
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    sampling.extra_args = {EXTRA_ARGS_KEY: Origin()._asdict()}
    answers = []
    for prompts in spec["rounds"]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers.append([list(found.outputs[0].token_ids) for found in llm.generate(asked, sampling, use_tqdm=False)])
    wait_until_shipped(llm, sum(map(len, answers)))
    print("REPORT", json.dumps(answers))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
