"""The reference decoder: it writes the target's greedy text, with the counts of the forecast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from redraft.distill.signal.sources import InProcessTarget
from redraft.eval.forecast.greedy import forecast, greedy_continuations
from redraft.eval.forecast.reference import TargetReader, measure_by_reference
from redraft.eval.prompts import Prompt
from redraft.heads.families import eagle1, medusa, mlp_speculator
from redraft.heads.target import Target

K = 3
HEADS: dict[str, Any] = {
    "medusa": lambda target: medusa.Medusa(medusa.Config(num_heads=K), target),
    "mlp_speculator": lambda target: mlp_speculator.MLPSpeculator(mlp_speculator.Config(num_stages=K), target),
    "eagle1": lambda target: eagle1.Eagle1(eagle1.Config(num_steps=K), target),
}


@pytest.fixture(scope="module")
def model(random_target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(random_target).eval()


@pytest.fixture(scope="module")
def continuations(model: Any) -> Any:
    prompts = [Prompt(token_ids=list(range(3, 3 + n)), domain=f"{n % 2}") for n in (2, 9, 30)]
    return greedy_continuations(model, prompts, max_tokens=24, num_speculative_tokens=K, end_ids=[2])


@pytest.mark.parametrize("name", HEADS)
def test_it_writes_the_targets_own_text_and_accepts_as_forecast(name: str, model: Any, continuations: Any) -> None:
    torch.manual_seed(0)
    head = HEADS[name](Target.from_model(model)).eval()
    measured = measure_by_reference(model, head, continuations, K)
    assert [output.token_ids for output in measured.outputs] == [known.output_ids for known in continuations]
    told = forecast(head, InProcessTarget(model), continuations, K)
    assert [output.counts for output in measured.outputs] == [prompt.counts for prompt in told.per_prompt]


def test_without_a_head_it_writes_the_same(model: Any, continuations: Any) -> None:
    measured = measure_by_reference(model, None, continuations, K)
    assert [output.token_ids for output in measured.outputs] == [known.output_ids for known in continuations]
    assert measured.counts is None


def test_a_reader_that_branches_reads_what_a_whole_pass_reads(model: Any) -> None:
    reader, signal = TargetReader(model), InProcessTarget(model)
    for ids in ([5, 6, 7], [5, 6, 7, 8, 9], [5, 6, 10, 11], [5, 6], [12, 13, 14, 15, 16]):
        ids_BT = torch.tensor([ids])
        whole_BTD = signal._hidden(ids_BT, torch.arange(len(ids))[None], torch.zeros_like(ids_BT))
        torch.testing.assert_close(reader.hidden(ids), whole_BTD[0], atol=1e-4, rtol=1e-4)
        logits_V = model(input_ids=torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(reader.next_logits(ids), logits_V, atol=1e-3, rtol=1e-3)
