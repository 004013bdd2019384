"""Forecast whether a head that adapts within a request would draft better, without an engine.

$ python -m benchmarks.studies.within_request      # SmolLM2 and a head of half an hour, three hours

    questions ─► long answers ─► one pass of target and head ─► blocks ─► tau by position
                                  every 32 tokens: an update from the verified tokens,
                                  forgotten at the end of the request

Papers report up to 41% more tau by adapting a draft within one long answer (arXiv 2605.09329). A
lookup in the request's own text may give most of it already. So four drafts are compared: the head,
n-grams before the head, the adapted head, and n-grams before the adapted head. A server would adapt
with the data that it has after verification: the head's states in the first draft step and the
target's logits.

    bias       logits + b                      b -= rate * sum (q - p)
    low_rank   logits of (h + (h V) U)         U -= rate * sum (h V)^T ((q - p) head)

V is random and fixed, and U begins at 0, so both rules begin with the unchanged head. p = target, q
= draft. The answers are sampled without an end token, because a small target ends sooner; the end
of an answer may be of poor quality. Rates are chosen on the first requests, and the table covers
the remaining requests.

T = output tokens, K = draft tokens, N = rows, D = hidden, W = draft vocabulary, R = rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.results import write_results
from benchmarks.time_to_tau.bench import BEST, HELD_OUT, run_course
from benchmarks.time_to_tau.course import Course
from benchmarks.time_to_tau.judge import Judge
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.counts import walk_blocks
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import Sampling
from redraft.eval.forecast.greedy import Continuation, generate_answers
from redraft.eval.forecast.ngram import Ngram, propose_ngrams
from redraft.eval.forecast.verification import NOTHING
from redraft.eval.intervals import estimate_gain, estimate_ratio
from redraft.files.folder import fingerprint
from redraft.files.kept import compute_once
from redraft.files.progress import Progress
from redraft.files.setting_error import require_least
from redraft.heads.draft import Batch, DraftStep, ExactTarget, TargetSignal
from redraft.heads.families.eagle3 import Eagle3
from redraft.heads.target import Target
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.demo.parts import ANSWERS, make_target

Tokens = NDArray[np.int64]
"""Block of draft tokens after output token t, [T - 1, K]; NOTHING if there is none."""
Rule = Literal["none", "bias", "low_rank"]
WORTH = 0.10  # Gain over head and lookup that would justify the engine code.


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Settings with which a head adapts."""

    rule: Rule = "none"
    rate: float = 0.0
    rank: int = 16
    every: int = 32
    """Number of verified tokens between two updates."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str | None = None
    """Folder of the target; by default SmolLM2-135M-Instruct, made in --parts."""
    parts: Path = Path("outputs/parts")
    """Folder of the default target."""
    draft: Path | None = None
    """EAGLE-3 head of the target; by default one is trained for --minutes."""
    minutes: float = 30.0
    """Length of that training run, in minutes."""
    data: str = str(ANSWERS)
    """File with answers of the target. The head is trained on most of them, and the requests ask
    the remaining questions.
    """
    num_requests: int = 24
    """Number of requests."""
    num_tuning: int = 8
    """Number of requests on which the rates are chosen, and which the table leaves out."""
    num_output_tokens: int = 3000
    """Length of every answer."""
    temperature: float = 0.7
    """Temperature of the answers; drafts are greedy. At temperature 0, a small target repeats
    itself.
    """
    num_speculative_tokens: int = 3
    """Number of draft tokens per step."""
    every: int = 32
    """Number of verified tokens between two updates."""
    rank: int = 16
    """Rank of `low_rank`."""
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    """Rates to choose from, for each rule."""
    bin_tokens: int = 500
    """Number of tokens in each of the table's position ranges."""
    ngram: Ngram = field(default_factory=Ngram)
    threads: int = 2
    output: Path = Path("outputs/within-request")

    def __post_init__(self) -> None:
        require_least(self, num_requests=3, num_tuning=1, num_output_tokens=2, every=1, rank=1)
        if self.num_requests - self.num_tuning < 2:
            raise ValueError("--num-requests must exceed --num-tuning by at least 2")


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.threads)
    target = cfg.target or str(make_target(cfg.parts))
    draft = cfg.draft or train_head(cfg, target)
    judge = Judge(
        target=target, data=cfg.data, held_out=HELD_OUT, num_questions=cfg.num_requests,
        max_tokens=cfg.num_output_tokens, tokens=cfg.num_speculative_tokens, folder=cfg.output,
    )  # fmt: skip
    model = judge.opened.model
    head = Eagle3.load(draft, Target.from_model(model)).to(model.dtype).eval()
    signal = InProcessTarget(model, head.aux_layer_ids)
    ways = list_ways(cfg)
    identity = [judge.opened.files.fingerprint, fingerprint(draft), asdict(cfg.ngram)]
    found: list[dict[str, list[list[float]]]] = []
    for prompt in Progress(judge.prompts, desc="requests", unit="request"):
        text = answer(judge, prompt, cfg)
        # Results are saved one by one, so a killed run continues after the last complete request.
        key = [*identity, asdict(text), [asdict(way) for way in ways.values()]]
        found.append(
            compute_once(
                cfg.output / "kept",
                "request",
                [*key, cfg.num_speculative_tokens, cfg.bin_tokens],
                dict[str, list[list[float]]],
                lambda: measure(head, signal, text, ways, cfg),  # noqa: B023
            )
        )
    report(cfg, target, draft, found)


def train_head(cfg: Config, target: str) -> Path:
    """Train a head with the best recipe, and keep it for later runs."""
    course = Course(
        trainer="redraft", family="eagle3", target=target, data=cfg.data, held_out=HELD_OUT,
        minutes=cfg.minutes, every_minutes=cfg.minutes, seed=0, sequence_length=2048, rows=1,
        threads=cfg.threads, flags=BEST["eagle3"], tokens=str(cfg.output / "tokens"),
        output=str(cfg.output / "head"),
    )  # fmt: skip
    return Path(course.output) / run_course(course).marks[-1].head


def list_ways(cfg: Config) -> dict[str, Adaptation]:
    """List the ways to adapt, by name."""
    rules: tuple[Rule, ...] = ("bias", "low_rank")
    return {"none": Adaptation(every=cfg.every)} | {
        f"{rule} {rate:g}": Adaptation(rule=rule, rate=rate, rank=cfg.rank, every=cfg.every)
        for rule in rules
        for rate in cfg.rates
    }


# ------------------------------------------------------------------------------------------------------
# one request


def answer(judge: Judge, prompt: Prompt, cfg: Config) -> Continuation:
    """Generate a long answer of the target, and keep it for later runs."""
    key = [judge.opened.files.fingerprint, prompt, cfg.num_output_tokens, cfg.temperature]

    def generate() -> Continuation:
        with without_tokens(judge.opened.model, judge.opened.files.end_ids):
            (text,) = generate_answers(
                judge.opened.model,
                [prompt],
                max_tokens=cfg.num_output_tokens,
                num_speculative_tokens=cfg.num_speculative_tokens,
                end_ids=(),
                sampling=Sampling(temperature=cfg.temperature),
            )
        return text

    return compute_once(cfg.output / "kept", "answer", key, Continuation, generate)


@contextmanager
def without_tokens(model: Any, ids: Sequence[int]) -> Iterator[None]:
    """Prevent the model from choosing any of these tokens."""
    at = torch.tensor(list(ids))
    handle = model.get_output_embeddings().register_forward_hook(
        lambda _, __, logits: logits.index_fill(-1, at, float("-inf"))
    )
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def measure(
    head: Eagle3,
    signal: InProcessTarget,
    text: Continuation,
    ways: Mapping[str, Adaptation],
    cfg: Config,
) -> dict[str, list[list[float]]]:
    """Return accepted tokens and drafts by range of positions, for each way to adapt.

    Each way drafts both alone and after a lookup.
    """
    known, steps = read(head, signal, text, cfg.num_speculative_tokens)
    looked_up_TK, text_TK = look_up(text, cfg), follow(text, cfg.num_speculative_tokens)
    is_found_T = looked_up_TK[:, 0] != NOTHING
    counts: dict[str, list[list[float]]] = {}
    for name, way in ways.items():
        drafted_TK = propose(head, steps, known, text, way)
        mixed_TK = np.where(is_found_T[:, None], looked_up_TK, drafted_TK)
        counts[name] = count_blocks(drafted_TK == text_TK, cfg.bin_tokens)
        counts[f"lookup, {name}"] = count_blocks(mixed_TK == text_TK, cfg.bin_tokens)
    return counts


def read(
    head: Eagle3, signal: InProcessTarget, text: Continuation, num_tokens: int
) -> tuple[TargetSignal, list[DraftStep]]:
    """Run the target and the head over a text once."""
    batch = Batch.padded([list_ids(text)], len(text.prompt.token_ids))
    known = signal(batch)
    return known, head.draft_steps(batch, known, num_tokens)


def list_ids(text: Continuation) -> list[int]:
    return [*text.prompt.token_ids, *text.output_ids, *text.beyond_ids]


def follow(text: Continuation, num_tokens: int) -> Tokens:
    """Return the text that follows output token t."""
    first, num_rows = len(text.prompt.token_ids) + 1, len(text.output_ids) - 1
    ids_N = np.array(list_ids(text)[first : first + num_rows + num_tokens - 1])
    return np.lib.stride_tricks.sliding_window_view(ids_N, num_tokens)


def look_up(text: Continuation, cfg: Config) -> Tokens:
    """Return the tokens that n-grams find in the request's text."""
    first, num_rows = len(text.prompt.token_ids), len(text.output_ids) - 1
    tokens_TK = np.full((num_rows, cfg.num_speculative_tokens), NOTHING)
    # The block that begins after output token t follows the prefix that ends with this token.
    blocks = propose_ngrams(
        list_ids(text), first + 1, num_rows, cfg.ngram, cfg.num_speculative_tokens
    )
    for t, tokens in enumerate(blocks):
        tokens_TK[t, : len(tokens)] = tokens
    return tokens_TK


def propose(
    head: Eagle3,
    steps: Sequence[DraftStep],
    known: TargetSignal,
    text: Continuation,
    way: Adaptation,
) -> Tokens:
    """Return the head's tokens, while it adapts to the tokens verified before each block."""
    assert isinstance(known.distribution, ExactTarget)
    first, num_rows = len(text.prompt.token_ids), len(text.output_ids) - 1
    adapter = Adapter(head.head, way)
    tokens_TK = np.full((num_rows, len(steps)), NOTHING)
    for learned in range(0, num_rows + 1, way.every):
        # `learned` tokens were verified when token learned - 1 was known. This version of the head
        # drafts after that token, until `every` more tokens are known.
        rows_N = torch.arange(max(0, learned - 1), min(learned + way.every - 1, num_rows))
        for j, step in enumerate(steps):
            # Output token t is at position first + t. The head reads it in the row before that
            # position.
            states_ND = step.hidden_BTD[0, first - 1 + rows_N]
            best_N = adapter.logits(states_ND).argmax(-1)
            token_N = best_N if step.draft_ids_W is None else step.draft_ids_W[best_N]
            tokens_TK[rows_N, j] = token_N.numpy()
        if learned + way.every <= num_rows:
            tokens = range(learned, learned + way.every)
            learn(adapter, steps[0], known.distribution, first, tokens)
    return tokens_TK


def learn(
    adapter: Adapter, step: DraftStep, target: ExactTarget, first: int, tokens: range
) -> None:
    """Update with output tokens, of which token 0 is at position `first`.

    The head proposes a token in the row two positions before it; the target's logits are in the row
    one position before it.
    """
    rows_N = torch.tensor([row for i in tokens if (row := first + i - 2) >= 0])
    logits_NV = target.logits(rows_N + 1)
    p_NV = logits_NV.float().softmax(-1)
    p_NW = p_NV if step.draft_ids_W is None else p_NV[:, step.draft_ids_W]
    adapter.update(step.hidden_BTD[0, rows_N], p_NW)


class Adapter:
    """A head's logits with a correction that is learned in a request."""

    def __init__(
        self, head_WD: Tensor, way: Adaptation, dtype: torch.dtype = torch.float32
    ) -> None:
        self.way, self.head_WD = way, head_WD.to(dtype)
        hidden = self.head_WD.shape[1]
        generator = torch.Generator().manual_seed(0)
        down_DR = torch.randn(hidden, way.rank, generator=generator, dtype=torch.float64)
        self.down_DR = (down_DR / hidden**0.5).to(dtype)
        self.up_RD = torch.zeros(way.rank, hidden, dtype=dtype)
        self.bias_W = torch.zeros(len(self.head_WD), dtype=dtype)

    def logits(self, states_ND: Tensor) -> Tensor:
        """Return the corrected logits, [N, W]."""
        states_ND = states_ND.to(self.head_WD)
        if self.way.rule == "low_rank":
            states_ND = states_ND + states_ND @ self.down_DR @ self.up_RD
        return states_ND @ self.head_WD.T + self.bias_W

    def update(self, states_ND: Tensor, p_NW: Tensor) -> None:
        """Take a gradient step on the summed cross-entropy to p.

        In a reduced vocabulary, p may sum to less than 1.
        """
        if self.way.rule == "none":
            return
        states_ND, p_NW = states_ND.to(self.head_WD), p_NW.to(self.head_WD)
        q_NW = self.logits(states_ND).softmax(-1) * p_NW.sum(-1, keepdim=True)
        error_NW = q_NW - p_NW
        if self.way.rule == "bias":
            self.bias_W -= self.way.rate * error_NW.sum(0)
        else:
            gradient_RD = (states_ND @ self.down_DR).T @ (error_NW @ self.head_WD)
            self.up_RD -= self.way.rate * gradient_RD


def count_blocks(matches_TK: NDArray[np.bool_], bin_tokens: int) -> list[list[float]]:
    """Return [accepted tokens, drafts] of the blocks that begin in each range of positions."""
    begins_T, reach_TK = walk_blocks(matches_TK.astype(np.float64))
    accepted_T = begins_T * reach_TK.sum(1)
    starts = range(0, len(begins_T), bin_tokens)
    return [
        [float(each[start : start + bin_tokens].sum()) for each in (accepted_T, begins_T)]
        for start in starts
    ]


# ------------------------------------------------------------------------------------------------------
# the report


def report(
    cfg: Config, target: str, draft: Path, found: Sequence[Mapping[str, list[list[float]]]]
) -> None:
    tuning, judged = found[: cfg.num_tuning], found[cfg.num_tuning :]
    chosen = {"head": "none", "head + lookup": "lookup, none"}
    for rule in ("bias", "low_rank"):
        for title, prefix in ((f"head + {rule}", ""), (f"head + {rule} + lookup", "lookup, ")):
            names = [f"{prefix}{rule} {rate:g}" for rate in cfg.rates]
            chosen[title] = max(names, key=lambda name: sum_up(tuning, name).tau)
    rows = {title: describe(judged, name) for title, name in chosen.items()}
    base = sum_up(judged, chosen["head + lookup"])
    gains = {}
    for rule in ("bias", "low_rank"):
        title = f"head + {rule} + lookup"
        ours = sum_up(judged, chosen[title])
        gain = estimate_gain(
            np.stack([ours.accepted_N, base.accepted_N], 1),
            np.stack([ours.drafts_N, base.drafts_N], 1),
        )
        low, high = gain.interval()
        ends = {"value": gain.value, "low": low, "high": high}
        gains[title] = {name: each / base.tau for name, each in ends.items()}
    write_results(
        cfg.output / "report.json",
        {
            "settings": {**asdict(cfg), "target": target, "draft": str(draft)},
            "requests": len(judged),
            "rows": rows,
            "gain_over_head_and_lookup": gains,
            "is_worth_building": any(gain["value"] >= WORTH for gain in gains.values()),
        },
    )
    for title, row in rows.items():
        by_position = " ".join(f"{tau:.2f}" for tau in row["by_position"])
        print(f"{title:24} {row['tau']:.2f} [{row['low']:.2f}, {row['high']:.2f}]  {by_position}")
    for title, shares in gains.items():
        low, high = shares["low"], shares["high"]
        print(f"{title} over head + lookup: {shares['value']:+.1%} [{low:+.1%}, {high:+.1%}]")


@dataclass(frozen=True)
class Sums:
    """Sums for one way to adapt, by request, [N]."""

    accepted_N: NDArray[np.float64]
    drafts_N: NDArray[np.float64]

    @property
    def tau(self) -> float:
        return float(1 + self.accepted_N.sum() / self.drafts_N.sum())


def sum_up(found: Sequence[Mapping[str, list[list[float]]]], name: str) -> Sums:
    sums_N2 = np.array([np.sum(each[name], axis=0) for each in found])
    return Sums(sums_N2[:, 0], sums_N2[:, 1])


def describe(found: Sequence[Mapping[str, list[list[float]]]], name: str) -> dict[str, Any]:
    sums = sum_up(found, name)
    low, high = estimate_ratio(sums.accepted_N, sums.drafts_N).interval()
    by_position_P2 = np.sum([each[name] for each in found], axis=0)
    return {
        "way": name,
        "tau": sums.tau,
        "low": 1 + low,
        "high": 1 + high,
        "by_position": (1 + by_position_P2[:, 0] / by_position_P2[:, 1]).tolist(),
    }


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
