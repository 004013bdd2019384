"""The standalone draft: a small causal LM with the target's vocabulary.

Any engine can serve it as a draft model.

See Leviathan et al., arXiv 2211.17192. It starts from a checkpoint, from layers of the target, or
from random weights.

B = batch, T = tokens, V = vocabulary, D = hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.files.checkpoint import (
    attention_of,
    load_causal_lm,
    load_tokenizer,
    new_model,
    weight_dtype,
)
from redraft.files.tokenizers import check_same_tokenizer, fit_vocabulary
from redraft.heads import options
from redraft.heads.draft import Batch, DraftStep, TargetSignal, attention_mask, label_rows
from redraft.heads.logits import LogitRule
from redraft.heads.nn.causal_lm import (
    PREFIX_ATTENTION,
    find_rule,
    language_model,
    prefix_arguments,
    take_prefixes,
)
from redraft.heads.target import Target

ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types with an attention mask. A recurrent layer would carry state from one packed document
to the next.
"""

HEAD_DIM = 64  # of a new draft
LAYER_NUMBERS, FIRST_LAYERS = (
    ("mlp_only_layers", "moe_layers"),
    ("first_k_dense_replace", "num_dense_layers"),
)
"""Keys of MoE configs: lists of layer numbers, and the number of dense layers at the beginning."""

Init = options.Standalone


class StandaloneDraft(nn.Module):
    """A Hugging Face causal LM as a draft. `model` is the LM itself."""

    is_autoregressive = True
    is_block = False
    aux_layer_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    engine_output = 0

    def __init__(self, model: Any) -> None:
        """Wrap a causal LM as a draft.

        Raises:
            ValueError: the head has a bias.
        """
        super().__init__()
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            raise ValueError(
                f"{type(model).__name__} has a bias in its head: only a plain matrix is supported"
            )
        self.model, self._config = model, model.config.get_text_config()
        # An image encoder reads no text, so DDP would wait for its gradients in vain.
        parts = (language_model(model), model.get_output_embeddings())
        read = {id(weight) for part in parts for weight in part.parameters()}
        for weight in model.parameters():
            if id(weight) not in read:
                weight.requires_grad_(False)
        self._rule = LogitRule.of(self._config)
        self._takes_prefixes = not getattr(self._config, "attention_dropout", 0) and take_prefixes(
            model
        )
        # A new module is in training mode, but a loaded model is in evaluation mode. The wrapper
        # copies the model's mode.
        self.train(model.training)

    @classmethod
    def load(
        cls, folder: str | Path, target: Target | None = None, dtype: torch.dtype | None = None
    ) -> StandaloneDraft:
        """Load the draft from a model folder or hub name, in `dtype` (None: as stored).

        The draft shares nothing with a target. Raises the same errors as `load_causal_lm` and
        `make_draft`.
        """
        model = load_causal_lm(folder, dtype)
        _require_exact(model)
        return cls(model)

    def export(
        self,
        folder: Path,
        dtype: torch.dtype | None = None,
        *,
        weights: Mapping[str, Tensor] | None = None,
        like: Path | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Write a folder for vLLM and transformers, with `tokenizer` or the tokenizer of `like`.

        Raises:
            ValueError: both are missing. Without a tokenizer, draft and target cannot be compared.
        """
        if tokenizer is None:
            if like is None:
                raise ValueError(
                    "a standalone draft must be exported with its tokenizer: give tokenizer or like"
                )
            tokenizer = load_tokenizer(like)
        dtype = dtype or self.model.dtype
        weights = {
            name.removeprefix("model."): tensor
            for name, tensor in (weights or self.state_dict()).items()
        }
        cast: dict[
            int, Tensor
        ] = {}  # keyed by address, so that tied weights stay one tensor and are stored once
        state = {
            name: cast.setdefault(
                tensor.data_ptr(),
                tensor.to(weight_dtype(self.model, name, dtype))
                if tensor.is_floating_point()
                else tensor,
            )
            for name, tensor in weights.items()
        }
        self.model.save_pretrained(folder, state_dict=state)
        self.model.config.dtype = dtype  # save_pretrained wrote the dtype used in training
        self.model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    @property
    def recomputes(self) -> bool:
        return bool(self.model.is_gradient_checkpointing)

    @recomputes.setter
    def recomputes(self, again: bool) -> None:
        if again:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def feature(self, signal: TargetSignal | None) -> None:
        """Return None, because the draft reads nothing from the target."""

    def draft_steps(
        self, batch: Batch, signal: TargetSignal | None = None, num_steps: int | None = None
    ) -> list[DraftStep]:
        """Return one step with shift 0, which covers any number of draft tokens.

        It does not read the signal.
        """
        output = language_model(self.model)(
            input_ids=batch.input_ids_BT,
            position_ids=batch.position_ids_BT,
            use_cache=False,
            **self._attention(batch),
        )
        return [
            DraftStep(
                hidden_BTD=output.last_hidden_state,
                head_WD=self.model.get_output_embeddings().weight,
                shift=0,
                mask_BT=label_rows(batch, 0),
                rule=self._rule,
            )
        ]

    def _attention(self, batch: Batch) -> dict[str, Any]:
        """Create the arguments that confine attention to each document.

        The arguments are ranges of keys if the model accepts such ranges, and otherwise a mask.
        """
        if self._takes_prefixes:
            return prefix_arguments(batch)
        return {"attention_mask": self._mask(batch)}

    def _mask(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Create the mask for each document and window, which replaces the model's own masks."""
        mask_B1TT, window = attention_mask(batch), getattr(self._config, "sliding_window", None)
        if not window or window >= batch.input_ids_BT.shape[1]:
            return self._for_scores(mask_B1TT)
        # A window of w keys contains the row itself and the w - 1 rows before it. E.g. for a window
        # of 3 at row 5, tril(-3) contains keys 0..2, so 3, 4 and 5 stay.
        sliding_B1TT = mask_B1TT & ~mask_B1TT.tril(-window)
        if not hasattr(self._config, "layer_types"):
            return self._for_scores(sliding_B1TT)
        masks = {"full_attention": mask_B1TT, "sliding_attention": sliding_B1TT}
        return {name: self._for_scores(mask) for name, mask in masks.items()}

    def _for_scores(self, mask_B1TT: Tensor) -> Tensor:
        """Convert the mask for the attention in use: eager attention adds it to the scores."""
        if self._config._attn_implementation != "eager":
            return mask_B1TT
        dtype = self.model.dtype
        return torch.zeros_like(mask_B1TT, dtype=dtype).masked_fill(
            ~mask_B1TT, torch.finfo(dtype).min
        )


def make_draft(init: Init, target: Any, tokenizer: Any, seed: int = 0) -> StandaloneDraft:
    """Create the draft described by `init`, identical at every call and on every rank.

    It is in float32, because bf16's 8 bits are too few for AdamW's small steps. `tokenizer` is the
    target's, and `seed` determines random weights.

    Raises:
        ValueError: the checkpoint has a different tokenizer, recurrent layers, attention with
            sinks, or logits that do not follow its config.
    """
    draft = _make_initial(init, target, tokenizer, seed)
    if recurrent := set(getattr(draft.model.config, "layer_types", None) or ()) - ATTENTION_TYPES:
        raise ValueError(
            f"{type(draft.model).__name__} has layers of {', '.join(sorted(recurrent))}, whose "
            "state would leak from "
            "one packed document into the next: choose a draft with attention layers only"
        )
    _require_exact(draft.model)
    return draft.float()


def _require_exact(model: Any) -> None:
    """Reject a draft whose attention accepts no document mask, or whose logits break the rule.

    `find_rule` returns this rule.

    Raises:
        ValueError: the draft fails one of these conditions.
    """
    config = model.config.get_text_config()
    attention, wanted = config._attn_implementation, attention_of(config) or "sdpa"
    if attention not in (wanted, PREFIX_ATTENTION):
        raise ValueError(
            f"a draft of type {config.model_type} must be trained with {wanted} attention, not {attention}"
        )
    find_rule(model)


def _make_initial(init: Init, target: Any, tokenizer: Any, seed: int) -> StandaloneDraft:
    torch.manual_seed(seed)
    target_config = target.config.get_text_config()
    if init.layers and any(p.is_meta or isinstance(p, DTensor) for p in target.parameters()):
        raise ValueError(
            "a draft made of the target's layers needs the target's weights, which the endpoint "
            "does not provide: "
            "start from draft.checkpoint or draft.num_layers, or read the target from its folder "
            "(--signal.kind model or cache)"
        )
    if init.layers:
        return prune_layers(target, init.layers)
    if init.num_layers:
        return from_config(target_config, num_layers=init.num_layers, hidden_size=init.hidden_size)
    assert init.checkpoint is not None
    return from_checkpoint(init.checkpoint, tokenizer, target_config.vocab_size)


def from_checkpoint(
    name_or_path: str | Path, target_tokenizer: Any, vocab_size: int
) -> StandaloneDraft:
    """Load the draft from a model folder or hub name, with as many vocabulary rows as the target.

    Raises:
        ValueError: the draft has a different tokenizer.
    """
    model = load_causal_lm(name_or_path)
    check_same_tokenizer(target_tokenizer, load_tokenizer(name_or_path))
    # The tokenizers are equal, so only the padding of the table may differ.
    fit_vocabulary(model, vocab_size)
    return StandaloneDraft(model)


def prune_layers(target: Any, layers: Sequence[int]) -> StandaloneDraft:
    """Create a draft from the target's `layers` (0 is the first), embeddings, final norm and head.

    All weights are copied.

    Raises:
        ValueError: `layers` is empty, out of range or not ascending, the layers would have
            different kinds at their new positions, or the target also reads images.
    """
    if target.config.get_text_config() is not target.config:
        raise ValueError(
            f"{type(target).__name__} also reads images, so a draft made from its layers would too: "
            "start from draft.checkpoint or draft.num_layers"
        )
    prefix, total = _find_layers(target)
    if (
        not layers
        or list(layers) != sorted(set(layers))
        or not 0 <= layers[0] <= layers[-1] < total
    ):
        raise ValueError(
            f"the layers to keep must be ascending numbers from 0 to {total - 1}, not {list(layers)}"
        )
    config = copy.deepcopy(target.config)
    for key, value in target.config.to_dict().items():
        if key in LAYER_NUMBERS and value:
            setattr(config, key, [new for new, old in enumerate(layers) if old in value])
        elif key in FIRST_LAYERS and value:
            setattr(config, key, sum(layer < value for layer in layers))
        elif (
            "layer" in key and isinstance(value, list) and len(value) == total
        ):  # has one entry for each layer
            setattr(config, key, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    draft = new_model(config, target.dtype)
    state = {
        name: tensor
        for name, tensor in target.state_dict().items()
        if not name.startswith(f"{prefix}.")
    }
    for new, old in enumerate(layers):
        layer = target.get_submodule(f"{prefix}.{old}").state_dict()
        state |= {f"{prefix}.{new}.{name}": tensor for name, tensor in layer.items()}
    try:
        draft.load_state_dict(state)
    except RuntimeError:  # the config counts layers in yet another way
        kinds = (
            f"layers {list(layers)} of {type(target).__name__} would be of different "
            "kinds at their new positions"
        )
        raise ValueError(
            f"{kinds}: choose different layers, or start from draft.num_layers"
        ) from None
    draft.generation_config = copy.deepcopy(target.generation_config)
    return StandaloneDraft(draft.to(target.device).train(target.training))


def from_config(target_config: Any, *, num_layers: int, hidden_size: int) -> StandaloneDraft:
    """Create a new, randomly initialised draft with Llama's architecture.

    It has the target's vocabulary, context window and special ids.

    Raises:
        ValueError: `hidden_size` is not a multiple of HEAD_DIM.
    """
    if hidden_size % HEAD_DIM:
        raise ValueError(f"hidden_size {hidden_size} is not a multiple of head_dim {HEAD_DIM}")
    config = LlamaConfig(
        vocab_size=target_config.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=-(-hidden_size * 8 // 3 // 64) * 64,  # as in `LlamaShape.from_config`
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=target_config.max_position_embeddings,
        rms_norm_eps=1e-6,
        tie_word_embeddings=getattr(target_config, "tie_word_embeddings", False),
        bos_token_id=target_config.bos_token_id,
        eos_token_id=target_config.eos_token_id,
        pad_token_id=target_config.pad_token_id,
        attn_implementation="sdpa",
    )
    return StandaloneDraft(LlamaForCausalLM(config).float())


def _find_layers(model: Any) -> tuple[str, int]:
    """Return the prefix of the decoder layers in the state dict, and the number of layers."""
    total = model.config.num_hidden_layers
    # Find the list by its length, because its name depends on the architecture (model.layers,
    # transformer.h).
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            return name, total
    raise ValueError(f"{type(model).__name__} has no list of {total} decoder layers to prune")
