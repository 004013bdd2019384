"""Replicas with shared experts, each with an API server of its own, in two real vLLMs.

One of them is swapped alone.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from real_server import running_server
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from redraft.engine.process import free_port
from redraft.files.artifact import publish

EXPERTS = Path(__file__).parents[2] / "helpers/experts_on_cpu"
POOR, GOOD = "v000001", "v000002"


def make_models(vocabulary):
    """A mixture of experts that add nothing, and a dense draft with the same weights besides.

    It proposes the same.
    """
    shared = {
        "vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
        "initializer_range": 0.3, "tie_word_embeddings": False, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    target, draft = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **experts)),
        Qwen3ForCausalLM(Qwen3Config(**shared)),
    )
    for model in (target, draft):
        for name, weight in model.named_parameters():
            if "down_proj" in name:
                weight.data.zero_()
    weights = {name: weight for name, weight in target.state_dict().items() if ".mlp." not in name}
    unexpected = draft.load_state_dict(weights, strict=False).unexpected_keys
    assert not unexpected
    return target, draft


@pytest.fixture(scope="module")
def experts(small_tokenizer, tmp_path_factory):
    """Folders of the target and of a registry.

    The registry has a random draft, and one that proposes what the target says.
    """
    folder = tmp_path_factory.mktemp("experts")
    target, draft = make_models(len(small_tokenizer))
    torch.manual_seed(1)
    drafts = {POOR: Qwen3ForCausalLM(draft.config), GOOD: draft}
    target.save_pretrained(folder / "target")
    small_tokenizer.save_pretrained(folder / "target")
    for version, model in drafts.items():

        def write(path, model=model):
            model.save_pretrained(path)
            small_tokenizer.save_pretrained(path)

        publish(folder / "registry" / version, write, {})
    (folder / "registry/current").symlink_to(POOR)
    return folder / "target", folder / "registry"


@pytest.fixture(scope="module")
def servers(experts, tmp_path_factory):
    """Two servers; each starts only when the other one does."""
    environment = {"PYTHONPATH": ":".join([str(EXPERTS), os.environ.get("PYTHONPATH", "")])}
    environment |= {"VLLM_PLUGINS": "experts_on_cpu"}
    port = str(free_port())

    def start(rank):
        arguments = ["--data-parallel-size", "2", "--data-parallel-rank", str(rank)]
        arguments += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port]
        folder = tmp_path_factory.mktemp(f"rank{rank}")
        return stack.enter_context(
            running_server(*experts, folder, [], arguments=arguments, environment=environment)
        )  # fmt: skip

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        yield list(pool.map(start, (0, 1)))


def ask(server, seed):
    prompt = np.random.default_rng(seed).integers(8, 500, 40).tolist()
    return server.complete(prompt, ignore_eos=True)


def accepted(response):
    """Accepted tokens per step, of 3."""
    return response["metrics"]["speculative_decoding"]["mean_acceptance_length"] - 1


@pytest.mark.vllm
@pytest.mark.slow
def test_one_of_two_replicas_with_shared_experts_is_swapped_while_both_serve(servers):
    is_over = threading.Event()
    first, second = servers

    def go_on(server):
        texts = []
        while not is_over.is_set() or len(texts) < 2:
            texts.append(ask(server, 0)["choices"][0]["token_ids"])
        return texts

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(go_on, server) for server in servers]
        try:
            assert max(accepted(ask(server, 1)) for server in servers) < 0.5
            first.swap(GOOD)
            assert [server.status()["draft_version"] for server in servers] == [GOOD, POOR]
            assert accepted(ask(first, 1)) > 2.8
            assert accepted(ask(second, 1)) < 0.5
            second.swap(GOOD)
            assert accepted(ask(second, 1)) > 2.8
        finally:
            is_over.set()
        texts = [text for future in asking for text in future.result()]
    assert len(texts) >= 4
    assert len(set(map(tuple, texts))) == 1
    first.swap(POOR)  # while nobody asks
    assert accepted(ask(first, 1)) < 0.5
    assert accepted(ask(second, 1)) > 2.8
