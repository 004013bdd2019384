"""The type of a row in the table of draft families (`heads.catalog`).

This module uses only the standard library. A draft's module imports torch, so it is imported only
when a row's class is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from redraft.files.foreign import AUX_LAYERS, NUM_DEFAULT_LAYERS, nested_layers
from redraft.files.windows import count_states

if TYPE_CHECKING:
    import torch

    from redraft.heads.draft import Draft
    from redraft.heads.target import Target

Reads = Literal["nothing", "layers", "last"]
"""Input that a draft reads from the target: nothing, the streams after some layers, or the last
hidden state after the final norm.
"""

Parity = Literal["autoregressive", "recurrent", "parallel", "block", "prefix_and_masks"]
"""How vLLM's drafter computes a block, for the doctor's comparison with training
(`eval.parity.compare`).

    autoregressive    the prefix in one pass, then every drafted token
    recurrent         the prefix shifted by one token with the target's features, then a row for
                      every drafted token
    parallel          one pass over the target's last hidden state for all tokens
    block             one pass over the last known token and masks for the tokens to draft
    prefix_and_masks  the prefix shifted by one token with the target's features, and the masks,
                      in one pass
"""

NUM_TOKENS = 3
"""Default number of draft tokens per step in a server."""

RATE_TIMES_WIDTH = 1.15
"""Maximum product of learning rate and width for a new draft that the learner trains."""

Decoder = Literal["v1", "v2"]
"""vLLM's model runners."""


@dataclass(frozen=True)
class FixedTokens:
    """Keys of config.json with the number of draft tokens, for checkpoints that fix it."""

    keys: tuple[str, ...]
    """Keys of config.json; the first one that is present is used. Dots lead into nested sections.
    """
    unused: int = 0
    """Number of counted positions that propose no token, e.g. 1 for a block that starts with the
    last known token.
    """
    used_if: str = ""
    """Key of config.json. Unless its value is false, the unused positions propose tokens too."""

    def read(self, config: Mapping[str, Any]) -> int | None:
        """Return the maximum number of draft tokens under this config.json.

        None if no key is present.
        """
        # E.g. DFlash with block_size 16 has 16 - 1 = 15 tokens, and DSpark with block_size 7 and
        # sample_from_anchor has 7.
        count = next(filter(None, (_read_key(config, key) for key in self.keys)), None)
        unused = 0 if self.used_if and config.get(self.used_if, True) else self.unused
        return None if count is None else int(count) - unused


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a family is trained: its choices and its defaults."""

    starts: tuple[str, ...] = ("random",)
    """Supported initial weights (`distill.run.start`). The first one is the default."""
    layouts: tuple[str, ...] = ("vllm",)
    """Export formats. The first one is the default."""
    draft_vocab_size: int | None = None
    """Default size of the draft's vocabulary. None if the family uses the target's vocabulary.
    """
    options: Mapping[str, Any] = field(default_factory=dict)
    """Family options that differ from the defaults of its class."""
    target: str = "meta-llama/Llama-3.1-8B-Instruct"
    divergence: str = "lk_hybrid"
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float
    max_grad_norm: float = 0.5
    loop: Mapping[str, Any] = field(default_factory=dict)
    """Loop settings that differ from the defaults."""
    new_online: Mapping[str, Any] = field(default_factory=dict)
    """The learner's settings for a new draft, which learns within minutes in many small steps. The
    learning rate is for narrow targets (`learn_new`).
    """

    def learn_new(self, width: int) -> dict[str, Any]:
        """The learner's settings for a new draft of this width.

        From a width of 575 on, the learning rate decreases with the width (Yang et al., 2022,
        arXiv:2203.03466).
        """
        rate = min(self.new_online["lr"], RATE_TIMES_WIDTH / width)
        return {**self.new_online, "lr": float(f"{rate:.1e}")}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table of draft families."""

    name: str
    """Name in flags, TOML files and the `redraft` section of an exported config.json."""
    title: str
    """Name in reports."""
    draft: str = ""
    """The class that implements `Draft`, as "module:Class". Empty if the family is a lookup in the
    text, which has no weights.
    """
    method: str
    """vLLM's method name in --speculative-config."""
    decoders: tuple[Decoder, ...]
    """The vLLM model runners that support the family."""
    last_vllm: str = ""
    """Last vLLM release that supports the family, e.g. "0.32". Empty if the newest release does."""
    tensors: str = ""
    """Pattern of a tensor name by which a checkpoint is recognised. The first matching row of the
    table wins.
    """
    architectures: tuple[str, ...] = ()
    """Names in `architectures` of config.json. They must be unique to this family."""
    attention: Literal["own", "model", "none"] = "own"
    """Implementation of the draft's attention: `own` for redraft's layers (`heads.nn`), `model` for a
    `transformers` model, `none` for a draft without attention.
    """
    reads: Reads = "nothing"
    """Input from the target. The MTP layers of some targets read a residual stream instead of the
    last hidden state.
    """
    layers_key: str = ""
    """Key of config.json with the list of target layers to read. Dots lead into nested sections."""
    layers_offset: int = 0
    """Offset added to each layer index: 1 if the checkpoint's k means the stream after k + 1
    layers.
    """
    speculators_layers_key: str = ""
    """Key of the same list in the layout of the library `speculators`, where k means the stream
    after k layers. Empty if it equals `layers_key`.
    """
    fixed_tokens: FixedTokens | None = None
    """Limit on the number of draft tokens. None if there is no limit."""
    is_parallel: bool = False
    """Whether vLLM must be configured to draft all tokens in one pass (`parallel_drafting`)."""
    varies_tokens: bool = True
    """Whether the number of draft tokens may change from step to step. If not, vLLM exits when it
    changes.
    """
    chooses_locally: bool = False
    """Whether vLLM can select the draft's most probable token within the draft's own vocabulary
    (`use_local_argmax_reduction`), instead of first copying the draft's logits into a row of the
    target's vocabulary.
    """
    keeps_cache: bool = False
    """Whether the old draft's KV cache entries may stay after a swap. They may if there are none,
    or if the draft is a one-layer head, which receives the target's state of every token and hardly
    depends on old entries. Otherwise, old entries lower the acceptance as long as they stay.
    """
    can_sample: bool = False
    """Whether vLLM can sample draft tokens from q. If not, vLLM always chooses the most probable
    token.
    """
    learns_online: bool = False
    """Whether `redraft learner` can train it from records."""
    trains_lm_head: bool = False
    """Whether training changes `lm_head.weight`. As long as it equals the target's, vLLM shares the
    target's tensor.
    """
    is_in_target: bool = False
    """Whether the weights are in the target's folder, so that vLLM gets a method but no model."""
    parity: Parity | None = None
    """How vLLM's drafter computes a block. None if the doctor cannot compare the engine's passes
    with training.
    """
    checks: str = ""
    """Static doctor checks for this family only, as "module:TUPLE"."""
    options: str = ""
    """Class of its options, as "module:Class". Empty if it is `Config` in the module of the draft's
    class.
    """
    training: Training | None = None
    """How the family is trained. None if it is a lookup."""

    @property
    def is_lookup(self) -> bool:
        """Whether the family looks tokens up in the text, without training or running a model."""
        return not self.draft

    @property
    def speculative(self) -> dict[str, Any]:
        """The keys of vLLM's --speculative-config that choose the proposer."""
        chosen = {"method": self.method}
        return {**chosen, "parallel_drafting": True} if self.is_parallel else chosen

    @property
    def takes_lookup(self) -> bool:
        """Whether a server can try a lookup first, and use this draft if the lookup finds nothing.

        See `engine.lookup_first`.
        """
        return self.is_head and self.varies_tokens and "v1" in self.decoders

    @property
    def algorithm(self) -> str:
        """The family's name in the library `speculators`, for `speculators_model_type`."""
        return self.name if self.is_parallel else self.method

    @property
    def is_head(self) -> bool:
        """Whether the draft reads hidden states and shares the target's embeddings.

        Loading such a draft requires the target.
        """
        return self.reads != "nothing"

    @property
    def can_recompute(self) -> bool:
        """Whether training can recompute activations in the backward pass. Imports torch."""
        return hasattr(self.draft_class(), "recomputes")

    def draft_class(self) -> Any:
        """The class that implements `Draft`."""
        return _import(self.draft)

    def sketch(self, options: Any, target: Target, draft_vocab_size: int) -> Any:
        """Return an untrained head for the first `draft_vocab_size` ids, or for all if it is 0."""
        import torch

        # Create the ids on the CPU with values, because a head checks them (`check_ids`).
        kept = (torch.arange(draft_vocab_size, device="cpu"),) if draft_vocab_size else ()
        return self.draft_class()(options, target, *kept)

    def options_class(self) -> Any:
        """The class of a draft's options.

        `draft_class()(options_class()(...), target)` is an untrained head.
        """
        return _import(self.options or f"{self.draft.partition(':')[0]}:Config")

    def load(
        self, folder: Path, target: Callable[[], Target], dtype: torch.dtype | None = None
    ) -> Draft:
        """Load the draft from a folder, in `dtype`.

        None means float32 for a head, and the stored dtype for a whole model. `target` is called
        only for a head, because reading a target takes time.

        Raises:
            ValueError: a tensor is missing, unknown or has the wrong shape.
        """
        draft: Draft
        if not self.is_head:
            # Cast while loading, because `.to` would round the rotary frequencies of a transformers
            # model too.
            draft = self.draft_class().load(folder, dtype=dtype)
            return draft
        draft = self.draft_class().load(folder, target())
        return draft if dtype is None else draft.to(dtype)

    def extract(self, target: Path, folder: Path) -> None:
        """Write the draft in a target's weights to a separate folder, in the target's dtype.

        Raises:
            ValueError: the target contains no such draft, or one in a different layout.
        """
        from redraft.heads.target import Target  # imported here, because it imports torch

        borrowed = Target.from_folder(target)
        self.load(target, lambda: borrowed).export(folder, borrowed.config.dtype)

    def read_layers(self, config: Mapping[str, Any]) -> list[int]:
        """The target layers that an export with this config.json reads, from `layers_key`.

        Layer k stands for the stream after k layers. The list is empty if config.json has none, which
        for EAGLE-3 means the engine's default (`heads.target.aux_layers`).
        """
        if self.speculators_layers_key and "speculators_model_type" in config:
            return list(config.get(self.speculators_layers_key) or ())
        if self.layers_key == AUX_LAYERS and not config.get(AUX_LAYERS):
            return nested_layers(config)
        *sections, last = self.layers_key.split(".")
        for section in sections:
            # As in vLLM, a key at the top level counts unless the section has it.
            config = {**config, **(config.get(section) or {})}
        return [layer + self.layers_offset for layer in config.get(last) or ()]

    def states_shape(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """(number per token, size) of the hidden states that an export with this config.json reads."""
        size: int = config.get("transformer_layer_config", config)["hidden_size"]
        if self.reads != "layers":
            return 1, size
        default = int(config.get("num_aux_hidden_states") or NUM_DEFAULT_LAYERS)
        return len(self.read_layers(config)) or default, size

    def needed_states(self, config: Mapping[str, Any]) -> int:
        """Return the number of states before a label's row that training needs to match serving.

        Return 0 if a layer of an export with this config.json has no window, because no number is
        enough.
        """
        reach = count_states(config) if self.layers_key else None
        if reach is None:
            return 0
        # The last of n draft steps predicts a label from the row n rows before it.
        trained = (config.get("redraft") or {}).get("num_steps")
        return reach + int(self.max_tokens(config) or trained or self.options_class()().num_tokens)

    def own_checks(self) -> tuple[Any, ...]:
        """The doctor's checks for this family only."""
        return tuple(_import(self.checks)) if self.checks else ()

    def max_tokens(self, config: Mapping[str, Any]) -> int | None:
        """Return the maximum number of draft tokens under this config.json.

        None means any number.
        """
        return None if self.fixed_tokens is None else self.fixed_tokens.read(config)


def _read_key(config: Mapping[str, Any], key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) or {}
    return config


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
