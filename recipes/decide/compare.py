"""Which draft pays?

Make every kind of draft for a target, measure each in a real vLLM, and confirm the best.
"""

import functools
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from redraft.distill.data.conversations import Conversation, load_conversations
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import held_out_prompts
from redraft.eval.engine.draft_source import NGRAM
from redraft.eval.engine.server import Mode, VllmServer
from redraft.eval.machine import ENGINE_IS_CPU, engine_environment, environment
from redraft.eval.prompts import Prompt
from redraft.eval.report.page import TEMPLATES, write_page
from redraft.eval.serving.baseline import choose_mode, describe_baseline, describe_modes
from redraft.eval.serving.drafts import Candidate, Choice, choose, predict
from redraft.eval.serving.drafts_charts import build_charts
from redraft.eval.serving.rounds import (
    PLAIN,
    Plan,
    Results,
    keep_rounds,
    plain_runs,
    run_rounds,
    start_servers,
)
from redraft.heads.families.retrieval import FOLDER
from redraft.heads.files.artifact import write_whole
from redraft.heads.files.folder import fetch_model
from redraft.heads.files.kept import fingerprint_path
from redraft.heads.files.replaced import PREVIOUS, drop_previous, start_over
from redraft.heads.files.target_folder import TargetFolder
from redraft.heads.progress import Progress
from redraft.recipes.decide.compare_config import LOOKUP_TOKENS, Config
from redraft.recipes.decide.compare_report import (
    LOADS,
    by_load,
    compose_answer,
    describe_head,
    describe_speed,
    verdict,
)
from redraft.recipes.decide.made_drafts import (
    MAX_PROMPT_TOKENS,
    Making,
    finished_drafts,
    make_lookups,
    make_trained,
)
from redraft.recipes.demo.parts import ANSWERS, make_target, question, read_origin, read_problems

FILES = ("model", FOLDER)  # Keys of a --speculative-config for the draft's folder.
ROUNDS = "rounds"  # Folder in --output of the finished rounds.
FIRST_PROBLEMS = 4  # Every fourth prompt is for the first rounds. The others confirm.
ROWS_PROMPTS = 32  # compute as many rows as eight requests with three draft tokens


def main(cfg: Config) -> None:
    started = time.perf_counter()
    require_answers(cfg)
    name = cfg.target or str(make_target(cfg.parts))
    # Before the trainings: what cannot be served must not be found out an hour later.
    fetch_model(name)
    target = TargetFolder.open(name)
    questions = load_questions(cfg)
    first, rest = render_prompts(cfg, target, questions)
    finished = list(finished_drafts(cfg.draft, cfg.train, cfg.num_speculative_tokens))
    making = prepare(cfg, target, questions)
    if cfg.overwrite:
        start_over(cfg.output, ROUNDS, cfg)

    # 1. the plain server to beat: compiled or eager, whichever is faster here
    rounds = Rounds(cfg, target, *choose_baseline(cfg, target, first))

    # 2. every draft with one number of tokens; what needs no training comes first, and each verdict
    #    as it is known
    choices: list[Choice] = []
    measured: list[Results] = []
    for candidates in make_groups(cfg, [*make_lookups(making), *finished], making):
        results = rounds.measure_first(candidates, first)
        measured.append(results)
        for candidate in candidates:
            choices.append(predict(candidate, results, LOADS))
            print(verdict(choices[-1]), flush=True)

    # 3. the best with their best numbers of tokens, on other prompts
    best = choose(choices, cfg.confirm)
    confirmed = rounds.confirm(
        [*best, *(c for c in choices if c.candidate.name == NGRAM and c not in best)], rest
    )

    # 4. the report
    rows: list[dict[str, Any]] = [
        {
            "name": choice.candidate.name,
            "title": choice.candidate.title,
            "predicted": choice.speedups,
        }
        | by_load(confirmed[choice.candidate.name], choice.candidate.name)
        for choice in best
    ]
    log = cfg.output / "logs" / f"vllm-{PLAIN}.log"
    alone = plain_runs(rounds.groups)
    baseline = describe_baseline(alone, rounds.mode, rounds.modes, log=log, target=target.folder)
    report = {
        "target": cfg.target or read_origin(target.folder),
        "command": shlex.join(sys.argv),
        "baseline": asdict(baseline),
        "drafts": [choice.to_json() for choice in choices],
        "confirmed": sorted(rows, key=lambda row: -row["1"]["ratio"]),
        "plain": by_load(next(iter(confirmed.values())), PLAIN),
        **describe_speed(target.name, choices, best, confirmed, measured),
        **describe_head(target.name, cfg.output, choices, measured, confirmed),
        "settings": {
            "minutes": cfg.minutes,
            "trained": len(cfg.train),
            "rounds": cfg.rounds,
            "confirm_rounds": cfg.confirm_rounds,
        },
        "environment": environment(),
        "duration_s": round(time.perf_counter() - started, 1),
    }
    page = write_page(cfg.output, report, TEMPLATES / "compare.html.j2", build_charts)
    drop_previous(cfg.output / PREVIOUS)
    print(*compose_answer(report), f"report: {page}", sep="\n")


def require_answers(cfg: Config) -> None:
    """Raise ValueError, with the command that writes them, if drafts are to be trained and there
    are no answers.
    """
    # Not in the config: a message from there is broken into lines, and nobody could copy the
    # command.
    if cfg.train and known_answers(cfg) is None:
        raise ValueError(
            f"the answers in redraft are not those of {cfg.target}: run `redraft regenerate "
            f"--target {cfg.target} "
            "--prompts stdlib-functions --output answers.jsonl`, then give --data answers.jsonl"
        )


def prepare(cfg: Config, target: TargetFolder, questions: Sequence[Conversation]) -> Making:
    """How the drafts are made, with the file of the first rounds' conversations, on which the
    trainings forecast.
    """
    prompts = cfg.output / "prompts.jsonl"
    text = "".join(f"{json.dumps(conversation)}\n" for conversation in questions[::FIRST_PROBLEMS])
    if not prompts.is_file() or prompts.read_text() != text:  # else finished drafts would look old
        write_whole(prompts, text)
    return Making(cfg=cfg, target=target, answers=known_answers(cfg), prompts=prompts)


def make_groups(
    cfg: Config, ready: Sequence[Candidate], making: Making
) -> Iterator[list[Candidate]]:
    """The drafts that share rounds.

    Those that are ready first, then the trained ones, trained just before.
    """
    # One server of each group is the target alone.
    size = num_together(cfg) - 1
    for start in range(0, len(ready), size):
        yield list(ready[start : start + size])
    with Progress(total=len(cfg.train), desc="train drafts", unit="draft") as bar:
        for start in range(0, len(cfg.train), size):
            group: list[Candidate] = []
            for candidate in make_trained(making, cfg.train[start : start + size]):
                group.append(candidate)
                bar.update()
            yield group


# ----------------------------------------------------------------------------------------------------
# the measurement


def load_questions(cfg: Config) -> list[Conversation]:
    """The conversations whose last questions are the prompts.

    Raises:
        ValueError: too few.
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
        raise ValueError(
            f"{cfg.prompts} has {len(conversations)} conversations: give at least {FIRST_PROBLEMS}"
        )
    return conversations


def render_prompts(
    cfg: Config, target: TargetFolder, questions: Sequence[Conversation]
) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts of the first rounds, prompts of the last ones).

    Raises:
        ValueError: none is left.
    """
    day = choose_day(None)
    render = functools.partial(
        held_out_prompts, tokenizer=target.tokenizer, max_length=MAX_PROMPT_TOKENS, day=day
    )
    first = render(questions[::FIRST_PROBLEMS], num_prompts=cfg.num_prompts)
    rest = [c for number, c in enumerate(questions) if number % FIRST_PROBLEMS]
    most = cfg.confirm_rounds * max(cfg.prompts_one, cfg.prompts_many)
    # Not those of the first rounds: choosing on the prompts that confirm would favour luck.
    return first, render(rest, num_prompts=most, beside=first)


def server_options(cfg: Config) -> dict[str, Any]:
    return {
        "max_model_len": MAX_PROMPT_TOKENS
        + cfg.max_tokens
        + max(LOOKUP_TOKENS.values())
        + cfg.num_speculative_tokens,
        "max_num_seqs": ROWS_PROMPTS,
        "extra_args": cfg.vllm_args,
    }


def choose_baseline(
    cfg: Config, target: TargetFolder, prompts: Sequence[Prompt]
) -> tuple[Mode, dict[Mode, float]]:
    """(mode of all servers, tokens/s by mode)."""
    load = min(LOADS)
    plan = replace(plan_rounds(cfg, 1), prompts={load: cfg.prompts_one})

    def speed(server: VllmServer) -> float:
        return run_rounds({PLAIN: server}, prompts, plan)[PLAIN, load][0].tokens_per_s

    mode, speeds = choose_mode(
        target.name, speed, cfg.rounds, cfg.output / "logs", cfg.output / ROUNDS, [target.fingerprint, prompts, plan],
        **server_options(cfg),
    )  # fmt: skip
    print(describe_modes(mode, speeds), flush=True)
    return mode, speeds


class Rounds:
    """The rounds of a comparison: groups of servers in one mode, the target alone among them."""

    def __init__(
        self, cfg: Config, target: TargetFolder, mode: Mode, modes: Mapping[Mode, float]
    ) -> None:
        self.cfg, self.target, self.mode, self.modes = cfg, target, mode, modes
        self.groups: list[Results] = []  # The rounds of every group, once.

    def measure_first(self, candidates: Sequence[Candidate], prompts: Sequence[Prompt]) -> Results:
        """Rounds of a group of drafts with the most draft tokens, beside the target alone, which
        also gets as many requests as eight verify rows.
        """
        drafts = {candidate.name: candidate.speculative_config for candidate in candidates}
        # 1 request with 3 draft tokens verifies 4 rows, 8 verify 32: so time 4 and 32 alone.
        # Two answers for each request in flight: the second begins where the first ends early.
        rows = Plan(rounds=2, prompts={load: 2 * load for load in (4, ROWS_PROMPTS)}, max_tokens=32)
        return self._measure(drafts, prompts, plan_rounds(self.cfg, self.cfg.rounds), "logs", rows)

    def confirm(self, best: Sequence[Choice], prompts: Sequence[Prompt]) -> dict[str, Results]:
        """By draft, rounds of the best drafts with the advised numbers of tokens, beside the target
        alone.
        """
        size, plan = num_together(self.cfg) - 1, plan_rounds(self.cfg, self.cfg.confirm_rounds)
        results: dict[str, Results] = {}
        with Progress(total=len(best), desc="confirm drafts", unit="draft") as bar:
            for start in range(0, len(best), size):
                group = best[start : start + size]
                drafts = {choice.candidate.name: choice.speculative_config for choice in group}
                # With the target's rounds of this group: a speed is a ratio within a round.
                results |= dict.fromkeys(
                    drafts, self._measure(drafts, prompts, plan, "logs-confirm")
                )
                bar.update(len(group))
        return results

    def _measure(
        self,
        drafts: Mapping[str, Mapping[str, Any]],
        prompts: Sequence[Prompt],
        plan: Plan,
        logs: str,
        alone: Plan | None = None,
    ) -> Results:
        """The rounds of a group.

        They are kept for a run with the same files and settings. `alone` are further loads of the
        target alone.
        """
        options = {**server_options(self.cfg), "mode": self.mode}
        configs: dict[str, Mapping[str, Any] | None] = {PLAIN: None, **drafts}

        def measure() -> Results:
            with start_servers(
                self.target.name, configs, self.cfg.output / logs, **options
            ) as servers:
                further = run_rounds({PLAIN: servers[PLAIN]}, prompts, alone) if alone else {}
                return {**run_rounds(servers, prompts, plan), **further}

        files = [
            fingerprint_path(config[key])
            for config in drafts.values()
            for key in FILES
            if key in config
        ]
        key = [
            self.target.fingerprint,
            configs,
            files,
            prompts,
            plan,
            alone,
            options,
            engine_environment(),
        ]
        self.groups.append(keep_rounds(self.cfg.output / ROUNDS, key, measure))
        return self.groups[-1]


def known_answers(cfg: Config) -> str | None:
    return cfg.data or (str(ANSWERS) if cfg.target is None else None)


def num_together(cfg: Config) -> int:
    return max(2, cfg.together or (5 if ENGINE_IS_CPU else 2))


def plan_rounds(cfg: Config, rounds: int) -> Plan:
    one, many = LOADS
    return Plan(
        rounds=rounds,
        prompts={one: cfg.prompts_one, many: cfg.prompts_many},
        max_tokens=cfg.max_tokens,
    )
