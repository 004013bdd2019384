"""New draft weights into a running worker, and the proof that the target was not touched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from heads.artifact import VOLATILE_CONFIG_KEYS, safetensors_header

CHECKSUM_CHUNK = 1 << 22
"""Elements summed at a time: its temporaries are 64 MB."""

UNSUPPORTED_METHODS = {
    # its fused key-value buffers are built from the weights once, at load
    "dflash",
    "dspark",
}


def model_folder(model: str) -> Path:
    """The folder of a model that vLLM has loaded, from its path or its hub name.

    Raises: FileNotFoundError where the hub's cache does not have it.
    """
    if Path(model).is_dir():
        return Path(model).resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def require_same_layout(current: Path, candidate: Path) -> None:
    """Return where `candidate` has the configuration and exactly the tensors of `current`, the draft that is loaded.

    vLLM's loaders miss neither a tensor that is absent nor a setting that has changed: both would only cost acceptance.

    Raises: ValueError naming what differs.
    """
    settings, wanted_settings = _settings(candidate), _settings(current)
    changed = sorted(
        key for key in settings.keys() | wanted_settings.keys() if settings.get(key) != wanted_settings.get(key)
    )
    if changed:
        raise ValueError(f"{candidate.name} differs from the draft that is loaded in config.json: {', '.join(changed)}")
    shapes, wanted_shapes = _shapes(candidate), _shapes(current)
    different = sorted(
        name for name in shapes.keys() | wanted_shapes.keys() if shapes.get(name) != wanted_shapes.get(name)
    )
    if different:
        name = different[0]
        raise ValueError(
            f"{candidate.name} differs from the draft that is loaded in {len(different)} tensors: "
            f"{name} is {shapes.get(name, 'absent')} instead of {wanted_shapes.get(name, 'absent')}"
        )


def require_same_shared(current: Path, candidate: Path, shared: set[str]) -> None:
    """Return where both bring the same tensors, or none, for the modules that the draft shares with the target.

    vLLM shares embedding and head where a draft brings none, or the target's bit by bit. It decides so once, at start:
    a draft that brings its own later can not be given it without writing into the target.

    Raises: ValueError naming the tensor.
    """
    own, wanted = dict(_tensors(candidate, shared, inside=True)), dict(_tensors(current, shared, inside=True))
    for name in sorted(own.keys() | wanted.keys()):
        if name not in own or name not in wanted or not torch.equal(own[name], wanted[name]):
            raise ValueError(
                f"{candidate.name} has a {name} of its own, but the draft that is loaded shares the target's: "
                f"restart the server with {candidate.name}"
            )


def load_draft(draft: nn.Module, target: nn.Module, folder: Path, vllm_config: Any, device: torch.device) -> None:
    """Load the weights in `folder` into the draft, between two engine steps.

    Whatever happens, the target is as before and every layer of the draft can be run and loaded again; after an
    exception the draft's values are undefined until another load succeeds.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model: Any = draft
    draft_config = vllm_config.speculative_config.draft_model_config
    with (
        set_current_vllm_config(vllm_config),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.device(device),
        without_shared_modules(draft, target) as shared,
    ):
        # vLLM repacks weights (for the CPU, for quantization) and drops what load_weights alone would write to.
        initialize_layerwise_reload(draft)
        try:
            model.load_weights(_tensors(folder, shared, inside=False))
        finally:
            finalize_layerwise_reload(draft, draft_config)


def shared_modules(draft: nn.Module, target: nn.Module) -> set[str]:
    """Names of the modules that are the target's own, as attributes of their parents in the draft."""
    return {name for _, name, _ in _shared(draft, {id(module) for module in target.modules()})}


@contextmanager
def without_shared_modules(draft: nn.Module, target: nn.Module) -> Iterator[set[str]]:
    """The draft without the modules that it shares with the target (embedding, head); their names.

    Loading a draft's embedding or head into a shared module would overwrite the target.

    Raises: ValueError where the draft still shares a tensor with the target.
    """
    shared = list(_shared(draft, {id(module) for module in target.modules()}))
    for parent, name, _ in shared:
        parent._modules[name] = None
    try:
        targets = {id(parameter) for parameter in target.parameters()}
        for name, parameter in draft.named_parameters():
            if id(parameter) in targets:
                raise ValueError(f"the draft's {name} is a tensor of the target: it can not be swapped")
        yield {name for _, name, _ in shared}
    finally:
        for parent, name, module in shared:
            parent._modules[name] = module


@torch.no_grad()
def checksum(model: nn.Module) -> str:
    """64 hex digits that change when any weight of the model does, wherever it is kept. About as fast as reading it.

    Not cryptographic: it proves that nothing was overwritten, not who made the weights.
    """
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sums(tensor)}".encode())
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear") and getattr(module, "weight", torch.ones(1)).numel() == 0:
            digest.update(f"{name} {_sums(_response(module))}".encode())
    return digest.hexdigest()


def _sums(tensor: Tensor) -> tuple[int, int]:
    """Sum and position-weighted sum of the tensor's bits, modulo 2**64."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    plain, weighted = 0, 0
    for begin in range(0, len(words), CHECKSUM_CHUNK):
        chunk = words[begin : begin + CHECKSUM_CHUNK].long()
        odd = torch.arange(2 * begin + 1, 2 * (begin + len(chunk)), 2, device=chunk.device)
        plain += int(chunk.sum())
        weighted += int((chunk * odd).sum())
    return plain % 2**64, weighted % 2**64


def _response(linear: Any) -> Tensor:
    """What a layer answers to a fixed input, where vLLM has packed its weights into a form that can not be read."""
    weight = linear.weight
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(4, linear.input_size_per_partition, generator=generator).to(weight.dtype)
    answer: Tensor = linear.cpu_linear(probe, weight, None)
    return answer


def _shared(module: nn.Module, owned: set[int]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for name, child in module._modules.items():
        if child is None:
            continue
        if id(child) in owned:
            yield module, name, child
        else:
            yield from _shared(child, owned)


def _tensors(folder: Path, modules: set[str], *, inside: bool) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors inside those modules, or all others."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if modules.isdisjoint(name.split(".")) != inside:
                    yield name, file.get_tensor(name)


def _settings(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key not in VOLATILE_CONFIG_KEYS}


def _shapes(folder: Path) -> dict[str, list[int]]:
    paths = sorted(folder.glob("*.safetensors"))
    return {name: entry["shape"] for path in paths for name, entry in safetensors_header(path).items()}
