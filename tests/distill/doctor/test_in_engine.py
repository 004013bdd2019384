"""The type of the doctor's engine, and how exactly it is held to the published forecast."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from redraft.distill.doctor.in_engine import (
    CACHE_BLOCK,
    EngineCheck,
    Plan,
    Served,
    ask_fallback,
    judge_acceptance,
    judge_dump,
    load_as_trained,
    plan_run,
)
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.hardware import Machine
from redraft.engine.parity.run import Block, Dump, run_engine
from redraft.eval.forecast.stored import StoredForecast, digest_prompt
from redraft.eval.parity.compare import compare
from redraft.files.artifact import publish
from redraft.files.checkpoint import load_tokenizer
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.families.eagle1 import Config, Eagle1
from redraft.heads.families.eagle3 import Config as Eagle3Config
from redraft.heads.families.eagle3 import Eagle3
from redraft.heads.target import Target

NUM_TOKENS, WINDOW = 3, 16
DRAFTS, ACCEPTED = 40, 30


FAST, SLOW = Machine(cpu_has_bfloat16=True), Machine()


def make_pair(target: Path, folder: Path, dtype: str | None, **provenance: Any) -> Pair:
    """A head of the target with a forecast on the fallback questions, made in `dtype`."""
    stored = StoredForecast(
        num_speculative_tokens=NUM_TOKENS,
        max_tokens=64,
        end_ids=(),
        by_prompt={
            digest_prompt(ids): (DRAFTS, ACCEPTED)
            for ids in ask_fallback(load_tokenizer(target), 16)
        },
        dtype=dtype,
    )
    head = Eagle1(Config(), Target.from_model(LlamaForCausalLM.from_pretrained(target)))
    publish(folder, head.export, {"forecast": stored.to_json(), **provenance})
    return Pair.read(TargetFolder.open(target), folder)


def make_plan(
    pair: Pair,
    folder: Path,
    dtype: Any = None,
    machine: Machine = FAST,
    *,
    on_cpu: bool = True,
) -> Plan:
    check = EngineCheck(folder=folder, dtype=dtype, on_cpu=on_cpu)
    return plan_run(pair, NUM_TOKENS, check, machine)


def judge(pair: Pair, plan: Plan, changes: list[int]) -> list[str]:
    """The problems of an engine that accepts more than the forecast says.

    It accepts so many tokens more, prompt by prompt.
    """
    counts = [
        AcceptanceCounts(num_drafts=DRAFTS, num_accepted=ACCEPTED + change) for change in changes
    ]
    draft: Any = None
    served = Served(outputs=[[1]] * len(counts), counts=counts)
    judged = judge_acceptance(pair, plan, served, draft, None, {})
    return [each.problem for each in judged if isinstance(each, Finding)]


def test_acceptance_in_a_long_row_is_shown_by_context(random_target: Path, tmp_path: Path) -> None:
    pair = make_pair(random_target, tmp_path / "draft", "float32")
    counts = [AcceptanceCounts(num_drafts=DRAFTS, num_accepted=ACCEPTED)] * 16
    served = Served(outputs=[[1]] * 16, counts=counts, by_context={2048: counts[0]})
    facts: dict[str, str] = {}
    list(judge_acceptance(pair, make_plan(pair, tmp_path, "float32"), served, None, None, facts))
    tau = 1 + ACCEPTED / DRAFTS
    assert facts["by context"] == f"tau {tau:.2f} at 2,048 to 4,095 tokens ({DRAFTS} drafts)"


@pytest.mark.parametrize(
    ("drafts", "told"), [(40, "beyond their end"), (4, "64 drafts are too few")]
)
def test_acceptance_without_a_reference_says_what_it_was_counted_on(
    drafts: int, told: str, random_target: Path, tmp_path: Path
) -> None:
    pair = make_pair(random_target, tmp_path / "draft", "float32")
    plan = make_plan(pair, tmp_path, "float32")
    plan.stored = None
    counts = [AcceptanceCounts(num_drafts=drafts, num_accepted=drafts // 2)] * 16
    served = Served(outputs=[[1]] * 16, counts=counts)
    notes = list(judge_acceptance(pair, plan, served, None, None, {}))
    assert told in str(notes[-1])


def test_of_a_quantised_target_the_acceptance_is_judged_without_a_comparison(
    random_target: Path, tmp_path: Path
) -> None:
    make_pair(random_target, tmp_path / "draft", None)
    target = shutil.copytree(random_target, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    packed = {"quantization_config": {"quant_method": "awq"}}
    (target / "config.json").write_text(json.dumps(config | packed))
    pair = Pair.read(TargetFolder.open(target), tmp_path / "draft")
    plan = make_plan(pair, tmp_path, "float32")
    blocks = [
        Block(request=request, num_output=number, drafted=[1, 2, 3], passes=[])
        for request in range(16)
        for number in (1, 3, 5, 7)  # in each, one draft token is accepted
    ]
    dump = Dump(run=plan.run, outputs=[[1] * 9] * 16, blocks=blocks)
    facts: dict[str, str] = {}
    first, *_ = judge_dump(pair, plan, dump, facts)
    assert "(awq)" in str(first)
    assert facts["acceptance"] == "tau 2.000 over 48 drafts"
    assert "compared" not in facts


TIES = [1, -1, 0, 0] * 4
"""Half of the prompts count otherwise, and the mean is the forecast's."""


@pytest.mark.parametrize(
    ("forecast", "engine", "is_broken"),
    [
        ("float32", "float32", True),
        ("bfloat16", "float32", False),
        ("float32", "bfloat16", False),
        (None, "float32", False),
    ],
)
def test_prompts_are_compared_one_by_one_only_if_forecast_and_engine_computed_in_float32(
    forecast: str | None, engine: str, is_broken: bool, random_target: Path, tmp_path: Path
) -> None:
    pair = make_pair(random_target, tmp_path / "draft", forecast)
    plan = make_plan(pair, tmp_path, engine)
    assert plan.run.dtype == engine
    problems = judge(pair, plan, TIES)
    assert [("8 prompts" in problem) for problem in problems] == [True] * is_broken
    (worse,) = judge(pair, plan, [-10] * 16)
    assert "1.500" in worse, "the mean counts in every type"


def test_the_engine_runs_in_the_type_of_the_forecast(random_target: Path, tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float32"):
        pair = make_pair(random_target, tmp_path / dtype, dtype)
        assert make_plan(pair, tmp_path).run.dtype == dtype
        assert make_plan(pair, tmp_path, "float32").run.dtype == "float32", "as asked for"
    pair = make_pair(random_target, tmp_path / "elsewhere", "bfloat16")
    assert make_plan(pair, tmp_path, machine=SLOW).run.dtype == "float32", (
        "this CPU has no instructions for bfloat16"
    )
    assert make_plan(pair, tmp_path, on_cpu=False).run.dtype == "bfloat16"
    unknown = make_pair(random_target, tmp_path / "unknown", None)
    assert make_plan(unknown, tmp_path, on_cpu=False).run.dtype == "bfloat16", "on a GPU"


CPU, GPU = {"gpu": "none"}, {"gpu": "NVIDIA H100"}


@pytest.mark.parametrize(
    ("positions", "wanted"),
    [(16_384, [304, 12_000]), (1024, [304, 957]), (300, [233]), (80, [])],
)
def test_a_head_with_windows_is_compared_where_the_engine_has_evicted_blocks(
    positions: int, wanted: list[int], random_target: Path, tmp_path: Path
) -> None:
    """At three windows and two blocks of context, and as far as the target has positions."""
    target = shutil.copytree(random_target, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": positions})
    )
    model = LlamaForCausalLM.from_pretrained(target)
    head = Eagle3(Eagle3Config(window=16, aux_layer_ids=(0, 1)), Target.from_model(model))
    publish(tmp_path / "draft", head.export, {})
    pair = Pair.read(TargetFolder.open(target), tmp_path / "draft")
    plan = make_plan(pair, tmp_path)
    count = len(wanted)
    assert (plan.num_long, [len(ids) for ids in plan.run.prompts[:count]]) == (count, wanted)
    assert len(plan.prompts) == len(plan.run.prompts) - count == 16
    assert plan.run.recorded_prompts == 4 + count
    assert any("evict" in note or "so the engine was checked" in note for note in plan.notes) is (
        positions < 304
    )


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_the_engine_computes_a_windowed_head_as_training_where_it_has_evicted_blocks(
    name: str, random_target: Path, tmp_path: Path
) -> None:
    """At three windows and two blocks of context, and three times as far; W + 1 is found there."""
    target = shutil.copytree(random_target, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    borrowed = Target.from_model(LlamaForCausalLM.from_pretrained(target))
    sizes = {"window": WINDOW, "aux_layer_ids": (1, 2), "num_layers": 2}
    family = find_family(name)
    blocks = {"block_size": 4} if name == "dflash" else {}
    head = family.draft_class()(family.options_class()(**sizes, **blocks), borrowed)
    publish(tmp_path / "draft", head.export, {})
    pair = Pair.read(TargetFolder.open(target), tmp_path / "draft")
    check = EngineCheck(folder=tmp_path, dtype="float32", num_prompts=2, max_tokens=16)
    plan = plan_run(pair, NUM_TOKENS, check)
    (dump,) = run_engine([plan.run], tmp_path)
    lengths = [len(dump.prefix(block)) for block in dump.recorded()]
    assert max(lengths) > 900
    assert any(3 * WINDOW + 2 * CACHE_BLOCK < length < 900 for length in lengths)
    draft, signal = load_as_trained(pair, dump.run.dtype)
    assert compare(draft, name, signal, dump) == []
    draft.views = tuple(replace(view, window=WINDOW + 1) for view in draft.views)
    assert compare(draft, name, signal, dump) != []


def test_a_head_without_windows_gets_no_long_prompt(random_target: Path, tmp_path: Path) -> None:
    plan = make_plan(make_pair(random_target, tmp_path / "draft", "float32"), tmp_path)
    assert (plan.num_long, len(plan.prompts)) == (0, len(plan.run.prompts))
