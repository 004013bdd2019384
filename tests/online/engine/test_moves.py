"""A target whose weights move under a real vLLM: answers, names of the weights, and records."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from real_server import join_segments
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.online.records.record import read_frames
from redraft.online.records.spool import spool_files

NUM_TOKENS = 24


@pytest.fixture
def targets(random_target, tmp_path):
    """Two targets with tied embeddings.

    The second has its table rolled by a row, which changes every answer.
    """
    config = LlamaConfig.from_pretrained(random_target, tie_word_embeddings=True)
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        model.save_pretrained(folder)
        table = model.get_input_embeddings().weight
        table.data = table.data.roll(1, 0)
    return folders


def make_torn(target):
    """The target in two files, of which the second ends too early."""
    folder = target.parent / "torn"
    folder.mkdir()
    shutil.copy(target / "config.json", folder)
    tensors = load_file(target / "model.safetensors")
    names = sorted(tensors)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    content = (folder / "model-1.safetensors").read_bytes()
    (folder / "model-1.safetensors").write_bytes(content[:-100])
    return folder


def make_bad(target, name):
    """Weights that no engine may serve: a part of the target, or all with a fault."""
    tensors = load_file(target / "model.safetensors")
    (folder := target.parent / name).mkdir()
    shutil.copy(target / "config.json", folder)
    if name == "partial":
        tensors = {key: tensor for key, tensor in tensors.items() if "down_proj" in key}
    elif name == "short":  # of a layer that vLLM merges with another
        tensors = {
            key: tensor[:-1].contiguous() if "up_proj" in key else tensor
            for key, tensor in tensors.items()
        }
    else:
        tensors = {key: torch.full_like(tensor, torch.nan) for key, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.mark.vllm
@pytest.mark.slow
def test_answers_names_and_records_follow_the_weights(targets, registry, tmp_path):
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(20, 400, (6, 12), generator=generator)
    expected, models = [], []
    for folder in targets:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        models.append(model)
        texts = model.generate(
            prompts, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        expected.append(texts[:, prompts.shape[1] :].tolist())
    assert all(old != new for old, new in zip(*expected, strict=True))
    torn = make_torn(targets[1])
    spec = {
        "targets": [str(folder) for folder in targets],
        "draft": str(registry / "v000002"),
        "next_draft": str(registry / "v000003"),
        "torn": str(torn),
        **{name: make_bad(targets[1], name) for name in ("partial", "short", "nan")},
        "folders": f"{tmp_path}:{registry}",
        "spool": str(tmp_path / "spool"),
        "prompts": prompts.tolist(),
    }
    script = Path(__file__).parents[2] / "helpers/run_moves.py"
    result = subprocess.run(
        [sys.executable, script, json.dumps(spec)], capture_output=True, text=True, timeout=900
    )
    line = next((line for line in result.stdout.splitlines() if line.startswith("REPORT")), None)
    assert line, result.stderr[-3000:]
    reports = json.loads(line.removeprefix("REPORT"))
    # vLLM's own reload leaves the packed head as it was: then no answer of the new target is right
    for report in reports:
        if report["expected"] >= 0:
            assert report["outputs"] == expected[report["expected"]], report["move"]
    versions = {report["move"]: report["version"] for report in reports}
    digest = versions["reload"]
    assert digest.startswith("@")
    assert versions == {
        "start": "", "reload": digest, "name": f"step_17{digest}", "return": "", "copy": digest,
        "together": "", "no spool": "", "no torn": "", "torn": None, "again": f"step_19{digest}",
        "awake": f"awake{digest}", "pushed": f"push_99{digest}",
        "begun": None, "finished": "", "no part": "", "no partial": "", "no short": "", "no nan": "",
        "short": None, "after short": "", "nan": None, "after nan": "", "no nan folder": "",
        "whole": "", "draft": "", "draft of before": "",
    }  # fmt: skip
    assert [report["draft"] for report in reports] == ["start"] * 5 + ["v000003"] * 19 + [
        "pushed-1",
        "v000003",
    ]
    # The oracle of a record is the target that it names: the most probable token of each row of its
    # text.
    everything = [
        record
        for path in spool_files(Path(spec["spool"]))
        for _, record in read_frames(path.read_bytes())
    ]
    records = [record for record in everything if not record.request_id.startswith("pushed-")]
    assert {record.target_version for record in records} == set(versions.values()) - {None}
    for record in records:
        answers = dict(
            zip(map(tuple, prompts.tolist()), expected[record.target_version != ""], strict=True)
        )
        text = np.concatenate([record.context_ids, record.output_ids]).tolist()
        is_text = record.branches == 0
        answer = answers[tuple(text[:12])]
        wanted = [
            answer[position - 12]
            for position in record.positions[is_text]
            if position - 12 < NUM_TOKENS
        ]
        assert record.topk_ids[is_text, 0].tolist()[: len(wanted)] == wanted
    pushed = sorted(
        set(everything) - set(records), key=lambda record: (record.request_id, record.sequence)
    )
    assert len({record.target_version for record in pushed}) > 40
    right, swapped = [], []
    for record in join_segments(pushed):
        is_new = record.target_version != ""
        right += compare(record, models[is_new])
        swapped += compare(record, models[not is_new])
    assert len(right) > 100
    assert sum(right) >= 0.99 * len(right)
    assert sum(swapped) < 0.1 * len(swapped)


@torch.no_grad()
def compare(record, model):
    """For each row of the text, whether the model's most probable token is the recorded one."""
    text = torch.tensor([[*record.context_ids.tolist(), *record.output_ids.tolist()]])
    is_text = record.branches == 0
    most_probable = (
        model(text).logits[0].argmax(-1)[torch.tensor(record.positions[is_text].tolist()) - 1]
    )
    return (most_probable == torch.tensor(record.topk_ids[is_text, 0].tolist())).tolist()
