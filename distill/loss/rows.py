"""Compare rows of the fused divergence on GPUs, in three PyTorch operations.

These operations run the Triton kernels of `distill.loss.kernels`.

C = target rows of a chunk, M = draft rows compared with them, V = target vocabulary, W = draft
vocabulary, K = kept top-k ids.

Because they are operations, they run under `torch.compile`, and `redraft plan` counts them without
a GPU. On a CPU, they run only in Triton's interpreter, for tests.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

TILE_PER_WARP = 512  # Number of columns per 32 threads, i.e. 16 per thread.

SHORT_ROW_THREADS, LONG_ROW_THREADS = 256, 1024
"""Threads per program for short and for long rows. The latter is the maximum; with it, one row at a
time fills a multiprocessor's registers.
"""

SHORT_ROW_BYTES = 1 << 16
"""Maximum row length in bytes for which a multiprocessor runs several programs at once. A program
reads its row two or three times, and the rows of all running programs should stay in the GPU's
cache between the reads.
"""


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_kernels(logits_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels run for these logits: on a GPU with Triton, except in float64.

    Tensors on `meta` count as tensors on such a GPU.
    """
    is_gpu = device.type == "meta" or (device.type == "cuda" and has_triton())
    # The kernels compute in float32. float64 is needed for gradcheck, which uses the plain form.
    return is_gpu and logits_dtype != torch.float64


def orders_memory() -> bool:
    """Whether Triton's barrier orders the loads and stores of a program's threads.

    Compiled for AMD's gfx942, the barrier does not wait for stores, so `top_k_rows` could load a
    value that it has already overwritten.
    """
    return torch.version.hip is None


def _kernels() -> Any:
    from redraft.distill.loss import kernels

    return kernels


def _launch(logits_MW: Tensor) -> dict[str, int]:
    """Return the warps per program and the columns per tile (a power of 2)."""
    width = logits_MW.shape[1]
    is_short = width * logits_MW.element_size() <= SHORT_ROW_BYTES
    threads = SHORT_ROW_THREADS if is_short else LONG_ROW_THREADS
    return {
        # AMD's have 64 threads
        "num_warps": threads // (64 if torch.version.hip else 32),
        "BLOCK": min(TILE_PER_WARP * threads // 32, 1 << max(width - 1, 1).bit_length()),
    }


@torch.library.custom_op("redraft::target_rows", mutates_args=())
def target_rows(
    logits_CV: Tensor, draft_ids_W: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute the target's side of a comparison from its logits.

    Returns (logits on the draft's ids [C, W], or an empty tensor if there are no draft ids; log sum
    exp over V and p's mass on W [2, C]). Both sums are computed from logits / temperature.
    """
    rows, width = logits_CV.shape
    kept_CW, sums_2C = _target_results(logits_CV, draft_ids_W)
    if rows:
        _kernels().target_rows[(rows,)](
            logits_CV,
            # The kernel needs a pointer here, but reads it only if REDUCED.
            logits_CV if draft_ids_W is None else draft_ids_W,
            kept_CW,
            sums_2C,
            rows,
            width,
            kept_CW.shape[1],
            1 / temperature,
            REDUCED=draft_ids_W is not None,
            **_launch(logits_CV),
        )
    return kept_CW, sums_2C


# The operation's fake implementation, which also allocates its outputs, so that shapes and dtypes
# are defined once.
@torch.library.register_fake("redraft::target_rows")  # type: ignore[untyped-decorator]
def _target_results(
    logits_CV: Tensor, draft_ids_W: Tensor | None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    rows = logits_CV.shape[0]
    kept_CW = logits_CV.new_empty(rows, 0 if draft_ids_W is None else draft_ids_W.shape[0])
    return kept_CW, logits_CV.new_empty(2, rows, dtype=torch.float32)


@torch.library.custom_op("redraft::draft_rows", mutates_args=("logits_MW",))
def draft_rows(
    logits_MW: Tensor,
    target_CW: Tensor,
    sums_2C: Tensor,
    place_M: Tensor,
    scale_M: Tensor,
    label_C: Tensor | None,
    name: str,
    temperature: float,
    beta: float,
    eta: float,
    inverse_cap: float = 0.0,
) -> Tensor:
    """Return divergence, alpha and alpha_greedy of every row, [3, M].

    The logits are overwritten by `scale_M` times the gradient with respect to them. `target_CW` are
    the target's logits on the draft's ids, `sums_2C` are as `target_rows` returns them, and
    `place_M` is the target row to compare each draft row with. `label_C` is the label's column in
    the draft's logits, or -1. `inverse_cap` is 1 / cap if the draft's logits were capped; 0 means
    that there is no cap.
    """
    values_3M: Tensor = _draft_results(logits_MW)
    rows, width = logits_MW.shape
    if rows:
        _kernels().draft_rows[(rows,)](
            logits_MW,
            target_CW,
            sums_2C,
            place_M.argsort(),
            place_M,
            scale_M,
            # The kernel needs a pointer here too, but reads it only for cross_entropy.
            place_M if label_C is None else label_C,
            values_3M,
            rows,
            len(target_CW),
            width,
            1 / temperature,
            beta,
            eta,
            inverse_cap * temperature,
            NAME=name,
            **_launch(logits_MW),
        )
    return values_3M


@torch.library.custom_op("redraft::top_k_rows", mutates_args=("logits_MW",))
def top_k_rows(
    logits_MW: Tensor,
    columns_CK: Tensor,
    log_p_CX: Tensor,
    place_M: Tensor,
    scale_M: Tensor,
    label_C: Tensor | None,
    name: str,
    beta: float,
    eta: float,
    inverse_cap: float = 0.0,
) -> Tensor:
    """Like `draft_rows`, for the target's top k at temperature 1.

    `columns_CK` is the column of each kept id in the draft's logits, or -1; columns are distinct
    within a row. `log_p_CX` is log p of the kept ids and of the tail, [C, K + 1].
    """
    values_3M: Tensor = _draft_results(logits_MW)
    (rows, width), outcomes = logits_MW.shape, log_p_CX.shape[1]
    if rows:
        _kernels().top_k_rows[(rows,)](
            logits_MW,
            columns_CK,
            log_p_CX,
            place_M,
            scale_M,
            place_M if label_C is None else label_C,
            values_3M,
            rows,
            width,
            outcomes - 1,
            beta,
            eta,
            inverse_cap,
            NAME=name,
            **_launch(logits_MW),
            # E.g. K = 32 gives 33 outcomes, in 64 lanes.
            OUTCOMES=1 << (outcomes - 1).bit_length(),
        )
    return values_3M


@torch.library.register_fake("redraft::draft_rows")  # type: ignore[untyped-decorator]
@torch.library.register_fake("redraft::top_k_rows")  # type: ignore[untyped-decorator]
def _draft_results(logits_MW: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits_MW.new_empty(3, logits_MW.shape[0], dtype=torch.float32)
