"""What loading the data of a training tells.

Every row and answer that is not used, in both parts.
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from redraft.distill.data.conversations import read_conversation, split_held_out
from redraft.distill.run import proof as prove
from redraft.distill.run.inputs import load_data, load_target
from redraft.distill.run.training_run import run as run_training
from redraft.distill.train.loop import LoadedData
from redraft.distill.train.run_config import Data, Loop, Signal, make_config
from redraft.distill.train.run_folder import RunFolder
from redraft.engine.hardware import Machine
from redraft.engine.target_dtype import open_target
from redraft.files.checkpoint import load_tokenizer
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.nn.causal_lm import decoder_layers
from redraft.heads.options import Mtp
from tests.helpers.target_families import MOE, TINY

DAY = datetime.date(2024, 2, 29)


def load(
    source: Path, target: Path, folder: Path, *, is_head: bool = True, **changes: Any
) -> LoadedData:
    data = Data(
        source=str(source),
        **{"held_out": 0.5, "num_prompts": 3, "max_prompt_tokens": 90, **changes},
    )
    run = RunFolder(folder, Accelerator(cpu=True))
    run.date = DAY
    loop = Loop(sequence_length=96, batch_size=1)
    return load_data(data, TargetFolder.open(target), loop, run, is_head=is_head)


def ask(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def say(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def write_rows(path: Path, rows: list[dict[str, Any]], *more: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in [*map(json.dumps, rows), *more]))
    return path


def test_every_row_is_used_or_counted_in_both_parts(
    random_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = (
        "an answer of more than eighty characters stands word for word in more than one "
        "conversation of the file"
    )
    rows: list[dict[str, Any]] = [
        {"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(12)
    ]
    rows += [{"messages": [ask(f"nobody answered {i}")]} for i in range(4)]
    rows += [{"messages": [say(f"to nothing {i}"), ask("and"), say("so")]} for i in range(4)]
    rows += [{"messages": [ask(f"too long {i} " * 30), say("short")]} for i in range(4)]
    rows += [{"messages": [ask(f"short {i}"), say("too long " * 30)]} for i in range(4)]
    rows += [{"prompt": f"who copied {i}", "completion": copied} for i in range(4)]
    rows += [{"text": f"plain text {i}"} for i in range(4)]
    path = write_rows(
        tmp_path / "chat.jsonl", rows, '{"prompt": "torn', '{"prompt": true}', '{"title": "none"}'
    )
    data = load(path, random_target, tmp_path / "run")
    _, read, *parts = capsys.readouterr().out.splitlines()
    assert re.search(r"39 .*36 .*3 .*1 .*line 37.*1 .*line 38.*1 .*line 39", read)
    assert parts == [
        "held-out prompts: 3; left out: 1 plain texts, 1 longer than 90 tokens",
        "training: 18 conversations: 14 samples, 259 tokens (80 labels); 2 conversations without "
        "an assistant turn; "
        "4 opening answers with no question before them; 2 conversations with no answer inside the "
        "window; 10 labels beyond the window left out, 11.1% of all",
        "held out: 16 conversations: 12 samples, 607 tokens (447 labels); 2 conversations without "
        "an assistant turn; "
        "2 conversations with no answer inside the window; 3 answers cut at the window; "
        "310 labels beyond the window left out, 41.0% of all",
        "duplicates: 2 of 2 held-out answers also occur word for word in training; "
        "removed 2 conversations that contain them, and 0 repeated conversations",
    ]
    assert len(data.prompts) == 3


@pytest.mark.parametrize("is_head", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{"max_position_embeddings": 40}, {"model_type": "mistral", "sliding_window": 40}, {}],
)
def test_conversations_end_where_a_served_drafts_view_ends(
    changes: dict[str, Any],
    is_head: bool,
    random_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A head computes the window of the target's layers, so only positions end its texts."""
    target = Path(shutil.copytree(random_target, tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    rows = [{"prompt": f"question {i}", "completion": f"answer {i} " * 30} for i in range(8)]
    path = write_rows(tmp_path / "chat.jsonl", rows)
    data = load(path, target, tmp_path / "run", is_head=is_head)
    is_cut = bool(changes) and not (is_head and "sliding_window" in changes)
    said, length = capsys.readouterr().out, 40 if is_cut else 96
    assert (f"{length} tokens, because a draft" in said) == is_cut
    for part in (data.train, data.held_out):
        assert max(len(sample.input_ids) for sample in part.samples) == length
        batch = part.batch(0, batch_size=1)
        assert batch.input_ids_BT.shape == (1, 96)
        assert int(batch.position_ids_BT.max()) < length


def test_rows_end_inside_an_answer_on_request(random_target: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [ask(f"a {i}"), say("one"), ask("b"), say(f"two {i} " * 99)]} for i in range(8)
    ]
    path = write_rows(tmp_path / "chat.jsonl", rows)
    whole = load(path, random_target, tmp_path / "whole")
    cut = load(path, random_target, tmp_path / "cut", cut_answers=True)
    assert max(len(sample.input_ids) for sample in whole.train.samples) < 20
    assert {len(sample.input_ids) for sample in cut.train.samples} == {96}
    assert cut.stats.share_beyond < whole.stats.share_beyond


def test_a_padding_token_without_a_row_pads_nothing(random_target: Path, tmp_path: Path) -> None:
    late = Path(shutil.copytree(random_target, tmp_path / "target"))
    tokenizer = load_tokenizer(late)
    tokenizer.add_special_tokens({"pad_token": "[LATE]"})
    tokenizer.save_pretrained(late)
    num_rows = AutoConfig.from_pretrained(late).vocab_size
    assert load_tokenizer(late).pad_token_id >= num_rows
    rows = write_rows(
        tmp_path / "chat.jsonl", [{"prompt": f"question {i}", "completion": "so"} for i in range(8)]
    )
    usual, padded = (
        load(rows, target, tmp_path / name).train.batch(0, batch_size=1)
        for name, target in (("usual", random_target), ("late", late))
    )
    assert bool((padded.document_BT < 0).any())
    for name, values in vars(usual).items():
        other = getattr(padded, name)
        same = values is other or torch.equal(torch.as_tensor(values), torch.as_tensor(other))
        assert same, name
    with torch.no_grad():
        load_target(TargetFolder.open(late), Signal(), torch.device("cpu"))(padded.input_ids_BT)


def test_prompts_of_a_file_replace_those_of_the_held_out_part_and_are_never_trained_on(
    random_target: Path, tmp_path: Path
) -> None:
    rows = [{"messages": [ask(f"question {n}"), say(f"answer {n}")]} for n in range(40)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    # One question is new, one is trained on otherwise.
    asked = write_rows(
        tmp_path / "asked.jsonl",
        [{"messages": [ask("a question of my own")]}, {"messages": [rows[0]["messages"][0]]}],
    )
    usual = load(source, random_target, tmp_path / "usual", held_out=0.2)
    mine = load(source, random_target, tmp_path / "mine", held_out=0.2, prompts=str(asked))
    tokenizer = load_tokenizer(str(random_target))
    texts = sorted(tokenizer.decode(prompt.token_ids) for prompt in mine.prompts)
    assert len(texts) == 2
    assert any("a question of my own" in text for text in texts)
    assert any("question 0" in text for text in texts)
    assert len(mine.prompts) != len(usual.prompts)
    trained = [tokenizer.decode(sample.input_ids) for sample in mine.train.samples]
    assert not any("question 0" in text for text in trained)


def test_a_held_out_part_without_an_answer_is_named(random_target: Path, tmp_path: Path) -> None:
    """All held-out rows are questions only: nothing is wrong with the training part."""
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(8)]
    _, held_out = split_held_out([read_conversation(row) for row in rows], 0.5)
    questions = {conversation["messages"][0]["content"] for conversation in held_out}
    unanswered = [
        row if row["prompt"] not in questions else {"prompt": row["prompt"]} for row in rows
    ]
    path = write_rows(tmp_path / "chat.jsonl", unanswered)
    said = rf"held out.*\b{len(questions)} conversations: 0 samples"
    with pytest.raises(ValueError, match=said):
        load(path, random_target, tmp_path / "run")


def test_texts_that_are_not_read_are_told(
    random_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"plain text {i}")
    (folder / "blank.md").write_text("\n")
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(8)]
    with pytest.raises(ValueError, match=r"plain texts.*\bprompts FILE"):
        load(folder, random_target, tmp_path / "run")
    *_, said = capsys.readouterr().out.splitlines()
    assert said == f"{folder}: 9 rows read, 8 used, 1 skipped: 1 without text (first: blank.md)"
    write_rows(folder / "rows.jsonl", rows)
    load(folder, random_target, tmp_path / "run")
    assert f"{folder}: files not read: 8 .txt, 1 .md" in capsys.readouterr().out


def test_a_target_computes_in_the_type_asked_for(random_target: Path) -> None:
    cpu = torch.device("cpu")
    for dtype in ("float32", "bfloat16"):
        target = open_target(random_target, dtype, on_cpu=True)
        assert load_target(target, Signal(), cpu).dtype == getattr(torch, dtype)


@pytest.mark.parametrize("computes", [True, False])
def test_a_target_stored_in_bfloat16_computes_in_it_on_a_cpu_that_can(
    computes: bool, random_target: Path, tmp_path: Path
) -> None:
    machine = Machine(cpu_has_bfloat16=computes)
    stored, cpu = tmp_path / "target", torch.device("cpu")
    AutoModelForCausalLM.from_pretrained(random_target, dtype=torch.bfloat16).save_pretrained(
        stored
    )
    load_tokenizer(random_target).save_pretrained(stored)
    chosen = torch.bfloat16 if computes else torch.float32
    served = Signal(kind="endpoint", url=("http://t1:8001",))
    for signal in (Signal(), served):
        model = load_target(open_target(stored, on_cpu=True, machine=machine), signal, cpu)
        assert model.dtype == chosen
        assert prove._computed_in(model) == (
            None if signal.url else str(chosen).removeprefix("torch.")
        )
        assert (
            load_target(open_target(stored, "float32", on_cpu=True), signal, cpu).dtype
            == torch.float32
        )
    assert open_target(stored, on_cpu=False).torch_dtype is None, "as stored"


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "modelopt"])
def test_a_quantised_target_is_refused_with_the_cure(
    method: str, random_target: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(random_target, tmp_path / "target"))
    config = json.loads((folder / "config.json").read_text())
    key = "quant_algo" if method == "modelopt" else "quant_method"
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {key: method}})
    )
    with pytest.raises(ValueError, match=rf"\({method}\).*--signal\.kind") as refused:
        load_target(TargetFolder.open(folder), Signal(), torch.device("cpu"))
    assert "\n" not in str(refused.value)
    served = Signal(kind="endpoint", url=("http://t1:8001",))
    assert (
        load_target(TargetFolder.open(folder), served, torch.device("cpu")).lm_head.weight.shape[1]
        == 64
    )
    mtp = find_family("mtp")
    cfg = replace(
        make_config(mtp),
        target=str(folder),
        head=Mtp(num_steps=4, as_mimo=True),
        output=tmp_path / "run",
    )
    eagle1 = find_family("eagle1")
    asked = replace(make_config(eagle1), target=str(folder), signal=served, output=tmp_path / "run")
    with pytest.raises(ValueError, match=rf"\({method}\).*--prove\.no-engine"):
        run_training(eagle1, asked)
    with pytest.raises(ValueError, match=rf"MTP.*{folder}.*\({method}\)"):
        run_training(mtp, cfg)
    assert not (tmp_path / "run").exists()


def test_a_target_without_sdpa_attention_is_loaded_whole_or_as_a_skeleton(
    random_target: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", **{**TINY, **MOE, "vocab_size": 512})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in random_target.glob("*token*"):
        shutil.copy(file, tmp_path)
    whole = load_target(TargetFolder.open(tmp_path), Signal(), torch.device("cpu"))
    assert not any(p.is_meta for p in whole.parameters())
    served = Signal(kind="endpoint", url=("http://t1:8001",))
    skeleton = load_target(TargetFolder.open(tmp_path), served, torch.device("cpu"))
    assert not skeleton.base_model.norm.weight.is_meta
    assert all(p.is_meta for p in skeleton.base_model.layers.parameters())


def test_a_config_without_a_language_model_is_refused_in_a_line(
    random_target: Path, tmp_path: Path
) -> None:
    AutoConfig.for_model("siglip_vision_model").save_pretrained(tmp_path)
    for file in random_target.glob("*token*"):
        shutil.copy(file, tmp_path)
    for signal in (Signal(), Signal(kind="endpoint", url=("http://t1:8001",))):
        with pytest.raises(ValueError, match="SiglipVisionConfig") as refused:
            load_target(TargetFolder.open(tmp_path), signal, torch.device("cpu"))
        assert "\n" not in str(refused.value)


def test_a_target_without_layers_to_read_is_refused_with_what_it_can_train() -> None:
    with torch.device("meta"):
        gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=2))
    with pytest.raises(ValueError, match=r"gpt2.*`layers`.*standalone"):
        decoder_layers(gpt2)


def test_answers_to_one_question_are_named(tmp_path: Path, random_target: Path) -> None:
    rows = [{"messages": [ask("Write a poem."), say(f"Poem {i}.")]} for i in range(9)]
    for source, match in (
        (write_rows(tmp_path / "one.jsonl", rows), r"all 9 conversations .*question"),
        (
            write_rows(tmp_path / "two.jsonl", rows[:1]),
            r"1 first questions.*--data\.held-out",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            load(source, random_target, tmp_path)


def test_a_target_with_values_that_are_not_finite_is_named(
    tmp_path: Path, random_target: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_target)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    folder = tmp_path / "target"
    shutil.copytree(random_target, folder)
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match=rf"{folder} .*layers\.1\.mlp\.up_proj\.weight"):
        load_target(TargetFolder.open(folder), Signal(), torch.device("cpu"))
