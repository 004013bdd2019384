"""Predict a draft's speed with any number of tokens from rounds with one number.

The predictions answer which draft to serve, with how many tokens, and at which load.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from redraft.engine import adaptive
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.lookup_first import is_mixed
from redraft.eval.serving.cost import (
    AdaptivePoint,
    AdaptivePrediction,
    Prediction,
    StepCosts,
    advise,
    has_fixed_tokens,
    has_one_acceptance,
    predict_adaptive,
)
from redraft.eval.serving.rounds import PLAIN, Compared, Results, compare, count, measure_prefill
from redraft.heads.catalog import find_speculative

Speed = TypeVar("Speed", bound=Prediction)


@dataclass(frozen=True)
class Candidate:
    name: str
    title: str
    config: Mapping[str, Any]
    """vLLM's --speculative-config without the number of tokens."""
    num_speculative_tokens: int
    """Number of draft tokens per step in the first rounds, the maximum to consider."""
    parameters: int | None = None
    """Number of parameters in the draft's files. None if it has no files."""
    tau_forecast: float | None = None
    """Tau that the training run forecast for the prompts of the first rounds. None if these rounds
    serve the draft differently: with sampling, with a lookup before the head, or with adaptive
    verification.
    """
    given: Sequence[float] | None = None
    """Given acceptance by position, which replaces the measured acceptance."""
    curve: Sequence[AdaptivePoint] = ()
    """Forecast with adaptive verification. Empty if unknown."""

    def __post_init__(self) -> None:
        if self.given is not None and not self.has_one_acceptance:
            raise ValueError(
                f"the acceptance of {self.title} changes with the load or the number of tokens: "
                "remove --acceptance"
            )

    @property
    def speculative_config(self) -> dict[str, Any]:
        return {**self.config, "num_speculative_tokens": self.num_speculative_tokens}

    @property
    def is_lookup(self) -> bool:
        """Whether the draft looks tokens up in text, without a model."""
        family = find_speculative(self.config)
        return family is not None and family.is_lookup

    @property
    def chooses_length(self) -> bool:
        """Whether a step's draft length depends on a lookup's matches or on what vLLM verifies."""
        return self.is_lookup or is_mixed(self.config) or adaptive.KEY in self.config

    @property
    def has_one_number(self) -> bool:
        """Whether a server uses the same number of draft tokens at every load."""
        return self.chooses_length or has_fixed_tokens(self.config)

    @property
    def has_one_acceptance(self) -> bool:
        """Whether acceptance at a position is independent of load and later tokens."""
        return not self.chooses_length and has_one_acceptance(self.config)


@dataclass(frozen=True)
class Choice:
    candidate: Candidate
    measured: Mapping[int, Compared]
    """Measurements by number of concurrent requests."""
    costs: StepCosts
    by_tokens: Mapping[int, Sequence[Prediction]]
    """Predictions by number of concurrent requests, for 0, 1, 2, ... draft tokens. If other numbers
    cannot be predicted, only for 0 and the measured number.
    """
    advice: str
    """The best number of tokens at each batch size, as text."""
    speculative_config: Mapping[str, Any]
    """Speculative config to serve, with the best numbers of tokens."""
    adaptive: Mapping[int, AdaptivePrediction] = field(default_factory=dict)
    """Predictions with adaptive verification, by number of concurrent requests. Empty if there is
    no forecast.
    """

    @property
    def best(self) -> dict[int, Prediction]:
        """Return the number of tokens to serve, by requests in flight.

        It is the fastest one, or the only one that the server uses at every load.
        """
        served = self.speculative_config["num_speculative_tokens"]
        return {
            # A given acceptance may have been measured with fewer tokens.
            load: next((row for row in rows if row.num_speculative_tokens == served), rows[-1])
            if self.candidate.has_one_number
            else max(rows, key=lambda row: row.tokens_per_s)
            for load, rows in self.by_tokens.items()
        }

    @property
    def speedups(self) -> dict[int, float]:
        return {load: row.speedup for load, row in self.best.items()}


def predict(candidate: Candidate, results: Results, loads: Sequence[int]) -> Choice:
    """Predict the speed of a candidate with every number of draft tokens, at the given `loads`.

    `results` contains its rounds with the maximum number of draft tokens, and rounds of the target
    alone at these and other loads. Except in a block, acceptance at a position does not depend on
    later tokens, so one number of draft tokens gives the acceptance for all smaller numbers. The
    target's steps alone show how long verification takes (`StepCosts.from_steps`). Prefills are
    excluded from the steps and added to the expected time of an answer. Their share grows with the
    number of requests, and would otherwise be mistaken for verification.
    """
    k, name = candidate.num_speculative_tokens, candidate.name
    # 1. Compute the time of a step without prefills, by load. k = 0 is the target alone.
    prefill_s = {server: measure_prefill(results, server) for server in (PLAIN, name)}
    steps: dict[int, dict[int, float]] = {}
    for server, load in results:
        if server in prefill_s:
            seconds = _decode_step_s(results, server, load, prefill_s[server])
            steps.setdefault(load, {})[0 if server == PLAIN else k] = seconds
    # 2. Compute the step costs. The target alone was measured at additional loads only for the cost
    # of verification.
    whole = StepCosts.from_steps(steps)
    costs = StepCosts(
        target_s={load: whole.target_s[load] for load in loads},
        draft_s={load: whole.draft_s[load] for load in loads},
    )
    # 3. Find the best number of tokens.
    measured = {load: compare(results, name, load) for load in loads}
    counts = {load: count(results, name, load) for load in loads}
    if not candidate.chooses_length:
        # A model's acceptance does not depend on the load, so all loads together give the narrower
        # estimate.
        counts = dict.fromkeys(loads, sum(counts.values(), AcceptanceCounts.zero()))
    choices = None if candidate.has_one_acceptance else [k]
    by_load = {
        load: advise(candidate.given or its.acceptance_per_position, costs, choices=choices)
        for load, its in counts.items()
    }
    config: Mapping[str, Any] = candidate.speculative_config
    words = (
        f"{k} tokens; vLLM chooses which of them to verify"
        if adaptive.KEY in config
        else f"up to {k} tokens, as many as are found"
    )
    if not candidate.chooses_length:
        advice = by_load[loads[0]]
        served, words = advice.speculative_config(candidate.config), advice.sentence
        config = served or config
        if served and candidate.has_one_number:
            words = f"k = {served['num_speculative_tokens']} at every load: vLLM cannot change it"
    # 4. Compute the speed of whole answers, including the prefills.
    by_tokens: dict[int, list[Prediction]] = {}
    predictions: dict[int, AdaptivePrediction] = {}
    for load, advice in by_load.items():
        rows = [row for row in advice.table if row.batch_size == load]
        tokens = measured[load].tokens_per_request
        prefills = tokens, prefill_s[PLAIN], prefill_s[name]
        by_tokens[load] = [_add_prefill(row, rows[0], *prefills) for row in rows]
        if candidate.curve:
            best = predict_adaptive(
                candidate.curve, costs, batch_size=load, num_speculative_tokens=k
            )
            predictions[load] = _add_prefill(best, rows[0], *prefills)
    return Choice(candidate, measured, costs, by_tokens, words, config, predictions)


def _decode_step_s(results: Results, server: str, load: int, prefill_s: float) -> float:
    """Duration in seconds of a step with `load` requests in flight, excluding prefills."""
    runs, num_steps = results[server, load], count(results, server, load).num_drafts
    # A prefill gives an answer's first token. The last step may give fewer tokens than it accepts.
    num_tokens = sum(run.num_output_tokens - len(run.outputs) for run in runs)
    tokens_per_step = max(1.0, num_tokens / max(1, num_steps))
    steps_s = []
    for run in runs:
        steps = max(1, run.full_tokens - len(run.outputs)) / (load * tokens_per_step)
        # Noise must not make the step time zero or negative.
        steps_s.append(max(run.full_s - len(run.outputs) * prefill_s, 0.1 * run.full_s) / steps)
    return statistics.median(steps_s)


def _add_prefill(
    row: Speed, plain: Prediction, tokens: float, plain_s: float, drafting_s: float
) -> Speed:
    """The speed including one prefill per answer of `tokens` tokens.

    A prefill takes `plain_s` without a draft, and `drafting_s` with one. All requests wait for a
    prefill. `plain` is the row without a draft.
    """
    # 1 / rate is the time per token over all requests. Every answer adds one prefill to the time of
    # its tokens.
    prefill_s = drafting_s if row.num_speculative_tokens else plain_s
    rate = 1 / (1 / row.tokens_per_s + prefill_s / tokens)
    plain_rate = 1 / (1 / plain.tokens_per_s + plain_s / tokens)
    return replace(row, tokens_per_s=rate, speedup=rate / plain_rate)


def choose(choices: Sequence[Choice], number: int) -> list[Choice]:
    """Return the `number` choices fastest at the smallest load that pay off at some load."""
    pays = [choice for choice in choices if max(choice.speedups.values()) > 1]
    return sorted(pays, key=lambda choice: -choice.speedups[min(choice.speedups)])[:number]
