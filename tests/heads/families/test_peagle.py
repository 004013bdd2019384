"""P-EAGLE: the steps against one pass under a mask made by loops.

Also sampled rows, packing, decoding and export.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from make_families import MASK, VARIANTS, make_variant
from make_heads import (
    VOCAB,
    make_batch,
    make_ids,
    make_signal,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from redraft.files.folder import tensor_files
from redraft.heads.catalog import detect_family, detect_family_by_tensors
from redraft.heads.families.peagle import PEagle
from redraft.heads.nn.layers import rotate
from redraft.heads.nn.prefix import FLEX_BLOCK, block_mask
from redraft.heads.target import Target


def make_head(variant: str = "plain", **options: Any) -> tuple[PEagle, Any]:
    return make_variant("peagle", variant, **options)


Row = tuple[int, int]
"""The row of the batch that a pass continues, and its draft step."""


@torch.no_grad()
def draft_by_mask(
    head: PEagle, ids: list[int], documents: list[int], positions: list[int], feature_TD: Tensor
) -> Any:
    """The input of the output head of every (row, step).

    All rows in one pass, under a mask made key by key.
    """
    rows: list[Row] = [(t, k) for k in range(4) for t in range(len(ids))]
    sees = [
        [
            documents[t] == documents[u]
            and (u <= t if j == 0 else (u == t and j <= k))  # the definition
            for u, j in rows
        ]
        for t, k in rows
    ]
    shape = head.shape
    tokens = torch.tensor([ids[(t + 1) % len(ids)] if k == 0 else MASK for t, k in rows])
    learned_D = head.mix(head.mask_hidden.view(1, 1, 3, -1))[0, 0]
    x_ND = torch.stack([feature_TD[t] if k == 0 else learned_D for t, k in rows])
    cos_sin = head._rotary(torch.tensor([[positions[t] + k for t, k in rows]]), x_ND)
    for layer in (head.midlayer, *head.layers.values()):
        if layer is head.midlayer:
            embed_ND = layer.input_layernorm(head._embed_VD[tokens])
            normed_ND = layer.hidden_norm(x_ND)
            x_ND = normed_ND if head.config.norm_before_residual else x_ND
            normed_ND = torch.cat([embed_ND, normed_ND], -1)
        else:
            normed_ND = layer.input_layernorm(x_ND)

        def heads(y_ND: Tensor) -> Tensor:
            return y_ND.view(1, len(rows), -1, shape.head_dim).transpose(1, 2)

        q, k, v = (
            heads(getattr(layer.self_attn, f"{name}_proj")(normed_ND)) for name in ("q", "k", "v")
        )
        groups = shape.num_attention_heads // shape.num_key_value_heads
        k, v = rotate(k, cos_sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = rotate(q, cos_sin) @ k.transpose(-1, -2) / math.sqrt(shape.head_dim)
        p = scores.masked_fill(~torch.tensor(sees), -math.inf).softmax(-1)
        x_ND = x_ND + layer.self_attn.o_proj((p @ v)[0].transpose(0, 1).flatten(1))
        x_ND = x_ND + layer.mlp(layer.post_attention_layernorm(x_ND))
    return dict(zip(rows, head.norm(x_ND), strict=True))


@pytest.mark.parametrize("variant", VARIANTS["peagle"])
def test_every_step_is_that_of_one_pass_under_the_mask(variant: str) -> None:
    head, model = make_head(variant, keep_ratio=0.6, min_share=0.1)
    batch = make_batch([[make_ids(9, seed=5), make_ids(8, seed=6)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    sampled = head.draft_steps(batch, signal)
    with torch.no_grad():
        every, feature_TD = head.draft_steps(batch, signal), head.feature(signal)[0]
    texts = (batch.input_ids_BT[0], batch.document_BT[0], batch.position_ids_BT[0])
    wanted = draft_by_mask(head, *(text_T.tolist() for text_T in texts), feature_TD)
    assert [int(step.mask_BT.sum()) for step in every] == [13, 11, 9, 7]
    # 13 rows have a second label: 0.6, 0.36 and 0.216 of 11 are kept
    assert [int(step.mask_BT.sum()) for step in sampled][:2] == [13, 6]
    for steps in (every, sampled):
        for k, step in enumerate(steps):
            for row in step.mask_BT[0].nonzero().flatten().tolist():
                torch.testing.assert_close(
                    step.hidden_BTD[0, row], wanted[row, k], atol=1e-5, rtol=1e-4
                )


def test_a_row_of_the_batch_trains_the_same_beside_any_other() -> None:
    head, model = make_head(keep_ratio=0.5)
    texts = [make_ids(12), make_ids(42, seed=3)]
    together = make_batch([[text] for text in texts])
    steps = head.draft_steps(together, make_signal(model, together, head.aux_layer_ids))
    for i, text in enumerate(texts):
        alone = make_batch([[text]])
        for step, other in zip(
            head.draft_steps(alone, make_signal(model, alone, head.aux_layer_ids)),
            steps,
            strict=True,
        ):
            assert torch.equal(step.mask_BT[0], other.mask_BT[i, : len(text)])
            assert step.mask_BT.any()


def test_later_steps_train_other_rows_in_every_epoch() -> None:
    head, model = make_head(keep_ratio=0.3, min_share=0.2)
    batch = make_batch([[make_ids(42)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    epochs = [
        [step.mask_BT for step in head.draft_steps(replace(batch, salt=e), signal)]
        for e in range(10)
    ]
    # 39 rows have a label two tokens on, 38 of them three: an epoch trains 30% and 20% of them
    for k, rows in ((1, 39), (2, 38)):
        masks = [masks[k] for masks in epochs]
        assert max(int(mask_BT.sum()) for mask_BT in masks) <= 0.3 * 39
        assert int(torch.stack(masks).any(0).sum()) >= 0.9 * rows
    with torch.no_grad():
        first, second = (head.draft_steps(replace(batch, salt=salt), signal) for salt in (0, 3))
    assert all(
        torch.equal(one.hidden_BTD, other.hidden_BTD)
        for one, other in zip(first, second, strict=True)
    )


def test_later_steps_train_rows_of_the_step_before() -> None:
    head, model = make_head(keep_ratio=0.5, min_share=0.2)
    batch = make_batch([[make_ids(42)], [make_ids(42, seed=3)]])
    steps = head.draft_steps(batch, make_signal(model, batch, head.aux_layer_ids))
    # 39 rows have a label two tokens on; shares 1/2, 1/4 and the floor of 1/5, of which the last
    # rows have no label
    counts = [step.mask_BT.sum(1).tolist() for step in steps]
    assert counts[0] == [40, 40]
    for count, most in zip(counts[1:], (19, 9, 7), strict=True):
        assert all(most - 2 <= each <= most for each in count), counts
    for before, after in itertools.pairwise(steps):
        assert not (after.mask_BT & ~before.mask_BT).any()
    again = head.draft_steps(batch, make_signal(model, batch, head.aux_layer_ids))
    assert all(
        torch.equal(one.mask_BT, other.mask_BT) for one, other in zip(steps, again, strict=True)
    )


def test_a_gpu_computes_few_keys_that_no_sampled_row_sees() -> None:
    """It computes whole blocks of 128 rows by 128 keys.

    In random order, rows of a block would see all their text.
    """
    head, model = make_head(num_steps=8, num_layers=1)
    ranges: list[tuple[Tensor, Tensor, int]] = []

    class Ranges(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if (
                func._schema.name == "redraft::prefix_attention"
                and args[0].shape[2] < args[1].shape[2]
            ):
                _, k, _, start_BN, end_BN, *_ = args
                ranges.append((start_BN, end_BN, k.shape[2]))
            return func(*args, **(kwargs or {}))

    batch = make_batch([[make_ids(4096)], [make_ids(1000), make_ids(3096, seed=3)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    with Ranges():
        head.draft_steps(batch, signal)
    assert len(ranges) == 7
    num_seen = sum(int((end_BN - start_BN).sum()) for start_BN, end_BN, _ in ranges)
    num_blocks = 0
    for start_BN, end_BN, num_keys in ranges:
        blocks = block_mask(start_BN, end_BN, num_keys)
        assert blocks.full_kv_num_blocks is not None
        num_blocks += int(blocks.kv_num_blocks.sum()) + int(blocks.full_kv_num_blocks.sum())
    assert num_blocks * FLEX_BLOCK**2 < 1.5 * num_seen


def test_a_row_without_labels_trains_nothing() -> None:
    head, model = make_head()
    batch = make_batch([[make_ids(3)], [make_ids(12)]])
    steps = head.draft_steps(batch, make_signal(model, batch, head.aux_layer_ids))
    assert all(not step.mask_BT[0].any() for step in steps[1:])
    assert all(step.hidden_BTD.isfinite().all() for step in steps)


def test_engines_find_their_keys_where_they_look(tmp_path: Path) -> None:
    head, _ = make_head("reduced vocabulary")
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["pard_token"]) == (["LlamaForCausalLMEagle3"], MASK)
    assert (config["num_hidden_layers"], config["num_aux_hidden_states"]) == (3, 3)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 1, 3 * head.shape.hidden_size)
    assert "layers.2.input_layernorm.weight" in tensors
    assert detect_family(tmp_path).name == "peagle"
    names = tensor_files(tmp_path)
    assert detect_family_by_tensors(names, tmp_path).name == "peagle"
    assert detect_family(tmp_path).speculative == {"method": "eagle3", "parallel_drafting": True}


def test_a_checkpoint_of_another_trainer_loads(tmp_path: Path) -> None:
    head, model = make_head()
    head.export(tmp_path, layout="speculators", target_name="target")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["redraft"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert detect_family(tmp_path).name == "peagle"
    loaded = PEagle.load(tmp_path, Target.from_model(model))
    assert loaded.config.mask_token_id == MASK
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_the_package_speculators_reads_an_export(tmp_path: Path) -> None:
    speculators = pytest.importorskip("speculators")
    head, model = make_head(fc_norm=True)
    model.save_pretrained(tmp_path / "target")
    head.export(tmp_path / "draft", layout="speculators", target_name=str(tmp_path / "target"))
    theirs = speculators.SpeculatorModel.from_pretrained(tmp_path / "draft")
    state = theirs.state_dict()
    assert torch.equal(state["fc_norm.2.weight"], head.fc_norm[2].weight)
    assert torch.equal(state["mask_hidden"], head.mask_hidden)
    assert torch.equal(state["layers.2.mlp.up_proj.weight"], head.layers["2"].mlp.up_proj.weight)
    assert torch.equal(state["layers.0.hidden_norm.weight"], head.midlayer.hidden_norm.weight)


@pytest.mark.vllm
def test_vllm_reads_the_options_of_either_layout(tmp_path: Path) -> None:
    """Without an engine: the config from which vLLM makes the head."""
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    options = {"norm_before_residual": True, "fc_norm": True}
    head, _ = make_head("reduced vocabulary", **options)
    head.export(tmp_path, layout="speculators", target_name="target")
    theirs = SpeculatorsConfig.from_pretrained(tmp_path)
    head.export(tmp_path / "vllm")
    plain = json.loads((tmp_path / "vllm" / "config.json").read_text())
    for key in (
        *options,
        "norm_before_fc",
        "pard_token",
        "num_hidden_layers",
        "num_aux_hidden_states",
    ):
        assert getattr(theirs, key) == plain[key], key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": VOCAB}, rf"mask.*\b{VOCAB}\b.*\b{VOCAB}\b"),
        ({"num_layers": 0}, r"num_layers is 0\b"),
        ({"num_steps": 1}, r"num_steps.*EAGLE-3"),
        ({"keep_ratio": 0.0}, "keep_ratio"),
        ({"aux_layer_ids": (2, 9)}, r"layers 0 to 5\b"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(**options)


def test_keys_of_other_trainers_are_read_where_vllm_reads_them(tmp_path: Path) -> None:
    """The mask token as in amazon's heads, and layers in a section."""
    head, model = make_head(norm_before_fc=True)
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = [layer - 1 for layer in config.pop("eagle_aux_hidden_state_layer_ids")]
    nested = {"eagle_aux_hidden_state_layer_ids": layers, "norm_before_fc": True}
    kept = {
        key: value
        for key, value in config.items()
        if key not in ("redraft", "pard_token", "norm_before_fc")
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**kept, "eagle_config": nested, "ptd_token_id": 7}))
    loaded = PEagle.load(tmp_path, Target.from_model(model))
    assert (loaded.config.mask_token_id, loaded.aux_layer_ids) == (7, head.aux_layer_ids)
    assert loaded.config.norm_before_fc
    path.write_text(json.dumps({**kept, "eagle_config": nested}))
    with pytest.raises(ValueError, match=rf"^{tmp_path}: .*no mask token.*pard_token.*$"):
        PEagle.load(tmp_path, Target.from_model(model))
