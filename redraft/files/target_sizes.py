"""Compute the bytes of a target's weights, and how many processes share them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from redraft.files.checkpoint import new_model

ROOM_FOR_TARGET = 0.4
"""Share of a device's memory that a target may take if its layers are not sharded over several
machines. The rest is for draft and activations.
"""


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    outside: int
    """Size of the embeddings, final norm and output head."""
    layers: tuple[int, ...]

    @staticmethod
    def of(model: Any) -> TargetSizes:
        """Return the sizes of a model's weights in bytes."""
        outside, layers = 0, Counter[str]()
        for full_name, weight in model.named_parameters():
            # "model.layers.3.mlp.up_proj.weight" counts for layer "3". Tied weights appear only
            # once.
            size, (_, found, rest) = (
                weight.numel() * weight.element_size(),
                full_name.partition(".layers."),
            )
            outside += 0 if found else size
            layers[rest.partition(".")[0]] += size if found else 0
        return TargetSizes(outside=outside, layers=tuple(layers.values()))

    @property
    def whole(self) -> int:
        return self.outside + sum(self.layers)

    def share(self, ranks: int) -> int:
        """Return the bytes in each of `ranks` processes that share the layers.

        A pass uses one gathered layer while it gathers the next.
        """
        return self.outside + -(-sum(self.layers) // ranks) + 2 * max(self.layers, default=0)

    def choose_ranks(self, processes: int, on_machine: int, num_bytes: int | None) -> int:
        """Return how many of all `processes` share the layers.

        They are the processes of one machine if each device of `num_bytes` then has enough memory
        left. Otherwise, they are all processes.
        """
        fits = num_bytes is None or self.share(on_machine) <= ROOM_FOR_TARGET * num_bytes
        return on_machine if on_machine > 1 and processes % on_machine == 0 and fits else processes


def size_weights(config: Any, dtype: torch.dtype) -> TargetSizes:
    """Return the sizes in bytes of the weights of a model with this config.

    Raises:
        ValueError: there is no causal LM for this config.
    """
    with torch.device("meta"):
        return TargetSizes.of(new_model(config, dtype))
