"""provenance.json of an earlier and of a later release is read.

A corrupt one is named in one line.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from redraft.files.artifact import publish
from redraft.heads.options import Standalone
from redraft.heads.provenance import Data, Provenance, read_provenance

TRAINED = {
    "command": ["redraft", "train"],
    "config": {
        "target": "org/target",
        "data": {
            "source": "answers.jsonl",
            "split": "train",
            "held_out": 0.02,
            "max_prompt_tokens": 512,
        },
        "loop": {"steps": 3, "sequence_length": 128},
        "prove": {"num_speculative_tokens": 4},
        "draft": {"checkpoint": None, "layers": [0, 29], "num_layers": None, "hidden_size": 512},
    },
    "date": "2026-11-28",
    "template_arguments": {"enable_thinking": False},
    "target": "org/target",
    "target_fingerprint": "ab" * 32,
    "target_lineage": "cd" * 32,
    "label_probe": {"input_ids": [1, 2, 3], "labels": [2]},
    "metrics": [{"step": 2, "held_out_tau": 2.5}, {"step": 3, "loss": float("nan")}],
}


def published(folder: Path, content: dict[str, Any]) -> Provenance:
    publish(folder / "draft", lambda partial: None, content)
    return read_provenance(folder / "draft")


def test_what_a_training_publishes_is_read(tmp_path: Path) -> None:
    made = published(tmp_path, TRAINED)
    assert (made.target, made.target_fingerprint, made.target_lineage) == (
        "org/target",
        "ab" * 32,
        "cd" * 32,
    )
    assert made.config.data == Data(
        source="answers.jsonl", split="train", held_out=0.02, max_prompt_tokens=512
    )
    assert made.config.draft == Standalone(layers=(0, 29))
    assert (made.config.loop.sequence_length, made.config.prove.num_speculative_tokens) == (128, 4)
    assert (made.date, made.template_arguments) == ("2026-11-28", {"enable_thinking": False})
    assert made.label_probe == {"input_ids": [1, 2, 3], "labels": [2]}
    assert made.metrics[0]["held_out_tau"] == 2.5
    assert math.isnan(made.metrics[1]["loss"]), "a loss that was not finite is no damage"


def test_keys_of_a_later_release_are_passed_over(tmp_path: Path) -> None:
    later: dict[str, Any] = json.loads(json.dumps(TRAINED | {"mood": {"good": True}}))
    for section in ("data", "loop", "prove", "draft"):
        later["config"][section]["mood"] = "good"
    later["config"]["mood"] = "good"
    assert repr(published(tmp_path / "later", later)) == repr(published(tmp_path / "now", TRAINED))


def test_keys_that_an_earlier_release_did_not_write_have_a_default(tmp_path: Path) -> None:
    everything = Provenance()
    for key in (
        "target",
        "target_lineage",
        "config",
        "date",
        "template_arguments",
        "label_probe",
        "metrics",
    ):
        made = published(
            tmp_path / key, {name: value for name, value in TRAINED.items() if name != key}
        )
        assert getattr(made, key) == getattr(everything, key)
        assert made.target_fingerprint == "ab" * 32
    earlier = published(tmp_path / "sections", {"config": {"data": {"source": "answers.jsonl"}}})
    assert earlier.config.data == Data(
        source="answers.jsonl", split="train_sft", held_out=0.01, max_prompt_tokens=1024
    )
    assert (earlier.config.loop.sequence_length, earlier.config.prove.num_speculative_tokens) == (
        None,
        None,
    )
    assert earlier.trained_through == math.inf, (
        "a version that does not say how far it learned may know every record"
    )
    (tmp_path / "plain").mkdir()
    assert read_provenance(tmp_path / "plain") == everything == published(tmp_path / "empty", {})


def test_a_lineage_is_named_only_if_both_are_known(tmp_path: Path) -> None:
    made = published(tmp_path, TRAINED)
    assert made.names_lineage("cd" * 32)
    assert not made.names_lineage("ab" * 32)
    assert not Provenance().names_lineage("")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("{", ""),
        ("[]", "got `array`"),
        (100_000 * "[", "recursion"),
        ('{"target": 3}', "$.target"),
        ('{"config": {"loop": {"sequence_length": "long"}}}', "$.config.loop.sequence_length"),
        ('{"config": {"draft": {"layers": [1], "num_layers": 2}}}', "$.config.draft"),
        ('{"trained_through": "yesterday"}', "$.trained_through"),
    ],
)
def test_a_corrupt_file_is_named_in_one_line(tmp_path: Path, content: str, place: str) -> None:
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(ValueError, match=r"provenance\.json\b") as failed:
        read_provenance(tmp_path)
    assert place in str(failed.value)
    assert len(str(failed.value).splitlines()) == 1
