"""Say how many tokens to draft at every batch size, and what kind of draft suits a workload.

$ redraft advise --serving outputs/bench-serving/serving.json                   # table, best k, when off, what to paste
$ redraft advise --serving serving.json --acceptance outputs/eval/report.json   # the acceptance of another draft
$ redraft advise --serving serving.json --data answers.jsonl                    # draft model, n-grams or a head?

The times of the steps come from `redraft bench`, the acceptance by position from there, from `redraft eval` or from a
training run's report.json. With --data, what n-grams would find in the workload is looked up in it, exactly.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.acceptance import cumulative, tau
from eval.acceptance_source import read_acceptance
from eval.cost import FIXED, Advice, StepCosts, advise
from eval.engine import lookup_env
from eval.ngram import Ngram
from eval.serving_report import read_serving, speedup_grid, title
from eval.workload import Exchange, Lookup, look_up
from heads.artifact import write_whole
from recipes.cli import run_recipe

LOOKUP = "ngram"


@dataclass(frozen=True, kw_only=True)
class Config:
    serving: Path = Path("outputs/bench-serving/serving.json")
    """What `redraft bench` wrote: the times of the steps."""
    draft: str | None = None
    """Draft of it whose steps count; by default the one that was measured by draft tokens and concurrency."""
    acceptance: Path | None = None
    """report.json of `redraft eval` or of a training run: its acceptance in place of the benchmark's."""
    acceptance_draft: str | None = None
    """Draft of that report, where it has several."""
    data: str | None = None
    """A workload with answers (as --data.source of distill; best the target's own, by `redraft regenerate`)."""
    num_conversations: int = 200
    """Of the workload, at most."""
    target: str | None = None
    """Folder or hub name whose tokenizer reads the workload; by default the benchmark's target."""
    batch_size: int | None = None
    """Requests in a step that the kinds of draft are compared at; by default the benchmark's concurrency."""
    output: Path | None = None
    """File that receives the advice as JSON."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of draft that could be served, and what it is expected to be worth."""

    name: str
    advice: Advice
    cost: float
    """Its draft step over the target's step, at the compared batch size."""


def main(cfg: Config) -> None:
    if cfg.batch_size is not None and cfg.batch_size < 1:
        raise ValueError(f"--batch-size is {cfg.batch_size}: a step has at least 1 request")
    report = read_serving(cfg.serving)
    name, costs = measured_costs(report, cfg.draft, cfg.serving)
    batch_size = cfg.batch_size or int(report["settings"]["concurrency"])
    rates, source = acceptance_of(cfg, report, name)
    own = advise(rates, costs)
    print(*own_lines(name, own, source, report, is_its_own=cfg.acceptance is None), sep="\n")
    result: dict[str, Any] = {"draft": name, "advice": own.to_json(), "batch_size": batch_size}
    if cfg.data is not None:
        lookup = look_up(exchanges(cfg, report["target"]), Ngram(), len(rates))
        kinds = [Kind(name=title(name), advice=own, cost=costs.draft_cost(batch_size)), ngram_kind(costs, lookup)]
        needed = head_needs(costs, kinds, batch_size, len(rates), num_layers(cfg.target or report["target"]))
        print("", *kind_lines(kinds, lookup, needed, batch_size), *measured_lines(report), sep="\n")
        result |= {"ngram_overlap": lookup.overlap, "suits": best_kind(kinds, batch_size)}
    if cfg.output is not None:
        write_whole(cfg.output, json.dumps(result, indent=2, sort_keys=True) + "\n")


def measured_costs(report: Mapping[str, Any], draft: str | None, path: Path) -> tuple[str, StepCosts]:
    """(draft, its step costs).

    Raises: ValueError where the benchmark has none of this draft.
    """
    drafts = report["drafts"]
    if draft is not None and draft not in drafts:
        raise ValueError(f"{path} has no draft {draft!r}: there is {', '.join(drafts)}")
    name = draft or report["settings"]["draft"]
    if drafts[name]["costs"] is None:
        raise ValueError(f"{path} has no step costs of {name}: measure it as the first of --draft")
    return name, StepCosts.from_json(drafts[name]["costs"])


def acceptance_of(cfg: Config, report: Mapping[str, Any], name: str) -> tuple[Sequence[float], str]:
    """(acceptance by position, where it comes from).

    Raises: ValueError.
    """
    if cfg.acceptance is not None:
        return read_acceptance(cfg.acceptance, cfg.acceptance_draft), str(cfg.acceptance)
    rates: list[float] = report["drafts"][name]["acceptance_per_position"]
    if not rates:
        raise ValueError(f"{cfg.serving} counted no acceptance of {name}: give --acceptance REPORT")
    return rates, str(cfg.serving)


def own_lines(
    draft: str, advice: Advice, source: str, report: Mapping[str, Any], *, is_its_own: bool = True
) -> Iterator[str]:
    """The table over batch size and k, the best k, and the configuration to paste; the draft of another report's
    acceptance is left to be filled in."""
    rates = ", ".join(f"{rate:.2f}" for rate in advice.acceptance_per_position)
    yield f"{title(draft)} for {report['target']}: accepted up to each position {rates} ({source})"
    yield "\nexpected speed-up (* the best; where there is none, without a draft)"
    header, rows = speedup_grid(advice.to_json())
    yield "".join(f"{cell:>20}" if i == 0 else f"{cell:>9}" for i, cell in enumerate(header))
    for row in rows:
        best = advice.best(int(row[0]))
        cells = [f"{cell}{'*' if 0 < i == best else ' '}" for i, cell in enumerate(row)]
        yield "".join(f"{cell:>20}" if i == 0 else f"{cell:>9}" for i, cell in enumerate(cells))
    yield f"\n{advice.sentence}"
    config = report["drafts"][draft]["config"]
    if not is_its_own and "model" in config:
        config = {**config, "model": "DRAFT"}
    if pasted := advice.speculative_config(config):
        if config.get("method") in FIXED and len(advice.schedule) > 1:
            k = pasted["num_speculative_tokens"]
            yield f"vLLM takes one number for {config['method']}: {k} is the best on the average of these batch sizes"
        before = "".join(f"{name}={value} " for name, value in lookup_env(config).items())
        yield f"\n{before}--speculative-config {shlex.quote(json.dumps(pasted))}"


def exchanges(cfg: Config, served_target: str) -> Iterator[Exchange]:
    """The last turn of every conversation: what a server is given, and what was answered.

    Raises: ValueError where the tokenizer has no chat template.
    """
    from transformers import AutoTokenizer

    from distill.data import load_conversations
    from distill.samples import Renderer

    assert cfg.data is not None
    render = Renderer(AutoTokenizer.from_pretrained(cfg.target or served_target), {})
    conversations = load_conversations(cfg.data)[: cfg.num_conversations]
    for conversation in tqdm(conversations, desc="workload", unit="conversation"):
        for prompt_ids, answer_ids in render.tokenise_turns(render.turns(conversation)[-1:]):
            yield Exchange(prompt_ids=prompt_ids, answer_ids=answer_ids)


def ngram_kind(costs: StepCosts, lookup: Lookup) -> Kind:
    """N-grams as the workload holds them; looking up takes no time beside a step of the target."""
    free = replace(costs, draft_s=dict.fromkeys(costs.draft_s, 0.0))
    return Kind(name=LOOKUP, advice=advise(lookup.acceptance_per_position, free), cost=0)


def speedup_at(advice: Advice, batch_size: int) -> float:
    """Expected speed-up of the best k at the measured batch size nearest to the asked one."""
    nearest = min({row.batch_size for row in advice.table}, key=lambda b: abs(b - batch_size))
    return max(row.speedup for row in advice.table if row.batch_size == nearest)


def best_kind(kinds: Sequence[Kind], batch_size: int) -> str:
    """The kind that is expected to speed up most; `none` where no one does."""
    best = max(kinds, key=lambda kind: speedup_at(kind.advice, batch_size))
    return best.name if speedup_at(best.advice, batch_size) > 1 else "none"


def num_layers(target: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(target).get_text_config().num_hidden_layers)


def head_needs(costs: StepCosts, kinds: Sequence[Kind], batch_size: int, k: int, layers: int) -> float | None:
    """The alpha from which on a head of one layer beats every kind; None where even alpha = 1 does not.

    Its step is taken for 1 / layers of the target's, its verification for that of the measured draft.
    """
    plain_s = {b: by_k[0] for b, by_k in costs.target_s.items()}
    head = replace(costs, draft_s={b: seconds / layers for b, seconds in plain_s.items()})
    best = max(1.0, *(speedup_at(kind.advice, batch_size) for kind in kinds))
    steps = [i / 100 for i in range(1, 101)]
    return next((a for a in steps if speedup_at(advise(cumulative([a] * k), head), batch_size) > best), None)


def kind_lines(kinds: Sequence[Kind], lookup: Lookup, needed: float | None, batch_size: int) -> Iterator[str]:
    """Which kind suits the workload, with the numbers that say so."""
    yield (
        f"workload: {lookup.num_answers} answers of {lookup.num_tokens:,} tokens; their prompts hold "
        f"{lookup.overlap:.0%} of their 4-grams, something is looked up for {lookup.drafted:.0%} of the steps"
    )
    yield f"{'kind':<28}{'tau':>6}{'draft / target step':>21}{'best k':>8}{f'speed-up at {batch_size}':>16}"
    for kind in kinds:
        rates = kind.advice.acceptance_per_position
        yield (
            f"{kind.name:<28}{tau(rates):>6.2f}{kind.cost:>21.3f}{kind.advice.best(batch_size):>8}"
            f"{speedup_at(kind.advice, batch_size):>15.2f}x"
        )
    beats = f"from alpha {needed:.2f} on" if needed else "not even if every token were accepted"
    yield f"a head of one layer would beat them {beats}"
    best = best_kind(kinds, batch_size)
    yield f"suits this workload: {best}" if best != "none" else "suits this workload: no draft"


def measured_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """What the benchmark itself measured of every draft, on its own data."""
    for row in report["tables"].get("draft", ()):
        if row["draft"] and row["speedup"] is not None:
            method = report["drafts"][row["draft"]]["config"].get("method", "draft")
            yield (
                f"measured on {row['data']}: {title(row['draft'])} ({method}) {row['speedup']:.2f}x at "
                f"{row['concurrency']} requests, tau {row['measured']['tau']:.2f}, k = {row['num_speculative_tokens']}"
            )


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
