"""P-EAGLE: EAGLE-3 that drafts all tokens in one pass (Hui et al., arXiv 2602.01469).

    row t, draft step 0     token x[t+1] and the target's feature g[t] at position t: EAGLE-3's first step
    row t, draft step k     a mask token and a learned feature at position t + k; predicts x[t+2+k]
    step k of row t reads   step 0 of the rows up to t in its document, and steps 1..k of row t

No step reads the output of another step, so an engine computes all of them in one pass over the
prefix and the masks. In training, step k uses a part of the rows of step k - 1, because later
tokens are reached less often ("conditional on distribution" sampling).

B = batch, T = tokens, N = rows of a step, L = aux layers, D = hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.files.folder import TRAINED_WITH
from redraft.heads import options
from redraft.heads.draft import Batch, DraftStep, TargetSignal, label_rows
from redraft.heads.families.eagle3 import Eagle3, read_mix
from redraft.heads.nn.attention import Memory, StepMemory, compute_again
from redraft.heads.nn.masks import check_mask_token, choose_rows
from redraft.heads.shape import LlamaShape
from redraft.heads.target import Target

Config = options.PEagle

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of the mask token in config.json, in the order in which engines look them up."""


class PEagle(Eagle3):
    family = "peagle"
    speculators_architecture = "PEagleSpeculator"
    config: Config

    def __init__(
        self,
        config: Config,
        target: Target,
        draft_ids_W: Tensor | None = None,
        shape: LlamaShape | None = None,
    ) -> None:
        """Create an untrained head as `Eagle3` does. By default, the mask token is the last row."""
        super().__init__(config, target, draft_ids_W, shape)
        check_mask_token(config.mask_token_id, len(target.embed_VD))
        self._mask_token_id = (
            len(target.embed_VD) - 1 if config.mask_token_id is None else config.mask_token_id
        )
        self.config = replace(config, mask_token_id=self._mask_token_id)
        self.max_tokens = config.num_steps
        # It is as wide as the streams, not as a feature, because engines apply `fc` to it too.
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        """Return steps with shifts 1, 2, ...

        In training, later steps have fewer rows (`keep_ratio`).
        """
        num_tokens = min(num_steps or self.config.num_steps, self.config.num_steps)
        # A sample is enough for a gradient. A metric or a forecast needs every row.
        rows_BN = self._sample_rows(batch) if torch.is_grad_enabled() else None
        # One memory per layer. Every pass adds a step to all of them, so the order of passes
        # matters. Layers with the same window share the rows that they attend to.
        windows = [view.window for view in self.views]
        first = {window: StepMemory(batch, rows_BN, window) for window in windows}
        memories = [first[window].after([]) for window in windows]
        # The last rows of a document get tokens of the next document. The labels of these rows are
        # masked, and no other row attends to them.
        ids_BT = batch.input_ids_BT.roll(-1, dims=1)
        hidden_BTD = self._pass(ids_BT, self.feature(signal), batch.position_ids_BT, memories)
        steps = [self._draft_step(hidden_BTD, 0, label_rows(batch, 1))]
        feature_11D = self._mask_feature()
        for k in range(1, num_tokens):
            if rows_BN is None:
                positions_BN, mask_BT = batch.position_ids_BT + k, label_rows(batch, k + 1)
            else:
                rows_Bn, is_kept_Bn = self._keep(batch, rows_BN, k)
                positions_BN = batch.position_ids_BT.gather(1, rows_Bn) + k
                mask_BT = torch.zeros_like(batch.loss_mask_BT).scatter(1, rows_Bn, is_kept_Bn)
                mask_BT &= label_rows(batch, k + 1)
            feature_BND = feature_11D.expand(*positions_BN.shape, -1)
            ids_BN = torch.full_like(positions_BN, self._mask_token_id)
            hidden_BND = self._pass(ids_BN, feature_BND, positions_BN, memories)
            if (
                rows_BN is not None
            ):  # losses and metrics read rows of the batch, so all other rows are masked
                at_BnD = rows_Bn[..., None].expand(-1, -1, hidden_BND.shape[-1])
                hidden_BND = torch.zeros_like(hidden_BTD).scatter(1, at_BnD, hidden_BND)
            steps.append(self._draft_step(hidden_BND, k, mask_BT))
        return steps

    def _sample_rows(self, batch: Batch) -> Tensor:
        """Return the rows that step 1 could train, in the order of keeping them, int64 [B, N]."""
        has_label_BT = label_rows(batch, 2)
        # `int` waits for the device, once per batch.
        return choose_rows(batch, has_label_BT, max(int(has_label_BT.sum(1).max()), 1))

    def _keep(self, batch: Batch, rows_BN: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Choose the rows for step k, and mark those to train: int64 and bool, each [B, n].

        They are the first rows of `_sample_rows`. Every row of the batch keeps a fraction of its
        own labels, independently of the other rows. So two processes with half of the batch each
        train the same rows as one process with the whole batch.
        """
        # With the defaults 0.7 and 0.2, steps 1, 2, ... train 70, 49, 34, 24, 20, 20, 20% of the
        # labels.
        share = max(self.config.keep_ratio**k, self.config.min_share)
        # Use float64, which rounds as Python's product two lines below does.
        count_B = (label_rows(batch, 2).sum(1).double() * share).long()
        rows_Bn = rows_BN[:, : max(int(rows_BN.shape[1] * share), 1)]
        return rows_Bn, torch.arange(rows_Bn.shape[1], device=rows_Bn.device) < count_B[:, None]

    def _draft_step(self, hidden_BTD: Tensor, k: int, mask_BT: Tensor) -> DraftStep:
        # Every trained row has the same weight. A later step weighs less because it has fewer rows.
        return DraftStep(
            hidden_BTD=hidden_BTD,
            head_WD=self.head,
            shift=k + 1,
            mask_BT=mask_BT,
            draft_ids_W=self._draft_ids_W,
            rule=self.shape.rule,
        )

    def _mask_feature(self) -> Tensor:
        """Return the learned feature for all steps but the first, [1, 1, D]."""
        streams_11LD = self.mask_hidden.view(1, 1, len(self.aux_layer_ids), -1)
        return self.mix(streams_11LD.to(self.fc.weight.dtype))

    def _pass(
        self,
        ids_BN: Tensor,
        feature_BND: Tensor,
        position_ids_BN: Tensor,
        memories: Sequence[Memory],
    ) -> Tensor:
        """Return the input of the output head, [B, N, D]."""
        cos_sin = self._rotary(position_ids_BN, feature_BND)
        embed_BND = F.embedding(ids_BN, self._embed_VD).to(feature_BND.dtype)
        x_BND = self._run(self.midlayer, memories[0], cos_sin, embed_BND, feature_BND)
        for layer, memory in zip(self.layers.values(), memories[1:], strict=True):
            x_BND = self._run(layer, memory, cos_sin, x_BND)
        return cast(Tensor, self.norm(x_BND))

    def _run(
        self, layer: nn.Module, memory: Memory, cos_sin: tuple[Tensor, Tensor], *inputs: Tensor
    ) -> Tensor:
        def run(*inputs_and_memory: Any) -> tuple[Tensor]:
            *inputs, memory = inputs_and_memory
            return (layer(*inputs, cos_sin, memory),)

        if self.recomputes and torch.is_grad_enabled() and isinstance(memory, StepMemory):
            return compute_again(run, [memory], *inputs)[0]
        return run(*inputs, memory)[0]

    def _vllm_config(self) -> dict[str, Any]:
        return {
            # It has EAGLE-3's architecture, because the engine uses one class for both.
            **super()._vllm_config(),
            # This is the engine's name for the mask token of every parallel drafter.
            "pard_token": self._mask_token_id,
        }

    def _speculators_config(self, target_name: str, num_speculative_tokens: int) -> dict[str, Any]:
        config = super()._speculators_config(target_name, num_speculative_tokens)
        # vLLM's `update_peagle` copies the other options from the top level, but not `fc_norm`.
        inner = {"fc_norm": self.config.fc_norm}
        return {
            **config,
            "mask_token_id": self._mask_token_id,
            "transformer_layer_config": {**config["transformer_layer_config"], **inner},
        }

    def _training(self) -> dict[str, Any]:
        kept = ("own_head", "num_steps", "keep_ratio", "min_share")
        training = {name: value for name, value in asdict(self.config).items() if name in kept}
        recorded = super()._training()[TRAINED_WITH]
        return {
            "family": self.family,
            **training,
            TRAINED_WITH: {**recorded, "mask_token_id": self._mask_token_id},
        }

    @staticmethod
    def _read(config: Mapping[str, Any], folder: Path, *, own_head: bool) -> Config:
        """Read a checkpoint's options: architecture (engine's keys), training (redraft's keys).

        Raises:
            ValueError: the config has no mask token.
        """
        tokens = [config[key] for key in MASK_KEYS if config.get(key) is not None]
        if not tokens:
            raise ValueError(
                f'{folder}: config.json has no mask token: add "pard_token" with the value used in '
                "training"
            )
        return Config(
            **read_mix(config),
            mask_token_id=tokens[0],
            **{"own_head": own_head, **options.read_record(Config, config)},
        )
