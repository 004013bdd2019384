"""Rotary embeddings in GGUF files.

gpt-oss, Gemma 4     transformers' defaults for the architecture
linear               ARCHITECTURE.rope.scaling.type and .factor
Llama 3.1 and later  rope_freqs.weight, the divisors of the frequencies
YaRN, LongRoPE       refused
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN, LINEAR, LLAMA3 = "default", "linear", "llama3"
"""Types of rotary embeddings that can be read. PLAIN and LLAMA3 can also be written."""

ROPE_FACTORS = "rope_freqs.weight"

LLAMA3_ROPE = {
    "rope_type": LLAMA3,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Parameters of Llama 3.1 and later, except `factor`. A file has only the divisors that they give.
"""


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a config.json, under their current names."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = found.get("rope_type") or found.get("type") or PLAIN
    theta = found.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {**found, "rope_type": kind, "rope_theta": theta}


def rope_factors(config: Mapping[str, Any]) -> Tensor:
    """Return Llama 3's rotary frequency divisors, [E / 2], as llama.cpp's converter writes them."""
    found, heads = rope(config), config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    wavelengths = 2 * np.pi * found["rope_theta"] ** exponents
    # Number of turns within the original context, scaled from 0 (long waves, slowed by `factor`) to
    # 1 (short waves).
    turns = found["original_max_position_embeddings"] / wavelengths
    low, high = found["low_freq_factor"], found["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / ((1 - share) / found["factor"] + share)
    return factors.float()


def restore_rope(config: Any, reader: Any, architecture: str) -> None:
    """Add the rotary scaling in a GGUF file to the config that transformers read from it.

    For most architectures, transformers drops it without an error.

    Raises:
        ValueError: no transformers config is known for it. The message names its key or tensor.
    """
    found = dict(getattr(config, "rope_parameters", None) or {})
    kinds = [value for value in found.values() if isinstance(value, dict)] or [found]
    if any(kind.get("rope_type", PLAIN) != PLAIN for kind in kinds):
        return
    type_key = f"{architecture}.rope.scaling.type"
    scaling, factor = (
        reader.fields[key].contents() if key in reader.fields else None
        for key in (type_key, f"{architecture}.rope.scaling.factor")
    )
    factors = {t.name: t.data for t in reader.tensors if t.name.startswith("rope_f")}
    if factors.keys() == {ROPE_FACTORS} and config.model_type == "llama":
        divisors = torch.from_numpy(np.array(factors[ROPE_FACTORS])).float().flatten()
        scaled = {**found, **LLAMA3_ROPE, "factor": float(divisors.max())}
        expected = rope_factors({**config.to_dict(), "rope_parameters": scaled})
        if divisors.shape == expected.shape and divisors.allclose(expected, rtol=1e-3):
            config.rope_parameters = scaled
            return
    if factors:
        raise ValueError(f"transformers drops its rotary scaling ({min(factors)})")
    if scaling == LINEAR and factor:
        change = {"rope_type": LINEAR, "factor": float(factor)}
        # With several sets, only that of full attention is scaled, as in Gemma 3.
        config.rope_parameters = (
            {**found, "full_attention": {**found["full_attention"], **change}}
            if "full_attention" in found
            else {**found, **change}
        )
    elif scaling not in (None, "none"):
        raise ValueError(f"transformers drops its rotary scaling ({type_key} = {scaling})")
