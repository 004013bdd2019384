"""`redraft doctor --url`: a running server accepts as many draft tokens as the forecast on its text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_cpp_world import K, World, make_draft, make_world, require_llama_cpp
from make_gguf import write_gguf
from sglang_server import sglang_server
from transformers import PreTrainedTokenizerFast

from benchmarks.llama_server import serving
from redraft.distill.doctor.in_engine import ask_fallback
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.prompts import Prompt
from redraft.engine.server import VllmServer
from redraft.eval.forecast.greedy import forecast, generate_answers, greedy_continuations
from redraft.files.folder import CONFIG
from redraft.files.gguf_writer import GgufTarget
from redraft.heads.engines.exporting import export_draft
from redraft.heads.engines.llama_cpp import FILE, TYPES
from redraft.heads.engines.table import Export, find_engine
from redraft.heads.families.eagle3 import Eagle3
from redraft.recipes.cli.run import dispatch

NUM_PROMPTS, LENGTH = 12, 24

FACT = re.compile(r"tau (\d\.\d+)")


@pytest.fixture(scope="module")
def world(
    small_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> World:
    """With answers to the questions that the doctor asks."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    world = make_world(small_tokenizer, tmp_path_factory.mktemp("doctor-url"))
    questions = [Prompt(token_ids=ids) for ids in ask_fallback(small_tokenizer, NUM_PROMPTS)]
    world.answers = greedy_continuations(
        world.model, questions, max_tokens=LENGTH, num_speculative_tokens=K, end_ids=(2, 3)
    )
    return world


@pytest.fixture(scope="module")
def draft(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(world, "eagle3", tmp_path_factory.mktemp("head") / "draft")


def ask_doctor(
    target: Path, draft: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    args = ["doctor", "--target", str(target), "--draft", str(draft), "--url", url]
    size = ["--num-prompts", str(NUM_PROMPTS), "--max-tokens", str(LENGTH)]
    try:
        status = dispatch([*args, *size, "--target-dtype", "float32", "--json"])
    except SystemExit as ended:  # with problems
        status = ended.code
    return status, json.loads(capsys.readouterr().out)


def read_other_layers(draft: Path, folder: Path) -> Path:
    """The head as an engine has it that reads other layers than it is told."""
    shutil.copytree(draft, folder)
    config = json.loads((folder / CONFIG).read_text())
    for section in (config, config["redraft"]["trained_with"]):
        section["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def test_doctor_finds_a_head_that_llama_cpp_was_given_wrongly(
    world: World, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_llama_cpp()
    other = read_other_layers(draft, tmp_path / "other")
    for served, status in ((draft, 0), (other, 1)):
        output = tmp_path / f"exported-{status}"
        export = Export(pair=world.pair(served), output=output, num_tokens=K, gguf=world.gguf.path)
        export_draft(find_engine("llama.cpp"), export, overwrite=False)
        with serving(world.gguf.path, draft=output / FILE, kind=TYPES["eagle3"]) as client:
            found = ask_doctor(world.folder.folder, draft, str(client.base_url), capsys)
        assert found[0] == status, found
        facts = found[1]["pair"]
        taus = [FACT.search(facts[name])[1] for name in ("acceptance", "forecast")]
        assert (taus[0] == taus[1]) == (status == 0)
        assert facts["text"].startswith("100.0%")
        assert facts["server"].endswith("llama.cpp of an unknown version")
    assert "differently from training" in found[1]["findings"][-1]["cure"]


def test_doctor_forecasts_on_the_text_of_a_quantised_target_in_llama_cpp(
    world: World,
    draft: Path,
    small_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    require_llama_cpp()
    folder = world.folder.folder
    gguf = write_gguf(tmp_path / "q8.gguf", folder, small_tokenizer, matrices="Q8_0")
    assert GgufTarget(gguf).quantised == ("Q8_0",)
    export = Export(pair=world.pair(draft), output=tmp_path / "d", num_tokens=K, gguf=gguf)
    export_draft(find_engine("llama.cpp"), export, overwrite=False)
    with serving(gguf, draft=tmp_path / "d" / FILE, kind=TYPES["eagle3"]) as client:
        status, found = ask_doctor(folder, draft, str(client.base_url), capsys)
    assert status == 0, found
    assert "quantised" in found["notes"][0]
    taus = [float(FACT.search(found["pair"][name])[1]) for name in ("acceptance", "forecast")]
    assert taus[0] == pytest.approx(taus[1], rel=0.03)


def answer_as_sglang(world: World, draft: Path) -> Any:
    """Answers of a server that reads the head as trained."""
    head = Eagle3.load(draft, world.borrowed)
    signal = InProcessTarget(world.model, head.aux_layer_ids)

    def answer(ids: Sequence[int], asked: Mapping[str, Any]) -> dict[str, Any]:
        length = asked["sampling_params"]["max_new_tokens"]
        assert asked["sampling_params"]["temperature"] == 0
        (text,) = generate_answers(
            world.model,
            [Prompt(token_ids=list(ids))],
            max_tokens=length,
            num_speculative_tokens=K,
            end_ids=(2, 3),
        )
        counts = forecast(head.eval(), signal, [text], K).per_prompt[0].counts
        info = {
            "completion_tokens": len(text.output_ids),
            "spec_verify_ct": counts.num_drafts,
            "spec_num_correct_drafts": counts.num_accepted,
            "spec_num_proposed_drafts": counts.num_drafts * K,
        }
        return {"text": "", "output_ids": text.output_ids, "meta_info": info}

    return answer


@pytest.mark.parametrize(("version", "doubts"), [("0.5.23", 0), ("0.7.1", 1)])
def test_doctor_reads_sglangs_counts_and_names_an_unknown_version(
    world: World,
    draft: Path,
    version: str,
    doubts: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with sglang_server(answer_as_sglang(world, draft), version) as url:
        status, found = ask_doctor(world.folder.folder, draft, url, capsys)
    assert status == 0, found
    assert [one["is_doubt"] for one in found["findings"]] == [True] * doubts
    assert all("rules are based on 0.5.23" in one["problem"] for one in found["findings"])
    facts = found["pair"]
    assert FACT.search(facts["acceptance"])[1] == FACT.search(facts["forecast"])[1]


def test_doctor_names_a_server_of_another_target(
    world: World, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    torch.manual_seed(5)
    type(world.model)(world.model.config).save_pretrained(other)
    world.folder.tokenizer.save_pretrained(other)
    with sglang_server(answer_as_sglang(world, draft)) as url:
        status, found = ask_doctor(other, draft, url, capsys)
    assert status == 1
    assert any("a different target" in one["problem"] for one in found["findings"])


def test_doctor_says_in_one_line_what_it_cannot_compare(
    world: World, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["doctor", "--target", str(world.folder.folder), "--draft", str(draft), "--url"]
    for address, told in (
        ("http://127.0.0.1:9", "stopped responding"),
        ("gpu1", "not the address"),
    ):
        assert dispatch([*args, address]) == 2
        said = capsys.readouterr().err.strip()
        assert told in said.splitlines()[-1]
    assert dispatch(["doctor", "--url", "http://127.0.0.1:9"]) == 2
    assert "set --target and --draft" in capsys.readouterr().err
    silent = {"text": "", "output_ids": [5, 6, 7], "meta_info": {"completion_tokens": 3}}
    with sglang_server(lambda ids, asked: silent) as url:
        assert dispatch([*args, url]) == 2
    assert "proposes no tokens" in capsys.readouterr().err
    # 1, 2, 2 and 2 tokens, as with --pace auto
    counts = {"spec_verify_ct": 4, "spec_num_correct_drafts": 2, "spec_num_proposed_drafts": 7}
    uneven = {"text": "", "output_ids": [5] * 7, "meta_info": {"completion_tokens": 7, **counts}}
    with sglang_server(lambda ids, asked: uneven) as url:
        assert dispatch([*args, url]) == 2
    assert "112 tokens in 64 steps, and not 2 in each" in capsys.readouterr().err


@pytest.mark.vllm
def test_doctor_reads_vllms_counters(
    engine_with_draft: VllmServer,
    served_pair: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, found = ask_doctor(*served_pair, engine_with_draft.url, capsys)
    facts = found["pair"]
    assert facts["server"].split(": ")[1].startswith("vllm 0.32")
    assert "of 3" in facts["acceptance"]
    assert status == 0, found
