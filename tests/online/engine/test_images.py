"""Capture, swap and learning beside a target of text and images.

One of attention, and one with delta nets.
"""

import json
import subprocess
import sys
from pathlib import Path

import model_runners
import numpy as np
import pytest
import torch

from redraft.files.checkpoint import load_config
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.config import Training
from redraft.online.records.record import read_frames
from redraft.online.records.spool import spool_files

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("fresh_accelerator")]

TARGETS = {"qwen3_vl": "float32", "qwen3_5": "bfloat16"}
"""Type by model type. vLLM's CPU kernels of delta nets take bfloat16 only."""
ROUNDED = 0.004  # recorded states are in bfloat16


@pytest.fixture(scope="module", params=TARGETS)
def served(request, small_tokenizer, tmp_path_factory):
    """The report of `run_images.py`, and its folder."""
    dtype = TARGETS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    small_tokenizer.save_pretrained(folder / "tokenizer")
    spec = {
        "model_type": request.param,
        "dtype": dtype,
        "folder": str(folder),
        "tokenizer": str(folder / "tokenizer"),
    }
    script = Path(__file__).parents[2] / "helpers/run_images.py"
    done = subprocess.run(
        [sys.executable, script, json.dumps(spec)],
        capture_output=True, text=True, timeout=2400, env=model_runners.with_torchvision(),
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("REPORT")), None)
    assert line, done.stderr[-4000:]
    return json.loads(line.removeprefix("REPORT")), folder


def read_records(folder):
    frames = [
        frame
        for path in spool_files(folder / "records")
        for frame in read_frames(path.read_bytes())
    ]
    return [record for _, record in frames]


def test_answers_are_those_of_transformers_before_and_after_a_swap(served):
    """Answers about images are exact.

    In bfloat16 the engine may be as far from float32 as transformers in bfloat16, or twice as far,
    for the token answered and for the best.
    """
    report, folder = served
    assert report["result"]["ok"], report["result"]
    assert report["status"]["target_intact"]
    texts = torch.load(folder / "texts.pt", weights_only=True)
    assert len(texts) == 6
    for text in texts:
        assert float(text["behind_N"].max()) <= 1e-3 + 4 * float(text["apart"])
    if not any(float(text["apart"]) for text in texts):
        before, after = report["answers"]
        assert before == after


def test_states_are_recorded_from_the_first_token_after_the_last_image(served):
    report, folder = served
    counts = report["status"]["capture"]
    assert counts["captured_requests"] == 6
    assert not [
        name for name in counts if name.startswith(("errors", "broken", "skipped")) and counts[name]
    ], counts
    config = load_config(folder / "target")
    texts = {
        tuple(text["ids"].tolist()): text
        for text in torch.load(folder / "texts.pt", weights_only=True)
    }
    begins = []
    for record in read_records(folder):
        ids = np.concatenate([record.context_ids, record.output_ids])
        images = np.flatnonzero(ids == config.image_token_id)
        begins.append(record.hidden_begin)
        assert record.hidden_begin == (images[-1] + 1 if len(images) else 0)
        states_HLD = (
            torch.from_numpy(record.hidden_words.astype(np.int16)).view(torch.bfloat16).float()
        )
        text = texts[tuple(ids.tolist())]
        wanted_HLD = text["states_TLD"][record.hidden_begin :][: len(states_HLD)]
        assert len(wanted_HLD) == len(states_HLD) > 20
        for layer in range(wanted_HLD.shape[1]):
            apart = (states_HLD[:, layer] - wanted_HLD[:, layer]).norm() / wanted_HLD[
                :, layer
            ].norm()
            assert apart < ROUNDED + 2 * text["apart_L"][layer], layer
    assert len(begins) == 6
    assert len(set(begins)) == 3


def test_the_head_learns_from_these_records(served):
    _, folder = served
    records = read_records(folder)
    candidate = Candidate(
        Training(lr=3e-3, warmup_steps=1, sequence_length=128), "eagle3", folder / "target"
    )
    candidate.begin(folder / "second")
    losses = [float(candidate.step(records, seed).loss) for seed in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    candidate.write(folder / "checkpoint")
    assert candidate.load(folder / "checkpoint/draft") is not None
