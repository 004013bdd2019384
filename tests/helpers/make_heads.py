"""Factories and checks that the tests of every head family share.

B = batch, T = tokens, D = hidden, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from reference_decoder import propose
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.heads.draft import Batch, DraftStep, ExactTarget, TargetSignal, attention_mask
from redraft.heads.options import LayerSizes
from redraft.heads.target import Target

VOCAB, HIDDEN, LAYERS = 96, 32, 5


def make_target(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A random Llama with weights large enough that its tokens differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "initializer_range": 0.15,
            "max_position_embeddings": 128,
            **overrides,
        }
    )
    return LlamaForCausalLM(config).eval()


def make_batch(documents: Sequence[Sequence[Sequence[int]]], loss_from: int = 0) -> Batch:
    """Rows of documents of token ids, padded on the right.

    Tokens before `loss_from` of a document are no labels.
    """
    width = max(sum(map(len, row)) for row in documents)
    rows: list[list[list[int]]] = []
    for row in documents:
        tokens = [(t, j, d) for d, document in enumerate(row) for j, t in enumerate(document)]
        tokens += [(0, 0, -1)] * (width - len(tokens))
        rows.append([list(column) for column in zip(*tokens, strict=True)])
    ids_BT, position_ids_BT, document_BT = torch.tensor(rows).unbind(1)
    return Batch(
        input_ids_BT=ids_BT,
        loss_mask_BT=(document_BT >= 0) & (position_ids_BT >= loss_from),
        document_BT=document_BT,
        position_ids_BT=position_ids_BT,
    )


def take_rows(batch: Batch, rows: slice) -> Batch:
    """A batch of these rows only."""
    return replace(
        batch,
        **{name: value[rows] for name, value in vars(batch).items() if torch.is_tensor(value)},
    )


def make_ids(length: int, seed: int = 1) -> list[int]:
    return torch.randint(
        0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@torch.no_grad()
def make_signal(model: Any, batch: Batch, aux_layer_ids: Sequence[int] = ()) -> TargetSignal:
    """What the target computes on a batch.

    Layer k is the residual stream after k layers, before the final norm.
    """
    streams: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
        for layer in model.model.layers
    ]
    hooks.append(
        model.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    )
    hidden_BTD = model.model(
        input_ids=batch.input_ids_BT,
        attention_mask=attention_mask(batch),
        position_ids=batch.position_ids_BT,
    ).last_hidden_state
    for hook in hooks:
        hook.remove()
    aux = torch.stack([streams[k] for k in aux_layer_ids], dim=2) if aux_layer_ids else None
    head_VD = model.lm_head.weight.detach()
    return TargetSignal(
        distribution=ExactTarget(hidden_BTD=hidden_BTD, head_VD=head_VD), aux_BTLD=aux
    )


def signal_of_prefix(head: Any, model: Any, prefix: Sequence[int]) -> TargetSignal:
    """What the target knows when it has just sampled the prefix's last token."""
    return make_signal(model, make_batch([[list(prefix[:-1])]]), head.aux_layer_ids)


def make_random(head: Any, seed: int = 3) -> Any:
    """The head with every parameter moved from its start.

    So nothing is zero, one or the target's by accident.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return head.eval()


def q_of(step: DraftStep, row: int) -> Tensor:
    """The draft's distribution at one row of the batch's first sequence, [V].

    It is over the target's vocabulary.
    """
    logits_W = step.logits(torch.tensor([row]))[0]
    if step.draft_ids_W is None:
        return logits_W.softmax(-1)
    return torch.zeros(VOCAB).index_copy(0, step.draft_ids_W, logits_W.softmax(-1))


def assert_training_equals_decoding(head: Any, model: Any, num_steps: int) -> None:
    """For several prefixes.

    Q of the k-th drafted token is q of draft step k at the prefix's row, on that same text.
    """
    generator = torch.Generator().manual_seed(0)
    for length in (2, 3, 9, 14):
        prefix = make_ids(length)
        signal = signal_of_prefix(head, model, prefix)
        drafted = propose(head, prefix, signal, num_steps, temperature=1.0, generator=generator)
        assert len(drafted) == num_steps
        batch = make_batch([[[*prefix, *(token for token, _ in drafted), 0]]])
        with torch.no_grad():  # with gradients some families train a sample of the rows
            steps = head.draft_steps(
                batch, make_signal(model, batch, head.aux_layer_ids), num_steps
            )
        assert [step.shift for step in steps] == list(range(1, num_steps + 1))
        for step, (_, q_V) in zip(steps, drafted, strict=True):
            torch.testing.assert_close(q_of(step, length - 2), q_V, atol=1e-5, rtol=1e-4)


def spread(step: DraftStep) -> DraftStep:
    """The step with a state, a code and a confidence for every row; 0 for rows without any."""
    place_BT = step.place_BT
    if place_BT is None:
        return step

    def whole(part: Tensor) -> Tensor:
        rows_BT = part.flatten(0, 1)[place_BT]
        return rows_BT.where((place_BT >= 0).view(*place_BT.shape, *[1] * (rows_BT.ndim - 2)), 0)

    return replace(
        step,
        hidden_BTD=whole(step.hidden_BTD),
        place_BT=None,
        bias=None if step.bias is None else replace(step.bias, code_BTR=whole(step.bias.code_BTR)),
        confidence_BT=None if step.confidence_BT is None else whole(step.confidence_BT),
    )


@torch.no_grad()
def assert_packed_equals_unpacked(head: Any, model: Any) -> None:
    """Every labelled row of two documents packed with padding is the row of the document alone."""
    documents = [make_ids(9, seed=5), make_ids(7, seed=6)]
    packed = make_batch([documents, [make_ids(18, seed=7)]])
    steps = head.draft_steps(packed, make_signal(model, packed, head.aux_layer_ids))
    start = 0
    for document in documents:
        alone = make_batch([[document]])
        alone_steps = head.draft_steps(alone, make_signal(model, alone, head.aux_layer_ids))
        for step, alone_step in zip(map(spread, steps), map(spread, alone_steps), strict=True):
            window = slice(start, start + len(document))
            mask_T = step.mask_BT[0, window]
            torch.testing.assert_close(mask_T, alone_step.mask_BT[0])
            assert mask_T.sum() == len(document) - 1 - step.shift
            torch.testing.assert_close(
                step.hidden_BTD[0, window][mask_T],
                alone_step.hidden_BTD[0][mask_T],
                atol=1e-5,
                rtol=1e-4,
            )
        start += len(document)


def assert_every_parameter_learns(head: Any, model: Any) -> None:
    batch = make_batch([[make_ids(12), make_ids(5, seed=2)]])
    steps = head.draft_steps(batch, make_signal(model, batch, head.aux_layer_ids))
    every_row = torch.arange(batch.input_ids_BT.numel())
    loss = sum((s.logits(every_row).logsumexp(-1) * s.mask_BT.flatten()).sum() for s in steps)
    loss = loss + sum(
        (s.confidence_BT * s.mask_BT).sum()
        for s in map(spread, steps)
        if s.confidence_BT is not None
    )
    loss.backward()
    without = [name for name, p in head.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def assert_round_trip(head: Any, model: Any, folder: Path, **options: Any) -> Any:
    """Exported and loaded: the same config, bit-equal tensors and bit-equal hidden states.

    Returns what was loaded.
    """
    head.export(folder, **options)
    loaded = type(head).load(folder, Target.from_model(model))
    sizes = [field.name for field in fields(LayerSizes) if hasattr(head.config, field.name)]
    assert loaded.config == replace(head.config, **dict.fromkeys(sizes)), (
        "the sizes are in the shape"
    )
    assert all(getattr(loaded.shape, name) == getattr(head.shape, name) for name in sizes)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in head.state_dict().items())
    batch = make_batch([[make_ids(12)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    for step, again in zip(
        head.draft_steps(batch, signal), loaded.draft_steps(batch, signal), strict=True
    ):
        assert torch.equal(step.hidden_BTD, again.hidden_BTD)
        assert torch.equal(step.head_WD, again.head_WD)
        every_row = torch.arange(batch.input_ids_BT.numel())
        assert torch.equal(step.logits(every_row), again.logits(every_row))
    return loaded
