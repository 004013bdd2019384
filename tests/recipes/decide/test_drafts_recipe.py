"""`redraft drafts`: the flags, and the whole command on the small target with real servers."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from safetensors.torch import save_file

from redraft.distill.data.conversations import load_conversations
from redraft.recipes.cli.commands import COMMANDS
from redraft.recipes.decide import drafts
from redraft.recipes.decide.drafts import Config, main, run_once, spread, training_command


def test_layers_are_taken_at_equal_distances_with_the_first_and_the_last(tiny_target: Path) -> None:
    assert spread(2, str(tiny_target)) == [0, 6]
    assert spread(3, str(tiny_target)) == [0, 3, 6]
    assert spread(1, str(tiny_target)) == [0]
    with pytest.raises(ValueError, match="has 7 layers, so give 1 to 6"):
        spread(7, str(tiny_target))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": ("layer-2",)}, "--train layer-2: give layers-N"),
        ({"train": ("eagle1-8k",)}, "--train eagle1-8k"),
        ({"train": ("ngram+eagle1-8k",)}, r"--train ngram\+eagle1-8k: give"),
        ({"train": ("ngram+dflash-8k",)}, "n-grams go before eagle3-Nk only"),
        ({"confirm_rounds": 5}, "no 95% interval"),
        ({"rounds": 0}, "--rounds must be at least 1"),
    ],
)
def test_bad_flags_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**changes)


@pytest.mark.parametrize("name", ["layers-2", "medusa", "eagle3-4k", "dflash-4k", "peagle-4k"])
def test_every_recipe_takes_the_flags_of_its_training(name: str, tiny_target: Path, tmp_path: Path) -> None:
    cfg = Config(answers=str(tmp_path / "answers.jsonl"), output=tmp_path)
    recipe, *flags = training_command(cfg, str(tiny_target), name)
    module = import_module("redraft.recipes." + recipe.removesuffix(".py").replace("/", "."))
    parsed = tyro.cli(module.Config, args=flags)
    assert parsed.loop.minutes == cfg.minutes
    assert parsed.output == tmp_path / name
    assert not parsed.prove.engine


def test_a_finished_draft_is_kept_and_one_of_other_flags_refused(tmp_path: Path) -> None:
    cfg, folder = Config(output=tmp_path), tmp_path / "layers-2"
    folder.mkdir()
    (folder / "report.json").write_text("{}")
    (tmp_path / "layers-2.command.json").write_text(json.dumps(["x.py", "--a"]))
    run_once(folder, folder / "report.json", ["x.py", "--a"], cfg)  # there is no recipe x.py
    with pytest.raises(ValueError, match="other flags"):
        run_once(folder, folder / "report.json", ["x.py", "--b"], cfg)
    assert "redraft.recipes.decide.drafts" in {command.module for command in COMMANDS.values()}


def test_a_finished_draft_that_proposes_less_is_refused_before_the_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"hidden_norm.weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"], "block_size": 4}))
    monkeypatch.setattr(drafts, "load_prompts", lambda *_: ([], []))
    monkeypatch.setattr(drafts, "run_once", lambda *_: pytest.fail("a training was started"))
    with pytest.raises(ValueError, match=r"^5 draft tokens asked of .*, a DFlash draft that proposes 3: give "):
        main(Config(target="target", draft=(str(tmp_path),), num_speculative_tokens=5, output=tmp_path / "drafts"))


@pytest.mark.slow
@pytest.mark.vllm
def test_the_command_makes_serves_and_compares_drafts(tiny_target: Path, tmp_path: Path) -> None:
    rows = load_conversations("stdlib")[:120]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = Config(
        target=str(tiny_target),
        train=("layers-2", "eagle3-4k", "ngram+eagle3-4k:2"),
        minutes=0.1,
        answers=str(tmp_path / "answers.jsonl"),
        prompts=str(tmp_path / "answers.jsonl"),
        rounds=2,
        prompts_many=4,
        max_tokens=16,
        together=3,
        flags=("--loop.batch-size", "2", "--loop.sequence-length", "256"),
        output=tmp_path / "drafts",
    )
    main(cfg)
    report = json.loads((cfg.output / "report.json").read_text())
    assert [draft["name"] for draft in report["drafts"]] == [
        *("ngram", "retrieval", "layers-2", "eagle3-4k", "ngram+eagle3-4k:2")
    ]
    for draft in report["drafts"]:
        assert draft["measured"]["1"]["tau"] >= 1
        # the prediction with the number of tokens that was measured is that measurement
        served = draft["by_tokens"]["1"][-1]
        assert served["num_speculative_tokens"] == draft["num_speculative_tokens"]
        assert served["speedup"] == pytest.approx(draft["measured"]["1"]["ratio"], rel=0.5)
    assert all(len(row["1"]["ratios"]) == 6 for row in report["confirmed"])
    assert (cfg.output / "report.html").is_file()
