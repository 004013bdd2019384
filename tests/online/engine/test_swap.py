"""Swapping a draft: the parts on small modules, then under load in the real engine."""

import json
import shutil
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fastapi import HTTPException
from make_families import make_variant
from make_heads import make_random
from real_server import COPY, NOISY, RANDOM
from safetensors.torch import load_file, save_file
from starlette.requests import Request
from swapping import run_engines, run_swaps
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redraft.engine.patches import expand_kernel
from redraft.engine.settings import write_settings
from redraft.files.folder import fingerprint
from redraft.heads.families.eagle3 import Config, Eagle3
from redraft.heads.target import Target
from redraft.online.engine.config import PluginConfig, read_config
from redraft.online.engine.copies import refill_columns, refill_projections
from redraft.online.engine.routes import authorize
from redraft.online.engine.swap import (
    Layout,
    checksum,
    count_cache,
    require_same_layout,
    without_shared_modules,
)

# --- the parts


class Model(nn.Module):
    def __init__(self, embedding=None):
        super().__init__()
        self.embed_tokens = embedding or nn.Embedding(8, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("table", torch.arange(3))


def test_what_the_draft_shares_with_the_target_is_out_of_reach_and_comes_back():
    target = Model()
    draft = nn.Sequential(Model(target.embed_tokens))
    with without_shared_modules(draft, target) as shared:
        assert shared == {"embed_tokens"}
        assert not any("embed_tokens" in name for name, _ in draft.named_parameters())
        assert len(dict(draft.named_parameters())) == 4
    assert draft[0].embed_tokens is target.embed_tokens
    assert target.embed_tokens is not None


def test_the_shared_modules_come_back_after_an_exception():
    target = Model()
    draft = Model(target.embed_tokens)
    with pytest.raises(KeyError), without_shared_modules(draft, target):
        raise KeyError
    assert draft.embed_tokens is target.embed_tokens


def test_a_shared_tensor_in_a_module_of_its_own_is_refused():
    target, draft = Model(), Model()
    draft.embed_tokens.weight = target.embed_tokens.weight
    with (
        pytest.raises(ValueError, match=r"embed_tokens\.weight"),
        without_shared_modules(draft, target),
    ):
        pass


def test_the_cache_of_a_draft_is_that_of_its_layers_without_the_targets():
    target, draft = Model(), Model()
    whole = torch.zeros(2, 5, 8, dtype=torch.bfloat16)
    target.block[0].kv_cache, target.block[1].kv_cache = whole[0], torch.zeros(3)
    draft.block[0].kv_cache, draft.block[1].kv_cache = whole[1], target.block[1].kv_cache
    draft.kv_cache = (torch.zeros(7), torch.zeros(2, dtype=torch.float64))  # of a recurrent layer
    assert count_cache(draft, target) == 2 * 5 * 8 + 4 * 7 + 8 * 2
    assert count_cache(Model(), target) == 0


class Largest(TorchDispatchMode):
    """The most bytes that one operation has allocated."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        held = {
            x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)
        }
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in held:
                self.num_bytes = max(self.num_bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x.view(16, 64, 1024).permute(2, 0, 1),
        lambda x: x[:, :512],
        lambda x: x[:, :512].t(),
        lambda x: x.view(-1)[3:].view(torch.uint8)[2:],
        lambda x: x[0, 0],
    ],
)
def test_the_checksum_copies_no_weight_however_it_lies_in_memory(view):
    """A copy of the largest weight would not fit on a GPU that vLLM has filled."""
    model = nn.Module()
    model.register_buffer("weight", view(torch.randn(1024, 1024).to(torch.bfloat16)))
    with Largest() as largest:
        before = checksum(model)
    assert largest.num_bytes <= 64 << 10
    model.weight.view(-1)[-1:].add_(1) if model.weight.is_contiguous() else model.weight[
        -1, -1
    ].add_(1)
    assert checksum(model) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_the_checksum_sees_every_bit_and_every_exchange(dtype):
    model = nn.Module()
    model.weight = nn.Parameter((10 * torch.randn(5, 7)).to(dtype), requires_grad=False)
    before = checksum(model)
    assert checksum(model) == before
    raw = model.weight.data.view(torch.uint8)
    raw[3, 2] ^= 1
    assert checksum(model) != before
    raw[3, 2] ^= 1
    assert checksum(model) == before
    model.weight.data = model.weight.data.flip(0)
    assert checksum(model) != before


def test_the_checksum_sees_a_packed_layer():
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    layer.input_size_per_partition = 4
    weight = torch.randn(3, 4)
    layer.cpu_linear = lambda x, packed, bias: x @ weight.T
    before = checksum(layer)
    weight[1, 2] += 1e-3
    assert checksum(layer) != before


def test_another_layout_is_told_before_anything_is_touched(registry):
    folders = sorted(path for path in registry.iterdir() if not path.is_symlink())
    require_same_layout(Layout.read(folders[0]), Layout.read(folders[1]))
    with pytest.raises(ValueError, match=r"lm_head.weight.*\[\d+, 64\]"):
        require_same_layout(Layout.read(folders[0]), Layout.read(folders[4]))


def test_a_changed_setting_is_told(registry, tmp_path):
    (start,) = registry.glob("v000001")
    config = json.loads((start / "config.json").read_text()) | {
        "rms_norm_eps": 0.5,
        "use_cache": "whatever",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json \(rms_norm_eps\): "):
        require_same_layout(Layout.read(start), Layout.read(tmp_path))


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_the_weights_of_a_head_with_windows_may_change_and_its_windows_never(
    family, layout, tmp_path
):
    """An engine makes its groups of caches by the windows when it starts."""
    for name, options in {
        "served": {"window": 9},
        "trained": {"window": 9},
        "wider": {"window": 10},
        "full": {},
        "mixed": {"window": 9, "full_layers": (1,), "is_causal": False},
    }.items():
        if family == "eagle3":
            options.pop("is_causal", None)
        head, _ = make_variant(family, "plain", num_layers=2, **options)
        make_random(head, seed=len(name)).export(tmp_path / name, layout=layout)
    served = Layout.read(tmp_path / "served")
    require_same_layout(served, Layout.read(tmp_path / "trained"))
    for name, key in {
        "wider": "sliding_window",
        "full": "layer_types",
        "mixed": "layer_types",
    }.items():
        changed = "transformer_layer_config" if layout == "speculators" else key
        with pytest.raises(ValueError, match=rf"{name} differs.*{changed}.*: restart the server"):
            require_same_layout(served, Layout.read(tmp_path / name))


@pytest.mark.parametrize("is_served", [True, False])
def test_a_draft_that_is_not_quantised_as_the_served_one_is_refused_with_the_cure(
    registry, tmp_path, is_served
):
    (start,) = registry.glob("v000001")
    config = json.loads((start / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    current, candidate = (tmp_path, start) if is_served else (start, tmp_path)
    found, served = ("not quantised", "fp8") if is_served else ("fp8", "not quantised")
    told = f"{candidate.name} .*{found}.*{served}"
    with pytest.raises(ValueError, match=told):
        require_same_layout(Layout.read(current), Layout.read(candidate))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_copies_of_keys_and_values_are_refilled_in_place_for_each_rank(rank):
    """Of two layers with four heads of size 3, of which a rank holds two.

    A bias is copied as well.
    """
    names = [f"layers.{i}.self_attn.{name}" for i in range(2) for name in ("k_proj", "v_proj")]
    tensors = {f"{name}.weight": torch.randn(12, 5) for name in names}
    tensors |= {f"{name}.bias": torch.randn(12) for name in names}
    tensors |= {f"layers.{i}.self_attn.k_norm.weight": torch.randn(3) for i in range(2)}
    layer = SimpleNamespace(self_attn=SimpleNamespace(num_kv_heads=2, head_dim=3))
    alias = torch.ones(5)
    made = SimpleNamespace(
        layers=[layer, layer],
        hidden_norm=SimpleNamespace(weight=alias),
        _hidden_norm_weight=alias,
        _fused_kv_weight=torch.zeros(24, 5),
        _fused_kv_bias=torch.zeros(24),
        _k_norm_weights=torch.zeros(2, 3),
    )
    buffers = made._fused_kv_weight, made._fused_kv_bias, made._k_norm_weights
    refill_projections(made, tensors, rank, 2)
    for buffer, kind in zip(buffers, ("weight", "bias"), strict=False):
        wanted = [tensors[f"{name}.{kind}"].chunk(2)[rank] for name in names]
        assert torch.equal(buffer, torch.cat(wanted))
    assert torch.equal(
        buffers[2], torch.stack([tensors[f"layers.{i}.self_attn.k_norm.weight"] for i in range(2)])
    )
    made._fused_kv_weight = made._fused_kv_bias = None  # quantised: vLLM makes no copy
    refill_projections(made, tensors, rank, 2)
    made._k_norm_weights = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"_k_norm_weights.*\(3, 3\).*\(2, 3\)"):
        refill_projections(made, tensors, rank, 2)


def test_the_columns_of_another_draft_vocabulary_replace_the_old_ones_in_place():
    columns, logits = torch.tensor([0, 1, 2]), torch.full((2, 8), 5.0)
    refill_columns(columns, torch.tensor([1, 3, 5]), logits)  # offsets
    assert columns.tolist() == [1, 4, 7]
    assert (logits == -torch.inf).all(), "the columns of the old ids would keep their logits"


def make_request(host, token):
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    return Request({"type": "http", "client": (host, 1), "headers": headers})


@pytest.mark.parametrize(
    ("host", "token", "config", "code"),
    [
        ("127.0.0.1", "right", {"token": "right"}, None),
        ("::1", "right", {"token": "right"}, None),
        ("127.0.0.1", "wrong", {"token": "right"}, 401),
        ("127.0.0.1", None, {"token": "right"}, 401),
        ("127.0.0.1", "", {}, 503),
        ("10.0.0.5", "right", {"token": "right"}, 403),
        ("10.0.0.5", "right", {"token": "right", "allow_remote": True}, None),
        ("10.0.0.5", "wrong", {"token": "right", "allow_remote": True}, 401),
    ],
)
def test_who_may_use_the_routes(host, token, config, code):
    if code is None:
        authorize(make_request(host, token), PluginConfig(**config))
    else:
        with pytest.raises(HTTPException) as error:
            authorize(make_request(host, token), PluginConfig(**config))
        assert error.value.status_code == code


def test_a_replaced_token_is_refused_at_once(tmp_path):
    path, first, second = tmp_path / "token", "the first of two tokens", "the second of two tokens"
    path.write_text(first)
    path.chmod(0o600)
    config = read_config(write_settings({"token_file": str(path)}))
    path.write_text(second)
    with pytest.raises(HTTPException):
        authorize(make_request("::1", first), config)
    config = authorize(make_request("::1", second), config)
    path.unlink()  # it is being replaced once more
    assert authorize(make_request("::1", second), config) == config
    with pytest.raises(HTTPException) as error:
        authorize(make_request("::1", first), config)
    assert error.value.status_code == 401


def test_the_token_comes_from_a_file_and_stays_out_of_logs(tmp_path):
    (tmp_path / "token").write_text("a-secret-for-tests\n")
    (tmp_path / "token").chmod(0o600)
    config = read_config(write_settings({"token_file": str(tmp_path / "token")}))
    assert config.token == "a-secret-for-tests"
    assert "a-secret" not in repr(config)
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ValueError, match=str(tmp_path / "token")):
        read_config(write_settings({"token_file": str(tmp_path / "token")}))


def test_target_weights_are_loaded_from_folders_that_are_there(tmp_path):
    (tmp_path / "second").mkdir()
    assert read_config({}).targets == ()
    assert read_config(
        write_settings({"targets": [str(tmp_path), f"{tmp_path}/second"]})
    ).targets == (
        tmp_path,
        tmp_path / "second",
    )
    with pytest.raises(FileNotFoundError, match="third"):
        read_config(write_settings({"targets": [f"{tmp_path}/third"]}))


def test_nothing_is_captured_unless_asked_for(tmp_path):
    assert not read_config({}).capture.is_on
    capture = read_config(
        write_settings({"capture": {"spool": str(tmp_path), "tenants": ["a", "b"]}})
    ).capture
    assert (capture.is_on, capture.tenants) == (True, ("a", "b"))
    with pytest.raises(ValueError, match=r"\b0 and 1\b"):
        read_config(write_settings({"capture": {"spool": str(tmp_path), "fraction": 3}}))


def test_the_fixed_kernel_fills_float_outputs():
    output = torch.full((6,), -5.0)
    expand_kernel(output, torch.tensor([0.0, 0.7, 0.3]), torch.tensor([2, 2, 6]), 0.0, 1.0)
    np.testing.assert_allclose(output, [1, 1, 0.3, 0.3, 0.3, 0.3])


# --- the engine


def make_prompt(seed, length=100):
    return np.random.default_rng(seed).integers(8, 500, length).tolist()


def acceptance(response):
    """Accepted tokens per step, of 3."""
    metrics = response["metrics"]["speculative_decoding"]
    return metrics["mean_acceptance_length"] - 1


def tokens(response):
    return response["choices"][0]["token_ids"]


@pytest.mark.vllm
def test_a_good_draft_is_accepted_at_once_also_for_cached_prompts(server):
    server.swap(server.random)
    prompts = [make_prompt(seed) for seed in range(10, 13)]
    before = [server.complete(prompt, ignore_eos=True) for prompt in prompts]
    assert max(map(acceptance, before)) < 0.5
    report = server.swap(server.copy)
    after = [server.complete(prompt, ignore_eos=True) for prompt in prompts]
    assert min(map(acceptance, after)) > 2.8, "stale keys and values of the old draft"
    assert [tokens(r) for r in after] == [tokens(r) for r in before]
    assert report["target_checksum_before"] == report["target_checksum_after"]
    assert report["previous"] == server.random


class Stream(NamedTuple):
    id: str
    token_ids: list[int]
    finish: str
    sizes: list[int]
    """Tokens of each event; an event is one engine step."""


def stream(server, prompt, started=None):
    """A streamed completion of 400 tokens.

    `started` is released once the first tokens are there.
    """
    body = {"model": "m", "prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body | {"stream": True, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    lines = []
    # Only read here: a client slower than the engine would see the swap after everything is over.
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            lines.append(line)
            if len(lines) == 5 and started is not None:
                started.release()
    events = [
        json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")
    ]
    parts = [event["choices"][0]["token_ids"] or [] for event in events]
    finish = [
        event["choices"][0]["finish_reason"]
        for event in events
        if event["choices"][0]["finish_reason"]
    ]
    return Stream(
        events[0]["id"],
        [token for part in parts for token in part],
        finish[0],
        [len(part) for part in parts],
    )


@pytest.mark.vllm
def test_streams_that_run_during_a_swap_end_well_and_with_the_same_text(server):
    prompts = [make_prompt(seed, 40) for seed in range(20, 26)]
    server.swap(server.copy)
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(len(prompts)) as pool:
        wanted = [each.token_ids for each in pool.map(partial(stream, server), prompts)]
        server.swap(server.random)
        running = [pool.submit(stream, server, prompt, started) for prompt in prompts]
        for _ in prompts:
            assert started.acquire(timeout=600)
        assert not any(future.done() for future in running)
        server.swap(server.copy)
        results = [future.result() for future in running]
    assert [result.token_ids for result in results] == wanted
    assert {result.finish for result in results} == {"length"}
    assert np.mean([result.sizes[-6:-1] for result in results]) > 3.8  # of 4 tokens per step
    # Captured meanwhile: records of two versions, which together hold the text.
    records = server.records(
        [{"id": result.id, "choices": [{"token_ids": result.token_ids}]} for result in results]
    )
    assert {record.draft_version for record in records} == {server.random, server.copy}
    for result in results:
        parts = [record.output_ids for record in records if record.request_id.startswith(result.id)]
        np.testing.assert_array_equal(np.concatenate(parts), result.token_ids)


SAMPLINGS = [
    {"top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"top_k": 5, "top_p": 0.5},
    {"top_k": 1},
    {"seed": 1},
    {"presence_penalty": 1},
    {"frequency_penalty": 1},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"20": 3}},
    {"allowed_token_ids": [20, 21, 22]},
    {"bad_words": ["a"]},
    {"stop": ["a"]},
    {"stop_token_ids": [20]},
    {"min_tokens": 2},
    {"logprobs": 3},
    {"prompt_logprobs": 2},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"thinking_token_budget": 2},
    {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}},
    {"n": 2},
    {"n": 2, "use_beam_search": True},
]


@pytest.mark.vllm
def test_a_request_with_any_sampling_parameter_leaves_the_engine_alive(server):
    codes = {}
    for parameters in SAMPLINGS:
        body = {"model": "m", "prompt": make_prompt(30, 20), "max_tokens": 4, "temperature": 1}
        codes[str(parameters)] = server.http.post(
            "/v1/completions", json=body | parameters
        ).status_code
    # Beside a draft vLLM refuses some, as `min_p`.
    assert {parameters: code for parameters, code in codes.items() if code not in (200, 400)} == {}
    assert codes["{'top_k': 5}"] == 200
    assert len(tokens(server.complete(make_prompt(31, 20), max_tokens=2))) == 2


@pytest.mark.vllm
def test_the_served_version_is_not_loaded_again(server):
    server.swap(server.copy)
    before = server.status()["num_swaps"]
    assert server.swap(server.copy)["swapped"] is False
    assert server.status()["num_swaps"] == before


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        ({"version": "v000099"}, 404, "no version"),
        ({"version": "../v000001"}, 404, "no version"),
        ({"version": "current"}, 404, "no version"),
        ({"version": 3}, 404, "no version"),
        ({}, 400, "send a JSON body"),
        ([], 400, "send a JSON body"),
        ({"version": "v000004"}, 422, "is corrupt"),
        ({"version": "v000005"}, 409, "lm_head.weight"),
        ({"version": "v000006"}, 409, "trained for target"),
    ],
)
def test_an_invalid_version_is_refused_and_the_old_draft_goes_on(server, body, code, reason):
    server.swap(server.copy)
    answer = server.http.post("/redraft/swap", json=body)
    assert (answer.status_code, reason in answer.text) == (code, True), answer.text
    status = server.status()
    assert (status["draft_version"], status["draft_intact"], status["target_intact"]) == (
        server.copy,
        True,
        True,
    )
    assert acceptance(server.complete(make_prompt(30), ignore_eos=True)) > 2.8


@pytest.mark.vllm
def test_without_the_token_nobody_swaps_or_looks(server):
    for headers in (
        {"Authorization": "Bearer wrong"},
        {"Authorization": ""},
        {"Authorization": server.token},
    ):
        assert server.http.get("/redraft/status", headers=headers).status_code == 401
        answer = server.http.post("/redraft/swap", json={"version": server.random}, headers=headers)
        assert answer.status_code == 401


@pytest.mark.vllm
def test_the_status_names_draft_target_and_engine(server, random_target):
    status = server.status()
    assert status["target_fingerprint"] == fingerprint(random_target)
    assert len(status["target_checksum"]) == 64
    assert (status["method"], status["num_speculative_tokens"]) == ("draft_model", 3)
    assert status["vllm_version"].startswith("0.")


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.slow)])
def half_way_and_asleep(request, random_target, registry):
    """Reports of two engines in one process: a load fails half-way in one, the other sleeps."""
    random, copy, noisy = (str(registry / version) for version in (RANDOM, COPY, NOISY))
    swaps = {
        copy: [["fail", random], ["restore"]],
        noisy: [["forget", random], ["load", copy], ["sleep", 1, random], ["sleep", 2, random]],
    }
    served = {"target": str(random_target), "method": "draft_model"}
    return run_engines(
        [served | {"draft": draft, "swaps": each} for draft, each in swaps.items()], request.param
    )


@pytest.mark.vllm
def test_a_load_that_fails_half_way_puts_the_last_good_draft_back(half_way_and_asleep):
    start, failed, restored = half_way_and_asleep[0]
    assert failed["result"] == {
        "ok": False,
        "touched": True,
        "error": "OSError: the disk went away",
    }
    assert failed["status"]["draft_intact"] is False
    assert restored["result"]["ok"]
    assert restored["status"]["draft_intact"] is True
    assert failed["accepted"] < start["accepted"] == restored["accepted"]
    assert start["output"] == failed["output"] == restored["output"]
    assert restored["result"]["checksum_before"] == restored["result"]["checksum_after"]


@pytest.mark.vllm
def test_the_draft_is_there_again_after_sleep(half_way_and_asleep):
    start, forgotten, swapped, light, deep = half_way_and_asleep[1]
    assert forgotten["accepted"] < start["accepted"] < swapped["accepted"], (
        "what level 2 would do without us"
    )
    for level, report in enumerate((light, deep), 1):
        assert report["accepted"] == swapped["accepted"]
        assert report["output"] == start["output"]
        told = report["result"]
        assert (told["load"]["ok"], told["load"]["touched"]) == (False, False)
        assert "sleep" in told["load"]["error"]
        assert (told["staged"]["ok"], "sleeping" in told["staged"]["error"]) == (False, True)
        is_intact = [told["asleep"]["draft_intact"], told["half_awake"]["draft_intact"]]
        assert is_intact == [level == 1, True]
        asleep = [
            status["asleep"] for status in (told["asleep"], told["half_awake"], report["status"])
        ]
        assert asleep == [True, True, False]
        assert (report["status"]["draft_version"], report["status"]["draft_intact"]) == (
            "swapped",
            True,
        )


@pytest.mark.slow
@pytest.mark.vllm
def test_a_draft_that_cannot_be_loaded_after_sleep_is_told(random_target, registry, tmp_path):
    """The server wakes up all the same, and the next swap mends it."""
    random, copy = str(registry / "v000001"), str(registry / "v000002")
    served = str(shutil.copytree(copy, tmp_path / "served"))
    swaps = [["load", served], ["damage", served], ["sleep", 2, random], ["load", copy]]
    start, swapped, _, woken, mended = run_swaps(random_target, random, "draft_model", swaps)
    assert woken["status"]["draft_intact"] is False
    assert woken["status"]["asleep"] is False
    assert woken["output"] == start["output"]
    assert woken["accepted"] == start["accepted"] < swapped["accepted"] == mended["accepted"]
    assert mended["status"]["draft_intact"] is True


@pytest.fixture
def eagles(random_target, tmp_path):
    """EAGLE-3 heads with the target's embedding and head.

    One, another, and one with a different embedding.
    """
    target = Target.from_folder(random_target)
    folders = []
    for name, seed in (("first", 0), ("second", 1), ("own", 1)):
        torch.manual_seed(seed)
        Eagle3(Config(aux_layer_ids=(0, 1, 2)), target).export(tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        embed_VD = target.embed_VD if name != "own" else torch.randn_like(target.embed_VD)
        save_file(
            load_file(file) | {"embed_tokens.weight": embed_VD.clone()},
            file,
            metadata={"format": "pt"},
        )
        folders.append(tmp_path / name)
    return folders


@pytest.mark.slow
@pytest.mark.vllm
def test_what_a_head_shares_with_the_target_is_never_written(random_target, eagles):
    first, second, own = eagles
    swaps = [["load", str(second)], ["load", str(own)]]
    start, swapped, refused = run_swaps(random_target, first, "eagle3", swaps)
    assert swapped["result"]["ok"], swapped["result"]
    assert swapped["result"]["checksum_before"] == swapped["result"]["checksum_after"]
    assert swapped["output"] == start["output"]
    assert not refused["result"]["ok"]
    assert not refused["result"]["touched"]
    assert "embed_tokens.weight" in refused["result"]["error"]
    assert refused["output"] == start["output"]
    assert refused["status"]["draft_intact"]
