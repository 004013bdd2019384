"""A real model, really faster: make drafts for SmolLM2-135M-Instruct, and serve the one that pays.

$ make demo                                 # about 15 minutes on two cores; twice that in float32, without AVX-512
$ redraft demo --overwrite --minutes 30     # a longer training
$ redraft demo --target models/llama-1b --answers answers.jsonl --output outputs/demo-llama

    answers of the target ─┬─► EAGLE-3 head ──────┐
                           ├─► both, head second ─┤
                           └─► counted answers ───┼─► pilot rounds ─► draft to serve ─► rounds, other prompts ─► report
    n-grams of the request, no draft ─────────────┘

The answers of SmolLM2 to functions of the standard library are part of redraft. For any other target, `redraft
regenerate --target TARGET --source stdlib-functions` writes them. Prompts are HumanEval's, on which nothing is trained.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from redraft.distill.data.conversations import Conversation
from redraft.distill.data.samples import held_out_prompts
from redraft.distill.loss.choice import Divergence
from redraft.distill.run.config import Data, HeadConfig, Loop, Prove
from redraft.distill.run.proof import leave_gpu, make_logits
from redraft.distill.run.run import Run
from redraft.distill.run.start import start
from redraft.distill.train.optim import Optim
from redraft.distill.train.ranks import leave
from redraft.eval.engine.draft_source import DraftSource, Lookups
from redraft.eval.engine.lossless import compare_lossless
from redraft.eval.forecast.greedy import Forecast
from redraft.eval.hardware import this_machine
from redraft.eval.machine import environment
from redraft.eval.prompts import Prompt
from redraft.eval.report.page import Speed, domain_section, engine_section, offline_section, write_page
from redraft.eval.serving.rounds import PLAIN, Plan, Results, compare, merge, run_rounds, start_servers
from redraft.heads.catalog import find_family
from redraft.heads.draft import label_rows
from redraft.heads.families.retrieval import Config as RetrievalConfig
from redraft.heads.families.retrieval import Text, count_answers
from redraft.heads.files.artifact import publish
from redraft.heads.options import Eagle3
from redraft.recipes.cli import run_recipe
from redraft.recipes.demo.parts import ANSWERS, make_target, question, read_origin, read_problems

TEMPLATE = Path(__file__).parent / "templates" / "speedup.html.j2"

NGRAM, RETRIEVAL, HEAD, BOTH = "ngram", "retrieval", "eagle3", "retrieval+eagle3"
TITLES = {
    PLAIN: "no draft",
    NGRAM: "n-grams",
    RETRIEVAL: "counted answers",
    HEAD: "EAGLE-3 head",
    BOTH: "counted answers before the head",
}

ONE, MANY = 1, 8
"""Requests in flight of the two loads."""

NGRAM_TOKENS = 4
RETRIEVAL_TOKENS = 6
"""Most draft tokens of a step. Counted answers propose fewer if they are unlikely."""

HEAD_REQUESTS = 4
"""With counted answers before it, the head drafts in steps of at most so many requests. In larger ones a token costs
more to verify than it gains."""

MAX_PROMPT_TOKENS = 360

PILOT_PROBLEMS = 4
"""Every fourth problem is for the pilot rounds, which choose the draft to serve. The others measure it."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str | None = None
    """Folder or hub name of the model to speed up. By default SmolLM2-135M-Instruct, from the hub,
    or from a wheel on PyPI if the hub cannot be reached."""
    answers: str | None = None
    """Answers of the target to train on, as written by `redraft regenerate`. By default those that are part of redraft,
    of SmolLM2-135M-Instruct."""
    minutes: float = 3.0
    """Length of the training. The number of steps follows from the speed of the first ones."""
    draft_vocab_size: int = 8192
    """Size of the head's vocabulary: the tokens most frequent in the answers."""
    head_tokens: int = 2
    """Draft tokens of the head in a step."""
    rounds: int = 6
    """Interleaved rounds, at least 6 for an interval."""
    pilot_rounds: int = 2
    """Rounds before them, with answers half as long, to choose the draft to serve."""
    prompts_one: int = 2
    """Prompts of a round with one request in flight."""
    prompts_many: int = 8
    """Prompts of a round with eight requests in flight."""
    max_tokens: int = 96
    """Longest answer, in tokens."""
    parts: Path = Path("outputs/parts")
    """Folder of the downloaded model and prompts, kept for later runs."""
    output: Path = Path("outputs/demo")
    """Folder for report.json, report.html, the draft and the logs."""
    resume: bool = False
    """Continue the training of the run in --output from the newest checkpoint. The rounds are measured again."""
    overwrite: bool = False
    """Delete the run in --output and start again."""

    def __post_init__(self) -> None:
        if self.target is not None and self.answers is None:
            raise ValueError(
                f"--target {self.target} needs --answers, its answers: redraft regenerate --target {self.target} "
                "--source stdlib-functions --output answers.jsonl"
            )
        if self.rounds < 6:
            raise ValueError(f"--rounds {self.rounds} give no 95% interval: 6 or more")
        if self.prompts_many < self.prompts_one:
            raise ValueError("--prompts-many must be at least --prompts-one: both loads answer the same prompts")

    @property
    def pilot_tokens(self) -> int:
        """Longest answer of the pilot, in tokens."""
        return self.max_tokens // 2

    def plan(self, rounds: int, max_tokens: int) -> Plan:
        return Plan(rounds=rounds, prompts={ONE: self.prompts_one, MANY: self.prompts_many}, max_tokens=max_tokens)

    @property
    def num_prompts(self) -> int:
        """Prompts of the measurement: each is measured alone once."""
        return self.rounds * self.prompts_one


def main(cfg: Config) -> None:
    started = time.perf_counter()

    # 1. The target, its answers, the prompts.
    target = cfg.target or str(make_target(cfg.parts))
    run = Run(find_family("eagle3"), training_config(cfg, target))
    pilot, prompts = load_prompts(cfg, run)
    # The forecast is of the pilot, in which every draft takes part, and not of the prompts held out of the answers.
    run.data = replace(run.data, prompts=pilot)

    # 2. The drafts: answers counted; a head with its forecast, training and export.
    counted = run.folder.folder / RETRIEVAL
    publish(counted, count_answers(texts(run), RetrievalConfig()).write, {"data": run.cfg.data.source}, overwrite=True)
    began = time.perf_counter()
    head = start(run)
    start_s = time.perf_counter() - began
    before = run.forecast(head)
    began = time.perf_counter()
    head, cost = run.train(head, run.cfg.divergence, run.cfg.loop)
    training = {
        **vars(cost),
        "steps": cost.exported_step,
        "seconds": start_s + time.perf_counter() - began,
        "labels_seen": labels_in(run, cost.exported_step),
    }
    draft = run.publish(head)
    leave_gpu(run.model)

    # 3. Every draft in a real vLLM: the pilot chooses, the rounds on other prompts tell the speed.
    drafts = speculative_configs(cfg, draft, counted)
    options = {
        "max_model_len": MAX_PROMPT_TOKENS + cfg.max_tokens + RETRIEVAL_TOKENS,
        "max_num_seqs": MANY,
    }
    with start_servers(target, drafts, cfg.output, **options) as servers:
        trial = run_rounds(servers, pilot, cfg.plan(cfg.pilot_rounds, cfg.pilot_tokens))
        served = choose(trial)
        print(f"the pilot chooses {TITLES[served]}")
        # Each once: the draft to serve may be n-grams, or none. What does the head add to counted answers?
        names = dict.fromkeys((PLAIN, NGRAM, *((RETRIEVAL,) if served == BOTH else ()), served))
        results = run_rounds({name: servers[name] for name in names}, prompts, cfg.plan(cfg.rounds, cfg.max_tokens))

    # 4. The report.
    assert before is not None, "one process"
    report = training_sections(run, draft, before, trial, results) | {
        "train": training,
        "target": cfg.target or read_origin(Path(target)),
        "command": shlex.join(sys.argv),
        "speed": speed_section(results, trial, served),
        "served": served_section(target, drafts, results, served),
        "titles": TITLES,
        "duration_s": round(time.perf_counter() - started, 1),
    }
    page = write_page(cfg.output, report, TEMPLATE, draw_charts)
    print(headline(report), f"report: {page}", sep="\n")
    leave(run.accelerator)


def training_config(cfg: Config, target: str) -> HeadConfig[Eagle3]:
    """The settings of a short training on a CPU."""
    return HeadConfig(
        target=target,
        # 1: `main` replaces the held-out prompts, and the run refuses to have none.
        data=Data(source=cfg.answers or str(ANSWERS), held_out=0.02, num_prompts=1),
        head=Eagle3(num_steps=cfg.head_tokens, fc_norm=True),
        init="least_squares",
        init_tokens=32768,
        draft_vocab_size=cfg.draft_vocab_size,
        divergence=Divergence(name="lk_hybrid"),
        # A run of so few steps has no time for the long memory of a higher momentum, and a higher rate would undo the
        # start.
        optim=Optim(name="muon", lr=5e-4, momentum=0.8, max_grad_norm=0.5),
        loop=Loop(minutes=cfg.minutes, batch_size=4, sequence_length=512, eval_every=0, save_every=50),
        prove=Prove(num_speculative_tokens=cfg.head_tokens, max_tokens=cfg.pilot_tokens),
        mixed_precision="bf16" if this_machine().has_bfloat16 else "no",
        output=cfg.output,
        resume=cfg.resume,
        overwrite=cfg.overwrite,
    )


def load_prompts(cfg: Config, run: Run) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts of the pilot, prompts of the measurement)."""
    problems = read_problems(cfg.parts)
    conversations: list[Conversation] = [
        {"messages": [{"role": "user", "content": question(problem)}], "domain": "code"} for problem in problems
    ]

    def render(some: Sequence[Conversation]) -> list[Prompt]:
        return held_out_prompts(
            some, run.tokenizer, num_prompts=cfg.num_prompts, max_length=MAX_PROMPT_TOKENS, day=run.data.date
        )

    rest = [c for number, c in enumerate(conversations) if number % PILOT_PROBLEMS]
    return render(conversations[::PILOT_PROBLEMS]), render(rest)


def texts(run: Run) -> list[Text]:
    """The text to train on, to be counted."""
    return [Text(ids=sample.input_ids, is_label=sample.loss_mask) for sample in run.data.train.samples]


def labels_in(run: Run, steps: int) -> int:
    """Labelled tokens of the first `steps` batches."""
    batches = (run.data.train.batch(step, batch_size=run.cfg.loop.batch_size) for step in range(steps))
    return sum(int(label_rows(batch, 0).sum()) for batch in batches)


def speculative_configs(cfg: Config, head: Path, counted: Path) -> dict[str, Mapping[str, Any] | None]:
    """vLLM's --speculative-config of every draft in the comparison."""
    ngram, answers, alone = (DraftSource(source=source) for source in (NGRAM, str(counted), str(head)))
    both = replace(alone, lookup=str(counted), head_tokens=cfg.head_tokens)
    lookups = Lookups(head_requests=HEAD_REQUESTS)
    return {
        PLAIN: None,
        NGRAM: {**ngram.speculative(), "num_speculative_tokens": NGRAM_TOKENS},
        RETRIEVAL: {**answers.speculative(), "num_speculative_tokens": RETRIEVAL_TOKENS},
        HEAD: {**alone.speculative(), "num_speculative_tokens": cfg.head_tokens},
        BOTH: {**both.speculative(lookups=lookups), "num_speculative_tokens": RETRIEVAL_TOKENS},
    }


def choose(trial: Results) -> str:
    """The draft with the highest speed at one request, of those that cost nothing at eight; `none` if none is faster.

    Rounds differ by several percent, so down to 0.95 a draft counts as one that costs nothing.
    """
    names = sorted({name for name, _ in trial} - {PLAIN})
    ratios = {name: compare(trial, name, ONE)["ratio"] for name in names if compare(trial, name, MANY)["ratio"] > 0.95}
    best = max(ratios, key=lambda name: ratios[name], default=PLAIN)
    return best if ratios.get(best, 0.0) > 1 else PLAIN


def training_sections(
    run: Run,
    draft: Path,
    before: Forecast,
    trial: Results,
    results: Results,
) -> dict[str, Any]:
    """The sections of a head's report, with its pilot rounds as `engine`."""
    after = run.forecasts[draft]
    # Of the pilot, in which every draft took part. The head may be missing from the last rounds.
    alone = {name: merge(trial[name, MANY]) for name in (PLAIN, HEAD)}
    lossless = compare_lossless(alone[HEAD], alone[PLAIN], make_logits(run.cfg.target))
    rates = {name: [one.tokens_per_s for one in results.get((name, ONE), ())] for name in (HEAD, PLAIN)}
    speed = Speed(with_draft=rates[HEAD], without_draft=rates[PLAIN]) if rates[HEAD] else None
    return {
        "draft": str(draft),
        "offline": offline_section(before=before, after=after),
        "by_domain": domain_section(after, alone[HEAD]),
        "engine": {
            **engine_section(alone[HEAD], lossless, after, speed),
            "decoder": "a real vLLM",
        },
        "curves": run.folder.metrics,
        "environment": environment(),
    }


def speed_section(results: Results, trial: Results, served: str) -> dict[str, Any]:
    """Speed-ups of the draft that is served and of the others, at one and at eight requests."""
    rows = {name: {str(c): compare(results, name, c) for c in (ONE, MANY)} for name, _ in results}
    pilot = {name: {str(c): compare(trial, name, c) for c in (ONE, MANY)} for name, _ in trial}
    mine, ngram = rows[served], rows[NGRAM]
    return {
        "served": served,
        "ratio_1": mine[str(ONE)]["ratio"],
        "ratio_1_low": mine[str(ONE)]["interval"][0],
        "ratio_8": mine[str(MANY)]["ratio"],
        "ratio_8_low": mine[str(MANY)]["interval"][0],
        "ngram_ratio_1": ngram[str(ONE)]["ratio"],
        # With eight requests four times as many answers are counted. The number of requests does not change tau.
        "head_tau": rows.get(HEAD, pilot[HEAD])[str(MANY)]["tau"],
        "rounds": len(results[PLAIN, ONE]),
        "by_draft": rows,
        "pilot": pilot,
    }


def served_section(
    target: str, drafts: Mapping[str, Mapping[str, Any] | None], results: Results, served: str
) -> dict[str, Any]:
    """The draft that is served: the configuration, and its outputs beside those of the target alone.

    In 16 bits, the target alone parts from itself when eight requests are answered at once. That is rounding.
    """
    ours, plain = (merge(results[name, ONE]) for name in (served, PLAIN))
    logits = make_logits(target)
    # The target against itself, in batches of eight and of one: the widest gap is the rounding of this dtype
    # here.
    rounding = compare_lossless(merge(results[PLAIN, MANY]), plain, logits)
    lossless = compare_lossless(ours, plain, logits, known_rounding=rounding.widest_gap)
    differences = [asdict(difference) for difference in lossless.differences]
    return {
        "speculative_config": drafts[served],
        "lossless": lossless.lossless,
        "num_prompts": lossless.num_prompts,
        "without_draft": {"parted": len(rounding.differences), "widest_gap": rounding.widest_gap},
        "ties": [row for row in differences if row["is_tie"]],
        "differences": [row for row in differences if not row["is_tie"]],
        "dtype": ours.dtype,
    }


def headline(report: Mapping[str, Any]) -> str:
    """One line about the speed."""
    speed = report["speed"]
    title = TITLES[speed["served"]]
    return (
        f"{title}: {speed['ratio_1']:.2f}x as fast at one request (95% interval from {speed['ratio_1_low']:.2f}x), "
        f"{speed['ratio_8']:.2f}x at eight; n-grams {speed['ngram_ratio_1']:.2f}x; "
        f"the head's tau {speed['head_tau']:.2f}"
    )


def draw_charts(report: Mapping[str, Any]) -> dict[str, Any]:
    from redraft.recipes.demo.speedup_charts import build_charts

    return build_charts(report)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
