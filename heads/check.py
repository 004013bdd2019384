"""What a draft's folder says, read once beside its target's for all checks.

    Pair.read(target, draft)   configs, tensor names and shapes, family, provenance

The checks read configs, headers and a few small tensors; nothing is computed. Engines load a wrong head in silence:
verification keeps the output right, so that only acceptance tells. V = vocabulary, W = draft vocabulary, D = hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from heads.artifact import PROVENANCE, safetensors_header
from heads.checkpoint import check_model_folder
from heads.tensors import TRAINED_WITH, read_config, tensor_files


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A draft's folder and its target's."""

    target: Path
    draft: Path
    target_config: Any
    """The `transformers` config of the target's text model."""
    config: Mapping[str, Any]
    """The draft's config.json."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the draft's tensors, by name."""
    dtypes: Mapping[str, str]
    """As safetensors spells them (F32, BF16, I64)."""
    family: str
    provenance: Mapping[str, Any] | None
    """None where the folder holds none."""

    @staticmethod
    def read(target: Path, draft: Path) -> Pair:
        """Raises: FileNotFoundError, ValueError where a folder is missing, corrupt or holds no draft."""
        config = read_config(draft)
        headers = {path: safetensors_header(path) for path in set(tensor_files(draft).values())}
        tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
        check_model_folder(target)
        return Pair(
            target=target,
            draft=draft,
            target_config=AutoConfig.from_pretrained(target).get_text_config(),
            config=config,
            shapes={name: tuple(tensor["shape"]) for name, tensor in tensors.items()},
            dtypes={name: tensor["dtype"] for name, tensor in tensors.items()},
            family=family_of_tensors(tensors, draft),
            provenance=_provenance(draft),
        )

    @property
    def is_own_target(self) -> bool:
        """A target that holds its MTP layer is served as both."""
        return self.draft.resolve() == self.target.resolve()

    @property
    def is_speculators(self) -> bool:
        """The layout of the `speculators` package."""
        return "speculators_model_type" in self.config

    @property
    def layer_config(self) -> Mapping[str, Any]:
        """Where the draft's sizes, positions and rotary parameters stand."""
        inner: Mapping[str, Any] = self.config.get("transformer_layer_config") or self.config
        return inner

    @property
    def trained_with(self) -> Mapping[str, Any] | None:
        """What the head was when it was exported; None for a head of others."""
        recorded: Mapping[str, Any] | None = (self.config.get("redraft") or {}).get(TRAINED_WITH)
        return recorded


FAMILY_PATTERNS = {
    "mtp": r"(model\.mtp_layers\.|mtp\.).*|.*\.eh_proj\.weight",
    "eagle3": r"(midlayer|layers\.0)\.hidden_norm\.weight",
    "mlp_speculator": r"speculator\.emb\.0\.weight",
    "medusa": r"(medusa_heads\.)?(blocks\.0\..*|0\.0\.linear\..*)",
    "eagle1": r"fc\.weight",
    "standalone": r".*\.layers\.0\..*",
}
"""A tensor that only heads of this family have; the first family that matches, in this order."""


def family_of_tensors(names: Collection[str], folder: Path) -> str:
    """The family of a draft by its tensors: a config may name another.

    Raises: ValueError where they are of none.
    """
    for family, pattern in FAMILY_PATTERNS.items():
        if any(re.fullmatch(pattern, name) for name in names):
            return family
    raise ValueError(f"{folder} holds no draft of a known family: its tensors are such as {min(names, default='none')}")


def _provenance(folder: Path) -> dict[str, Any] | None:
    path = folder / PROVENANCE
    if not path.is_file():
        return None
    try:
        provenance: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is corrupt ({error}): publish the draft again") from error
    return provenance
