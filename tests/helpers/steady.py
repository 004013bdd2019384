"""An optimizer for trainings whose weights are compared: rounding stays rounding in it."""

from __future__ import annotations

from typing import Any

import torch


class SteadyAdamW(torch.optim.AdamW):
    """AdamW that does not make a whole step of a gradient that is only rounding.

    AdamW divides by the size of a gradient. If all but rounding cancels, the sums of two processes,
    made in another order than those of one, point anywhere, and the weights part by up to the
    learning rate.
    """

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, eps=1e-5, **options)
