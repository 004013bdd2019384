"""The options of every draft family.

They are the flags `--head.*`, and `--draft.*` for a standalone draft.

The module uses only the standard library, because help texts and control planes read it without
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from redraft.files.setting_error import SettingError, require_least
from redraft.files.windows import View, make_views


class Options:
    """The options of one family."""

    def __post_init__(self) -> None:
        """Raise SettingError for a number that is too small: all of them are sizes or weights."""
        for name, value in vars(self).items():
            if isinstance(value, int | float):
                is_size = type(value) is int and not name.endswith("_id")
                require_least(self, **{name: 1 if is_size else 0})


def read_record(kind: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of this class that the `redraft` section of an exported config.json records.

    Empty for a head from another trainer, which does not record how it was trained.
    """
    known = {field.name for field in fields(kind)}
    return {name: value for name, value in config.get("redraft", {}).items() if name in known}


@dataclass(frozen=True, kw_only=True)
class LayerSizes(Options):
    """The sizes of a head's layers.

    The defaults are the sizes of the target's layers, or the usual sizes if the target's layers
    differ from Llama's.
    """

    intermediate_size: int | None = None
    """MLP width of the head's layers. Default: that of the target's layers, or 8/3 of the hidden
    size.
    """
    num_attention_heads: int | None = None
    """Number of query heads per layer. Default: as in the target's layers, or hidden size / 128."""
    num_key_value_heads: int | None = None
    """Number of key heads per layer. Default: as in the target's layers, or one per four query
    heads.
    """
    head_dim: int | None = None
    """Size of each attention head. Default: as in the target's layers, or 128."""


@dataclass(frozen=True, kw_only=True)
class Windows(Options):
    """How far back the layers of a head attend."""

    num_layers: int = 1
    """Number of layers in the draft."""
    window: int | None = None
    """Number of positions that a layer of the head attends to, including its own. Engines discard
    older keys. Default: all positions, or the window of the target's layers if all of them have
    one.
    """
    full_layers: tuple[int, ...] = ()
    """Layers of the head, counted from 0, that attend to all positions despite `window`."""

    @property
    def views(self) -> tuple[View, ...]:
        """Return each layer's view."""
        return make_views(self.num_layers, self.window, self.full_layers, is_causal=True)

    def require_reach(self, num_ahead: int) -> None:
        """Raise ValueError unless the last draft token attends to a token seen by the target."""
        if self.window is not None and self.window <= num_ahead:
            raise SettingError(
                f"a window of {self.window} is not larger than the {num_ahead} positions of a "
                f"draft: set {{window}} to {num_ahead + 1} or more"
            )
        _ = self.views  # raises an error for layers that do not exist


@dataclass(frozen=True, kw_only=True)
class Unrolled(Options):
    """A head that drafts step by step, each step using the output of the previous one."""

    num_steps: int = 1
    """Number of draft steps trained at once."""
    step_decay: float = 0.8
    """The weight of draft step k in the loss is step_decay^k, where k starts at 0."""

    @property
    def num_tokens(self) -> int:
        """The number of draft tokens that the head learns."""
        return self.num_steps


@dataclass(frozen=True, kw_only=True)
class Eagle1(Unrolled, LayerSizes):
    num_steps: int = 4
    """Number of draft steps trained at once. The paper trains 1. With more, the head also learns
    from its own features of earlier steps, which it reads in serving.
    """
    regression_weight: float = 10.0
    """Weight of the SmoothL1 distance to the target's feature, relative to a divergence weight of
    1. The paper uses 1 and 0.1.
    """


@dataclass(frozen=True, kw_only=True)
class LayerMix(Windows, LayerSizes):
    """A head that reads a mix of the target's layers, as EAGLE-3 does."""

    aux_layer_ids: tuple[int, ...] = ()
    """Target layers to read, in ascending order. k means the residual stream after k layers.
    Default for n layers: 2, n // 2 and n - 3.
    """
    own_head: bool = True
    """Train the output head, starting from the target's. Otherwise, the target's rows are used and
    stay frozen.
    """
    norm_before_fc: bool = False
    """Normalise the concatenated streams before they are mixed (gpt-oss)."""
    fc_norm: bool = False
    """Normalise the stream of each target layer before they are mixed (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """Add the first layer's output to the normed feature instead of the feature itself."""

    norm_output = False  # only an option of EAGLE-3, because the other heads feed nothing back


@dataclass(frozen=True, kw_only=True)
class Eagle3(Unrolled, LayerMix):
    num_layers: int = 1
    """Number of layers in the draft. The first one reads the token's embedding in addition to the
    feature.
    """
    norm_output: bool = False
    """Feed back the feature after the final norm instead of before it (EAGLE-3.1)."""
    num_steps: int = 7
    """Number of draft steps trained at once. Each reads the features of the previous step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_reach(self.num_steps)


@dataclass(frozen=True, kw_only=True)
class DFlash(Windows, LayerSizes):
    aux_layer_ids: tuple[int, ...] = ()
    """Target layers to read, in ascending order. k means the residual stream after k layers, and is
    at least 1. Default for n layers: 2, n // 2 and n - 3.
    """
    num_layers: int = 5
    """Number of layers in the draft."""
    block_size: int = 16
    """Number of slots per block in training: the anchor and one slot per draft token. An engine may
    serve fewer tokens, but never more than block_size - 1.
    """
    mask_token_id: int | None = None
    """Token whose embedding fills the empty slots. It must be in the target's table and should
    never occur in text. Default: a row that the tokenizer does not use, otherwise the padding
    token.
    """
    num_anchors: int = 512
    """Number of blocks to train in each row of a batch. Every epoch uses different anchors."""
    gamma: float = 7.0
    """Decay of a draft token's weight in the loss: token i has the weight exp(-(i - 1) / gamma).
    Usual values are 4 for blocks of 8 and 7 for blocks of 16.
    """
    is_causal: bool | None = None
    """Whether each slot of a block attends only to earlier slots. Default: only in layers with a
    window, as in the heads of z-lab and speculators.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma == 0:
            raise SettingError("{gamma} must be above 0")
        if self.num_tokens < 1:
            least = self.first_slot + 1
            raise SettingError(
                f"a block of {self.block_size} slots has no draft token: set {{block_size}} to "
                f"{least} or more"
            )
        self.require_reach(self.block_size)

    @property
    def views(self) -> tuple[View, ...]:
        """For each layer, which part of the context and of the block it attends to."""
        return make_views(self.num_layers, self.window, self.full_layers, self.is_causal)

    @property
    def first_slot(self) -> int:
        """Return the index of the slot that proposes a block's first token."""
        return 1

    @property
    def num_tokens(self) -> int:
        """The number of draft tokens per block."""
        return self.block_size - self.first_slot


@dataclass(frozen=True, kw_only=True)
class DSpark(DFlash):
    block_size: int = 7
    """Number of slots per block in training, one per draft token. Without `sample_from_anchor`,
    there is one token fewer. An engine may serve fewer tokens, but never more.
    """
    gamma: float = 4.0
    """Decay of a draft token's loss weight: token i has the weight exp(-(i - 1) / gamma)."""
    sample_from_anchor: bool = True
    """Let the slot of the last known token propose the first draft token. Otherwise, it proposes no
    token, as in DFlash.
    """
    markov_rank: int = 256
    """Rank of the logit bias that depends on the previous token."""
    confidence_head: bool = True
    """Learn to estimate the acceptance of every draft token, for engines that verify fewer tokens
    if it is low.
    """

    def __post_init__(self) -> None:
        if self.markov_rank < 1:
            raise SettingError(
                f"{{markov_rank}} is {self.markov_rank}: set it to 1 or more, or train a DFlash "
                "head, which has no bias"
            )
        super().__post_init__()

    @property
    def first_slot(self) -> int:
        """Return the index of the slot that proposes a block's first token."""
        return 0 if self.sample_from_anchor else 1


@dataclass(frozen=True, kw_only=True)
class PEagle(LayerMix):
    num_layers: int = 4
    """Number of layers in the draft. The first one reads the token's embedding in addition to the
    feature. A draft that predicts several tokens at once needs more layers than EAGLE-3's one.
    """
    num_steps: int = 8
    """Number of draft tokens to learn, all in one pass. An engine may serve fewer, but never more.
    """
    mask_token_id: int | None = None
    """Token whose embedding fills the slots to predict. It must be in the target's table and should
    never occur in text. Default: a row that the tokenizer does not use, otherwise the padding
    token.
    """
    keep_ratio: float = 0.7
    """Fraction of a step's rows on which the next step trains, above 0 and at most 1. Every epoch
    selects different rows.
    """
    min_share: float = 0.2
    """Minimum fraction of the first step's rows on which a step trains."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps < 2:
            raise SettingError(
                "{num_steps} must be at least 2; for one draft token, train an EAGLE-3 head"
            )
        if not (0 < self.keep_ratio <= 1 and 0 <= self.min_share <= 1):
            raise SettingError(
                "{keep_ratio} must be above 0 and at most 1, and {min_share} between 0 and 1"
            )
        self.require_reach(self.num_steps)

    @property
    def num_tokens(self) -> int:
        """The number of draft tokens that the head learns."""
        return self.num_steps


@dataclass(frozen=True, kw_only=True)
class Medusa(Options):
    num_heads: int = 3
    """Number of heads, the maximum number of draft tokens per step. An engine may serve fewer, but
    never more.
    """
    num_layers: int = 1
    """Number of residual blocks in each head."""
    bias: bool = True
    """Give the linear layers of the residual blocks a bias."""
    step_decay: float = 0.8
    """The weight of head i in the loss is step_decay^i, where i starts at 0."""

    @property
    def num_tokens(self) -> int:
        """The number of draft tokens that the head learns."""
        return self.num_heads


@dataclass(frozen=True, kw_only=True)
class Mtp(Unrolled):
    num_steps: int = 4
    """Number of draft steps trained at once. Each reads the previous step's output."""
    as_mimo: bool = False
    """Convert a Llama target into the MiMo layout, which gives the same results and has room for an
    MTP layer.
    """


@dataclass(frozen=True, kw_only=True)
class Standalone(Options):
    """The weights that a standalone draft starts from.

    `layers` or `num_layers`, if given, replaces `checkpoint`.
    """

    checkpoint: str | None = None
    """Folder or hub name of a causal LM to start from."""
    layers: tuple[int, ...] = ()
    """Indices of the target layers to start from, counted from 0. Embeddings, final norm and head
    are copied too.
    """
    num_layers: int | None = None
    """Start from a new Llama with this many layers, random weights and the target's vocabulary."""
    hidden_size: int = 512
    """Hidden size of the new Llama created with --draft.num-layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers and self.num_layers:
            raise SettingError(
                "a draft starts either from layers of the target ({layers}) or from new layers "
                "({num_layers}): set only one of them"
            )
        if not (self.checkpoint or self.layers or self.num_layers):
            raise SettingError(
                "a draft starts from a model, layers of the target or new layers: set "
                "{checkpoint}, {layers} or {num_layers}"
            )

    def __str__(self) -> str:
        if self.layers:
            return f"layers {', '.join(map(str, self.layers))} of the target"
        if self.num_layers:
            return f"a new Llama of {self.num_layers} layers and width {self.hidden_size}"
        return str(self.checkpoint)
