"""DFlash: a block of masks that reads the target's features yields all draft tokens in one pass.

See arXiv 2602.06036.

    c[r] = hidden_norm(fc(concat of the target's residual stream after each aux layer)), for every known row r
    block of the anchor a = [x[a], mask, ..., mask] at positions a, a + 1, ...; slot i predicts x[a + i], for i >= 1
    every layer: the block's queries attend to the keys of c[r] with r < a in the anchor's document, and of the block

The target has not processed the anchor yet, so c[a] does not exist. Row t of a draft step belongs
to the anchor t + 1. A block has one slot more than the number of tokens that the engine requests.
Attention within the block is bidirectional, so the block's length affects every proposal.

B = batch, T = tokens, A = anchors per row, S = slots per block, L = aux layers, D = hidden, W =
draft vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from redraft.files import speculators
from redraft.files.folder import TRAINED_WITH, read_config
from redraft.files.tensors import load_into, read_tensors, write_head
from redraft.files.windows import (
    SECTION,
    beside_target,
    require_speculators,
    trained_views,
    write_speculators,
    write_views,
)
from redraft.heads import options
from redraft.heads.draft import Batch, DraftStep, TargetSignal, aux_streams, label_rows
from redraft.heads.families.dflash_layouts import read_options, translate
from redraft.heads.nn.blocks import BlockMask, attend_blocks
from redraft.heads.nn.layers import PreNormLayer, Projections, Rotary, norm, rotate
from redraft.heads.nn.masks import check_mask_token, choose_rows
from redraft.heads.nn.precision import product_dtype
from redraft.heads.nn.shares import gather_keys, in_whole, most_of_ranks
from redraft.heads.nn.vocabulary import check_ids, id_maps, read_ids
from redraft.heads.shape import LlamaShape
from redraft.heads.target import EMBEDDINGS, HEAD, Target, aux_layers, layer_weights

ANCHORS_A_CHUNK = 64  # number of blocks in memory at once; the mask has ANCHORS_A_CHUNK * S rows

Config = options.DFlash


class Attention(Projections):
    """Grouped-query attention with query and key norms, as in Qwen3."""

    def __init__(self, shape: LlamaShape) -> None:
        # Unlike Qwen3's, the output projection has the bias too.
        super().__init__(shape, shape.hidden_size, output_bias=shape.attention_bias)

    def keys_and_values(
        self, x_BTD: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [B, key heads, T, head size]."""
        return rotate(self.k_norm(self._heads(self.k_proj(x_BTD))), cos_sin), self._heads(
            self.v_proj(x_BTD)
        )

    def forward(
        self,
        x_BND: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        mask: BlockMask,
    ) -> Tensor:
        """Attend from the blocks' concatenated rows to the context and to their own block's rows."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x_BND))), cos_sin)
        out_BHNE = attend_blocks(
            q, context, self.keys_and_values(x_BND, cos_sin), mask, self._head_dim**-0.5
        )
        out: Tensor = self.o_proj(out_BHNE.transpose(1, 2).flatten(2))
        return out


class DFlash(nn.Module):
    family = "dflash"
    architecture = "DFlashDraftModel"  # vLLM's name for the class.
    speculators_architecture = "DFlashDraftModel"  # the class in the package `speculators`
    # Tensors whose names contain one of these parts are exported in float32.
    float32: tuple[str, ...] = ()
    is_autoregressive = False
    is_block = True
    recomputes = False
    engine_output = 0
    sees_anchor = False
    """Whether a block also reads its anchor's feature, c[a]. No engine can compute it in time. Only
    the doctor sets this, to detect heads that were trained with it.
    """
    config: Config

    def __init__(
        self,
        config: Config,
        target: Target,
        draft_ids_W: Tensor | None = None,
        shape: LlamaShape | None = None,
    ) -> None:
        """Create an untrained head with the target's embeddings and output head.

        If `config` has no mask token, the last row of the embeddings is used. `draft_ids_W` are the
        target ids to propose, ascending; None means all ids. `shape` defaults to the shape of the
        target's layers.

        Raises:
            ValueError: the target does not have these layers or ids.
        """
        super().__init__()
        self._target_architectures = list(getattr(target.config, "architectures", None) or ())
        self._mask_token_id = (
            len(target.embed_VD) - 1 if config.mask_token_id is None else config.mask_token_id
        )
        self.config = config = replace(config, mask_token_id=self._mask_token_id)
        # Queries and keys are always normed, in engines too.
        self.shape = replace(shape or LlamaShape.of_head(config, target.config), qk_norm=True)
        self.views = beside_target(config.views, target.config)
        self.aux_layer_ids = aux_layers(config.aux_layer_ids, target.config.num_hidden_layers)
        check_mask_token(config.mask_token_id, len(target.embed_VD))
        if self.aux_layer_ids[0] < 1:
            raise ValueError(
                "this head cannot read layer 0 (the embeddings), because engines count "
                "from the first layer's output"
            )
        # A plain tensor is not a parameter: it is not trained or saved, and `.to` and `.float` do
        # not change it.
        self._embed_VD = target.embed_VD
        self._rotary = Rotary.from_shape(self.shape)
        if draft_ids_W is not None:
            check_ids(draft_ids_W, self.shape.vocab_size)
        self._draft_ids_W: Tensor | None
        self.register_buffer("_draft_ids_W", draft_ids_W, persistent=False)
        self._head_WD = (
            target.head_VD if self._draft_ids_W is None else target.head_VD[self._draft_ids_W]
        )
        hidden = self.shape.hidden_size
        self.fc = nn.Linear(len(self.aux_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = norm(self.shape)
        self.layers = nn.ModuleList(
            PreNormLayer(self.shape, Attention(self.shape)) for _ in range(config.num_layers)
        )
        self.norm = norm(self.shape)

    @property
    def max_tokens(self) -> int:
        return self.config.num_tokens

    def feature(self, signal: TargetSignal) -> Tensor:
        """Compute c, the context for every row, [B, T, D].

        Raises:
            ValueError: the signal has different aux layers, or none.
        """
        # [B, T, L, D] with ascending layers, flattened to the L * D columns of `fc`.
        aux_BTLD = aux_streams(signal, self.aux_layer_ids).to(product_dtype(self.fc.weight))
        out: Tensor = self.hidden_norm(self.fc(aux_BTLD.flatten(2)))
        return out

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        """Return one step for each slot that proposes a token, with shifts 1, 2, ...

        With gradients enabled, each row of the batch has at most `num_anchors` anchors. Otherwise,
        all anchors are used.
        """
        # 1. Make the blocks. Their length follows the number of requested tokens, as in an engine.
        num_tokens = min(num_steps or self.max_tokens, self.max_tokens)
        # A sample of the anchors is enough for a gradient. A metric or a forecast needs every row.
        limit = self.config.num_anchors if torch.is_grad_enabled() else None
        rows_BA, is_anchor_BT = choose_anchors(batch, limit, has_ranks=has_ranks())
        first = self.config.first_slot
        hidden_BASD = self._blocks(batch, self.feature(signal), rows_BA, first + num_tokens)
        # 2. One slot of all blocks becomes a draft step. Losses and metrics read rows of the batch: a
        # block belongs to the row before its anchor, and no two blocks share a row. In training, a
        # long row has few anchors, so the steps have states for the rows of these alone.
        places_BA = torch.arange(rows_BA.numel(), device=rows_BA.device).view_as(rows_BA)
        place_BT = torch.full_like(batch.input_ids_BT, -1).scatter(1, rows_BA, places_BA)
        return [
            self._draft_step(
                batch, hidden_BASD[:, :, first + k], k + 1, rows_BA, is_anchor_BT, place_BT
            )
            for k in range(num_tokens)
        ]

    def _draft_step(
        self,
        batch: Batch,
        hidden_BAD: Tensor,
        shift: int,
        rows_BA: Tensor,
        is_anchor_BT: Tensor,
        place_BT: Tensor,
    ) -> DraftStep:
        """Create the step for draft token number `shift`, counted from 1."""
        return DraftStep(
            hidden_BTD=hidden_BAD,
            head_WD=self._head_WD,
            shift=shift,
            mask_BT=label_rows(batch, shift) & is_anchor_BT,
            place_BT=place_BT,
            weight=math.exp(-(shift - 1) / self.config.gamma),
            draft_ids_W=self._draft_ids_W,
            rule=self.shape.rule,
        )

    def _blocks(self, batch: Batch, context_BTD: Tensor, rows_BA: Tensor, num_slots: int) -> Tensor:
        """Compute the output head's input for every slot of the blocks, [B, A, S, D]."""
        cos_sin = self._rotary(batch.position_ids_BT, context_BTD)
        layers = list(self.layers)
        # Compute them once for all blocks. Blocks do not change the context's keys, which an engine
        # keeps in its cache.
        contexts = [
            gather_keys(
                batch.shared,
                *cast(Attention, layer.self_attn).keys_and_values(context_BTD, cos_sin),
            )
            for layer in layers
        ]
        outs = []
        for chunk_BA in torch.split(rows_BA, ANCHORS_A_CHUNK, dim=1):
            # A row at the end of the batch has no anchor after it. The anchor's index is clamped
            # here, and the row has no label.
            anchor_BA = (chunk_BA + 1).clamp(max=batch.input_ids_BT.shape[1] - 1)
            slots_S = torch.arange(num_slots, device=chunk_BA.device)
            # A block may extend past the end of its document or of the batch. The slots beyond the
            # end have no label.
            positions_BN = (
                batch.position_ids_BT.gather(1, anchor_BA)[..., None] + slots_S
            ).flatten(1)
            ids_BAS = anchor_BA.new_full((*anchor_BA.shape, num_slots), self._mask_token_id)
            ids_BAS[..., 0] = batch.input_ids_BT.gather(1, anchor_BA)
            views, last_BA, ahead = self.views, chunk_BA, 1
            if self.sees_anchor:
                last_BA, ahead = anchor_BA, 0
            # One mask for each kind of layer, because layers of the same kind attend to the same
            # rows.
            masks = {
                view: BlockMask.make(*in_whole(batch, last_BA), num_slots, view, first_ahead=ahead)
                for view in {*views}
            }
            x_BND = F.embedding(ids_BAS.flatten(1), self._embed_VD).to(context_BTD.dtype)
            # Keys of the context are already rotated. Both rotations use absolute positions.
            cos_sin = self._rotary(positions_BN, context_BTD)
            for layer, context, view in zip(layers, contexts, views, strict=True):
                x_BND = self._run(layer, x_BND, cos_sin, context, masks[view])
            outs.append(self.norm(x_BND).unflatten(1, (-1, num_slots)))
        return torch.cat(outs, dim=1)

    def _run(self, layer: nn.Module, *inputs: Any) -> Tensor:
        if not (self.recomputes and torch.is_grad_enabled()):
            return cast(Tensor, layer(*inputs))
        return cast(Tensor, checkpoint(layer, *inputs, use_reentrant=False))

    def init_from_layers(self, layers: Sequence[nn.Module], final_norm: nn.Module) -> None:
        """Start from target layers, usually the last, on the stream of the highest aux layer.

        Tensors with other shapes stay random.

        Raises:
            ValueError: the number of layers differs from the draft's.
        """
        if len(layers) != len(self.layers):
            raise ValueError(f"{len(layers)} layers were given to a draft with {len(self.layers)}")
        theirs = {
            f"layers.{i}.{name}": v
            for i, layer in enumerate(layers)
            for name, v in layer_weights(layer).items()
        }
        # With `fc` as below, the context starts as the highest stream under the target's final
        # norm.
        theirs["norm.weight"] = theirs["hidden_norm.weight"] = layer_weights(final_norm)["weight"]
        with torch.no_grad():
            for name, mine in self.state_dict().items():
                if name in theirs and theirs[name].shape == mine.shape:
                    mine.copy_(theirs[name])
            self.fc.weight.zero_()[:, -self.shape.hidden_size :].fill_diagonal_(1.0)

    def export(
        self,
        folder: Path,
        dtype: torch.dtype | None = None,
        *,
        weights: Mapping[str, Tensor] | None = None,
        like: Path | None = None,
        layout: Literal["vllm", "speculators"] = "vllm",
        target_name: str = "",
        num_speculative_tokens: int | None = None,
    ) -> None:
        """Write a folder for the vLLM method of this name. `like`, if given, determines the layout.

        The embeddings are omitted, because they are the target's. The output head is omitted too,
        unless the vocabulary is reduced; then the folder contains the head's rows and `d2t`. The
        layout "speculators" of the package with this name also names the target, from which the
        package takes everything else, and `num_speculative_tokens`, which defaults to the number of
        tokens in a block. If `like` has this layout, both are taken from there.
        """
        earlier = read_config(like) if like else {}
        is_speculators = layout == "speculators" or speculators.MARK in earlier
        tensors = dict(weights or self.state_dict())
        if self._draft_ids_W is not None:
            maps = id_maps(self._draft_ids_W, self.shape.vocab_size)
            if (
                not is_speculators
            ):  # the package uses it to find the target's rows; vLLM does not read it
                del maps["t2d"]
            tensors |= {"lm_head.weight": self._head_WD, **maps}
        served = {
            **(self._served_by_speculators() if is_speculators else self._served()),
            "block_size": self.config.block_size,
        }
        layer = {
            **self.shape.hf_config(),
            "num_hidden_layers": self.config.num_layers,
            **write_views(self.config.views),
        }
        if is_speculators:
            # A head from another trainer is written back unchanged, and the doctor reports it.
            if speculators.MARK not in earlier:
                require_speculators(self.family, self.config.views)
            layer |= write_speculators(self.config.views)[0]
            frame = speculators.frame(
                self.family,
                self.speculators_architecture,
                speculative_tokens=num_speculative_tokens or self.max_tokens,
                target_name=target_name,
                target_architectures=self._target_architectures,
            )
            method = earlier.get("speculators_config") or frame["speculators_config"]
            frame = {**frame, "transformer_layer_config": layer, "speculators_config": method}
        else:
            frame = {**layer, "architectures": [self.architecture]}
        config = {
            **frame,
            "draft_vocab_size": len(self._head_WD),
            **served,
            "redraft": self._training(served),
        }
        write_head(folder, tensors, config, dtype or self.fc.weight.dtype, self.float32, like)

    def _training(self, served: Mapping[str, Any]) -> dict[str, Any]:
        rotation = {
            "head_dim": self.shape.head_dim,
            "rope_parameters": dict(self.shape.rope_parameters),
        }
        # No engine reads these options. Exports keep them for further training.
        kept = {"num_anchors": self.config.num_anchors, "gamma": self.config.gamma}
        windows = {"window": self.config.window, "full_layers": list(self.config.full_layers)}
        recorded = {**served, **rotation, **windows}
        return {"family": self.family, **kept, TRAINED_WITH: recorded}

    def _served(self) -> dict[str, Any]:
        # vLLM counts layers by index, so its k is our k + 1. Readers have different defaults.
        ids = [layer - 1 for layer in self.aux_layer_ids]
        section = {"mask_token_id": self._mask_token_id, "target_layer_ids": ids}
        is_causal = self._direction()
        if is_causal is None:
            return {SECTION: section}
        # z-lab's code reads the key only at the top level. Without it, the code treats layers with
        # a window as causal.
        top = {"is_causal": is_causal} if is_causal or self.config.window else {}
        return {SECTION: section | {"causal": is_causal}, **top}

    def _direction(self) -> bool | None:
        """Return whether all layers are causal. None if only the layers with a window are."""
        directions = {view.is_causal for view in self.config.views}
        return directions.pop() if len(directions) == 1 else None

    def _served_by_speculators(self) -> dict[str, Any]:
        return {
            "mask_token_id": self._mask_token_id,
            "aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "sample_from_anchor": self.config.first_slot == 0,
            **write_speculators(self.config.views)[1],
        }

    @classmethod
    def load(cls, folder: Path, target: Target) -> Self:
        """Load a head from a folder in either layout, written by redraft or another trainer.

        Raises:
            ValueError: a tensor is missing, unknown or has the wrong shape; the embeddings or the
                head are not the target's; or the head attends in a way that is not supported here.
        """
        stored = read_config(folder)
        # This raises an error with the cause, which transformers would truncate.
        trained_views(stored, folder)
        config = translate(stored, folder)
        tensors = read_tensors(folder)
        draft_ids_W = read_ids(tensors, len(target.head_VD), folder)
        head_WD = target.head_VD if draft_ids_W is None else target.head_VD[draft_ids_W]
        target.drop_copy(tensors, EMBEDDINGS, target.embed_VD, folder)
        target.drop_copy(tensors, HEAD, head_WD, folder)
        shape = LlamaShape.from_head_config(config, target.config, folder, qk_norm=True)
        head = cls(cls._read(config, folder), target, draft_ids_W, shape)
        load_into(head, tensors, folder)
        return head

    @staticmethod
    def _read(config: Mapping[str, Any], folder: Path) -> Config:
        """Read the options of a checkpoint.

        Raises:
            ValueError: its attention is not supported here.
        """
        # A DSpark head without a Markov head (markov_rank 0) has its keys at the top level, and its
        # anchor proposes a token by default.
        section = {**config, **(config.get(SECTION) or {})}
        if section.get("sample_from_anchor", "markov_rank" in section):
            raise ValueError(
                f"{folder}: the anchor proposes a token (sample_from_anchor), which neither "
                f"redraft nor vLLM supports for DFlash"
            )
        return Config(**read_options(config, section, folder))


def has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def choose_anchors(
    batch: Batch, limit: int | None, *, has_ranks: bool = False
) -> tuple[Tensor, Tensor]:
    """Choose anchors: (rows before them, int64 [B, A]; whether a row is chosen, bool [B, T]).

    The rows are in ascending order. A row can be chosen only if a label follows its anchor. If a
    row of the batch has fewer than `limit` such rows, other rows fill the gap and are not marked as
    chosen. See `choose_rows`. If ranks share the batch, they choose among all of its rows, and each
    rank gets the chosen rows that it holds.
    """
    if (shared := batch.shared) is not None:
        _, is_chosen_BT = choose_anchors(shared.whole, limit)
        is_here_Bt = is_chosen_BT[:, shared.rows_t] & shared.is_own_t
        # Use the same number of anchors on each rank (the maximum), for the reason given below.
        most = max(most_of_ranks(shared, is_chosen_BT), 1)
        return is_here_Bt.byte().topk(most, dim=1).indices.sort(dim=1).values, is_here_Bt
    has_label_BT = label_rows(batch, 1)
    if limit is None:
        # Training passes a limit, so it never gets here. All ranks must use the same number of
        # blocks, because ZeRO-3 gathers the weights for each block. In a single process, `int`
        # waits for the device.
        limit = batch.input_ids_BT.shape[1] if has_ranks else max(int(has_label_BT.sum(1).max()), 1)
    rows_BA = choose_rows(batch, has_label_BT, limit).sort(dim=1).values
    chosen_BT = torch.zeros_like(has_label_BT).scatter(1, rows_BA, True)
    return rows_BA, chosen_BT & has_label_BT
