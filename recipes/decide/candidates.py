"""The drafts to choose from.

They are lookups that need no training, finished drafts, and drafts that are trained here.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from redraft.engine.hardware import this_machine
from redraft.engine.process import exiting_on_sigterm
from redraft.engine.sampling import Sampling, choose_sampling
from redraft.engine.server import forget_requests, require_servable
from redraft.eval.forecast.draft_source import NGRAM, DraftSource, Lookups
from redraft.eval.serving.acceptance_source import Acceptance, list_drafts, read_acceptance
from redraft.eval.serving.prediction import Candidate
from redraft.eval.serving.rounds import PLAIN
from redraft.files.artifact import write_whole
from redraft.files.folder import count_parameters
from redraft.files.kept import fingerprint_path
from redraft.files.target_folder import TargetFolder
from redraft.recipes.decide.bench_config import (
    HEAD,
    LAYERS,
    LOOKUP_TOKENS,
    RETRIEVAL,
    BenchConfig,
    parse_trained,
)

OWN_FLAGS: dict[str, Callable[[int], list[str]]] = {
    "eagle3": lambda tokens: ["--head.num-steps", str(tokens)],
    "medusa": lambda tokens: ["--head.num-heads", str(tokens), "--optim.lr", "1e-3"],
    # The default, 512 blocks of 16, is meant for GPUs. On a CPU, a step would take half a minute.
    "dflash": lambda tokens: ["--head.block-size", str(tokens + 1), "--head.num-anchors", "64"],
}
"""Recipe flags that depend on the number of draft tokens, or that suit a short training run.
"""

FROM_LAYERS = ("--optim.name", "muon", "--optim.lr", "2e-3")
"""Optimizer for a draft made of the target's layers. The default is meant for a trained
checkpoint.
"""

LOOKUP_TITLES = {NGRAM: "n-grams", RETRIEVAL: "counted answers"}

HEAD_REQUESTS = 4
"""A head after counted answers drafts in steps with at most this many requests. In larger steps,
verifying one of its tokens costs more than it gains.
"""


@dataclass(frozen=True, kw_only=True)
class Making:
    cfg: BenchConfig
    target: TargetFolder
    answers: str | None
    """The target's answers. None if no draft is trained or counted."""
    prompts: Path
    """Conversations of the first rounds. Training runs use them for their forecasts."""
    made: set[Path] = field(default_factory=set)
    """Folders created by this process, so that each draft is trained only once."""


def make_lookups(making: Making) -> Iterator[Candidate]:
    """Yield the drafts that need no training: n-grams, and counted answers if there are answers."""
    yield Candidate(NGRAM, "n-grams", DraftSource(source=NGRAM).speculative(), LOOKUP_TOKENS[NGRAM])
    if making.answers:
        # A folder with a config.json is complete, because `redraft data count` publishes with one
        # rename.
        counted = making.cfg.output / RETRIEVAL
        module = ("-m", "redraft.recipes.cli", "data", "count")
        command = [
            *module,
            "--target",
            making.target.name,
            "--data",
            making.answers,
            "--output",
            str(counted),
        ]
        run_once(counted, counted / "config.json", command, making)
        config = DraftSource(source=str(counted)).speculative()
        yield Candidate(RETRIEVAL, LOOKUP_TITLES[RETRIEVAL], config, LOOKUP_TOKENS[RETRIEVAL])


def make_trained(making: Making, names: Sequence[str]) -> Iterator[Candidate]:
    """Yield the drafts of --train. Each is trained when the iterator reaches it, and kept.

    A head that is listed with and without a lookup is trained only once.
    """
    sampling = choose_sampling(making.target.folder, temperature=making.cfg.temperature)
    for name in names:
        draft = parse_trained(name)
        run = making.cfg.output / draft.source
        # The report is written last, so it marks a finished training run.
        run_once(run, run / "report.json", training_command(making, draft.source), making)
        lookup = str(making.cfg.output / RETRIEVAL) if draft.lookup == RETRIEVAL else draft.lookup
        served = replace(draft, source=str(run / "draft"), lookup=lookup)
        most = LOOKUP_TOKENS[draft.lookup] if draft.lookup else making.cfg.num_speculative_tokens
        config = served.speculative(
            making.cfg.draft_sample_method, Lookups(head_requests=HEAD_REQUESTS)
        )
        offline = json.loads((run / "report.json").read_text())["offline"]
        size = count_parameters(run / "draft")
        # A training run forecasts greedy requests, with the head alone.
        is_forecast = draft.lookup is None and sampling.temperature == 0
        tau = offline["tau_forecast"] if is_forecast else None
        yield Candidate(name, title(name), config, most, size, tau)


def finished_drafts(cfg: BenchConfig) -> Iterator[Candidate]:
    """Yield the drafts of --draft, except n-grams, which every benchmark includes anyway.

    Raises:
        ValueError, FileNotFoundError: a draft cannot be served.
    """
    for name, draft in name_drafts(cfg.draft, cfg.train).items():
        folder = draft.folder
        # vLLM also serves pytorch_model.bin, whose parameters are not counted.
        has_count = folder is not None and any(folder.glob("*.safetensors"))
        size = count_parameters(folder) if folder and has_count else None
        config = forget_requests(draft.speculative(cfg.draft_sample_method))
        candidate = Candidate(name, name, config, cfg.num_speculative_tokens, size)
        require_servable(candidate.speculative_config)
        yield candidate


def name_drafts(sources: Sequence[str], trained: Sequence[str]) -> dict[str, DraftSource]:
    """Return the drafts of --draft by name, or by the full source if two have the same name.

    Raises:
        ValueError: a source is given twice, or has the name of a draft that the benchmark makes.
    """
    made = [PLAIN, NGRAM, RETRIEVAL, *trained]
    for source in sources:
        if sources.count(source) > 1:
            raise ValueError(f"--draft {source} is given twice")
        if source in made and source != NGRAM:
            raise ValueError(
                f"--draft {source} is the name of one of the benchmark's own drafts: write ./{source} "
                "for a folder"
            )
    drafts = [DraftSource.parse(source) for source in sources if source != NGRAM]
    names = [*made, *(draft.name for draft in drafts)]
    return {draft.name if names.count(draft.name) == 1 else str(draft): draft for draft in drafts}


def give_acceptance(
    candidates: Sequence[Candidate], report: Path, served: Sampling
) -> list[Candidate]:
    """Return the candidates with the acceptance from a report.

    A candidate gets the acceptance of the report's draft of the same name. If the report has only
    one draft and only one candidate can use an acceptance, the names may differ.

    Raises:
        ValueError: no candidate is in the report, or the report is about different requests or
            drafts.
    """
    names = list_drafts(report)
    taking = [candidate.name for candidate in candidates if candidate.has_one_acceptance]
    of_report = {name: name for name in taking if name in names}
    if not of_report and len(names) == len(taking) == 1:
        of_report = {taking[0]: names[0]}
    if not of_report:
        raise ValueError(
            f"{report} is about {', '.join(names)}, but no --draft with a single acceptance for all "
            f"loads has such a name: name the draft with --draft {names[0]}=FOLDER"
        )
    return [
        _give(candidate, read_acceptance(report, of_report[candidate.name], served), report)
        if candidate.name in of_report
        else candidate
        for candidate in candidates
    ]


def _give(candidate: Candidate, found: Acceptance, report: Path) -> Candidate:
    method = "probabilistic" if found.is_sampled else "greedy"
    if candidate.config.get("draft_sample_method", "greedy") != method:
        raise ValueError(
            f"{report} was measured with {method} draft tokens of {found.draft}: set "
            f"--draft-sample-method {method}"
        )
    # An acceptance curve measured with a different number of tokens per step does not apply.
    most = candidate.num_speculative_tokens
    is_alike = len(found.per_position) == most
    return replace(
        candidate,
        given=found.per_position[:most],
        curve=found.curve if is_alike else candidate.curve,
    )


def training_command(making: Making, name: str) -> list[str]:
    """Return the command that trains a draft: the recipe and its flags.

    All drafts are trained on the same answers for the same time. The least-squares start of an
    EAGLE-3 head is fitted before that time begins.

    Raises:
        ValueError: the target has too few layers.
    """
    assert making.answers is not None, "training without answers was rejected earlier"
    cfg, tokens = making.cfg, str(making.cfg.num_speculative_tokens)
    family, own = trained_family(name), list[str]()
    if found := LAYERS.fullmatch(name):
        own = ["--draft.layers", *map(str, spread(int(found[1]), making.target)), *FROM_LAYERS]
    elif found := HEAD.fullmatch(name):
        own = ["--draft-vocab-size", str(1024 * int(found[2]))]
    if family in OWN_FLAGS:
        own += OWN_FLAGS[family](cfg.num_speculative_tokens)
    command = [
        *("-m", "redraft.recipes.train", family, "--target", making.target.name),
        *("--output", str(cfg.output / name), *own),
        *("--mixed-precision", "bf16" if this_machine().has_bfloat16 else "no"),
        *("--data.source", making.answers, "--data.held-out", "0.02"),
        # The forecast uses the prompts of the first rounds.
        *("--data.prompts", str(making.prompts)),
        *("--data.num-prompts", str(cfg.first_rounds * cfg.most_prompts)),
        *(
            "--data.max-prompt-tokens",
            str(cfg.max_prompt_tokens),
            "--prove.max-tokens",
            str(cfg.max_tokens),
        ),
        # A higher momentum averages over too many steps for a training run of a few minutes.
        *("--optim.momentum", "0.8"),
        *(
            "--loop.minutes",
            str(cfg.minutes),
            "--loop.batch-size",
            "4",
            "--loop.sequence-length",
            "512",
        ),
        # Skip evaluations and the engine, so that the time is spent on steps. The rounds measure
        # later.
        *("--loop.eval-every", "0", "--loop.save-every", "50", "--prove.no-engine"),
        # The target answers the held-out prompts once, for all training runs.
        *(
            "--prove.num-speculative-tokens",
            tokens,
            "--prove.reference",
            str(cfg.output / "target"),
        ),
    ]
    return with_flags(command, cfg.flags)


def trained_family(name: str) -> str:
    """Return the family of a draft of --train."""
    source = parse_trained(name).source
    if LAYERS.fullmatch(source):
        return "standalone"
    found = HEAD.fullmatch(source)
    return found[1] if found else source


def with_flags(command: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Append `flags` to `command`. They replace flags with the same names."""
    names = {word.partition("=")[0] for word in flags if word.startswith("--")}
    kept, is_replaced = list[str](), False
    for word in command:
        if word.startswith("--"):
            is_replaced = word.partition("=")[0] in names
        if not is_replaced:
            kept.append(word)
    return [*kept, *flags]


def spread(count: int, target: TargetFolder) -> list[int]:
    """Choose `count` evenly spaced layers, including the first and the last.

    Raises:
        ValueError: `count` is not between 1 and the target's number of layers minus 1.
    """
    layers = int(target.text_config.num_hidden_layers)
    if not 1 <= count < layers:
        raise ValueError(
            f"--train layers-{count}: {target.name} has {layers} layers: choose 1 to {layers - 1}"
        )
    # E.g. 4 of 30 layers are 0, 10, 19 and 29. A single layer is the first one.
    return [round(i * (layers - 1) / max(1, count - 1)) for i in range(count)]


def title(name: str) -> str:
    draft = parse_trained(name)
    if draft.lookup:
        limit = "" if draft.head_tokens is None else f", which drafts up to {draft.head_tokens}"
        return f"{LOOKUP_TITLES[draft.lookup]} before {title(draft.source)}{limit}"
    if found := LAYERS.fullmatch(name):
        return f"{found[1]} of the target's layers"
    if found := HEAD.fullmatch(name):
        family = {"eagle3": "EAGLE-3", "dflash": "DFlash", "peagle": "P-EAGLE"}[found[1]]
        return f"{family}, {found[2]}k ids"
    return "Medusa"


def run_once(folder: Path, result: Path, command: list[str], making: Making) -> None:
    """Run a recipe in a separate process, unless its result exists. Continue an interrupted run.

    Raises:
        ValueError: the recipe failed after printing the reason, or the result was made with
            different flags or from different target or data files.
    """
    if folder in making.made:
        return
    making.made.add(folder)
    kept = making.cfg.output / f"{folder.name}.command.json"
    data = [
        fingerprint_path(name)
        for name in (making.answers or "", str(making.prompts))
        if name in command
    ]
    made = {"command": command, "target": making.target.fingerprint, "data": data}
    is_same = kept.is_file() and json.loads(kept.read_text()) == made
    if result.is_file() and not making.cfg.overwrite:
        if not is_same:
            raise ValueError(
                f"{folder} was made with different flags, or its data or {making.target.name} "
                f"has changed since: pass --overwrite, or choose a different --output"
            )
        print(f"{folder} is already finished")
        return
    if folder.exists() and (making.cfg.overwrite or not is_same):
        # Use the recipe's own flag, which keeps the old result until the new one is complete.
        command = [*command, "--overwrite"]
    # Written before the run, so that an interrupted run is recognised by its flags.
    write_whole(kept, json.dumps(made))
    print(f"\nmaking {folder.name}", flush=True)
    with exiting_on_sigterm():  # exit on SIGTERM, so that the training stops with this process
        done = subprocess.run([sys.executable, *command])
    if done.returncode:
        raise ValueError(f"making {folder.name} failed; its error is printed above")
