"""Windows in heads: the rows that a token sees to the row, configs of other trainers, and both layouts.

T = tokens, S = slots of a block, D = hidden.
"""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from make_families import MASK, make_variant
from make_heads import make_batch, make_ids, make_random, make_signal, spread
from safetensors.torch import load_file, save_file
from test_dflash import rms
from torch import Tensor
from transformers import AutoConfig

from redraft.files.folder import tensor_entries
from redraft.files.windows import (
    EVERYTHING,
    SLIDING,
    View,
    count_states,
    make_views,
    read_block_windows,
    served_views,
    trained_views,
)
from redraft.heads.catalog import detect_family, find_family
from redraft.heads.draft import ExactTarget
from redraft.heads.nn.layers import rotate
from redraft.heads.target import Target

WINDOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "all causal windows": {"window": 6},
    "z-lab's, a full layer last": {"window": 6, "full_layers": (1,)},
    "both directions": {"window": 6, "is_causal": False},
    "causal without windows": {"is_causal": True},
}


def sees(view: View, query: int, key: int) -> bool:
    return not (view.is_causal and key > query) and (
        view.window is None or abs(query - key) < view.window
    )


@torch.no_grad()
def draft_by_hand(head: Any, context_TD: Tensor, anchor: int, token: int, slots: int) -> Tensor:
    """The input of the output head in every slot, [S, D], query by query and key by key."""
    shape = head.shape
    groups = shape.num_attention_heads // shape.num_key_value_heads
    x_SD = head._embed_VD[torch.tensor([token] + [MASK] * (slots - 1))]

    def turn(heads_HE: Tensor, position: int) -> Tensor:
        return rotate(heads_HE[None, :, None], head._rotary(torch.tensor([[position]]), heads_HE))[
            0, :, 0
        ]

    for layer, view in zip(head.layers, head.config.views, strict=True):
        attention = layer.self_attn
        normed_SD = rms(x_SD, layer.input_layernorm)
        rows = [(feature, i) for i, feature in enumerate(context_TD)]
        rows += [(normed, anchor + s) for s, normed in enumerate(normed_SD)]
        keys = [
            turn(rms(attention.k_proj(row).view(-1, shape.head_dim), attention.k_norm), at)
            for row, at in rows
        ]
        values = [attention.v_proj(row).view(-1, shape.head_dim) for row, _ in rows]
        out = []
        for s, normed in enumerate(normed_SD):
            q = turn(
                rms(attention.q_proj(normed).view(-1, shape.head_dim), attention.q_norm), anchor + s
            )
            seen = [i for i, (_, at) in enumerate(rows) if sees(view, anchor + s, at)]
            per_head = []
            for h in range(shape.num_attention_heads):
                scores = torch.stack([q[h] @ keys[i][h // groups] for i in seen]) / math.sqrt(
                    shape.head_dim
                )
                per_head.append(
                    scores.softmax(0) @ torch.stack([values[i][h // groups] for i in seen])
                )
            out.append(attention.o_proj(torch.cat(per_head)))
        x_SD = x_SD + torch.stack(out)
        x_SD = x_SD + layer.mlp(rms(x_SD, layer.post_attention_layernorm))
    return rms(x_SD, head.norm)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(
    ("family", "variant"), [("dflash", "plain"), ("dspark", "from the anchor")]
)
def test_every_slot_of_a_windowed_block_is_that_of_a_loop(
    family: str, variant: str, windows: str
) -> None:
    head, model = make_variant(family, variant, **WINDOWS[windows])
    documents = [make_ids(12, seed=5), make_ids(10, seed=6)]
    batch = make_batch([documents])
    signal = make_signal(model, batch, head.aux_layer_ids)
    with torch.no_grad():
        feature_TD = head.feature(signal)[0]
        steps = [*map(spread, head.draft_steps(batch, signal))]
    start, first, num_compared = 0, head.config.first_slot, 0
    for document in documents:
        for anchor in range(1, len(document) - 1):
            wanted_SD = draft_by_hand(
                head,
                feature_TD[start : start + anchor],
                anchor,
                document[anchor],
                len(steps) + first,
            )
            for k, step in enumerate(steps):
                row = start + anchor - 1
                if step.mask_BT[0, row]:
                    torch.testing.assert_close(
                        step.hidden_BTD[0, row], wanted_SD[first + k], atol=1e-5, rtol=1e-4
                    )
                    num_compared += 1
        start += len(document)
    assert num_compared > 40


def changed_rows(head: Any, model: Any, at: int) -> list[list[int]]:
    """The rows of each step that differ if the target's states of the row `at` do."""
    batch = make_batch([[make_ids(16, seed=5)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    exact = cast(ExactTarget, signal.distribution)
    hidden_BTD, aux_BTLD = exact.hidden_BTD.clone(), signal.aux_BTLD
    hidden_BTD[0, at] += 1
    if aux_BTLD is not None:
        aux_BTLD = aux_BTLD.clone()
        aux_BTLD[0, at] += 1
    changed = replace(signal, distribution=replace(exact, hidden_BTD=hidden_BTD), aux_BTLD=aux_BTLD)
    with torch.no_grad():
        steps = zip(
            map(spread, head.draft_steps(batch, signal, 3)),
            map(spread, head.draft_steps(batch, changed, 3)),
            strict=True,
        )
        differences = [(a.hidden_BTD - b.hidden_BTD).abs().amax(-1)[0] for a, b in steps]
    return [(difference_T > 1e-6).nonzero().flatten().tolist() for difference_T in differences]


@pytest.mark.parametrize(
    ("family", "options"),
    [("dflash", {}), ("dflash", {"is_causal": False}), ("dspark", {}), ("eagle3", {}), ("peagle", {})],
)  # fmt: skip
def test_a_change_beyond_the_window_changes_nothing_and_one_within_it_does(
    family: str, options: dict[str, Any]
) -> None:
    """A head of one layer, the states of one row changed: which rows of each step notice it."""
    window, at = 6, 4
    head, model = make_windowed(family, {"window": window, "num_layers": 1, **options})
    for k, rows in enumerate(changed_rows(head, model, at)):
        if family == "dflash":  # step k of row t is slot k + 1 of the anchor t + 1
            assert rows == list(range(at, at + window - 2 - k))
        elif family == "dspark":  # and here slot k, as the anchor proposes the first token
            assert rows == list(range(at, at + window - 1 - k))
        elif family == "peagle":  # step k of row t stands at t + k
            assert rows == list(range(at, at + window - k))
        else:  # and in EAGLE-3 reads what earlier steps of the row have seen
            assert rows == list(range(at, at + window))


@pytest.mark.parametrize(("family", "variant"), [("eagle1", "plain"), ("mtp", "mimo")])
def test_a_change_beyond_the_targets_window_changes_nothing_and_one_within_it_does(
    family: str, variant: str, tmp_path: Path
) -> None:
    """These heads have no window of their own.

    vLLM gives their layer the window of a target whose layers all have one.
    """
    window, at = 6, 4
    full, model = make_variant(family, variant, tmp_path)
    assert changed_rows(full, model, at)[0] == list(range(at, 16))
    config = deepcopy(model.config)
    config.sliding_window = window
    config.layer_types = [SLIDING] * config.num_hidden_layers
    target = replace(Target.from_model(model), config=config)
    head = make_random(find_family(family).draft_class()(full.config, target))
    assert changed_rows(head, model, at) == [list(range(at, at + window))] * 3


def test_more_draft_tokens_than_the_window_reaches_are_refused() -> None:
    head, model = make_variant("eagle3", "plain", window=6)
    batch = make_batch([[make_ids(16, seed=5)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    assert len(head.draft_steps(batch, signal, 6)) == 6
    with pytest.raises(ValueError, match=r"window of 6\b.*\b6 draft tokens"):
        head.draft_steps(batch, signal, 7)


ZLAB = {
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
}
CONFIGS: dict[str, tuple[dict[str, Any], tuple[View, ...]]] = {
    "z-lab, Qwen3.6": (ZLAB, (View(2048, True),) * 4 + (View(),)),
    "z-lab, DFlash2": (
        {**ZLAB, "layer_types": ["sliding_attention"] * 5, "is_causal": False},
        (View(2048),) * 5,
    ),
    "z-lab, Qwen3": (
        {"layer_types": ["full_attention"] * 5, "sliding_window": None},
        (View(),) * 5,
    ),
    "ModelOpt": (
        {
            "sliding_window": 4096,
            "layer_types": ["full_attention"] * 5,
            "dflash_config": {"use_swa": True, "swa_window_size": 512, "causal": False},
        },
        (View(512),) * 5,
    ),
    "MiMo": ({"dflash_config": {"use_swa": True, "swa_window_size": 1024}}, (View(1024),) * 5),
    "causal by its section": (
        {**ZLAB, "dflash_config": {"causal": True}},
        (View(2048, True),) * 4 + (View(None, True),),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_other_trainers_are_read(name: str) -> None:
    config, views = CONFIGS[name]
    found = read_block_windows({"num_hidden_layers": 5, **config}, Path("draft"))
    assert make_views(5, **found) == views


@pytest.mark.parametrize("first", [0, 2, 28])
@pytest.mark.parametrize("is_used", [True, False])
def test_windows_that_a_qwen3_config_does_not_list_are_those_of_transformers(
    is_used: bool, first: int
) -> None:
    """Without `layer_types`, the layers from `max_window_layers` on have the window."""
    config = {"model_type": "qwen3", "num_hidden_layers": 5, "sliding_window": 512,
              "use_sliding_window": is_used, "max_window_layers": first}  # fmt: skip
    types = AutoConfig.for_model(**config).layer_types
    views = tuple(View(512, True) if kind == SLIDING else View() for kind in types)
    assert {view.window for view in views[2:]} == {512 if is_used and first < 5 else None}
    assert served_views({**config, "dflash_config": {}}) == views
    assert served_views(config) == tuple(replace(view, is_causal=True) for view in views)


@pytest.mark.vllm
@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_read_as_vllm_reads_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import qwen3_dflash

    monkeypatch.setattr(
        qwen3_dflash, "get_current_vllm_config", lambda: SimpleNamespace(use_v2_model_runner=True)
    )
    config, views = CONFIGS[name]
    theirs = [
        qwen3_dflash._resolve_layer_attention(SimpleNamespace(**config), layer)
        for layer in range(5)
    ]
    assert [View(*each) for each in theirs] == list(views)


def export(head: Any, folder: Path, layout: str) -> dict[str, Any]:
    """Its config.json."""
    head.export(folder, layout=layout, target_name="target")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


UNSAID = [("dflash", "z-lab's, a full layer last"), ("dflash", "causal without windows"),
          ("dspark", "causal without windows")]  # fmt: skip
"""Heads that the layout speculators cannot describe."""

HEADS = [
    (family, options, layout)
    for family, windows in (
        ("dflash", WINDOWS), ("dspark", WINDOWS),
        ("eagle3", {"one layer": {"window": 9}, "three layers": {"window": 9, "num_layers": 3},
                    "mixed": {"window": 9, "num_layers": 3, "full_layers": (0, 2)}, "full": {}}),
        ("peagle", {"all": {"window": 9}, "mixed": {"window": 9, "full_layers": (2,)}, "full": {}}),
    )
    for name, options in windows.items()
    for layout in ("vllm", "speculators")
    if layout == "vllm" or (family, name) not in UNSAID
]  # fmt: skip


def make_windowed(family: str, options: dict[str, Any]) -> tuple[Any, Any]:
    return make_variant(family, "from the anchor" if family == "dspark" else "plain", **options)


@pytest.mark.parametrize(("family", "options", "layout"), HEADS)
def test_a_windowed_head_loads_continues_and_goes_back_as_it_was(
    family: str, options: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    head, model = make_windowed(family, options)
    config = export(head, tmp_path / "draft", layout)
    loaded = find_family(family).draft_class().load(tmp_path / "draft", Target.from_model(model))
    assert loaded.config.views == head.config.views == trained_views(config) == served_views(config)
    if family in ("dflash", "dspark"):
        assert loaded.config == head.config
    loaded.export(tmp_path / "later", like=tmp_path / "draft", target_name="target")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "draft" / name).read_bytes()


@pytest.mark.vllm
@pytest.mark.parametrize(("family", "options", "layout"), HEADS)
def test_vllm_reads_the_windows_that_were_meant(
    family: str, options: dict[str, Any], layout: str, tmp_path: Path, monkeypatch: Any
) -> None:
    from vllm.model_executor.models import qwen3_dflash
    from vllm.transformers_utils.config import get_config

    head, _ = make_windowed(family, options)
    export(head, tmp_path, layout)
    read = get_config(tmp_path, trust_remote_code=False)
    views = head.config.views
    if family in ("dflash", "dspark"):
        made = SimpleNamespace(use_v2_model_runner=True)
        monkeypatch.setattr(qwen3_dflash, "get_current_vllm_config", lambda: made)
        found = [qwen3_dflash._resolve_layer_attention(read, i) for i in range(len(views))]
        assert [View(*each) for each in found] == list(views)
    else:  # as `llama.py` does
        types = getattr(read, "layer_types", None) or [EVERYTHING] * len(views)
        assert [read.sliding_window if each == SLIDING else None for each in types] == [
            view.window for view in views
        ]


@pytest.mark.parametrize(("family", "windows"), UNSAID)
def test_windows_that_speculators_cannot_say_are_not_exported(
    family: str, windows: str, tmp_path: Path
) -> None:
    head, _ = make_windowed(family, WINDOWS[windows])
    with pytest.raises(ValueError, match=r"layout vllm"):
        export(head, tmp_path / "draft", "speculators")
    assert not (tmp_path / "draft").exists()


def test_a_mixed_head_of_speculators_trains_on_as_it_was_trained(tmp_path: Path) -> None:
    """The package's full layers run both ways whatever the key says, which vLLM reads otherwise."""
    head, model = make_variant("dflash", "plain", window=6, full_layers=(1,), is_causal=False)
    config = export(head, tmp_path / "draft", "speculators")
    del config["transformer_layer_config"]["is_causal"]
    config["sliding_window_non_causal"] = False
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    assert served_views(config) == (View(6, True), View(None, True))
    loaded = find_family("dflash").draft_class().load(tmp_path / "draft", Target.from_model(model))
    assert loaded.config.views == trained_views(config) == (View(6, True), View())
    loaded.export(tmp_path / "later", like=tmp_path / "draft")
    written = json.loads((tmp_path / "later/config.json").read_text())
    assert {**written, "redraft": {}} == {**config, "redraft": {}}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("dflash", {"window": 4}, r"window of 4\b.*\b5 or more"),
        ("dspark", {"window": 3}, r"window of 3\b.*\b4 or more"),
        ("eagle3", {"window": 3}, r"window of 3\b.*\b4 or more"),
        ("peagle", {"window": 4}, r"window of 4\b.*\b5 or more"),
        ("dflash", {"window": 8, "full_layers": (2,)}, r"full_layers \[2\].*0 to 1\b"),
        ("dflash", {"full_layers": (1,)}, r"full_layers \[1\] needs a window"),
    ],
)
def test_windows_that_cannot_be_meant_are_refused(
    family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        make_windowed(family, options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sliding_window": 12}, r"window of 12\b.*trained with a window of 9\b"),
        ({"layer_types": ["full_attention"] * 3}, r"no window.*trained with a window of 9\b"),
        ({"layer_types": ["sliding_attention"]}, r"has 1 entries.*has 3 layers\b"),
        ({"sliding_window": None}, "no sliding_window"),
        ({"model_type": "qwen3", "use_sliding_window": False}, "use_sliding_window"),
    ],
)
@pytest.mark.parametrize("family", ["dflash", "dspark", "eagle3", "peagle"])
@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_edited_windows_are_refused_with_the_folder(
    layout: str, family: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    head, model = make_windowed(family, {"window": 9, "num_layers": 3})
    config = export(head, tmp_path, layout)
    config.get("transformer_layer_config", config).update(changed)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as refused:
        find_family(family).draft_class().load(tmp_path, Target.from_model(model))
    assert str(refused.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
@pytest.mark.parametrize(
    ("family", "options", "count"),
    [
        ("dflash", {"window": 9, "num_layers": 3, "is_causal": False}, 8),
        ("dspark", {"window": 9, "num_layers": 2}, 8),
        ("eagle3", {"window": 9}, 8),
        ("eagle3", {"window": 9, "num_layers": 2}, 16),
        ("peagle", {"window": 9, "num_layers": 3}, 24),
        ("peagle", {"window": 9, "num_layers": 3, "full_layers": (2,)}, None),
        ("eagle3", {}, None),
    ],
)
def test_no_earlier_state_of_the_target_changes_a_windowed_draft(
    family: str, options: dict[str, Any], count: int | None, layout: str, tmp_path: Path
) -> None:
    """What a text may be cut at: the last row of every step, with all states changed before."""
    head, model = make_windowed(family, options)
    assert count_states(export(head, tmp_path, layout)) == count
    if count is None:
        return
    batch = make_batch([[make_ids(40, seed=5)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    assert signal.aux_BTLD is not None
    row, is_changed = 35, []
    for first in (row - count, row - count + 1):  # the state of the row itself is not among `count`
        aux_BTLD = signal.aux_BTLD.clone()
        aux_BTLD[:, :first] += 1
        with torch.no_grad():
            one, other = (spread(head.draft_steps(batch, each)[0]).hidden_BTD[0, row]
                          for each in (signal, replace(signal, aux_BTLD=aux_BTLD)))  # fmt: skip
        is_changed.append(not torch.allclose(one, other, atol=1e-7))
    assert is_changed[0] is False
    # A block's first slot stands a position further than its row, so it reads one state fewer.
    assert is_changed[1] is (family in ("eagle3", "peagle"))


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_a_dspark_head_without_a_markov_head_opens_as_dflash(layout: str, tmp_path: Path) -> None:
    """With markov_rank 0 there is nothing but DFlash's layers, and the keys of DSpark."""
    head, model = make_variant(
        "dspark", "from the first mask", window=6, confidence_head=False, block_size=4
    )
    config = export(head, tmp_path, layout)
    (tmp_path / "config.json").write_text(json.dumps({**config, "markov_rank": 0}))
    path = tmp_path / "model.safetensors"
    tensors = {name: x for name, x in load_file(path).items() if not name.startswith("markov")}
    save_file(tensors, path, {"format": "pt"})
    family = detect_family(tmp_path)
    assert family.name == "dflash"
    assert family.read_layers(config) == list(head.aux_layer_ids)
    loaded = find_family("dflash").draft_class().load(tmp_path, Target.from_model(model))
    assert loaded.config.views == head.config.views
    assert torch.equal(loaded.fc.weight, head.fc.weight)
    # Without the key, DSpark's readers take the anchor for a slot that proposes a token.
    stored = {key: value for key, value in config.items() if key != "sample_from_anchor"}
    (tmp_path / "config.json").write_text(json.dumps({**stored, "markov_rank": 0}))
    with pytest.raises(ValueError, match="sample_from_anchor"):
        find_family("dflash").draft_class().load(tmp_path, Target.from_model(model))


THEIRS = {
    "eagle3": {"midlayer.": "layers.0.", "layers.1.input_layernorm": "layers.1.hidden_norm"},
    "peagle": {"midlayer.": "layers.0."},
}
"""Names of other trainers: ModelOpt's first layer, and SpecForge's norm of the later layers."""


@pytest.mark.parametrize("family", ["dflash", "dspark", "eagle3", "peagle"])
def test_a_windowed_head_of_another_trainer_keeps_its_names_and_its_copies(
    family: str, tmp_path: Path
) -> None:
    """A server accepts only drafts with the tensors of the one that it was started with."""
    head, model = make_windowed(family, {"window": 9, "num_layers": 2})
    export(head, tmp_path / "theirs", "vllm")
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    for mine, its in THEIRS.get(family, {}).items():
        tensors = {name.replace(mine, its): tensor for name, tensor in tensors.items()}
    target = Target.from_model(model)
    copies = {"embed_tokens.weight": target.embed_VD.clone()}
    if family in ("dflash", "dspark"):
        copies["lm_head.weight"] = target.head_VD.clone()
    save_file({**copies, **tensors}, path, {"format": "pt"})
    loaded = find_family(family).draft_class().load(tmp_path / "theirs", target)
    for kind, weights in (("same", None), ("other", make_random(head, seed=9).state_dict())):
        loaded.export(tmp_path / kind, like=tmp_path / "theirs", weights=weights)
        theirs, later = (
            {name: (entry["dtype"], entry["shape"]) for name, entry in tensor_entries(each).items()}
            for each in (tmp_path / "theirs", tmp_path / kind)
        )
        assert later == theirs
    same, other = (load_file(tmp_path / kind / "model.safetensors") for kind in ("same", "other"))
    stored = load_file(path)
    assert all(torch.equal(same[name], tensor) for name, tensor in stored.items())
    assert not torch.equal(other["fc.weight"], stored["fc.weight"])
