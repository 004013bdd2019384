"""The doctor of another engine, and heads of other trainers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from make_heads import HIDDEN
from safetensors.torch import load_file, save_file
from test_export import (
    AUX,
    KEY,
    convert,
    make_pair,
    of_dflash,
    of_dspark,
    of_eagle1,
    of_eagle3,
    problems,
)

from redraft.files.target_folder import TargetFolder
from redraft.heads.doctor.checks import static_findings
from redraft.heads.doctor.pair import Pair
from redraft.heads.engines.exporting import engine_findings, other_version
from redraft.heads.engines.table import find_engine
from redraft.heads.target import Target
from redraft.recipes.cli.run import dispatch


def edit(pair: Pair, *removed: str, tensors: dict[str, Any] | None = None, **changed: Any) -> Pair:
    """The same folder without its manifest, with other keys and tensors."""
    (pair.draft / "manifest.json").unlink(missing_ok=True)
    config = {**pair.config, **changed}
    kept = {key: value for key, value in config.items() if key not in removed}
    (pair.draft / "config.json").write_text(json.dumps(kept))
    if tensors:
        path = pair.draft / "model.safetensors"
        save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    return Pair.read(pair.target, pair.draft)


def as_specforge(pair: Pair) -> Pair:
    """A head as SpecForge writes it: layers in the section only, counted by the layer that ends."""
    section = {"use_aux_hidden_state": True, KEY: [layer - 1 for layer in AUX]}
    return edit(pair, KEY, "redraft", "num_aux_hidden_states", eagle_config=section)


def static(pair: Pair, engine: str = "vllm") -> list[str]:
    found = static_findings(pair, method=None, num_speculative_tokens=3, engine=engine)
    return [finding.problem for finding in found if not finding.is_doubt]


def test_a_head_trained_for_sglang_opens_with_its_layers(tmp_path: Path) -> None:
    pair = as_specforge(make_pair(tmp_path, of_eagle3()))
    target = Target.from_folder(pair.target.folder)
    assert pair.family.load(pair.draft, lambda: target).aux_layer_ids == AUX  # type: ignore[attr-defined]
    assert pair.family.read_layers(pair.config) == list(AUX)
    assert static(pair, "sglang") == problems(pair, "sglang") == []
    unmarked = edit(pair, eagle_config={KEY: [layer - 1 for layer in AUX]})
    assert pair.family.read_layers(unmarked.config) == list(AUX)


def test_the_doctor_asks_which_engine_a_nested_list_was_written_for(tmp_path: Path) -> None:
    pair = as_specforge(make_pair(tmp_path, of_eagle3()))
    found = static_findings(pair, method=None, num_speculative_tokens=3)
    (nested,) = [finding for finding in found if not finding.is_doubt]
    assert "[0, 1, 3]" in nested.problem
    assert re.search(r"^write\b.*\[1, 2, 4\].*SGLang.*\[0, 1, 3\].*vLLM$", nested.cure)
    # with the answer in it, the folder serves both engines
    both = edit(pair, **{KEY: list(AUX)})
    assert static(both) == problems(both, "sglang") == []


def test_a_nested_list_that_has_one_meaning_for_the_target_is_told_once(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, of_eagle3())
    last = pair.target_config.num_hidden_layers
    layers = [last - 2, last - 1, last]
    nested = edit(pair, KEY, "redraft", "num_aux_hidden_states", eagle_config={KEY: layers})
    (problem,) = (
        finding
        for finding in static_findings(nested, method=None, num_speculative_tokens=3)
        if not finding.is_doubt
    )
    assert problem.cure.endswith(f"{layers}, because the target has no layer {last + 1}")


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_sglang_and_tensorrt_are_told_other_layers(engine: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, of_eagle3())
    assert any("layers" in problem for problem in problems(pair, engine))
    written = convert(pair, engine)
    if engine == "sglang":
        section = {**written.config["eagle_config"], KEY: list(AUX)}  # vLLM's numbers
        found = problems(edit(written, eagle_config=section), engine)
        assert re.search(r"\[2, 3, 5\].*\[1, 2, 4\]", found[0])
    else:
        options = json.loads((written.draft / "spec.yaml").read_text())
        options["speculative_config"]["eagle3_layers_to_capture"] = list(AUX)
        (written.draft / "spec.yaml").write_text(json.dumps(options))
        found = problems(written, engine)
        assert re.search(r"\[2, 3, 5\].*\[1, 2, 4\]", found[0])


def beside(pair: Pair, architecture: str) -> Pair:
    """The same head for a target of another architecture, as SGLang tells them apart."""
    path = pair.target.folder / "config.json"
    config = {**json.loads(path.read_text()), "architectures": [architecture]}
    path.write_text(json.dumps(config))
    return Pair.read(TargetFolder.open(pair.target.folder), pair.draft)


@pytest.mark.parametrize(
    ("architecture", "layers", "told"),
    [
        ("LlamaForCausalLM", (1, 2, 4), [0, 1, 3]),
        ("DeepseekV3ForCausalLM", (2, 3, 4), [1, 2, 3]),
        ("KimiK25ForConditionalGeneration", (3, 4), [3, 4]),
        ("GptOssForCausalLM", (1, 2, 5), [0, 1, 4]),
    ],
)
def test_sglang_is_told_layers_by_its_rule_for_the_target(
    architecture: str, layers: tuple[int, ...], told: list[int], tmp_path: Path
) -> None:
    pair = beside(make_pair(tmp_path, of_eagle3(aux_layer_ids=layers)), architecture)
    written = convert(pair, "sglang")
    assert written.config["eagle_config"][KEY] == told
    assert written.config[KEY] == list(layers)


def test_layers_that_sglang_cannot_be_told_are_refused(tmp_path: Path) -> None:
    pair = beside(make_pair(tmp_path, of_eagle3()), "DeepseekV3ForCausalLM")
    (refused,) = find_engine("sglang").rules().find_refused(pair)
    assert "[1, 2, 4]" in refused.problem


def test_nvidias_head_for_gpt_oss_reads_the_last_stream_in_sglang_too(tmp_path: Path) -> None:
    pair = beside(make_pair(tmp_path, of_eagle3(aux_layer_ids=(3, 4, 5))), "GptOssForCausalLM")
    section = {"use_aux_hidden_state": True, KEY: [3, 4, 5]}
    theirs = edit(pair, KEY, "redraft", "num_aux_hidden_states", eagle_config=section)
    assert theirs.family.read_layers(theirs.config) == [3, 4, 5]
    assert problems(theirs, "sglang") == []


def test_doctor_for_sglang_prints_findings_and_cures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = make_pair(tmp_path, of_dspark())
    args = ["doctor", "--target", pair.target.name, "--draft", str(pair.draft), "--engine"]
    with pytest.raises(SystemExit) as ended:
        dispatch([*args, "sglang"])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert re.search(r"^engine +SGLang 0\.5\.23 \(its loaders were read, not run\)$", said, re.M)
    assert "d2t" in said
    assert "fix: redraft export DRAFT --engine sglang" in said
    written = convert(pair, "sglang")
    assert dispatch([*args[:4], str(written.draft), "--engine", "sglang"]) == 0
    assert dispatch([*args, "none"]) == 0
    capsys.readouterr()
    assert dispatch(["doctor", str(pair.draft), "--engine", "sglang"]) == 2
    assert "set --target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "name", "meaning", "treatment"),
    [
        (of_eagle3(), "fc_norm.0.weight", "a norm", "fails to start"),
        (of_eagle3(), "midlayer.self_attn.q_proj.bias", "a bias", "ignores"),
        (of_dflash(None), "markov_head.markov_w1.weight", "DSpark", "fails to start"),
        (of_eagle3(), "anything.weight", "EAGLE-3", "fails to start"),
        (of_eagle1, "layers.0.input_layernorm.weight", "a part of a layer", "fails to start"),
    ],
)
def test_an_extra_tensor_is_named_with_what_the_engine_does(
    make: Any, name: str, meaning: str, treatment: str, tmp_path: Path
) -> None:
    pair = make_pair(tmp_path, make)
    if name.endswith("bias"):  # else the config's key is found first
        pair = edit(pair, tensors={"midlayer.mlp.down_proj.bias": torch.ones(HIDDEN)})
        name = "midlayer.mlp.down_proj.bias"
    elif "markov" in name:
        name = "hidden_norms.markov_head.weight"
        pair = edit(pair, tensors={name: torch.ones(HIDDEN)})
    else:
        pair = edit(pair, tensors={name: torch.ones(HIDDEN)})
    found = static_findings(pair, method=None, num_speculative_tokens=3)
    (extra,) = [finding for finding in found if name in finding.problem]
    assert meaning in extra.problem
    assert treatment in extra.problem
    assert extra.cure.startswith("remove it")
    sglang = static_findings(pair, method=None, num_speculative_tokens=3, engine="sglang")
    assert any("the engine ignores it" in finding.problem for finding in sglang)


def test_tables_of_rotary_frequencies_are_read_over(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, of_eagle3())
    table = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert static(edit(pair, tensors=table)) == []


@pytest.mark.parametrize("name", ["sglang", "tensorrt-llm"])
def test_a_scale_of_the_logits_that_sglang_and_tensorrt_drop_is_a_doubt(
    name: str, tmp_path: Path
) -> None:
    pair = make_pair(tmp_path, of_dflash(None))
    before = engine_findings(find_engine(name), pair)
    doubt, *same = engine_findings(find_engine(name), edit(pair, logit_scale=0.25))
    assert same == before
    assert doubt.is_doubt
    assert "logit_scale (0.25)" in doubt.problem


def test_another_release_of_sglang_is_a_doubt_in_one_line() -> None:
    sglang = find_engine("sglang")
    assert other_version(sglang, "") == other_version(sglang, sglang.version) == []
    (doubt,) = other_version(sglang, "0.6.1")
    assert doubt.is_doubt
    assert re.search(r"0\.6\.1\b.*\b0\.5\.23\b", doubt.problem)
    assert find_engine("vllm").find_installed() == ""


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("make", "v1"), [(of_eagle3(), AUX), (of_dflash(), AUX), (of_dspark(), None)]
)
@pytest.mark.parametrize("name", ["sglang", "tensorrt-llm"])
def test_vllms_readers_take_the_layers_of_training_from_an_export(
    name: str, make: Any, v1: tuple[int, ...] | None, tmp_path: Path
) -> None:
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    config = SimpleNamespace(**convert(make_pair(tmp_path, make), name).config)
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    assert get_eagle3_aux_layers_from_config(speculative) == AUX
    if v1 is not None:  # V1 serves no DSpark
        runner = SimpleNamespace(speculative_config=speculative)
        assert GPUModelRunner._get_eagle3_aux_layers_from_config(runner) == v1
