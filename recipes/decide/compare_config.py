"""Which draft pays?

Make every kind of draft for a target, measure each in a real vLLM, and confirm the best.

$ redraft compare --preset smollm2              # SmolLM2-135M-Instruct and one head, half an hour on two cores
$ redraft compare --target models/llama-1b --data answers.jsonl --prompts prompts.jsonl
$ redraft compare --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --draft \
ngram+outputs/eagle3/draft:2 --train

    target ─► fastest plain vLLM ─► mode of every server
    n-grams, counted answers, every --draft ─► rounds ─► verdicts ─┐
    answers ─► drafts, trained for equal time ─► rounds ─► verdicts ┴► the best, on other prompts ─►
    report

Names of --train: `layers-N` (a draft model of N of the target's layers), `medusa`, and `eagle3`,
`dflash` or `peagle`, with the size of the head's vocabulary, as in `eagle3-8k`. `ngram+eagle3-8k:2`
is that head with n-grams before it, and with at most 2 tokens of its own a step;
`retrieval+eagle3-8k:2` has the counted answers before it. The answers should be the target's
(`redraft regenerate`). HumanEval's questions are the default prompts. After an interruption, run
the same command again: finished drafts and rounds are kept, and the training that was interrupted
continues.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.distill.run.run_config import require_least
from redraft.eval.engine.draft_source import NGRAM, NUM_TOKENS, DraftSource

LAYERS = re.compile(r"layers-(\d+)")
HEAD = re.compile(r"(eagle3|dflash|peagle)-(\d+)k")
RETRIEVAL = "retrieval"
LOOKUP_TOKENS = {NGRAM: 4, RETRIEVAL: 6}  # most of a step; counted answers may propose fewer


def parse_trained(name: str) -> DraftSource:
    """A name of --train; `source` is the draft to train."""
    return DraftSource.parse(name, (RETRIEVAL,))


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str | None = None
    """Folder or hub name of the served model. By default SmolLM2-135M-Instruct, from the hub,
    or from a wheel on PyPI if the hub cannot be reached."""
    draft: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Finished draft to compare with: a folder, a hub name, `suffix`, or `mtp`. Repeat the flag for
    more. On the page a draft has the folder's name, or the one above if that is `draft`; if two
    would have the same, the whole path.
    """
    train: tuple[str, ...] = (
        *("layers-2", "layers-4", "layers-6", "layers-10"),
        *(
            "eagle3-4k",
            "eagle3-8k",
            "eagle3-16k",
            "ngram+eagle3-8k:2",
            "retrieval+eagle3-8k:2",
            "dflash-8k",
            "medusa",
        ),
    )
    """Drafts to train. Leave it empty to compare finished ones only."""
    minutes: float = 2.5
    """Length of each training."""
    data: str | None = None
    """Answers of the target to train on and to count, as written by `redraft regenerate`. By
    default those of SmolLM2-135M-Instruct, if it is the target. If nothing is trained, another
    target needs none: nothing is counted.
    """
    prompts: str | None = None
    """Prompts to measure on: a hub name, or a .jsonl or .parquet file. By default HumanEval's."""
    num_speculative_tokens: int = NUM_TOKENS
    """Most draft tokens of a step, of drafts that are not looked up."""
    rounds: int = 3
    """Interleaved rounds of all drafts."""
    confirm: int = 3
    """Number of drafts in the last rounds, beside n-grams: those that should be the fastest."""
    confirm_rounds: int = 6
    """Interleaved rounds of these, at least 6 for an interval."""
    prompts_one: int = 2
    """Prompts of a round with one request in flight."""
    prompts_many: int = 16
    """Prompts of a round with eight requests in flight. The speed is that until fewer than eight
    are left.
    """
    max_tokens: int = 64
    """Longest answer, in tokens."""
    together: int = 0
    """Servers alive at the same time, which take turns; 0: five on a CPU, two on a GPU. One is the
    target alone. All share the memory.
    """
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Further arguments of every vLLM server, after `--`: `-- --tensor-parallel-size=8`."""
    flags: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Word to append to the command of every training: --flags=--loop.batch-size --flags=2."""
    parts: Path = Path("outputs/parts")
    """Folder of the downloaded model and prompts, kept for later runs."""
    output: Path = Path("outputs/compare")
    """Folder for report.json, report.html, the drafts and the logs."""
    overwrite: bool = False
    """Train and measure everything again. To measure again only, delete the folder `rounds` in
    --output.
    """

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
                    f"--train {name}: {' or '.join(LOOKUP_TOKENS)} goes before eagle3-Nk only"
                )
            if self.train.count(name) > 1:
                raise ValueError(f"--train {name} is given twice")
        if self.confirm_rounds < 6:
            raise ValueError(
                f"--confirm-rounds {self.confirm_rounds} give no 95% interval: 6 or more"
            )
        require_least(
            self, rounds=1, confirm=1, num_speculative_tokens=1, prompts_one=1, prompts_many=8
        )

    @property
    def num_prompts(self) -> int:
        """Prompts of the first rounds.

        Every round has new ones, at both loads, if there are enough.
        """
        return self.rounds * max(self.prompts_one, self.prompts_many)


PRESETS = {
    # One head, trained for its two tokens, and the lookups.
    "smollm2": Config(
        train=("eagle3-8k", "retrieval+eagle3-8k:2"),
        minutes=3.0,
        num_speculative_tokens=2,
        rounds=2,
        confirm=2,
        max_tokens=96,
        output=Path("outputs/demo"),
    )
}
