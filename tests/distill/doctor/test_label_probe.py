"""The labels of a conversation that never changes.

Recorded in training, made again where the draft is served.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from redraft.distill.doctor.label_probe import PROBE, compare_probes, label_probe


def test_the_labels_of_the_probe_are_the_answer_and_its_end(small_tokenizer: Any) -> None:
    probe = label_probe(small_tokenizer)
    assert probe is not None
    labelled = small_tokenizer.decode([probe["input_ids"][i] for i in probe["labels"]])
    assert labelled == f"{PROBE['messages'][1]['content']}<|end|>"
    prompt = small_tokenizer.apply_chat_template(
        PROBE["messages"][:1], add_generation_prompt=True, tokenize=False
    )
    assert probe["labels"][0] == len(small_tokenizer(prompt, add_special_tokens=False)["input_ids"])
    assert label_probe(copy.deepcopy(small_tokenizer)) == json.loads(json.dumps(probe))
    assert list(compare_probes(probe, probe)) == []


@pytest.mark.parametrize(("by", "side"), [(1, "1 tokens late"), (-2, "2 tokens early")])
def test_a_shifted_mask_is_named(by: int, side: str, small_tokenizer: Any) -> None:
    served = label_probe(small_tokenizer)
    assert served is not None
    (finding,) = compare_probes({**served, "labels": [i + by for i in served["labels"]]}, served)
    assert re.search(rf"loss mask\b.*\b{side}", finding.problem)
    assert "assistant" in finding.cure


def test_a_mask_without_the_end_of_turn_is_named(small_tokenizer: Any) -> None:
    served = label_probe(small_tokenizer)
    assert served is not None
    (finding,) = compare_probes({**served, "labels": served["labels"][:-1]}, served)
    assert "cover" in finding.problem


def test_another_chat_template_is_named(small_tokenizer: Any) -> None:
    trained, other = label_probe(small_tokenizer), copy.deepcopy(small_tokenizer)
    other.chat_template = other.chat_template.replace("<|end|>", "<|end|>\n")
    served = label_probe(other)
    assert trained is not None
    assert served is not None
    (finding,) = compare_probes(trained, served)
    assert "chat template or tokenizer" in finding.problem


def test_a_tokenizer_without_a_template_has_no_probe(small_tokenizer: Any) -> None:
    plain = copy.deepcopy(small_tokenizer)
    plain.chat_template = None
    assert label_probe(plain) is None


def test_a_template_that_does_not_render_the_probe_has_none(small_tokenizer: Any) -> None:
    """It is found after training, which may have been on other conversations or plain text."""
    strict = copy.deepcopy(small_tokenizer)
    strict.chat_template = "{{ raise_exception('a system prompt is needed') }}"
    assert label_probe(strict) is None
