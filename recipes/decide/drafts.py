"""Which draft pays? Make every kind of draft for a target, measure each in a real vLLM, and confirm the best.

$ make drafts                                     # SmolLM2-135M-Instruct: under an hour on two cores
$ redraft drafts --target models/llama-1b --answers answers.jsonl --prompts prompts.jsonl
$ redraft drafts --target Qwen/Qwen3-8B --answers answers.jsonl --draft Qwen/Qwen3-0.6B --train eagle3-32k

    answers of the target ─► drafts, trained for equal time ─┐
                          └► counted answers ────────────────┼─► rounds ─► tau and cost of a step ─► speed by number of
    n-grams, and every --draft ──────────────────────────────┘              draft tokens ─► rounds of the best

Names of --train: `layers-N` (a draft model of N of the target's layers), `medusa`, and `eagle3`, `dflash` or `peagle`,
with the size of the head's vocabulary, as in `eagle3-8k`. `ngram+eagle3-8k:2` is that head with n-grams before it, and
with at most 2 tokens of its own a step. The answers should be the target's (`redraft regenerate`).
After an interruption, run the same command again: finished drafts are kept.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from redraft.distill.data.conversations import Conversation, load_conversations
from redraft.distill.data.rendering import choose_day
from redraft.distill.data.samples import held_out_prompts
from redraft.distill.inputs import TargetDtype
from redraft.distill.train.loop import computes_bfloat16
from redraft.eval.engine.server import engine_is_cpu, require_servable
from redraft.eval.forecast.ngram import Mix
from redraft.eval.machine import environment
from redraft.eval.prompts import Prompt
from redraft.eval.report.page import TEMPLATES, write_page
from redraft.eval.serving.draft_config import draft_config
from redraft.eval.serving.drafts import Candidate, Choice, choose, predict
from redraft.eval.serving.drafts_charts import build_charts
from redraft.eval.serving.rounds import PLAIN, Plan, Results, compare, run_rounds, start_servers
from redraft.heads.files.artifact import write_whole
from redraft.heads.files.checkpoint import load_text_config, load_tokenizer
from redraft.heads.files.folder import count_parameters
from redraft.heads.progress import Progress
from redraft.recipes.cli import run_recipe
from redraft.recipes.demo.parts import ANSWERS, make_target, question, read_problems

LOADS = (1, 8)
"""Requests in flight."""

RECIPES = Path(__file__).parents[1]
LAYERS = re.compile(r"layers-(\d+)")
HEAD = re.compile(r"(eagle3|dflash|peagle)-(\d+)k")
OWN_FLAGS: dict[str, Callable[[int], list[str]]] = {
    "eagle3": lambda tokens: ["--head.num-steps", str(tokens)],
    "medusa": lambda tokens: ["--head.num-heads", str(tokens)],
    # A block of the known token and the drafted ones. The default, 512 blocks of 16, is for GPUs: on a CPU a step would
    # take half a minute.
    "dflash": lambda tokens: ["--head.block-size", str(tokens + 1), "--head.num-anchors", "64"],
}
"""Flags of the recipes that depend on the number of draft tokens."""

NGRAM, RETRIEVAL = "ngram", "retrieval"
LOOKUP_TOKENS = {NGRAM: 4, RETRIEVAL: 6}
"""Most draft tokens of a step. Counted answers propose fewer if they are unlikely."""

MAX_PROMPT_TOKENS = 360
FIRST_PROBLEMS = 4
"""Every fourth prompt is for the first rounds. The others confirm."""

ROWS_PROMPTS = 32
"""Requests in flight without a draft that compute as many rows as eight requests with three draft tokens."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str | None = None
    """Folder or hub name of the served model. By default SmolLM2-135M-Instruct, from a wheel on PyPI."""
    draft: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Finished draft to compare with: a folder, a hub name, `suffix`, or `mtp`. Repeat the flag for more."""
    train: tuple[str, ...] = (
        *("layers-2", "layers-4", "layers-6", "layers-10"),
        *("eagle3-4k", "eagle3-8k", "eagle3-16k", "ngram+eagle3-8k:2", "dflash-8k", "medusa"),
    )
    """Drafts to train. Leave it empty to compare finished ones only."""
    minutes: float = 2.5
    """Length of each training."""
    answers: str = str(ANSWERS)
    """Answers of the target to train on and to count, as written by `redraft regenerate`."""
    prompts: str | None = None
    """Prompts to measure on: a hub name, or a .jsonl or .parquet file. By default HumanEval's."""
    num_speculative_tokens: int = 3
    """Most draft tokens of a step, of drafts that are not looked up."""
    rounds: int = 3
    """Interleaved rounds of all drafts."""
    confirm: int = 3
    """Number of drafts in the last rounds: those that should be the fastest."""
    confirm_rounds: int = 6
    """Interleaved rounds of these, at least 6 for an interval."""
    prompts_one: int = 2
    """Prompts of a round with one request in flight."""
    prompts_many: int = 8
    """Prompts of a round with eight requests in flight."""
    max_tokens: int = 64
    """Longest answer, in tokens."""
    together: int = 0
    """Servers alive at the same time, which take turns; 0: five on a CPU, one on a GPU. All share the memory."""
    engine_args: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Further argument of vLLM, after an equals sign: --engine-args=--tensor-parallel-size=8. Repeat the flag for more
    arguments."""
    flags: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Word to append to the command of every training: --flags=--loop.batch-size --flags=2."""
    parts: Path = Path("outputs/parts")
    """Folder of the downloaded model and prompts, kept for later runs."""
    output: Path = Path("outputs/drafts")
    """Folder for report.json, report.html, the drafts and the logs."""
    overwrite: bool = False
    """Train everything again."""

    def __post_init__(self) -> None:
        for name in self.train:
            head, mixed = trained(name)
            if not (head == "medusa" or LAYERS.fullmatch(head) or HEAD.fullmatch(head)):
                raise ValueError(f"--train {name}: give layers-N, medusa, or eagle3-Nk, dflash-Nk, peagle-Nk")
            if mixed and not head.startswith("eagle3"):
                raise ValueError(f"--train {name}: n-grams go before eagle3-Nk only")
        if self.confirm_rounds < 6:
            raise ValueError(f"--confirm-rounds {self.confirm_rounds} give no 95% interval: 6 or more")
        for field in ("rounds", "confirm", "num_speculative_tokens", "prompts_one", "prompts_many"):
            if getattr(self, field) < 1:
                raise ValueError(f"--{field.replace('_', '-')} must be at least 1")

    @property
    def num_together(self) -> int:
        return max(2, self.together or (5 if engine_is_cpu() else 1))

    def plan(self, rounds: int) -> Plan:
        one, many = LOADS
        return Plan(rounds=rounds, prompts={one: self.prompts_one, many: self.prompts_many}, max_tokens=self.max_tokens)


def main(cfg: Config) -> None:
    started = time.perf_counter()
    target = cfg.target or str(make_target(cfg.parts))
    # Before the trainings: too few prompts, or a draft that cannot be served, must not be found out an hour later.
    first, rest = load_prompts(cfg, target)
    finished = list(finished_drafts(cfg))

    # 1. make the drafts
    # The trainings run here, one after the other: `make_drafts` is a generator.
    candidates = [*make_drafts(cfg, target), *finished]

    # 2. measure each with one number of tokens, and predict the speed with every other
    results = measure_all(cfg, target, candidates, first)
    choices = [predict(candidate, results[candidate.name], LOADS) for candidate in candidates]

    # 3. confirm the best on other prompts
    best = choose(choices, cfg.confirm)
    confirmed = confirm(cfg, target, best, rest) if best else results[candidates[0].name]

    # 4. report
    rows: list[dict[str, Any]] = [
        {"name": choice.candidate.name, "title": choice.candidate.title, "predicted": choice.speedups}
        | {str(load): compare(confirmed, choice.candidate.name, load) for load in LOADS}
        for choice in best
    ]
    report = {
        "target": target,
        "command": shlex.join(sys.argv),
        "drafts": [choice.to_json() for choice in choices],
        "confirmed": sorted(rows, key=lambda row: -row["1"]["ratio"]),
        "plain": {str(load): compare(confirmed, PLAIN, load) for load in LOADS},
        "settings": {"minutes": cfg.minutes, "rounds": cfg.rounds, "confirm_rounds": cfg.confirm_rounds},
        "environment": environment(),
        "duration_s": round(time.perf_counter() - started, 1),
    }
    page = write_page(cfg.output, report, TEMPLATES / "drafts.html.j2", build_charts)
    for line in compose_answer(report):
        print(line)
    print(f"report: {page}")


# ------------------------------------------------------------------------------------------------------- the drafts


def make_drafts(cfg: Config, target: str) -> Iterator[Candidate]:
    """The drafts without training, and those to train; a finished one is kept."""
    yield Candidate(NGRAM, "n-grams", draft_config(NGRAM), LOOKUP_TOKENS[NGRAM])
    # A folder with a config.json is whole: `redraft retrieval` publishes with one rename.
    counted = cfg.output / RETRIEVAL
    command = ["train/retrieval.py", "--target", target, "--source", cfg.answers, "--output", str(counted)]
    run_once(counted, counted / "config.json", command, cfg)
    yield Candidate(RETRIEVAL, "counted answers", draft_config(str(counted.absolute())), LOOKUP_TOKENS[RETRIEVAL])
    # A head with n-grams before it is the same head, trained once.
    heads = list(dict.fromkeys(trained(name)[0] for name in cfg.train))
    for number, name in enumerate(heads, 1):
        print(f"\n{number} of {len(heads)}: {name}", flush=True)
        folder = cfg.output / name
        # The report is written last, so it stands for a finished training.
        run_once(folder, folder / "report.json", training_command(cfg, target, name), cfg)
    for name in cfg.train:
        head, mixed = trained(name)
        draft = (cfg.output / head / "draft").absolute()
        served = str(replace(mixed, head=str(draft)) if mixed else draft)
        most = LOOKUP_TOKENS[NGRAM] if mixed else cfg.num_speculative_tokens
        report = json.loads((cfg.output / head / "report.json").read_text())["train"]
        yield Candidate(name, title(name), draft_config(served), most, count_parameters(draft), report)


def trained(name: str) -> tuple[str, Mix | None]:
    """(draft to train for a name of --train, how n-grams go before it)."""
    mixed = Mix.parse(name)
    return mixed.head if mixed else name, mixed


def finished_drafts(cfg: Config) -> Iterator[Candidate]:
    """The drafts of --draft. Raises ValueError or FileNotFoundError if one is none, or would not be served so."""
    for source in cfg.draft:
        config, name = draft_config(source), Path(source).name
        size = count_parameters(Path(source)) if Path(source).is_dir() else None
        candidate = Candidate(name, name, config, cfg.num_speculative_tokens, size)
        require_servable(candidate.speculative_config)
        yield candidate


def training_command(cfg: Config, target: str, name: str) -> list[str]:
    """The recipe of a draft, and the flags. All see the same answers for the same time.

    Raises:
        ValueError: the target has too few layers.
    """
    dtype: TargetDtype = "bfloat16" if computes_bfloat16() else "float32"
    tokens = str(cfg.num_speculative_tokens)
    if found := LAYERS.fullmatch(name):
        recipe, own = "distill_llama3b.py", ["--draft.layers", *map(str, spread(int(found[1]), target))]
    elif found := HEAD.fullmatch(name):
        recipe, own = f"train/{found[1]}_llama8b.py", ["--draft-vocab-size", str(1024 * int(found[2]))]
        own += OWN_FLAGS[found[1]](cfg.num_speculative_tokens) if found[1] in OWN_FLAGS else []
    else:
        recipe, own = "train/medusa_llama8b.py", OWN_FLAGS[name](cfg.num_speculative_tokens)
    return [
        *(recipe, "--target", target, "--target-dtype", dtype, "--output", str(cfg.output / name), *own),
        *("--mixed-precision", "bf16" if dtype == "bfloat16" else "no"),
        *("--data.source", cfg.answers, "--data.held-out", "0.02", "--data.num-prompts", "8"),
        *("--divergence.name", "lk_hybrid", "--optim.lr", "1e-3", "--optim.max-grad-norm", "0.5"),
        *("--loop.minutes", str(cfg.minutes), "--loop.batch-size", "4", "--loop.sequence-length", "512"),
        # No evaluation, checkpoint or engine in between: the minutes are for steps, and the rounds measure
        # later.
        *("--loop.eval-every", "0", "--loop.save-every", "0", "--prove.no-engine", "--prove.max-tokens", "32"),
        # The target answers the held-out prompts once, for all trainings.
        *("--prove.num-speculative-tokens", tokens, "--prove.reference", str(cfg.output / "target"), *cfg.flags),
    ]


def spread(count: int, target: str) -> list[int]:
    """`count` layers of the target at equal distances, the first and the last included.

    Raises:
        ValueError: the target has fewer.
    """
    layers = int(load_text_config(target).num_hidden_layers)
    if not 1 <= count < layers:
        raise ValueError(f"--train layers-{count}: {target} has {layers} layers, so give 1 to {layers - 1}")
    # E.g. 4 of 30 layers: 0, 10, 19, 29. A single one is the first.
    return [round(i * (layers - 1) / max(1, count - 1)) for i in range(count)]


def title(name: str) -> str:
    """The name of a draft on the page."""
    if mixed := Mix.parse(name):
        limit = "" if mixed.head_tokens is None else f", up to {mixed.head_tokens} of its own"
        return f"n-grams before {title(mixed.head)}{limit}"
    if found := LAYERS.fullmatch(name):
        return f"{found[1]} of the target's layers"
    if found := HEAD.fullmatch(name):
        family = {"eagle3": "EAGLE-3", "dflash": "DFlash", "peagle": "P-EAGLE"}[found[1]]
        return f"{family}, {found[2]}k ids"
    return "Medusa"


def run_once(folder: Path, result: Path, command: list[str], cfg: Config) -> None:
    """Run a recipe in a separate process, unless the result exists.

    Raises:
        ValueError: it fails, after it has printed the reason; or the result is that of other flags.
    """
    kept = cfg.output / f"{folder.name}.command.json"
    if cfg.overwrite or not result.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        if subprocess.run([sys.executable, str(RECIPES / command[0]), *command[1:]]).returncode:
            raise ValueError(f"{folder.name} failed, see above")
        # Only after a success. Without this file the flags of a result are unknown, and it is refused below.
        write_whole(kept, json.dumps(command))
    elif not kept.is_file() or json.loads(kept.read_text()) != command:
        raise ValueError(f"{folder} was made with other flags: give --overwrite, or another --output")
    else:
        print(f"{folder} is already done")


# ---------------------------------------------------------------------------------------------------- the measurement


def load_prompts(cfg: Config, target: str) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts of the first rounds, prompts of the last ones).

    Raises:
        ValueError: there are too few.
    """
    conversations: list[Conversation] = (
        [
            {"messages": [{"role": "user", "content": question(problem)}], "domain": "code"}
            for problem in read_problems(cfg.parts)
        ]
        if cfg.prompts is None
        else load_conversations(cfg.prompts)
    )
    if len(conversations) < FIRST_PROBLEMS:
        raise ValueError(f"{cfg.prompts} has {len(conversations)} conversations: give at least {FIRST_PROBLEMS}")
    tokenizer, day = load_tokenizer(target), choose_day(None)

    def render(some: Sequence[Conversation], rounds: int) -> list[Prompt]:
        # Enough for every round to have new prompts, at both loads.
        number = rounds * max(cfg.prompts_one, cfg.prompts_many)
        return held_out_prompts(some, tokenizer, num_prompts=number, max_length=MAX_PROMPT_TOKENS, day=day)

    # Disjoint from the prompts of the first rounds: choosing on the prompts that confirm would favour luck.
    rest = [c for number, c in enumerate(conversations) if number % FIRST_PROBLEMS]
    return render(conversations[::FIRST_PROBLEMS], cfg.rounds), render(rest, cfg.confirm_rounds)


def measure_all(
    cfg: Config, target: str, candidates: Sequence[Candidate], prompts: Sequence[Prompt]
) -> dict[str, Results]:
    """Rounds of every draft, beside the target alone; as many drafts at a time as fit.

    The target alone is also measured with as many requests as there are rows when eight requests verify.
    """
    # One server of each group is the target alone.
    size = cfg.num_together - 1
    groups = [candidates[i : i + size] for i in range(0, len(candidates), size)]
    results: dict[str, Results] = {}
    with Progress(total=len(candidates), desc="measure drafts", unit="draft") as bar:
        for group in groups:
            drafts = {c.name: c.speculative_config for c in group}
            with start_servers(target, {PLAIN: None, **drafts}, cfg.output / "logs", **server_options(cfg)) as servers:
                # 1 request with 3 draft tokens verifies 4 rows, and 8 such requests 32. So the target is timed
                # with 4 and with 32 requests of 1 row.
                rows = {4: 4, ROWS_PROMPTS: ROWS_PROMPTS}
                wide = run_rounds({PLAIN: servers[PLAIN]}, prompts, Plan(rounds=2, prompts=rows, max_tokens=32))
                measured = {**run_rounds(servers, prompts, cfg.plan(cfg.rounds)), **wide}
            for name in drafts:
                # With the target's rounds of this group: a speed is a ratio within a round.
                results[name] = measured
            bar.update(len(group))
    return results


def confirm(cfg: Config, target: str, best: Sequence[Choice], prompts: Sequence[Prompt]) -> Results:
    """Rounds of the best drafts with the advised numbers of tokens, beside the target alone."""
    drafts = {choice.candidate.name: choice.speculative_config for choice in best}
    with start_servers(target, {PLAIN: None, **drafts}, cfg.output / "logs-confirm", **server_options(cfg)) as servers:
        return run_rounds(servers, prompts, cfg.plan(cfg.confirm_rounds))


def server_options(cfg: Config) -> dict[str, Any]:
    # The servers of a group share one GPU, and each would take nearly all of the memory.
    share = () if engine_is_cpu() else (f"--gpu-memory-utilization={0.9 / cfg.num_together:.2f}",)
    return {
        "max_model_len": MAX_PROMPT_TOKENS + cfg.max_tokens + max(LOOKUP_TOKENS.values()) + cfg.num_speculative_tokens,
        "max_num_seqs": ROWS_PROMPTS,
        "dtype": "bfloat16" if computes_bfloat16() else None,
        "extra_args": (*share, *cfg.engine_args),
    }


def compose_answer(report: Mapping[str, Any]) -> Iterator[str]:
    """A line for each confirmed draft, with prediction and measurement."""
    for row in report["confirmed"]:
        one, many = row["1"], row["8"]
        yield (
            f"{row['title']}: {one['ratio']:.2f}x as fast at one request "
            f"[{one['interval'][0]:.2f}, {one['interval'][1]:.2f}], predicted {row['predicted']['1']:.2f}x; "
            f"{many['ratio']:.2f}x at eight, predicted {row['predicted']['8']:.2f}x"
        )
    if not report["confirmed"]:
        yield "no draft should make this target faster here: serve it without"


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
