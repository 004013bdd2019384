"""Checks of Medusa heads: biases and sizes."""

import re
from collections.abc import Iterator

from redraft.heads.doctor import shared
from redraft.heads.doctor.pair import Check, Finding, Pair


def bias(pair: Pair) -> Iterator[Finding]:
    """Check that the checkpoint has biases if and only if the engine is configured to load them."""
    # It is `blocks.0.layers.0.bias` for vLLM, and `0.0.linear.bias` in the layout of Medusa's
    # authors.
    has_bias = any(re.fullmatch(r".*(layers|linear)\.?\d*\.bias", name) for name in pair.shapes)
    serves_bias = bool(pair.config.get("medusa_fc_bias", False))
    trained = pair.trained_with.get("medusa_fc_bias", has_bias)
    if has_bias and not serves_bias:
        said = "is false" if "medusa_fc_bias" in pair.config else "is unset"
        yield Finding(
            f"medusa_fc_bias {said}, so the engine drops the biases in the checkpoint",
            'write "medusa_fc_bias": true into config.json',
        )
    elif (serves_bias or trained) and not has_bias:
        yield Finding(
            "the Medusa heads were trained with biases that the checkpoint lacks",
            "export the head again with them",
        )


CHECKS: tuple[Check, ...] = (bias, shared.sizes)
