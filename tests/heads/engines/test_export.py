"""A draft written for another engine is the same draft, as that engine reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make_heads import (
    HIDDEN,
    LAYERS,
    VOCAB,
    make_batch,
    make_ids,
    make_random,
    make_signal,
    make_target,
)
from safetensors.torch import load_file

from redraft.files.artifact import publish, verify
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import FAMILIES, find_family
from redraft.heads.doctor.checks import static_findings
from redraft.heads.doctor.pair import Pair
from redraft.heads.engines.exporting import engine_findings, export_draft, require_exportable
from redraft.heads.engines.table import ENGINES, Export, find_engine
from redraft.heads.families import dflash, dspark, eagle1, eagle3, peagle
from redraft.heads.target import Target

IDS = torch.arange(3, 90, 2)
AUX = (1, 2, 4)
KEY = "eagle_aux_hidden_state_layer_ids"
BLOCK = {"aux_layer_ids": AUX, "num_layers": 2, "block_size": 4, "mask_token_id": VOCAB - 1}

Make = Callable[[Target], Any]


def of_eagle3(ids: torch.Tensor | None = IDS, **options: Any) -> Make:
    return lambda target: eagle3.Eagle3(
        eagle3.Config(**{"aux_layer_ids": AUX, **options}), target, ids
    )


def of_dflash(ids: torch.Tensor | None = IDS, **options: Any) -> Make:
    return lambda target: dflash.DFlash(dflash.Config(**{**BLOCK, **options}), target, ids)


def of_dspark(ids: torch.Tensor | None = IDS, **options: Any) -> Make:
    config = {**BLOCK, "markov_rank": 8, **options}
    return lambda target: dspark.DSpark(dspark.Config(**config), target, ids)


def of_eagle1(target: Target) -> Any:
    return eagle1.Eagle1(eagle1.Config(), target)


def of_peagle(target: Target) -> Any:
    config = peagle.Config(aux_layer_ids=AUX, num_layers=2, mask_token_id=9)
    return peagle.PEagle(config, target, IDS)


def make_pair(folder: Path, make: Make, **export: Any) -> Pair:
    model = make_target()
    model.save_pretrained(folder / "target")
    head = make_random(make(Target.from_model(model)))
    provenance = {"target": str(folder / "target"), "note": "kept"}
    publish(folder / "draft", lambda path: head.export(path, **export), provenance)
    return Pair.read(TargetFolder.open(folder / "target"), folder / "draft")


def convert(pair: Pair, name: str) -> Pair:
    """The pair of the exported folder, which neither the doctor nor the engine's rules object to."""
    output = pair.draft.with_name(f"for-{name}")
    export = Export(pair=pair, output=output, num_tokens=3)
    export_draft(find_engine(name), export, overwrite=False)
    verify(output)
    written = Pair.read(pair.target, output)
    assert engine_findings(find_engine(name), written) == []
    found = static_findings(written, method=None, num_speculative_tokens=3)
    assert [finding for finding in found if not finding.is_doubt] == []
    return written


def logits(pair: Pair) -> list[torch.Tensor]:
    """The logits of every draft token at some rows, by target id."""
    model = make_target()
    target = Target.from_model(model)
    head = pair.family.load(pair.draft, lambda: target)
    batch = make_batch([[make_ids(24)]])
    signal = make_signal(model, batch, getattr(head, "aux_layer_ids", ()))
    with torch.no_grad():
        steps = head.draft_steps(batch, signal, 3)
        rows = torch.arange(4, 20)
        return [step.logits(rows) for step in steps]


def assert_same(pair: Pair, written: Pair, ids: torch.Tensor | None = None) -> None:
    """The two propose the same; `ids` are the columns of the wide one that the other has."""
    for mine, wide in zip(logits(pair), logits(written), strict=True):
        torch.testing.assert_close(wide if ids is None else wide[:, ids], mine)


def problems(pair: Pair, name: str) -> list[str]:
    return [finding.problem for finding in engine_findings(find_engine(name), pair)]


def test_every_engine_says_why_it_does_not_serve_a_family(tmp_path: Path) -> None:
    names = {family.name for family in FAMILIES}
    for engine in ENGINES:
        assert set(engine.unserved) <= names
        assert engine.version
        for family in FAMILIES:
            if family.name in engine.unserved:
                with pytest.raises(ValueError, match=rf"{engine.title}.*{family.title}: \w"):
                    engine.require_served(family)
    with pytest.raises(ValueError, match=r"tgi.*\bsglang\b"):
        find_engine("tgi")
    pair = make_pair(tmp_path, of_peagle)
    with pytest.raises(ValueError, match=r"SGLang does not support P-EAGLE"):
        require_exportable(find_engine("sglang"), pair)
    assert re.search("P-EAGLE", problems(pair, "tensorrt-llm")[0])


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_sglang_reads_the_layers_of_an_eagle3_head_from_a_section_one_less(
    layout: str, tmp_path: Path
) -> None:
    pair = make_pair(tmp_path, of_eagle3(num_layers=2), layout=layout)
    assert problems(pair, "sglang")
    written = convert(pair, "sglang")
    config, tensors = written.config, load_file(written.draft / "model.safetensors")
    assert config["eagle_config"] == {"use_aux_hidden_state": True, KEY: [0, 1, 3]}
    assert config[KEY] == list(AUX)  # vLLM looks here first
    assert config["draft_vocab_size"] == len(IDS)
    assert "midlayer.hidden_norm.weight" in tensors
    assert "layers.1.hidden_norm.weight" in tensors
    assert "layers.1.input_layernorm.weight" not in tensors
    assert_same(pair, written)
    assert json.loads((written.draft / "provenance.json").read_text())["note"] == "kept"


def test_sglang_shares_the_targets_head_only_with_a_head_that_names_no_vocabulary(
    tmp_path: Path,
) -> None:
    pair = make_pair(tmp_path, of_eagle3(None, own_head=False))
    assert any("lm_head" in problem for problem in problems(pair, "sglang"))
    written = convert(pair, "sglang")
    assert written.config["draft_vocab_size"] is None
    assert_same(pair, written)


def test_sglang_adds_a_bias_to_an_eagle1_head(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, of_eagle1)
    assert len(problems(pair, "sglang")) == 2
    written = convert(pair, "sglang")
    assert written.config["architectures"] == ["LlamaForCausalLMEagle"]
    assert written.shapes["fc.bias"] == (HIDDEN,)
    assert_same(pair, written)


@pytest.mark.parametrize("name", ["sglang", "tensorrt-llm"])
@pytest.mark.parametrize("make", [of_dflash, of_dspark])
def test_sglang_and_tensorrt_propose_from_the_whole_vocabulary_of_a_block_head(
    make: Callable[..., Make], name: str, tmp_path: Path
) -> None:
    pair = make_pair(tmp_path, make())
    assert any("lm_head" in problem for problem in problems(pair, name))
    written = convert(pair, name)
    assert not {"lm_head.weight", "d2t", "t2d"} & set(written.shapes)
    assert_same(pair, written, IDS)
    if make is of_dspark:
        w2 = load_file(written.draft / "model.safetensors")["markov_head.markov_w2.weight"]
        assert w2.shape == (VOCAB, 8)
        others = [i for i in range(VOCAB) if i not in IDS]
        assert not w2[others].any()
        assert w2[IDS].any()


@pytest.mark.parametrize("anchor", [True, False])
def test_tensorrt_reads_dsparks_keys_from_sections(anchor: bool, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, of_dspark(None, sample_from_anchor=anchor))
    assert problems(pair, "tensorrt-llm")
    written = convert(pair, "tensorrt-llm")
    assert written.config["dflash_config"] == {
        "target_layer_ids": [0, 1, 3],
        "mask_token_id": VOCAB - 1,
        "shift_label": anchor,
    }
    options = json.loads((written.draft / "spec.yaml").read_text())["speculative_config"]
    assert options == {
        "decoding_type": "DSpark",
        "max_draft_len": 4 if anchor else 3,
        "speculative_model": str(written.draft),
    }


def test_tensorrt_takes_the_layers_of_an_eagle3_head_from_its_options(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, of_eagle3(num_layers=2, norm_before_fc=True))
    found = " ".join(problems(pair, "tensorrt-llm"))
    assert all(
        word in found for word in ("eagle3_layers_to_capture", "norm_before_fc", "hidden_norm")
    )
    written = convert(pair, "tensorrt-llm")
    options = json.loads((written.draft / "spec.yaml").read_text())["speculative_config"]
    assert options["eagle3_layers_to_capture"] == [0, 1, 3]
    assert options["decoding_type"] == "Eagle3"
    assert written.config["eagle_config"]["norm_before_fc"] is True
    assert {"layers.0.hidden_norm.weight", "layers.1.hidden_norm.weight"} <= set(written.shapes)
    assert_same(pair, written)


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (of_eagle3(aux_layer_ids=(1, 2, LAYERS)), "sglang", rf"last layer, {LAYERS}"),
        (of_dflash(aux_layer_ids=(1, LAYERS)), "sglang", rf"last layer, {LAYERS}"),
        (of_eagle3(norm_before_residual=True), "sglang", "norm_before_residual"),
        (of_eagle3(norm_before_residual=True), "tensorrt-llm", "norm_before_residual"),
        (of_eagle3(norm_before_fc=True, fc_norm=True), "tensorrt-llm", "norm_before_fc.*fc_norm"),
        (of_eagle3(aux_layer_ids=(0, 2, 4)), "tensorrt-llm", "layer 0"),
        (of_eagle3(aux_layer_ids=(2,)), "sglang", "several streams"),
        (of_eagle3(aux_layer_ids=(2,)), "tensorrt-llm", "several streams"),
        (of_eagle3(window=8), "sglang", "window"),
        (of_eagle3(window=8), "tensorrt-llm", "window"),
        (of_dflash(is_causal=True), "tensorrt-llm", "layer 0.*causal"),
        (of_dflash(window=8, is_causal=False), "tensorrt-llm", "window of 8, both"),
        (of_dspark(window=8), "tensorrt-llm", "window of 8"),
    ],
)
def test_sglang_and_tensorrt_refuse_a_part_that_they_do_not_compute(
    make: Make, name: str, reason: str, tmp_path: Path
) -> None:
    pair = make_pair(tmp_path, make)
    with pytest.raises(ValueError, match=reason):
        require_exportable(find_engine(name), pair)
    assert any(re.search(reason, problem) for problem in problems(pair, name))


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("is_causal", [None, True, False])
def test_sglang_reads_the_direction_of_a_block_at_the_top_level(
    window: int | None, is_causal: bool | None, tmp_path: Path
) -> None:
    pair = make_pair(tmp_path, of_dflash(None, window=window, is_causal=is_causal))
    assert_same(pair, convert(pair, "sglang"))


def test_an_export_for_vllm_is_the_head_in_its_own_layout(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, of_eagle3(num_layers=2), layout="speculators")
    other = convert(pair, "tensorrt-llm")
    back = convert(other, "vllm")
    assert "speculators_model_type" not in back.config
    assert back.config[KEY] == list(AUX)
    assert_same(pair, back)
    assert re.search("hidden_norm", problems(other, "vllm")[0])


def test_sglang_keeps_the_stored_type(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, of_dspark(), dtype=torch.bfloat16)
    written = convert(pair, "sglang")
    assert written.dtypes["fc.weight"] == "BF16"
    assert written.dtypes["confidence_head.proj.weight"] == "F32"


COMMANDS = {
    "eagle3": (
        of_eagle3(),
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path {draft} "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
    ),
    "dflash": (
        of_dflash(),
        "--speculative-algorithm DFLASH --speculative-draft-model-path {draft} "
        "--speculative-num-draft-tokens 4",
    ),
    "dspark": (
        of_dspark(sample_from_anchor=False),
        "--speculative-algorithm DSPARK --speculative-draft-model-path {draft} "
        "--speculative-dspark-block-size 3",
    ),
}


@pytest.mark.parametrize("family", COMMANDS)
def test_sglang_is_started_with_the_flags_of_the_family(family: str, tmp_path: Path) -> None:
    make, flags = COMMANDS[family]
    written = convert(make_pair(tmp_path, make), "sglang")
    export = Export(pair=written, output=written.draft, num_tokens=3)
    command = find_engine("sglang").rules().serve(export)
    assert find_family(family) is written.family
    start = f"python -m sglang.launch_server --model-path {written.target.name} "
    assert command == start + flags.format(draft=written.draft)
