"""The recipe of every family of heads.

Its demo preset on a small random target, a few steps, and bad input.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_hub import keep_in_cache
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from benchmarks.studies.presets import make_preset
from redraft.distill.data.corpus import stdlib_conversations
from redraft.distill.run import start as starting
from redraft.distill.run import training_run
from redraft.distill.run.start import read_last_signals, read_scales, start
from redraft.distill.run.training_run import Run
from redraft.distill.run.training_run import run as train
from redraft.distill.train.optim import Optim
from redraft.distill.train.run_config import Loop, Prove
from redraft.distill.train.step import Distillation
from redraft.eval.forecast.greedy import QuickMetrics
from redraft.eval.forecast.stored import StoredForecast
from redraft.files.artifact import verify
from redraft.files.folder import fingerprint, read_config
from redraft.files.tensors import read_tensors
from redraft.files.windows import View, served_views
from redraft.heads.catalog import detect_family, find_family
from redraft.heads.families import eagle3
from redraft.heads.families.eagle3_start import start_by_least_squares
from redraft.heads.provenance import read_provenance
from redraft.heads.target import Target
from redraft.recipes import adapt

FAMILIES = ("eagle3", "dflash", "dspark", "peagle", "eagle1", "medusa", "mtp")
pytestmark = pytest.mark.usefixtures("fresh_accelerator")

SMALL = Loop(steps=2, batch_size=2, sequence_length=128, eval_every=2, eval_batches=1, save_every=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 short conversations of two domains."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    chosen: dict[str, list[dict[str, object]]] = {"code": [], "prose": []}
    for conversation in stdlib_conversations():
        if len(rows := chosen[str(conversation["domain"])]) < 20:
            rows.append(conversation)
        elif all(len(rows) == 20 for rows in chosen.values()):
            break
    path.write_text("".join(json.dumps(row) + "\n" for rows in chosen.values() for row in rows))
    return path


def make_settings(name: str, target: Path, data: Path, output: Path, **changes: Any) -> Any:
    """The settings of the family's demo, cut to a few steps on a target of two layers."""
    demo = make_preset(name)
    sizes: dict[str, Any] = {}
    if name in ("eagle3", "peagle"):
        sizes = {"head": replace(demo.head, aux_layer_ids=(0, 1, 2)), "draft_vocab_size": 300}
    if name in ("dflash", "dspark"):
        sizes = {
            "head": replace(demo.head, aux_layer_ids=(1, 2), num_anchors=16),
            "draft_vocab_size": 300,
        }
    return replace(
        demo,
        target=str(target),
        data=replace(
            demo.data, source=str(data), held_out=0.2, num_prompts=3, max_prompt_tokens=128
        ),
        prove=replace(demo.prove, engine=False, max_tokens=8),
        output=output,
        mixed_precision="no",
        **{"loop": SMALL, **sizes, **changes},
    )


def run(name: str, target: Path, data: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Its report."""
    train(find_family(name), make_settings(name, target, data, output, **changes))
    report: dict[str, Any] = json.loads((output / "report.json").read_text())
    return report


def trained_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The head in the run's last checkpoint."""
    weights = load_file(max((folder / "checkpoints").iterdir()) / "model.safetensors")
    return {name.removeprefix("draft."): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_recipe_publishes_a_head_that_its_family_loads(
    name: str, random_target: Path, data: Path, tmp_path: Path
) -> None:
    report = run(name, random_target, data, tmp_path / "run")
    draft = tmp_path / "run/draft"
    verify(draft)
    made = read_provenance(draft)
    assert made.target_fingerprint == fingerprint(random_target)
    assert made.label_probe is not None
    assert made.label_probe["labels"], "what `redraft doctor` compares the served template with"
    asked, cfg = made.config.data, make_settings(name, random_target, data, tmp_path)
    assert (asked.source, asked.split) == (cfg.data.source, cfg.data.split), "for `redraft adapt`"
    assert (asked.held_out, asked.max_prompt_tokens) == (0.2, 128)
    assert made.config.loop.sequence_length == SMALL.sequence_length
    assert made.config.prove.num_speculative_tokens == cfg.prove.num_speculative_tokens
    assert any(entry.get("held_out_tau", 0) >= 1 for entry in made.metrics)
    stored = StoredForecast.from_json(made.forecast)
    assert stored is not None
    assert stored.tau == pytest.approx(report["offline"]["tau_forecast"])
    assert detect_family(draft).name == name
    served = tmp_path / "run/target" if name == "mtp" else random_target
    head = (
        find_family(name)
        .draft_class()
        .load(draft, Target.from_model(AutoModelForCausalLM.from_pretrained(served)))
    )
    for tensor_name, tensor in trained_weights(tmp_path / "run").items():
        exported = (
            tensor if tensor_name.startswith("confidence_head.") else tensor.bfloat16().float()
        )
        assert torch.equal(head.state_dict()[tensor_name], exported), tensor_name
    assert 1 <= report["offline"]["tau_forecast"] <= 4
    assert [entry["step"] for entry in report["curves"] if "held_out_alpha" in entry] == [2]
    assert report["train"]["skipped_steps"] == 0


def test_the_metrics_hold_the_gradient_norm_and_the_learning_rate(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    loop = replace(SMALL, steps=4, log_every=1)
    report = run(
        "medusa",
        random_target,
        data,
        tmp_path / "run",
        loop=loop,
        optim=Optim(lr=1e-3, warmup_fraction=0.5),
    )
    steps = [entry for entry in report["curves"] if "loss" in entry]
    assert [entry["lr"] for entry in steps] == pytest.approx([5e-4, 1e-3, 1e-3, 5.5e-4])
    assert all(0 < entry["grad_norm"] < 100 for entry in steps)
    assert len({entry["grad_norm"] for entry in steps}) == 4


def test_eagle3_keeps_the_ids_that_are_labels_most_often(
    random_target: Path, data: Path, small_tokenizer: Any, tmp_path: Path
) -> None:
    run("eagle3", random_target, data, tmp_path / "run")
    head = (
        find_family("eagle3")
        .draft_class()
        .load(
            tmp_path / "run/draft",
            Target.from_model(AutoModelForCausalLM.from_pretrained(random_target)),
        )
    )
    kept = head._draft_ids_W.tolist()
    assert len(kept) == 300
    assert kept == sorted(kept)
    assert small_tokenizer.eos_token_id in kept


def test_least_squares_give_a_head_that_drafts_before_its_first_step(
    data: Path, tmp_path: Path
) -> None:
    """On the small target, which can write text: a random one has nothing to predict."""
    taus = {}
    for init in ("last_layer", "least_squares"):
        head = eagle3.Config(aux_layer_ids=(2, 4, 7), num_steps=3, fc_norm=True)
        report = run(
            "eagle3", Path("tests/assets/tiny-target"), data, tmp_path / init,
            head=head, draft_vocab_size=2048, init=init, optim=Optim(lr=1e-5),
        )  # fmt: skip
        taus[init] = report["offline"]["tau_before"]
        assert report["offline"]["tau_forecast"] == pytest.approx(taus[init], abs=0.2), (
            "the steps were tiny"
        )
    assert taus["last_layer"] < 1.1
    assert taus["least_squares"] > 1.2


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"fc_norm": False}, {}, r"--head\.fc-norm"),
        ({"norm_before_residual": True}, {}, r"--head\.norm-before-residual"),
        ({}, {"init_tokens": 0}, r"init_tokens\b.*\b1\b"),
    ],
)
def test_least_squares_refuse_other_flags_before_any_work(
    options: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    random_target: Path,
    tmp_path: Path,
) -> None:
    head = eagle3.Config(**{"fc_norm": True, "aux_layer_ids": (0, 1, 2), **options})
    with pytest.raises(ValueError, match=message):
        run(
            "eagle3",
            random_target,
            tmp_path,
            tmp_path / "run",
            init="least_squares",
            head=head,
            **changes,
        )
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_does_not_repeat_a_start_that_its_checkpoint_replaces(
    random_target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[eagle3.Eagle3] = []

    def start_and_count(head: eagle3.Eagle3, *known: Any) -> None:
        calls.append(head)
        start_by_least_squares(head, *known)

    monkeypatch.setattr(starting, "start_by_least_squares", start_and_count)
    head = eagle3.Config(aux_layer_ids=(0, 1, 2), num_steps=3, fc_norm=True)
    folder = tmp_path / "run"

    def train_again(**changes: Any) -> tuple[Any, dict[str, torch.Tensor], int]:
        """The report's forecasts, the exported head, and how often a start was computed so far."""
        report = run(
            "eagle3", random_target, data, folder, head=head, init="least_squares", **changes
        )
        return report["offline"], load_file(folder / "draft/model.safetensors"), len(calls)

    forecasts, weights, count = train_again()
    assert count == 1

    def assert_equal_after(expected: int, **changes: Any) -> None:
        found, exported, count = train_again(**changes)
        assert count == expected
        assert found == forecasts
        assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())

    assert_equal_after(1)
    # The run was killed after the first of two steps.
    shutil.rmtree(folder / "checkpoints/step-000002")
    assert_equal_after(1)
    # The start is computed again if its forecast is missing, or if there is no checkpoint.
    (kept,) = folder.glob("start-*.json")
    kept.unlink()
    assert_equal_after(2)
    shutil.rmtree(folder / "checkpoints")
    assert_equal_after(3)
    assert_equal_after(4, overwrite=True)


def test_least_squares_take_the_factors_of_rms_norms_and_refuse_others(random_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_target)
    target = SimpleNamespace(model=model)
    run = SimpleNamespace(target=target, cfg=SimpleNamespace(target="models/other"))
    scales = read_scales(run, (1, 2))
    assert all(
        map(
            torch.equal,
            scales,
            [model.model.layers[1].input_layernorm.weight, model.model.norm.weight],
        )
    )
    model.model.layers[1].input_layernorm = gemma = Gemma3RMSNorm(64)
    gemma.weight.data.fill_(0.5)
    assert read_scales(run, (1, 2))[0].tolist() == [1.5] * 64
    for other in (torch.nn.LayerNorm(64), None):
        model.model.layers[1].input_layernorm = other
        with pytest.raises(ValueError, match="models/other"):
            read_scales(run, (0, 1))


def test_the_last_batches_of_the_epoch_are_taken_for_a_start(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    run = Run(find_family("eagle3"), make_settings("eagle3", random_target, data, tmp_path / "run"))
    total = run.data.train.num_batches(2)
    for tokens, count in ((1, 1), (3 * 256, 3), (10**9, total)):
        found = [batch.input_ids_BT for batch, _ in read_last_signals(run, (0, 1, 2), tokens)]
        expected = [
            run.data.train.batch(n, batch_size=2).input_ids_BT for n in range(total - count, total)
        ]
        assert all(map(torch.equal, found, expected))
        assert len(found) == count


def test_a_run_of_some_minutes_plans_its_steps_by_their_speed_and_keeps_the_plan_after_a_kill(
    random_target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes 0.2 s and a bit.

    0.1 minutes are at most 30 of them, and the rate falls to its floor there.
    """
    take_step, killed_at, rates = Distillation.take_step, [7], list[float]()

    def slow(self: Distillation, *args: Any) -> Any:
        if self.step_index == killed_at[0]:
            raise KeyboardInterrupt
        time.sleep(0.2)
        stats = take_step(self, *args)
        rates.append(stats.lr)
        return stats

    monkeypatch.setattr(Distillation, "take_step", slow)
    loop = replace(SMALL, minutes=0.1, steps=1000, save_every=5)
    with pytest.raises(KeyboardInterrupt):
        run("medusa", random_target, data, tmp_path / "run", loop=loop)
    planned = [
        entry["planned_steps"]
        for entry in read_metrics(tmp_path / "run")
        if "planned_steps" in entry
    ]
    assert len(planned) == 1
    assert 10 <= planned[0] <= 30

    killed_at[0] = -1
    run("medusa", random_target, data, tmp_path / "run", loop=loop)
    metrics = read_metrics(tmp_path / "run")
    assert [entry["planned_steps"] for entry in metrics if "planned_steps" in entry] == planned
    assert metrics[-1]["step"] == planned[0]
    assert rates[-1] < 0.2 * max(rates)


def test_a_run_ends_when_acceptance_falls_and_exports_its_best_step_also_after_a_kill(
    random_target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the small random target no tau rises and falls, so the evaluations are scripted, by step."""
    taus = {1: 1.1, 2: 1.3, 3: 1.5, 4: 1.2, 5: 1.4, 6: 1.5, 7: 1.6}
    killed_at = [0]

    def evaluate(self: Distillation, batches: Any, num_speculative_tokens: int) -> QuickMetrics:
        if self.step_index == killed_at[0]:
            raise KeyboardInterrupt
        tau = taus.get(self.step_index, 1.0)
        return QuickMetrics(
            num_rows=1, alpha=0.5, alpha_greedy=0.5, tau=tau, acceptance_per_position=[0.5]
        )

    monkeypatch.setattr(Distillation, "evaluate", evaluate)
    monkeypatch.setattr("redraft.distill.train.run_folder.KEPT_CHECKPOINTS", 99)
    loop = replace(SMALL, steps=12, eval_every=1, save_every=1)
    run("medusa", random_target, data, tmp_path / "plain", loop=loop)

    until = replace(loop, stop_by="acceptance", patience=3)
    report = run("medusa", random_target, data, tmp_path / "run", loop=until)
    assert (report["curves"][-1]["step"], report["train"]["exported_step"]) == (6, 3)
    weights = load_file(tmp_path / "plain/checkpoints/step-000003/model.safetensors")
    exported = trained_head("medusa", random_target, tmp_path / "run/draft")
    for name, tensor in weights.items():
        assert torch.equal(
            exported[name.removeprefix("draft.")], tensor.to(torch.bfloat16).float()
        ), name

    rarely = replace(until, save_every=2)
    killed_at[0] = 5  # the best is of step 3, the newest checkpoint of step 4
    with pytest.raises(KeyboardInterrupt):
        run("medusa", random_target, data, tmp_path / "killed", loop=rarely)
    killed_at[0] = 0
    for _ in range(2):  # the second time, the run had ended already
        again = run("medusa", random_target, data, tmp_path / "killed", loop=rarely)
        assert again["train"]["exported_step"] == 3
        assert [e["held_out_tau"] for e in again["curves"] if "held_out_tau" in e] == [
            1.1,
            1.3,
            1.5,
            1.2,
            1.4,
            1.5,
        ]
        for file in ("run", "killed"):
            assert trained_equals(
                exported, trained_head("medusa", random_target, tmp_path / file / "draft")
            )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained_equals(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained_head(family: str, target: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of an exported head, as its family loads them."""
    model = Target.from_model(AutoModelForCausalLM.from_pretrained(target))
    weights: dict[str, torch.Tensor] = (
        find_family(family).draft_class().load(folder, model).state_dict()
    )
    return weights


def change_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder, which are doubled in place."""
    weights = {name: 2 * tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()  # a rewritten target has links to the file
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def test_a_run_is_not_continued_from_a_draft_that_has_changed(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    start = tmp_path / "one/draft"
    run("eagle1", random_target, data, tmp_path / "one")
    for _ in range(2):
        run("eagle1", random_target, data, tmp_path / "two", start_from=start)
    change_weights(start)
    with pytest.raises(ValueError, match=r"start .*--overwrite"):
        run("eagle1", random_target, data, tmp_path / "two", start_from=start)
    draft = tmp_path / "two" / "draft" / "model.safetensors"
    old = draft.read_bytes()
    typo = data.with_name("mistyped.jsonl")
    with pytest.raises(FileNotFoundError, match="mistyped"):
        run("eagle1", random_target, typo, tmp_path / "two", start_from=start, overwrite=True)
    assert draft.read_bytes() == old
    run("eagle1", random_target, data, tmp_path / "two", start_from=start, overwrite=True)
    assert draft.read_bytes() != old
    assert not (tmp_path / "two" / ".previous").exists()


def test_a_target_that_has_changed_is_rewritten_again(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    target, name = (
        Path(shutil.copytree(random_target, tmp_path / "target")),
        "model.embed_tokens.weight",
    )
    wanted = load_file(target / "model.safetensors")[name]
    for _ in range(2):
        rewritten = Run(
            find_family("mtp"), make_settings("mtp", target, data, tmp_path / "run")
        ).target.source.folder
        assert torch.equal(read_tensors(rewritten, [name])[name], wanted)
        wanted = change_weights(target)[name]


def test_a_run_that_ended_is_not_trained_again(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    first = run("eagle1", random_target, data, tmp_path / "run")
    weights = (tmp_path / "run/draft/model.safetensors").read_bytes()
    again = run("eagle1", random_target, data, tmp_path / "run")
    assert (tmp_path / "run/draft/model.safetensors").read_bytes() == weights
    assert again["offline"] == first["offline"]
    assert again["curves"] == first["curves"]
    assert again["train"]["tokens_per_s"] == first["train"]["tokens_per_s"]


def test_a_head_continues_from_an_exported_one(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    trained = run("eagle3", random_target, data, tmp_path / "one")
    further = run(
        "eagle3", random_target, data, tmp_path / "two", start_from=tmp_path / "one/draft"
    )
    assert further["offline"]["alpha_before"] == pytest.approx(
        trained["offline"]["alpha_after"], abs=1e-5
    )


def test_a_head_continues_with_its_own_number_of_draft_steps(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    """A head of another trainer, which records none, with as many as a new head."""
    one, foreign = tmp_path / "one/draft", tmp_path / "foreign"
    head = make_settings("eagle1", random_target, data, tmp_path).head
    run("eagle1", random_target, data, tmp_path / "one", head=replace(head, num_steps=4))
    config = {key: value for key, value in read_config(one).items() if key != "redraft"}
    foreign.mkdir()
    shutil.copy(one / "model.safetensors", foreign)
    (foreign / "config.json").write_text(json.dumps(config))

    def make(start_from: Path, num_tokens: int) -> Any:
        cfg = make_settings("eagle1", random_target, data, tmp_path / "two", overwrite=True)
        prove = replace(cfg.prove, num_speculative_tokens=num_tokens)
        return replace(cfg, start_from=start_from, prove=prove)

    for start_from in (one, foreign):
        train(find_family("eagle1"), make(start_from, 4))
        recorded = read_config(tmp_path / "two/draft")["redraft"]
        assert recorded["num_steps"] == 4
        with pytest.raises(ValueError, match=r"^5 draft tokens .* trained for 4\b"):
            train(find_family("eagle1"), make(start_from, 5))


def test_data_that_do_not_exist_are_refused_before_the_target_is_loaded(
    random_target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "load_target", lambda *_: pytest.fail("it was loaded"))
    cfg = make_settings("medusa", random_target, data, tmp_path / "run")
    missing = str(tmp_path / "mistyped.jsonl")
    for changes in ({"source": missing}, {"prompts": missing}):
        with pytest.raises(FileNotFoundError, match="mistyped"):
            Run(find_family("medusa"), replace(cfg, data=replace(cfg.data, **changes)))


def test_rows_that_do_not_fill_a_batch_are_refused_before_the_start(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    loop = replace(SMALL, batch_size=500)
    with pytest.raises(ValueError, match=r"do not fill one batch of 500\b.*--loop\.batch-size"):
        Run(
            find_family("medusa"),
            make_settings("medusa", random_target, data, tmp_path, loop=loop),
        )


def test_a_head_continues_and_is_adapted_by_its_hub_name(
    random_target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_target)
    options = make_settings("eagle3", random_target, data, tmp_path).head
    head = find_family("eagle3").draft_class()(options, Target.from_model(model))
    head.export(tmp_path / "draft", layout="speculators")
    name = keep_in_cache(tmp_path / "draft", tmp_path / "hub", monkeypatch)
    cfg = make_settings("eagle3", random_target, data, tmp_path / "run", start_from=Path(name))
    training = Run(find_family("eagle3"), cfg)
    begun = start(training)
    assert torch.equal(begun.fc.weight, head.fc.weight.bfloat16().float()) or torch.equal(
        begun.fc.weight, head.fc.weight
    )
    recipe, _ = adapt.choose_recipe([name, "--target", str(random_target)], "redraft adapt")
    assert (tmp_path / "hub") in recipe.default.start_from.parents


def test_a_head_with_a_window_trains_continues_and_keeps_it(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    wanted = make_settings("eagle3", random_target, data, tmp_path).head
    wanted = replace(wanted, window=16, num_layers=2)
    trained = run("eagle3", random_target, data, tmp_path / "one", head=wanted)
    draft = tmp_path / "one/draft"
    further = run("eagle3", random_target, data, tmp_path / "two", start_from=draft)
    assert further["offline"]["alpha_before"] == pytest.approx(
        trained["offline"]["alpha_after"], abs=1e-5
    )
    for folder in (draft, tmp_path / "two/draft"):
        assert served_views(read_config(folder)) == (View(16, True),) * 2
    cfg = make_settings(
        "eagle3", random_target, data, tmp_path / "new", start_from=draft,
        head=replace(wanted, window=32),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"--head.window 32\b.*a window of 16\b"):
        train(find_family("eagle3"), cfg)


LAYERS = {"eagle3": "eagle_aux_hidden_state_layer_ids", "dflash": "aux_hidden_state_layer_ids"}


@pytest.mark.parametrize(
    ("inner", "layers", "message"),
    [
        ({"sliding_window": 32}, None, r"a window of 32\b.*trained with a window of 16\b"),
        ({"layer_types": ["full_attention"] * 2}, None, r"no window\b.*a window of 16\b"),
        ({"layer_types": ["sliding_attention"]}, None, r"has 1 entries.*has 2 layers\b"),
        ({}, [1, 3], r"layers \[1, 3\].*to 2\b.*engines count layers differently"),
    ],
)
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_start_with_other_windows_or_layers_is_one_line_before_any_work(
    name: str,
    inner: dict[str, Any],
    layers: list[int] | None,
    message: str,
    random_target: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    cfg = make_settings(name, random_target, data, tmp_path / "run", start_from=tmp_path / "draft")
    model = AutoModelForCausalLM.from_pretrained(random_target)
    options = replace(cfg.head, window=16, num_layers=2)
    head = find_family(name).draft_class()(options, Target.from_model(model))
    head.export(tmp_path / "draft", layout="speculators", target_name="target")
    config = read_config(tmp_path / "draft")
    config["transformer_layer_config"] |= inner
    config |= {} if layers is None else {LAYERS[name]: layers}
    (tmp_path / "draft/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as error:
        train(find_family(name), cfg)
    assert str(error.value).startswith(str(tmp_path / "draft"))
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_head_has_the_window_of_a_target_whose_layers_all_have_one(
    name: str, random_target: Path, data: Path, tmp_path: Path
) -> None:
    """An engine gives it to the head's layers in any case."""
    target = shutil.copytree(random_target, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (target / "config.json").write_text(json.dumps({**config, **mistral, "sliding_window": 256}))
    run(name, target, data, tmp_path / "run")
    views = served_views(read_config(tmp_path / "run/draft"))
    assert {view.window for view in views} == {256}
    cfg = make_settings(name, target, data, tmp_path / "new")
    head = replace(cfg.head, window=16, full_layers=(0,))
    with pytest.raises(ValueError, match=r"--head.full-layers.*\b256\b"):
        train(find_family(name), replace(cfg, head=head))


def test_a_head_computes_again_if_asked_to(random_target: Path, data: Path, tmp_path: Path) -> None:
    passes = []
    for again in (False, True):
        output = tmp_path / str(again)
        changes = {"gradient_checkpointing": again, "loop": replace(SMALL, eval_every=0)}
        cfg = make_settings("eagle1", random_target, data, output, **changes)
        training, calls = Run(find_family("eagle1"), cfg), []
        head = start(training)
        head.layers[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        training.train(head)
        passes.append(len(calls))
    assert 0 < passes[1] == 2 * passes[0]


def test_runs_share_the_targets_answers(random_target: Path, data: Path, tmp_path: Path) -> None:
    for name in ("eagle1", "medusa"):
        cfg = make_settings(name, random_target, data, tmp_path / name)
        train(
            find_family(name), replace(cfg, prove=replace(cfg.prove, reference=tmp_path / "shared"))
        )
    assert len(list((tmp_path / "shared").glob("answers-*.json"))) == 1


BAD = [
    ("eagle3", {"head": {"aux_layer_ids": (1, 99)}}, r"\(1, 99\).*layers 0 to 2\b"),
    ("eagle3", {"draft_vocab_size": 9999}, r"^--draft-vocab-size 9999\b.*\b512\b"),
    ("dflash", {"head": {"block_size": 3}}, r"^3 .*\b2\b"),
    ("dflash", {"head": {"mask_token_id": 512}}, r"mask.*\b512\b.*\b512\b"),
    ("dflash", {"head": {"num_layers": 3}}, r"--head\.num-layers 3\b.*\b2\b"),
    ("dspark", {"head": {"block_size": 2}}, r"^3 .*\b2\b"),
    ("dspark", {"head": {"sample_from_anchor": False}}, r"^3 .*\b2\b"),
    ("dspark", {"head": {"mask_token_id": 512}}, r"mask.*\b512\b.*\b512\b"),
    (
        "dspark",
        {"prove": Prove(num_speculative_tokens=3)},
        r"\bV2\b.*DSpark.*--prove\.no-engine",
    ),
    ("medusa", {"head": {"num_heads": 200}}, r"\b128\b"),
    ("medusa", {"head": {"num_heads": 2}}, r"^3 .*\b2\b"),
    ("mtp", {"head": {"as_mimo": False}}, "MTP"),
    ("eagle1", {"init": "native"}, "EAGLE-1.*--init native.*random"),
    ("medusa", {"layout": "speculators"}, "Medusa.*--layout speculators"),
    ("mtp", {"draft_vocab_size": 100}, "MTP.*--draft-vocab-size"),
    ("medusa", {"gradient_checkpointing": True}, "Medusa.*--gradient-checkpointing"),
    ("eagle3", {"head": {"num_layers": 3}}, r"--head\.num-layers 3\b.*\b2\b"),
    (
        "eagle3",
        {"head": {"num_layers": 2, "fc_norm": True}, "init": "least_squares"},
        "--init least_squares supports only one layer",
    ),
    *(
        (
            name,
            {
                "head": {"num_layers": 2, "window": 64, "full_layers": (1,)},
                "prove": Prove(num_speculative_tokens=3),
            },
            message,
        )
        for name, message in (
            ("dflash", r"V2\b.*DFlash with and without windows.*--prove\.no-engine"),
            ("eagle3", r"V2\b.*EAGLE-3 with and without windows.*--prove\.no-engine"),
            ("peagle", r"no model runner.*P-EAGLE with and without windows"),
        )
    ),
    (
        "dflash",
        {"head": {"num_layers": 2, "window": 64, "full_layers": (1,)}, "layout": "speculators"},
        "the layout speculators cannot express.*layout vllm",
    ),
]


@pytest.mark.parametrize("name", ["eagle3", "peagle"])
def test_a_head_of_a_small_target_has_the_whole_vocabulary_by_default(
    name: str, random_target: Path, data: Path, tmp_path: Path
) -> None:
    cfg = make_settings(name, random_target, data, tmp_path / "run", draft_vocab_size=None)
    head = start(Run(find_family(name), cfg))
    assert len(head.head) == 512


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_bad_input_is_one_line_before_any_work(
    name: str,
    changes: dict[str, Any],
    message: str,
    random_target: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    cfg = make_settings(name, random_target, data, tmp_path / "run")
    changes = {
        key: replace(cfg.head, **value) if key == "head" else value
        for key, value in changes.items()
    }
    with pytest.raises(ValueError, match=message) as error:
        train(find_family(name), replace(cfg, **changes))
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_head_of_another_target_or_family_is_refused(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    run("eagle1", random_target, data, tmp_path / "run")
    other = LlamaForCausalLM.from_pretrained(random_target)
    other.model.norm.weight.data += 1
    other.save_pretrained(tmp_path / "other")
    for name, target, message in (
        ("eagle1", tmp_path / "other", r"run/draft .*\bother\b"),
        ("medusa", random_target, r"run/draft .*\beagle1\b.*\bmedusa\b"),
    ):
        cfg = make_settings(name, target, data, tmp_path / "new", start_from=tmp_path / "run/draft")
        with pytest.raises(ValueError, match=message):
            train(find_family(name), cfg)
        assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_two_processes_train_the_head_of_one(
    random_target: Path, data: Path, tmp_path: Path
) -> None:
    flags = "--prove.no-engine --mixed-precision no --loop.steps 2 --loop.sequence-length 128"
    flags += (
        " --data.num-prompts 2 --data.max-prompt-tokens 128 --prove.max-tokens 8 "
        "--data.held-out 0.2"
    )
    flags += f" --target {random_target} --data.source {data} --optim.max-grad-norm 1e9"
    recipe = ["-m", "benchmarks.studies.presets", "medusa"]
    two = [
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        "--nproc_per_node",
        "2",
        *recipe,
    ]
    for command, batch_size, output in ((two, 2, "two"), ([sys.executable, *recipe], 4, "one")):
        rest = [
            "--loop.batch-size",
            str(batch_size),
            "--output",
            str(tmp_path / output),
            *flags.split(),
        ]
        subprocess.run(
            [*command, *rest], check=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    one, other = (trained_weights(tmp_path / name) for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=2e-5, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_the_demo_of_all_heads_runs_small_and_goes_on_where_it_was(
    tiny_target: Path, tmp_path: Path
) -> None:
    flags = (
        "--loop.steps 6 --loop.sequence-length 256 --loop.eval-every 0 --data.num-prompts 6 "
        "--prove.max-tokens 24"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "benchmarks.studies.heads", "--output", str(tmp_path / "demo")]
    command += [
        "--heads",
        "medusa",
        "mtp",
        "eagle3",
        "--divergences",
        "forward_kl",
        "cross_entropy",
    ]
    command += [f"--flags={flag}" for flag in flags.split()]
    subprocess.run(command, cwd=root, check=True, timeout=1500)
    report = json.loads((tmp_path / "demo/report.json").read_text())
    assert report["families"].keys() == {"medusa", "mtp", "eagle3"}
    assert report["ablation"].keys() == {"forward_kl", "cross_entropy"}
    for entry in (*report["families"].values(), *report["ablation"].values()):
        assert entry["lossless"] is True
        assert entry["forecast_error"] < 0.03
    again = subprocess.run(
        [*command, "--resume"], cwd=root, check=True, timeout=60, capture_output=True, text=True
    )
    assert again.stdout.count("is already done") == 6, (
        "three heads, another divergence, two more seeds"
    )
