"""Hidden states in 8 bits, against torch's own type and numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from redraft.heads.nn.float8 import PIECE_ROWS, SCALE_BYTES, decode_float8, encode_float8, scales


def test_numbers_worked_out_by_hand() -> None:
    # The scale is 896 / 448 = 2. Between 16 and 32 the codes are 2 apart, so 33 / 2 = 16.5 becomes
    # 16; 19 / 2 = 9.5 has neighbours 9 and 10 and becomes the even code's, 10. Below 2^-6 they are
    # 2^-9 apart: 0.001 / 2 becomes 0.
    state_1D = torch.tensor([[896.0, -33.0, 19.0, 0.001, 0.0]])
    codes_1X = encode_float8(state_1D)
    assert codes_1X.dtype == torch.uint8
    assert codes_1X[0, :-SCALE_BYTES].tolist() == [0x7E, 0x80 | 0x58, 0x52, 0, 0]
    assert scales(codes_1X).tolist() == [[2.0]]
    assert decode_float8(codes_1X, torch.float32).tolist() == [[896.0, -32.0, 20.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_is_that_of_torch_with_a_scale_for_each_state(dtype: torch.dtype) -> None:
    states_NLD = torch.randn(
        PIECE_ROWS // 2 + 3, 3, 16, generator=torch.Generator().manual_seed(0)
    ).to(dtype)
    states_NLD[:, 1] *= 1000
    states_NLD[5, 2] = 0
    codes_NLX = encode_float8(states_NLD)
    assert codes_NLX.shape == (*states_NLD.shape[:2], 16 + SCALE_BYTES)
    scale_NL1 = states_NLD.float().abs().amax(-1, keepdim=True) / 448
    scale_NL1[5, 2] = 1
    expected = (states_NLD.float() / scale_NL1).to(torch.float8_e4m3fn).float() * scale_NL1
    for wanted in (torch.float32, torch.bfloat16):
        assert torch.equal(decode_float8(codes_NLX, wanted), expected.to(wanted))
    # One layer of several, as a cache is read.
    assert torch.equal(decode_float8(codes_NLX[:, 1], torch.float32), expected[:, 1])
    largest = states_NLD.float().abs().amax(-1, keepdim=True)
    assert (
        (expected - states_NLD.float()).abs() <= states_NLD.float().abs() / 16 + largest / 2**18
    ).all()


def test_memory_of_zeros_is_a_state_of_zeros_and_what_is_not_finite_stays_so() -> None:
    assert torch.equal(
        decode_float8(torch.zeros(2, 12, dtype=torch.uint8), torch.float32), torch.zeros(2, 8)
    )
    for number in (torch.inf, -torch.inf, torch.nan):
        codes_NX = encode_float8(torch.tensor([[1.0, number], [1.0, 2.0]]))
        assert scales(codes_NX).isfinite().flatten().tolist() == [False, True]
        assert decode_float8(codes_NX, torch.float32).isfinite().tolist() == [
            [False, False],
            [True, True],
        ]


class _Float32(TorchDispatchMode):
    """Finds the most rows of a tensor in float32."""

    rows = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.ndim and made.dtype == torch.float32:
            self.rows = max(self.rows, len(made))
        return made


def test_the_copy_in_float32_stays_small() -> None:
    states_ND = torch.randn(3 * PIECE_ROWS, 8).bfloat16()
    with _Float32() as found:
        decode_float8(encode_float8(states_ND), torch.bfloat16)
    assert found.rows == PIECE_ROWS
