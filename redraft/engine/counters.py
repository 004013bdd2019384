"""Read vLLM's and llama.cpp's counters from the Prometheus text of /metrics.

This module imports neither torch nor vLLM.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from redraft.engine.counts import AcceptanceCounts

# vLLM labels every counter with `engine`, so a server with data parallelism has several lines for
# each.
SPEC_DECODE = "vllm:spec_decode_num_"
OF_LLAMA_CPP = "llamacpp:spec_decode_num_"
DRAFTS, DRAFT_TOKENS, ACCEPTED = "drafts_total", "draft_tokens_total", "accepted_tokens_total"
ACCEPTED_PER_POSITION = "accepted_tokens_per_pos_total"
LOG_STATS_OFF = (
    "--disable-log-stats stops /metrics from counting drafts for dashboards: remove the flag"
)
EMBEDS_BESIDE_DRAFT = (
    "--enable-prompt-embeds does not work with a draft: a prompt of embeddings has no "
    "tokens for the draft, so the first such request would crash vLLM; remove the flag"
)
NO_COUNTERS = "the server runs without a draft, without /metrics, or with --disable-log-stats; remove that flag"
PREFIX_CACHE = "vllm:prefix_cache_"
DECODE_TIME, PREFILL_TIME = (
    "vllm:request_decode_time_seconds_",
    "vllm:request_prefill_time_seconds_",
)


@dataclass(frozen=True, kw_only=True)
class DecodeTime:
    """Time after the first token by the engine's clock, summed since the engine started."""

    requests: int
    seconds: float
    prefill_s: float = 0.0
    """Time before the first token, excluding the wait in the queue."""


def parse_counts(metrics: str) -> AcceptanceCounts:
    """Return a server's speculation counters since it started, summed over its engines.

    Raises:
        ValueError: there are no such counters, because the server does not speculate or this is not
            a /metrics page.
    """
    counts = find_counts(metrics)
    if counts is None:
        raise ValueError(f"there are no {SPEC_DECODE}* counters: {NO_COUNTERS}")
    return counts


def find_counts(metrics: str) -> AcceptanceCounts | None:
    """Do the same as `parse_counts`, but return None if there are no such counters."""
    prefix = OF_LLAMA_CPP if f"\n{OF_LLAMA_CPP}" in metrics else SPEC_DECODE
    sums, per_position = _add_up(metrics, prefix), defaultdict[int, float](float)
    for sample in read_samples(metrics, f"{prefix}{ACCEPTED_PER_POSITION}"):
        # Labels are text, so "10" sorts before "2".
        per_position[int(sample.labels["position"])] += sample.value
    # When vLLM starts with a draft, it registers these with value 0, so they are missing only
    # without a draft.
    if not {DRAFTS, DRAFT_TOKENS, ACCEPTED} <= sums.keys():
        return None
    # Prometheus writes counts as floats.
    return AcceptanceCounts(
        num_drafts=round(sums[DRAFTS]),
        num_accepted=round(sums[ACCEPTED]),
        num_draft_tokens=round(sums[DRAFT_TOKENS]),
        accepted_per_position=tuple(
            round(per_position[position]) for position in sorted(per_position)
        ),
    )


def parse_decode_time(metrics: str) -> DecodeTime:
    """Return the decode times summed over a server's engines; 0 if there are no such counters."""
    decode = _add_up(metrics, DECODE_TIME)
    return DecodeTime(
        requests=int(decode["count"]),
        seconds=decode["sum"],
        prefill_s=_add_up(metrics, PREFILL_TIME)["sum"],
    )


def _add_up(metrics: str, prefix: str) -> dict[str, float]:
    """Return sums over a server's engines, by the rest of the name; 0 for a missing counter."""
    sums = defaultdict[str, float](float)
    for sample in read_samples(metrics, prefix):
        sums[sample.name.removeprefix(prefix)] += sample.value
    return sums


@dataclass(frozen=True, kw_only=True)
class PrefixCache:
    """Prompt tokens looked up in the prefix cache, and cache hits, since the engine started."""

    queries: int = 0
    hits: int = 0


def parse_prefix_cache(metrics: str) -> PrefixCache:
    """Return the counters summed over a server's engines; 0 if there are no such counters."""
    sums = _add_up(metrics, PREFIX_CACHE)
    return PrefixCache(queries=int(sums["queries_total"]), hits=int(sums["hits_total"]))


def read_samples(metrics: str, prefix: str) -> Iterator[Sample]:
    """Yield the samples whose names begin with `prefix`."""
    # Parse only these lines, because parsing is slow and a busy server's page has thousands of
    # others.
    lines = "\n".join(line for line in metrics.splitlines() if line.startswith(prefix))
    for family in text_string_to_metric_families(lines):
        yield from family.samples
