"""Loading new draft weights into a running worker, and a checksum to prove the target untouched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from redraft.heads.files.artifact import VOLATILE_CONFIG_KEYS, safetensors_header
from redraft.heads.files.folder import find_quantization
from redraft.online.engine.fused import find_fused, refill, refill_mask, without_build

CHECKSUM_CHUNK = 1 << 22
"""Elements summed at a time; the temporaries take 64 MB."""

HASH_CHUNK_BYTES = 16 << 20

UNSUPPORTED_METHODS = {"dspark"}
"""Methods of vLLM whose drafts cannot be swapped: it serves them with its V2 runner only."""


def require_same_layout(current: Path, candidate: Path) -> None:
    """Raise ValueError unless `candidate` has the config and exactly the tensors of `current`, the loaded draft.

    vLLM's loaders accept a missing tensor or a changed setting without a word; only acceptance would fall.

    Raises: ValueError naming the difference.
    """
    settings, wanted_settings = _read_settings(candidate), _read_settings(current)
    require_same_quantization(candidate.name, settings, wanted_settings)
    changed = _find_differences(settings, wanted_settings)
    if changed:
        raise ValueError(f"{candidate.name} differs from the loaded draft in config.json: {', '.join(changed)}")
    shapes, wanted_shapes = _read_shapes(candidate), _read_shapes(current)
    different = _find_differences(shapes, wanted_shapes)
    if different:
        name = different[0]
        raise ValueError(
            f"{candidate.name} differs from the loaded draft in {len(different)} tensors: "
            f"{name} is {shapes.get(name, 'absent')} instead of {wanted_shapes.get(name, 'absent')}"
        )


def require_same_quantization(version: str, settings: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError unless the config.json of a version quantises as that of the loaded draft.

    vLLM makes the layers of a quantised draft when it starts, and these cannot take other weights.

    Raises: ValueError with the cure.
    """
    found, served = find_quantization(settings), find_quantization(wanted)
    if found != served:
        raise ValueError(
            f"{version} is {found or 'not quantised'}, the loaded draft is {served or 'not quantised'}: quantise "
            f"{version} like that one and publish it again, or restart the server with {version}. A draft that vLLM "
            "quantises itself (--draft-quantization) is replaced by plain weights"
        )


def require_same_shared(current: Path, candidate: Path, files: Sequence[Path], shared: set[str]) -> None:
    """Raise ValueError unless both drafts bring the same tensors for the modules shared with the target, or none.

    At start vLLM shares embedding and head if the draft brings none, or a bit-identical copy of the target's. It
    decides this once. A draft that brings different ones later could be loaded only by overwriting the target's.

    Reads without safetensors, whose page faults would hold the engine's thread while a storage hangs.

    Args:
        current: Folder of the loaded draft.
        candidate: Folder of the draft to load.
        files: The candidate's weights.
        shared: Names of the modules.

    Raises: ValueError naming the tensor.
    """
    own, wanted = _hash_tensors(files, shared), _hash_tensors(_find_weights(current), shared)
    different = _find_differences(own, wanted)
    if different:
        raise ValueError(
            f"{candidate.name} brings a different {different[0]}, but the loaded draft shares the target's: "
            f"restart the server with {candidate.name}"
        )


def load_draft(worker: Any, files: Sequence[Path]) -> None:
    """Load the weights in `files` into the worker's draft, between two engine steps.

    Whatever happens, the target stays as it was, and the draft can still run and be loaded again. After an exception
    the draft's values are undefined until a load succeeds.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    draft = runner.get_draft_model()
    draft_config = worker.vllm_config.speculative_config.draft_model_config
    fused = find_fused(draft)
    with (
        set_current_vllm_config(worker.vllm_config),
        torch.inference_mode(False),  # a tensor made in inference mode could not be written in place later
        torch.no_grad(),
        torch.device(worker.device),
        without_shared_modules(draft, runner.get_model()) as shared,
        without_build(fused),
    ):
        # vLLM repacks weights (for the CPU, for quantization) and frees the tensors load_weights writes to.
        initialize_layerwise_reload(draft)
        try:
            draft.load_weights(_read_tensors(files, shared))
        finally:
            # Also after an error: until this call the layers are meta tensors, and the next step would end the engine.
            finalize_layerwise_reload(draft, draft_config)
        if fused is not None:
            tensors = dict(_read_tensors(files, shared))
            refill(fused, tensors, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        refill_mask(getattr(runner, "drafter", None), _read_tensors(files, shared))


def shared_modules(draft: nn.Module, target: nn.Module) -> set[str]:
    """Attribute names, in the draft, of the modules of the target."""
    return {name for _, name, _ in _find_shared(draft, {id(module) for module in target.modules()})}


@contextmanager
def without_shared_modules(draft: nn.Module, target: nn.Module) -> Iterator[set[str]]:
    """Detach the modules shared with the target (embedding, head), and yield the names.

    Loading a draft's embedding or head into a shared module would overwrite the target.

    Raises: ValueError if the draft still shares a tensor with the target.
    """
    shared = list(_find_shared(draft, {id(module) for module in target.modules()}))
    for parent, name, _ in shared:
        parent._modules[name] = None
    try:
        targets = {id(parameter) for parameter in target.parameters()}
        for name, parameter in draft.named_parameters():
            if id(parameter) in targets:
                raise ValueError(f"the draft's {name} is a tensor of the target: it cannot be swapped")
        yield {name for _, name, _ in shared}
    finally:
        for parent, name, module in shared:
            parent._modules[name] = module


@torch.no_grad()
def checksum(model: nn.Module) -> str:
    """64 hex digits that change if any weight changes, repacked ones included. About as fast as reading the weights.

    Not cryptographic: it shows whether anything was overwritten, not who made the weights.
    """
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_compute_sums(tensor)}".encode())
    for name, module in model.named_modules():
        # vLLM's CPU build packs a linear layer's weight into a closure and leaves an empty tensor instead.
        if hasattr(module, "cpu_linear") and getattr(module, "weight", torch.ones(1)).numel() == 0:
            digest.update(f"{name} {_compute_sums(_compute_response(module))}".encode())
    return digest.hexdigest()


def _compute_sums(tensor: Tensor) -> tuple[int, int]:
    """Sum and position-weighted sum of the tensor's bits, modulo 2**64."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    plain, weighted = 0, 0  # a plain sum would not change if two values traded places
    for begin in range(0, len(words), CHECKSUM_CHUNK):
        chunk = words[begin : begin + CHECKSUM_CHUNK].long()
        odd = torch.arange(2 * begin + 1, 2 * (begin + len(chunk)), 2, device=chunk.device)
        plain += int(chunk.sum())
        weighted += int((chunk * odd).sum())
    return plain % 2**64, weighted % 2**64


def _compute_response(linear: Any) -> Tensor:
    """Output of a layer for a fixed input, used if vLLM has packed the weights into an unreadable form."""
    weight = linear.weight
    generator = torch.Generator().manual_seed(0)
    # A replicated layer, such as the gate of a mixture of experts, has no share of each rank.
    num_inputs = getattr(linear, "input_size_per_partition", None) or linear.input_size
    probe = torch.randn(4, num_inputs, generator=generator).to(weight.dtype)
    answer: Tensor = linear.cpu_linear(probe, weight, None)
    return answer


def _find_shared(module: nn.Module, owned: set[int]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for name, child in module._modules.items():
        if child is None:
            continue
        if id(child) in owned:
            yield module, name, child
        else:
            yield from _find_shared(child, owned)


def _find_weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _read_tensors(files: Sequence[Path], shared: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors outside the shared modules."""
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if shared.isdisjoint(name.split(".")):
                    yield name, file.get_tensor(name)


def _hash_tensors(files: Sequence[Path], shared: set[str]) -> dict[str, tuple[str, list[int], str]]:
    """Type, shape and SHA-256 of the checkpoint's tensors inside the shared modules, by name."""
    found = {}
    for path in files:
        header = safetensors_header(path)
        with path.open("rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            for name, entry in header.items():
                if shared.isdisjoint(name.split(".")):
                    continue
                begin, end = entry["data_offsets"]
                file.seek(data + begin)
                digest = hashlib.sha256()
                for rest in range(end - begin, 0, -HASH_CHUNK_BYTES):
                    digest.update(file.read(min(rest, HASH_CHUNK_BYTES)))
                found[name] = (entry["dtype"], entry["shape"], digest.hexdigest())
    return found


def _find_differences(values: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Keys whose values differ, or exist on one side only."""
    return sorted(key for key in values.keys() | wanted.keys() if values.get(key) != wanted.get(key))


def _read_settings(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key not in VOLATILE_CONFIG_KEYS}


def _read_shapes(folder: Path) -> dict[str, list[int]]:
    return {name: entry["shape"] for path in _find_weights(folder) for name, entry in safetensors_header(path).items()}
