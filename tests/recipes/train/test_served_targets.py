"""Heads for targets of other architectures than Llama.

They go from the training to the swap in the real vLLM.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from swapping import run_engines
from transformers import PreTrainedTokenizerFast

from benchmarks.studies.presets import make_preset
from redraft.distill.run.training_run import run as train
from redraft.distill.train.run_config import Loop
from redraft.files.checkpoint import load_causal_lm
from redraft.heads.catalog import find_family
from redraft.heads.families import eagle3
from redraft.heads.target import Target
from tests.helpers.served_targets import SERVED, save_served_target

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.usefixtures("fresh_accelerator")]


@pytest.mark.parametrize("model_type", SERVED)
def test_a_head_is_trained_proven_and_swapped_beside_its_target(
    model_type: str,
    small_tokenizer: PreTrainedTokenizerFast,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, run = (
        save_served_target(model_type, tmp_path / "target", small_tokenizer),
        tmp_path / "run",
    )
    demo: Any = make_preset("eagle3")
    settings = replace(
        demo,
        target=str(target),
        head=replace(demo.head, aux_layer_ids=(1, 2, 3), own_head=False, num_steps=3),
        draft_vocab_size=0,
        data=replace(
            demo.data, source=str(data), held_out=0.2, num_prompts=4, max_prompt_tokens=128
        ),
        prove=replace(demo.prove, max_tokens=16),
        loop=Loop(steps=8, batch_size=2, sequence_length=128, eval_every=8, eval_batches=1),
        output=run,
        mixed_precision="no",
    )
    train(find_family("eagle3"), settings)
    assert ("one document per row" in capsys.readouterr().out) == (model_type == "gpt_oss")
    report = json.loads((run / "report.json").read_text())
    assert report["engine"]["lossless"]
    assert report["engine"]["tau"] == pytest.approx(report["offline"]["tau_forecast"], abs=1e-6)

    # another head of the same layout, to swap to and back
    torch.manual_seed(1)
    model = load_causal_lm(target, torch.float32)
    other = eagle3.Eagle3(settings.head, Target.from_model(model))
    other.export(tmp_path / "other")
    spec = {
        "target": str(target),
        "method": "eagle3",
        "speculative": find_family("eagle3").speculative,
    }
    heads = [str(run / "draft"), str(tmp_path / "other")]
    (start, forth, back), (fresh,) = run_engines(
        [
            {**spec, "draft": heads[0], "swaps": [["load", heads[1]], ["load", heads[0]]]},
            {**spec, "draft": heads[1], "swaps": []},
        ],
        "v1",
    )
    for swapped in (forth, back):
        assert swapped["result"]["ok"], swapped["result"]
        assert swapped["status"]["target_intact"]
    assert start["output"] == forth["output"] == back["output"] == fresh["output"]
    assert forth["drafted"] == fresh["drafted"]
    assert back["drafted"] == start["drafted"]
