"""`redraft serve` from request to record, on either model runner and on two tensor-parallel ranks.

On a CPU the kernels of V2 run in Triton's interpreter.
"""

import shutil

import httpx
import model_runners
import numpy as np
import pytest
import torch
from real_server import COPY, RANDOM, running_server
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from waiting import wait_until

from redraft.online.learning.replay import training_sequence


def make_prompts(seed, *lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(8, 500, length).tolist() for length in lengths]


def accepted(responses):
    """Accepted tokens per step, of 3, of each response."""
    return [
        response["metrics"]["speculative_decoding"]["mean_acceptance_length"] - 1
        for response in responses
    ]


def texts(responses):
    return [response["choices"][0]["token_ids"] for response in responses]


def require_log_probs_of(model, record):
    """The recorded log-probabilities are those of Hugging Face's forward pass."""
    sequence = training_sequence(record)
    log_probs_TV = (
        model(torch.tensor(sequence.input_ids_T)[None].long()).logits[0].log_softmax(-1).numpy()
    )
    wanted_RK = np.take_along_axis(
        log_probs_TV[sequence.rows_R], sequence.topk_ids_RK.astype(np.int64), -1
    )
    np.testing.assert_allclose(sequence.topk_log_probs_RK, wanted_RK, atol=1e-3)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(("runner", "ranks"), [("v2", 1), ("v1", 2), ("v2", 2)])
@torch.no_grad()
def test_serve_answers_swaps_and_records(random_target, registry, tmp_path, runner, ranks):
    model = LlamaForCausalLM.from_pretrained(random_target, dtype=torch.float32).eval()
    prompts = make_prompts(0, 20, 90)  # the second one is read in two chunks
    wanted = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
        )[0, len(prompt):].tolist()
        for prompt in prompts
    ]  # fmt: skip
    # left to itself, vLLM binds each rank to a NUMA node of its own, and refuses to start with
    # fewer nodes than ranks
    environment = model_runners.environment(runner) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    where = {"arguments": ["--tensor-parallel-size", str(ranks)], "environment": environment}
    with running_server(random_target, registry, tmp_path, [], **where) as server:
        status = server.status()
        assert (status["runner"][:15], status["num_ranks"]) == (
            f"{runner.upper()} model runner",
            ranks,
        )
        assert (status["capture_off"], status["swap_off"], status["draft_version"]) == (
            "",
            "",
            RANDOM,
        )
        before = [server.complete(prompt, ignore_eos=True) for prompt in prompts]
        report = server.swap(COPY)
        assert report["target_checksum_before"] == report["target_checksum_after"]
        after = [server.complete(prompt, ignore_eos=True) for prompt in prompts]
        status = server.status()
        assert (status["draft_version"], status["draft_intact"], status["num_swaps"]) == (
            COPY,
            True,
            1,
        )
        assert texts(before) == texts(after) == wanted
        assert max(accepted(before)) < 0.5
        assert min(accepted(after)) > 2.8
        for responses, version in ((before, RANDOM), (after, COPY)):
            records = server.records(responses)
            assert {record.draft_version for record in records} == {version}
            for record in records:
                require_log_probs_of(model, record)
        assert status["capture"]["captured_requests"] == len(before + after)


@pytest.mark.slow
@pytest.mark.vllm
def test_weights_that_only_one_of_two_ranks_could_load_are_in_no_record(
    random_target, registry, tmp_path
):
    half = tmp_path / "half"
    shutil.copytree(random_target, half)
    tensors = load_file(half / "model.safetensors")
    tensors = {name: 1.1 * tensor for name, tensor in tensors.items()}
    name = "model.layers.1.mlp.gate_proj.weight"
    tensors[name] = tensors[name][
        : len(tensors[name]) // 2
    ].contiguous()  # the rows of the first rank
    save_file(tensors, half / "model.safetensors", {"format": "pt"})
    environment = model_runners.environment("v1") | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    where = {"arguments": ["--tensor-parallel-size", "2"], "environment": environment}
    prompt = list(range(20, 40))
    with running_server(random_target, registry, tmp_path, [], **where) as server:

        def reload(folder):
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            # not by the client's connections: vLLM closes one after a failure
            return httpx.post(f"{server.url}/collective_rpc", json=body, timeout=600).status_code

        first = server.complete(prompt, ignore_eos=True)
        assert reload(half) == 500
        unclear = server.complete(prompt, ignore_eos=True)
        for _ in range(2):  # not the answer to another call
            status = server.status()
            assert (status["target_version"], status["num_ranks"]) == (None, 2)
        wait_until(
            lambda: server.status()["capture"].get("broken_requests_target_unclear") == 1
        )  # counted in a thread
        assert reload(random_target) == 200
        server.http.post("/reset_prefix_cache").raise_for_status()
        server.swap(COPY)
        last = server.complete(prompt, ignore_eos=True)
        assert texts([last]) == texts([first])
        assert server.status()["target_version"] == ""
        wait_until(server.has_shipped)
        ids = [record.request_id for record in server.all_records()]
    for response, is_recorded in ((first, True), (unclear, False), (last, True)):
        assert any(one.startswith(response["id"]) for one in ids) is is_recorded
