"""What a head borrows from its target. V = vocabulary, D = hidden."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from heads.tensors import read_tensors, tensor_files


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target's embeddings and head, which its draft head reads but neither trains nor saves.

    A head keeps the tensors themselves, unregistered: they stay where the target put them and follow its updates.
    """

    config: Any
    """The `transformers` config of the text model."""
    embed_VD: Tensor
    head_VD: Tensor

    @staticmethod
    def of(model: Any) -> Target:
        """From a causal LM of `transformers`."""
        return Target(
            config=model.config.get_text_config(),
            embed_VD=model.get_input_embeddings().weight.detach(),
            head_VD=model.get_output_embeddings().weight.detach(),
        )

    @staticmethod
    def from_folder(folder: Path) -> Target:
        """From a model folder, reading these two tensors alone.

        Raises: ValueError where the folder holds no embeddings.
        """
        names = [name for name in tensor_files(folder) if _is_shared(name)]
        tensors = read_tensors(folder, names)
        embed = next((t for name, t in tensors.items() if name.endswith("embed_tokens.weight")), None)
        if embed is None:
            raise ValueError(f"{folder} has no tensor embed_tokens.weight: give the folder of the target model")
        head = next((t for name, t in tensors.items() if name.endswith("lm_head.weight")), embed)
        return Target(config=AutoConfig.from_pretrained(folder).get_text_config(), embed_VD=embed, head_VD=head)


def _is_shared(name: str) -> bool:
    """True for the target's own embeddings and head, not for the copies beside its MTP layers."""
    own = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    return own and ".layers." not in name and "mtp" not in name
