"""The sections of a comparison's report, and its verdicts as text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from redraft.distill.run.proof import make_logits
from redraft.eval.engine.draft_source import NGRAM
from redraft.eval.engine.lossless import compare_lossless
from redraft.eval.engine.measure import Measurement
from redraft.eval.report.page import Speed, engine_section
from redraft.eval.serving.drafts import Choice
from redraft.eval.serving.rounds import PLAIN, Results, compare, count, merge
from redraft.recipes.decide.compare_config import parse_trained

LOADS = (1, 8)  # Requests in flight.
ONE, MANY = LOADS

# Rounds differ by several percent: down to this ratio at eight requests a draft costs nothing.
FREE_AT_MANY = 0.95


def verdict(choice: Choice) -> str:
    """The measured speed of a draft in the first rounds, and the best number of tokens."""
    one, many = (choice.measured[str(load)].ratio for load in LOADS)
    text = (
        f"{choice.candidate.title}: {one:.2f}x as fast as no draft at one request, {many:.2f}x "
        "at eight"
    )
    if choice.candidate.chooses_length:
        return text
    best, speed = choice.best["1"], choice.speedups["1"]
    return f"{text}; {speed:.2f}x expected with {best.num_speculative_tokens} draft tokens at one"


def choose_served(best: Sequence[Choice]) -> str:
    """The draft with the highest expected speed at one request, of those that cost nothing at
    eight; else no draft.
    """
    for choice in best:
        if choice.speedups["1"] > 1 and choice.speedups["8"] > FREE_AT_MANY:
            return choice.candidate.name
    return PLAIN


def describe_speed(
    target: str,
    choices: Sequence[Choice],
    best: Sequence[Choice],
    confirmed: Mapping[str, Results],
    first: Sequence[Results],
) -> dict[str, Any]:
    """The sections `speed`, `served` and `titles`.

    The draft to serve, chosen in the first rounds and measured in the last ones.
    """
    served = choose_served(best)
    rows = {name: by_load(results, name) for name, results in confirmed.items()}
    rows[PLAIN] = by_load(next(iter(confirmed.values())), PLAIN)
    pilot = {choice.candidate.name: choice.to_json()["measured"] for choice in choices}
    pilot[PLAIN] = by_load(first[0], PLAIN)
    head = find_head(choices)
    mine = rows[served]
    return {
        "speed": {
            "served": served,
            "ratio_1": mine["1"]["ratio"],
            "ratio_1_low": mine["1"]["interval"][0],
            "ratio_8": mine["8"]["ratio"],
            "ratio_8_low": mine["8"]["interval"][0],
            "ngram_ratio_1": rows[NGRAM]["1"]["ratio"],
            # With eight requests four times as many answers are counted. The number of requests
            # does not change tau.
            "head_tau": rows.get(head.candidate.name, pilot[head.candidate.name])["8"]["tau"]
            if head
            else None,
            "rounds": len(mine["1"]["ratios"]),
            "by_draft": rows,
            "pilot": pilot,
        },
        "served": _describe_served(target, served, best, confirmed),
        "titles": {
            PLAIN: "no draft",
            **{choice.candidate.name: choice.candidate.title for choice in choices},
        },
    }


def by_load(results: Results, name: str) -> dict[str, Any]:
    return {str(load): asdict(compare(results, name, load)) for load in LOADS}


def _describe_served(
    target: str, served: str, best: Sequence[Choice], confirmed: Mapping[str, Results]
) -> dict[str, Any]:
    """The draft to serve: the configuration, and its outputs beside those of the target alone.

    In 16 bits, rounding parts the target from itself when eight requests are answered at once.
    """
    results = confirmed.get(served) or next(iter(confirmed.values()))
    ours, plain = (merge(results[name, ONE]) for name in (served, PLAIN))
    logits = make_logits(target)
    # The widest gap of the target against itself, in batches of eight and of one, is the rounding
    # of this dtype here.
    rounding = compare_lossless(_choose_prompts(merge(results[PLAIN, MANY]), plain), plain, logits)
    lossless = compare_lossless(ours, plain, logits, known_rounding=rounding.widest_gap)
    differences = [asdict(difference) for difference in lossless.differences]
    configs = {choice.candidate.name: dict(choice.speculative_config) for choice in best}
    return {
        "speculative_config": configs.get(served),
        "lossless": lossless.lossless,
        "num_prompts": lossless.num_prompts,
        "without_draft": {"parted": len(rounding.differences), "widest_gap": rounding.widest_gap},
        "ties": [row for row in differences if row["is_tie"]],
        "differences": [row for row in differences if not row["is_tie"]],
        "dtype": ours.dtype,
    }


def _choose_prompts(run: Measurement, like: Measurement) -> Measurement:
    """The part of a merged measurement with the prompts of another.

    At eight requests more prompts are asked.
    """
    outputs = {
        tuple(p.token_ids): output for p, output in zip(run.prompts, run.outputs, strict=True)
    }
    return replace(
        run, prompts=like.prompts, outputs=[outputs[tuple(p.token_ids)] for p in like.prompts]
    )


def find_head(choices: Sequence[Choice]) -> Choice | None:
    """The trained draft without a lookup that is expected to be the fastest.

    None if nothing was trained.
    """
    trained = [
        choice
        for choice in choices
        if choice.candidate.training and not parse_trained(choice.candidate.name).lookup
    ]
    return max(trained, key=lambda choice: choice.speedups["1"], default=None)


def describe_head(
    target: str,
    output: Path,
    choices: Sequence[Choice],
    first: Sequence[Results],
    confirmed: Mapping[str, Results],
) -> dict[str, Any]:
    """The sections of the best trained draft's own report, with the first rounds as `engine`.

    None without one. The speed is of the last rounds, if the draft took part.
    """
    head = find_head(choices)
    if head is None:
        return {}
    name = head.candidate.name
    report = json.loads((output / name / "report.json").read_text())
    results = next(results for results in first if (name, MANY) in results)
    ours, plain = (merge(results[server, MANY]) for server in (name, PLAIN))
    lossless = compare_lossless(ours, plain, make_logits(target))
    counts = ours.counts_by_domain
    domains = {
        domain: {**row, "tau": counts[domain].tau if domain in counts else None}
        for domain, row in report["by_domain"].items()
    }
    engine = engine_section(ours, lossless, report["offline"]["tau_forecast"])
    if last := confirmed.get(name):
        rates = [[run.tokens_per_s for run in last[server, ONE]] for server in (name, PLAIN)]
        served = count(last, name, ONE)
        speed = Speed(with_draft=rates[0], without_draft=rates[1])
        engine["speed"] = speed.to_json(served.tau, len(served.accepted_per_position))
    kept = {key: report[key] for key in ("draft", "offline", "curves")}
    kept["train"] = {**report["train"], "steps": report["train"]["exported_step"]}
    return {**kept, "by_domain": domains, "engine": {**engine, "decoder": "a real vLLM"}}


def compose_answer(report: Mapping[str, Any]) -> Iterator[str]:
    """A line for each confirmed draft, with prediction and measurement, and the draft to serve."""
    for row in report["confirmed"]:
        one, many = row["1"], row["8"]
        yield (
            f"{row['title']}: {one['ratio']:.2f}x as fast at one request "
            f"[{one['interval'][0]:.2f}, {one['interval'][1]:.2f}], predicted "
            f"{row['predicted']['1']:.2f}x; "
            f"{many['ratio']:.2f}x at eight, predicted {row['predicted']['8']:.2f}x"
        )
    speed, baseline = report["speed"], report["baseline"]
    if speed["served"] == PLAIN:
        yield "no draft makes this target faster here: serve it without"
    elif speed["ratio_1_low"] <= 1:
        yield (
            f"{report['titles'][speed['served']]}: not proven faster, the interval contains 1: "
            "serve without a draft"
        )
    else:
        yield f"serve {report['titles'][speed['served']]}"
    yield (
        f"without a draft: {baseline['mode']}, {baseline['tokens_s']:.1f} tokens/s, "
        f"{baseline['step_ms']:.1f} ms a step"
        + (
            f", {100 * share:.0f}% of the memory bandwidth's limit"
            if (share := baseline["limit_share"])
            else ""
        )
        + (f", {baseline['threads']} threads" if baseline["threads"] else "")
    )
    if baseline["speeds"] > 1:
        yield (
            f"warning: the server without a draft ran at {baseline['speeds']} speeds, so no "
            "ratio here is sound"
        )
