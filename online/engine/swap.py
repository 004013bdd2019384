"""Load new draft weights into a running worker; checksums prove that the target is unchanged."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from redraft.files.artifact import VOLATILE_CONFIG_KEYS, safetensors_header
from redraft.files.folder import find_quantization, read_config
from redraft.online.engine.copies import refill, without_build
from redraft.online.engine.trainer_files import describe_tensors

logger = logging.getLogger("vllm.redraft")

# Number of column sums in the checksum; a prime, so that the length of no row is a multiple.
COLUMNS = 4093
HASH_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The properties that a draft must share with the draft it replaces.

    A worker keeps the layout of its draft, because the draft's folder may be removed from the
    registry in the meantime.
    """

    folder: Path
    settings: Mapping[str, Any]
    """Contents of config.json, without the keys that have no effect."""
    tensors: Mapping[str, str]
    """Shape and dtype of every tensor, by name."""
    shared: Mapping[str, tuple[str, list[int], str]] | None = None
    """Dtype, shape and SHA-256 of the tensors that may be shared with the target's modules; None
    until they have been read.
    """

    @staticmethod
    def read(folder: Path) -> Layout:
        """Read a draft's layout from config.json and the headers of its weight files."""
        config = read_config(folder)
        return Layout(
            folder=folder,
            settings={
                key: value for key, value in config.items() if key not in VOLATILE_CONFIG_KEYS
            },
            tensors=describe_tensors(_find_weights(folder)),
        )

    def with_shared(self, shared: set[str]) -> Layout:
        """Return the layout with hashes of the tensors for the modules named in `shared`.

        It reads the weights in the folder, or nothing if no tensor belongs to these modules. It
        does not use the safetensors library, whose page faults would block the engine thread while
        the storage hangs.

        Raises:
            ValueError: the folder and its tensors are gone.
        """
        if self.shared is not None:
            return self
        # `shared` contains attribute names, e.g. `embed_tokens`, which matches
        # `model.embed_tokens.weight`.
        if all(shared.isdisjoint(name.split(".")) for name in self.tensors):
            return replace(self, shared={})
        if not self.folder.is_dir():
            raise ValueError(
                f"{self.folder}, the loaded draft, was deleted with its embeddings: restart the server"
            )
        return replace(self, shared=_hash_tensors(_find_weights(self.folder), shared))


def require_same_layout(current: Layout, candidate: Layout) -> None:
    """Refuse a candidate whose settings or tensors differ from those of the loaded draft.

    vLLM's loaders silently accept a missing tensor or a changed setting; only acceptance would
    fall.

    Raises:
        ValueError: the message states the difference and what to do.
    """
    name = candidate.folder.name
    cure = f"restart the server with {name}, or publish a draft with the loaded draft's layout"
    require_same_quantization(name, candidate.settings, current.settings)
    changed = _find_differences(candidate.settings, current.settings)
    if changed:
        raise ValueError(
            f"{name} differs from the loaded draft in config.json ({', '.join(changed)}): {cure}"
        )
    different = _find_differences(candidate.tensors, current.tensors)
    if different:
        found, wanted = (
            layout.tensors.get(different[0], "absent") for layout in (candidate, current)
        )
        raise ValueError(
            f"{name} differs from the loaded draft in {len(different)} tensors ({different[0]} is "
            f"{found} instead of {wanted}): {cure}"
        )


def require_same_quantization(
    version: str, settings: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    """Refuse a version whose quantisation in config.json differs from the loaded draft's.

    vLLM creates a draft's layers when it starts, and they accept only weights with the same
    quantisation.

    Raises:
        ValueError: the two differ.
    """
    found, served = find_quantization(settings), find_quantization(wanted)
    if found != served:
        raise ValueError(
            f"{version} is {found or 'not quantised'}, but the loaded draft is "
            f"{served or 'not quantised'}: quantise {version} in the same way and publish it "
            f"again, or restart the server with {version}. "
            "For a draft that vLLM quantises itself, publish unquantised weights"
        )


def require_same_shared(current: Layout, candidate: Layout) -> None:
    """Refuse a draft with different tensors for the modules shared with the target.

    vLLM shares the target's embedding and head if the draft has none, or has a bit-identical copy.
    It decides this only at start. A later draft with a different embedding or head could be loaded
    only by overwriting the target's tensors.

    Raises:
        ValueError: the message names the tensor.
    """
    name = candidate.folder.name
    assert candidate.shared is not None
    assert current.shared is not None
    different = _find_differences(candidate.shared, current.shared)
    if different:
        raise ValueError(
            f"{name} contains a different {different[0]}, but the loaded draft shares the "
            f"target's: "
            f"restart the server with {name}"
        )


def load_draft(worker: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load a checkpoint's tensors into a worker's draft, between two engine steps.

    The target stays unchanged, even after an exception. The draft can then still run and be loaded
    again. After an exception, its values are undefined until a load succeeds.
    """
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    runner = worker.model_runner
    draft, target = runner.get_draft_model(), runner.get_model()
    with loading(worker), without_shared_modules(draft, target) as shared, without_build(draft):
        mine = {
            name: tensor for name, tensor in tensors.items() if shared.isdisjoint(name.split("."))
        }
        # vLLM repacks weights (for the CPU or for quantisation), and frees the tensors that
        # load_weights writes to.
        initialize_layerwise_reload(draft)
        draft_config = worker.vllm_config.speculative_config.draft_model_config
        try:
            draft.load_weights(iter(mine.items()))
            finalize_layerwise_reload(draft, draft_config)
        except BaseException:
            # Until then, the layers are meta tensors, and the next step would crash the engine.
            end_load(draft, draft_config)
            raise
        rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        refill(runner, draft, mine, rank, num_ranks)


def end_load(model: nn.Module, model_config: Any) -> None:
    """End a failed vLLM load.

    If a layer has received tensors that it cannot process, end the load layer by layer.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, layerwise

    try:
        finalize_layerwise_reload(model, model_config)
    except Exception:
        logger.exception(
            "redraft: a failed load could not be completed, so the old weights are restored"
        )
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


@contextmanager
def loading(worker: Any) -> Iterator[None]:
    """Return the context in which vLLM's loaders run."""
    from vllm.config import set_current_vllm_config

    with (
        set_current_vllm_config(worker.vllm_config),
        torch.inference_mode(
            False
        ),  # a tensor created in inference mode could not be written in place later
        torch.no_grad(),
        torch.device(worker.device),
    ):
        yield


def shared_modules(draft: nn.Module, target: nn.Module) -> set[str]:
    return {name for _, name, _ in _find_shared(draft, {id(module) for module in target.modules()})}


def count_cache(draft: nn.Module, target: nn.Module) -> int:
    """Return the number of bytes that a draft's layers take in the KV cache.

    The target's part of the cache, which the draft may also read, does not count.
    """

    theirs = _find_cache(target)
    return sum(mine.nbytes for place, mine in _find_cache(draft).items() if place not in theirs)


def _find_cache(*models: nn.Module | None) -> dict[int, Tensor]:
    """Return the KV-cache tensors that these models read, by memory address."""
    modules = [module for model in models if model is not None for module in model.modules()]
    tensors = tree_leaves([getattr(module, "kv_cache", ()) for module in modules])
    return {tensor.data_ptr(): tensor for tensor in tensors if isinstance(tensor, Tensor)}


@contextmanager
def without_shared_modules(draft: nn.Module, target: nn.Module) -> Iterator[set[str]]:
    """Detach the modules shared with the target (embedding, head), and yield their names.

    Loading a draft's embedding or head into a shared module would overwrite the target.

    Raises:
        ValueError: the draft still shares a tensor with the target.
    """
    shared = list(_find_shared(draft, {id(module) for module in target.modules()}))
    for parent, name, _ in shared:
        # Set None instead of deleting, so that reading the attribute returns None and the order of
        # the modules is preserved.
        parent._modules[name] = None
    try:
        targets = {id(parameter) for parameter in target.parameters()}
        for name, parameter in draft.named_parameters():
            if id(parameter) in targets:
                raise ValueError(
                    f"the draft's {name} is a tensor of the target: it cannot be swapped"
                )
        yield {name for _, name, _ in shared}
    finally:
        for parent, name, module in shared:
            parent._modules[name] = module


@torch.no_grad()
def checksum(model: nn.Module) -> str:
    """Return 64 hex digits that change if any weight changes, including repacked weights.

    The function reads every weight once. The checksum is not cryptographic: it detects accidental
    changes, not forged weights.
    """
    tensors = {
        **dict(model.named_buffers()),
        **{name: read() for name, read in find_weights(model).items()},
    }
    digest = hashlib.sha256()
    sums = [compute_sums(tensor) for tensor in tensors.values()]
    # Copy all sums to the host at once, because every copy waits for the device.
    for (name, tensor), pair in zip(
        tensors.items(), torch.stack(sums).tolist() if sums else [], strict=True
    ):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {pair}".encode())
    return digest.hexdigest()


def is_finite(tensor: Tensor) -> Tensor:
    """Whether all values are finite: a scalar bool on the tensor's device."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2 or not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # NaN propagates through the sum, which needs no copy, unlike `isfinite` on all values.
    least, most = torch.aminmax(tensor.detach())
    return least.isfinite() & most.isfinite()


def clear_cache(*models: nn.Module | None) -> None:
    """Overwrite the cached keys and values of models with zeros."""
    for tensor in _find_cache(*models).values():
        tensor.zero_()


def find_weights(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return a function that reads each weight, by name.

    The function returns the weight in memory order or, for a packed weight, the layer's output for
    a fixed input.
    """
    weights: dict[str, Callable[[], Tensor]] = {
        name: partial(_in_memory_order, tensor) for name, tensor in model.named_parameters()
    }
    for name, module in model.named_modules():
        # vLLM's CPU build packs a linear layer's weight into a closure and leaves an empty tensor
        # instead.
        if hasattr(module, "cpu_linear") and getattr(module, "weight", torch.ones(1)).numel() == 0:
            weights[f"{name} packed"] = partial(_compute_response, module)
    return weights


def _in_memory_order(tensor: Tensor) -> Tensor:
    """View a weight in memory order, e.g. a float8 weight, which vLLM stores transposed.

    A copy might not fit on a full GPU.
    """
    return tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def compute_sums(tensor: Tensor) -> Tensor:
    """Return the sum and the position-weighted sum of a tensor's 64-bit words, modulo 2**64.

    The result is [2] on the tensor's device. Words whose distance is a multiple of COLUMNS have the
    same weight; rows of a weight matrix hardly ever lie at such a distance.
    """
    tensor = _in_memory_order(tensor)
    if not tensor.is_contiguous():
        # The view has gaps. Go piece by piece, because `contiguous` would copy the whole view.
        pieces = [
            compute_sums(piece.contiguous() if piece.dim() < 2 else piece) for piece in tensor
        ]
        places = torch.arange(1, 2 * len(pieces), 2, device=tensor.device)[:, None]
        return (torch.stack(pieces) * places).sum(0)
    bytes_ = tensor.view(-1).view(torch.uint8)
    # An int64 view must start at a multiple of 8 bytes. Up to 7 bytes remain before it, and up to 7
    # after it.
    first = min(-bytes_.storage_offset() % 8, len(bytes_))
    last = first + (len(bytes_) - first) // 8 * 8
    words = bytes_[first:last].view(torch.int64)
    num_in_rows = len(words) // COLUMNS * COLUMNS
    sums, rest = words[:num_in_rows].view(-1, COLUMNS).sum(0), words[num_in_rows:]
    sums[: len(rest)] += rest
    for outside, end in ((bytes_[:first], COLUMNS - 7), (bytes_[last:], COLUMNS)):
        sums[end - len(outside) : end] += outside
    # Odd factors are invertible modulo 2**64, so a change in one column always changes the second
    # sum.
    odd = torch.arange(1, 2 * COLUMNS, 2, device=sums.device)
    return torch.stack([sums.sum(), (sums * odd).sum()])


def _compute_response(linear: Any) -> Tensor:
    """Return the output of a linear layer for a fixed input.

    If vLLM has packed the weights into an unreadable form, this output is compared instead.
    """
    weight = linear.weight
    generator = torch.Generator().manual_seed(0)
    # A replicated layer, such as a mixture-of-experts gate, is not split across the ranks.
    num_inputs = getattr(linear, "input_size_per_partition", None) or linear.input_size
    probe = torch.randn(4, num_inputs, generator=generator).to(weight.dtype)
    answer: Tensor = linear.cpu_linear(probe, weight, None)
    return answer


def _find_shared(module: nn.Module, owned: set[int]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for name, child in module._modules.items():
        if child is None:
            continue
        # Skip everything below a shared module, because it belongs to the target.
        if id(child) in owned:
            yield module, name, child
        else:
            yield from _find_shared(child, owned)


def _find_weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _hash_tensors(files: Sequence[Path], shared: set[str]) -> dict[str, tuple[str, list[int], str]]:
    """Return dtype, shape and SHA-256 of the checkpoint's tensors in shared modules, by name."""
    found = {}
    for path in files:
        header = safetensors_header(path)
        with path.open("rb") as file:
            # A safetensors file has 8 bytes with the header's length, then the header, then the
            # tensors, whose offsets start at 0.
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


def _find_differences(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, or that exist on one side only."""
    return sorted(
        key for key in values.keys() | wanted.keys() if values.get(key) != wanted.get(key)
    )
