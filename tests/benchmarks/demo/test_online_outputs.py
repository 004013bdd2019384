"""Received tokens beside the target's greedy ones, in float32 and in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.demo.online_outputs import Text, compare_with_target, spread
from benchmarks.demo.online_report import describe_outputs
from redraft.files.checkpoint import load_causal_lm

PROMPT = [5, 6, 7, 8, 9]


def answer_greedily(model: object, prompt: list[int], count: int = 16) -> Text:
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))  # type: ignore[operator]
    return prompt, ids[len(prompt) :]


def test_greedy_answers_of_a_float32_target_are_lossless_and_another_token_is_not(
    random_target: Path,
) -> None:
    target = load_causal_lm(random_target, torch.float32).eval()
    texts = [answer_greedily(target, [first, *PROMPT]) for first in range(20, 24)]
    found = compare_with_target(texts, target, target)
    assert (found["answers"], found["parted"], found["lossless"]) == (4, 0, True)
    assert found["target_alone"] == {"parted": 0, "widest_gap": 0.0}
    assert describe_outputs(found, "float32") == "lossless: True"

    prompt, answer = texts[0]
    wrong = [*answer[:-1], (answer[-1] + 1) % 512]
    found = compare_with_target([(prompt, wrong), *texts[1:]], target, target)
    assert (found["parted"], found["lossless"]) == (1, False)
    assert found["widest_gap"] > found["tie_gap"] == pytest.approx(1e-3)


def test_in_bfloat16_the_targets_own_rounding_is_told_and_an_error_is_still_one(
    random_target: Path,
) -> None:
    target, exact = (
        load_causal_lm(random_target, dtype).eval() for dtype in (torch.bfloat16, torch.float32)
    )
    # As an engine in bfloat16 answers: some of these tokens are not the best ones in float32.
    texts = [answer_greedily(target, [first, *PROMPT], count=48) for first in range(20, 36)]
    found = compare_with_target(texts, target, exact)
    alone = found["target_alone"]
    assert found["parted"] > 0, "rounding must show, or the test says nothing"
    assert alone["parted"] > 0
    assert found["lossless"]
    assert found["tie_gap"] == max(2 * alone["widest_gap"], 0.25)
    said = describe_outputs(found, "bfloat16")
    assert f"{found['parted']} of 16 answers part from the target in float32, by up to" in said
    assert f"the target in bfloat16 alone in {alone['parted']}" in said

    prompt, answer = texts[0]
    found = compare_with_target([(prompt, [(token + 1) % 512 for token in answer])], target, exact)
    assert not found["lossless"]


def test_no_more_answers_than_asked_for_are_compared_and_they_are_spread() -> None:
    texts: list[Text] = [([number], [number]) for number in range(10)]
    assert [prompt for prompt, _ in spread(texts, 4)] == [[0], [3], [6], [9]]
    assert spread(texts, 10) == spread(texts, 5000) == texts
    assert spread([], 3) == []
