"""`redraft bench` from flags to reports, interrupted and resumed, and what it says of drafts that
cannot be served.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from make_serving import make_load_result
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from benchmarks.advice import Config as AdviceConfig
from benchmarks.advice import cells_acceptance, cells_costs, lines, verdict
from redraft.eval.engine.draft_source import DraftSource
from redraft.eval.engine.server import VllmServer
from redraft.eval.engine.target_dtype import TargetFolder, default_target_dtype, open_target
from redraft.eval.machine import ENGINE_IS_CPU
from redraft.eval.serving import report as serving_report
from redraft.eval.serving.cost import StepCosts
from redraft.eval.serving.load import LoadResult
from redraft.eval.serving.sweep import Variant
from redraft.recipes.cli.run import dispatch
from redraft.recipes.decide import bench
from redraft.recipes.decide.bench import Config, main, name, speculative_config


def make_config(pair: tuple[Path, Path], output: Path, **changes: Any) -> Config:
    small: dict[str, Any] = {
        "target": str(pair[0]),
        "draft": (str(pair[1]),),
        "num_speculative_tokens": (3,),
        "concurrency": (2, 1),
        "prompts": "random",
        "input_tokens": 16,
        "max_tokens": 8,
        "prompts_per_client": 1,
        "repeats": 1,
        "max_model_len": 256,
        "temperature": 0.0,
        "output": output,
    }
    return Config(**{**small, **changes})


def opened(cfg: Config) -> TargetFolder:
    return open_target(cfg.target, cfg.target_dtype, on_cpu=ENGINE_IS_CPU)


class Servers:
    """Starts that are answered by a server that runs already.

    One told to accept everything is refused.
    """

    def __init__(self, running: VllmServer, dies_at: int | None = None) -> None:
        self.running, self.dies_at = running, dies_at
        self.started: list[dict[str, Any] | None] = []

    @contextlib.contextmanager
    def __call__(
        self, target: str, *, speculative_config: dict[str, Any] | None, **_: Any
    ) -> Iterator[VllmServer]:
        if speculative_config and "rejection_sample_method" in speculative_config:
            raise ChildProcessError("vLLM did not start: no synthetic acceptance")
        self.started.append(speculative_config)
        if len(self.started) - 1 == self.dies_at:
            raise KeyboardInterrupt
        yield self.running


@pytest.fixture(autouse=True)
def mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds that choose the mode are tested with `choose_mode`."""
    monkeypatch.setattr(bench, "choose_baseline", lambda *_: ("compiled", {}))


@pytest.mark.vllm
def test_a_run_that_was_interrupted_measures_what_is_missing(
    engine_with_draft: VllmServer,
    served_pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = make_config(served_pair, tmp_path)
    monkeypatch.setattr(bench, "vllm_server", Servers(engine_with_draft, dies_at=1))
    with pytest.raises(KeyboardInterrupt):
        main(cfg, engine_has_ideal=True)
    assert len(list((tmp_path / "cells").glob("*.json"))) == 2, "two loads without a draft"
    assert not (tmp_path / "serving.json").exists()

    again = Servers(engine_with_draft)
    monkeypatch.setattr(bench, "vllm_server", again)
    main(cfg, engine_has_ideal=True)
    assert [bool(config) for config in again.started] == [False, True], (
        "the draft, and the target alone beside it"
    )
    report = json.loads((tmp_path / "serving.json").read_text())
    schema = json.loads((Path(serving_report.__file__).parent / "serving.schema.json").read_text())
    jsonschema.validate(report, schema)
    refused = {
        "what": f"{served_pair[1].name} all accepted k=3",
        "reason": "vLLM did not start: no synthetic acceptance",
    }
    assert report["refused"] == [refused]
    assert set(StepCosts.from_json(report["drafts"][str(served_pair[1])]["costs"]).batch_sizes) == {
        1,
        2,
    }

    third = Servers(engine_with_draft)
    monkeypatch.setattr(bench, "vllm_server", third)
    main(cfg, engine_has_ideal=True)
    assert third.started == [], "everything is there"
    assert json.loads((tmp_path / "serving.json").read_text())["tables"] == report["tables"]
    main(replace(cfg, overwrite=True), engine_has_ideal=True)
    assert len(third.started) == 2


def test_a_draft_that_is_added_on_another_day_is_compared_with_the_target_of_that_day(
    served_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day, speeds = 1.0, {None: 100.0, "draft_model": 150.0, "ngram": 110.0}
    started: list[str | None] = []

    @contextlib.contextmanager
    def serve(
        target: str, *, speculative_config: dict[str, Any] | None, **_: Any
    ) -> Iterator[str | None]:
        if speculative_config and "rejection_sample_method" in speculative_config:
            raise ChildProcessError("vLLM did not start: no synthetic acceptance")
        method = speculative_config["method"] if speculative_config else None
        started.append(method)
        yield method

    def run_load(method: str | None, *_: Any) -> LoadResult:
        return make_load_result(day * speeds[method], (0.01 if method is None else 0.02) / day)

    monkeypatch.setattr(bench, "vllm_server", serve)
    monkeypatch.setattr(bench, "run_load", run_load)
    draft = str(served_pair[1])
    cfg = make_config(served_pair, tmp_path, repeats=2)
    main(cfg, engine_has_ideal=True)
    assert started == [None, "draft_model"] * 2
    # Nothing new, but the ideal: the target is not measured for a draft that the engine refuses
    # again.
    main(cfg, engine_has_ideal=True)
    assert started == [None, "draft_model"] * 2
    # a machine with nothing else to do
    day = 3.0
    main(replace(cfg, draft=(draft, "ngram")), engine_has_ideal=True)
    assert started[4:] == [None, "ngram"] * 2
    report = json.loads((tmp_path / "serving.json").read_text())
    rows = {row["draft"]: row for row in report["tables"]["draft"]}
    assert rows[draft]["speedup"] == pytest.approx(1.5)
    assert rows["ngram"]["speedup"] == pytest.approx(1.1)
    assert rows["ngram"]["speedup_interval"] == pytest.approx([1.1, 1.1])
    # and so are the steps, by which the number of draft tokens is chosen
    for measured in (draft, "ngram"):
        costs = StepCosts.from_json(report["drafts"][measured]["costs"])
        assert costs.step_s(2, 3) / costs.step_s(2, 0) == pytest.approx(2)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_draft_that_the_engine_refuses_is_one_line_with_its_cure(
    served_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaForCausalLM.from_pretrained(served_pair[1])
    model.resize_token_embeddings(520)
    model.save_pretrained(tmp_path / "draft")
    cfg = make_config((served_pair[0], tmp_path / "draft"), tmp_path / "bench", concurrency=(1,))
    # the target alone was measured by an earlier run
    cells = bench.group_by_variant(
        cell for some in bench.plan(bench.sweep(cfg, opened(cfg))).values() for cell in some
    )
    results = bench.Results(cfg.output, bench.served(cfg, opened(cfg), "compiled"))
    for cell in cells[Variant()]:
        results.add(cell, 0, make_load_result(), make_load_result())
    with pytest.raises(ValueError, match=r"vocab.*; .*holds") as refused:
        main(cfg)
    assert "\n" not in str(refused.value)
    assert all(results.has(cell, 0) for cell in cells[Variant()]), "earlier results are kept"


@pytest.mark.vllm
@pytest.mark.slow
def test_a_copy_of_the_target_drafts_what_is_sampled(
    served_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampled drafts of the same distribution are all accepted, unless the engine cannot sample
    beside a draft.
    """
    target = shutil.copytree(served_pair[0], tmp_path / "target")
    named = json.loads((target / "generation_config.json").read_text()) | {"temperature": 0.8}
    (target / "generation_config.json").write_text(json.dumps(named))
    cfg = make_config(
        (target, target),
        tmp_path / "bench",
        concurrency=(2,),
        temperature=None,
        draft_sample_method="probabilistic",
        max_tokens=16,
        prompts_per_client=8,
    )
    main(cfg)
    report = json.loads((tmp_path / "bench/serving.json").read_text())
    assert report["settings"]["sampling"] == {
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
    }
    draft = report["drafts"][str(target)]
    assert draft["config"]["draft_sample_method"] == "probabilistic"
    assert draft["acceptance_per_position"][0] > 0.95, "blocks at an answer's end are cut off"
    assert (
        "Requests were sampled at temperature 0.8, drafts probabilistic." in capsys.readouterr().out
    )
    assert (
        "load generator at temperature 0.8, drafts probabilistic"
        in (tmp_path / "bench/serving.html").read_text()
    )


def test_requests_that_vllm_refuses_beside_a_draft_are_refused_before(
    served_pair: tuple[Path, Path],
) -> None:
    cfg = make_config(served_pair, Path("nowhere"), temperature=1.0, min_p=0.1)
    with pytest.raises(ValueError, match=r"min_p 0\.1.*--min-p 0\."):
        bench.sweep(cfg, opened(cfg))


def test_another_sampling_is_measured_again(served_pair: tuple[Path, Path], tmp_path: Path) -> None:
    greedy, sampled = (
        make_config(served_pair, tmp_path, temperature=value) for value in (0.0, 0.5)
    )
    paths = set()
    for cfg in (greedy, sampled, replace(sampled, draft_sample_method="probabilistic")):
        cell = bench.plan(bench.sweep(cfg, opened(cfg)))["draft"][1]
        paths.add(
            bench.Results(cfg.output, bench.served(cfg, opened(cfg), "compiled")).path(cell, 0)
        )
    assert len(paths) == 3


def test_another_type_of_the_target_is_measured_again_also_by_default(
    served_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target = shutil.copytree(served_pair[0], tmp_path / "target")
    stored = json.loads((target / "config.json").read_text()) | {"dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(stored))
    cfg = make_config((target, served_pair[1]), tmp_path / "bench")
    # None, as stored, on a GPU alone.
    default = default_target_dtype(target, on_cpu=ENGINE_IS_CPU)
    for given, dtype in ((None, default), ("float32", "float32"), ("bfloat16", "bfloat16")):
        asked = replace(cfg, target_dtype=given)
        assert bench.served(asked, opened(asked), "compiled")["dtype"] == dtype


def test_a_draft_that_only_v2_serves_is_refused_before_any_server_starts(
    served_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(
        {"markov_head.markov_w1.weight": torch.zeros(1, 1)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setattr(bench, "vllm_server", lambda *_, **__: pytest.fail("a server was started"))
    with pytest.raises(ValueError, match=r"V2.*DSpark.*VLLM_USE_V2_MODEL_RUNNER=0"):
        main(make_config(served_pair, tmp_path / "bench", draft=(str(tmp_path),)))


def test_more_tokens_than_a_draft_proposes_are_refused_before_any_server_starts(
    served_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(
        {"hidden_norm.weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["DFlashDraftModel"], "block_size": 4})
    )
    monkeypatch.setattr(bench, "vllm_server", lambda *_, **__: pytest.fail("a server was started"))
    drafts = (str(served_pair[1]), str(tmp_path))
    # All numbers are asked of the first draft, and of the others only the first number.
    for changes in (
        {"draft": drafts[::-1], "num_speculative_tokens": (3, 5)},
        {"num_speculative_tokens": (5, 3)},
    ):
        with pytest.raises(ValueError, match=r"5.*DFlash.*3"):
            main(make_config(served_pair, tmp_path / "bench", **{"draft": drafts, **changes}))


def test_doctor_finds_nothing_wrong_with_what_is_looked_up(served_pair: tuple[Path, Path]) -> None:
    assert DraftSource.parse("ngram").find_cure(str(served_pair[0]), 3) == ""
    assert DraftSource.parse(str(served_pair[1])).find_cure(str(served_pair[0]), 3) == ""


def test_the_ideal_is_asked_of_the_engine_in_its_own_words() -> None:
    from vllm.config.speculative import SpeculativeConfig

    ideal = Variant(draft="d", num_speculative_tokens=3, is_ideal=True)
    config = speculative_config(ideal, {"d": {"method": "draft_model", "model": "d"}})
    assert config is not None
    assert config["rejection_sample_method"] == "synthetic"
    rates = SpeculativeConfig._resolve_synthetic_acceptance_rates(
        3, None, config["synthetic_acceptance_length"]
    )
    assert rates == [1.0, 1.0, 1.0]
    assert speculative_config(Variant(), {}) is None


def test_variants_are_told_apart() -> None:
    variants = [
        Variant(),
        Variant(draft="a/draft", num_speculative_tokens=3),
        Variant(draft="a/draft", num_speculative_tokens=3, is_ideal=True),
    ]
    assert [name(v) for v in variants] == ["without draft", "a k=3", "a all accepted k=3"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--draft", "/nowhere"], "there is no draft /nowhere"),
        (["--draft", "live"], "measure counted answers instead"),
        (
            ["--draft", "ngram", "--prompts", "/nowhere.jsonl"],
            "/nowhere.jsonl, the file of the jsonl prompts, does not exist",
        ),
        (["--draft", "ngram", "--prompts-per-client", "0"], "at least 1"),
        (
            ["--draft", "ngram", "--input-tokens", "4000"],
            "4256 tokens of input and output do not fit",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_2(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["bench", "--target", "t", "--output", str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_advice_is_judged_by_what_was_measured() -> None:
    cfg = AdviceConfig(concurrency=(1,), num_speculative_tokens=(1, 2, 3))
    # a step takes 10 ms and 2 a draft token; the second round is twice as slow throughout
    rates = (0.5, 0.25, 0.1)
    cells = {
        (1, k): [
            make_load_result(
                (1 + sum(rates[:k])) / (slow * (0.010 + 0.002 * k)),
                slow * (0.010 + 0.002 * k),
                acceptance_per_position=rates[:k],
            )
            for slow in (1, 2)
        ]
        for k in (0, 1, 2, 3)
    }
    assert cells_acceptance(cfg, cells) == pytest.approx(rates)
    costs = cells_costs(cfg, cells)
    assert costs.step_s(1, 2) / costs.step_s(1, 0) == pytest.approx(1.4), "between what it was told"
    from redraft.eval.serving.cost import advise

    judged = verdict(cfg, cells, advise(rates, costs), 1)
    assert judged["measured"] == pytest.approx({0: 1.0, 1: 1.5 / 1.2, 2: 1.75 / 1.4, 3: 1.85 / 1.6})
    assert judged["expected"] == pytest.approx(judged["measured"])
    assert judged["advised"] == judged["advised_if_drafting"]
    assert judged["ratio"] == pytest.approx(1.0)
    assert sum("PASS" in line for line in lines(judged)) == 2
    worse = {**judged, "ratio": 0.9}
    assert sum("BELOW TARGET" in line for line in lines(worse)) == 1
