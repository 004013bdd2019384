"""A made-up family of heads, complete in one file: what anybody writes who adds a family.

    h[t, k] = norm(fc(concat aux[t]) + embed(x[t+1]) + offset[k]),   k = 0, 1, ...,   predicts x[t+2+k]

It predicts a whole block at once from some layers of the target.

B = batch, T = tokens, K = draft tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from reference_decoder import Drafted, draw
from torch import Tensor, nn

from redraft.files.folder import read_config, tensor_files
from redraft.files.tensors import load_into, read_tensors, write_head
from redraft.heads.doctor.pair import Check, Finding, Pair
from redraft.heads.draft import Batch, DraftStep, TargetSignal, label_rows
from redraft.heads.family import Family, FixedTokens, Training
from redraft.heads.target import Target

ROW = Family(
    name="tiny",
    title="Tiny",
    draft="tiny_family:Tiny",
    method="tiny",
    decoders=("v1", "v2"),
    tensors=r"tiny\.fc\.weight",
    architectures=("TinyDraftModel",),
    reads="layers",
    layers_key="tiny_config.target_layer_ids",
    fixed_tokens=FixedTokens(("block_size",), unused=1),
    can_sample=True,
    learns_online=True,
    checks="tiny_family:CHECKS",
    training=Training(lr=1e-2, loop={"steps": 2, "batch_size": 2, "sequence_length": 128}),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    aux_layer_ids: tuple[int, ...] = (1, 3)
    block_size: int = 4

    @property
    def num_tokens(self) -> int:
        return self.block_size - 1


class Tiny(nn.Module):
    is_autoregressive = False
    is_block = False
    engine_output = 0

    def __init__(self, config: Config, target: Target) -> None:
        super().__init__()
        self.config, self.aux_layer_ids = config, config.aux_layer_ids
        hidden = target.embed_VD.shape[1]
        self._embed_VD, self._head_VD = target.embed_VD, target.head_VD
        self.fc = nn.Linear(len(self.aux_layer_ids) * hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden)
        self.offset = nn.Embedding(self.max_tokens, hidden)

    @property
    def max_tokens(self) -> int:
        return self.config.block_size - 1

    def feature(self, signal: TargetSignal) -> Tensor:
        assert signal.aux_BTLD is not None
        feature_BTD: Tensor = self.fc(signal.aux_BTLD.flatten(2).to(self.fc.weight.dtype))
        return feature_BTD

    def _block(self, feature_BTD: Tensor, next_ids_BT: Tensor) -> list[Tensor]:
        known_BTD = feature_BTD + F.embedding(next_ids_BT, self._embed_VD).to(feature_BTD.dtype)
        return [self.norm(known_BTD + offset_D) for offset_D in self.offset.weight]

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        hidden = self._block(self.feature(signal), batch.input_ids_BT.roll(-1, dims=1))
        return [
            DraftStep(
                hidden_BTD=hidden_BTD,
                head_WD=self._head_VD,
                shift=k + 1,
                mask_BT=label_rows(batch, k + 1),
            )
            for k, hidden_BTD in enumerate(hidden[:num_steps])
        ]

    @torch.no_grad()
    def propose(
        self,
        prefix_ids: Sequence[int],
        signal: TargetSignal,
        num_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Drafted:
        hidden = self._block(self.feature(signal)[:, -1:], torch.tensor([[prefix_ids[-1]]]))
        return [
            draw(F.linear(h[0, 0], self._head_VD), temperature, generator)
            for h in hidden[:num_tokens]
        ]

    def export(
        self,
        folder: Path,
        dtype: torch.dtype | None = None,
        *,
        weights: Mapping[str, Tensor] | None = None,
        like: Path | None = None,
    ) -> None:
        config = {
            "architectures": ["TinyDraftModel"],
            "hidden_size": self.fc.out_features,
            "block_size": self.config.block_size,
            "tiny_config": {"target_layer_ids": list(self.aux_layer_ids)},
            "redraft": {"family": "tiny", **asdict(self.config)},
        }
        tensors = {
            f"tiny.{name}": tensor for name, tensor in (weights or self.state_dict()).items()
        }
        write_head(folder, tensors, config, dtype or self.fc.weight.dtype)

    @staticmethod
    def load(folder: Path, target: Target) -> Tiny:
        config = read_config(folder)
        layers = tuple(config["tiny_config"]["target_layer_ids"])
        head = Tiny(Config(aux_layer_ids=layers, block_size=config["block_size"]), target)
        tensors = read_tensors(folder, tensor_files(folder))
        load_into(
            head, {name.removeprefix("tiny."): tensor for name, tensor in tensors.items()}, folder
        )
        return head


def layers(pair: Pair) -> Iterator[Finding]:
    """The layers that it reads exist in the target."""
    last = max(pair.config["tiny_config"]["target_layer_ids"])
    if last > pair.target_config.num_hidden_layers:
        yield Finding(
            f"it reads layer {last}, which the target does not have",
            "give the target it was trained for",
        )


CHECKS: tuple[Check, ...] = (layers,)
