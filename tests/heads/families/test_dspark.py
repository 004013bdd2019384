"""DSpark by hand: bias, confidence, training against drafting, and export.

Drafting is token by token; the confidence has its label checked.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from make_families import DRAFT_IDS, MASK, VARIANTS, make_variant
from make_heads import (
    HIDDEN,
    VOCAB,
    make_batch,
    make_ids,
    make_random,
    make_signal,
    make_target,
    q_of,
    signal_of_prefix,
    spread,
)
from reference_decoder import propose
from safetensors.torch import load_file
from torch import Tensor

from redraft.distill.loss.choice import Divergence
from redraft.distill.train.objective import distill_loss
from redraft.eval.forecast.rows import compare_rows
from redraft.heads.catalog import find_family
from redraft.heads.draft import Batch, DraftStep, ExactTarget, TargetSignal
from redraft.heads.families.dflash import DFlash
from redraft.heads.families.dspark import INIT_STD, Config, DSpark
from redraft.heads.target import Target

RANK = 6
NUM_TOKENS = 3


def make_head(variant: str = "from the anchor", **options: Any) -> tuple[DSpark, Any]:
    return make_variant("dspark", variant, **options)


def make_wide(variant: str) -> tuple[DSpark, Any, Batch, TargetSignal]:
    """A head, its target, a batch of packed documents and the signal, in float64."""
    chosen, draft_ids = VARIANTS["dspark"][variant]
    model = make_target().double()
    sizes = {
        "aux_layer_ids": (1, 2, 4),
        "num_layers": 2,
        "block_size": 3,
        "mask_token_id": MASK,
        "markov_rank": RANK,
    }
    torch.manual_seed(0)
    head = make_random(
        DSpark(Config(**{**sizes, **chosen}), Target.from_model(model), draft_ids).double()
    )
    batch = make_batch(
        [[make_ids(9, seed=5), make_ids(7, seed=6)], [make_ids(14, seed=7)]], loss_from=2
    )
    return head, model, batch, make_signal(model, batch, head.aux_layer_ids)


def labelled(step: DraftStep) -> list[tuple[int, int]]:
    return [(int(b), int(t)) for b, t in step.mask_BT.nonzero()]


@pytest.mark.parametrize("variant", VARIANTS["dspark"])
def test_bias_and_confidence_are_those_by_hand(variant: str) -> None:
    head, _, batch, signal = make_wide(variant)
    with torch.no_grad():
        steps = [*map(spread, head.draft_steps(batch, signal))]
        plain = [*map(spread, DFlash.draft_steps(head, batch, signal))]  # the same blocks
    w1_VR, w2_WR = (
        head.markov_head.markov_w1.weight.detach(),
        head.markov_head.markov_w2.weight.detach(),
    )
    assert len(steps) == NUM_TOKENS
    for k, (step, base) in enumerate(zip(steps, plain, strict=True), 1):
        for b, t in labelled(step):
            before = int(
                batch.input_ids_BT[b, t + k]
            )  # the anchor is t + 1, and token k stands at t + 1 + k
            hidden_D = base.hidden_BTD[b, t]
            code_R = [float(w1_VR[before, r]) for r in range(RANK)]
            rows = range(len(base.head_WD))
            by_hand = [
                sum(float(base.head_WD[w, d]) * float(hidden_D[d]) for d in range(HIDDEN))
                + sum(float(w2_WR[w, r]) * code_R[r] for r in range(RANK))
                for w in rows[::7]
            ]
            row = b * batch.input_ids_BT.shape[1] + t
            found_W = step.logits(torch.tensor([row]))[0]
            torch.testing.assert_close(
                found_W[::7], torch.tensor(by_hand, dtype=torch.float64), atol=1e-12, rtol=1e-12
            )
            if head.confidence_head is not None:
                assert step.confidence_BT is not None
                weight = head.confidence_head.proj.weight[0].tolist()
                logit = float(head.confidence_head.proj.bias.detach()) + sum(
                    w * x for w, x in zip(weight, [*hidden_D.tolist(), *code_R], strict=True)
                )
                assert float(step.confidence_BT[b, t]) == pytest.approx(logit, abs=1e-12)


def test_the_token_before_changes_what_is_proposed() -> None:
    """The one thing that DFlash cannot do: its slots do not know which token was drawn before."""
    head, model = make_head()
    prefix = make_ids(9)
    signal = signal_of_prefix(head, model, prefix)
    drafts = [
        propose(head, prefix, signal, 2, 5.0, torch.Generator().manual_seed(seed))
        for seed in range(4)
    ]
    assert len({tokens[0][0] for tokens in drafts}) > 1
    first, second = ([each[k][1] for each in drafts] for k in (0, 1))
    assert all(torch.equal(q_V, first[0]) for q_V in first)
    assert any((q_V - second[0]).abs().max() > 1e-4 for q_V in second)
    with torch.no_grad():
        head.markov_head.markov_w2.weight.zero_()
    drafts = [
        propose(head, prefix, signal, 2, 5.0, torch.Generator().manual_seed(seed))
        for seed in range(4)
    ]
    assert all(torch.equal(tokens[1][1], drafts[0][1][1]) for tokens in drafts)


def test_the_anchors_slot_proposes_the_first_token_in_one_layout_only() -> None:
    """With both layouts the hidden states come from the same block, one slot apart."""
    (ahead, model), (filled, _) = make_head(), make_head("from the first mask")
    filled.load_state_dict(ahead.state_dict())
    batch = make_batch([[make_ids(12)]])
    signal = make_signal(model, batch, ahead.aux_layer_ids)
    with torch.no_grad():
        # blocks of three slots: three tokens, or two
        three = [*map(spread, ahead.draft_steps(batch, signal, 3))]
        two = [*map(spread, filled.draft_steps(batch, signal, 2))]
    assert (ahead.max_tokens, filled.max_tokens) == (3, 3)
    for k in (0, 1):
        mask_BT = three[k + 1].mask_BT
        torch.testing.assert_close(
            two[k].hidden_BTD[mask_BT], three[k + 1].hidden_BTD[mask_BT], atol=1e-5, rtol=1e-4
        )


def naive_loss(steps: list[DraftStep], signal: TargetSignal, scale: float) -> Tensor:
    """KL(p || q) and the cross-entropy of the confidence against 1 - TV(p, q).

    They are computed row by row, from whole distributions.
    """
    total = torch.zeros((), dtype=torch.float64)
    target = signal.distribution
    assert isinstance(target, ExactTarget)
    for step in map(spread, steps):
        for b, t in labelled(step):
            p_V = (target.head_VD @ target.hidden_BTD[b, t + step.shift]).softmax(-1)
            log_q_W = step.logits(torch.tensor([b * step.mask_BT.shape[1] + t]))[0].log_softmax(-1)
            q_V = log_q_W.exp()
            if step.draft_ids_W is not None:
                q_V = torch.zeros_like(p_V).index_copy(0, step.draft_ids_W, q_V)
            p_W = p_V if step.draft_ids_W is None else p_V[step.draft_ids_W]
            kl = (p_W * (p_W.log() - log_q_W)).sum() - torch.xlogy(p_W.sum(), p_W.sum())
            loss = kl
            if step.confidence_BT is not None:
                acceptance = 1 - 0.5 * (p_V - q_V).abs().sum().detach()
                sure = step.confidence_BT[b, t].sigmoid()
                loss = loss - acceptance * sure.log() - (1 - acceptance) * (1 - sure).log()
            total = total + scale * step.weight * loss
    return total


@pytest.mark.parametrize("variant", VARIANTS["dspark"])
def test_the_loss_is_the_divergence_and_the_cross_entropy_of_the_confidence(variant: str) -> None:
    head, _, batch, signal = make_wide(variant)
    result = distill_loss(head.draft_steps(batch, signal), batch, signal, Divergence(), 0.3)
    result.loss.backward()
    found = {name: p.grad for name, p in head.named_parameters()}
    head.zero_grad()
    wanted = naive_loss(head.draft_steps(batch, signal), signal, 0.3)
    wanted.backward()
    torch.testing.assert_close(result.loss, wanted)
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_the_label_of_the_confidence_is_one_minus_tv() -> None:
    """TV is the divergence here, so both are known from the loss without a confidence."""
    head, _, batch, signal = make_wide("from the anchor")
    step = spread(head.draft_steps(batch, signal)[0])
    result = distill_loss([step], batch, signal, Divergence(name="total_variation"), 1.0)
    without = distill_loss(
        [replace(step, confidence_BT=None)], batch, signal, Divergence(name="total_variation"), 1.0
    )
    rows = step.mask_BT.flatten().nonzero().squeeze(1)
    assert step.confidence_BT is not None
    num_rows, tv = len(rows), float(without.loss.detach())
    assert float(without.sums_S3[0, 0]) == pytest.approx(num_rows - tv)
    (gradient_BT,) = torch.autograd.grad(result.loss, step.confidence_BT, retain_graph=True)
    # d BCE / d logit = sigmoid(logit) - label
    labels = (step.confidence_BT.sigmoid() - gradient_BT).detach()
    assert float(labels.flatten()[rows].sum()) == pytest.approx(num_rows - tv)
    assert not gradient_BT[~step.mask_BT].any()


def test_no_gradient_reaches_the_target() -> None:
    head, model, batch, signal = make_wide("from the anchor")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    distill_loss(head.draft_steps(batch, signal), batch, signal, Divergence(), 1.0).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == []


def test_metrics_take_the_bias_into_account() -> None:
    """A bias that has the text by heart.

    A proposal then agrees exactly where the target would say what follows.
    """
    head, model = make_head(markov_rank=VOCAB)
    ids = list(range(1, 14))  # every token follows the one before, so the bias alone can tell it
    batch = make_batch([[ids]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    with torch.no_grad():
        head.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        head.markov_head.markov_w2.weight.copy_(
            1e4 * torch.eye(VOCAB).roll(1, 0)
        )  # x proposes x + 1
        steps = head.draft_steps(batch, signal)
    assert isinstance(signal.distribution, ExactTarget)
    target_T = (signal.distribution.hidden_BTD[0] @ signal.distribution.head_VD.T).argmax(-1)
    text = torch.tensor(ids)
    for step in steps:
        rows = [t for _, t in labelled(step)]
        wanted = [bool(target_T[t + step.shift] == text[t + 1 + step.shift]) for t in rows]
        assert compare_rows(step, signal.distribution).agree_BT[0, rows].tolist() == wanted
        assert [int(q_of(step, t).argmax()) for t in rows] == [
            ids[t + 1 + step.shift] for t in rows
        ]


def test_engines_find_their_keys_where_they_look(tmp_path: Path) -> None:
    head, _ = make_head("reduced vocabulary")
    head.export(tmp_path, torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Qwen3DSparkModel"], "qwen3")
    wanted = {
        "mask_token_id": MASK,
        "target_layer_ids": [0, 1, 3],
        "is_causal": False,
        "sample_from_anchor": True,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "block_size": 3,
        "num_hidden_layers": 2,
        "draft_vocab_size": len(DRAFT_IDS),
    }
    assert {key: config[key] for key in wanted} == wanted
    assert (
        "dflash_config" not in config
    )  # V2 refuses `sample_from_anchor` there, and would read the other keys first
    tensors = load_file(tmp_path / "model.safetensors")
    types = {
        name: tensor.dtype
        for name, tensor in tensors.items()
        if name.startswith(("markov", "confidence"))
    }
    assert types == {
        "markov_head.markov_w1.weight": torch.bfloat16,
        "markov_head.markov_w2.weight": torch.bfloat16,
        "confidence_head.proj.weight": torch.float32,
        "confidence_head.proj.bias": torch.float32,
    }
    assert tensors["markov_head.markov_w1.weight"].shape == (VOCAB, RANK)
    assert tensors["markov_head.markov_w2.weight"].shape == (len(DRAFT_IDS), RANK)
    assert tensors["confidence_head.proj.weight"].shape == (1, HIDDEN + RANK)
    assert "embed_tokens.weight" not in tensors


def test_a_checkpoint_of_another_trainer_loads(tmp_path: Path) -> None:
    head, model = make_head()
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["redraft"], config["draft_vocab_size"], config["layer_types"], config["is_causal"]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["DSparkDraftModel"]})
    )
    loaded = DSpark.load(tmp_path, Target.from_model(model))
    assert loaded.config == replace(head.config, num_anchors=512, gamma=4.0)
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in head.state_dict().items())


def test_layers_and_mask_token_are_read_in_the_section_of_dflash_first(tmp_path: Path) -> None:
    head, model = make_head()
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    section = {key: config.pop(key) for key in ("mask_token_id", "target_layer_ids")}
    config = {**config, "dflash_config": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert DSpark.load(tmp_path, Target.from_model(model)).config == head.config
    assert find_family("dspark").read_layers(config) == list(head.aux_layer_ids)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"markov_head_type": "gated"}, r"Markov.*\bgated\b"),
        ({"confidence_head_with_markov": False}, r"confidence.*Markov"),
        ({"enable_confidence_head": False}, r"\b2 tensors.*config"),
        ({"markov_rank": RANK + 1}, r"confidence_head\.proj\.weight"),
        # SpecForge also puts it into a section, where vLLM does not look
        ({"markov_rank": None, "dspark_config": {"markov_rank": RANK}}, r"no markov_rank\b"),
    ],
)
def test_another_kind_of_head_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    head, model = make_head()
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(ValueError, match=message):
        DSpark.load(tmp_path, Target.from_model(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"markov_rank": 0}, r"rank is 0\b.*DFlash"),
        ({"block_size": 0}, r"block_size is 0\b.*\b1\b"),
        ({"block_size": 1, "sample_from_anchor": False}, r"block_size to 2\b"),
        ({"mask_token_id": VOCAB}, rf"mask.*\b{VOCAB}\b"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(**options)


def test_an_untrained_head_begins_as_dflash() -> None:
    model = make_target()
    torch.manual_seed(0)
    head = DSpark(
        Config(aux_layer_ids=(1, 2, 4), num_layers=1, mask_token_id=MASK), Target.from_model(model)
    )
    for weight in head.markov_head.parameters():
        assert float(weight.detach().std()) == pytest.approx(INIT_STD, rel=0.05)
    head.init_from_layers(list(model.model.layers[-1:]), model.model.norm)
    assert torch.equal(head.norm.weight, model.model.norm.weight)
    assert float(head.markov_head.markov_w2.weight.detach().std()) == pytest.approx(
        INIT_STD, rel=0.05
    )
