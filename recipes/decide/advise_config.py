"""Advise on the number of draft tokens for every batch size.

$ redraft advise --serving outputs/bench-serving/serving.json                   # table, best k, when off, vLLM flags
$ redraft advise --serving serving.json --acceptance outputs/eval/report.json   # with the acceptance of another draft

Step times come from `redraft bench`. Acceptance by position comes from there, from `redraft eval`
or from a training run's report.json, and must be that of requests sampled as the benchmark's.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Config:
    serving: Path = Path("outputs/bench-serving/serving.json")
    """The serving.json of a `redraft bench`, with the step times."""
    draft: str | None = None
    """Draft of the benchmark to advise on. By default the fastest one at --batch-size, or at the
    nearest number of requests that was measured; with --acceptance, the first one.
    """
    acceptance: Path | None = None
    """The report.json of `redraft eval` or of a training run, to replace the benchmark's
    acceptance.
    """
    acceptance_draft: str | None = None
    """Draft of that report, if it has several."""
    temperature: float | None = None
    """Temperature of the requests to advise on, one that the report of --acceptance was measured
    at. By default the benchmark's, from the target's generation_config.json.
    """
    batch_size: int | None = None
    """Requests per step at which to choose the draft. By default the benchmark's concurrency."""
    output: Path | None = None
    """File to write the advice to, as JSON."""
