"""Check whether more draft tokens would be accepted if the same weights were read differently.

If so, the checkpoint is wrong.

A converter may swap two tensors, or a config may name the wrong layers. Such a head loads, runs and
agrees with vLLM number by number, but is poor. Its tensors do not show this, but acceptance does:
every alternative reading is tried on the target's answers, and one with clearly higher acceptance
is the right one.

V = target vocabulary, W = draft vocabulary, D = hidden, N = rows of a matrix or prompts.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.greedy import Continuation, forecast_prompt
from redraft.eval.intervals import CONFIDENCE, estimate_tau_gain
from redraft.files.foreign import NUM_DEFAULT_LAYERS, default_layers
from redraft.files.progress import Progress
from redraft.files.windows import SECTION
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.draft import Batch, TargetSignal
from redraft.heads.families.dflash import DFlash
from redraft.heads.families.dspark import DSpark
from redraft.heads.families.eagle3 import Eagle3
from redraft.heads.families.peagle import MASK_KEYS, PEagle
from redraft.heads.nn.layers import Attention, Rotary
from redraft.heads.shape import LlamaShape

# Minimum gain that is reported, as a share of accepted tokens; an intact head only loses.
MIN_GAIN = 0.05
# The gain must also be large in tokens per target step, because a useless head gains any fraction
# by chance.
MIN_GAIN_TOKENS = 0.02

MIN_GAIN_OF_ANCHOR = 0.25
"""Minimum gain for a reading that feeds the head a feature which reveals the next token. Even an
intact head may gain a few per cent from such a feature.
"""

# Every order is tried for up to this many aux layers: 23 other orders for 4 layers.
MAX_PERMUTED = 4
MAX_MASKS = 12  # Maximum number of mask tokens that are tried.


@dataclass(frozen=True, kw_only=True)
class Reading:
    """An alternative way to read a checkpoint."""

    problem: str
    cure: str
    change: Callable[[Any], None]
    """Function that applies the change to a copy of the head."""
    aux_layer_ids: tuple[int, ...] | None = None
    """Target layers to feed into the head. If None, the layers in the head's config are used."""
    min_gain: float = MIN_GAIN
    """Minimum gain that counts, as a fraction of the accepted tokens."""


def find_better_readings(
    pair: Pair,
    head: Any,
    signal: InProcessTarget,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_tokens: int,
    device: str = "cpu",
) -> Iterator[Finding]:
    """Yield a finding for the reading with the highest acceptance on the target's answers.

    There is no finding unless its acceptance is clearly higher than the unchanged head's. `answers`
    are the token ids of prompts and answers.
    """
    texts = [
        Continuation(prompt=Prompt(token_ids=list(prompt)), output_ids=list(output), beyond_ids=[])
        for prompt, output in answers
        if len(output) > 1
    ]
    head_VD = signal.model.get_output_embeddings().weight.detach()
    readings = list(list_readings(pair, head, head_VD))
    if len(texts) < 2 or not readings:
        return
    # Capture the union of all layers read, so that one pass of the target serves every reading.
    layers = sorted({*head.aux_layer_ids, *(k for r in readings for k in r.aux_layer_ids or ())})
    remembered = _Remembered(InProcessTarget(signal.model, layers))

    def count(reading: Reading | None) -> list[AcceptanceCounts]:
        changed = _copy_head(head, num_tokens)
        if reading is not None:
            reading.change(changed)
        read = remembered.with_layers((reading and reading.aux_layer_ids) or head.aux_layer_ids)
        return [forecast_prompt(changed, read, text, num_tokens, device).counts for text in texts]

    as_it_is = count(None)
    tau = sum(as_it_is, AcceptanceCounts.zero()).tau
    better = []
    for reading in Progress(readings, desc="other readings of the weights", unit="reading"):
        gain = estimate_tau_gain(count(reading), as_it_is)
        # `tau - 1` is the number of accepted tokens per step. The share refers to these, without
        # the target's own token.
        if (
            gain.value >= max(reading.min_gain * (tau - 1), MIN_GAIN_TOKENS)
            and gain.interval()[0] > 0
        ):
            better.append((gain, reading))
    if not better:
        return
    gain, best = max(better, key=lambda each: each[0].value)
    # Apply the Bonferroni correction, because the best of many readings gains something by chance.
    is_certain = gain.interval(1 - (1 - CONFIDENCE) / len(readings))[0] > 0
    more = (
        ""
        if is_certain
        else f"; {len(texts)} prompts are too few to be certain, so use more with --num-prompts"
    )
    yield Finding(
        f"{best.problem}: with this reading, the same weights reach tau {tau + gain.value:.2f} "
        "instead of "
        f"{tau:.2f}{more}",
        best.cure,
        is_doubt=not is_certain,
    )


class _Remembered:
    def __init__(self, target: InProcessTarget) -> None:
        self._target, self._signals = target, {}  # type: ignore[var-annotated]

    def with_layers(self, layers: Sequence[int]) -> Callable[[Batch], TargetSignal]:
        """Return a signal function that returns only the streams after these layers."""
        chosen = [self._target.aux_layers.index(k) for k in layers]

        def read(batch: Batch) -> TargetSignal:
            key = tuple(batch.input_ids_BT[0].tolist())
            if key not in self._signals:
                self._signals[key] = self._target(batch)
            signal: TargetSignal = self._signals[key]
            aux_BTLD = None if signal.aux_BTLD is None else signal.aux_BTLD[:, :, chosen]
            return dataclasses.replace(signal, aux_BTLD=aux_BTLD)

        return read


def _copy_head(head: Any, num_tokens: int) -> Any:
    shared = [value for value in vars(head).values() if torch.is_tensor(value)]
    copied = copy.deepcopy(head, {id(tensor): tensor for tensor in shared})
    if hasattr(copied.config, "num_steps"):
        copied.config = dataclasses.replace(copied.config, num_steps=num_tokens)
    return copied


def list_readings(pair: Pair, head: Any, head_VD: Tensor) -> Iterator[Reading]:
    """Return alternative readings of the weights, for heads of every family.

    `head_VD` is the target's output head.
    """
    yield from _swapped_tensors(head)
    yield from _swapped_halves(head)
    if hasattr(head, "shape"):
        yield from _shapes_of_target(pair, head)
    if isinstance(head, Eagle3 | DFlash):
        yield from _orders_of_layers(head)
        yield from _other_layers(pair, head)
        yield from _options(pair, head)
    if isinstance(head, PEagle | DFlash):
        yield from _other_mask_tokens(pair, head)
    if isinstance(head, DFlash):
        yield _anchor_in_context()
    if isinstance(head, Eagle3):
        yield from _head_of_target(head, head_VD)


SWAPS = (
    ("self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("input_layernorm", "hidden_norm"),
    ("hidden_norm", "post_attention_layernorm"),
    ("input_layernorm", "post_attention_layernorm"),
)


def _swapped_tensors(head: nn.Module) -> Iterator[Reading]:
    parameters = dict(head.named_parameters())
    for (one, other), name in itertools.product(SWAPS, parameters):
        partner = name.replace(f"{one}.weight", f"{other}.weight")
        if (
            partner == name
            or partner not in parameters
            or parameters[name].shape != parameters[partner].shape
        ):
            continue
        yield Reading(
            problem=f"{name} and {partner} are swapped",
            cure=f"swap the tensors {name} and {partner} in the checkpoint, and fix the converter",
            # Use `partial` instead of a lambda, which would use the last names of the loop.
            change=partial(_swap, name=name, partner=partner),
        )


def _swap(head: nn.Module, name: str, partner: str) -> None:
    one, other = head.get_parameter(name), head.get_parameter(partner)
    one.data, other.data = other.data, one.data


READ_BOTH = ("q_proj", "k_proj", "v_proj", "fc", "combine")
"""Names of the matrices that read the concatenated embedding and feature, provided that they are
twice as wide as the target.
"""


def _swapped_halves(head: nn.Module) -> Iterator[Reading]:
    if (embed_VD := vars(head).get("_embed_VD")) is None:
        return
    hidden = embed_VD.shape[1]
    parameters = [
        (name, p)
        for name, p in head.named_parameters()
        if name.removesuffix(".weight").split(".")[-1] in READ_BOTH
    ]
    # `fc` of a head that reads two target layers has the same width, and mixes them: see
    # `_orders_of_layers`.
    mixed = {"fc.weight"} if isinstance(head, Eagle3 | DFlash) else set()
    wide = [name for name, p in parameters if p.shape[1] == 2 * hidden and name not in mixed]
    if wide:
        names = ", ".join(wide)
        yield Reading(
            problem=f"the halves of {names} are swapped: embedding and hidden state",
            cure=f"swap the first {hidden} columns of {names} with the others, and fix the "
            "converter",
            change=partial(_change, names=wide, change=lambda p_ND: p_ND.roll(hidden, dims=1)),
        )


def _change(head: nn.Module, names: Sequence[str], change: Callable[[Tensor], Tensor]) -> None:
    for name in names:
        parameter = head.get_parameter(name)
        parameter.data = change(parameter.data)


def _orders_of_layers(head: Eagle3 | DFlash) -> Iterator[Reading]:
    ids, hidden = head.aux_layer_ids, head.shape.hidden_size
    if len(ids) <= MAX_PERMUTED:
        for order in itertools.permutations(range(len(ids))):
            if list(order) == sorted(order):
                continue
            yield Reading(
                problem="fc.weight mixes the aux layers in the order "
                f"{[ids[order.index(i)] for i in range(len(ids))]}",
                cure=f"put the {len(ids)} blocks of {hidden} columns in fc.weight into ascending "
                "order of their layers",
                change=partial(
                    _change,
                    names=["fc.weight"],
                    change=partial(_reorder, order=order, width=hidden),
                ),
            )
    yield Reading(
        problem="fc.weight is transposed, block by block",
        cure=f"transpose each block of {hidden} columns in fc.weight, and fix the converter",
        change=partial(_change, names=["fc.weight"], change=partial(_transpose, width=hidden)),
    )


def _reorder(matrix_ND: Tensor, order: Sequence[int], width: int) -> Tensor:
    blocks = matrix_ND.view(len(matrix_ND), -1, width).unbind(1)
    return torch.cat([blocks[i] for i in order], dim=1)


def _transpose(matrix_ND: Tensor, width: int) -> Tensor:
    return torch.cat(
        [block.T for block in matrix_ND.view(len(matrix_ND), -1, width).unbind(1)], dim=1
    )


def _other_layers(pair: Pair, head: Eagle3 | DFlash) -> Iterator[Reading]:
    ids, num_layers = head.aux_layer_ids, pair.target_config.num_hidden_layers
    # Layer 0 is the embeddings, which engines do not feed to block drafters.
    first = 1 if isinstance(head, DFlash) else 0
    # Try off-by-one errors in both directions: layer k may mean the input or the output of layer k.
    others = [tuple(k + shift for k in ids) for shift in (-1, 1)]
    if len(ids) == NUM_DEFAULT_LAYERS and isinstance(head, Eagle3):
        others.append(tuple(default_layers(num_layers)))
    for other in dict.fromkeys(others):
        if (
            other != ids
            and list(other) == sorted(set(other))
            and first <= other[0] <= other[-1] <= num_layers
        ):
            yield Reading(
                problem=f"the head was trained on the aux layers {list(other)}, but "
                f"the engine feeds it {list(ids)}",
                cure=_write_layers(pair, other),
                change=lambda _: None,
                aux_layer_ids=other,
            )


def _write_layers(pair: Pair, layers: Sequence[int]) -> str:
    family = pair.family
    if pair.is_speculators and family.speculators_layers_key:
        key, offset = family.speculators_layers_key, 0
    else:
        key, offset = family.layers_key.rpartition(".")[2], family.layers_offset
    return f'write "{key}": {[k - offset for k in layers]} {_place(pair, key)}'


def _place(pair: Pair, key: str) -> str:
    # For a DSpark head too, engines look for the keys in DFlash's section first.
    is_inside = key in (pair.config.get(SECTION) or {})
    return f"into {SECTION} of config.json" if is_inside else "at the top level of config.json"


def _options(pair: Pair, head: Eagle3 | DFlash) -> Iterator[Reading]:
    def flip_residual(copied: Any) -> None:
        copied.midlayer._norm_before_residual = not copied.midlayer._norm_before_residual

    def flip_output(copied: Any) -> None:
        copied.config = dataclasses.replace(
            copied.config, norm_output=not copied.config.norm_output
        )

    def flip_layout(copied: Any) -> None:
        config = copied.config
        # Use one more slot, because if the anchor proposes no token, the same number of tokens
        # would otherwise not fit.
        copied.config = dataclasses.replace(
            config,
            sample_from_anchor=not config.sample_from_anchor,
            block_size=config.block_size + 1,
        )

    changes: list[tuple[str, Callable[[Any], None]]] = []
    if isinstance(head, Eagle3):
        changes.append(("norm_before_residual", flip_residual))
    if isinstance(head, Eagle3) and not isinstance(head, PEagle):  # P-EAGLE feeds nothing back
        changes.append(("norm_output", flip_output))
    if isinstance(head, DSpark):
        changes.append(("sample_from_anchor", flip_layout))
    for key, change in changes:
        right = str(not getattr(head.config, key)).lower()
        yield Reading(
            problem=f"{key} is not {right}, the value with which the head was trained",
            cure=f'write "{key}": {right} {_place(pair, key)}',
            change=change,
        )


def _other_mask_tokens(pair: Pair, head: PEagle | DFlash) -> Iterator[Reading]:
    section = pair.config.get(SECTION) or {}
    key = next((key for key in MASK_KEYS if key in section or key in pair.config), MASK_KEYS[0])
    now = head._mask_token_id
    for token in _list_mask_tokens(pair, len(head._embed_VD)):
        if token != now:
            yield Reading(
                problem=f"the slots to fill contain token {now}, but the head was trained with "
                f"token {token}",
                cure=f'write "{key}": {token} {_place(pair, key)}',
                change=partial(_set_mask_token, token=token),
            )


def _list_mask_tokens(pair: Pair, num_embeddings: int) -> list[int]:
    """Return tokens that trainers may put into the slots, the likeliest first.

    They are at most MAX_MASKS of the `num_embeddings` tokens.
    """
    tokenizer = pair.target.tokenizer
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    reserved = sorted(
        index for text, index in special.items() if "reserved" in text or "unused" in text
    )
    found = [
        # redraft uses the first row without a token, as DFlash's authors do for Qwen3.
        len(tokenizer),
        # A config from a different tool may contain the right token under a different name.
        *_named_tokens(pair.config),
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        *(index for text, index in special.items() if "mask" in text.lower()),
        *reserved[:1],
        *reserved[-1:],
        num_embeddings - 1,
        len(tokenizer) - 1,
        tokenizer.unk_token_id,
        tokenizer.bos_token_id,
        0,
    ]
    legal = [token for token in found if isinstance(token, int) and 0 <= token < num_embeddings]
    return list(dict.fromkeys(legal))[:MAX_MASKS]


def _named_tokens(config: Mapping[str, Any]) -> Iterator[Any]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _named_tokens(value)
        elif key.endswith(("token_id", "_token")):
            yield value


def _set_mask_token(head: Any, token: int) -> None:
    head._mask_token_id = token


def _anchor_in_context() -> Reading:
    """Yield the reading in which the context has the anchor's feature, as perhaps in training.

    In serving, it does not, because the target processes the anchor only during verification.
    """
    return Reading(
        problem="the head was trained with the target's feature of the anchor in the context, "
        "but no engine has this feature yet when it drafts",
        cure="no change to the folder helps: train again, using only the features before "
        "each block's anchor",
        change=lambda copied: setattr(copied, "sees_anchor", True),
        min_gain=MIN_GAIN_OF_ANCHOR,
    )


def _head_of_target(head: Eagle3, head_VD: Tensor) -> Iterator[Reading]:
    # A head without lm_head already reads the target's.
    if not head.config.own_head:
        return
    ids_W = head._draft_ids_W
    rows_WD = head_VD if ids_W is None else head_VD[ids_W]

    def take_rows(copied: Any) -> None:
        copied.lm_head.weight.data = rows_WD.to(copied.lm_head.weight)

    yield Reading(
        problem="lm_head is not this target's: the head was trained for a different revision, "
        "or lm_head is a leftover",
        cure="put the target's rows of lm_head into the checkpoint, or train the head for this "
        "target",
        change=take_rows,
    )


def _shapes_of_target(pair: Pair, head: Any) -> Iterator[Reading]:
    mine: LlamaShape = head.shape
    its = LlamaShape.from_config(pair.target_config)
    sizes = {
        name: getattr(its, name)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    }
    # Other numbers of attention heads fit the same matrices: 32 heads of size 64 have as many rows
    # as 16 heads of size 128.
    counts = ("num_attention_heads", "num_key_value_heads")
    same_rows = all(
        mine.head_dim * getattr(mine, n) == its.head_dim * getattr(its, n) for n in counts
    )
    # Query and key norms have as many weights as the attention head size, so they determine it.
    norms = [
        p
        for name, p in head.named_parameters()
        if name.endswith(("q_norm.weight", "k_norm.weight"))
    ]
    can_be_its = same_rows and all(len(p) == its.head_dim for p in norms)
    changes: dict[str, Mapping[str, Any]] = {
        "rms_norm_eps": {"rms_norm_eps": its.rms_norm_eps},
        "rope_parameters": {"rope_parameters": its.rope_parameters},
        **({"heads of attention": sizes} if can_be_its else {}),
    }
    for name, change in changes.items():
        if all(getattr(mine, key) == value for key, value in change.items()):
            continue
        yield Reading(
            problem=f"the head was trained with the target's {name}, but config.json has other "
            "values",
            cure="write "
            + ", ".join(f'"{key}": {value}' for key, value in change.items())
            + " into config.json",
            change=partial(_reshape, shape=dataclasses.replace(mine, **change)),
        )


def _reshape(head: Any, shape: LlamaShape) -> None:
    head.shape, head._rotary = shape, Rotary.from_shape(shape)
    for module in head.modules():
        if isinstance(module, Attention):
            module._head_dim = shape.head_dim
        if isinstance(module, nn.RMSNorm):
            module.eps = shape.rms_norm_eps
