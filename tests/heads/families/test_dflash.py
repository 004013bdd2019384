"""DFlash: the blocks against a loop over single queries, anchors, packing, decoding, export."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from make_families import DRAFT_IDS, MASK, OPTIONS, VARIANTS, make_variant
from make_heads import (
    HIDDEN,
    VOCAB,
    make_batch,
    make_ids,
    make_random,
    make_signal,
    make_target,
    signal_of_prefix,
    spread,
)
from make_tokenizers import make_byte_tokenizer
from reference_decoder import propose
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft.distill.loss.choice import Divergence
from redraft.distill.train.objective import distill_loss
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.doctor.checks import static_findings
from redraft.heads.doctor.pair import Pair
from redraft.heads.families.dflash import Config, DFlash, choose_anchors
from redraft.heads.nn.layers import rotate
from redraft.heads.nn.masks import choose_mask_token
from redraft.heads.shape import LlamaShape
from redraft.heads.target import Target


def make_head(variant: str = "plain", **options: Any) -> tuple[DFlash, Any]:
    return make_variant("dflash", variant, **options)


def rms(x: Tensor, norm: torch.nn.RMSNorm) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight


@torch.no_grad()
def draft_by_hand(
    head: DFlash, context_TD: Tensor, anchor: int, first_position: int, token: int, slots: int
) -> Tensor:
    """The input of the output head in every slot, [S, D], query by query and key by key.

    `context_TD` are the features of the document's rows before the anchor, which stands at position
    `anchor`.
    """
    shape = head.shape
    groups = shape.num_attention_heads // shape.num_key_value_heads
    x_SD = head._embed_VD[torch.tensor([token] + [MASK] * (slots - 1))]

    def turn(heads_HE: Tensor, position: int) -> Tensor:
        cos_sin = head._rotary(torch.tensor([[position]]), heads_HE)
        return rotate(heads_HE[None, :, None], cos_sin)[0, :, 0]

    for layer in head.layers:
        attention = layer.self_attn
        normed_SD = rms(x_SD, layer.input_layernorm)
        rows = [(feature, first_position + i) for i, feature in enumerate(context_TD)]
        rows += [(normed, first_position + anchor + s) for s, normed in enumerate(normed_SD)]
        keys = [
            turn(rms(attention.k_proj(row).view(-1, shape.head_dim), attention.k_norm), at)
            for row, at in rows
        ]
        values = [attention.v_proj(row).view(-1, shape.head_dim) for row, _ in rows]
        out = []
        for s, normed in enumerate(normed_SD):
            q = turn(
                rms(attention.q_proj(normed).view(-1, shape.head_dim), attention.q_norm),
                first_position + anchor + s,
            )
            per_head = []
            for h in range(shape.num_attention_heads):
                scores = torch.stack([q[h] @ key[h // groups] for key in keys]) / math.sqrt(
                    shape.head_dim
                )
                per_head.append(
                    scores.softmax(0) @ torch.stack([value[h // groups] for value in values])
                )
            out.append(attention.o_proj(torch.cat(per_head)))
        x_SD = x_SD + torch.stack(out)
        x_SD = x_SD + layer.mlp(rms(x_SD, layer.post_attention_layernorm))
    return rms(x_SD, head.norm)


@pytest.mark.parametrize("variant", VARIANTS["dflash"])
def test_every_slot_is_that_of_a_loop_over_queries_and_keys(variant: str) -> None:
    head, model = make_head(variant)
    documents = [make_ids(7, seed=5), make_ids(6, seed=6)]
    batch = make_batch([documents])
    signal = make_signal(model, batch, head.aux_layer_ids)
    with torch.no_grad():
        feature_TD = head.feature(signal)[0]
        steps = [*map(spread, head.draft_steps(batch, signal))]
    start = 0
    for document in documents:
        for anchor in range(1, len(document) - 1):
            wanted_SD = draft_by_hand(
                head,
                feature_TD[start : start + anchor],
                anchor,
                0,
                document[anchor],
                len(steps) + 1,
            )
            for step in steps:
                row = start + anchor - 1
                if step.mask_BT[0, row]:
                    torch.testing.assert_close(
                        step.hidden_BTD[0, row], wanted_SD[step.shift], atol=1e-5, rtol=1e-4
                    )
        start += len(document)


def test_a_shorter_block_proposes_something_else() -> None:
    # a mask slot reads the masks after it, so a forecast needs the block of the server
    head, model = make_head()
    prefix = make_ids(9)
    signal = signal_of_prefix(head, model, prefix)
    one, three = (propose(head, prefix, signal, k, temperature=1.0)[0][1] for k in (1, 3))
    assert (one - three).abs().max() > 1e-3


def test_chunks_of_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head, model = make_head()
    batch = make_batch([[make_ids(20)], [make_ids(15)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    with torch.no_grad():
        whole = head.draft_steps(batch, signal)
        monkeypatch.setattr("redraft.heads.families.dflash.ANCHORS_A_CHUNK", 3)
        parts = head.draft_steps(batch, signal)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.hidden_BTD, other.hidden_BTD, atol=1e-5, rtol=1e-4)


def test_training_takes_some_anchors_and_a_forecast_all() -> None:
    head, model = make_head(num_anchors=4)
    batch = make_batch([[make_ids(20)], [make_ids(12), make_ids(8, seed=3)]], loss_from=2)
    signal = make_signal(model, batch, head.aux_layer_ids)
    trained = head.draft_steps(batch, signal)
    with torch.no_grad():
        forecast = head.draft_steps(batch, signal)
    assert trained[0].mask_BT.sum(1).tolist() == [4, 4]
    assert forecast[0].mask_BT.sum(1).tolist() == [18, 16]
    assert not (trained[0].mask_BT & ~forecast[0].mask_BT).any()
    for one, other in zip(map(spread, trained), map(spread, forecast), strict=True):
        mask_BT = one.mask_BT
        torch.testing.assert_close(
            one.hidden_BTD[mask_BT], other.hidden_BTD[mask_BT], atol=1e-5, rtol=1e-4
        )


def test_anchors_are_spread_and_depend_on_the_row_alone() -> None:
    long = [
        torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(8)
    ]
    batch = make_batch([[ids] for ids in long])
    rows_BA, is_anchor_BT = choose_anchors(batch, 100)
    assert is_anchor_BT.sum(1).tolist() == [100] * 8
    assert bool((rows_BA.diff(dim=1) > 0).all())
    # 800 anchors over four quarters of 398 rows each: 200 expected, standard deviation about 12
    quarters = [int(is_anchor_BT[:, q * 100 : (q + 1) * 100].sum()) for q in range(4)]
    assert all(150 < count < 250 for count in quarters), quarters
    alone, _ = choose_anchors(make_batch([[long[3]]]), 100)
    assert torch.equal(alone[0], rows_BA[3])


def test_ranks_evaluate_as_many_blocks_as_each_other() -> None:
    few, many = (
        make_batch([[make_ids(20)]], loss_from=15),
        make_batch([[make_ids(20)]], loss_from=5),
    )
    assert [choose_anchors(batch, None)[0].shape[1] for batch in (few, many)] == [5, 15]
    alone = [choose_anchors(batch, None)[1].sum() for batch in (few, many)]
    shared = [choose_anchors(batch, None, has_ranks=True) for batch in (few, many)]
    assert [rows_BA.shape[1] for rows_BA, _ in shared] == [20, 20]
    assert [is_anchor_BT.sum() for _, is_anchor_BT in shared] == alone


def test_every_epoch_trains_other_anchors_and_a_forecast_stays_the_same() -> None:
    head, model = make_head(num_anchors=5)
    batch = make_batch([[make_ids(22)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    epochs = [
        head.draft_steps(replace(batch, salt=epoch), signal)[0].mask_BT for epoch in range(10)
    ]
    assert [int(mask_BT.sum()) for mask_BT in epochs] == [5] * 10
    # 20 rows can begin a block
    assert int(torch.stack(epochs).any(0).sum()) >= 18
    with torch.no_grad():
        first, second = (head.draft_steps(replace(batch, salt=salt), signal) for salt in (0, 3))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.mask_BT, other.mask_BT)
        assert torch.equal(one.hidden_BTD, other.hidden_BTD)


def test_a_row_without_labels_trains_nothing() -> None:
    head, model = make_head(num_anchors=4)
    batch = make_batch([[make_ids(6)], [make_ids(12)]])
    batch = replace(batch, loss_mask_BT=batch.loss_mask_BT & torch.tensor([[False], [True]]))
    steps = head.draft_steps(batch, make_signal(model, batch, head.aux_layer_ids))
    assert all(not step.mask_BT[0].any() and step.hidden_BTD.isfinite().all() for step in steps)


def test_weights_decay_by_slot() -> None:
    head, model = make_head(gamma=2.0)
    batch = make_batch([[make_ids(9)]])
    steps = head.draft_steps(batch, make_signal(model, batch, head.aux_layer_ids))
    assert [step.weight for step in steps] == pytest.approx([1.0, 0.60653, 0.36788], abs=1e-5)


def test_engines_find_their_keys_where_they_look(tmp_path: Path) -> None:
    head, _ = make_head("reduced vocabulary")
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    section = {"mask_token_id": MASK, "target_layer_ids": [0, 1, 3], "causal": False}
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert config["dflash_config"] == section
    assert (config["block_size"], config["num_hidden_layers"], config["draft_vocab_size"]) == (
        4,
        2,
        len(DRAFT_IDS),
    )
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].tolist() == [3 + 3 * i for i in range(len(DRAFT_IDS))]
    assert tensors["lm_head.weight"].shape == (len(DRAFT_IDS), HIDDEN)
    assert "embed_tokens.weight" not in tensors


def test_a_checkpoint_of_another_trainer_loads(tmp_path: Path) -> None:
    head, model = make_head()
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del (
        config["redraft"],
        config["draft_vocab_size"],
        config["layer_types"],
        config["dflash_config"]["causal"],
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = DFlash.load(tmp_path, Target.from_model(model))
    assert loaded.config == head.config
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in head.state_dict().items())


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_sizes_and_biases_that_only_other_trainers_choose(layout: Any, tmp_path: Path) -> None:
    """Heads for gpt-oss have biases; those for Qwen 3.5 have heads that do not divide the width."""
    model = make_target()
    model.save_pretrained(tmp_path / "target")
    target = Target.from_model(model)
    shape = replace(
        LlamaShape.from_config(model.config),
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        attention_bias=True,
    )
    head = make_random(DFlash(Config(**OPTIONS["dflash"]), target, None, shape))
    head.export(tmp_path / "draft", layout=layout)
    loaded = DFlash.load(tmp_path / "draft", target)
    assert loaded.shape == head.shape
    assert "layers.1.self_attn.o_proj.bias" in loaded.state_dict()
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in head.state_dict().items())
    pair = Pair.read(TargetFolder.open(tmp_path / "target"), tmp_path / "draft")
    assert static_findings(pair, method=None, num_speculative_tokens=3) == []
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    config.get("transformer_layer_config", config)["attention_bias"] = False
    path.write_text(json.dumps(config))
    unset = Pair.read(pair.target, pair.draft)
    (found,) = static_findings(unset, method=None, num_speculative_tokens=3)
    assert '"attention_bias": true' in found.cure


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids", "block_size"])
def test_an_absent_key_is_refused_and_not_guessed(key: str, tmp_path: Path) -> None:
    head, model = make_head()
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for place in (config, config["dflash_config"]):
        place.pop(key, None)
    config["dflash_config"][key] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"^{tmp_path}: .*\b{key}\b.*$"):
        DFlash.load(tmp_path, Target.from_model(model))


def test_another_rotation_is_refused(tmp_path: Path) -> None:
    head, model = make_head()
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_neox_style": False}))
    with pytest.raises(ValueError, match=rf"{tmp_path}: .*is_neox_style"):
        DFlash.load(tmp_path, Target.from_model(model))


def test_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    head, model = make_head()
    head.export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": torch.randn(VOCAB, HIDDEN)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"lm_head.weight"):
        DFlash.load(tmp_path, Target.from_model(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": VOCAB}, rf"mask.*\b{VOCAB}\b.*\b{VOCAB}\b"),
        ({"block_size": 1}, r"block_size to 2\b"),
        ({"aux_layer_ids": (0, 2)}, r"layer 0\b"),
        ({"aux_layer_ids": (2, 6)}, r"layers 0 to 5\b"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(**options)


def test_the_mask_token_is_an_unused_row_or_a_padding_token_that_ends_no_answer(
    tmp_path: Path,
) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    size = len(tokenizer)
    assert choose_mask_token(TargetFolder.open(tmp_path), size + 10) == size
    assert choose_mask_token(TargetFolder.open(tmp_path), size) == tokenizer.pad_token_id
    for pad in (tokenizer.eos_token, None, "<late>"):
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"--head\.mask-token-id"):
            choose_mask_token(TargetFolder.open(tmp_path), size)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_the_steps_of_a_long_row_have_its_anchors_alone_and_the_same_gradients(name: str) -> None:
    family, model = find_family(name), make_target().double()
    config = family.options_class()(**{**OPTIONS[name], "num_anchors": 6})
    torch.manual_seed(0)
    head: Any = make_random(family.draft_class()(config, Target.from_model(model)).double())
    batch = make_batch([[make_ids(70)], [make_ids(30), make_ids(25, seed=3)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    gradients = []
    for whole in (False, True):
        head.zero_grad()
        steps = head.draft_steps(batch, signal)
        for step in steps:
            assert step.hidden_BTD.shape[:2] == (2, 6)
            assert step.confidence_BT is None or step.confidence_BT.shape == (2, 6)
            assert step.bias is None or step.bias.code_BTR.shape[:2] == (2, 6)
        steps = [*map(spread, steps)] if whole else steps
        assert (steps[0].hidden_BTD.shape[1] == 70) is whole
        result = distill_loss(steps, batch, signal, Divergence(), 0.3)
        result.loss.backward()
        assert result.sums_S3[0, 2] == 12
        gradients.append([result.loss.detach(), *(p.grad.clone() for p in head.parameters())])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
