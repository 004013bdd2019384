"""Measure the speed-up of drafts in a real vLLM server: the tables to decide with how to serve.

$ redraft bench --target T --draft D
$ redraft bench --target T --draft D --draft ngram --num-speculative-tokens 4 1 2 6 --concurrency 8 \
1 32 128
$ redraft bench --target T --draft D --prompts ours.jsonl                   # another workload: another folder

Every server is started once a pass and gets its load from vLLM's generator (`vllm bench serve`).
Finished cells are kept: after an interruption, or with further drafts, run the command again to
measure the rest. The target alone is then measured again beside them, because a speed-up is a ratio
within a pass. The results are serving.html, serving.md and serving.json; `redraft advise --serving
serving.json` then advises on the number of draft tokens.
"""

from dataclasses import dataclass
from pathlib import Path

from redraft.eval.engine.draft_source import MEASURED_TOKENS
from redraft.recipes.decide.measure_config import MeasureConfig


@dataclass(frozen=True, kw_only=True)
class Config(MeasureConfig):
    num_speculative_tokens: tuple[int, ...] = MEASURED_TOKENS
    """Numbers of draft tokens. One table compares all of them, the other uses the first."""
    concurrency: tuple[int, ...] = (8, 1, 32, 128)
    """Numbers of requests in flight. One table compares all of them, the other uses the first."""
    prompts: str = "sonnet"
    """Prompts: `random`, `sonnet` (lines of the Python manual), `sonnet:TEXT`, a .jsonl file with a
    field `prompt`, or ShareGPT's .json file.
    """
    input_tokens: int = 512
    """Length of the prompts of `random` and `sonnet`, in tokens."""
    max_tokens: int = 256
    """Maximum length of an answer, in tokens."""
    max_model_len: int = 4096
    """Maximum length of prompt and answer together, in tokens."""
    prompts_per_client: int = 8
    """Prompts per request in flight: with a concurrency of 32, 256 prompts are sent."""
    repeats: int = 3
    """Number of passes over all servers, in turns. The run with the median speed is shown, and the
    median of the passes' ratios, with an interval; a single pass has none, and the report then
    states no speed-up in words.
    """
    temperature: float | None = None
    """Temperature of every request. By default the one that the target's generation_config.json
    names, else 1, as vLLM.
    """
    output: Path = Path("outputs/bench-serving")
    """Folder for the reports, the finished cells and the engine's logs."""
