"""Advise on the number of draft tokens for every batch size."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from redraft.eval.engine.draft_source import shorten_name
from redraft.eval.engine.lookups import lookup_env, needs_plugin
from redraft.eval.engine.server import vllm_keys
from redraft.eval.serving.acceptance_source import (
    Acceptance,
    read_acceptance,
    read_sample_method_advice,
)
from redraft.eval.serving.cost import (
    Advice,
    StepCosts,
    advise,
    has_fixed_tokens,
    has_one_acceptance,
)
from redraft.eval.serving.report import (
    build_speedup_grid,
    describe_speedup,
    find_fastest,
    read_served_sampling,
    read_serving,
)
from redraft.heads.files.artifact import write_whole
from redraft.online.engine.config import PLUGIN_NAME
from redraft.recipes.decide.advise_config import Config


def main(cfg: Config) -> None:
    if cfg.batch_size is not None and cfg.batch_size < 1:
        raise ValueError(f"--batch-size is {cfg.batch_size}: a step has at least 1 request")
    report = read_serving(cfg.serving)
    batch_size = cfg.batch_size or int(report["settings"]["concurrency"])
    fastest = find_fastest(report)
    print(*format_fastest(fastest), sep="\n")
    draft = cfg.draft or (None if cfg.acceptance else choose_draft(fastest, batch_size))
    name, costs = measured_costs(report, draft, cfg.serving)
    acceptance = choose_acceptance(cfg, report, name)
    advice = advise(acceptance.per_position, costs)
    print(*format_advice(cfg, name, advice, acceptance, report), sep="\n")
    if cfg.acceptance is not None:
        temperature = acceptance.sampling.temperature
        for sentence in read_sample_method_advice(
            cfg.acceptance, cfg.acceptance_draft, temperature
        ):
            print(f"\n{sentence}")
    result: dict[str, Any] = {"draft": name, "advice": advice.to_json(), "batch_size": batch_size}
    result["fastest"] = {str(b): row and row["draft"] for b, row in fastest.items()}
    if cfg.output is not None:
        write_whole(cfg.output, json.dumps(result, indent=2, sort_keys=True) + "\n")


def choose_draft(fastest: Mapping[int, Mapping[str, Any] | None], batch_size: int) -> str | None:
    """The fastest draft at the measured number of requests nearest to `batch_size`.

    None if there is none.
    """
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


def measured_costs(
    report: Mapping[str, Any], draft: str | None, path: Path
) -> tuple[str, StepCosts]:
    """(draft, step costs).

    Raises:
        ValueError: the benchmark has no such draft, or no costs, or the acceptance changes with the
            load or the number of tokens.
    """
    drafts = report["drafts"]
    if draft is not None and draft not in drafts:
        raise ValueError(f"{path} has no draft {draft!r}: choose one of {', '.join(drafts)}")
    name = draft or report["settings"]["draft"]
    if drafts[name]["costs"] is None:
        raise ValueError(f"{path} has no step costs of {name}: run `redraft bench` with it again")
    if not has_one_acceptance(drafts[name]["config"]):
        raise ValueError(
            f"the acceptance of {shorten_name(name)} changes with the load or the number of "
            "tokens: take the fastest "
            f"that {path} has measured, or another --draft"
        )
    return name, StepCosts.from_json(drafts[name]["costs"])


def choose_acceptance(cfg: Config, report: Mapping[str, Any], name: str) -> Acceptance:
    """The acceptance of requests sampled as the benchmark's, or at --temperature.

    Raises:
        ValueError: if the benchmark counted none and no other report is given, or none is of such
            requests.
    """
    served = read_served_sampling(report)
    if cfg.temperature is not None:
        served = served.at(cfg.temperature)
    if cfg.acceptance is not None:
        acceptance = read_acceptance(cfg.acceptance, cfg.acceptance_draft, served)
        if acceptance.penalties != report["settings"].get("penalties", {}):
            raise ValueError(
                f"{cfg.acceptance} has not the penalties of {cfg.serving}: leave out --acceptance"
            )
        return acceptance
    if not report["drafts"][name]["acceptance_per_position"]:
        raise ValueError(f"{cfg.serving} counted no acceptance of {name}: give --acceptance REPORT")
    return read_acceptance(cfg.serving, name, served)


def format_advice(
    cfg: Config, draft: str, advice: Advice, acceptance: Acceptance, report: Mapping[str, Any]
) -> Iterator[str]:
    """The table over batch size and k, the best k, and the vLLM flag to paste.

    With the acceptance of another draft, the flag names no draft: the user fills it in.
    """
    rates, source = (
        ", ".join(f"{rate:.2f}" for rate in advice.acceptance_per_position),
        cfg.acceptance or cfg.serving,
    )
    yield (
        f"{shorten_name(draft)} for {report['target']}: accepted up to each position {rates} "
        f"({source})"
    )
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
    # The method of the flag follows the acceptance; the times may come from the other: told.
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
            yield (
                f"vLLM takes one number for {config['method']}: {k} is the best on average over "
                "these batch sizes"
            )
        variables = {
            **lookup_env(config),
            **({"VLLM_PLUGINS": PLUGIN_NAME} if needs_plugin(config) else {}),
        }
        shown = "".join(f"{name}={value} " for name, value in variables.items())
        yield f"\n{shown}--speculative-config {shlex.quote(json.dumps(vllm_keys(pasted)))}"
