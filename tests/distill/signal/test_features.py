"""The target's hidden states from three sources.

In this process, from disk, from a real vLLM server.

A cache in the target's own dtype gives its bits. A bfloat16 cache of a float32 target rounds each
number by at most 2^-8 of itself. The engine computes in float32 too, in another order: 2e-4 on
hidden states of size 1 to 10.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import httpx
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from teachers import Teacher, teaching
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Llama4Config,
)
from waiting import until, wait_until

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample, SampleStats, data_hash
from redraft.distill.loss.choice import Divergence
from redraft.distill.run.inputs import target_signal
from redraft.distill.run.proof import leave_gpu
from redraft.distill.signal.ahead import OneAhead
from redraft.distill.signal.cache import (
    CachedHiddenStates,
    CachedTarget,
    HiddenDtype,
    HiddenStates,
    TopK,
)
from redraft.distill.signal.endpoint import Endpoint
from redraft.distill.signal.endpoints import Endpoints
from redraft.distill.signal.features import EndpointHiddenStates, load_skeleton, server_args
from redraft.distill.signal.features_store import Storage, write_states
from redraft.distill.signal.parts import read_stream_norms, stream_scales
from redraft.distill.signal.shards import write_cache
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.signal.storage import StatesFormat
from redraft.distill.train.loop import LoadedData
from redraft.distill.train.objective import distill_loss
from redraft.distill.train.run_config import Signal
from redraft.engine.server import VllmServer, vllm_server
from redraft.engine.settings import write_settings
from redraft.files.target_folder import TARGET_VERSION, TargetFolder
from redraft.heads.draft import Batch, ExactTarget, TargetSignal, label_rows
from redraft.heads.families import eagle3, medusa
from redraft.heads.families.eagle3_start import start_by_least_squares
from redraft.heads.target import LoadedTarget, Target
from tests.helpers.target_families import MOE, TINY

LAYERS = (0, 1, 2)
"""All that a target of two layers has: the embeddings, between the layers, before the final norm.
"""


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def make_samples(vocab_size: int = 512, num: int = 12, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            input_ids=rng.integers(1, vocab_size, length).astype(np.int32),
            loss_mask=np.arange(length) >= length // 2,
            conversation=str(i),
            domain="all",
        )
        for i, length in enumerate(rng.integers(2, 30, num))
    ]


def make_batch(samples: Sequence[Sample], seed: int = 3) -> Batch:
    """All samples, packed into rows of 64 in another order than a cache is written in."""
    return next(PackedDataset(samples, sequence_length=64, seed=seed).in_order(64))


def make_cache(
    folder: Path,
    samples: list[Sample],
    source: Callable[[Batch], TargetSignal],
    layers: tuple[int, ...] = LAYERS,
    dtype: HiddenDtype = "float32",
) -> None:
    content = HiddenStates(layers=layers, hidden_size=64, dtype=dtype)
    write_cache(
        samples, source, folder, content, target="the-target", sequence_length=32, batch_size=2
    )


def read_cache(
    folder: Path,
    samples: list[Sample],
    model: Any,
    layers: Sequence[int] = LAYERS,
    target: str = "the-target",
    dtype: HiddenDtype = "float32",
) -> CachedHiddenStates:
    head_VD = model.get_output_embeddings().weight.detach()
    content = HiddenStates(layers=tuple(sorted(layers)), hidden_size=64, dtype=dtype)
    return CachedHiddenStates(
        folder, content, target=target, data=data_hash(samples), head_VD=head_VD
    )


def states(signal: TargetSignal, batch: Batch) -> tuple[Tensor, Tensor]:
    """(last hidden state, streams) of the rows that anything is learned from.

    All but the last of each document.
    """
    same = batch.document_BT[:, 1:] == batch.document_BT[:, :-1]
    used_BT = torch.nn.functional.pad(same & (batch.document_BT[:, 1:] >= 0), (0, 1))
    assert isinstance(signal.distribution, ExactTarget)
    assert signal.aux_BTLD is not None
    return signal.distribution.hidden_BTD[used_BT], signal.aux_BTLD[used_BT]


def train_once(model: Any, batch: Batch, signal: TargetSignal) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients) of one step of an EAGLE-3 head on a signal."""
    torch.manual_seed(0)
    config = eagle3.Config(aux_layer_ids=LAYERS, num_steps=3)
    head = eagle3.Eagle3(config, Target.from_model(model))
    result = distill_loss(head.draft_steps(batch, signal), batch, signal, Divergence(), scale=0.01)
    result.loss.backward()
    return result.loss.detach(), {
        name: p.grad for name, p in head.named_parameters() if p.grad is not None
    }


def assert_trains_alike(
    model: Any, batch: Batch, one: TargetSignal, other: TargetSignal, tolerance: float
) -> None:
    """The same loss, and every gradient within `tolerance` of its norm."""
    loss, gradients = train_once(model, batch, one)
    other_loss, other_gradients = train_once(model, batch, other)
    assert float((loss - other_loss).abs()) <= tolerance * float(loss)
    assert gradients.keys() == other_gradients.keys()
    assert len(gradients) > 10
    for name, gradient in gradients.items():
        assert (gradient - other_gradients[name]).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_in_the_targets_own_dtype_gives_the_bits_of_the_target(
    dtype: HiddenDtype, random_target: Path, tmp_path: Path
) -> None:
    model = load(random_target, getattr(torch, dtype))
    for index, sample in enumerate(
        make_samples()
    ):  # one at a time: other shapes would round otherwise
        batch = next(PackedDataset([sample], sequence_length=32).in_order(1))
        exact = InProcessTarget(model, LAYERS)(batch)
        make_cache(tmp_path / str(index), [sample], InProcessTarget(model, LAYERS), dtype=dtype)
        cached = read_cache(tmp_path / str(index), [sample], model, dtype=dtype)(batch)
        for one, other in zip(states(exact, batch), states(cached, batch), strict=True):
            assert one.dtype == other.dtype == model.dtype
            assert torch.equal(one, other)


def test_a_bfloat16_cache_of_a_float32_target_rounds_and_no_more(
    random_target: Path, tmp_path: Path
) -> None:
    model, samples = load(random_target), make_samples()
    source = InProcessTarget(model, LAYERS)
    make_cache(tmp_path, samples, source, dtype="bfloat16")
    batch = make_batch(samples)
    exact, cached = source(batch), read_cache(tmp_path, samples, model, dtype="bfloat16")(batch)
    for one, other in zip(states(exact, batch), states(cached, batch), strict=True):
        assert other.dtype == torch.float32
        torch.testing.assert_close(other, one, rtol=2**-8, atol=1e-5)
    assert_trains_alike(model, batch, exact, cached, tolerance=0.02)


def test_a_head_learns_the_same_from_a_float32_cache_as_in_process(
    random_target: Path, tmp_path: Path
) -> None:
    model, samples = load(random_target), make_samples()
    source = InProcessTarget(model, LAYERS)
    make_cache(tmp_path, samples, source)
    batch = make_batch(samples)
    assert_trains_alike(
        model, batch, source(batch), read_cache(tmp_path, samples, model)(batch), tolerance=1e-4
    )


def test_a_cache_serves_any_head_whose_layers_it_holds(random_target: Path, tmp_path: Path) -> None:
    model, samples = load(random_target), make_samples()
    make_cache(tmp_path, samples, InProcessTarget(model, LAYERS))
    batch = make_batch(samples)
    whole = read_cache(tmp_path, samples, model)(batch)
    part = read_cache(tmp_path, samples, model, layers=(2, 0))(batch)
    assert whole.aux_BTLD is not None
    assert part.aux_BTLD is not None
    assert torch.equal(part.aux_BTLD, whole.aux_BTLD[:, :, [0, 2]])
    assert read_cache(tmp_path, samples, model, layers=())(batch).aux_BTLD is None


def test_states_of_a_target_with_a_cap_give_capped_logits(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    config = Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    source = EndpointHiddenStates(
        Endpoint("http://127.0.0.1:9"), Gemma2ForCausalLM(config), (1,), str(tmp_path)
    )
    assert source.rule.cap == config.final_logit_softcapping


def test_the_cache_of_another_target_other_data_or_other_layers_is_refused(
    random_target: Path, tmp_path: Path
) -> None:
    model, samples = load(random_target), make_samples()
    make_cache(tmp_path / "states", samples, InProcessTarget(model, (0, 2)), layers=(0, 2))
    with pytest.raises(ValueError, match=r"target the-target, but this run has another-target"):
        read_cache(tmp_path / "states", samples, model, target="another-target")
    with pytest.raises(ValueError, match=data_hash(samples)[:12]):
        read_cache(tmp_path / "states", make_samples(seed=1), model)
    with pytest.raises(ValueError, match=r"layers \[0, 2\], but this run has \[1, 2\]"):
        read_cache(tmp_path / "states", samples, model, layers=(1, 2))
    with pytest.raises(ValueError, match=r"hidden states.*top k"):
        CachedTarget(tmp_path / "states", TopK(4), target="the-target", data=data_hash(samples))
    write_cache(
        samples,
        InProcessTarget(model),
        tmp_path / "top",
        TopK(4),
        target="the-target",
        sequence_length=32,
        batch_size=2,
    )
    with pytest.raises(ValueError, match=r"top k.*hidden states"):
        read_cache(tmp_path / "top", samples, model)


def test_a_flipped_bit_is_found_when_its_document_is_read(
    random_target: Path, tmp_path: Path
) -> None:
    model, samples = load(random_target), make_samples()
    make_cache(tmp_path, samples, InProcessTarget(model, LAYERS))
    shard = tmp_path / "shard-000000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1000] ^= 4
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-000000\.safetensors.*CRC-32"):
        read_cache(tmp_path, samples, model)(make_batch(samples))


def test_the_size_of_hidden_states_is_said_to_the_byte(
    random_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = make_samples(num=200)
    make_cache(tmp_path, samples, InProcessTarget(load(random_target), LAYERS), dtype="bfloat16")
    tokens = sum(len(sample.input_ids) for sample in samples)
    said = (
        f"caching target layers [0, 1, 2] and the last hidden state of {tokens:,} tokens: 512 "
        "bytes per token"
    )
    assert f"{said}, {512 * tokens:,} bytes" in capsys.readouterr().out
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert 512 * tokens <= written < 512 * tokens * 1.1


def test_a_cache_in_float8_takes_half_the_space(tmp_path: Path) -> None:
    samples, written = make_samples(), {}

    def source(batch: Batch) -> TargetSignal:
        streams_BTLD = torch.randn(*batch.input_ids_BT.shape, 3, 4096)
        distribution = ExactTarget(hidden_BTD=streams_BTLD[:, :, 0], head_VD=torch.zeros(3, 4096))
        return TargetSignal(distribution=distribution, aux_BTLD=streams_BTLD)

    for dtype, per_token in (("bfloat16", 32_768), ("float8", 16_400)):
        content = HiddenStates(layers=(2, 16, 29), hidden_size=4096, dtype=dtype)
        folder = tmp_path / dtype
        header = write_cache(
            samples, source, folder, content, target="t", sequence_length=32, batch_size=2
        )
        assert header.bytes_per_row == per_token
        written[dtype] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0.5 < written["float8"] / written["bfloat16"] < 0.51


def test_a_cache_of_another_dtype_is_not_continued(random_target: Path, tmp_path: Path) -> None:
    samples = make_samples()

    def interrupted(batch: Batch) -> TargetSignal:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_cache(tmp_path, samples, interrupted, dtype="bfloat16")
    source = InProcessTarget(load(random_target), LAYERS)
    with pytest.raises(ValueError, match=r"'bfloat16'.*'float8'"):
        make_cache(tmp_path, samples, source, dtype="float8")
    make_cache(tmp_path, samples, source, dtype="bfloat16")


def test_a_state_that_float8_cannot_hold_ends_the_cache_with_one_line(
    random_target: Path, tmp_path: Path
) -> None:
    model, samples = load(random_target), make_samples()
    source = InProcessTarget(model, LAYERS)

    def overflow(batch: Batch) -> TargetSignal:
        signal = source(batch)
        assert signal.aux_BTLD is not None
        signal.aux_BTLD[:, :, 1, 3] = torch.inf
        return signal

    with pytest.raises(ValueError, match="float8") as error:
        make_cache(tmp_path / "float8", samples, overflow, dtype="float8")
    assert len(str(error.value).splitlines()) == 1
    make_cache(tmp_path / "bfloat16", samples, overflow, dtype="bfloat16")


def test_opening_and_reading_a_cache_copies_none_of_it(tmp_path: Path) -> None:
    hidden_size = 4096
    ids = [np.arange(i, i + 2000, dtype=np.int32) for i in range(8)]
    samples = [
        Sample(input_ids=i, loss_mask=np.ones(2000, bool), conversation="", domain="all")
        for i in ids
    ]
    head_VD = torch.zeros(3, hidden_size)

    def source(batch: Batch) -> TargetSignal:
        hidden_BTD = batch.input_ids_BT[..., None].expand(-1, -1, hidden_size).float()
        distribution = ExactTarget(hidden_BTD=hidden_BTD, head_VD=head_VD)
        return TargetSignal(distribution=distribution, aux_BTLD=hidden_BTD[:, :, None])

    content = HiddenStates(layers=(1,), hidden_size=hidden_size)
    write_cache(samples, source, tmp_path, content, target="t", sequence_length=2000, batch_size=1)
    before = anonymous_bytes()
    cached = CachedHiddenStates(
        tmp_path, content, target="t", data=data_hash(samples), head_VD=head_VD
    )
    opened = anonymous_bytes() - before
    signal = cached(next(PackedDataset(samples[:1], sequence_length=2000).in_order(1)))
    assert signal.aux_BTLD is not None
    needed = signal.aux_BTLD.nbytes * 2  # the last hidden state has the size of the one layer
    assert opened < 2**20
    assert anonymous_bytes() - before < 1.2 * needed


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def make_data(samples: list[Sample]) -> LoadedData:
    packed = PackedDataset(samples, sequence_length=32)
    return LoadedData(
        train=packed,
        held_out=PackedDataset(make_samples(seed=7, num=3), sequence_length=32),
        prompts=[],
        stats=SampleStats(),
        hash=data_hash(samples),
        end_ids=(2,),
    )


def test_a_head_trains_from_a_whole_cache_without_the_weights_of_the_target(
    random_target: Path, tmp_path: Path
) -> None:
    samples, accelerator = make_samples(), Accelerator(cpu=True)
    data, signal = (
        make_data(samples),
        Signal(kind="cache", cache=tmp_path / "cache", cache_dtype="float32"),
    )
    opened, model = TargetFolder.open(random_target), load(random_target)
    target = LoadedTarget(files=opened, model=model)
    written = target_signal(signal, target, data, tmp_path, accelerator, aux_layers=LAYERS)
    skeleton = load_skeleton(TargetFolder.open(random_target), torch.float32, torch.device("cpu"))
    assert all(p.is_meta == (".layers." in n) for n, p in skeleton.named_parameters())
    served = LoadedTarget(files=opened, model=skeleton)
    read = target_signal(signal, served, data, tmp_path, accelerator, aux_layers=LAYERS)
    batch = make_batch(samples)
    for one, other in zip(states(written(batch), batch), states(read(batch), batch), strict=True):
        assert torch.equal(one, other)
    assert_trains_alike(
        skeleton, batch, InProcessTarget(model, LAYERS)(batch), read(batch), tolerance=1e-4
    )
    header = json.loads((tmp_path / "cache" / "cache.json").read_text())
    assert header["target"] == f"float32 {opened.fingerprint}"


def test_a_shared_cache_is_read_only_as_what_it_was_written(
    random_target: Path, tmp_path: Path
) -> None:
    samples, accelerator, opened = (
        make_samples(),
        Accelerator(cpu=True),
        TargetFolder.open(random_target),
    )
    data, wanted = make_data(samples), {"kind": "cache", "cache": tmp_path / "cache"}
    exact, rounded = load(random_target), load(random_target, torch.bfloat16)

    def read(model: Any, aux_layers: tuple[int, ...] | None = LAYERS, **options: Any) -> Any:
        signal = Signal(**{**wanted, **options})
        target = LoadedTarget(files=opened, model=model)
        return target_signal(signal, target, data, tmp_path, accelerator, aux_layers)

    read(exact, cache_dtype="float8")
    batch = make_batch(samples)
    kept = states(read(exact, (0, 2), cache_dtype="float8")(batch), batch)[1]
    whole = states(InProcessTarget(exact, (0, 2))(batch), batch)[1]
    assert 0 < (kept - whole).norm() < 0.04 * whole.norm(), "float8, of the layers asked for"
    for model, dtype, found in ((exact, "float32", "dtype"), (rounded, "float8", "target")):
        with pytest.raises(ValueError, match=f"with {found} .*float.* this run has b?float"):
            read(model, cache_dtype=dtype)
    top = {"cache": tmp_path / "top"}
    assert read(exact, None, k=4, **top)(batch).distribution.ids_BTK.shape[-1] == 4
    for k in (3, 64):
        with pytest.raises(ValueError, match=rf"with k 4, but this run has {k}"):
            read(exact, None, k=k, **top)


# ------------------------------------------------------------------------------------------------------------
# a fleet


ONE_AT_A_TIME = threading.Lock()
"""Streams are read by hooks on a model, which another thread's pass would set off too."""


def make_teacher(
    model: Any,
    storage: str,
    harm: Callable[[Path, int], None] = lambda path, count: None,
    states_format: StatesFormat = "exact",
    target: tuple[str, str, str | None] = ("", "", ""),
) -> Teacher:
    """A server that speaks the features contract.

    It `harm`s the states of its requests, counted from 0.
    """
    source, count = InProcessTarget(model, LAYERS), itertools.count()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        ids_BT = torch.tensor([request["prompt"]])
        batch = Batch.padded([request["prompt"]])
        with ONE_AT_A_TIME:
            streams_BTLD, number = source(batch).aux_BTLD, next(count)
            log_p_TV = model(input_ids=ids_BT).logits[0].log_softmax(-1)
        assert streams_BTLD is not None
        url = f"{storage}/{id(source)}-{number}"
        write_states(url, streams_BTLD[0], LAYERS, states_format, target)
        harm(Path(f"{url}.bin"), number)
        entries = [
            {str(token): {"logprob": float(log_p_TV[t, token])}}
            for t, token in enumerate(request["prompt"][1:])
        ]
        return {
            "choices": [{"prompt_logprobs": [None, *entries]}],
            "kv_transfer_params": {"hidden_states": url},
        }

    return Teacher(answer=answer)


def from_teachers(
    teachers: Sequence[Teacher], folder: Path, storage: Path | str
) -> EndpointHiddenStates:
    skeleton = load_skeleton(
        opened := TargetFolder.open(folder), torch.float32, torch.device("cpu")
    )
    endpoints = Endpoints(
        [Endpoint(teacher.url, attempts=1, concurrency=2) for teacher in teachers]
    )
    return EndpointHiddenStates(endpoints, skeleton, LAYERS, str(storage), opened)


def test_a_fleet_sends_what_the_model_computes_and_lost_states_are_asked_for_again(
    random_target: Path, tmp_path: Path
) -> None:
    def flip_a_bit(path: Path, number: int) -> None:
        if number == 1:
            data = bytearray(path.read_bytes())
            data[40] ^= 64
            path.write_bytes(data)

    model, batch = load(random_target), make_batch(make_samples())
    one, other = make_teacher(model, str(tmp_path)), make_teacher(model, str(tmp_path), flip_a_bit)
    with teaching(one), teaching(other):
        live = from_teachers([one, other], random_target, tmp_path)
        live.require_target()
        assert (len(one.requests), len(other.requests)) == (1, 1)
        streamed = live(batch)
    assert min(len(one.requests), len(other.requests)) > 1
    for mine, its in zip(
        states(InProcessTarget(model, LAYERS)(batch), batch), states(streamed, batch), strict=True
    ):
        torch.testing.assert_close(its, mine, atol=2e-4, rtol=1e-4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("storage", ["memory://ahead", "folder"])
def test_a_slow_trainer_holds_the_servers_back(
    storage: str, random_target: Path, tmp_path: Path
) -> None:
    """A server is asked for one batch ahead, and the store holds no text of a further one."""
    root = storage if "://" in storage else str(tmp_path / storage)
    files, folder = fsspec.core.url_to_fs(root)
    waiting: list[int] = []

    def note(_: Path, number: int) -> None:
        waiting.append(sum(name.endswith(".json") for name in files.find(folder)))

    samples, texts = make_samples(num=24), 4
    batches = [
        next(PackedDataset(samples[first : first + texts], sequence_length=32).in_order(texts))
        for first in range(0, len(samples), texts)
    ]
    teacher = make_teacher(load(random_target), root, note)
    with teaching(teacher):
        live = from_teachers([teacher], random_target, root)
        live.require_target()
        before, ahead = len(teacher.requests), OneAhead(live, torch.device("cpu"))
        ahead.start(batches[0])
        for number, batch in enumerate(batches, 1):
            ahead(batch)
            for following in batches[number : number + 1]:
                ahead.start(following)
                # The step takes so long that the servers have answered everything.
                ahead._flight.thread.join()
            asked = texts * min(number + 1, len(batches))
            assert len(teacher.requests) - before == asked
            assert files.find(folder) == []
    assert 1 <= max(waiting) <= texts


def test_a_head_starts_by_least_squares_on_the_states_of_a_server(
    random_target: Path, tmp_path: Path
) -> None:
    model, batch = load(random_target), make_batch(make_samples())
    with teaching(make_teacher(model, str(tmp_path))) as teacher:
        served = from_teachers([teacher], random_target, tmp_path)(batch)
    known = InProcessTarget(model, LAYERS)(batch)
    assert isinstance(known.distribution, ExactTarget)
    assert isinstance(served.distribution, ExactTarget)
    known.distribution.hidden_BTD[(served.distribution.hidden_BTD == 0).all(-1)] = 0
    norms = read_stream_norms(TargetFolder.open(random_target), torch.float32, LAYERS)
    scales, drafted = stream_scales(norms, LAYERS, "a target"), []
    for signal in (known, served):
        torch.manual_seed(1)
        head = eagle3.Eagle3(
            eagle3.Config(aux_layer_ids=tuple(LAYERS), fc_norm=True), Target.from_model(model)
        )
        head.init_from_layers([torch.nn.Module()], model.model.norm)
        start_by_least_squares(head, [(batch, signal)], scales)
        with torch.no_grad():
            (step,) = head.draft_steps(batch, known, 1)
        drafted.append(step.hidden_BTD[step.mask_BT])
    torch.testing.assert_close(drafted[1], drafted[0], rtol=1e-2, atol=1e-2)


def test_a_head_learns_the_same_from_float8_states_streamed_and_cached(
    random_target: Path, tmp_path: Path
) -> None:
    model, samples = load(random_target), make_samples()
    batch, source = make_batch(samples), InProcessTarget(model, LAYERS)
    teacher = make_teacher(model, str(tmp_path / "wire"), states_format="float8")
    with teaching(teacher):
        live = from_teachers([teacher], random_target, tmp_path / "wire")
        live.require_target()
        streamed = live(batch)
    make_cache(tmp_path / "cache", samples, source, dtype="float8")
    cached, exact = (
        read_cache(tmp_path / "cache", samples, model, dtype="float8")(batch),
        source(batch),
    )
    (last, aux), (last_streamed, aux_streamed), (last_cached, aux_cached) = (
        states(signal, batch) for signal in (exact, streamed, cached)
    )
    # Both round the same states; a few lie between two codes, and other sums round them to the
    # other.
    assert ((aux_streamed - aux_cached).abs() > 1e-3 * aux_cached.abs()).float().mean() < 0.01
    # The last one is rounded before the final norm on the wire, and after it in a cache.
    for one, other in (
        (aux, aux_streamed),
        (aux, aux_cached),
        (last, last_streamed),
        (last, last_cached),
    ):
        assert (other - one).norm() < 0.04 * one.norm()
        assert not torch.equal(one, other), "nothing was rounded"
    assert_trains_alike(model, batch, streamed, cached, tolerance=0.1)
    assert_trains_alike(model, batch, exact, cached, tolerance=0.15)


def test_a_standalone_draft_learns_the_exact_distribution_from_servers_and_cache(
    random_target: Path, tmp_path: Path
) -> None:
    samples, accelerator = make_samples(), Accelerator(cpu=True)
    model, batch = load(random_target), make_batch(samples)
    data, opened = make_data(samples), TargetFolder.open(random_target)
    skeleton = load_skeleton(opened, torch.float32, torch.device("cpu"))
    with teaching(make_teacher(model, str(tmp_path))) as teacher:
        served: dict[str, Any] = {"url": (teacher.url,), "storage": str(tmp_path), "exact": True}
        target = LoadedTarget(files=opened, model=skeleton)
        endpoint = Signal(kind="endpoint", **served)
        live = target_signal(endpoint, target, data, tmp_path, accelerator)(batch)
        wanted = Signal(kind="cache", cache=tmp_path / "cache", cache_dtype="float32", **served)
        cached = target_signal(wanted, target, data, tmp_path, accelerator)(batch)
    expected = InProcessTarget(model)(batch)
    rows_BT = label_rows(batch, 0)
    for signal in (live, cached):
        assert isinstance(signal.distribution, ExactTarget)
        assert signal.aux_BTLD is None
        hidden, its = (s.distribution.hidden_BTD[rows_BT] for s in (expected, signal))
        torch.testing.assert_close(its, hidden, atol=2e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"--signal\.exact"):
        Signal(exact=True)


def save_llama4(folder: Path) -> Any:
    """A tiny Llama 4 whose checkpoint has the names of the released ones, which read images too."""
    torch.manual_seed(0)
    text = AutoConfig.for_model("llama4_text", **{**TINY, **MOE, "num_hidden_layers": 2})
    model = AutoModelForCausalLM.from_config(text)
    tensors = {
        f"language_model.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    Llama4Config(text_config=text.to_dict()).save_pretrained(folder)
    model.base_model_prefix = "model"  # or its streams cannot be read here
    return model


def test_served_states_of_llama_4_give_its_distribution(tmp_path: Path) -> None:
    (folder := tmp_path / "llama4").mkdir()
    model, batch = save_llama4(folder), make_batch(make_samples(vocab_size=TINY["vocab_size"]))
    with teaching(make_teacher(model, str(tmp_path))) as teacher:
        live = from_teachers([teacher], folder, tmp_path)
        live.require_target()
        streamed = live(batch)
    for mine, its in zip(
        states(InProcessTarget(model, LAYERS)(batch), batch), states(streamed, batch), strict=True
    ):
        torch.testing.assert_close(its, mine, atol=2e-4, rtol=1e-4)


def test_a_target_whose_final_norm_is_not_found_is_refused_in_a_line() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=32)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*--signal\.kind"):
        EndpointHiddenStates(
            Endpoint("http://t1:8001"), AutoModelForCausalLM.from_config(config), LAYERS
        )


def test_a_fleet_with_a_server_of_another_target_names_it(
    random_target: Path, served_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    right, wrong = (
        make_teacher(load(folder), str(tmp_path)) for folder in (random_target, served_pair[1])
    )
    with (
        teaching(right),
        teaching(wrong),
        pytest.raises(ValueError, match=rf"{wrong.url} .*log-probabilities"),
    ):
        from_teachers([right, wrong], random_target, tmp_path).require_target()


@pytest.mark.parametrize(
    ("lineage", "fingerprint", "version", "refusal"),
    [
        ("own", "own", "", None),
        ("own", "other", "", "--target"),
        ("other", "other", "", None),
        ("own", "own", "step-17@0123456789ab", "'step-17@0123456789ab'"),
        ("", "", None, "'half-written'"),
    ],
)
def test_states_of_other_weights_of_the_same_lineage_are_refused_in_a_line(
    lineage: str,
    fingerprint: str,
    version: str | None,
    refusal: str | None,
    random_target: Path,
    tmp_path: Path,
) -> None:
    """Norm and head of another version may be the same, and then log-probabilities fit the states."""
    opened = TargetFolder.open(random_target)
    lineage = opened.lineage if lineage == "own" else lineage
    fingerprint = opened.fingerprint if fingerprint == "own" else fingerprint
    target = (lineage, fingerprint, version)
    with teaching(make_teacher(load(random_target), str(tmp_path), target=target)) as teacher:
        live = from_teachers([teacher], random_target, tmp_path)
        if refusal is None:
            live.require_target()
        else:
            with pytest.raises(ValueError, match=f"{teacher.url} .*{refusal}") as refused:
                live.require_target()
            assert "\n" not in str(refused.value)


def test_a_teacher_that_is_dead_at_the_start_is_passed_over_and_has_to_hold_the_target_when_it_is_back(
    random_target: Path, served_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    model, batch = load(random_target), make_batch(make_samples())
    alive, dead, wrong = (
        make_teacher(load(folder), str(tmp_path))
        for folder in (random_target, random_target, served_pair[1])
    )
    with teaching(alive), teaching(dead):
        pass
    with pytest.raises(ConnectionError, match=dead.url):
        from_teachers([alive, dead], random_target, tmp_path).require_target()
    with teaching(alive, port=alive.port):
        live = from_teachers([alive, dead], random_target, tmp_path)
        assert isinstance(live.endpoint, Endpoints)
        live.endpoint.pause_s = live.endpoint.longest_pause_s = 0.05
        live.require_target()
        streamed = live(batch)
        with teaching(wrong, port=dead.port):
            live._runner.run(until(lambda: wrong.requests))
            live(batch)
            assert live.endpoint.members[1].is_dead
            assert len(wrong.requests[0]["prompt"]) == 16, (
                "it was asked for its target, and for nothing else"
            )
            assert {len(request["prompt"]) for request in wrong.requests} == {16}
        with teaching(dead, port=dead.port):
            dead.requests.clear()
            live._runner.run(until(lambda: not live.endpoint.members[1].is_dead))
            live(batch)
            assert len(dead.requests) > 1
    for mine, its in zip(
        states(InProcessTarget(model, LAYERS)(batch), batch), states(streamed, batch), strict=True
    ):
        torch.testing.assert_close(its, mine, atol=2e-4, rtol=1e-4)


HARMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another storage": lambda answer: (
        answer | {"kv_transfer_params": {"hidden_states": "/etc/passwd"}}
    ),
    "another host": lambda answer: (
        answer | {"kv_transfer_params": {"hidden_states": "http://127.0.0.1:9/states"}}
    ),
    "a number": lambda answer: answer | {"kv_transfer_params": {"hidden_states": 3}},
    "a list": lambda answer: answer | {"kv_transfer_params": ["hidden_states"]},
    "a text": lambda answer: answer | {"kv_transfer_params": "hidden_states"},
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_teacher_that_names_something_else_ends_training_with_one_line(
    harm: str, random_target: Path, tmp_path: Path
) -> None:
    honest = make_teacher(load(random_target), str(tmp_path))
    hostile = Teacher(answer=lambda request: HARMS[harm](honest.answer(request)))
    with (
        teaching(hostile),
        pytest.raises(ValueError, match=r"--signal\.storage|redraft serve-features`") as error,
    ):
        from_teachers([hostile], random_target, tmp_path).require_target()
    assert len(str(error.value).splitlines()) == 1


def test_states_of_another_size_are_lost(random_target: Path, tmp_path: Path) -> None:
    model = load(random_target)
    for shape in ((500, 3, 64), (16, 3, 32), (9, 3, 64)):

        def replace(path: Path, _: int, shape: tuple[int, ...] = shape) -> None:
            write_states(str(path.with_suffix("")), torch.zeros(shape), LAYERS)

        teacher = make_teacher(model, str(tmp_path), replace)
        with teaching(teacher), pytest.raises(ValueError, match=rf"\[{shape[0]}, .*, {shape[2]}\]"):
            from_teachers([teacher], random_target, tmp_path).require_target()
        assert len(teacher.requests) == 3


def test_a_target_whose_layers_are_elsewhere_leaves_the_gpu_too(random_target: Path) -> None:
    skeleton = load_skeleton(TargetFolder.open(random_target), torch.float32, torch.device("cpu"))
    head_VD = skeleton.get_output_embeddings().weight.detach()
    before = head_VD.untyped_storage().data_ptr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as from a GPU, in other memory
        leave_gpu(skeleton, head_VD)
    held = (head_VD, skeleton.get_output_embeddings().weight)
    assert before not in {tensor.untyped_storage().data_ptr() for tensor in held}, (
        "a view would hold the GPU's memory"
    )
    assert any(parameter.is_meta for parameter in skeleton.parameters())
    assert not skeleton.get_output_embeddings().weight.is_meta


# ------------------------------------------------------------------------------------------------------
# the real engine


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Through which the real vLLM sends its states."""
    return tmp_path_factory.mktemp("states") / "storage"


@pytest.fixture(scope="module")
def states_server(served_pair: tuple[Path, Path], storage: Path) -> Iterator[VllmServer]:
    """A real vLLM that sends the streams after layers 0 and 1 of the target, and after its last, 2."""
    extra = server_args((0, 1), num_layers=2, storage=str(storage))
    targets = [str(storage.parent), str(served_pair[0])]
    env = {
        "VLLM_PLUGINS": "redraft",
        "REDRAFT_TOKEN": "a-token-for-tests",
        **write_settings({"targets": targets}),
    }
    log = storage.parent / "vllm.log"
    with vllm_server(
        served_pair[0], log=log, max_model_len=512, extra_args=extra, extra_env=env
    ) as server:
        yield server


def from_server(
    server: VllmServer, folder: Path, storage: Path, layers: Sequence[int] = LAYERS
) -> EndpointHiddenStates:
    skeleton = load_skeleton(
        opened := TargetFolder.open(folder), torch.float32, torch.device("cpu")
    )
    return EndpointHiddenStates(Endpoint(server.url), skeleton, layers, str(storage), opened)


def take_all(url: str) -> None:
    """Read and remove."""
    Storage(str(Path(url).parent)).take(url, lambda *_: None)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_server_sends_what_the_model_computes_in_process(
    states_server: VllmServer, served_pair: tuple[Path, Path], storage: Path, tmp_path: Path
) -> None:
    folder, samples = served_pair[0], make_samples()
    model, batch = load(folder), make_batch(samples)
    live = from_server(states_server, folder, storage)
    live.require_target()
    streamed, exact = live(batch), InProcessTarget(model, LAYERS)(batch)
    for one, other in zip(states(exact, batch), states(streamed, batch), strict=True):
        torch.testing.assert_close(other, one, atol=2e-4, rtol=1e-4)
    assert_trains_alike(model, batch, exact, streamed, tolerance=1e-3)
    make_cache(tmp_path, samples, live)
    cached = read_cache(tmp_path, samples, model)(batch)
    assert_trains_alike(model, batch, exact, cached, tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.vllm
def test_nothing_stays_in_the_servers_folder(
    states_server: VllmServer, served_pair: tuple[Path, Path], storage: Path
) -> None:
    live = from_server(states_server, served_pair[0], storage, layers=())
    batch = make_batch(make_samples())
    assert live(batch).aux_BTLD is None
    model = load(served_pair[0])
    prompt = batch.input_ids_BT[0, :9].tolist()
    greedy = model.generate(
        torch.tensor([prompt]), max_new_tokens=5, do_sample=False, eos_token_id=None
    )
    assert live.greedy([prompt], 5) == [greedy[0, 9:].tolist()]
    answer = live._runner.run(live.endpoint.post("/v1/completions", prompt=[3, 4, 5], max_tokens=1))
    url = answer["kv_transfer_params"]["hidden_states"]
    take_all(url)
    assert list(Path(url).parent.iterdir()) == []


@pytest.mark.slow
@pytest.mark.vllm
def test_nothing_is_written_for_a_trainer_that_is_gone(states_server: VllmServer) -> None:
    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(base_url=states_server.url) as http:
            # 440 steps last far longer than a client waits here, on any processor
            body = {"prompt": list(range(3, 60)), "max_tokens": 440, "ignore_eos": True}
            for wait_s in (0.02, 0.05, 0.1):
                asked = [http.post("/v1/completions", json=body, timeout=wait_s) for _ in range(12)]
                gone = await asyncio.gather(*asked, return_exceptions=True)
                assert all(isinstance(error, httpx.TimeoutException) for error in gone)
            answer = await http.post("/v1/completions", json=body | {"max_tokens": 1}, timeout=600)
        url = answer.json()["kv_transfer_params"]["hidden_states"]
        await asyncio.to_thread(take_all, url)
        left.extend(Path(url).parent.iterdir())

    left: list[Path] = []
    asyncio.run(ask_and_leave())
    assert left == []


@pytest.mark.slow
@pytest.mark.vllm
def test_a_server_of_another_target_other_layers_or_none_is_refused(
    states_server: VllmServer,
    engine_with_draft: VllmServer,
    served_pair: tuple[Path, Path],
    storage: Path,
) -> None:
    target, draft = served_pair
    # Of other weights, and no file says so: what a quantised target of another lineage is judged
    # by.
    skeleton = load_skeleton(TargetFolder.open(draft), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=rf"{states_server.url} .* nats "):
        EndpointHiddenStates(
            Endpoint(states_server.url), skeleton, LAYERS, str(storage)
        ).require_target()
    lacking = from_server(states_server, target, storage)
    lacking.layers = [0, 5]
    with pytest.raises(ValueError, match=r"\[0, 1, 2\].*\[5\]"):
        lacking.require_target()
    with pytest.raises(ValueError, match=rf"{engine_with_draft.url} .*`redraft serve-features`"):
        from_server(engine_with_draft, target, storage).require_target()


@pytest.mark.slow
@pytest.mark.vllm
def test_a_server_whose_weights_are_others_of_the_lineage_or_have_moved_is_refused(
    states_server: VllmServer, served_pair: tuple[Path, Path], storage: Path
) -> None:
    moved = shutil.copytree(served_pair[0], storage.parent / "moved")
    tensors = load_file(moved / "model.safetensors")
    changed = {
        name: 1.25 * tensor if ".layers." in name else tensor for name, tensor in tensors.items()
    }
    save_file(changed, moved / "model.safetensors", {"format": "pt"})

    def move(folder: Path, label: str) -> None:
        body, headers = (
            {"path": str(folder), "version": label},
            {"Authorization": "Bearer a-token-for-tests"},
        )
        httpx.post(
            f"{states_server.url}/redraft/target", json=body, headers=headers, timeout=600
        ).raise_for_status()

    own, other = (from_server(states_server, folder, storage) for folder in (served_pair[0], moved))
    own.require_target()
    with pytest.raises(ValueError, match=r"--target"):
        other.require_target()
    move(moved, "step-1")
    with pytest.raises(ValueError, match=r"\('step-1@"):
        own.require_target()
    move(served_pair[0], "step-0")
    own.require_target()


def test_layers_that_the_target_does_not_have_are_refused_before_a_server_starts() -> None:
    with pytest.raises(ValueError, match=r"\[3\].*2"):
        server_args((1, 3), num_layers=2, storage="anywhere")


def test_a_medusa_head_reads_the_last_hidden_state_of_a_cache(
    random_target: Path, tmp_path: Path
) -> None:
    model, samples = load(random_target), make_samples()
    make_cache(tmp_path, samples, InProcessTarget(model), layers=())
    batch = make_batch(samples)
    head = medusa.Medusa(medusa.Config(), Target.from_model(model))
    cached = read_cache(tmp_path, samples, model, layers=())(batch)
    exact = InProcessTarget(model)(batch)
    losses = [
        distill_loss(head.draft_steps(batch, signal), batch, signal, Divergence(), scale=0.01).loss
        for signal in (exact, cached)
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)


@pytest.mark.vllm
@pytest.mark.parametrize("states_format", ["exact", "float8"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_writes_states_in_the_format_that_the_server_was_started_with(
    states_format: StatesFormat,
    rank: int,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an engine.

    VLLM's calls of a worker's connector, with the configuration of `server_args`.
    """
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import (
        example_hidden_states_connector as vllm_connector,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from redraft.distill.signal.features_connector import Connector

    arguments = server_args(
        (0, 2), num_layers=2, storage=str(tmp_path), states_format=states_format
    )
    hf_config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=[0, 2])
    config: Any = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**json.loads(arguments[3])),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf_config)),
        cache_config=SimpleNamespace(block_size=4),
        model_config=SimpleNamespace(model=str(tiny_target), revision=None),
        additional_config={TARGET_VERSION: "@0123456789ab"},
    )
    monkeypatch.setattr(vllm_connector, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(vllm_connector, "get_layers_from_vllm_config", lambda *_: {"states": None})
    connector = Connector(config, KVConnectorRole.WORKER, None)
    blocks = torch.randn(3, 2, 4, 64).bfloat16()  # blocks, layers, slots, hidden
    connector.register_kv_caches({"states": blocks})
    step = vllm_connector.ExampleHiddenStatesConnectorMetadata()
    step.pending_saves = [
        vllm_connector.PendingSave("1", "./cmpl-1.safetensors", torch.arange(3), [1])
    ]
    connector.bind_connector_metadata(step)
    assert connector.get_finished({"1"})[0] == (None if rank else {"1"})
    if rank:
        assert not list(tmp_path.iterdir())
        return
    described = tmp_path / "cmpl-1.json"
    wait_until(
        lambda: described.exists() and described.stat().st_size
    )  # a thread writes it, last of all
    description = json.loads(described.read_text())
    assert description["dtype"] == ("bfloat16" if states_format == "exact" else "float8")
    opened = TargetFolder.open(tiny_target)
    assert description["target"] == [opened.lineage, opened.fingerprint, "@0123456789ab"]
    written = (tmp_path / "cmpl-1.bin").read_bytes()
    assert len(written) == 3 * 2 * (128 if states_format == "exact" else 68)
    if states_format == "exact":
        states_TLD = torch.frombuffer(bytearray(written), dtype=torch.bfloat16).view(3, 2, 64)
        assert torch.equal(states_TLD, blocks[1].transpose(0, 1)[:3])
