"""Move the target of a real vLLM inside this process.

What it answers, and how it names its weights, is printed.

    python run_moves.py '{"targets": [folder, folder], "draft": folder, "spool": folder, "prompts": [[ids], ...]}'

Prints one line of JSON: a report for the start and each move, with `outputs` (token ids by prompt),
`version` and `expected`, the index of the target that should answer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "redraft",
    "OMP_NUM_THREADS": "1",
}

import torch
from safetensors.torch import load_file

from redraft.engine.settings import write_settings
from redraft.online.engine.target_watch import look_at_target
from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin

NUM_TOKENS = 24


def copy_in_place(wrapper: Any, folder: str) -> None:
    """As trainers that send weights in the layout of the kernels: past all of vLLM's methods.

    The targets differ in the embeddings only.
    """
    with torch.no_grad():
        table = load_file(f"{folder}/model.safetensors")["model.embed_tokens.weight"]
        embed = wrapper.worker.model_runner.get_model().model.embed_tokens
        embed.weight[: len(table)].copy_(table)


def look_now(wrapper: Any) -> None:
    watch = wrapper.worker.redraft.target_watch
    watch.next_look_s = 0.0
    look_at_target(wrapper.worker)


def push_100_times(llm: Any, spec: dict[str, Any], sampling: Any) -> None:
    """Load one target, then the other, while four requests run."""
    number = 0
    for push in range(100):
        while llm.llm_engine.get_num_unfinished_requests() < 4:
            prompt = {"prompt_token_ids": spec["prompts"][number % len(spec["prompts"])]}
            llm.llm_engine.add_request(f"pushed-{number}", prompt, sampling)
            number += 1
        llm.llm_engine.step()
        llm.llm_engine.step()
        assert not llm.collective_rpc(
            "redraft_move", args=(f"push {push}", spec["targets"][push % 2])
        )[0]["error"]
        llm.reset_prefix_cache(reset_running_requests=True)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def main(spec: dict[str, Any]) -> None:
    os.environ |= write_settings(
        {"capture": {"spool": spec["spool"]}, "targets": spec["folders"].split(os.pathsep)}
    )
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=spec["targets"][0],
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=32 << 20,
        weight_transfer_config={"backend": "redraft"},
        max_num_seqs=8,
        speculative_config={
            "model": spec["draft"],
            "method": "draft_model",
            "num_speculative_tokens": 3,
        },
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
    )
    sampling.extra_args = {EXTRA_ARGS_KEY: Origin()._asdict()}
    engine: Any = llm.llm_engine.engine_core
    reports = []

    def report(move: str, expected: int) -> None:
        llm.reset_prefix_cache()
        prompts: Any = [{"prompt_token_ids": ids} for ids in spec["prompts"]]
        outputs = [
            list(one.outputs[0].token_ids)
            for one in llm.generate(prompts, sampling, use_tqdm=False)
        ]
        status = llm.collective_rpc("redraft_status")[0]
        reports.append(
            {
                "move": move,
                "expected": expected,
                "outputs": outputs,
                "version": status["target_version"],
            }
        )
        reports[-1]["draft"] = status["draft_version"]

    report("start", 0)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": spec["targets"][1]})
    report("reload", 1)
    engine.engine_core.set_weight_version("step 17")
    report("name", 1)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": spec["targets"][0]})
    report("return", 0)
    llm.collective_rpc(copy_in_place, args=(spec["targets"][1],))
    for _ in range(64):  # one piece of the weights at each look
        llm.collective_rpc(look_now)
    report("copy", 1)
    moved = llm.collective_rpc(
        "redraft_move", args=("step 18", spec["targets"][0], spec["next_draft"])
    )
    assert not moved[0]["error"], moved
    report("together", 0)
    for folder in (spec["spool"], spec["torn"]):  # one without weights, and one that fails half-way
        assert llm.collective_rpc("redraft_move", args=("", folder))[0]["error"]
        report(f"no {Path(folder).name}", 0)
    try:
        llm.collective_rpc(
            "reload_weights", kwargs={"weights_path": spec["torn"]}
        )  # a trainer that knows no redraft
    except Exception:
        report("torn", -1)
    llm.collective_rpc("redraft_move", args=("step 19", spec["targets"][1]))
    report("again", 1)
    for _ in range(20):
        llm.sleep(2)
        llm.wake_up(["weights"])
        assert not llm.collective_rpc("redraft_move", args=("awake", spec["targets"][1]))[0][
            "error"
        ]
        llm.wake_up(["kv_cache"])
    report("awake", 1)
    push_100_times(llm, spec, sampling)
    report("pushed", 1)
    # vLLM's own update: until its end the old weights stay, without a name
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", args=({"path": spec["targets"][0]},))
    report("begun", 1)
    llm.collective_rpc("finish_weight_update")
    report("finished", 0)
    llm.collective_rpc("start_weight_update")
    try:
        llm.collective_rpc("update_weights", args=({"path": spec["torn"]},))
    except Exception:
        report("no part", 0)
    # refused before anything is loaded, and the way on is open
    for name in ("partial", "short", "nan"):
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", args=({"path": spec[name]},))
        try:
            llm.collective_rpc("finish_weight_update")
        except Exception:
            report(f"no {name}", 0)
    # a trainer's own reload, which vLLM begins: a merged weight of which a part is too short
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": spec["short"]})
    except Exception:
        report("short", -1)
    llm.collective_rpc("redraft_move", args=("", spec["targets"][0]))
    report("after short", 0)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": spec["nan"]})
    report("nan", -1)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": spec["targets"][0]})
    report("after nan", 0)
    assert "finite" in llm.collective_rpc("redraft_move", args=("", spec["nan"]))[0]["error"]
    report("no nan folder", 0)
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", args=({"path": spec["targets"][0]},))
    llm.collective_rpc("finish_weight_update")
    report("whole", 0)
    llm.collective_rpc("start_draft_weight_update")
    llm.collective_rpc("update_weights", args=({"path": f"{spec['draft']}/model.safetensors"},))
    llm.collective_rpc("finish_weight_update")
    report("draft", 0)
    llm.sleep(2)
    llm.wake_up()
    report("draft of before", 0)
    engine.shutdown()  # ends the worker, which ships all records
    print("REPORT", json.dumps(reports))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
