"""Measure the acceptance of drafts, with intervals.

Results are reported by domain, temperature and number of draft tokens.

$ redraft eval --target TARGET --draft DRAFT --draft ngram --prompts prompts.jsonl --domain-column topic
$ redraft eval --target TARGET --draft DRAFT --no-forecast -- --tensor-parallel-size=8   # on several GPUs
$ redraft eval --target TARGET --draft v13=DRAFT --baseline outputs/eval-v12/report.json --max-loss 0.02

One pass of the target over its answers gives the acceptance of every draft (the forecast). A real
vLLM then serves each draft, and the report shows its counters next to the forecast. After an
interruption, run the same command again to continue. The exit status is 1 if acceptance fell below
the baseline, and 2 if something cannot be measured.
"""

from dataclasses import dataclass
from pathlib import Path

from redraft.eval.forecast.draft_source import MEASURED_TOKENS
from redraft.recipes.decide.measure_config import MeasureConfig


@dataclass(frozen=True, kw_only=True)
class EvalConfig(MeasureConfig):
    target: str = "meta-llama/Llama-3.1-8B-Instruct"
    """Folder or hub name of the served model."""
    prompts: str = "HuggingFaceH4/ultrachat_200k"
    """Source of the prompts: a hub name, a .jsonl or .parquet file, or `stdlib` (code and prose,
    for the small target).
    """
    split: str = "test_sft"
    """Split of a hub data set."""
    domain_column: str | None = None
    """Column with a row's domain (chat, code, math, ...). Default: `domain`, if the data has this
    column.
    """
    held_out: float = 1.0
    """Fraction of the conversations to use, above 0 and at most 1. The same fraction as in training
    selects the conversations that were held out.
    """
    num_prompts: int = 64
    """Number of prompts, divided evenly among the domains."""
    max_prompt_tokens: int = 1024
    """Maximum length of a prompt, in tokens. Longer prompts are excluded."""
    temperature: tuple[float, ...] = ()
    """Temperatures to measure at. Above 0, answers are sampled from the target. Default: the
    temperature in the target's generation_config.json, otherwise 1, as in vLLM.
    """
    num_speculative_tokens: tuple[int, ...] = MEASURED_TOKENS
    """Numbers of draft tokens per step to measure."""
    max_tokens: int = 128
    """Maximum length of an answer, in tokens."""
    seed: int = 0
    """Random seed for sampled answers."""
    batch_size: int = 16
    """Number of prompts per target pass."""
    forecast: bool = True
    """Forecast the drafts with the target in this process. With --no-forecast, only the engine
    loads the target and counts. Use this for a target that needs several GPUs, with `--
    --tensor-parallel-size=N`.
    """
    engine: bool = True
    """Serve the drafts in a real vLLM, with the largest number of draft tokens. With
    --no-engine, drafts are only forecast.
    """
    concurrency: int = 4
    """Number of concurrent requests in the engine. Use 1 to compare with the forecast for counted
    answers, because this draft proposes fewer tokens under load.
    """
    baseline: Path | None = None
    """An earlier report.json for the same target. Any loss of acceptance is listed, and the exit
    status is then 1.
    """
    max_loss: float = 0.02
    """Maximum allowed loss of tau against the baseline, as a fraction, e.g. 0.02 for 2%. Losses
    within random variation are ignored, so with few prompts small losses are not reported.
    """
    output: Path = Path("outputs/eval")
    """Folder for report.json, report.html, report.md and run.json, and for finished measurements.
    """
