"""Muon: each step changes a matrix by its momentum with all singular values made about equal.

The method and its coefficients are from Jordan et al., 2024
(https://kellerjordan.github.io/posts/muon/). A gradient has few large singular values, which AdamW
follows. Muon moves just as far in directions that only a few tokens affect, so a draft learns more
from each label. Vectors, embeddings and output heads, with a row for each token, stay with AdamW.

R = rows, C = columns of a matrix.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from redraft.engine.hardware import this_machine

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5. Applying this polynomial five times brings singular values from
0.02 to 1 into the range from 0.7 to 1.2.
"""

ITERATIONS = 5
# Names of linear layers whose outputs are tokens.
OUTPUT_HEADS = ("lm_head", "lm_heads", "head", "markov_w2")


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum: a step changes a matrix by an RMS of about `lr`."""

    def __init__(
        self, matrices: Iterable[Tensor], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        # Dtype of the iteration; None means the same as in `orthogonalise`.
        self.dtype: torch.dtype | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(
                        weight, weight.grad, group["lr"], group["momentum"], group["weight_decay"]
                    )

    def _move(
        self, weight: Tensor, grad: Tensor, lr: float, momentum: float, weight_decay: float
    ) -> None:
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        velocity = state["momentum"].mul_(momentum).add_(grad)
        change = orthogonalise(grad.add(velocity, alpha=momentum), self.dtype)
        # The entries of an orthogonal matrix have a root mean square of 1 / sqrt(max(R, C)).
        weight.mul_(1 - lr * weight_decay).add_(change, alpha=-lr * math.sqrt(max(weight.shape)))


def orthogonalise(matrix_RC: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return U V^T for the matrix U S V^T, but with singular values of 0.7 to 1.2 instead of 1.

    The result is [R, C], in the matrix's dtype. The iteration computes in `dtype`. None means
    bfloat16 on a GPU or on a CPU with bfloat16 instructions, and float32 otherwise.
    """
    a, b, c = COEFFICIENTS
    wide = matrix_RC.shape[0] <= matrix_RC.shape[1]
    if dtype is None:
        # The iteration corrects its own rounding, so 8 bits are enough.
        is_fast = matrix_RC.device.type != "cpu" or this_machine().cpu_has_bfloat16
        dtype = torch.bfloat16 if is_fast else torch.float32
    x = (matrix_RC if wide else matrix_RC.mT).to(dtype)
    # A zero matrix stays zero.
    x = x / x.norm().clamp_min(torch.finfo(x.dtype).tiny)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrix_RC.dtype)


def split(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (matrices for Muon, all other parameters) among the trained parameters."""
    chosen = {
        id(linear.weight)
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear) and min(linear.weight.shape) > 1
        if not set(OUTPUT_HEADS).intersection(name.split("."))
    }
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [p for p in trained if id(p) in chosen], [p for p in trained if id(p) not in chosen]
