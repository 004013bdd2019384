"""Define the pair of draft and target folders, and the finding of a check.

Both folders are read once for all checks.

    Pair.read(target, draft)   configs, tensor names and shapes, family, provenance

The checks read configs, headers and a few small tensors; nothing is computed. An engine loads a
wrong head silently: verification keeps the output correct, so only acceptance shows the mistake.

V = vocabulary, W = draft vocabulary, D = hidden.

Before `Pair.read`, the module uses only the standard library, because `Finding` also reports a
broken torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.files.folder import check_model_folder, read_config, tensor_entries, trained_with
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import detect_family_by_tensors
from redraft.heads.family import NUM_TOKENS, Family
from redraft.heads.provenance import Provenance, read_provenance


@dataclass(frozen=True)
class Finding:
    """A problem and its fix, one line each."""

    problem: str
    cure: str
    is_doubt: bool = False
    """Whether the problem is unusual but may be intended. If so, it is printed but the check
    passes.
    """

    @staticmethod
    def of(message: object) -> Finding:
        """Split an error's message at its last colon: the problem, then the fix."""
        problem, _, cure = str(message).rpartition(": ")
        return Finding(problem, cure)


@dataclass(frozen=True, kw_only=True)
class Pair:
    target: TargetFolder
    draft: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the draft's tensors, by name."""
    dtypes: Mapping[str, str]
    """Dtypes by tensor name, in safetensors spelling (F32, BF16, I64)."""
    family: Family
    provenance: Provenance

    @staticmethod
    def read(target: TargetFolder, draft: Path) -> Pair:
        """Read both folders.

        Raises:
            FileNotFoundError: a folder or a required file is missing.
            ValueError: a folder is corrupt, or the draft's folder contains no draft.
        """
        config = read_config(draft)
        tensors = tensor_entries(draft)
        check_model_folder(target.folder)
        family = detect_family_by_tensors(tensors, draft)
        if family.is_lookup:
            raise ValueError(
                f"{draft} contains {family.title}, which no model computes, so there is nothing to "
                "compare"
            )
        return Pair(
            target=target,
            draft=draft,
            config=config,
            shapes={name: tuple(tensor["shape"]) for name, tensor in tensors.items()},
            dtypes={name: tensor["dtype"] for name, tensor in tensors.items()},
            family=family,
            provenance=read_provenance(draft),
        )

    @property
    def target_config(self) -> Any:
        return self.target.text_config

    @property
    def is_own_target(self) -> bool:
        """Whether draft and target are the same folder: a target that includes an MTP layer."""
        return self.draft.resolve() == self.target.folder.resolve()

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.config

    @property
    def layer_config(self) -> Mapping[str, Any]:
        """Return the section of the draft's config with sizes, positions and rotary parameters."""
        inner: Mapping[str, Any] = self.config.get("transformer_layer_config") or self.config
        return inner

    @property
    def is_as_wide(self) -> bool:
        """Whether the head was made for a target with this hidden size.

        If not, the width of `fc` does not determine how many layers the head reads.
        """
        return self.layer_config.get("hidden_size") in (None, self.target_config.hidden_size)

    def choose_tokens(self, asked: int | None) -> int:
        """Choose the number of draft tokens per step: requested, published, or at most 3.

        The number published with the draft keeps forecasts comparable.
        """
        most = self.family.max_tokens(self.config) or NUM_TOKENS
        recorded = self.provenance.config.prove.num_speculative_tokens
        return asked or recorded or min(NUM_TOKENS, most)

    @property
    def trained_with(self) -> Mapping[str, Any]:
        """Return the architecture recorded by the export. Empty for a head from another trainer."""
        return trained_with(self.config)


Check = Callable[[Pair], Iterator[Finding]]
