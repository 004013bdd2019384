"""What an acceptance report comes down to, in sentences. k = num_speculative_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.acceptance_results import PARTS, Measured, compared_k, entry_of, tau_lead, tau_of
from eval.drafts import SAMPLED_METHODS

Report = Mapping[str, Any]


def answer(measured: Measured, report: Report) -> list[str]:
    """A sentence each; the first stands above all. It is about the best draft at the first temperature."""
    first, k = measured.temperatures[0], compared_k(report["results"])
    totals = {
        row["draft"]: tau_of(entry)
        for row in report["results"]
        if row["domain"] is None and row["temperature"] == first and (entry := entry_of(row, k))
    }
    best, *others = sorted(totals, key=lambda name: -totals[name])
    sentences = [_headline(report, best, first, k)]
    sentences += [_lead(measured, best, others[0], totals, first, k)] if others else []
    sentences += _at_other_temperatures(report, best, measured.temperatures[1:], k)
    sentences += [_engine(report), *_last_token(report, best, first), *_other_sampling(report, best)]
    return [*sentences, *_how_many(report, best, first)]


def _headline(report: Report, best: str, temperature: float, k: int) -> str:
    rows = [r for r in report["results"] if (r["draft"], r["temperature"]) == (best, temperature)]
    shown = [row for row in rows if row["domain"] is not None] or rows
    taus = sorted(((tau_of(entry), row["domain"]) for row in shown if (entry := entry_of(row, k))), reverse=True)
    (tau, domain), *others = taus
    parts = [f"{tau:.2f} tokens per target step{_on(domain)}", *(f"{tau:.2f}{_on(domain)}" for tau, domain in others)]
    return f"{best} emits {', '.join(parts)} (k = {k}, temperature {temperature:g})."


def _lead(measured: Measured, best: str, second: str, totals: Mapping[str, float], temperature: float, k: int) -> str:
    lead = tau_lead(measured, best, second, temperature, k)
    numbers = f"{totals[best]:.2f} against {totals[second]:.2f} over all domains"
    if lead is None:
        return f"Next is {second}: {numbers}."
    value, low, high = lead
    begin = f"Next is {second}" if low > 0 else f"It cannot be told from {second}"
    return f"{begin}: {numbers} ({value:+.2f}; 95% sure of {low:+.2f} to {high:+.2f})."


def _at_other_temperatures(report: Report, best: str, temperatures: Sequence[float], k: int) -> Iterator[str]:
    rows = [row for row in report["results"] if row["draft"] == best and row["domain"] is None]
    taus = {row["temperature"]: tau_of(entry) for row in rows if (entry := entry_of(row, k))}
    if parts := [f"{taus[t]:.2f} at temperature {t:g}" for t in temperatures if t in taus]:
        yield f"Over all domains it emits {words(parts)}."


def _engine(report: Report) -> str:
    compared = [
        (f"{row['draft']} (k = {entry['num_speculative_tokens']}, temperature {row['temperature']:g})", entry["engine"])
        for row in report["results"]
        for entry in row["by_num_speculative_tokens"]
        if row["domain"] is None and entry["engine"] and entry["forecast"]
    ]
    if not compared:
        is_served = any(entry["engine"] for row in report["results"] for entry in row["by_num_speculative_tokens"])
        counted = "This is what a real vLLM counted: there is no forecast to compare it with."
        return counted if is_served else "No engine was asked: this is forecast."
    if apart := [name for name, engine in compared if engine["parts"]]:
        return f"Forecast and engine part by more than {PARTS:.0%} for {words(apart)}: do not trust either there."
    worst = max(abs(engine["forecast_error"]) for _, engine in compared)
    what = "the forecast was" if len(compared) == 1 else f"none of {len(compared)} forecasts was more than"
    return f"A real vLLM agrees: {what} {worst:.1%} off."


def _last_token(report: Report, best: str, temperature: float) -> Iterator[str]:
    row = next(r for r in report["results"] if (r["draft"], r["temperature"], r["domain"]) == (best, temperature, None))
    entry = row["by_num_speculative_tokens"][-1]
    if entry["forecast"] and entry["num_speculative_tokens"] > 1:
        rate = entry["forecast"]["acceptance_per_position"][-1]["value"]
        yield f"Draft token {entry['num_speculative_tokens']} is accepted in {rate:.0%} of the steps."


def _other_sampling(report: Report, best: str) -> Iterator[str]:
    """Where the server's other way to draft above temperature 0 would be accepted more often."""
    about = next(draft for draft in report["drafts"] if draft["name"] == best)
    row = next(
        (r for r in report["results"] if (r["draft"], r["domain"]) == (best, None) and r["temperature"] > 0), None
    )
    if row is None or row["alpha"] is None or about["method"] not in SAMPLED_METHODS:
        return
    drafted = [("greedy", row["alpha_greedy"]["value"]), ("probabilistic", row["alpha"]["value"])]
    (served, rate), (other, better) = drafted[:: -1 if about["is_sampled"] else 1]
    if better > rate:
        yield (
            f"At temperature {row['temperature']:g} its tokens are accepted with probability {rate:.2f}; "
            f"with draft_sample_method {other} instead of {served} it would be {better:.2f}."
        )


def _how_many(report: Report, best: str, temperature: float) -> Iterator[str]:
    for advice in report["advice"]:
        if (advice["draft"], advice["temperature"]) == (best, temperature):
            yield f"By the measured step times: {advice['sentence']}."


def _on(domain: str | None) -> str:
    return "" if domain is None else f" on {domain}"


def words(parts: Sequence[object]) -> str:
    """a, b and c."""
    *head, last = map(str, parts)
    return f"{', '.join(head)} and {last}" if head else last
