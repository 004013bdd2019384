"""`redraft adapt`: a draft of every family for another version of its target."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from make_heads import make_target
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from redraft.distill.run.adaptation import _choose, adapt
from redraft.distill.run.training_run import run as train
from redraft.distill.train.run_config import make_config
from redraft.engine.counts import AcceptanceCounts
from redraft.eval.intervals import estimate_tau_gain
from redraft.files.artifact import verify
from redraft.files.folder import fingerprint, lineage
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family, require_trained_for
from redraft.heads.families.eagle3 import Config, Eagle3
from redraft.heads.options import Standalone
from redraft.heads.target import Target
from redraft.recipes.adapt import choose_recipe
from redraft.recipes.cli.run import dispatch
from redraft.recipes.data import regenerate
from tests.recipes.train.test_heads_recipes import FAMILIES, SMALL, data, make_settings  # noqa: F401

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.fixture(scope="module")
def moved_target(random_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random target with other weights, saved in two shards and another type."""
    folder = tmp_path_factory.mktemp("moved") / "target"
    model = LlamaForCausalLM.from_pretrained(random_target)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.bfloat16().save_pretrained(folder, max_shard_size="1MB")
    AutoTokenizer.from_pretrained(random_target).save_pretrained(folder)
    return folder


def settings_of(
    name: str,
    old: Path,
    target: Path,
    data: Path,  # noqa: F811
    output: Path,
    **changes: Any,
) -> Any:
    """The defaults of `redraft adapt`, cut to a few steps."""
    recipe, _ = choose_recipe([str(old)], "redraft adapt")
    small = make_settings("eagle1", target, data, output)
    changed = {key: getattr(small, key) for key in ("target", "data", "output", "mixed_precision")}
    loop = replace(SMALL, stop_by="acceptance")
    prove = replace(small.prove, engine=False)
    return replace(recipe.default, **{**changed, "prove": prove, "loop": loop, **changes})


def run_once(name: str, target: Path, data: Path, output: Path) -> Path:  # noqa: F811
    """The draft of a short training."""
    cfg = make_settings(name, target, data, output)
    if name == "mtp" and (target / "provenance.json").exists():
        cfg = replace(cfg, init="native", head=replace(cfg.head, as_mimo=False))
    train(find_family(name), replace(cfg, prove=replace(cfg.prove, engine=False)))
    return output / "draft"


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("eagle3", "medusa", "mtp") else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_a_head_of_every_family_is_adapted_to_other_weights(
    name: str,
    random_target: Path,
    moved_target: Path,
    data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    base, moved = random_target, moved_target
    if name == "mtp":  # only a rewritten target has such a layer
        run_once(name, base, data, tmp_path / "rewritten")
        base, moved = tmp_path / "rewritten/draft", tmp_path / "moved"
        shutil.copytree(base, moved)
        for path in moved.glob("*.safetensors"):
            save_file(
                {key: tensor * 1.01 for key, tensor in load_file(path).items()},
                path,
                {"format": "pt"},
            )
        (moved / "manifest.json").unlink()
    old = run_once(name, base, data, tmp_path / "first")
    cfg = settings_of(name, old, moved, data, tmp_path / "run")
    found = adapt(find_family(name), cfg, old)
    assert found is not None
    low, high = found.interval
    assert low <= found.gain <= high
    assert found.gain == pytest.approx(found.tau_adapted - found.tau_old)
    assert json.loads((tmp_path / "run/adapt.json").read_text())["gain"] == found.gain
    assert found.start == ("new" if (found.tau_new_start or 0) > found.tau_old else "old")
    assert (tmp_path / "run/draft").exists() == (found.draft is not None) == (low > 0)
    assert not (tmp_path / "run/candidate").exists()
    if found.draft:
        verify(tmp_path / "run/draft")
        provenance = json.loads((tmp_path / "run/draft/provenance.json").read_text())
        assert provenance["target_fingerprint"] == fingerprint(moved)
        assert provenance["target_lineage"] == lineage(base)


def test_the_better_start_is_trained_and_published_after_a_proven_gain(
    random_target: Path,
    moved_target: Path,
    data: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # All layers of the target: the old draft is the old target, and the new start is the new one,
    # which proposes what it accepts.
    base = make_settings("eagle1", random_target, data, tmp_path / "first")
    cfg = choose_standalone(base, Standalone(layers=(0, 1)))
    cfg = replace(cfg, optim=replace(cfg.optim, lr=1e-9), data=replace(cfg.data, num_prompts=6))
    train(find_family("standalone"), cfg)
    old = tmp_path / "first/draft"
    cfg = replace(
        settings_of("standalone", old, moved_target, data, tmp_path / "run"),
        optim=cfg.optim,
        data=cfg.data,
    )
    found = adapt(find_family("standalone"), cfg, old)
    assert found is not None
    assert found.start == "new"
    # Nearly all, because the exported draft is rounded.
    assert found.tau_old < 0.9 * (1 + cfg.prove.num_speculative_tokens) < found.tau_adapted
    assert found.interval[0] > 0
    assert found.draft == str(tmp_path / "run/draft")
    assert f"serve {found.draft}: tau" in capsys.readouterr().out
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["offline"]["tau_forecast"] == pytest.approx(found.tau_adapted)
    # A killed run continues with the same start, and finds the same.
    assert adapt(find_family("standalone"), cfg, old) == found


def choose_standalone(base: Any, draft: Standalone) -> Any:
    shared = {
        key: getattr(base, key) for key in ("target", "data", "output", "mixed_precision", "loop")
    }
    cfg = make_config(find_family("standalone"))
    return replace(cfg, draft=draft, prove=replace(base.prove, engine=False), **shared)


def test_a_foreign_copy_of_the_old_embeddings_is_dropped(
    random_target: Path,
    moved_target: Path,
    data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    old = run_once("eagle3", random_target, data, tmp_path / "first")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    shutil.copy(old / "config.json", foreign)
    embeddings = load_file(random_target / "model.safetensors")["model.embed_tokens.weight"]
    save_file(
        {**load_file(old / "model.safetensors"), "embed_tokens.weight": embeddings},
        foreign / "model.safetensors",
    )
    one, two = (
        adapt(
            find_family("eagle3"),
            settings_of("eagle3", folder, moved_target, data, tmp_path / name),
            folder,
        )
        for folder, name in ((old, "one"), (foreign, "two"))
    )
    assert one is not None
    assert two is not None
    assert (one.tau_old, one.tau_adapted) == (two.tau_old, two.tau_adapted)


def test_a_draft_of_another_lineage_is_refused(
    random_target: Path,
    data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    old = run_once("medusa", random_target, data, tmp_path / "first")
    model = LlamaForCausalLM.from_pretrained(random_target)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(random_target).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=rf"{old}\b.*\bother\b"):
        adapt(
            find_family("medusa"),
            settings_of("medusa", old, tmp_path / "other", data, tmp_path / "run"),
            old,
        )
    assert not (tmp_path / "run").exists()


def test_a_target_of_another_lineage_is_refused_before_it_answers(
    random_target: Path,
    moved_target: Path,
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[regenerate.RegenerateConfig] = []
    monkeypatch.setattr(regenerate, "main", asked.append)
    old = run_once("medusa", random_target, data, tmp_path / "first")
    other = tmp_path / "other"
    shutil.copytree(moved_target, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = ["--prove.no-engine", "--output", str(tmp_path / "run")]
    assert dispatch(["adapt", str(old), "--target", str(other), *flags]) == 2
    assert re.search(rf"{old}\b.*\bother\b", capsys.readouterr().err)
    assert not asked
    assert (
        dispatch(["adapt", str(old), "--target", str(moved_target), *flags]) == 2
    )  # no answers were written
    assert [(cfg.prompts, cfg.target) for cfg in asked] == [(str(data), str(moved_target))]


def test_every_target_is_adapted_to_by_its_own_answers(
    random_target: Path,
    moved_target: Path,
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned: list[list[str]] = []

    def answer(cfg: regenerate.RegenerateConfig) -> None:
        with cfg.output.open("a") as file:
            file.write(f"of {cfg.target}\n")

    def learn(_: Any, cfg: Any, __: Path) -> None:
        learned.append(Path(cfg.data.source).read_text().splitlines())

    old = run_once("medusa", random_target, data, tmp_path / "first")
    monkeypatch.setattr(regenerate, "main", answer)
    monkeypatch.setattr("redraft.distill.run.adaptation.adapt", learn)
    second = tmp_path / "second"
    shutil.copytree(moved_target, second)
    (second / "generation_config.json").write_text('{"temperature": 0.5}')
    targets = [str(moved_target), str(second), str(moved_target)]
    for target in targets:
        flags = ["--prove.no-engine", "--output", str(tmp_path / "run")]
        assert dispatch(["adapt", str(old), "--target", target, *flags]) in (0, None)
    # The third continues the first's.
    assert learned == [[f"of {targets[0]}"], [f"of {targets[1]}"], [f"of {targets[0]}"] * 2]


def test_a_draft_fits_the_lineage_of_its_target(
    random_target: Path, moved_target: Path, tmp_path: Path
) -> None:
    assert lineage(moved_target) == lineage(random_target)
    assert fingerprint(moved_target) != fingerprint(random_target)
    other = tmp_path / "other"
    shutil.copytree(random_target, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["padding"], tokenizer["truncation"] = (
        None,
        {"max_length": 7, "strategy": "LongestFirst", "stride": 0},
    )
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert lineage(other) == lineage(random_target)
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert lineage(other) != lineage(random_target)
    draft = tmp_path / "draft"
    draft.mkdir()
    names = {
        "target_fingerprint": "f" * 64,
        "target_lineage": lineage(random_target),
        "target": "base",
    }
    (draft / "provenance.json").write_text(json.dumps(names))
    require_trained_for(draft, TargetFolder.open(moved_target))
    with pytest.raises(ValueError, match=rf"{draft} .*\bother: base$"):
        require_trained_for(draft, TargetFolder.open(other))


def test_the_start_is_chosen_again_for_another_target(tmp_path: Path) -> None:
    def choose(target: str, **taus: float) -> str:
        run: Any = SimpleNamespace(
            folder=SimpleNamespace(folder=tmp_path, inputs={"target": target})
        )
        forecasts: Any = {
            name: SimpleNamespace(overall=SimpleNamespace(tau=tau)) for name, tau in taus.items()
        }
        return _choose(run, forecasts)

    assert choose("one", old=1.5, new=1.2) == "old"
    assert choose("one", old=1.2, new=1.3) == "old", "a killed run continues"
    assert choose("another", old=1.2, new=1.3) == "new"


def test_a_gain_in_tau_is_that_of_the_sums() -> None:
    ours, theirs = (
        [AcceptanceCounts(num_drafts=10, num_accepted=a) for a in accepted]
        for accepted in ([9, 5], [4, 2])
    )
    assert estimate_tau_gain(ours, theirs).value == pytest.approx(14 / 20 - 6 / 20)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere contains no draft"),
        (["OLD"], "--target TARGET"),
        (["--target", "T", "OLD"], "needs OLD"),
        (["OLD", "--target", "T"], "set --data.source"),
    ],
)
def test_adapt_refuses_in_one_line(
    args: list[str],
    message: str,
    random_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text("{}")
    save_file({"fc.weight": torch.zeros(2, 4)}, old / "model.safetensors")
    words = {"OLD": str(old), "T": str(random_target)}
    assert dispatch(["adapt", *(words.get(word, word) for word in args)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_head_that_lists_no_layers_is_adapted_with_the_default_ones(tmp_path: Path) -> None:
    """As most of SpecForge's heads, and those of EAGLE-3's authors."""
    head = Eagle3(Config(), Target.from_model(make_target(num_hidden_layers=8)))
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe, _ = choose_recipe([str(tmp_path)], "redraft adapt")
    assert recipe.default.head.aux_layer_ids == ()
