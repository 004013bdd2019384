"""Advise on the number of draft tokens for every batch size, and on the kind of draft for a workload."""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redraft.eval.counts import cumulative, tau
from redraft.eval.engine.draft_source import shorten_name
from redraft.eval.engine.lookups import lookup_env, needs_plugin
from redraft.eval.engine.server import vllm_keys
from redraft.eval.forecast.ngram import Ngram
from redraft.eval.serving.acceptance_source import Acceptance, read_acceptance, read_sample_method_advice
from redraft.eval.serving.cost import Advice, StepCosts, advise, has_fixed_tokens
from redraft.eval.serving.report import (
    build_speedup_grid,
    describe_speedup,
    find_fastest,
    read_served_sampling,
    read_serving,
)
from redraft.eval.serving.workload import Exchange, Lookup, look_up
from redraft.heads.files.artifact import write_whole
from redraft.heads.progress import Progress
from redraft.online.engine.config import PLUGIN_NAME
from redraft.recipes.cli import run_recipe
from redraft.recipes.decide import advise_config
from redraft.recipes.decide.advise_config import Config

LOOKUP = "ngram"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of draft that could be served, with the expected speed-up."""

    name: str
    advice: Advice
    cost: float
    """Time of a draft step over a target step, at the compared batch size."""


def main(cfg: Config) -> None:
    if cfg.batch_size is not None and cfg.batch_size < 1:
        raise ValueError(f"--batch-size is {cfg.batch_size}: a step has at least 1 request")
    report = read_serving(cfg.serving)
    batch_size = cfg.batch_size or int(report["settings"]["concurrency"])
    fastest = find_fastest(report)
    draft = cfg.draft or (None if cfg.acceptance else choose_draft(fastest, batch_size))
    name, costs = measured_costs(report, draft, cfg.serving)
    acceptance = choose_acceptance(cfg, report, name)
    rates = acceptance.per_position
    advice = advise(rates, costs)
    print(*format_fastest(fastest), *format_advice(cfg, name, advice, acceptance, report), sep="\n")
    if cfg.acceptance is not None:
        temperature = acceptance.sampling.temperature
        for sentence in read_sample_method_advice(cfg.acceptance, cfg.acceptance_draft, temperature):
            print(f"\n{sentence}")
    result: dict[str, Any] = {"draft": name, "advice": advice.to_json(), "batch_size": batch_size}
    result["fastest"] = {str(b): row and row["draft"] for b, row in fastest.items()}
    if cfg.data is not None:
        from redraft.distill.data.day import choose_day

        day = choose_day(cfg.date)
        lookup = look_up(read_exchanges(cfg, report["target"], day), Ngram(), len(rates))
        measured = Kind(name=shorten_name(name), advice=advice, cost=costs.draft_cost(batch_size))
        # A measured n-gram draft is left out: the replay has the acceptance of this kind on the workload.
        kinds = [*([] if name == LOOKUP else [measured]), ngram_kind(costs, lookup)]
        needed = find_head_alpha(costs, kinds, batch_size, len(rates), count_layers(cfg.target or report["target"]))
        print("", *format_kinds(kinds, lookup, needed, batch_size), *format_measurements(report), sep="\n")
        suits = choose_kind(kinds, batch_size)
        result |= {"ngram_overlap": lookup.overlap, "suits": suits, "date": day.isoformat()}
    if cfg.output is not None:
        write_whole(cfg.output, json.dumps(result, indent=2, sort_keys=True) + "\n")


def choose_draft(fastest: Mapping[int, Mapping[str, Any] | None], batch_size: int) -> str | None:
    """The fastest draft at the measured number of requests nearest to `batch_size`; None if there is none."""
    nearest = min(fastest, key=lambda b: abs(b - batch_size), default=None)
    row = None if nearest is None else fastest[nearest]
    return None if row is None else str(row["draft"])


def format_fastest(fastest: Mapping[int, Mapping[str, Any] | None]) -> Iterator[str]:
    """The fastest measured draft at every number of requests, a line each."""
    for concurrency, row in fastest.items():
        requests = f"{concurrency} request{'s' if concurrency > 1 else ''}"
        if row is None:
            yield f"measured fastest at {requests}: no draft"
            continue
        draft, k = shorten_name(row["draft"]), row["num_speculative_tokens"]
        yield f"measured fastest at {requests}: {draft} with k = {k}, {describe_speedup(row)}"
    if fastest:
        yield ""


def measured_costs(report: Mapping[str, Any], draft: str | None, path: Path) -> tuple[str, StepCosts]:
    """(draft, step costs).

    Raises:
        ValueError: if the benchmark has no such draft or no step costs of it.
    """
    drafts = report["drafts"]
    if draft is not None and draft not in drafts:
        raise ValueError(f"{path} has no draft {draft!r}: choose one of {', '.join(drafts)}")
    name = draft or report["settings"]["draft"]
    if drafts[name]["costs"] is None:
        raise ValueError(f"{path} has no step costs of {name}: run `redraft bench` with it again")
    return name, StepCosts.from_json(drafts[name]["costs"])


def choose_acceptance(cfg: Config, report: Mapping[str, Any], name: str) -> Acceptance:
    """The acceptance of requests sampled as the benchmark's, or at --temperature.

    Raises:
        ValueError: if the benchmark counted none and no other report is given, or none is of such requests.
    """
    served = read_served_sampling(report)
    if cfg.temperature is not None:
        served = served.at(cfg.temperature)
    if cfg.acceptance is not None:
        return read_acceptance(cfg.acceptance, cfg.acceptance_draft, served)
    if not report["drafts"][name]["acceptance_per_position"]:
        raise ValueError(f"{cfg.serving} counted no acceptance of {name}: give --acceptance REPORT")
    return read_acceptance(cfg.serving, name, served)


def format_advice(
    cfg: Config, draft: str, advice: Advice, acceptance: Acceptance, report: Mapping[str, Any]
) -> Iterator[str]:
    """The table over batch size and k, the best k, and the vLLM flag to paste.

    With the acceptance of another draft, the flag names no draft: the user fills it in.
    """
    rates, source = ", ".join(f"{rate:.2f}" for rate in advice.acceptance_per_position), cfg.acceptance or cfg.serving
    yield f"{shorten_name(draft)} for {report['target']}: accepted up to each position {rates} ({source})"
    method = "sampled" if acceptance.is_sampled else "greedy"
    yield f"for requests at {acceptance.sampling.words}, with {method} drafts"
    yield "\nexpected speed-up (* marks the best; without a mark, no draft is best)"
    header, rows = build_speedup_grid(advice.to_json())
    yield "".join(f"{cell:>20}" if i == 0 else f"{cell:>9}" for i, cell in enumerate(header))
    for row in rows:
        best = advice.best(int(row[0]))
        cells = [f"{cell}{'*' if 0 < i == best else ' '}" for i, cell in enumerate(row)]
        yield "".join(f"{cell:>20}" if i == 0 else f"{cell:>9}" for i, cell in enumerate(cells))
    yield f"\n{advice.sentence}"
    config = {**report["drafts"][draft]["config"]}
    # The method of the flag follows the acceptance. The times may come from drafts of the other method: told,
    # not corrected.
    is_timed_sampled = config.pop("draft_sample_method", "greedy") == "probabilistic"
    if is_timed_sampled != acceptance.is_sampled:
        yield f"the step times are those of {'sampled' if is_timed_sampled else 'greedy'} drafts"
    if acceptance.is_sampled:
        config["draft_sample_method"] = "probabilistic"
    if cfg.acceptance is not None and "model" in config:
        config = {**config, "model": "DRAFT"}
    if pasted := advice.speculative_config(config):
        if has_fixed_tokens(config) and len(advice.schedule) > 1:
            k = pasted["num_speculative_tokens"]
            yield f"vLLM takes one number for {config['method']}: {k} is the best on average over these batch sizes"
        variables = {**lookup_env(config), **({"VLLM_PLUGINS": PLUGIN_NAME} if needs_plugin(config) else {})}
        shown = "".join(f"{name}={value} " for name, value in variables.items())
        yield f"\n{shown}--speculative-config {shlex.quote(json.dumps(vllm_keys(pasted)))}"


def read_exchanges(cfg: Config, served_target: str, day: datetime.date) -> Iterator[Exchange]:
    """The last turn of every conversation: prompt and answer, as written on `day`.

    Raises:
        ValueError: if the tokenizer has no chat template.
    """
    from redraft.distill.data.conversations import load_conversations
    from redraft.distill.data.rendering import Renderer
    from redraft.heads.files.checkpoint import load_tokenizer

    assert cfg.data is not None
    render = Renderer(load_tokenizer(cfg.target or served_target), {}, day)
    conversations = load_conversations(cfg.data)[: cfg.num_conversations]
    for conversation in Progress(conversations, desc="workload", unit="conversation"):
        for turn in render.turns(conversation, lambda turn: turn)[0][-1:]:
            prompt_ids, answer_ids = render.tokenise_turn(turn)
            yield Exchange(prompt_ids=prompt_ids, answer_ids=answer_ids)


def ngram_kind(costs: StepCosts, lookup: Lookup) -> Kind:
    """Prompt lookup on the workload. A lookup takes no time compared with a target step."""
    free = replace(costs, draft_s=dict.fromkeys(costs.draft_s, 0.0))
    return Kind(name=LOOKUP, advice=advise(lookup.acceptance_per_position, free), cost=0)


def speedup_at(advice: Advice, batch_size: int) -> float:
    """Expected speed-up of the best k, at the measured batch size nearest to `batch_size`."""
    nearest = min({row.batch_size for row in advice.table}, key=lambda b: abs(b - batch_size))
    return max(row.speedup for row in advice.table if row.batch_size == nearest)


def choose_kind(kinds: Sequence[Kind], batch_size: int) -> str:
    """The kind with the highest expected speed-up; `none` if no kind is faster than no draft."""
    best = max(kinds, key=lambda kind: speedup_at(kind.advice, batch_size))
    return best.name if speedup_at(best.advice, batch_size) > 1 else "none"


def count_layers(target: str) -> int:
    from redraft.heads.files.checkpoint import load_text_config

    return int(load_text_config(target).num_hidden_layers)


def find_head_alpha(costs: StepCosts, kinds: Sequence[Kind], batch_size: int, k: int, layers: int) -> float | None:
    """The smallest alpha at which a head of one layer beats every kind; None if even alpha = 1 is not enough.

    The head's step is assumed to take 1 / layers of a target step, and verification to cost the same as measured.
    """
    # k = 0: a step of the target alone, 1 row for each request.
    plain_s = {b: by_k[0] for b, by_k in costs.target_s.items()}
    head = replace(costs, draft_s={b: seconds / layers for b, seconds in plain_s.items()})
    # 1.0 is no draft: if no kind pays, the head has to beat this.
    best = max(1.0, *(speedup_at(kind.advice, batch_size) for kind in kinds))
    steps = [i / 100 for i in range(1, 101)]
    # All positions accepted alike: alpha = 0.5 and k = 3 give 0.5, 0.25, 0.125.
    return next((a for a in steps if speedup_at(advise(cumulative([a] * k), head), batch_size) > best), None)


def format_kinds(kinds: Sequence[Kind], lookup: Lookup, needed: float | None, batch_size: int) -> Iterator[str]:
    """The numbers of every kind, and the one that suits the workload."""
    yield (
        f"workload: {lookup.num_answers} answers of {lookup.num_tokens:,} tokens; {lookup.overlap:.0%} of the answers' "
        f"4-grams occur in the prompts; lookup drafts something in {lookup.drafted:.0%} of the steps"
    )
    yield f"{'kind':<28}{'tau':>6}{'draft / target step':>21}{'best k':>8}{f'speed-up at {batch_size}':>16}"
    for kind in kinds:
        rates = kind.advice.acceptance_per_position
        yield (
            f"{kind.name:<28}{tau(rates):>6.2f}{kind.cost:>21.3f}{kind.advice.best(batch_size):>8}"
            f"{speedup_at(kind.advice, batch_size):>15.2f}x"
        )
    condition = f"with alpha above {needed:.2f}" if needed else "not even if every token were accepted"
    yield f"a head of one layer would beat them {condition}"
    best = choose_kind(kinds, batch_size)
    yield f"suits this workload: {best}" if best != "none" else "suits this workload: no draft"


def format_measurements(report: Mapping[str, Any]) -> Iterator[str]:
    """The benchmark's measurement of every draft, on the benchmark's data."""
    for row in report["tables"].get("draft", ()):
        if row["draft"] and row["speedup"] is not None:
            method = report["drafts"][row["draft"]]["config"].get("method", "draft")
            yield (
                f"measured on {row['data']}: {shorten_name(row['draft'])} ({method}) {row['speedup']:.2f}x at "
                f"{row['concurrency']} requests, tau {row['measured']['tau']:.2f}, k = {row['num_speculative_tokens']}"
            )


if __name__ == "__main__":
    run_recipe(main, Config, advise_config.__doc__)
