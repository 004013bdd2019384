"""Memory that training permanently takes on a device, in closed form: bytes by use.

target's weights    whole, sharded by layer, or only embeddings and head (`signal.sharded`)
draft's weights     4 bytes per weight, because it trains in float32
gradients           4 bytes per weight
optimizer state     8 bytes per weight; under Muon, 4 for weights in matrices
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from redraft.distill.plan.choices import ShardingKind
from redraft.distill.train.muon import split
from redraft.files.checkpoint import load_text_config, new_model
from redraft.heads.families.standalone import Init, from_config
from redraft.heads.family import Family
from redraft.heads.target import Target

TARGET_WEIGHTS, DRAFT_WEIGHTS, STATE, GRADIENTS, SIGNAL = (
    "target's weights",
    "draft's weights",
    "optimizer state",
    "gradients",
    "target's hidden states",
)
"""Uses of memory other than activations."""

# Bytes per weight in float32; AdamW keeps two means.
WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 4, 4, 8
MOMENTUM_BYTES = 4  # bytes of Muon's state per weight in a matrix


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """For each use of memory, the fraction of its bytes that one device keeps."""

    weights: float = 1.0
    gradients: float = 1.0
    state: float = 1.0

    @staticmethod
    def of(kind: ShardingKind, ranks: int) -> Sharing:
        if kind == "none":
            return Sharing()
        weights = 1 / ranks if kind == "fsdp2" else 1.0
        return Sharing(weights=weights, gradients=1 / ranks, state=1 / ranks)

    def share_out(self, memory: Mapping[str, float]) -> dict[str, float]:
        """Return bytes by use on one device.

        Weights gathered during a step count as activations.
        """
        kept = {DRAFT_WEIGHTS: self.weights, GRADIENTS: self.gradients, STATE: self.state}
        return {holder: num_bytes * kept.get(holder, 1.0) for holder, num_bytes in memory.items()}


@dataclass(frozen=True, kw_only=True)
class DraftSize:
    weights: int
    matrices: int
    """Number of weights in matrices that Muon updates (`distill.train.muon.split`)."""

    @staticmethod
    def of(module: torch.nn.Module) -> DraftSize:
        matrices, rest = split(module)
        in_matrices = sum(weight.numel() for weight in matrices)
        return DraftSize(
            weights=in_matrices + sum(weight.numel() for weight in rest), matrices=in_matrices
        )

    def hold(self, optimizer: str) -> dict[str, int]:
        """Return bytes by use, without AdamW's step count for each tensor."""
        matrices = self.matrices if optimizer == "muon" else 0
        return {
            DRAFT_WEIGHTS: WEIGHT_BYTES * self.weights,
            GRADIENTS: GRADIENT_BYTES * self.weights,
            STATE: MOMENTUM_BYTES * matrices + STATE_BYTES * (self.weights - matrices),
        }


def sketch_draft(
    family: Family, options: Any, target_config: Any, draft_vocab_size: int = 0
) -> Any:
    """Create an untrained draft for a target with this text config, without memory for its weights.

    Raises:
        ValueError: the options do not fit the target.
    """
    with torch.device("meta"):
        if not family.is_head:
            return new_model(standalone_config(options, target_config), torch.float32)
        weight_VD = torch.empty(target_config.vocab_size, target_config.hidden_size)
        target = Target(config=target_config, embed_VD=weight_VD, head_VD=weight_VD)
        return family.sketch(options, target, draft_vocab_size)


def standalone_config(init: Init, target_config: Any) -> Any:
    if init.num_layers:
        with torch.device("meta"):
            made = from_config(
                target_config, num_layers=init.num_layers, hidden_size=init.hidden_size
            )
        return made.model.config
    if not init.layers:
        assert init.checkpoint is not None
        return load_text_config(init.checkpoint)
    config = copy.deepcopy(target_config)
    config.num_hidden_layers = len(init.layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in init.layers]
    return config
