"""Settings of the training loss. The module does not import torch, so settings load fast."""

from dataclasses import dataclass
from typing import Literal

from redraft.files.setting_error import SettingError, require_least

DIVERGENCES = (
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "neg_log_alpha",
    "lk_hybrid",
    "cross_entropy",
)
"""Names of the divergences. cross_entropy learns from the text, all others from the target's
distribution.
"""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The training loss."""

    name: str = "forward_kl"
    """Divergence between target and draft. forward_kl, reverse_kl, jensen_shannon, total_variation,
    neg_log_alpha and lk_hybrid learn from the target's distribution; cross_entropy learns from the
    text.
    """
    temperature: float = 1.0
    """Temperature of both distributions; the logits are divided by it. Must be 1 with a top-k
    signal.
    """
    beta: float = 0.5
    """Weight of the target in the mixture of jensen_shannon, between 0 and 1."""
    eta: float = 3.0
    """Speed of lk_hybrid's transition from KL to total variation as alpha grows: KL is weighted by
    exp(-eta * alpha).
    """

    form: Literal["auto", "kernel", "plain", "compiled"] = "auto"
    """Implementation of the loss: a Triton kernel, PyTorch operations (plain), or compiled PyTorch
    operations. auto: the kernel on a GPU with Triton; elsewhere plain, or compiled with
    --loop.compile. On ROCm, a top-k signal always uses the plain form.
    """

    def __post_init__(self) -> None:
        if self.name not in DIVERGENCES:
            raise SettingError(
                f"{{name}}: unknown divergence {self.name!r}; known: {', '.join(DIVERGENCES)}"
            )
        if not self.temperature > 0:
            raise SettingError(f"{{temperature}} is {self.temperature}: it must be above 0")
        if not 0 < self.beta < 1:
            raise SettingError(
                f"{{beta}} is {self.beta}: it must be between 0 and 1; for 0 or 1 use forward_kl "
                "or reverse_kl"
            )
        require_least(self, eta=0)
