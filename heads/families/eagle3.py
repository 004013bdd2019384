"""EAGLE-3: a layer that reads the embedding and a mix of the target's layers.

See Li et al., arXiv 2503.01840.

    g[t] = fc(concat of the target's residual stream after each aux layer)
    layer([input_layernorm(embed(x[t+1])), hidden_norm(g[t])]) + g[t] -> g'[t+1], read by the head after `norm`

g' is fed back before `norm`, or after it with `norm_output`. EAGLE-3.1 added the options `fc_norm`
and `norm_output`. In a head with several layers, all but the first are Llama layers that read the
previous layer's output.

B = batch, T = tokens, L = aux layers, D = hidden, V = target vocabulary, W = draft vocabulary.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.files import speculators
from redraft.files.folder import TRAINED_WITH, read_config, tensor_files, trained_with
from redraft.files.foreign import AUX_LAYERS, SECTION, nested_layers
from redraft.files.tensors import load_into, read_tensors, write_head
from redraft.files.windows import (
    beside_target,
    read_windows,
    require_trained_window,
    trained_views,
    write_views,
)
from redraft.heads import options
from redraft.heads.draft import Batch, DraftStep, TargetSignal, aux_streams
from redraft.heads.nn.attention import Memory
from redraft.heads.nn.layers import Attention, GatedMLP, PreNormLayer, RMSNorm, Rotary, norm
from redraft.heads.nn.precision import product_dtype
from redraft.heads.nn.recurrent import unroll
from redraft.heads.nn.vocabulary import check_ids, id_maps, read_ids
from redraft.heads.shape import LlamaShape
from redraft.heads.target import EMBEDDINGS, Target, aux_layers, layer_weights

Config = options.Eagle3


ARCHITECTURE = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Options that change the head's arithmetic. Engines read them from config.json under these names.
"""


QK_NORMED = ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose layers norm queries and keys. vLLM adds the prefix Eagle3 to the last one."""


class Layer(nn.Module):
    """A Llama layer whose attention reads the token's embedding next to the feature."""

    def __init__(self, shape: LlamaShape, norm_before_residual: bool) -> None:
        super().__init__()
        self._norm_before_residual = norm_before_residual
        self.input_layernorm = norm(shape)
        self.hidden_norm = norm(shape)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = norm(shape)
        self.mlp = GatedMLP(shape)

    def forward(
        self, embed_BTD: Tensor, feature_BTD: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory
    ) -> Tensor:
        normed_BTD = self.hidden_norm(feature_BTD)
        x_BTD = normed_BTD if self._norm_before_residual else feature_BTD
        # [B, T, 2 D] with the embedding first. The other order has the same shapes and would fail
        # silently.
        attended = self.self_attn(
            torch.cat([self.input_layernorm(embed_BTD), normed_BTD], dim=-1), cos_sin, memory
        )
        x_BTD = x_BTD + attended
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class Eagle3(nn.Module):
    family = "eagle3"
    speculators_architecture = "Eagle3Speculator"  # the class in the package `speculators`
    is_autoregressive = False
    is_block = False
    recomputes = False
    max_tokens: int | None = None
    engine_output = 0
    config: options.LayerMix

    def __init__(
        self,
        config: options.LayerMix,
        target: Target,
        draft_ids_W: Tensor | None = None,
        shape: LlamaShape | None = None,
    ) -> None:
        """Create an untrained head with the target's embeddings and a copy of its output head.

        `draft_ids_W` are the target ids to propose, ascending; None means all ids. `shape` defaults
        to the shape of the target's layers.

        Raises:
            ValueError: the target does not have these layers or ids.
        """
        super().__init__()
        self.config = config
        self.shape = shape or LlamaShape.of_head(config, target.config)
        self.aux_layer_ids = aux_layers(config.aux_layer_ids, target.config.num_hidden_layers)
        self.views = beside_target(config.views, target.config)
        hidden = self.shape.hidden_size
        # A plain tensor is not a parameter: it is not trained or saved, and `.to` and `.float` do
        # not change it.
        self._embed_VD = target.embed_VD
        self._rotary = Rotary.from_shape(self.shape)
        if draft_ids_W is not None:
            check_ids(draft_ids_W, self.shape.vocab_size)
        self._draft_ids_W: Tensor | None
        # Not in the state dict, because a checkpoint stores the offsets `d2t`, which `export`
        # computes.
        self.register_buffer("_draft_ids_W", draft_ids_W, persistent=False)
        self.fc = nn.Linear(len(self.aux_layer_ids) * hidden, hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(self.fc.in_features, eps=self.shape.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm(self.shape) for _ in self.aux_layer_ids)
        self.midlayer = Layer(self.shape, config.norm_before_residual)
        # They are named by their index among all layers, as in a checkpoint, where the first layer
        # is `midlayer`. Each reads only the previous layer's output.
        self.layers = nn.ModuleDict(
            {
                str(i): PreNormLayer(self.shape, Attention(self.shape, hidden))
                for i in range(1, config.num_layers)
            }
        )
        self.norm = norm(self.shape)
        rows_WD = target.head_VD if self._draft_ids_W is None else target.head_VD[self._draft_ids_W]
        if config.own_head:
            self.lm_head = nn.Linear(hidden, len(rows_WD), bias=False)
            self.lm_head.weight.data.copy_(rows_WD)
        else:
            self._frozen_head_WD = rows_WD

    @property
    def head(self) -> Tensor:
        """Return the rows of the output head, [W, D]."""
        return self.lm_head.weight if self.config.own_head else self._frozen_head_WD

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Look up the target's embeddings for these ids, [B, T, D]."""
        return F.embedding(ids_BT, self._embed_VD)

    def step(
        self, ids_BT: Tensor, feature_BTD: Tensor, position_ids_BT: Tensor, *memories: Memory
    ) -> tuple[Tensor, Tensor]:
        """Return the output head's input and the feature to feed back, both [B, T, D].

        `memories` has one entry per layer.
        """
        cos_sin = self._rotary(position_ids_BT, feature_BTD)
        embed_BTD = self.embed(ids_BT).to(feature_BTD.dtype)
        x_BTD = self.midlayer(embed_BTD, feature_BTD, cos_sin, memories[0])
        for layer, memory in zip(self.layers.values(), memories[1:], strict=True):
            x_BTD = layer(x_BTD, cos_sin, memory)
        normed_BTD = self.norm(x_BTD)
        return normed_BTD, normed_BTD if self.config.norm_output else x_BTD

    def feature(self, signal: TargetSignal) -> Tensor:
        """Compute fc(concat aux), the feature for step 0, [B, T, D].

        Raises:
            ValueError: the signal has different aux layers.
        """
        is_normed = self.config.norm_before_fc or self.config.fc_norm
        # Without a norm, `fc` reads the streams directly. Under autocast, a copy in a wider dtype
        # would be narrowed again.
        dtype = self.fc.weight.dtype if is_normed else product_dtype(self.fc.weight)
        return self.mix(aux_streams(signal, self.aux_layer_ids).to(dtype))

    def mix(self, aux_BTLD: Tensor) -> Tensor:
        """Return fc(concat of the streams), [B, T, D]."""
        out: Tensor = self.fc(self.concat(aux_BTLD))
        return out

    def concat(self, aux_BTLD: Tensor) -> Tensor:
        """Concatenate the streams, [B, T, L D], with the norms that the options enable."""
        # There is one norm over all L * D numbers, or one for each stream. vLLM uses the same
        # order.
        if self.config.norm_before_fc:
            aux_BTLD = self.input_norm(aux_BTLD.flatten(2)).view_as(aux_BTLD)
        if self.config.fc_norm:
            aux_BTLD = torch.stack(
                [n(a) for n, a in zip(self.fc_norm, aux_BTLD.unbind(2), strict=True)], dim=2
            )
        return aux_BTLD.flatten(2)

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        """Return steps with shifts 1, 2, ..., which use the head's features and the true tokens."""
        feature_BTD, rule = self.feature(signal), self.shape.rule
        return unroll(
            self,
            batch,
            feature_BTD,
            self.head,
            num_steps,
            draft_ids_W=self._draft_ids_W,
            rule=rule,
            windows=[view.window for view in self.views],
        )

    def init_from_layers(self, layers: Sequence[nn.Module], final_norm: nn.Module) -> None:
        """Start from target layers, usually the last, on the stream of the highest aux layer.

        Tensors of equal shape are copied. The attention projections in the first layer are twice as
        wide as the target's: the half for the feature is copied, and the half for the embedding
        stays random. Tensors of any other shape stay random too.

        Raises:
            ValueError: the number of layers differs from the draft's.
        """
        if len(layers) != self.config.num_layers:
            raise ValueError(
                f"{len(layers)} layers were given to a draft with {self.config.num_layers}"
            )
        layer, *others = layers
        theirs = {f"midlayer.{name}": value for name, value in layer_weights(layer).items()}
        # The target's layer normalises this state in the way of `hidden_norm`. OLMo 2 has no such norm.
        norm = theirs.pop("midlayer.input_layernorm.weight", None)
        if norm is not None:
            theirs["midlayer.hidden_norm.weight"] = norm
        for i, other in enumerate(others, start=1):
            theirs |= {f"layers.{i}.{name}": value for name, value in layer_weights(other).items()}
        theirs["norm.weight"] = layer_weights(final_norm)["weight"]
        hidden = self.shape.hidden_size
        with torch.no_grad():
            for name, own in self.state_dict().items():
                value = theirs.get(name)
                if value is not None and value.shape == own.shape:
                    own.copy_(value)
                elif (
                    value is not None
                    and value.shape[-1] == hidden
                    and own.shape == (len(value), 2 * hidden)
                ):
                    own[:, hidden:].copy_(value)
            # [0 ... 0 I]: g starts as the highest layer's stream.
            self.fc.weight.zero_()[:, -hidden:].fill_diagonal_(1.0)

    def export(
        self,
        folder: Path,
        dtype: torch.dtype | None = None,
        *,
        weights: Mapping[str, Tensor] | None = None,
        like: Path | None = None,
        layout: Literal["vllm", "speculators"] = "vllm",
        target_name: str = "",
        num_speculative_tokens: int = 3,
    ) -> None:
        """Write a folder for vLLM's `method: eagle3`; `like`, if given, determines the layout.

        The layout "vllm" omits the embeddings, and also the head unless it was trained, because
        vLLM shares the target's. The layout "speculators" of the package with this name contains
        both. It also contains the target's name and `num_speculative_tokens`. With `like`, the
        tensors have the names that they have there.
        """
        tensors = self._tensors(weights or self.state_dict())
        if layout == "speculators" or (like and speculators.MARK in read_config(like)):
            config = self._speculators_config(target_name, num_speculative_tokens)
            tensors = {
                name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
            }
            # speculators 0.9 leaves absent tensors uninitialised. vLLM shares copies that equal the
            # target's.
            tensors = {
                "embed_tokens.weight": self._embed_VD,
                "lm_head.weight": self.head,
                **tensors,
            }
        else:
            config = self._vllm_config()
        if like:
            tensors = _name_like(tensors, tensor_files(like))
        write_head(folder, tensors, config, dtype or self.fc.weight.dtype, like=like)

    def _tensors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add a reduced vocabulary's maps, and its rows of the target's head, to the weights."""
        if self._draft_ids_W is None:
            return dict(weights)
        # The weights come last: if they contain a trained head, it replaces the target's rows.
        maps = id_maps(self._draft_ids_W, self.shape.vocab_size)
        return {"lm_head.weight": self.head, **weights, **maps}

    def _vllm_config(self) -> dict[str, Any]:
        return {
            **self._layer_config(),
            **self._architecture(),
            "architectures": [
                "Eagle3Qwen3ForCausalLM" if self.shape.qk_norm else "LlamaForCausalLMEagle3"
            ],
            # vLLM counts the layers by this key. If only the ids at the top level are given, it
            # assumes 3.
            "num_aux_hidden_states": len(self.aux_layer_ids),
            "redraft": self._training(),
        }

    def _speculators_config(self, target_name: str, num_speculative_tokens: int) -> dict[str, Any]:
        frame = speculators.frame(
            self.family,
            self.speculators_architecture,
            speculative_tokens=num_speculative_tokens,
            target_name=target_name,
            target_architectures=["LlamaForCausalLM"],
        )
        # vLLM builds its config from this inner section, so the number of layers must be here too.
        layer = {**self._layer_config(), "num_aux_hidden_states": len(self.aux_layer_ids)}
        return {
            **self._architecture(),
            **frame,
            "transformer_layer_config": layer,
            "redraft": self._training(),
        }

    def _layer_config(self) -> dict[str, Any]:
        layers = {**self.shape.hf_config(), "num_hidden_layers": self.config.num_layers}
        return {**layers, **write_views(self.config.views)} if self.config.window else layers

    def _architecture(self) -> dict[str, Any]:
        return {
            **{name: getattr(self.config, name) for name in ARCHITECTURE},
            "draft_vocab_size": len(self.head),
            AUX_LAYERS: list(self.aux_layer_ids),
        }

    def _training(self) -> dict[str, Any]:
        kept = {"own_head", "num_steps", "step_decay"}
        training = {name: value for name, value in asdict(self.config).items() if name in kept}
        recorded = {
            **self._architecture(),
            "window": self.config.window,
            "full_layers": list(self.config.full_layers),
            **self.shape.record(),
        }
        return {"family": self.family, **training, TRAINED_WITH: recorded}

    @classmethod
    def load(cls, folder: Path, target: Target) -> Self:
        """Load a head from an exported folder in either layout, or from another trainer's folder.

        Raises:
            ValueError: a tensor, the pair of d2t and t2d, or the embeddings do not fit.
        """
        config = read_config(folder)
        # This raises an error with the cause, which transformers would truncate.
        trained_views(config, folder)
        tensors = {_our_name(name): tensor for name, tensor in read_tensors(folder).items()}
        draft_ids_W = read_ids(tensors, len(target.head_VD), folder)
        target.drop_copy(tensors, EMBEDDINGS, target.embed_VD, folder)
        options = cls._read(config, folder, own_head="lm_head.weight" in tensors)
        if not options.own_head:
            tensors.pop("lm_head.weight", None)
        layers = config.get("transformer_layer_config", config)
        num_layers = layers.get("num_hidden_layers", 1)
        windows = read_windows(layers, num_layers, folder)
        require_trained_window(windows["window"], trained_with(config).get("window"), folder)
        options = replace(options, num_layers=num_layers, **windows)
        is_normed = has_qk_norm(config)
        shape = LlamaShape.from_head_config(layers, target.config, folder, qk_norm=is_normed)
        head = cls(options, target, draft_ids_W, shape)
        load_into(head, tensors, folder)
        return head

    @staticmethod
    def _read(config: Mapping[str, Any], folder: Path, *, own_head: bool) -> Any:
        """Read a checkpoint's options: architecture (engine's keys), training (redraft's keys)."""
        return Config(
            **read_mix(config),
            norm_output=config.get("norm_output", False),
            # redraft's own record decides, because a reduced vocabulary puts even a frozen head
            # into the file.
            **{"own_head": own_head, **options.read_record(Config, config)},
        )


def read_mix(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the architecture that EAGLE-3 and P-EAGLE share from config.json, as vLLM does."""
    nested = config.get(SECTION) or {}
    return {
        "aux_layer_ids": tuple(config.get(AUX_LAYERS) or nested_layers(config)),
        "norm_before_fc": nested.get("norm_before_fc", config.get("norm_before_fc", False)),
        # An absent key means true in a speculators config of EAGLE-3, and false in others.
        "norm_before_residual": config.get(
            "norm_before_residual", config.get(speculators.MARK) == "eagle3"
        ),
        "fc_norm": config.get("fc_norm", False),
    }


def has_qk_norm(config: Mapping[str, Any]) -> bool:
    """Whether vLLM's class for this config.json norms queries and keys, as Qwen3 does.

    Outside the speculators layout, vLLM chooses the class by `architectures`.
    """
    named = config.get("architectures")
    if speculators.MARK in config or not named:
        layers: Mapping[str, Any] = config.get("transformer_layer_config", config)
        return layers.get("model_type") == "qwen3"
    return bool({*QK_NORMED}.intersection(named))


def _our_name(name: str) -> str:
    """Return the name of a tensor in the module for its name in any trainer's checkpoint."""
    # This is speculators' name for the first layer. vLLM renames it in the other direction.
    name = name.replace("layers.0.", "midlayer.")
    # SGLang and TensorRT-LLM use this name in all later layers.
    return re.sub(r"^(layers\.\d+)\.hidden_norm\b", r"\1.input_layernorm", name)


def _name_like(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Rename the layers' tensors as in `names`, because trainers name them differently.

    `_our_name` reads all of these names.
    """
    renamed = {}
    for name, tensor in tensors.items():
        first = name.replace("midlayer.", "layers.0.")
        later = re.sub(r"^(layers\.\d+)\.input_layernorm\b", r"\1.hidden_norm", name)
        renamed[next((each for each in (name, first, later) if each in names), name)] = tensor
    return renamed
