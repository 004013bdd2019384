"""The scenes of the online demo and its options: no model or data set is downloaded."""

from __future__ import annotations

import datetime
import gzip
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parse_flags import parse

from benchmarks.demo import online_stage
from benchmarks.demo.fleet import KV_CACHE_BYTES, clear
from benchmarks.demo.online_config import MAX_MODEL_LEN, PRESETS, SMALL, SMOLLM2, Config
from benchmarks.demo.online_stage import Stage, count_kv_bytes, make_scene
from redraft.engine.machine import ENGINE_IS_CPU
from redraft.engine.target_dtype import default_target_dtype
from redraft.files.folder import read_config
from redraft.heads.families.standalone import StandaloneDraft


def make_conversation(domain: str, number: int) -> Any:
    question, answer = f"question {number} about {domain}", f"answer {number} " + 12 * f"{domain} "
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"domain": domain, "messages": messages}


@pytest.fixture(autouse=True)
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard library of a few questions."""

    def load(source: str) -> list[Any]:
        if source == "stdlib":
            return [
                make_conversation(domain, number)
                for number in range(200)
                for domain in ("code", "prose")
            ]
        assert source == "stdlib-functions"
        asked = (make_conversation("code", number)["messages"][:1] for number in range(1000, 1040))
        return [{"domain": "code", "messages": messages} for messages in asked]

    monkeypatch.setattr(online_stage, "load_conversations", load)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder in which two problems of HumanEval are."""
    folder = tmp_path / "parts"
    folder.mkdir()
    problems = [{"prompt": f"def humaneval_{number}():\n"} for number in range(2)]
    with gzip.open(folder / "HumanEval.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps(problem) + "\n" for problem in problems)
    return folder


def first_questions(conversations: Any) -> set[str]:
    return {conversation["messages"][0]["content"] for conversation in conversations}


def test_the_small_target_writes_code_and_then_prose_in_float32(tiny_target: Path) -> None:
    scene = make_scene(Config())
    assert (scene.target, scene.dtype, scene.domains) == (SMALL, "float32", ("code", "prose"))
    assert list(scene.traffic) == ["code", "prose"], "the traffic begins with the first"
    assert scene.training == scene.traffic["code"]
    for domain in scene.domains:
        assert {conversation["domain"] for conversation in scene.traffic[domain]} == {domain}
        assert scene.test[domain]
        assert not first_questions(scene.test[domain]) & first_questions(scene.traffic[domain])


def test_a_real_model_is_tested_on_humaneval_of_which_nothing_is_in_the_traffic(
    random_target: Path, parts: Path
) -> None:
    scene = make_scene(Config(target=random_target, parts=parts))
    assert (scene.target, scene.domains) == (random_target, ("prose", "code"))
    assert list(scene.traffic) == ["prose", "code"]
    assert scene.training == scene.traffic["prose"]
    assert len(scene.test["code"]) == 2
    assert all("def humaneval_" in question for question in first_questions(scene.test["code"]))
    assert not any(
        "humaneval" in question
        for some in scene.traffic.values()
        for question in first_questions(some)
    )
    assert not first_questions(scene.test["prose"]) & first_questions(scene.training)


def test_a_real_model_computes_in_the_type_that_is_the_default_everywhere(
    random_target: Path, parts: Path
) -> None:
    default = default_target_dtype(random_target, on_cpu=ENGINE_IS_CPU) or "bfloat16"
    for given, dtype in ((None, default), ("bfloat16", "bfloat16"), ("float32", "float32")):
        assert (
            make_scene(Config(target=random_target, parts=parts, target_dtype=given)).dtype == dtype
        )


def test_the_word_smollm2_names_the_folder_below_parts(random_target: Path, parts: Path) -> None:
    made = Path(shutil.copytree(random_target, parts / "smollm2-135m-instruct"))
    assert make_scene(Config(target=SMOLLM2, parts=parts)).target == made


def test_smollm2_itself_has_room_for_sixteen_requests_and_learns_from_its_first_and_last_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Path("outputs/parts")
    if not (parts / "smollm2-135m-instruct").is_dir() or not list(parts.glob("*.jsonl.gz")):
        pytest.skip(f"no SmolLM2 and HumanEval in {parts}: `make demo` gets them")
    monkeypatch.setattr(online_stage, "distil", lambda *_, **__: None)
    cfg = Config(target=SMOLLM2, parts=parts, output=tmp_path, num_test_prompts=3)
    scene = make_scene(cfg)
    stage = Stage.set(cfg, scene, datetime.date(2026, 1, 2))
    assert read_config(tmp_path / "draft-prose")["num_hidden_layers"] == 2
    target = stage.target.model.layers
    draft = StandaloneDraft.load(tmp_path / "draft-prose").model.model.layers
    for mine, of_target in ((draft[0], target[0]), (draft[1], target[29])):
        assert torch.equal(mine.mlp.up_proj.weight, of_target.mlp.up_proj.weight.bfloat16())
    assert len(stage.test["code"]) == 3
    token_bytes = {"bfloat16": 24_576, "float32": 49_152}[scene.dtype]
    assert stage.kv_cache_bytes == token_bytes * 16 * 512


def test_a_target_that_is_not_there_is_told_before_the_output_is_touched(
    parts: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        make_scene(Config(target=tmp_path / "nothing", parts=parts))


@pytest.mark.usefixtures("fresh_accelerator")
def test_the_stage_is_set_for_the_scene(random_target: Path, parts: Path, tmp_path: Path) -> None:
    output = tmp_path / "demo"
    clear(output, overwrite=False)
    cfg = Config(
        target=random_target, target_dtype="bfloat16", parts=parts, output=output, distil_steps=1,
        num_test_prompts=5, min_drafts=123,
    )  # fmt: skip
    stage = Stage.set(cfg, make_scene(cfg), datetime.date(2026, 1, 2))
    assert stage.target.dtype == torch.bfloat16
    assert stage.registry.current() == "v000001"
    assert read_config(output / "draft-prose")["num_hidden_layers"] == 2, (
        "the first and the last layer"
    )
    assert {name: len(prompts) for name, prompts in stage.test.items()} == {"prose": 5, "code": 2}
    assert {prompt.domain for prompt in stage.traffic["code"]} == {"code"}

    stage.configure([])
    config = stage.config
    assert config.target == random_target
    assert config.training.sequence_length == MAX_MODEL_LEN
    assert config.rollout.min_drafts == 123


def test_the_cache_holds_sixteen_of_the_longest_requests() -> None:
    smollm2 = SimpleNamespace(
        num_hidden_layers=30, num_key_value_heads=3, num_attention_heads=9, hidden_size=576
    )
    # 2 x 32 layers x 3 heads x 64 numbers of two bytes a token; 16 requests of 512 tokens
    assert count_kv_bytes(smollm2, 2, "bfloat16") == 24_576 * 16 * 512
    assert count_kv_bytes(smollm2, 2, "float32") == 2 * 24_576 * 16 * 512
    tiny = SimpleNamespace(
        num_hidden_layers=7, num_key_value_heads=2, num_attention_heads=4, head_dim=64
    )
    assert count_kv_bytes(tiny, 2, "float32") == KV_CACHE_BYTES


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--speed-rounds 5.*95%.*6"):
        Config(speed_rounds=5)
    with pytest.raises(ValueError, match=r"563.*512"):
        Config(max_prompt_tokens=400, max_tokens=160)


def test_a_preset_has_the_sizes_and_flags_change_them() -> None:
    cfg = parse(Config, None, PRESETS, ["--preset", "smollm2", "--seeds", "3"], prog="online.py")
    assert (cfg.target, cfg.seeds, cfg.max_tokens) == (SMOLLM2, 3, PRESETS["smollm2"].max_tokens)
    assert PRESETS["v2"].runner == "v2"
    assert len({preset.output for preset in (*PRESETS.values(), Config())}) == 3, (
        "no demo deletes another's"
    )
