"""The report of `redraft bench`.

report.json is for programs (`bench.schema.json` describes it), and report.html for people. The
schema is generated from the records below.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from redraft.engine.lossless import Difference, Lossless
from redraft.engine.sampling import Sampling
from redraft.eval.report.page import TEMPLATES, charts_of, write_page
from redraft.eval.serving.baseline import Baseline
from redraft.eval.serving.cost import AdaptivePrediction, Prediction, count_requests
from redraft.eval.serving.prediction import Choice
from redraft.eval.serving.rounds import Compared, Results, compare
from redraft.files.artifact import write_whole

VERSION = 2  # Version of the format. Version 1 was written by a different command.
WORTH = 0.02  # minimum expected gain for which adaptive verification is recommended
FREE = 0.95  # Rounds differ by several percent, so a draft with at least this ratio counts as free.

ByLoad = Mapping[int, Compared]  # By requests in flight.


@dataclass(frozen=True, kw_only=True)
class DraftReport:
    """A draft's results in the first rounds, and the advice derived from them."""

    name: str
    title: str
    parameters: int | None
    """Number of parameters in the draft's files. None if it has no files."""
    tau_forecast: float | None
    """Tau that the training run forecast for the first rounds. None if they serve the draft
    differently.
    """
    is_lookup: bool
    chooses_length: bool
    """Whether the draft chooses the number of tokens in every step."""
    num_speculative_tokens: int
    """Maximum number of draft tokens per step in the first rounds."""
    measured: ByLoad
    is_acceptance_given: bool
    """Whether the acceptance was given with --acceptance instead of measured."""
    token_ms: Mapping[int, float]
    """Time per draft token, by number of concurrent requests."""
    by_tokens: Mapping[int, Sequence[Prediction]]
    """Predictions for 0, 1, 2, ... tokens, by number of concurrent requests."""
    best: Mapping[int, int]
    """The number of tokens to serve, by number of concurrent requests."""
    predicted: Mapping[int, float]
    """Predicted speed-up with this number of tokens, by number of concurrent requests."""
    advice: str
    """The best number of tokens at each batch size, as text."""
    serve: str
    """Environment variables to set, followed by the arguments to append to `vllm serve TARGET`."""
    adaptive: Mapping[int, AdaptivePrediction]
    """Speed with vLLM's adaptive verification, by number of concurrent requests. Empty if there is
    no forecast.
    """
    confirmed: ByLoad | None
    """Results of the last rounds with the recommended settings. None if the draft was not part of
    them.
    """


@dataclass(frozen=True, kw_only=True)
class LosslessReport:
    """Outputs with the recommended draft and with the target alone, with one request at a time."""

    num_prompts: int
    lossless: bool
    differences: Sequence[Difference]
    num_parted_alone: int
    """Number of outputs that differ between batch sizes with the target alone."""
    widest_gap_alone: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    loads: Sequence[int]
    """Numbers of concurrent requests, ascending."""
    rounds: int
    """Number of confirmation rounds."""
    num_prompts: int
    """Number of different prompts in these rounds."""
    max_tokens: int
    sampling: Sampling
    penalties: Mapping[str, float]
    draft_sample_method: str
    minutes: float | None
    """Minutes per training run. None if nothing was trained."""
    dtype: str


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    version: int
    target: str
    command: str
    baseline: Baseline
    plain: ByLoad
    """Results of the target alone in the last rounds."""
    drafts: Sequence[DraftReport]
    served: str | None
    """Name of the draft to serve. None if no draft pays off."""
    lossless: LosslessReport | None
    """Comparison of outputs. None if requests are sampled or no draft is recommended."""
    settings: Settings
    environment: Mapping[str, str]
    duration_s: float


def make_schema() -> dict[str, Any]:
    """The JSON schema of report.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The report.json of `redraft bench`",
        **msgspec.json.schema(BenchReport),
    }


def by_load(results: Results, name: str, loads: Sequence[int]) -> dict[int, Compared]:
    return {load: compare(results, name, load) for load in loads}


def describe_draft(choice: Choice, confirmed: ByLoad | None, serve: str) -> DraftReport:
    candidate = choice.candidate
    return DraftReport(
        name=candidate.name,
        title=candidate.title,
        parameters=candidate.parameters,
        tau_forecast=candidate.tau_forecast,
        is_lookup=candidate.is_lookup,
        chooses_length=candidate.chooses_length,
        num_speculative_tokens=candidate.num_speculative_tokens,
        measured=choice.measured,
        is_acceptance_given=candidate.given is not None,
        token_ms={load: 1000 * seconds for load, seconds in choice.costs.draft_s.items()},
        by_tokens=choice.by_tokens,
        best={load: row.num_speculative_tokens for load, row in choice.best.items()},
        predicted=choice.speedups,
        advice=choice.advice,
        serve=serve,
        adaptive=choice.adaptive,
        confirmed=confirmed,
    )


def describe_adaptive(draft: DraftReport) -> Iterator[str]:
    """Return a line per load at which adaptive verification should beat the best fixed number."""
    for load, row in draft.adaptive.items():
        best = draft.predicted[load]
        if row.speedup > best * (1 + WORTH):
            yield (
                f"  adaptive verification: {row.speedup:.2f}x expected at {count_requests(load)}, with "
                f"{row.rows_per_token:.2f} verified rows per token, against {best:.2f}x: give "
                "--pace adaptive to redraft serve"
            )


def describe_lossless(served: Lossless, alone: Lossless) -> LosslessReport:
    return LosslessReport(
        num_prompts=served.num_prompts,
        lossless=served.lossless,
        differences=served.differences,
        num_parted_alone=len(alone.differences),
        widest_gap_alone=alone.widest_gap,
    )


def choose_served(best: Sequence[Choice]) -> str | None:
    """The name of the draft with the highest expected speed at the smallest load.

    Only drafts that are not slower at the other loads count. Return None if no such draft has a
    speed-up above 1.
    """
    for choice in best:
        smallest, *others = (choice.speedups[load] for load in sorted(choice.speedups))
        if smallest > 1 and all(speed > FREE for speed in others):
            return choice.candidate.name
    return None


def find_served(report: BenchReport) -> DraftReport | None:
    """Return the draft to serve, unless the last rounds contradict its predicted speeds.

    Its interval at the smallest load must be above 1, and no other interval below `FREE`.
    """
    for draft in report.drafts:
        if draft.name == report.served and draft.confirmed:
            smallest, *others = (draft.confirmed[load].interval for load in report.settings.loads)
            is_slow = any(interval and interval[1] < FREE for interval in others)
            return draft if smallest and smallest[0] > 1 and not is_slow else None
    return None


def write_bench(folder: Path, report: BenchReport) -> Path:
    """Write report.json and report.html to `folder`, and return the path of the page."""
    proven, smallest = find_served(report), str(report.settings.loads[0])
    content = msgspec.to_builtins(report, str_keys=True)
    confirmed = [draft for draft in content["drafts"] if draft["confirmed"]]
    return write_page(
        folder,
        content,
        TEMPLATES / "bench.html.j2",
        charts_of("redraft.eval.serving.bench_charts"),
        extras={
            "proven": proven.name if proven else None,
            "confirmed": sorted(confirmed, key=lambda d: -d["confirmed"][smallest]["ratio"]),
            "requests": count_requests,
            "describe": describe_ratio,
            "loads": [str(load) for load in report.settings.loads],
            "sampling_words": describe_sampling(report.settings),
        },
    )


def describe_ratio(ratio: float, interval: Sequence[float] | None) -> str:
    """Return a speed-up in words; "equal" if its interval contains 1."""
    if not interval:
        return f"{ratio:.2f}x as fast, in too few rounds for an interval"
    low, high = interval
    if low <= 1 <= high:
        return f"equal in speed [{low:.2f}, {high:.2f}]"
    return f"{ratio:.2f}x as fast [{low:.2f}, {high:.2f}]"


def describe_sampling(settings: Settings) -> str:
    penalties = "".join(f", {name} {value:g}" for name, value in settings.penalties.items())
    return f"{settings.sampling.words}{penalties}, with {settings.draft_sample_method} drafts"


def verdict(choice: Choice) -> str:
    """Describe a draft's speed in the first rounds, and its best number of draft tokens."""
    speeds = ", ".join(
        f"{row.ratio:.2f}x at {count_requests(load)}" for load, row in choice.measured.items()
    )
    text = f"{choice.candidate.title}: as fast as no draft {speeds}"
    if choice.candidate.chooses_length:
        return text
    smallest = min(choice.measured)
    best = choice.best[smallest]
    return (
        f"{text}; {best.speedup:.2f}x expected with {best.num_speculative_tokens} draft tokens at "
        f"{count_requests(smallest)}"
    )


def compose_answer(report: BenchReport) -> Iterator[str]:
    """List the confirmed drafts with speed and advice, the draft to serve, and the baseline."""
    for draft in report.drafts:
        if draft.confirmed:
            speeds = "; ".join(
                f"{describe_ratio(row.ratio, row.interval)} at {count_requests(load)}, predicted "
                f"{draft.predicted[load]:.2f}x"
                for load, row in draft.confirmed.items()
            )
            yield f"{draft.title}: {speeds}"
            yield f"  {draft.advice}"
            yield from describe_adaptive(draft)
    if proven := find_served(report):
        yield f"serve {proven.title}: vllm serve {report.target}, with"
        yield f"  {proven.serve}"
    elif report.served is None:
        yield "no draft makes this target faster here: serve it without"
    else:
        title = next(draft.title for draft in report.drafts if draft.name == report.served)
        loads = report.settings.loads
        where = f"at {count_requests(loads[0])}"
        where += ", or slower at a larger load" if len(loads) > 1 else ""
        yield f"{title}: not proven faster {where}: serve without a draft"
    if found := report.lossless:
        equal = found.num_prompts - len(found.differences)
        yield f"{equal} of {found.num_prompts} outputs equal the target's own, token for token" + (
            "" if found.lossless else ": the others differ by more than rounding"
        )
    settings = report.settings
    if settings.num_prompts < 2 * settings.loads[0] * settings.rounds:
        yield (
            f"warning: the last rounds repeat {settings.num_prompts} prompts, so the intervals do not "
            "show how much other prompts would differ: give more --prompts"
        )
    baseline = report.baseline
    share, threads = baseline.limit_share, baseline.threads
    yield (
        f"without a draft: {baseline.mode}, {baseline.tokens_s:.1f} tokens/s, "
        f"{baseline.step_ms:.1f} ms a step"
        + (f", {100 * share:.0f}% of the memory bandwidth limit" if share else "")
        + (f", {threads} threads" if threads else "")
    )
    yield f"requests were sampled at {describe_sampling(report.settings)}"
    if baseline.speeds > 1:
        yield (
            f"warning: the server without a draft ran at {baseline.speeds} speeds, so none of "
            "these ratios is reliable"
        )


if __name__ == "__main__":  # writes the schema again
    text = json.dumps(make_schema(), indent=2)
    write_whole(Path(__file__).with_name("bench.schema.json"), f"{text}\n")
