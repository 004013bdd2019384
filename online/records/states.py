"""Hidden states in a record: bfloat16, or 8-bit floats with a scale for each state.

    bfloat16   D numbers of two bytes
    float8     D codes of a byte (e4m3fn, arXiv 2209.05433), then a float32 scale, the factor of all D

numpy has neither type, so bfloat16 is handled as its bits, in uint16. H = tokens, L = states of one
token, D = size of each state, N = states, X = bytes of a state. `heads.nn.float8` writes the
states, and this module decodes them without torch.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

HiddenFormat = Literal["bfloat16", "float8"]

SCALE_BYTES = 4
NAN = 0x7FC0  # Bits of a NaN in bfloat16.


def state_bytes(hidden_format: HiddenFormat, size: int) -> int:
    return size + SCALE_BYTES if hidden_format == "float8" else 2 * size


BLOCK = 1 << 20
"""Number of values decoded at once, because temporary arrays for all values would take 16 times the
size of the record.
"""


def decode_float8(codes_HLX: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Decode states, each with D codes and a scale, to the nearest bfloat16 numbers.

    Returns their bits, [H, L, D].
    """
    size = codes_HLX.shape[-1] - SCALE_BYTES
    codes_NX = codes_HLX.reshape(-1, size + SCALE_BYTES)
    words_ND = np.empty((len(codes_NX), size), np.uint16)
    num_states = max(1, BLOCK // size)
    for begin in range(0, len(codes_NX), num_states):
        block = slice(begin, begin + num_states)
        words_ND[block] = _decode_block(codes_NX[block])
    return words_ND.reshape(*codes_HLX.shape[:-1], size)


def _decode_block(codes_NX: NDArray[np.uint8]) -> NDArray[np.uint16]:
    scale_N1 = np.ascontiguousarray(codes_NX[:, -SCALE_BYTES:]).view("<f4")  # [N, 4] bytes
    values_ND = _VALUES[codes_NX[:, :-SCALE_BYTES]]
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # codes of a forged record; infinite values are rejected later
        values_ND *= scale_N1
        bits_ND = values_ND.view(np.uint32)
        # Round to nearest, and ties to even.
        words_ND = ((bits_ND + 0x7FFF + ((bits_ND >> 16) & 1)) >> 16).astype(np.uint16)
    words_ND[np.isnan(values_ND)] = NAN  # rounding may have turned NaN into a number
    return words_ND


def _list_values() -> NDArray[np.float32]:
    """List the values of the 256 codes.

    A code has a sign bit, 4 exponent bits with bias 7, and 3 fraction bits. There is no infinity.
    """
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    # E.g. code 0x7E has exponent 15 and fraction 6, so it is 1.75 * 2^8 = 448, the largest.
    # Exponent 0 has no leading 1.
    size = np.where(
        exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7)
    )
    # 0x7F and 0xFF are the only NaNs.
    size[(code & 127) == 127] = np.nan
    return np.where(code >= 128, -size, size).astype(np.float32)


_VALUES = _list_values()
