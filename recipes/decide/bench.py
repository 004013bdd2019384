"""Find the draft, the number of tokens and the loads at which speculation pays off.

Take or make drafts for a target, measure each against the plain server, and confirm the best.
"""

import functools
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from redraft.distill.data.conversations import Conversation, load_conversations
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import held_out_prompts
from redraft.distill.run.proof import make_logits
from redraft.engine import adaptive
from redraft.engine.hardware import Machine, this_machine
from redraft.engine.lookups import lookup_env
from redraft.engine.lossless import compare_lossless
from redraft.engine.machine import ENGINE_IS_CPU, engine_environment, environment
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import (
    Sampling,
    choose_sampling,
    list_penalties,
    require_served,
)
from redraft.engine.server import Mode, VllmServer, vllm_keys
from redraft.engine.target_dtype import open_target
from redraft.eval.forecast.draft_source import NGRAM, DraftSource
from redraft.eval.serving.acceptance_source import require_target
from redraft.eval.serving.baseline import (
    MODE_ROUNDS,
    choose_mode,
    describe_baseline,
    describe_modes,
)
from redraft.eval.serving.bench_report import (
    VERSION,
    BenchReport,
    LosslessReport,
    Settings,
    by_load,
    choose_served,
    compose_answer,
    describe_draft,
    describe_lossless,
    verdict,
    write_bench,
)
from redraft.eval.serving.prediction import Candidate, Choice, choose, predict
from redraft.eval.serving.rounds import (
    PLAIN,
    Plan,
    Results,
    keep_rounds,
    measure_servers,
    merge,
    plain_runs,
    run_rounds,
    select_prompts,
)
from redraft.files.artifact import write_whole
from redraft.files.kept import fingerprint_path
from redraft.files.progress import Progress
from redraft.files.replaced import PREVIOUS, drop_previous, start_over
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.doctor.checks import first_cure
from redraft.heads.families.retrieval import FOLDER
from redraft.online.engine.config import PLUGIN_NAME
from redraft.recipes.decide.bench_config import BenchConfig, parse_trained
from redraft.recipes.decide.candidates import (
    Making,
    finished_drafts,
    give_acceptance,
    make_lookups,
    make_trained,
    name_drafts,
    trained_family,
)
from redraft.recipes.demo.parts import ANSWERS, make_target, question, read_origin, read_problems
from redraft.recipes.serve.vllm_flags import read_flags

FILES = ("model", FOLDER)  # Keys of a --speculative-config for the draft's folder.
ROUNDS = "rounds"  # Folder for finished rounds, in --output.
PARTS = Path("outputs/parts")  # Folder for the downloaded model and prompts, kept for later runs.
FIRST_PROMPTS = 4  # Every fourth prompt is used in the first rounds. The others confirm the result.
NUM_CONFIRMED = 3  # Number of drafts in the last rounds, in addition to n-grams.
# Additional load, to measure the cost of verification: as many rows as 8 requests with 3 draft
# tokens.
MOST_ROWS = 32


def main(cfg: BenchConfig) -> None:
    started = time.perf_counter()
    require_answers(cfg)
    name = cfg.target or str(make_target(PARTS))
    # Check before the training runs, so that a draft that cannot be served is not discovered an
    # hour later.
    target = open_target(name, cfg.target_dtype, on_cpu=ENGINE_IS_CPU)
    target.fetch_and_check()
    require_pace(cfg, name)
    sampling = choose_sampling(target.folder, **asked_sampling(cfg))
    require_served(sampling)
    # Requests with their own sampling parameters have no penalties (`measure`).
    penalties = {} if names_sampling(cfg) else list_penalties(target.folder)
    finished = read_finished(cfg, target, sampling, has_penalties=bool(penalties))
    questions = load_questions(cfg)
    first, rest = render_prompts(cfg, target, questions)
    making = prepare(cfg, target, questions)
    if cfg.overwrite:
        start_over(cfg.output, ROUNDS, cfg)

    # 1. Measure the baseline, a plain server: compiled or eager, whichever is faster here.
    rounds = Rounds(cfg, target, sampling if names_sampling(cfg) else None)
    mode, modes = rounds.choose_mode(first)
    if cfg.pace == "adaptive" and mode == "eager":
        raise ValueError(
            f"--pace adaptive {adaptive.GRAPHS.partition(':')[0]}, but on this machine eager "
            f"mode is faster"
        )
    print(describe_modes(mode, modes), flush=True)

    # 2. Measure every draft with one number of tokens. Drafts that need no training come first, and
    # each verdict is printed as soon as it is known.
    choices: list[Choice] = []
    for made in make_groups(cfg, [*make_lookups(making), *finished], making):
        candidates = [verify_adaptively(one) for one in made] if cfg.pace == "adaptive" else made
        results = rounds.measure_first(candidates, first)
        for candidate in candidates:
            choices.append(predict(candidate, results, cfg.loads))
            print(verdict(choices[-1]), flush=True)

    # 3. Measure the best drafts with their best numbers of tokens, on different prompts.
    best = choose(choices, NUM_CONFIRMED)
    confirmed = rounds.confirm(
        [*best, *(c for c in choices if c.candidate.name == NGRAM and c not in best)], rest
    )

    # 4. the report
    served = choose_served(best)
    log = cfg.output / "logs" / f"vllm-{PLAIN}.log"
    last = {name: by_load(results, name, cfg.loads) for name, results in confirmed.items()}
    report = BenchReport(
        version=VERSION,
        target=cfg.target or read_origin(target.folder),
        command=shlex.join(sys.argv),
        baseline=describe_baseline(
            plain_runs(rounds.groups), mode, modes, log=log, target=target.folder
        ),
        plain=by_load(next(iter(confirmed.values())), PLAIN, cfg.loads),
        drafts=[
            describe_draft(choice, last.get(choice.candidate.name), serve_flags(choice))
            for choice in choices
        ],
        served=served,
        lossless=prove_lossless(target.name, confirmed[served], served, cfg)
        if served and sampling.temperature == 0 and not penalties and can_judge(target)
        else None,
        settings=describe_settings(
            cfg,
            sampling,
            penalties,
            next(iter(confirmed.values()))[PLAIN, cfg.loads[0]][0].dtype,
            len(rest),
        ),
        environment=environment(),
        duration_s=round(time.perf_counter() - started, 1),
    )
    page = write_bench(cfg.output, report)
    drop_previous(cfg.output / PREVIOUS)
    print(*compose_answer(report), f"report: {page}", sep="\n")


def describe_settings(
    cfg: BenchConfig,
    sampling: Sampling,
    penalties: Mapping[str, float],
    dtype: str,
    num_prompts: int,
) -> Settings:
    """Return the report's settings.

    `dtype` is the dtype in which the servers computed, and `num_prompts` the number of different
    prompts in the last rounds.
    """
    return Settings(
        loads=cfg.loads,
        rounds=cfg.rounds,
        num_prompts=num_prompts,
        max_tokens=cfg.max_tokens,
        sampling=sampling,
        penalties=penalties,
        draft_sample_method=cfg.draft_sample_method,
        minutes=cfg.minutes if cfg.train else None,
        dtype=dtype,
    )


def read_finished(
    cfg: BenchConfig, target: TargetFolder, sampling: Sampling, *, has_penalties: bool
) -> list[Candidate]:
    """The drafts given by --draft, with the acceptance from --acceptance.

    Raises:
        ValueError: this acceptance was measured without the target's penalties, or with a different
            target, or the target has no MTP layer for the draft `mtp`.
    """
    for draft in name_drafts(cfg.draft, cfg.train).values():
        draft.require_layer(target.folder)
    finished = list(finished_drafts(cfg))
    if cfg.acceptance is None:
        return finished
    if has_penalties:
        raise ValueError(
            f"{cfg.acceptance} was measured without the penalties in {target.name}'s "
            "generation_config.json: remove --acceptance, "
            "or benchmark requests without penalties with --temperature"
        )
    require_target(cfg.acceptance, target.fingerprint)
    finished = give_acceptance(finished, cfg.acceptance, sampling)
    return [drop_curve(candidate, cfg, target.name) for candidate in finished]


def require_pace(cfg: BenchConfig, target: str) -> None:
    """Raise ValueError unless there is a model to verify adaptively, and all of them can be."""
    if cfg.pace != "adaptive":
        return
    flags = read_flags(cfg.vllm_args)
    configs = {f"--draft {source}": DraftSource.parse(source).speculative() for source in cfg.draft}
    configs |= {
        f"--train {name}": find_family(trained_family(name)).speculative
        for name in cfg.train
        if parse_trained(name).lookup is None
    }
    models = {
        name: config
        for name, config in configs.items()
        if not Candidate(name, name, config, cfg.num_speculative_tokens).chooses_length
    }
    obstacles = {
        name: adaptive.find_obstacle(flags, target, config)
        for name, config in (models or {"": {"method": NGRAM}}).items()
    }
    name, obstacle = next((item for item in obstacles.items() if item[1]), ("", ""))
    if obstacle:
        which = f" (for {name})" if "" in obstacles.values() else ""
        raise ValueError(f"--pace adaptive {obstacle}{which}, or use --pace off")


def drop_curve(candidate: Candidate, cfg: BenchConfig, target: str) -> Candidate:
    """Return the draft, without advice on adaptive verification if these servers lack it."""
    obstacle = adaptive.find_obstacle(read_flags(cfg.vllm_args), target, candidate.config)
    return replace(candidate, curve=()) if obstacle else candidate


def verify_adaptively(candidate: Candidate) -> Candidate:
    """Return the same draft, with adaptive verification unless it has a lookup."""
    if candidate.chooses_length:
        return candidate
    config = {**candidate.config, adaptive.KEY: True}
    # The training run forecast the verification of all tokens.
    return replace(candidate, config=config, tau_forecast=None, given=None, curve=())


def require_answers(cfg: BenchConfig) -> None:
    """Refuse to train drafts without the target's answers.

    Raises:
        ValueError: there are no answers; the message has the command that writes them.
    """
    if cfg.train and known_answers(cfg) is None:
        raise ValueError(
            f"redraft includes no answers of {cfg.target}: run `redraft regenerate "
            f"--target {cfg.target} "
            "--prompts stdlib-functions --output answers.jsonl`, then give --data answers.jsonl"
        )


def asked_sampling(cfg: BenchConfig) -> dict[str, Any]:
    return {name: getattr(cfg, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def names_sampling(cfg: BenchConfig) -> bool:
    return any(value is not None for value in asked_sampling(cfg).values())


def prepare(cfg: BenchConfig, target: TargetFolder, questions: Sequence[Conversation]) -> Making:
    """Return the settings for making drafts, and write a file of the first rounds' conversations.

    The training runs make their forecasts on the conversations in this file.
    """
    prompts = cfg.output / "prompts.jsonl"
    text = "".join(f"{json.dumps(conversation)}\n" for conversation in questions[::FIRST_PROMPTS])
    # Otherwise, finished drafts would look outdated.
    if not prompts.is_file() or prompts.read_text() != text:
        write_whole(prompts, text)
    return Making(cfg=cfg, target=target, answers=known_answers(cfg), prompts=prompts)


def make_groups(
    cfg: BenchConfig, ready: Sequence[Candidate], making: Making
) -> Iterator[list[Candidate]]:
    """Yield groups of drafts that share rounds.

    The finished drafts come first, then those of --train, which are trained just before their
    group.
    """
    # One server of each group is the target alone.
    size = group_size(cfg)
    for start in range(0, len(ready), size):
        yield list(ready[start : start + size])
    with Progress(total=len(cfg.train), desc="train drafts", unit="draft") as bar:
        for start in range(0, len(cfg.train), size):
            group: list[Candidate] = []
            for candidate in make_trained(making, cfg.train[start : start + size]):
                group.append(candidate)
                bar.update()
            yield group


def load_questions(cfg: BenchConfig) -> list[Conversation]:
    """Return the conversations whose last questions are the prompts.

    Raises:
        ValueError: there are too few conversations.
    """
    conversations: list[Conversation] = (
        [
            {"messages": [{"role": "user", "content": question(problem)}], "domain": "code"}
            for problem in read_problems(PARTS)
        ]
        if cfg.prompts is None
        else load_conversations(cfg.prompts)
    )
    if len(conversations) < FIRST_PROMPTS:
        raise ValueError(
            f"{cfg.prompts} has {len(conversations)} conversations: give at least {FIRST_PROMPTS}"
        )
    return conversations


def render_prompts(
    cfg: BenchConfig, target: TargetFolder, questions: Sequence[Conversation]
) -> tuple[list[Prompt], list[Prompt]]:
    """Return (prompts for the first rounds, prompts for the last rounds).

    Raises:
        ValueError: no prompt is left.
    """
    render = functools.partial(
        held_out_prompts,
        tokenizer=target.tokenizer,
        max_length=cfg.max_prompt_tokens,
        day=choose_day(None),
    )
    first = render(questions[::FIRST_PROMPTS], num_prompts=cfg.first_rounds * cfg.most_prompts)
    rest = [c for number, c in enumerate(questions) if number % FIRST_PROMPTS]
    # Use different prompts than in the first rounds, because choosing and confirming on the same
    # prompts would favour luck.
    return first, render(rest, num_prompts=cfg.rounds * cfg.most_prompts, beside=first)


class Rounds:
    """Runs a benchmark's rounds: groups of servers in one mode, each with the target alone."""

    def __init__(self, cfg: BenchConfig, target: TargetFolder, sampling: Sampling | None) -> None:
        """`sampling` holds the requests' sampling parameters. None means that they set none."""
        self.cfg, self.target, self.sampling = cfg, target, sampling
        self.options: dict[str, Any] = {
            "vllm_defaults": True,
            "dtype": target.dtype,
            "extra_args": cfg.vllm_args,
        }
        self.groups: list[Results] = []  # The results of every group, without repeats.

    def choose_mode(self, prompts: Sequence[Prompt]) -> tuple[Mode, dict[Mode, float]]:
        """Choose the mode for all servers. Returns the mode, and tokens/s by mode."""
        load = self.cfg.loads[0]
        plan = self._plan(1, [load])

        def speed(server: VllmServer) -> float:
            return run_rounds({PLAIN: server}, prompts, plan)[PLAIN, load][0].tokens_per_s

        mode, speeds = choose_mode(
            self.target.name, speed, MODE_ROUNDS, self.cfg.output / "logs", self.cfg.output / ROUNDS,
            [self.target.fingerprint, prompts, plan], **self.options,
        )  # fmt: skip
        self.options = {**self.options, "mode": mode}
        return mode, speeds

    def measure_first(self, candidates: Sequence[Candidate], prompts: Sequence[Prompt]) -> Results:
        """Measure a group of drafts with the maximum number of draft tokens, and the target alone.

        The target alone is also measured with as many requests at once as the drafts verify rows.
        """
        drafts = {candidate.name: candidate.speculative_config for candidate in candidates}
        # 1 request with 3 draft tokens verifies 4 rows, and 8 requests verify 32, so time 4 and 32
        # requests alone.
        rows = {4 * load for load in self.cfg.loads if 4 * load <= MOST_ROWS} - {*self.cfg.loads}
        alone = self._plan(2, sorted(rows), max_tokens=32) if rows else None
        plan = self._plan(self.cfg.first_rounds, self.cfg.loads)
        return self._measure(drafts, prompts, plan, "logs", alone)

    def confirm(self, best: Sequence[Choice], prompts: Sequence[Prompt]) -> dict[str, Results]:
        """Measure the best drafts with the advised numbers of draft tokens, by draft.

        The target alone is measured in the same rounds.
        """
        size, plan = group_size(self.cfg), self._plan(self.cfg.rounds, self.cfg.loads)
        results: dict[str, Results] = {}
        with Progress(total=len(best), desc="confirm drafts", unit="draft") as bar:
            for start in range(0, len(best), size):
                group = best[start : start + size]
                drafts = {choice.candidate.name: choice.speculative_config for choice in group}
                # Use the target's rounds of this group, because a speed is a ratio within a round.
                results |= dict.fromkeys(
                    drafts, self._measure(drafts, prompts, plan, "logs-confirm")
                )
                bar.update(len(group))
        return results

    def _plan(self, rounds: int, loads: Sequence[int], max_tokens: int | None = None) -> Plan:
        return Plan(
            rounds=rounds,
            # Two prompts for each request in flight: the second begins when the first ends.
            prompts={load: 2 * load for load in loads},
            max_tokens=max_tokens or self.cfg.max_tokens,
            sampling=self.sampling,
        )

    def _measure(
        self,
        drafts: Mapping[str, Mapping[str, Any]],
        prompts: Sequence[Prompt],
        plan: Plan,
        logs: str,
        alone: Plan | None = None,
    ) -> Results:
        """Run the rounds of a group.

        The results are kept for later runs with the same files and settings. `alone` lists
        additional loads for the target alone.

        Raises:
            ChildProcessError: a server did not start. If a check of the draft's folder finds the
                cause, the message names the fix.
        """
        configs: dict[str, Mapping[str, Any] | None] = {PLAIN: None, **drafts}
        files = [
            fingerprint_path(config[key])
            for config in drafts.values()
            for key in FILES
            if key in config
        ]
        key = [self.target.fingerprint, configs, files, prompts, plan, alone, self.options]
        key += [self.cfg.together == 1, engine_environment()]
        measure = functools.partial(
            measure_servers, self.target.name, configs, prompts, plan, self.cfg.output / logs,
            alone=alone, is_together=self.cfg.together != 1, **self.options,
        )  # fmt: skip
        try:
            self.groups.append(keep_rounds(self.cfg.output / ROUNDS, key, measure))
        except ChildProcessError as error:
            cures = (
                first_cure(self.target.folder, config["model"], config["num_speculative_tokens"])
                for config in drafts.values()
                if "model" in config
            )
            raise ChildProcessError(f"{error}{next(filter(None, cures), '')}") from error
        return self.groups[-1]


def can_judge(target: TargetFolder, machine: Machine | None = None) -> bool:
    """Whether this process can load the target in float32, to tell ties from wrong outputs.

    If not, it prints the reason.
    """
    if method := target.quantization:
        reason = f"is quantised ({method})"
    elif target.in_dtype("float32").sizes.whole > (machine or this_machine()).host_bytes:
        reason = "in float32 does not fit into this machine's memory"
    else:
        return True
    print(f"outputs with and without the draft were not compared, because {target.name} {reason}")
    return False


def prove_lossless(target: str, results: Results, served: str, cfg: BenchConfig) -> LosslessReport:
    """Compare the target's outputs with the served draft to its outputs without a draft.

    Both are measured at the smallest load, because in 16 bits the target's own outputs depend on
    the number of concurrent requests.
    """
    smallest, largest = cfg.loads[0], cfg.loads[-1]
    ours, plain = (merge(results[name, smallest]) for name in (served, PLAIN))
    logits = make_logits(target)
    # The largest difference between the target's own outputs at two batch sizes shows this dtype's
    # rounding here. A round's larger load contains the prompts of its smaller load.
    alone = compare_lossless(select_prompts(merge(results[PLAIN, largest]), plain), plain, logits)
    found = compare_lossless(ours, plain, logits, known_rounding=alone.widest_gap)
    return describe_lossless(found, alone)


def serve_flags(choice: Choice) -> str:
    """Return the variables and the `vllm serve` flag for this draft's best number of tokens."""
    config = choice.speculative_config
    variables = lookup_env(config)
    # redraft's lookup hook, because vLLM's own n-gram lookup differs on its V2 runner.
    if variables:
        variables["VLLM_PLUGINS"] = PLUGIN_NAME
    shown = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    return f"{shown}--speculative-config {shlex.quote(json.dumps(vllm_keys(config)))}"


def known_answers(cfg: BenchConfig) -> str | None:
    return cfg.data or (str(ANSWERS) if cfg.target is None else None)


def group_size(cfg: BenchConfig) -> int:
    """Return the number of drafts that share rounds. One server of a group is the target alone."""
    return max(2, cfg.together or (5 if ENGINE_IS_CPU else 2)) - 1
