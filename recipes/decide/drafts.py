"""Which draft pays? Make every kind of draft for a target, measure each in a real vLLM, and confirm the best.

$ make drafts                                     # SmolLM2-135M-Instruct: thirteen drafts in an hour on two cores
$ redraft drafts --target models/llama-1b --answers answers.jsonl --prompts prompts.jsonl
$ redraft drafts --target Qwen/Qwen3-8B --answers answers.jsonl --draft Qwen/Qwen3-0.6B --train eagle3-32k

    answers of the target ─► drafts, trained for equal time ─┐
                          └► counted answers ────────────────┼─► rounds ─► tau and cost of a step ─► speed by number of
    n-grams, and every --draft ──────────────────────────────┘              draft tokens ─► rounds of the best

Names of --train: `layers-N` (a draft model of N of the target's layers), `medusa`, and `eagle3`, `dflash` or `peagle`,
with the size of the head's vocabulary, as in `eagle3-8k`. `ngram+eagle3-8k:2` is that head with n-grams before it, and
with at most 2 tokens of its own a step; `retrieval+eagle3-8k:2` has the counted answers before it. The answers should
be the target's (`redraft regenerate`).
After an interruption, run the same command again: finished drafts and rounds are kept.
"""

from __future__ import annotations

import functools
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
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import held_out_prompts
from redraft.eval.engine.draft_source import NGRAM, DraftSource
from redraft.eval.engine.server import engine_is_cpu, require_servable
from redraft.eval.hardware import this_machine
from redraft.eval.machine import engine_environment, environment
from redraft.eval.prompts import Prompt
from redraft.eval.report.page import TEMPLATES, write_page
from redraft.eval.serving.drafts import Candidate, Choice, choose, predict
from redraft.eval.serving.drafts_charts import build_charts
from redraft.eval.serving.rounds import PLAIN, Plan, Results, compare, keep_rounds, run_rounds, start_servers
from redraft.heads.families.retrieval import FOLDER
from redraft.heads.files.artifact import fingerprint, write_whole
from redraft.heads.files.checkpoint import load_text_config, load_tokenizer
from redraft.heads.files.folder import count_parameters, fetch_model, model_folder
from redraft.heads.files.kept import fingerprint_path
from redraft.heads.progress import Progress
from redraft.recipes.cli import run_recipe
from redraft.recipes.demo.parts import ANSWERS, make_target, question, read_problems

LOADS = (1, 8)
"""Requests in flight."""

LAYERS = re.compile(r"layers-(\d+)")
HEAD = re.compile(r"(eagle3|dflash|peagle)-(\d+)k")
OWN_FLAGS: dict[str, Callable[[int], list[str]]] = {
    "eagle3": lambda tokens: [
        *("--head.num-steps", str(tokens), "--head.fc-norm", "--init", "least_squares", "--init-tokens", "32768")
    ],
    "medusa": lambda tokens: ["--head.num-heads", str(tokens)],
    # A block of the known token and the drafted ones. The default, 512 blocks of 16, is for GPUs: on a CPU a step would
    # take half a minute.
    "dflash": lambda tokens: ["--head.block-size", str(tokens + 1), "--head.num-anchors", "64"],
}
"""Flags of the recipes that depend on the number of draft tokens."""

ADAMW = ("--optim.lr", "1e-3")
MUON = ("--optim.name", "muon", "--optim.momentum", "0.8", "--optim.lr")
"""Flags of the optimizers. In a short run all families learn more with Muon, but Medusa. A training of minutes has no
time for the long memory of a higher momentum."""

MUON_RATE, STARTED_RATE = "2e-3", "5e-4"
"""Muon's learning rate, and that of a head that starts by least squares: a higher one would undo the start."""

RETRIEVAL = "retrieval"
LOOKUP_TITLES = {NGRAM: "n-grams", RETRIEVAL: "counted answers"}
LOOKUP_TOKENS = {NGRAM: 4, RETRIEVAL: 6}
"""Most draft tokens of a step. Counted answers propose fewer if they are unlikely."""

FILES = ("model", FOLDER)
"""Keys of a --speculative-config for the draft's folder."""

ROUNDS = "rounds"
"""Folder in --output of the finished rounds."""

MAX_PROMPT_TOKENS = 360
FIRST_PROBLEMS = 4
"""Every fourth prompt is for the first rounds. The others confirm."""

ROWS_PROMPTS = 32
"""Requests in flight without a draft that compute as many rows as eight requests with three draft tokens."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str | None = None
    """Folder or hub name of the served model. By default SmolLM2-135M-Instruct, from the hub,
    or from a wheel on PyPI if the hub cannot be reached."""
    draft: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Finished draft to compare with: a folder, a hub name, `suffix`, or `mtp`. Repeat the flag for more. On the page
    a draft has the folder's name, or the one above if that is `draft`; if two would have the same, the whole path."""
    train: tuple[str, ...] = (
        *("layers-2", "layers-4", "layers-6", "layers-10"),
        *("eagle3-4k", "eagle3-8k", "eagle3-16k", "ngram+eagle3-8k:2", "retrieval+eagle3-8k:2", "dflash-8k", "medusa"),
    )
    """Drafts to train. Leave it empty to compare finished ones only."""
    minutes: float = 2.5
    """Length of each training."""
    answers: str | None = None
    """Answers of the target to train on and to count, as written by `redraft regenerate`. By default those of
    SmolLM2-135M-Instruct, if it is the target. If nothing is trained, another target needs none: nothing is counted."""
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
    """Servers alive at the same time, which take turns; 0: five on a CPU, two on a GPU. One is the target alone. All
    share the memory."""
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
    """Train and measure everything again. To measure again only, delete the folder `rounds` in --output."""

    def __post_init__(self) -> None:
        for name in self.train:
            draft = parse_trained(name)
            head = draft.source
            if not (head == "medusa" or LAYERS.fullmatch(head) or HEAD.fullmatch(head)):
                raise ValueError(f"--train {name}: give layers-N, medusa, or eagle3-Nk, dflash-Nk, peagle-Nk")
            if draft.lookup and not (draft.lookup in LOOKUP_TOKENS and head.startswith("eagle3")):
                raise ValueError(f"--train {name}: {' or '.join(LOOKUP_TOKENS)} goes before eagle3-Nk only")
            if self.train.count(name) > 1:
                raise ValueError(f"--train {name} is given twice")
        if self.confirm_rounds < 6:
            raise ValueError(f"--confirm-rounds {self.confirm_rounds} give no 95% interval: 6 or more")
        for field in ("rounds", "confirm", "num_speculative_tokens", "prompts_one", "prompts_many"):
            if getattr(self, field) < 1:
                raise ValueError(f"--{field.replace('_', '-')} must be at least 1")

    @property
    def known_answers(self) -> str | None:
        """Source of the target's answers; None if there is none."""
        return self.answers or (str(ANSWERS) if self.target is None else None)

    @property
    def num_together(self) -> int:
        return max(2, self.together or (5 if engine_is_cpu() else 2))

    def plan(self, rounds: int) -> Plan:
        one, many = LOADS
        return Plan(rounds=rounds, prompts={one: self.prompts_one, many: self.prompts_many}, max_tokens=self.max_tokens)


def main(cfg: Config) -> None:
    started = time.perf_counter()
    require_answers(cfg)
    if cfg.overwrite:
        shutil.rmtree(cfg.output / ROUNDS, ignore_errors=True)
    target = cfg.target or str(make_target(cfg.parts))
    # Before the trainings: a target without all files, too few prompts, or a draft that cannot be served, must not be
    # found out an hour later.
    fetch_model(target)
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
    confirmed = confirm(cfg, target, best, rest) if best else results

    # 4. report
    rows: list[dict[str, Any]] = [
        {"name": choice.candidate.name, "title": choice.candidate.title, "predicted": choice.speedups}
        | {str(load): compare(confirmed[choice.candidate.name], choice.candidate.name, load) for load in LOADS}
        for choice in best
    ]
    report = {
        "target": target,
        "command": shlex.join(sys.argv),
        "drafts": [choice.to_json() for choice in choices],
        "confirmed": sorted(rows, key=lambda row: -row["1"]["ratio"]),
        "plain": {str(load): compare(next(iter(confirmed.values())), PLAIN, load) for load in LOADS},
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
    yield Candidate(NGRAM, "n-grams", DraftSource(source=NGRAM).speculative(), LOOKUP_TOKENS[NGRAM])
    if cfg.known_answers:
        # A folder with a config.json is whole: `redraft retrieval` publishes with one rename.
        counted = cfg.output / RETRIEVAL
        module = ("-m", "redraft.recipes.data.retrieval")
        command = [*module, "--target", target, "--source", cfg.known_answers, "--output", str(counted)]
        run_once(counted, counted / "config.json", command, cfg, target)
        config = DraftSource(source=str(counted)).speculative()
        yield Candidate(RETRIEVAL, "counted answers", config, LOOKUP_TOKENS[RETRIEVAL])
    # A head with a lookup before it is the same head, trained once.
    heads = list(dict.fromkeys(parse_trained(name).source for name in cfg.train))
    for number, name in enumerate(heads, 1):
        print(f"\n{number} of {len(heads)}: {name}", flush=True)
        folder = cfg.output / name
        # The report is written last, so it stands for a finished training.
        run_once(folder, folder / "report.json", training_command(cfg, target, name), cfg, target)
    for name in cfg.train:
        draft = parse_trained(name)
        run = cfg.output / draft.source
        lookup = str(cfg.output / RETRIEVAL) if draft.lookup == RETRIEVAL else draft.lookup
        served = replace(draft, source=str(run / "draft"), lookup=lookup)
        most = LOOKUP_TOKENS[draft.lookup] if draft.lookup else cfg.num_speculative_tokens
        report = json.loads((run / "report.json").read_text())["train"]
        size = count_parameters(run / "draft")
        yield Candidate(name, title(name), served.speculative(), most, size, report)


def require_answers(cfg: Config) -> None:
    """Raise ValueError, with the command that writes them, if drafts are to be trained and there are no answers."""
    # Not in the config: a message from there is broken into lines, and nobody could copy the command.
    if cfg.train and cfg.known_answers is None:
        raise ValueError(
            f"the answers in redraft are not those of {cfg.target}: run `redraft regenerate --target {cfg.target} "
            "--source stdlib-functions --output answers.jsonl`, then give --answers answers.jsonl"
        )


def parse_trained(name: str) -> DraftSource:
    """A name of --train; `source` is the draft to train."""
    return DraftSource.parse(name, (RETRIEVAL,))


def finished_drafts(cfg: Config) -> Iterator[Candidate]:
    """The drafts of --draft. Raises ValueError or FileNotFoundError if one is none, or would not be served so."""
    for name, draft in name_drafts(cfg).items():
        size = count_parameters(draft.folder) if draft.folder else None
        candidate = Candidate(name, name, draft.speculative(), cfg.num_speculative_tokens, size)
        require_servable(candidate.speculative_config)
        yield candidate


def name_drafts(cfg: Config) -> dict[str, DraftSource]:
    """The drafts of --draft by name; one whose short name another draft has too is called by its whole source.

    Raises:
        ValueError: a source is given twice, or has the name of a draft that is made here.
    """
    made = [PLAIN, NGRAM, RETRIEVAL, *cfg.train]
    drafts = [DraftSource.parse(source) for source in cfg.draft]
    for source in cfg.draft:
        if cfg.draft.count(source) > 1:
            raise ValueError(f"--draft {source} is given twice")
        if source in made:
            raise ValueError(f"--draft {source}: the comparison has one of this name; a folder is ./{source}")
    names = [*made, *(draft.name for draft in drafts)]
    return {draft.name if names.count(draft.name) == 1 else str(draft): draft for draft in drafts}


def training_command(cfg: Config, target: str, name: str) -> list[str]:
    """The recipe of a draft, and the flags. All see the same answers for the same time. The start of an EAGLE-3 head is
    fitted before.

    Raises:
        ValueError: the target has too few layers.
    """
    assert cfg.known_answers is not None, "main refuses to train without"
    tokens = str(cfg.num_speculative_tokens)
    if found := LAYERS.fullmatch(name):
        family, own = "standalone", ["--draft.layers", *map(str, spread(int(found[1]), target))]
    elif found := HEAD.fullmatch(name):
        family, own = found[1], ["--draft-vocab-size", str(1024 * int(found[2]))]
        own += OWN_FLAGS[found[1]](cfg.num_speculative_tokens) if found[1] in OWN_FLAGS else []
    else:
        family, own = "medusa", OWN_FLAGS[name](cfg.num_speculative_tokens)
    return [
        *("-m", "redraft.recipes.train", family, "--target", target, "--output", str(cfg.output / name), *own),
        *("--mixed-precision", "bf16" if this_machine().has_bfloat16 else "no"),
        *("--data.source", cfg.known_answers, "--data.held-out", "0.02", "--data.num-prompts", "8"),
        *("--divergence.name", "lk_hybrid", "--optim.max-grad-norm", "0.5"),
        *(ADAMW if name == "medusa" else (*MUON, STARTED_RATE if name.startswith("eagle3") else MUON_RATE)),
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
    draft = parse_trained(name)
    if draft.lookup:
        limit = "" if draft.head_tokens is None else f", up to {draft.head_tokens} of its own"
        return f"{LOOKUP_TITLES[draft.lookup]} before {title(draft.source)}{limit}"
    if found := LAYERS.fullmatch(name):
        return f"{found[1]} of the target's layers"
    if found := HEAD.fullmatch(name):
        family = {"eagle3": "EAGLE-3", "dflash": "DFlash", "peagle": "P-EAGLE"}[found[1]]
        return f"{family}, {found[2]}k ids"
    return "Medusa"


def run_once(folder: Path, result: Path, command: list[str], cfg: Config, target: str) -> None:
    """Run a recipe in a separate process, unless the result exists.

    Raises:
        ValueError: it fails, after it has printed the reason; or the result is of other flags, or of other files of the
            target.
    """
    kept = cfg.output / f"{folder.name}.command.json"
    made = {"command": command, "target": identify(target)}
    if cfg.overwrite or not result.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        if subprocess.run([sys.executable, *command]).returncode:
            raise ValueError(f"{folder.name} failed, see above")
        # Only after a success. Without this file the flags of a result are unknown, and it is refused below.
        write_whole(kept, json.dumps(made))
    elif not kept.is_file() or json.loads(kept.read_text()) != made:
        raise ValueError(
            f"{folder} was made with other flags, or the files of {target} have changed since: give --overwrite, or "
            "another --output"
        )
    else:
        print(f"{folder} is already done")


@functools.cache
def identify(target: str) -> str:
    """The fingerprint of the target's files."""
    return fingerprint(model_folder(target))


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
    """Rounds of every draft with the most draft tokens, beside the target alone.

    The target alone is also measured with as many requests as there are rows when eight requests verify.
    """
    drafts = {candidate.name: candidate.speculative_config for candidate in candidates}
    # 1 request with 3 draft tokens verifies 4 rows, and 8 such requests 32. So the target is timed with 4 and with 32
    # requests of 1 row.
    rows = Plan(rounds=2, prompts={4: 4, ROWS_PROMPTS: ROWS_PROMPTS}, max_tokens=32)
    return measure_groups(cfg, target, drafts, prompts, cfg.plan(cfg.rounds), cfg.output / "logs", rows)


def confirm(cfg: Config, target: str, best: Sequence[Choice], prompts: Sequence[Prompt]) -> dict[str, Results]:
    """Rounds of the best drafts with the advised numbers of tokens, beside the target alone."""
    drafts = {choice.candidate.name: choice.speculative_config for choice in best}
    return measure_groups(cfg, target, drafts, prompts, cfg.plan(cfg.confirm_rounds), cfg.output / "logs-confirm")


def measure_groups(
    cfg: Config,
    target: str,
    drafts: Mapping[str, Mapping[str, Any]],
    prompts: Sequence[Prompt],
    plan: Plan,
    logs: Path,
    alone: Plan | None = None,
) -> dict[str, Results]:
    """By draft, the rounds of its group: the target alone and as many drafts as fit, in turns.

    A finished group is kept for a run with the same files and settings. `alone` are further loads of the target alone.
    """
    options, names, results = server_options(cfg), list(drafts), dict[str, Results]()

    def measure(configs: Mapping[str, Mapping[str, Any] | None]) -> Results:
        with start_servers(target, configs, logs, **options) as servers:
            further = run_rounds({PLAIN: servers[PLAIN]}, prompts, alone) if alone else {}
            return {**run_rounds(servers, prompts, plan), **further}

    # One server of each group is the target alone.
    size = cfg.num_together - 1
    with Progress(total=len(drafts), desc="measure drafts", unit="draft") as bar:
        for group in (names[i : i + size] for i in range(0, len(names), size)):
            configs = {PLAIN: None, **{name: drafts[name] for name in group}}
            files = [fingerprint_path(drafts[name][key]) for name in group for key in FILES if key in drafts[name]]
            key = [identify(target), configs, files, prompts, plan, alone, options, engine_environment()]
            # With the target's rounds of this group: a speed is a ratio within a round.
            results |= dict.fromkeys(group, keep_rounds(cfg.output / ROUNDS, key, functools.partial(measure, configs)))
            bar.update(len(group))
    return results


def server_options(cfg: Config) -> dict[str, Any]:
    return {
        "max_model_len": MAX_PROMPT_TOKENS + cfg.max_tokens + max(LOOKUP_TOKENS.values()) + cfg.num_speculative_tokens,
        "max_num_seqs": ROWS_PROMPTS,
        "extra_args": cfg.engine_args,
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
