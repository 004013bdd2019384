"""Hidden states in 8 bits.

A state has D one-byte codes (e4m3fn, arXiv 2209.05433), followed by one float32 scale for all D.

Records use the same bytes (`online.records.states` decodes them without torch). X = D +
SCALE_BYTES.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
FLOAT8_MAX = 448.0  # The largest number of e4m3fn; the scale maps the largest of a state to it.
PIECE_ROWS = 4096  # States encoded or decoded at a time, so the copy in float32 stays small.


@torch.no_grad()
def encode_float8(states_HLD: Tensor) -> Tensor:
    """Encode states [..., D] in 8 bits, as uint8 [..., D + SCALE_BYTES].

    The scale maps each state's largest value to the largest value of e4m3fn. If a value of the
    state is not finite, neither is the scale.
    """
    states_ND = states_HLD.flatten(0, -2)
    codes_NX = states_ND.new_empty(
        len(states_ND), states_ND.shape[1] + SCALE_BYTES, dtype=torch.uint8
    )
    for start in range(0, len(states_ND), PIECE_ROWS):
        values_nD = states_ND[start : start + PIECE_ROWS].float()
        scale_n1 = values_nD.abs().amax(-1, keepdim=True) / FLOAT8_MAX
        scale_n1 = torch.where(scale_n1 == 0, 1, scale_n1)
        codes_nD = (values_nD / scale_n1).to(torch.float8_e4m3fn)
        piece_nX = codes_NX[start : start + PIECE_ROWS]
        piece_nX[:, :-SCALE_BYTES] = codes_nD.view(torch.uint8)
        piece_nX[:, -SCALE_BYTES:] = scale_n1.view(torch.uint8)
    return codes_NX.view(*states_HLD.shape[:-1], codes_NX.shape[1])


@torch.no_grad()
def decode_float8(codes_HLX: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode the states from `encode_float8`, [..., D], rounding once to `dtype`.

    Zero bytes decode to a zero state.
    """
    codes_NX = codes_HLX.flatten(0, -2)
    states_ND = codes_NX.new_empty(len(codes_NX), codes_NX.shape[1] - SCALE_BYTES, dtype=dtype)
    for start in range(0, len(codes_NX), PIECE_ROWS):
        piece_nX = codes_NX[start : start + PIECE_ROWS]
        values_nD = piece_nX[:, :-SCALE_BYTES].view(torch.float8_e4m3fn).float()
        states_ND[start : start + PIECE_ROWS] = values_nD * scales(piece_nX)
    return states_ND.view(*codes_HLX.shape[:-1], -1)


def scales(codes_HLX: Tensor) -> Tensor:
    """The scales of encoded states, float32 [..., 1]."""
    # Copy, because torch rejects a float32 address that is not divisible by 4.
    return (
        codes_HLX[..., -SCALE_BYTES:]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.float32)
    )
