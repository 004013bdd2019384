"""The slices of a draft that a tensor-parallel rank reads.

They are found by running vLLM's own loaders without memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from redraft.online.engine.slices import Slice, Sliced, find_slice, trace_slices
from redraft.online.engine.staging import HostMemory, Part, count_bytes, plan_parts

RANKS, RANK = 8, 3


def test_a_view_is_a_slice_if_it_is_cut_along_one_dimension() -> None:
    whole = torch.empty(6, 4, device="meta")
    assert find_slice(whole[2:5], (6, 4)) == Slice(0, 2, 3)
    assert find_slice(whole[:, 1:3], (6, 4)) == Slice(1, 1, 2)
    assert find_slice(whole.narrow(0, 5, 1), (6, 4)) == Slice(0, 5, 1)
    for other in (whole, whole[2:5, 1:3], whole.t(), whole.view(-1), whole[::2]):
        assert find_slice(other, (6, 4)) is None


def test_slices_of_one_tensor_are_joined() -> None:
    assert Slice(0, 2, 3).join(Slice(0, 7, 1)) == Slice(0, 2, 6)
    assert Slice(0, 2, 3).join(Slice(1, 2, 3)) is None


def test_a_sliced_tensor_is_cut_and_copied_as_the_whole_one() -> None:
    whole = torch.arange(24.0).view(6, 4)
    sliced = Sliced.holding(whole[2:5].clone(), Slice(0, 2, 3), (6, 4))
    assert (sliced.shape, sliced.dtype) == ((6, 4), torch.float32)
    assert torch.equal(torch.zeros(2, 4).copy_(sliced.narrow(0, 3, 2)), whole[3:5])
    assert torch.equal(torch.cat([sliced[2:3], sliced[4:5]]), whole[[2, 4]])
    assert torch.equal(sliced[2:5].to(torch.bfloat16), whole[2:5].bfloat16())
    for outside in (sliced[1:3], sliced[:, :2], sliced):
        with pytest.raises(ValueError, match="staged"):
            torch.zeros(6, 4)[: len(outside), : outside.shape[1]].copy_(outside)


@pytest.fixture
def one_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes this process for rank 3 of 8."""
    from vllm.distributed import parallel_state

    group = SimpleNamespace(
        world_size=RANKS, rank_in_group=RANK, is_first_rank=True, is_last_rank=True, rank=RANK
    )
    alone = SimpleNamespace(
        world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True, rank=0
    )
    monkeypatch.setattr(parallel_state, "_TP", group)
    monkeypatch.setattr(parallel_state, "_PP", alone)


def make_config() -> LlamaConfig:
    """The sizes of Llama-3.1-8B."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
        dtype="bfloat16",
    )  # fmt: skip


def header_of(config: LlamaConfig) -> dict[str, dict[str, object]]:
    """A safetensors header of a checkpoint of this size."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).bfloat16().state_dict()
    header: dict[str, dict[str, object]] = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    return header


@pytest.mark.usefixtures("one_of_eight")
def test_each_rank_of_eight_reads_and_pins_an_eighth_of_an_8b_draft(tmp_path: Path) -> None:
    """Bytes pinned, read and copied in the pause are those of the parts.

    Whole, the draft has 16.06 GB.
    """
    config = make_config()
    draft = make_vllm_llama(config, tmp_path)
    header = header_of(config)
    whole = plan_parts(header, {}, set())
    weights = {
        part.name: torch.empty(*part.whole, dtype=part.dtype, device="meta") for part in whole
    }
    slices = trace_slices(draft, nn.Module(), weights)
    parts = plan_parts(header, slices, set())
    assert whole[-1].end == 16_060_522_496
    # Norms are read whole: 65 of 4,096 numbers. Everything else is an eighth.
    norms = 65 * 4096 * 2
    assert parts[-1].end == (16_060_522_496 - norms) // RANKS + norms == 2_008_031_232
    assert slices["model.layers.0.self_attn.q_proj.weight"] == Slice(0, RANK * 512, 512)
    assert slices["model.layers.0.self_attn.k_proj.weight"] == Slice(0, RANK * 128, 128)
    assert slices["model.layers.0.self_attn.o_proj.weight"] == Slice(1, RANK * 512, 512)
    assert slices["model.layers.31.mlp.down_proj.weight"] == Slice(1, RANK * 1792, 1792)
    assert slices["lm_head.weight"] == Slice(0, RANK * 16032, 16032)
    assert sum(part.rows * part.num_bytes for part in parts) == 2_008_031_232
    pinned: list[int] = []
    HostMemory(lambda buffer: pinned.append(len(buffer))).reserve(count_bytes({tmp_path: parts}))
    assert pinned == [2_008_031_232]
    assert count_copied_bytes(draft, parts) == 2_008_031_232
    assert all(not parameter.is_meta or parameter.numel() for parameter in draft.parameters()), (
        "left as it was"
    )


def count_copied_bytes(draft: nn.Module, parts: list[Part]) -> int:
    """Bytes that vLLM's loaders copy into a draft from these parts.

    The loaders do nothing else in the pause.
    """
    copied = 0

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal copied
            # By the source: this draft is made in float32, and the checkpoint is in bfloat16.
            copied += args[1].nbytes if func is torch.ops.aten.copy_.default else 0
            return func(*args, **(kwargs or {}))

    def load() -> Iterator[tuple[str, torch.Tensor]]:
        for part in parts:
            shape = part.whole if part.slice is None else part.slice.shape(part.whole)
            values = torch.empty(*shape, dtype=part.dtype, device="meta")
            yield (
                part.name,
                values if part.slice is None else Sliced.holding(values, part.slice, part.whole),
            )

    with Copies(), torch.no_grad():
        draft.load_weights(load())  # type: ignore[operator]
    return copied


def make_vllm_llama(config: LlamaConfig, folder: Path) -> nn.Module:
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.models.llama import LlamaForCausalLM

    config.save_pretrained(folder)
    settings = VllmConfig(
        model_config=ModelConfig(str(folder), dtype="bfloat16", skip_tokenizer_init=True)
    )
    with set_current_vllm_config(settings), torch.device("meta"):
        return LlamaForCausalLM(vllm_config=settings)


def test_a_loader_that_needs_values_makes_every_rank_read_the_whole_draft() -> None:
    class Draft(nn.Linear):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.weight.data[:2].copy_(tensor[: int(tensor.sum())])

    draft = Draft(4, 4)
    assert trace_slices(draft, nn.Module(), {"weight": torch.empty(4, 4, device="meta")}) == {}
    assert not draft.weight.is_meta
