"""Run causal LMs of `transformers` on packed rows.

Each token attends only to its own document, given as a range of keys.

    from outside, once          take_prefixes(model)
    each pass                   model(ids, positions, **prefix_arguments(batch))
    a pass without arguments    SDPA, as before

With SDPA alone, transformers would build a mask [B, 1, T, T], compute the scores of all pairs, and
repeat the key heads.

B = batch, T = tokens, H = query heads, E = head size.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from redraft.heads.draft import Batch, SharedRows
from redraft.heads.logits import LogitRule
from redraft.heads.nn.precision import product_dtype
from redraft.heads.nn.prefix import Prefixes, attend
from redraft.heads.nn.shares import gather_keys, prefixes_of

# Name of our attention in transformers; without prefixes, it is SDPA.
PREFIX_ATTENTION = "redraft_prefixes"

PLAIN_ATTENTION = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "olmo2", "olmoe", "phi3",
    "glm4", "glm4_moe", "seed_oss", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2",
    "starcoder2",
)  # fmt: skip
"""Model types whose layers pass additional arguments on to attention, and compute only softmax(q k)
v there.
"""


FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm", "final_norm")
"""Names of the final norm in most models, Mamba and Nemotron-H, Falcon H1 and Jamba, LFM 2, and
RecurrentGemma, in this order.
"""

LOGITS_WITHIN = 1e-2
"""Maximum relative difference between a class's logits and those of the rule. Both compute the same
product, and any scale or cap makes a larger difference.
"""


def language_model(model: Any) -> Any:
    """The decoder of a causal LM, which contains the layers.

    For a vision-language model, this returns the text decoder.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    # Llama 4's class declares an attribute that it does not have, and is its own decoder.
    return model.model if decoder is model else decoder


def decoder_layers(model: Any) -> Any:
    """The layers of a causal LM's decoder, an nn.ModuleList.

    Raises:
        ValueError: the decoder has no layers under this name, as in older architectures (GPT-2,
            BLOOM, OPT) or encoders.
    """
    layers = getattr(language_model(model), "layers", None)
    if layers is None:
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}) has no `layers` in its decoder for a "
            "draft to read from: choose a different target, or train a draft that reads only its last "
            "states (medusa or standalone)"
        )
    return layers


def final_norm(model: Any) -> nn.Module:
    """The norm between a causal LM's last layer and its head.

    Raises:
        ValueError: the model has no norm with a known name.
    """
    decoder = language_model(model)
    found = next(
        (norm for name in FINAL_NORMS if (norm := getattr(decoder, name, None)) is not None), None
    )
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no final norm with one of the names {', '.join(FINAL_NORMS)}"
        )
    return cast(nn.Module, found)


def require_parts(model: Any, *, layers: bool, norm: bool, shared_passes: bool) -> None:
    """Refuse a causal LM without the parts that a head reads.

    Raises the same errors as `decoder_layers`, `final_norm` and `require_shared_passes`.
    """
    if shared_passes:
        require_shared_passes(model)
    if layers:
        decoder_layers(model)
    if norm:
        final_norm(model)


@torch.no_grad()
def find_rule(model: Any) -> LogitRule:
    """Return the rule for a causal LM's logits.

    The rule is compared with the model's class on large hidden states, which reveal any cap or
    scale.

    Raises:
        ValueError: the class computes different logits.
    """
    rule, head_VD = LogitRule.of(model.config), model.get_output_embeddings().weight
    hidden_1TD = torch.sin(torch.arange(8 * head_VD.shape[1], device=head_VD.device).float()).view(
        1, 8, -1
    )
    # Scale the largest logit to 100, so that a cap of 30 or 50 changes the logits.
    hidden_1TD *= 100 / (hidden_1TD @ head_VD.float().T * rule.scale).abs().max().clamp(min=1e-6)
    hidden_1TD = hidden_1TD.to(head_VD.dtype)

    def put(_: Any, __: Any, output: Any) -> Any:
        output.last_hidden_state = hidden_1TD
        return output

    handle = language_model(model).register_forward_hook(put)
    try:
        found = model(
            input_ids=torch.arange(8, device=head_VD.device)[None], use_cache=False
        ).logits.float()
    finally:
        handle.remove()
    wanted = rule.apply_(hidden_1TD @ head_VD.T).float()
    if (found - wanted).norm() > LOGITS_WITHIN * wanted.norm():
        raise ValueError(
            f"the logits of {type(model).__name__} are not head @ hidden with the scale and the "
            "cap of its config"
        )
    return rule


def take_prefixes(model: Any) -> bool:
    """Make a causal LM accept `prefix_arguments` from now on, and return whether this is possible.

    The model must use SDPA attention, and its type must be in `PLAIN_ATTENTION`. With prefixes, no
    dropout is applied.
    """
    config = model.config.get_text_config()
    if config.model_type in PLAIN_ATTENTION and config._attn_implementation == "sdpa":
        config._attn_implementation = PREFIX_ATTENTION
    return bool(config._attn_implementation == PREFIX_ATTENTION)


def require_shared_passes(model: Any) -> None:
    """Raise ValueError unless ranks can share the rows of this causal LM's pass."""
    if not take_prefixes(model):
        raise ValueError(
            f"processes cannot share rows of {type(model).__name__} "
            f"({model.config.get_text_config().model_type}): write its states to disk first "
            "(--signal.kind cache)"
        )


def prefix_arguments(batch: Batch) -> dict[str, Any]:
    """Arguments that confine attention to each document, for a model that accepts prefixes.

    A sliding layer attends within its window. If ranks share the batch, each layer gathers the keys
    of all the batch's rows.
    """
    # If the model is given a mask, even a tiny one, it does not build one.
    unread = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=batch.document_BT.device)
    return {
        "attention_mask": unread,
        "prefixes": prefixes_of(batch),
        "shared_rows": batch.shared,
    }


def attend_prefixes(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    prefixes: Prefixes | None = None,
    shared_rows: SharedRows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers, [B, T, H, E]."""
    if prefixes is None:
        # A layer that does not pass `prefixes` on would use the mask of `prefix_arguments`, which
        # hides every key.
        assert attention_mask is None or attention_mask.shape[-1] == key.shape[2], (
            "the layers dropped `prefixes`"
        )
        return cast(
            tuple[Tensor, None],
            sdpa_attention_forward(module, query, key, value, attention_mask, **options),
        )
    # Most models pass a layer's window as an argument. Qwen 2 MoE stores it in the layer, and uses
    # 0 for none.
    window = options.get("sliding_window") or getattr(module, "sliding_window", None) or None
    dtype = product_dtype(value)
    keys, values = gather_keys(shared_rows, key.to(dtype), value.to(dtype))
    out_BHTE = attend(query.to(dtype), (keys, values), prefixes, options["scaling"], window=window)
    return out_BHTE.transpose(1, 2), None


# transformers builds a mask only for names registered here too. Otherwise, a padding mask would be
# dropped.
AttentionInterface.register(PREFIX_ATTENTION, attend_prefixes)
AttentionMaskInterface.register(PREFIX_ATTENTION, sdpa_mask)
