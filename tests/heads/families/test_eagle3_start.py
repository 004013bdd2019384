"""A head that starts by least squares, against texts whose next state is known to be such a sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from make_heads import (
    assert_round_trip,
    assert_training_equals_decoding,
    make_batch,
    make_signal,
    make_target,
)
from torch import Tensor
from torch.nn.functional import cosine_similarity, embedding

from redraft.heads.draft import Batch, ExactTarget, TargetSignal
from redraft.heads.families.eagle3 import Config, Eagle3
from redraft.heads.families.eagle3_start import Roles, random_rows, start_by_least_squares
from redraft.heads.shape import LlamaShape
from redraft.heads.target import Target

SIZE, VOCAB = 64, 96
LAYERS = (1, 2, 4)
SHAPES: dict[str, dict[str, Any]] = {
    "groups": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "keys of its own for each query": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
}


def make_head(
    shape: str = "groups", *, qk_norm: bool = False, **options: Any
) -> tuple[Eagle3, Any]:
    """A head before its start, and the target."""
    model = make_target(
        hidden_size=SIZE,
        head_dim=32,
        max_position_embeddings=4096,
        vocab_size=VOCAB,
        initializer_range=1.0,
        **SHAPES[shape],
    )
    sizes = replace(LlamaShape.from_config(model.config), qk_norm=qk_norm)
    config = Config(**{"aux_layer_ids": LAYERS, "num_steps": 2, "fc_norm": True, **options})
    head = Eagle3(config, Target.from_model(model), shape=sizes)
    head.init_from_layers([model.model.layers[-1]], model.model.norm)
    return head, model


def scales_of(model: Any) -> list[Any]:
    return [model.model.layers[k].input_layernorm.weight for k in LAYERS]


def unit(x: Tensor) -> Tensor:
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()


def make_texts(count: int, length: int, *, words: int = VOCAB) -> list[Batch]:
    """Two documents a batch; in each, a token is always followed by the same one.

    Another document has other pairs.
    """
    generator = torch.Generator().manual_seed(5)
    texts = []
    for _ in range(count):
        documents = []
        for _ in range(2):
            cycle = torch.randperm(VOCAB, generator=generator)[:words]
            documents.append(cycle.repeat(-(-length // words))[:length].tolist())
        texts.append(make_batch([documents]))
    return texts


def state_signal(model: Any, batch: Batch, hidden_BTD: Tensor) -> TargetSignal:
    """A target whose last stream shows the row's token, and whose states are `hidden_BTD`."""
    tokens_BTD = unit(embedding(batch.input_ids_BT, model.get_input_embeddings().weight.detach()))
    noise = torch.randn(
        *tokens_BTD.shape[:2],
        2,
        SIZE,
        generator=torch.Generator().manual_seed(int(batch.input_ids_BT.sum())),
    )
    streams = torch.cat([noise, tokens_BTD[:, :, None]], dim=2)
    head_VD = model.lm_head.weight.detach()
    return TargetSignal(
        distribution=ExactTarget(hidden_BTD=hidden_BTD, head_VD=head_VD), aux_BTLD=streams
    )


def predicted(head: Eagle3, batch: Batch, signal: TargetSignal) -> Tensor:
    """Cosine of the head's state on row t with the target's on row t + 1, [B, T - 1]."""
    with torch.no_grad():
        (step,) = head.draft_steps(batch, signal, 1)
    assert isinstance(signal.distribution, ExactTarget)
    return cosine_similarity(step.hidden_BTD[:, :-1], signal.distribution.hidden_BTD[:, 1:], dim=-1)


def in_document(batch: Batch, after: int) -> Tensor:
    """The rows with a next row, behind the first `after` of their document, [B, T - 1]."""
    same = batch.document_BT[:, 1:] == batch.document_BT[:, :-1]
    return same & (batch.position_ids_BT[:, :-1] >= after)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sum_of_streams_and_next_token_is_found(shape: str, qk_norm: bool) -> None:
    head, model = make_head(shape, qk_norm=qk_norm)
    generator = torch.Generator().manual_seed(1)
    from_streams = torch.randn(2 * SIZE, SIZE, generator=generator) / SIZE
    from_token = (
        torch.randn(SIZE, 8, generator=generator) @ torch.randn(8, SIZE, generator=generator) / SIZE
    )
    known = []
    for batch in make_texts(12, 300):
        signal = state_signal(model, batch, torch.zeros(*batch.input_ids_BT.shape, SIZE))
        assert signal.aux_BTLD is not None
        tokens = unit(embedding(batch.input_ids_BT, model.get_input_embeddings().weight.detach()))
        state = torch.zeros_like(tokens)
        state[:, 1:] = (
            signal.aux_BTLD[:, :-1, :2].flatten(2) @ from_streams + tokens[:, 1:] @ from_token
        )
        known.append((batch, state_signal(model, batch, unit(state) * head.norm.weight.detach())))
    start_by_least_squares(head, known[:-2], scales_of(model))
    for batch, signal in known[-2:]:
        assert predicted(head, batch, signal)[in_document(batch, 1)].mean() > 0.95


@pytest.mark.parametrize("shape", ["groups", "keys of its own for each query"])
def test_the_token_that_followed_the_last_time_is_copied(shape: str) -> None:
    head, model = make_head(shape)
    words, table = 40, unit(model.get_input_embeddings().weight.detach())
    known = []
    for batch in make_texts(30, 160, words=words):
        # On row t the state shows x[t+1], which no sum of x[t] and noise tells: each document has
        # other pairs.
        known.append(
            (
                batch,
                state_signal(
                    model, batch, table[batch.input_ids_BT.roll(-1, 1)] * head.norm.weight
                ),
            )
        )
    start_by_least_squares(head, [(b, s) for b, s in known[:-4]], scales_of(model))
    seen_before = [
        predicted(head, b, s)[in_document(b, words)].mean().item() for b, s in known[-4:]
    ]
    with torch.no_grad():
        for query, _ in (roles := Roles.of(head)).same_token:
            head.midlayer.self_attn.o_proj.weight[:, roles.slot(query)] = 0
    without = [predicted(head, b, s)[in_document(b, words)].mean().item() for b, s in known[-4:]]
    assert min(seen_before) > 0.5
    assert max(without) < 0.2


def test_a_head_that_has_started_trains_as_it_decodes_and_loads_as_it_was(tmp_path: Any) -> None:
    head, model = make_head()
    known = [(b, make_signal(model, b, LAYERS)) for b in make_texts(6, 120)]
    start_by_least_squares(head, known, scales_of(model))
    for mine, scale in zip(head.fc_norm, scales_of(model), strict=True):
        assert torch.equal(mine.weight, scale)
    assert_training_equals_decoding(head.eval(), model, num_steps=2)
    assert_round_trip(head, model, tmp_path)


def test_rows_that_no_server_was_asked_for_do_not_count() -> None:
    """The last row of a document, and documents without a label: zeros.

    The others are those of shorter texts.

    In float64: products of other shapes round differently, and least squares enlarge it.
    """
    head, model = (module.double() for module in make_head())
    texts, starts = make_texts(7, 120), []
    known = [(b, make_signal(model, b, LAYERS)) for b in texts]
    for place, (batch, signal) in enumerate(known):
        is_asked_BT = torch.zeros_like(batch.input_ids_BT, dtype=torch.bool)
        is_asked_BT[:, :-1] = (batch.document_BT[:, 1:] == batch.document_BT[:, :-1]) & (place < 6)
        for states in (signal.distribution.hidden_BTD, signal.aux_BTLD):
            states[~is_asked_BT] = 0
    shorter = [
        make_batch(
            [
                [
                    ids.tolist()[:-1]
                    for ids in (b.input_ids_BT[0][b.document_BT[0] == d] for d in (0, 1))
                ]
            ]
        )
        for b in texts[:6]
    ]
    for given in (known, [(b, make_signal(model, b, LAYERS)) for b in shorter]):
        torch.manual_seed(2)
        start_by_least_squares(head, given, scales_of(model))
        starts.append({name: tensor.clone() for name, tensor in head.state_dict().items()})
    for name, tensor in starts[0].items():
        torch.testing.assert_close(tensor, starts[1][name], rtol=1e-3, atol=1e-4)


def test_a_final_norm_with_a_weight_of_zero_leaves_finite_weights() -> None:
    head, model = make_head()
    with torch.no_grad():
        model.model.norm.weight[3] = head.norm.weight[3] = 0
    start_by_least_squares(
        head, [(b, make_signal(model, b, LAYERS)) for b in make_texts(3, 120)], scales_of(model)
    )
    assert all(parameter.isfinite().all() for parameter in head.parameters())


def test_a_key_scores_its_own_token_as_asked() -> None:
    e = unit(torch.randn(200, 512))
    rows = random_rows(24, 512, score=20.0, head_size=64)
    scores = (e @ rows.mT) @ (e @ rows.mT).mT / 64**0.5
    assert scores.diagonal().mean() == pytest.approx(20, rel=0.1)
    assert (scores - scores.diagonal().diag()).abs().mean() < 5


@pytest.mark.parametrize("options", [{"fc_norm": False}, {"norm_before_residual": True}])
def test_a_head_whose_output_is_another_sum_is_refused(options: dict[str, Any]) -> None:
    head, model = make_head(**options)
    with pytest.raises(ValueError, match=r"fc_norm.*norm_before_residual"):
        start_by_least_squares(head, [], scales_of(model))
