"""The conclusions of an acceptance report, in sentences. k = num_speculative_tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redraft.eval.report.results import (
    MAX_DIFFERENCE,
    Measured,
    choose_common_k,
    compare_taus,
    find_entry,
    read_tau,
)
from redraft.heads.catalog import find_method

Report = Mapping[str, Any]


def compose_answer(measured: Measured, report: Report) -> list[str]:
    """Return the report's `answer`, one sentence per item. The first is the page's title.

    All sentences concern the draft with the highest tau over all domains at the first temperature.
    """
    first, k = measured.temperatures[0], choose_common_k(report["results"])
    overall = {
        (row["draft"], row["temperature"]): read_tau(entry)
        for row in report["results"]
        if row["domain"] is None and (entry := find_entry(row, k))
    }
    taus = {draft: tau for (draft, temperature), tau in overall.items() if temperature == first}
    best, *others = sorted(taus, key=lambda name: -taus[name])
    sentences = [_headline(report, best, first, k)]
    if others:
        sentences.append(_compare_with_next(measured, best, others[0], taus, first, k))
    if parts := [
        f"{overall[best, t]:.2f} at temperature {t:g}"
        for t in measured.temperatures[1:]
        if (best, t) in overall
    ]:
        sentences.append(f"Over all domains, its tokens per target step are {join_words(parts)}.")
    sentences.append(_compare_with_engine(report))
    sentences += _last_token(report, best, first)
    sentences += _other_sampling(report, best, k)
    return sentences


def _headline(report: Report, best: str, temperature: float, k: int) -> str:
    rows = [r for r in report["results"] if (r["draft"], r["temperature"]) == (best, temperature)]
    shown = [row for row in rows if row["domain"] is not None] or rows
    taus = [(read_tau(entry), row["domain"]) for row in shown if (entry := find_entry(row, k))]
    # Equal taus are ordered by domain. None occurs only if there is a single domain.
    (tau, domain), *others = sorted(taus, reverse=True)
    parts = [f"{tau:.2f} tokens per target step{_on(domain)}"]
    parts += [f"{tau:.2f}{_on(domain)}" for tau, domain in others]
    return (
        f"{best} emits {', '.join(parts)} (k = {k} draft token{'s' if k > 1 else ''}, "
        f"temperature {temperature:g})."
    )


def _compare_with_next(
    measured: Measured,
    best: str,
    second: str,
    taus: Mapping[str, float],
    temperature: float,
    k: int,
) -> str:
    theirs, ours = (f"{taus[name]:.2f}" for name in (second, best))
    numbers = f"with {theirs} against {ours} over all domains"
    lead = compare_taus(measured, best, second, temperature, k)
    if lead is None:
        return f"Second is {second}, {numbers}."
    value, low, high = lead
    interval = f"difference {value:+.2f}, 95% interval {low:+.2f} to {high:+.2f}"
    # `best` has the higher tau, so its lead is proven if even the lower end is positive.
    if low > 0:
        return f"Second is {second}, {numbers} ({interval})."
    return (
        f"The difference from {second} is within the interval: {ours} against {theirs} over all "
        f"domains ({interval})."
    )


def _compare_with_engine(report: Report) -> str:
    errors, diverging, is_served = [], [], False
    for row in report["results"]:
        for entry in row["by_num_speculative_tokens"]:
            engine = entry["engine"]
            is_served = is_served or engine is not None
            if row["domain"] is not None or engine is None or entry["forecast"] is None:
                continue
            errors.append(abs(engine["forecast_error"]))
            if engine["diverges"]:
                k, temperature = entry["num_speculative_tokens"], row["temperature"]
                diverging.append(f"{row['draft']} (k = {k}, temperature {temperature:g})")
    if diverging:
        return (
            f"Forecast and engine differ by more than {MAX_DIFFERENCE:.0%} for "
            f"{join_words(diverging)}: trust neither number there."
        )
    if errors:
        off = (
            "the forecast was"
            if len(errors) == 1
            else f"none of {len(errors)} forecasts was more than"
        )
        return f"A real vLLM agrees: {off} {max(errors):.1%} off."
    if is_served:
        return (
            "These numbers were counted by a real vLLM; there is no forecast to compare them with."
        )
    return "These numbers are forecasts: no engine was run."


def _last_token(report: Report, best: str, temperature: float) -> Iterator[str]:
    row = next(
        r
        for r in report["results"]
        if (r["draft"], r["temperature"], r["domain"]) == (best, temperature, None)
    )
    entry = row["by_num_speculative_tokens"][-1]
    if entry["forecast"] and entry["num_speculative_tokens"] > 1:
        rate = entry["forecast"]["acceptance_per_position"][-1]["value"]
        yield (
            f"Draft token {entry['num_speculative_tokens']} is accepted in {rate:.0%} of the steps."
        )


def _other_sampling(report: Report, best: str, k: int) -> Iterator[str]:
    """Return advice on vLLM's draft_sample_method for every temperature above 0."""
    draft = next(draft for draft in report["drafts"] if draft["name"] == best)
    family = find_method(draft["method"])
    if family is None or not family.can_sample:
        return
    for row in report["results"]:
        entry = find_entry(row, k)
        if (row["draft"], row["domain"]) == (best, None) and entry and entry["other_sample_method"]:
            yield advise_sample_method(entry, row["temperature"], is_sampled=draft["is_sampled"])
            if told := advise_block(entry, row["temperature"]):
                yield told


def advise_block(entry: Mapping[str, Any], temperature: float) -> str:
    """Return how to enable block verification if it accepts longer blocks; empty otherwise."""
    found = entry["block_verification"]
    if found is None or (gain := found["gain"])["low"] <= 0:
        return ""
    return (
        f"At temperature {temperature:g}, block verification of sampled drafts accepts more "
        f"tokens, according to the forecast: {found['tau']:.2f} tokens per target step, "
        f"{read_tau(entry):.2f} as served "
        f"({gain['value']:+.2f}, 95% interval {gain['low']:+.2f} to {gain['high']:+.2f}). On vLLM's "
        "V2 model runner, use redraft serve --draft-sample-method probabilistic "
        "--rejection-sample-method block."
    )


def advise_sample_method(entry: Mapping[str, Any], temperature: float, *, is_sampled: bool) -> str:
    """Return the better draft_sample_method for an entry, and how to set it."""
    served, other = ("probabilistic", "greedy") if is_sampled else ("greedy", "probabilistic")
    found = entry["other_sample_method"]
    gain, tau = found["gain"], read_tau(entry)
    numbers = (
        f"{found['tau']:.2f} tokens per target step with draft_sample_method {other}, {tau:.2f} "
        f"with {served} "
        f"({gain['value']:+.2f}, 95% interval {gain['low']:+.2f} to {gain['high']:+.2f})"
    )
    lead = f"At temperature {temperature:g}, the forecast is {numbers}"
    if gain["low"] > 0:
        flag = f'"draft_sample_method": "{other}"'
        return (
            f"{lead}: put {flag} into --speculative-config (redraft serve: "
            f"--draft-sample-method {other})."
        )
    return f"{lead}: " + (
        f"{served} is right." if gain["high"] < 0 else f"no reason to change {served}."
    )


def _on(domain: str | None) -> str:
    return "" if domain is None else f" on {domain}"


def join_words(parts: Sequence[object]) -> str:
    """Join words as in a sentence: "a, b and c"."""
    *head, last = map(str, parts)
    return f"{', '.join(head)} and {last}" if head else last
