"""Broken checkpoints of every family.

Each fault is named, with its cure, and the unbroken one is clean.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from make_heads import HIDDEN, VOCAB, make_random, make_target
from make_tokenizers import make_byte_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft.files.artifact import publish
from redraft.files.folder import fingerprint
from redraft.files.target_folder import TargetFolder
from redraft.heads.doctor.checks import notes, static_findings
from redraft.heads.doctor.eagle3 import compare_maps
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.families import (
    dflash,
    dspark,
    eagle1,
    eagle3,
    medusa,
    mtp,
    peagle,
)
from redraft.heads.families.mtp_folder import as_mimo, stitch
from redraft.heads.target import Target

DRAFT_IDS = torch.arange(3, 90, 2)
AUX = (1, 2, 4)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_eagle1(target: Target) -> Any:
    return eagle1.Eagle1(eagle1.Config(), target)


def make_eagle3(target: Target, ids: Tensor | None = DRAFT_IDS, **options: Any) -> Any:
    return eagle3.Eagle3(eagle3.Config(**{"aux_layer_ids": AUX, **options}), target, ids)


def make_peagle(target: Target, ids: Tensor | None = DRAFT_IDS, **options: Any) -> Any:
    sizes = {"aux_layer_ids": (1, 2, 4), "num_layers": 2, "mask_token_id": 9}
    return peagle.PEagle(peagle.Config(**{**sizes, **options}), target, ids)


def make_dflash(target: Target, ids: Tensor | None = DRAFT_IDS) -> Any:
    options = {"aux_layer_ids": AUX, "num_layers": 2, "block_size": 4, "mask_token_id": VOCAB - 1}
    return dflash.DFlash(dflash.Config(**options), target, ids)


def make_dspark(target: Target, ids: Tensor | None = DRAFT_IDS, **options: Any) -> Any:
    sizes = {
        "aux_layer_ids": AUX,
        "num_layers": 2,
        "block_size": 3,
        "mask_token_id": VOCAB - 1,
        "markov_rank": 8,
    }
    return dspark.DSpark(dspark.Config(**{**sizes, **options}), target, ids)


def make_medusa(target: Target) -> Any:
    return medusa.Medusa(medusa.Config(), target)


def make_pair(
    folder: Path,
    make: Callable[..., Any],
    target_options: Mapping[str, Any] | None = None,
    **export: Any,
) -> tuple[Path, Path]:
    model = make_target(**(target_options or {}))
    model.save_pretrained(folder / "target")
    make_random(make(Target.from_model(model))).export(folder / "draft", **export)
    return folder / "target", folder / "draft"


def make_mimo(folder: Path, *, alone: bool) -> tuple[Path, Path]:
    make_target(num_attention_heads=4, head_dim=8).save_pretrained(folder / "llama")
    as_mimo(folder / "llama", folder / "mimo")
    head = make_random(mtp.Mtp(mtp.Config(), Target.from_folder(folder / "mimo")))
    if alone:
        head.export(folder / "draft")
        return folder / "mimo", folder / "draft"
    stitch(
        folder / "mimo", head.checkpoint_tensors(), folder / "stitched", {"redraft": head.record()}
    )
    return folder / "stitched", folder / "stitched"


def make_standalone(folder: Path) -> tuple[Path, Path]:
    tokenizer = make_byte_tokenizer()
    for name, layers in (("target", 3), ("draft", 1)):
        make_target(num_hidden_layers=layers, vocab_size=len(tokenizer)).save_pretrained(
            folder / name
        )
        tokenizer.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


def edit_config(folder: Path, *removed: str, **changed: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changed}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in removed}))


def edit_tensors(folder: Path, *removed: str, **changed: Tensor) -> None:
    """Tensors by name, "." written as "__"."""
    path = folder / "model.safetensors"
    tensors = {
        **load_file(path),
        **{name.replace("__", "."): tensor for name, tensor in changed.items()},
    }
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in removed},
        path,
        {"format": "pt"},
    )


def read(target: Path, draft: Path) -> Pair:
    return Pair.read(TargetFolder.open(target), draft)


def findings(
    folders: tuple[Path, Path], method: str | None = None, num_speculative_tokens: int = 3
) -> list[Finding]:
    return static_findings(
        read(*folders), method=method, num_speculative_tokens=num_speculative_tokens
    )


def only(found: list[Finding]) -> Finding:
    (finding,) = found
    assert "\n" not in finding.problem + finding.cure
    assert finding.cure
    return finding


UNBROKEN = {
    "eagle1": (lambda folder: make_pair(folder, make_eagle1), "eagle"),
    "eagle3": (lambda folder: make_pair(folder, make_eagle3), "eagle3"),
    "eagle3, speculators": (
        lambda folder: make_pair(folder, make_eagle3, layout="speculators"),
        "eagle3",
    ),
    "eagle3, llama3 rope": (
        lambda folder: make_pair(
            folder, make_eagle3, {"rope_parameters": LLAMA3_ROPE}, dtype=torch.bfloat16
        ),
        "eagle3",
    ),
    "dflash": (lambda folder: make_pair(folder, make_dflash), "dflash"),
    "dflash, speculators": (
        lambda folder: make_pair(folder, make_dflash, layout="speculators"),
        "dflash",
    ),
    "dspark": (lambda folder: make_pair(folder, make_dspark), "dspark"),
    "dspark, speculators": (
        lambda folder: make_pair(folder, make_dspark, layout="speculators"),
        "dspark",
    ),
    "dspark, bfloat16": (
        lambda folder: make_pair(folder, make_dspark, dtype=torch.bfloat16),
        "dspark",
    ),
    "dspark, from the first mask": (
        lambda folder: make_pair(
            folder, lambda target: make_dspark(target, sample_from_anchor=False, block_size=4)
        ),
        "dspark",
    ),
    "dspark, whole vocabulary and no confidence": (
        lambda folder: make_pair(
            folder, lambda target: make_dspark(target, None, confidence_head=False)
        ),
        "dspark",
    ),
    "peagle": (lambda folder: make_pair(folder, make_peagle), "eagle3"),
    "peagle, speculators": (
        lambda folder: make_pair(folder, make_peagle, layout="speculators"),
        "eagle3",
    ),
    "medusa": (lambda folder: make_pair(folder, make_medusa), "medusa"),
    "mtp, stitched": (lambda folder: make_mimo(folder, alone=False), "mtp"),
    "mtp, alone": (lambda folder: make_mimo(folder, alone=True), "mtp"),
    "standalone": (make_standalone, "draft_model"),
}


@pytest.mark.parametrize("name", UNBROKEN)
def test_an_unbroken_checkpoint_is_clean(name: str, tmp_path: Path) -> None:
    make, method = UNBROKEN[name]
    folders = make(tmp_path)
    assert read(*folders).family.name == name.split(",")[0]
    assert findings(folders) == []
    assert findings(folders, method) == []


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
@pytest.mark.parametrize(("shift", "side"), [(1, "high"), (-1, "low")])
def test_aux_layers_off_by_one(shift: int, side: str, layout: str, tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle3, layout=layout)
    edit_config(folders[1], eagle_aux_hidden_state_layer_ids=[k + shift for k in AUX])
    finding = only(findings(folders))
    assert re.search(
        rf"{re.escape(str([k + shift for k in AUX]))}.*\[1, 2, 4\].*\bone\b", finding.problem
    )
    assert side in finding.problem
    assert '"eagle_aux_hidden_state_layer_ids": [1, 2, 4]' in finding.cure


def test_aux_layers_that_are_others_or_do_not_exist(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle3)
    edit_config(folders[1], eagle_aux_hidden_state_layer_ids=[0, 2, 5])
    assert re.search(r"\[0, 2, 5\].*\[1, 2, 4\]$", only(findings(folders)).problem)
    edit_config(folders[1], eagle_aux_hidden_state_layer_ids=[1, 2, 6])
    assert re.search(r"\[1, 2, 6\].*\bascending\b", only(findings(folders)).problem)
    edit_config(folders[1], eagle_aux_hidden_state_layer_ids=[2, 4])
    told, fed = (finding.problem for finding in findings(folders))
    assert re.search(r"\[2, 4\].*\[1, 2, 4\]$", told)
    assert re.search(r"^2 .*\[2, 4\].*\bfc\b.*\b3$", fed)


def test_aux_layers_nested_instead_of_at_the_top_level(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle3)
    key = "eagle_aux_hidden_state_layer_ids"
    edit_config(folders[1], key, eagle_config={key: list(AUX)})
    finding = only(findings(folders))
    assert re.search(r"\[1, 2, 4\].*\bnested\b", finding.problem)
    assert "top" in finding.cure


def test_aux_layers_that_are_nowhere(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, lambda target: make_eagle3(target, aux_layer_ids=(0, 2, 3)))
    edit_config(folders[1], "eagle_aux_hidden_state_layer_ids", "redraft")
    assert re.search(r"\[2, 2, 2\].*\bdistinct\b", only(findings(folders)).problem)
    folders = make_pair(tmp_path / "deep", make_eagle3, {"num_hidden_layers": 7})
    edit_config(folders[1], "eagle_aux_hidden_state_layer_ids")
    assert re.search(r"\bnone\b.*\[2, 3, 4\]", only(findings(folders)).problem)


def test_a_number_of_aux_layers_that_vllm_does_not_count(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, lambda target: make_eagle3(target, aux_layer_ids=(1, 4)))
    edit_config(folders[1], "num_aux_hidden_states")
    finding = only(findings(folders))
    assert re.search(r"\b3\b.*\bfc\b.*\b2$", finding.problem)
    assert '"num_aux_hidden_states": 2' in finding.cure


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_d2t_is_missing(layout: str, tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle3, layout=layout)
    edit_tensors(folders[1], "d2t", "t2d")
    finding = only(findings(folders))
    assert re.search(rf"d2t\b.*missing.*\b{len(DRAFT_IDS)}\b", finding.problem)
    assert "d2t" in finding.cure


@pytest.mark.parametrize("kept", ["t2d", "no t2d"])
def test_d2t_is_absolute(kept: str, tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle3)
    edit_tensors(folders[1], *([] if kept == "t2d" else ["t2d"]), d2t=DRAFT_IDS)
    finding = only(findings(folders))
    assert re.search(r"d2t\b.*\bthemselves\b", finding.problem)
    assert "offset" in finding.cure


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"t2d": torch.arange(VOCAB) < len(DRAFT_IDS)}, "d2t and t2d"),
        ({"t2d": torch.zeros(VOCAB, dtype=torch.bool)}, "d2t and t2d"),
        ({"d2t": DRAFT_IDS - torch.arange(len(DRAFT_IDS)) + 7}, r"ascend.*\b0 to 95\b"),
        ({"d2t": (DRAFT_IDS - torch.arange(len(DRAFT_IDS))).bfloat16()}, "d2t.*BF16"),
        ({"d2t": torch.arange(5)}, rf"d2t.*\b5\b.*\b{len(DRAFT_IDS)}\b"),
    ],
)
def test_a_wrong_vocabulary_map(changed: dict[str, Tensor], problem: str, tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle3)
    edit_tensors(folders[1], **changed)
    assert re.search(problem, only(findings(folders)).problem)


def test_a_map_whose_offsets_ascend_is_no_list_of_ids() -> None:
    odd = torch.arange(1, 40, 2)
    offset = odd - torch.arange(len(odd))
    assert list(compare_maps(offset, odd, 40)) == list(compare_maps(offset, None, 40)) == []
    whole = torch.arange(40)
    assert list(compare_maps(torch.zeros_like(whole), whole, 40)) == []
    assert "themselves" in only(list(compare_maps(whole, whole, 40))).problem


def test_a_long_list_of_ids_is_no_map_though_it_stays_within_the_vocabulary() -> None:
    ids = torch.tensor([i for i in range(300) if i % 3])
    assert list(compare_maps(ids - torch.arange(len(ids)), None, 1000)) == []
    assert "themselves" in only(list(compare_maps(ids, None, 1000))).problem
    assert list(compare_maps(ids, ids + torch.arange(len(ids)), 1000)) == []


@pytest.mark.parametrize("make", [make_eagle3, make_dflash])
def test_a_map_of_the_whole_vocabulary_is_refused_by_vllm(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    folders = make_pair(tmp_path, lambda target: make(target, None))
    edit_tensors(folders[1], d2t=torch.zeros(VOCAB, dtype=torch.int64))
    finding = only(findings(folders))
    assert re.search(r"\bd2t\b.*vLLM fails to start", finding.problem)
    assert finding.cure.startswith("remove d2t")
    other = static_findings(read(*folders), method=None, num_speculative_tokens=3, engine="sglang")
    assert other == []


def test_a_draft_vocabulary_that_does_not_fit(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle3)
    edit_config(folders[1], draft_vocab_size=50)
    assert re.search(r"draft_vocab_size\b.*\b50\b.*\b44\b", only(findings(folders)).problem)
    edit_config(folders[1], draft_vocab_size=97)
    edit_tensors(folders[1], lm_head__weight=torch.ones(97, HIDDEN))
    assert re.search(r"\b97\b.*\b96\b", only(findings(folders)).problem)


@pytest.mark.parametrize("make", [make_eagle1, make_eagle3])
def test_a_random_embedding_is_left_over(make: Callable[..., Any], tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make)
    own = load_file(folders[0] / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folders[1], embed_tokens__weight=own.bfloat16())
    assert findings(folders) == []  # rounded, no more
    edit_tensors(folders[1], embed_tokens__weight=torch.randn(VOCAB, HIDDEN))
    finding = findings(folders)[0]
    assert re.search(r"embed_tokens\.weight\b.*\bleftover\b", finding.problem)
    assert "embed_tokens.weight" in finding.cure


@pytest.mark.parametrize("alone", [False, True])
def test_mtp_was_trained_on_the_wrong_side_of_the_norm(alone: bool, tmp_path: Path) -> None:
    folders = make_mimo(tmp_path, alone=alone)
    given = {"reads_normed": True, "zero_at_start": True, "embedding_first": False}
    edit_config(folders[1], redraft={"family": "mtp", "trained_with": given})
    finding = only(findings(folders))
    assert re.search(r"\bbefore\b.*\bnorm\b.*\bafter\b", finding.problem)
    edit_config(
        folders[1], redraft={"family": "mtp", "trained_with": {**given, "reads_normed": False}}
    )
    assert findings(folders) == []


def test_mtp_was_trained_without_the_mask_of_the_first_token(tmp_path: Path) -> None:
    folders = make_mimo(tmp_path, alone=False)
    given = {"reads_normed": False, "zero_at_start": False, "embedding_first": False}
    edit_config(folders[1], redraft={"family": "mtp", "trained_with": given})
    assert re.search(r"position 0\b.*\bzero\b.*position 0\b", only(findings(folders)).problem)


def test_an_mtp_target_that_does_not_count_its_layers(tmp_path: Path) -> None:
    folders = make_mimo(tmp_path, alone=False)
    edit_config(folders[1], "num_nextn_predict_layers")
    assert '"num_nextn_predict_layers": 1' in only(findings(folders)).cure


@pytest.mark.parametrize(("layout", "default"), [("vllm", "false"), ("speculators", "true")])
@pytest.mark.parametrize("trained", [False, True])
def test_norm_before_residual_is_unset(
    trained: bool, layout: str, default: str, tmp_path: Path
) -> None:
    folders = make_pair(
        tmp_path, lambda target: make_eagle3(target, norm_before_residual=trained), layout=layout
    )
    edit_config(folders[1], "norm_before_residual")
    finding = only(findings(folders))
    assert re.search(rf"norm_before_residual\b.*\bunset\b.*\b{default}\b", finding.problem)
    assert f'"norm_before_residual": {str(trained).lower()}' in finding.cure


def test_norm_before_residual_of_peagle_is_unset(tmp_path: Path) -> None:
    folders = make_pair(
        tmp_path, lambda t: make_peagle(t, norm_before_residual=True), layout="speculators"
    )
    edit_config(folders[1], "norm_before_residual")
    problem = only(findings(folders)).problem
    assert re.search(r"norm_before_residual\b.*\bunset\b.*\bfalse\b.*\btrue\b", problem)


def test_norms_of_peagle_are_not_where_vllm_looks(tmp_path: Path) -> None:
    folders = make_pair(
        tmp_path, lambda target: make_peagle(target, fc_norm=True), layout="speculators"
    )
    assert findings(folders) == []
    inner = json.loads((folders[1] / "config.json").read_text())["transformer_layer_config"]
    del inner["fc_norm"]
    edit_config(folders[1], transformer_layer_config=inner)
    finding = only(findings(folders))
    assert re.search(r"transformer_layer_config\b.*\bfc_norm\b", finding.problem)
    assert re.search(r'"fc_norm": true .*\btransformer_layer_config\b', finding.cure)


@pytest.mark.parametrize("key", ["fc_norm", "norm_output"])
def test_an_option_of_eagle3_that_changed(key: str, tmp_path: Path) -> None:
    folders = make_pair(tmp_path, lambda target: make_eagle3(target, **{key: True}))
    edit_config(folders[1], key)
    assert re.search(rf"{key}\b.*\bunset\b.*\bfalse\b.*\btrue\b", only(findings(folders)).problem)
    edit_config(folders[1], **{key: False})
    assert re.search(rf"{key} is false\b.*\btrue\b", only(findings(folders)).problem)


@pytest.mark.parametrize("make", [make_dflash, make_peagle])
def test_a_mask_token_that_ends_answers_is_doubtful(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    folders = make_pair(tmp_path, make)
    pair = read(*folders)
    section = pair.config.get("dflash_config") or pair.config
    mask = section.get("mask_token_id") or section.get("pard_token")
    vars(pair.target)["end_ids"] = (1, mask)
    finding = only(static_findings(pair, method=None, num_speculative_tokens=3))
    assert finding.is_doubt
    assert str(mask) in finding.problem
    vars(pair.target)["end_ids"] = (1,)
    assert static_findings(pair, method=None, num_speculative_tokens=3) == []


DFLASH_SECTION = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1, 3], "causal": False}


@pytest.mark.parametrize(
    ("section", "problem", "cure"),
    [
        ({"mask_token_id": 5}, r"mask_token_id is 5\b.*\b95\b", '"mask_token_id": 95'),
        ({"mask_token_id": None}, "no mask_token_id", '"mask_token_id"'),
        ({"target_layer_ids": [1, 2, 4]}, r"\[0, 1, 3\].*\bone\b", '"target_layer_ids": [0, 1, 3]'),
        ({"target_layer_ids": [0, 3]}, r"\[0, 3\].*\bfc\b.*\b3\b", "3 layers"),
        ({"causal": True}, r"\bcausal is True\b.*\bFalse\b", '"causal": false'),
        ({"causal": None}, r"\bcausal\b", '"causal": false'),
    ],
)
def test_keys_of_dflash_unlike_training(
    section: dict[str, Any], problem: str, cure: str, tmp_path: Path
) -> None:
    folders = make_pair(tmp_path, make_dflash)
    changed = {
        key: value for key, value in {**DFLASH_SECTION, **section}.items() if value is not None
    }
    edit_config(folders[1], dflash_config=changed)
    found = findings(folders)
    assert any(re.search(problem, finding.problem) and cure in finding.cure for finding in found), (
        found
    )


@pytest.mark.parametrize(
    ("mask", "layers", "problem"),
    [(VOCAB, [0, 1, 3], r"\b96\b"), (3, [0, 1, 5], r"\b0 to 4\b")],
)
def test_a_dflash_head_of_another_target(
    mask: int, layers: list[int], problem: str, tmp_path: Path
) -> None:
    folders = make_pair(tmp_path, make_dflash)
    section = {"mask_token_id": mask, "target_layer_ids": layers, "causal": False}
    edit_config(folders[1], "redraft", dflash_config=section)
    assert re.search(problem, only(findings(folders)).problem)


@pytest.mark.parametrize(
    ("changed", "problem", "cure"),
    [
        ({"mask_token_id": 5}, r"mask_token_id is 5\b.*\b95\b", '"mask_token_id": 95'),
        ({"mask_token_id": None}, "no mask_token_id", '"mask_token_id"'),
        (
            {"aux_hidden_state_layer_ids": [0, 1, 3]},
            r"\[1, 2, 4\].*\bone\b.*; k\b",
            '"aux_hidden_state_layer_ids": [1, 2, 4]',
        ),
        ({"aux_hidden_state_layer_ids": [0, 2, 4]}, r"\b1 to 5\b", "1"),
        (
            {"aux_hidden_state_layer_ids": [1, 4]},
            r"\[1, 4\]",
            "aux_hidden_state_layer_ids",
        ),
        ({"aux_hidden_state_layer_ids": None}, "no aux_hidden_state_layer_ids", "1"),
        ({"block_size": 8}, r"\bblock_size is 8\b", '"block_size": '),
        (
            {"sample_from_anchor": None},
            r"\bspeculators\b.*\btrue\b.*\bvLLM\b.*\bfalse\b",
            '"sample_from_anchor": true',
        ),
        ({"sliding_window_non_causal": False}, r"\bcausal\b", '"sliding_window_non_causal": true'),
    ],
)
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_keys_of_blocks_of_speculators_unlike_training(
    name: str, changed: dict[str, Any], problem: str, cure: str, tmp_path: Path
) -> None:
    folders = make_pair(
        tmp_path, make_dflash if name == "dflash" else make_dspark, layout="speculators"
    )
    removed = [key for key, value in changed.items() if value is None]
    edit_config(
        folders[1], *removed, **{key: value for key, value in changed.items() if value is not None}
    )
    found = findings(folders)
    # vLLM reads the direction from this key for DFlash only, and only DSpark has blocks of two
    # kinds
    harmless = {"dspark": "sliding_window_non_causal", "dflash": "sample_from_anchor"}[name]
    if harmless in changed:
        assert found == []
    else:
        assert any(
            re.search(problem, finding.problem) and cure in finding.cure for finding in found
        ), found


def test_a_block_size_in_the_section_of_dflash_is_read(tmp_path: Path) -> None:
    """As in z-lab's newer files."""
    folders = make_pair(tmp_path, make_dflash)
    section = {**DFLASH_SECTION, "block_size": 4}
    edit_config(folders[1], "block_size", dflash_config=section)
    assert findings(folders) == []
    edit_config(folders[1], dflash_config={**section, "block_size": 8})
    assert re.search(r"\bblock_size is 8\b", only(findings(folders)).problem)


def test_a_dspark_head_without_a_markov_head_is_described_as_what_vllm_loads(
    tmp_path: Path,
) -> None:
    folders = make_pair(
        tmp_path,
        lambda target: make_dspark(
            target, block_size=4, sample_from_anchor=False, confidence_head=False
        ),
    )
    edit_tensors(folders[1], "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    edit_config(folders[1], "redraft", markov_rank=0)
    finding = only(findings(folders))
    assert "no Markov head" in finding.problem
    assert "DFlashDraftModel" in finding.cure
    config = json.loads((folders[1] / "config.json").read_text())
    section = {key: config[key] for key in ("mask_token_id", "target_layer_ids")}
    edit_config(
        folders[1],
        "mask_token_id",
        "target_layer_ids",
        "markov_rank",
        architectures=["DFlashDraftModel"],
        dflash_config={**section, "causal": False},
    )
    assert findings(folders) == []


def make_windowed(family: str, folder: Path, layout: str, **options: Any) -> tuple[Path, Path]:
    def make(target: Target) -> Any:
        blocks = {"num_layers": 2, "mask_token_id": 95, "aux_layer_ids": (1, 2, 4), "block_size": 4}
        if family == "dflash":
            return dflash.DFlash(dflash.Config(**blocks, **options), target)
        if family == "dspark":
            return dspark.DSpark(dspark.Config(**blocks, markov_rank=6, **options), target)
        if family == "peagle":
            return make_peagle(target, None, num_steps=3, **options)
        return eagle3.Eagle3(
            eagle3.Config(aux_layer_ids=(1, 2, 4), num_steps=3, num_layers=2, **options), target
        )

    return make_pair(folder, make, layout=layout)


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
@pytest.mark.parametrize("family", ["dflash", "dspark", "eagle3", "peagle"])
def test_windows_as_in_training_are_not_reported(family: str, layout: str, tmp_path: Path) -> None:
    assert findings(make_windowed(family, tmp_path, layout, window=9)) == []


@pytest.mark.parametrize(
    ("family", "removed", "changed", "problem", "cure"),
    [
        # vLLM makes the full layer of a mixed head causal as well
        (
            "dflash",
            "is_causal",
            {"layer_types": ["sliding_attention", "full_attention"]},
            r"layer 1 was trained with no window, both.*vLLM reads no window, causal",
            "layout vllm",
        ),
        # and does not read the direction of DSpark's windows
        (
            "dspark",
            "is_causal",
            {},
            r"layer 0 was trained with a window of 9, both.*vLLM reads a window of 9, causal",
            '"is_causal": false into transformer_layer_config',
        ),
        (
            "dspark",
            "",
            {"sliding_window": 12},
            r"attend to 12\b.*window of 9\b",
            '"sliding_window": 9',
        ),
        (
            "eagle3",
            "",
            {"layer_types": ["full_attention"] * 2},
            r"attend to all\b.*window of 9\b",
            "9",
        ),
        (
            "eagle3",
            "",
            {"layer_types": ["sliding_attention", "full_attention"]},
            r"all positions are \[1\].*in training they were none\b",
            "layer_types",
        ),
        ("peagle", "", {"sliding_window": 12}, r"attend to 12\b.*window of 9\b", "9"),
        ("eagle3", "", {"layer_types": ["sliding_attention"]}, r"1 entries.*has 2\b", "per layer"),
        (
            "eagle3",
            "",
            {"model_type": "qwen3", "use_sliding_window": False},
            "drops their size",
            "next to sliding_window",
        ),
    ],
)
def test_windows_that_vllm_reads_otherwise(
    family: str, removed: str, changed: dict[str, Any], problem: str, cure: str, tmp_path: Path
) -> None:
    direction = {} if family in ("eagle3", "peagle") else {"is_causal": False}
    folders = make_windowed(family, tmp_path, "speculators", window=9, **direction)
    config = json.loads((folders[1] / "config.json").read_text())
    layer = {**config["transformer_layer_config"], **changed}
    layer.pop(removed, None)
    is_causal = family == "dflash"  # the key that vLLM applies to all of its layers
    edit_config(
        folders[1],
        transformer_layer_config=layer,
        sliding_window_non_causal=not is_causal,
    )
    found = [each for each in findings(folders) if re.search(problem, each.problem)]
    finding = only(found)
    assert cure in finding.cure
    assert not finding.is_doubt


def test_a_window_smaller_than_in_training_is_a_doubt(tmp_path: Path) -> None:
    folders = make_windowed("eagle3", tmp_path, "vllm", window=9)
    edit_config(folders[1], sliding_window=6)
    finding = only(findings(folders))
    assert finding.is_doubt
    assert re.search(r"attend to 6\b.*trained with 9\b", finding.problem)


def test_a_full_head_beside_a_target_that_slides_is_a_doubt(tmp_path: Path) -> None:
    folders = make_windowed("eagle3", tmp_path, "vllm")
    edit_config(
        folders[0], sliding_window=16, model_type="mistral", architectures=["MistralForCausalLM"]
    )
    (finding,) = [each for each in findings(folders) if "window" in each.problem]
    assert finding.is_doubt
    assert "--head.window 16" in finding.cure


def test_another_rotation_in_the_layout_of_speculators(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_dspark, layout="speculators")
    layer = json.loads((folders[1] / "config.json").read_text())["transformer_layer_config"]
    edit_config(folders[1], transformer_layer_config={**layer, "head_dim": 16})
    finding = only(findings(folders))
    assert re.search(r"head_dim is 16\b.*\b8\b", finding.problem)
    assert re.search(r'"head_dim".*\btransformer_layer_config\b', finding.cure)


def test_a_longer_block_another_rotation_and_missing_norms(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_dflash)
    edit_config(folders[1], block_size=8)
    assert re.search(r"block_size is 8\b.*\b4$", only(findings(folders)).problem)
    edit_config(
        folders[1], block_size=4, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    assert (
        "rope_parameters is {'rope_type': 'default', 'rope_theta': 500000.0}"
        in only(findings(folders)).problem
    )
    edit_config(
        folders[1], rope_parameters={"rope_type": "default", "rope_theta": 1e4}, head_dim=16
    )
    assert re.search(r"head_dim is 16\b.*\b8\b", only(findings(folders)).problem)
    edit_config(folders[1], head_dim=8)
    edit_tensors(folders[1], "layers.1.self_attn.k_norm.weight")
    assert re.search(r"layer 1\b.*\bk_norm\b", only(findings(folders)).problem)


def test_a_reduced_dflash_head_without_its_map(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_dflash)
    edit_tensors(folders[1], "d2t")
    assert re.search(r"d2t\b.*missing", only(findings(folders)).problem)


def test_more_tokens_are_asked_of_dflash_than_its_block_has(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_dflash)
    assert re.search(r"\b4\b.*\b3\b", only(findings(folders, num_speculative_tokens=4)).problem)


@pytest.mark.parametrize(
    ("changed", "problem", "cure"),
    [
        (
            {"mask_token_id": 5},
            r"mask_token_id is 5\b.*\b95\b",
            '"mask_token_id": 95',
        ),
        ({"mask_token_id": None}, "no mask_token_id", '"mask_token_id"'),
        ({"mask_token_id": VOCAB}, rf"\b{VOCAB}\b.*\b{VOCAB}\b", "mask_token_id"),
        (
            {"target_layer_ids": [1, 2, 4]},
            r"\[0, 1, 3\].*\bone\b",
            '"target_layer_ids": [0, 1, 3]',
        ),
        ({"target_layer_ids": [0, 1, 5]}, r"\[0, 1, 5\].*\b0 to 4\b", "0"),
        ({"target_layer_ids": [0, 3]}, r"\[0, 3\].*\bfc\b.*\b3\b", "3 layers"),
        ({"target_layer_ids": None}, "no target_layer_ids", "0"),
        ({"is_causal": True}, r"is_causal is True\b.*\bFalse\b", '"is_causal": false'),
        ({"sample_from_anchor": False}, r"sample_from_anchor is False\b.*\bTrue\b", "true"),
        ({"block_size": 7}, r"block_size is 7\b.*\b3\b", '"block_size": 3'),
        (
            {"markov_rank": 4},
            r"markov_head\.markov_w1\.weight has the shape \(96, 8\).*\(96, 4\)",
            "(8 according to this tensor)",
        ),
        ({"markov_rank": None}, "no markov_rank", '"markov_rank": 8'),
        ({"enable_confidence_head": None}, "confidence head", '"enable_confidence_head": true'),
        (
            {"confidence_head_with_markov": False},
            r"confidence_head_with_markov is false\b.*\b40\b",
            '"confidence_head_with_markov": true',
        ),
    ],
)
def test_keys_of_dspark_unlike_training(
    changed: dict[str, Any], problem: str, cure: str, tmp_path: Path
) -> None:
    folders = make_pair(tmp_path, make_dspark)
    removed = [key for key, value in changed.items() if value is None]
    edit_config(
        folders[1], *removed, **{key: value for key, value in changed.items() if value is not None}
    )
    found = findings(folders)
    assert any(re.search(problem, finding.problem) and cure in finding.cure for finding in found), (
        found
    )


def test_a_transposed_markov_head(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_dspark)
    tensors = load_file(folders[1] / "model.safetensors")
    for name, shape in (
        ("markov_w1", r"\(8, 96\).*\(96, 8\)"),
        ("markov_w2", r"\(8, 44\).*\(44, 8\)"),
    ):
        sound = tensors[f"markov_head.{name}.weight"]
        edit_tensors(folders[1], **{f"markov_head__{name}__weight": sound.T.contiguous()})
        finding = only(findings(folders))
        assert re.search(rf"markov_head\.{name}\.weight has the shape {shape}", finding.problem)
        assert "transpose" in finding.cure
        edit_tensors(folders[1], **{f"markov_head__{name}__weight": sound})
    assert findings(folders) == []


def test_a_dspark_block_whose_anchor_proposes_nothing_says_so(tmp_path: Path) -> None:
    folders = make_pair(
        tmp_path, lambda target: make_dspark(target, sample_from_anchor=False, block_size=4)
    )
    edit_config(folders[1], "sample_from_anchor")
    finding = only(findings(folders))
    assert re.search(r"\btrue\b.*\bfalse\b", finding.problem)
    assert '"sample_from_anchor": false' in finding.cure


def test_a_confidence_head_that_is_missing(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_dspark)
    edit_tensors(folders[1], "confidence_head.proj.bias")
    assert "confidence_head.proj.bias" in only(findings(folders)).problem
    edit_tensors(folders[1], "confidence_head.proj.weight")
    assert "confidence_head.proj.weight" in only(findings(folders)).problem


def test_more_tokens_are_asked_of_dspark_than_its_block_has(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_dspark)
    assert re.search(r"\b4\b.*\b3\b", only(findings(folders, num_speculative_tokens=4)).problem)


def test_medusa_drops_its_bias(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_medusa)
    edit_config(folders[1], "medusa_fc_bias")
    finding = only(findings(folders))
    assert "medusa_fc_bias is unset" in finding.problem
    assert '"medusa_fc_bias": true' in finding.cure
    edit_config(folders[1], medusa_fc_bias=False)
    assert "medusa_fc_bias is false" in only(findings(folders)).problem
    edit_tensors(folders[1], *(f"blocks.{i}.layers.0.bias" for i in range(3)))
    assert "biases" in only(findings(folders)).problem


def test_more_tokens_are_asked_of_medusa_than_it_has_heads(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_medusa)
    assert re.search(r"^4 .*\b3\b", only(findings(folders, num_speculative_tokens=4)).problem)


@pytest.mark.parametrize("name", [name for name in UNBROKEN if UNBROKEN[name][1]])
def test_the_wrong_method_flag(name: str, tmp_path: Path) -> None:
    make, method = UNBROKEN[name]
    folders = make(tmp_path)
    wrong = "eagle" if method != "eagle" else "eagle3"
    finding = only(findings(folders, wrong))
    assert f'"{wrong}"' in finding.problem
    assert f'"method": "{method}"' in finding.cure


@pytest.mark.parametrize(
    ("changes", "problem", "cure"),
    [
        ({"pard_token": 10}, r"pard_token is 10\b.*\b9\b", '"pard_token": 9'),
        ({"pard_token": None}, r"\bmask token\b", '"pard_token": 9'),
        (
            {"num_hidden_layers": 1},
            r"\b1 layers.*\b2\b",
            '"num_hidden_layers": 2',
        ),
    ],
)
def test_keys_of_peagle_unlike_training(
    changes: dict[str, Any], problem: str, cure: str, tmp_path: Path
) -> None:
    folders = make_pair(tmp_path, make_peagle)
    edit_config(folders[1], **changes)
    finding = only(findings(folders))
    assert re.search(problem, finding.problem)
    assert cure in finding.cure


def test_masks_of_another_width_are_found(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_peagle)
    path = folders[1] / "model.safetensors"
    save_file({**load_file(path), "mask_hidden": torch.randn(1, 1, 5)}, path)
    assert re.search(r"mask_hidden\b.*\b5\b.*\bfc\b", only(findings(folders)).problem)


def test_a_config_that_names_another_family(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle3, layout="speculators")
    edit_config(folders[1], speculators_model_type="peagle")
    assert re.search(
        r'speculators_model_type "peagle".*\beagle3\b', only(findings(folders)).problem
    )
    folders = make_pair(tmp_path / "other", make_eagle1)
    edit_config(folders[1], redraft={"family": "eagle3"})
    assert re.search(r"\beagle3\b.*\beagle1\b", only(findings(folders)).problem)


def test_a_path_that_steers_vllm_to_another_method(tmp_path: Path) -> None:
    folders = make_pair(tmp_path / "drafts-EAGLE-8b", make_medusa)
    assert re.search(r'"eagle".*"medusa"', only(findings(folders)).problem)
    assert findings(make_pair(tmp_path / "eagle3-llama", make_eagle3)) == []


def test_a_partial_rotation_is_a_doubt_only_if_the_target_has_another(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle3)
    for folder in folders:
        edit_rope(folder, 0.5)
    assert findings(folders) == []
    edit_rope(folders[1], 0.25)
    assert re.search(r"partial_rotary_factor is 0\.25.*\b0\.5$", only(findings(folders)).problem)


def edit_rope(folder: Path, part: float) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["partial_rotary_factor"] = part
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_rope_that_is_not_the_targets(layout: str, tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle3, {"rope_parameters": LLAMA3_ROPE}, layout=layout)
    path = folders[1] / "config.json"
    config = json.loads(path.read_text())
    layer = config.get("transformer_layer_config", config)
    layer["rope_parameters"]["rope_theta"] = 10000.0
    path.write_text(json.dumps(config))
    assert re.search(r"rope_theta is 10000\.0.*\b500000\.0$", only(findings(folders)).problem)
    del layer["rope_parameters"], layer["rope_theta"]
    path.write_text(json.dumps(config))
    problems = "\n".join(finding.problem for finding in findings(folders))
    assert re.search(r"rope_theta is 10000\.0.*\b500000\.0", problems)
    assert re.search(r"rope_type is default\b.*\bllama3\b", problems)


@pytest.mark.parametrize("make", [lambda folder: make_pair(folder, make_eagle1), make_standalone])
def test_fewer_positions_than_the_target(
    make: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    folders = make(tmp_path)
    edit_config(folders[1], max_position_embeddings=64)
    finding = only(findings(folders))
    assert re.search(r"\b64\b.*\b128\b", finding.problem)
    assert "--max-model-len 64" in finding.cure


@pytest.mark.parametrize("make", [make_eagle1, make_eagle3, make_dflash])
def test_a_head_of_a_wider_target(make: Callable[..., Any], tmp_path: Path) -> None:
    """Its layers are not counted: 96 numbers are three of its target's, and two of this one's."""
    folders = make_pair(tmp_path, make)
    shutil.rmtree(folders[0])
    make_target(hidden_size=48).save_pretrained(folders[0])
    problems = [finding.problem for finding in findings(folders)]
    assert any(re.search(r"hidden_size is 32\b.*\b48$", problem) for problem in problems)
    assert not any("are listed" in problem for problem in problems)


@pytest.mark.parametrize("make", [make_eagle1, make_eagle3])
def test_a_bias_of_fc(make: Callable[..., Any], tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make)
    edit_tensors(folders[1], fc__bias=torch.ones(HIDDEN))
    assert "fc.bias" in only(findings(folders)).problem


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make_eagle1, "layers.0.mlp.up_proj.weight"),
        (make_eagle3, "norm.weight"),
        (make_medusa, "lm_heads.1.weight"),
    ],
)
def test_a_tensor_is_missing(make: Callable[..., Any], name: str, tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make)
    edit_tensors(folders[1], name)
    assert re.search(rf"\b1 tensors\b.*\b{re.escape(name)}\b", only(findings(folders)).problem)


def test_another_target_than_the_one_trained_for(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path, make_eagle1)
    provenance = {"target": "org/target", "target_fingerprint": fingerprint(target)}
    publish(
        tmp_path / "published",
        lambda partial: shutil.copytree(draft, partial, dirs_exist_ok=True),
        provenance,
    )
    assert findings((target, tmp_path / "published")) == []
    make_target(seed=1).save_pretrained(tmp_path / "other")
    finding = only(findings((tmp_path / "other", tmp_path / "published")))
    assert "org/target" in finding.problem


def test_a_file_that_changed_after_it_was_published(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path, make_eagle1)
    publish(
        tmp_path / "published",
        lambda partial: shutil.copytree(draft, partial, dirs_exist_ok=True),
        {},
    )
    weights = tmp_path / "published" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert re.search(
        r"model\.safetensors\b.*SHA-256", only(findings((target, weights.parent))).problem
    )


def test_a_standalone_draft_of_another_tokenizer(tmp_path: Path) -> None:
    folders = make_standalone(tmp_path)
    path = folders[1] / "tokenizer.json"
    text = json.loads(path.read_text())
    vocabulary = text["model"]["vocab"]
    a, b = "a", "b"
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(text))
    finding = only(findings(folders))
    assert re.search(r"tokenizer\b.*: token \d", finding.problem)
    assert "family" in finding.cure


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_draft_that_is_its_target(is_copied: bool, tmp_path: Path) -> None:
    target, _ = make_standalone(tmp_path)
    draft = shutil.copytree(target, tmp_path / "copy") if is_copied else target
    finding = only(findings((target, draft)))
    assert "equal to the target's" in finding.problem
    assert "--draft" in finding.cure


def test_a_standalone_draft_with_fewer_rows(tmp_path: Path) -> None:
    target, draft = make_standalone(tmp_path)
    edit_config(draft, vocab_size=200)
    assert "200 rows" in findings((target, draft))[0].problem


def test_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    said = list(notes(read(*make_pair(tmp_path, make_medusa))))
    assert any("manifest.json" in note for note in said)
    assert any("provenance.json" in note for note in said)
    folders = make_pair(tmp_path / "long", make_eagle3)
    provenance = {"config": {"loop": {"sequence_length": 64}}}
    (folders[1] / "provenance.json").write_text(json.dumps(provenance))
    edit_config(folders[1], "redraft")
    said = list(notes(read(*folders)))
    assert any(re.search(r"\b64\b.*\b128\b", note) for note in said)
    assert any("record" in note for note in said)


def test_a_folder_that_holds_no_draft_is_refused(tmp_path: Path) -> None:
    folders = make_pair(tmp_path, make_eagle1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(folders[0], tmp_path / "nowhere")
    save_file({"something": torch.zeros(1)}, folders[1] / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{folders[1]} .*\bsomething$"):
        read(*folders)
