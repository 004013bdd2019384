"""The logits of causal LMs that scale or cap them after the head. V = vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
"""Config keys of Cohere, Falcon H1, Granite, Gemma, RecurrentGemma and others. The config's rule is
compared with the logits of the model's class.
"""


@dataclass(frozen=True, kw_only=True)
class LogitRule:
    """logits = cap * tanh(scale * head @ hidden / cap), or scale * head @ hidden without a cap."""

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(config: Any) -> LogitRule:
        text = config.get_text_config()
        scale = math.prod(getattr(text, key, None) or 1.0 for key in FACTORS)
        scale /= math.prod(getattr(text, key, None) or 1.0 for key in DIVISORS)
        if width := getattr(text, "dim_model_base", None):
            scale *= width / text.hidden_size
        return LogitRule(
            scale=scale, cap=next((cap for key in CAPS if (cap := getattr(text, key, None))), None)
        )

    def apply(self, logits: Tensor) -> Tensor:
        logits = self.scaled(logits)
        return (logits / self.cap).tanh() * self.cap if self.cap else logits

    def scaled(self, states: Tensor) -> Tensor:
        """Scale the states, so that their logits need no further scaling."""
        return states if self.scale == 1 else states * self.scale

    def apply_(self, logits: Tensor) -> Tensor:
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits


PLAIN = LogitRule()
