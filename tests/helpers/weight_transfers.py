"""A weight transfer of vLLM that loads as its NCCL backend does, from a file and on any device."""

from __future__ import annotations

from safetensors.torch import load_file
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from redraft.online.engine.weight_transfer import Files, Part


class AsNccl(Files):
    """Each tensor is a load of its own."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Part) -> None:
        for item in load_file(update_info.path).items():
            self.model.load_weights([item])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
