"""The sampling that a server takes from the target's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.sampling import (
    GREEDY,
    Sampling,
    choose_sampling,
    list_penalties,
    read_defaults,
    read_sampling,
)


def write_config(folder: Path, **config: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "read"),
    [
        ({}, Sampling()),
        (
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
            Sampling(temperature=0.7, top_p=0.8, top_k=20),
        ),
        ({"temperature": 0.0}, GREEDY),
        (
            {"temperature": None, "top_k": -1, "min_p": 0.05, "eos_token_id": 2},
            Sampling(min_p=0.05),
        ),
    ],
)
def test_what_the_folder_does_not_say_is_vllms_default(
    tmp_path: Path, config: dict[str, Any], read: Sampling
) -> None:
    assert read_sampling(write_config(tmp_path, **config)) == read


def test_a_folder_without_generation_config_samples_from_the_whole_vocabulary(
    tmp_path: Path,
) -> None:
    assert read_sampling(tmp_path) == Sampling()
    assert list_penalties(tmp_path) == {}


def test_a_given_parameter_takes_the_place_of_the_targets(tmp_path: Path) -> None:
    folder = write_config(tmp_path, temperature=0.7, top_p=0.8, top_k=20)
    assert choose_sampling(folder, top_k=0, temperature=0.0) == Sampling(temperature=0.0, top_p=0.8)


def test_penalties_are_named_unless_they_change_nothing(tmp_path: Path) -> None:
    folder = write_config(tmp_path, repetition_penalty=1.05, presence_penalty=0.0)
    assert list_penalties(folder) == {"repetition_penalty": 1.05}
    assert read_defaults(folder)["repetition_penalty"] == 1.05


def test_a_target_of_the_hub_is_read_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, files in (("with", {"temperature": 0.6}), ("without", None)):
        model = tmp_path / f"models--owner--{name}"
        (model / "refs").mkdir(parents=True)
        (model / "refs/main").write_text("0" * 40)
        (model / "snapshots" / ("0" * 40)).mkdir(parents=True)
        (model / "snapshots" / ("0" * 40) / "config.json").write_text("{}")
        if files:
            write_config(model / "snapshots" / ("0" * 40), **files)
    assert read_sampling("owner/with") == Sampling(temperature=0.6)
    assert read_sampling("owner/without") == Sampling()
    with pytest.raises(FileNotFoundError, match="owner/absent"):
        read_sampling("owner/absent")


def test_a_sampling_in_words_names_what_changes_something() -> None:
    assert (
        Sampling(temperature=0.7, top_p=0.8, top_k=20).words
        == "temperature 0.7, top_p 0.8, top_k 20"
    )
    assert Sampling().words == "temperature 1"
    assert Sampling(temperature=0.0, top_p=0.8).words == "temperature 0", (
        "filters change nothing there"
    )


@pytest.mark.parametrize("config", [{"top_p": 0}, {"temperature": -1}, {"min_p": 2}])
def test_a_value_that_no_engine_takes_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        read_sampling(write_config(tmp_path, **config))


def test_vllm_serves_tiny_temperatures_higher_and_no_filter_at_zero() -> None:
    assert Sampling(top_k=5).at(1e-4) == Sampling(temperature=0.01, top_k=5)
    assert Sampling(top_k=5).at(0) == GREEDY


@pytest.mark.vllm
@pytest.mark.parametrize(
    "config",
    [{}, {"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"top_k": 50, "min_p": 0.1}],
)
def test_vllm_reads_the_same_defaults(
    tiny_target: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    from vllm.config import ModelConfig

    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    write_config(folder, **config)
    read = ModelConfig(model=str(folder)).get_diff_sampling_param()
    assert Sampling(**read) == read_sampling(folder)
