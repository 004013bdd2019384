"""Attention head sizes for which PyTorch's FlexAttention launches on a GPU.

PyTorch compiles FlexAttention with fixed tiles for each dtype and head size. If the tiles do not
fit into the GPU's shared memory, the kernel cannot be launched. The numbers below come from torch
2.13, compiled for RTX 4090, A100, H100 and B200.
"""

from typing import Any

import torch

from redraft.engine.hardware import Machine
from redraft.heads.family import Family
from redraft.heads.nn.causal_lm import PLAIN_ATTENTION

SMALLEST, LARGEST = 16, 256

TUNED = {
    (2, 64): 51_200, (2, 128): 98_304, (2, 192): 136_704, (2, 256): 151_552,
    (4, 64): 82_432, (4, 128): 147_968, (4, 256): 135_424,
}  # fmt: skip
"""Bytes of shared memory for head sizes with special tile sizes, by (bytes per number, head size).
"""

# For all other sizes: rows per tile, and number of tiles in shared memory at a time.
TILE_ROWS, NUM_TILES = 64, 5.25


def head_size(config: Any) -> int:
    """Return the size of a layer's queries and keys, from a `transformers` text config."""
    # In DeepSeek's config, `head_dim` is the size of only the rotated part of a key.
    size = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def require_head_size(what: str, config: Any, dtype: torch.dtype, machine: Machine) -> None:
    """Refuse a model whose attention, in `dtype`, would not launch on the GPU.

    `config` is the model's text config. AMD GPUs are not checked, because their tiles differ and
    are unknown.

    Raises:
        ValueError: the attention would not launch.
    """
    if machine.gpu is None or machine.is_rocm:
        return
    size, itemsize = head_size(config), dtype.itemsize
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(
            f"{what} has attention heads of size {size}, but FlexAttention on a GPU supports "
            f"{SMALLEST} to {LARGEST}: choose a different model, or train on a CPU "
            f"(ACCELERATE_USE_CPU=true)"
        )
    # Rows are padded to a power of 2: a head size of 160 takes 256 columns.
    usual = NUM_TILES * TILE_ROWS * (1 << (size - 1).bit_length()) * itemsize
    needed = TUNED.get((itemsize, size), usual)
    if needed <= machine.gpu_shared_bytes:
        return
    way_out = (
        "train in bfloat16 (--mixed-precision bf16)"
        if itemsize > 2
        else "use a GPU with more shared memory"
    )
    raise ValueError(
        f"{what} has attention heads of size {size}, for which FlexAttention needs "
        f"{needed / 1e3:.0f} kB of shared "
        f"memory in {str(dtype).removeprefix('torch.')}, but {machine.gpu} has only "
        f"{machine.gpu_shared_bytes / 1e3:.0f} kB: {way_out}"
    )


def require_model_heads(what: str, config: Any, dtype: torch.dtype, machine: Machine) -> None:
    """Apply `require_head_size` to a causal LM.

    Model types outside `PLAIN_ATTENTION` use PyTorch's own attention, and pass.
    """
    if config.model_type in PLAIN_ATTENTION:
        require_head_size(what, config, dtype, machine)


def require_draft_heads(
    family: Family, what: str, config: Any, dtype: torch.dtype, machine: Machine
) -> None:
    """Apply `require_head_size` to a draft.

    For a head, `config` is the `LlamaShape` of its layers, or the target's config if they have the
    same sizes.
    """
    if family.attention != "none":
        check = require_head_size if family.attention == "own" else require_model_heads
        check(what, config, dtype, machine)
