"""Check a draft against a target before serving, or check this environment if no draft is given.

$ redraft doctor                                                 # versions, devices, engine, disk
$ redraft doctor --json                                          # the same, for a bug report
$ redraft doctor --target TARGET --draft DRAFT                   # also in a real vLLM
$ redraft doctor --target TARGET --draft DRAFT --engine none     # seconds: files only
$ redraft doctor --target TARGET --draft DRAFT --engine sglang   # by the rules of SGLang's loaders
$ redraft doctor --target TARGET --draft DRAFT --url http://HOST:8000   # a running server
$ redraft doctor DRAFT                                           # its type, requirements, engines

With --url, a running vLLM, SGLang or llama.cpp server answers 16 prompts, and the doctor compares its
acceptance with the forecast on this text.

The doctor prints how to fix each problem, and each doubt: something unusual that may be intended.
The exit status is 0 if there are no problems, 1 if there are any, and 2 if a file or server cannot
be read.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from redraft.engine.machine import diagnose, gather, list_facts
from redraft.engine.target_dtype import TargetDtype
from redraft.files.folder import fetch_model, read_config
from redraft.heads.catalog import Method
from redraft.heads.doctor.described import describe_draft, describe_lookup
from redraft.heads.doctor.pair import Finding
from redraft.heads.engines.table import EngineName
from redraft.recipes.cli.run import Recipe

if TYPE_CHECKING:  # not at run time, because it imports torch, which may not be installed
    from redraft.distill.doctor.check_draft import Checked
    from redraft.eval.forecast.draft_source import DraftSource

A_LOOKUP = "no model computes this draft, so there is nothing to compare with a target"


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    target: str | None = None
    """Folder or hub name of the served model. If it contains an MTP layer, it is also the draft."""
    draft: str | None = None
    """Folder or hub name of the draft to check, or `mtp` for the target's MTP layer. For
    `ngram+HEAD`, only the head is checked.
    """
    url: str | None = None
    """Address of a running server with this draft. No engine is started on this machine."""
    method: Method | None = None
    """vLLM's method for the draft. Default: the method of its family."""
    num_speculative_tokens: int | None = None
    """Number of draft tokens per step. Default: the number used in the training's evaluation,
    otherwise 3.
    """
    engine: EngineName | Literal["none"] = "vllm"
    """Engine that will serve the draft. vllm: run the draft in it; without a draft, only import
    vLLM. Other engines: check the folder by the rules of their loaders, without running them. none:
    read only configs, tensors and provenance.
    """
    target_dtype: TargetDtype | None = None
    """Dtype for the target's computation. Default: the dtype of the forecast published with the
    draft, if this machine supports it. Without a forecast: bfloat16 on a GPU; on a CPU, bfloat16 if
    the target is stored in bfloat16 and the CPU has bfloat16 instructions, otherwise float32.
    """
    prompts: str | None = None
    """Data with prompts for the engine, in the formats of --data.source. Default: the prompts held
    out in training.
    """
    num_prompts: int = 16
    """Number of prompts for the engine."""
    max_tokens: int | None = None
    """Maximum number of tokens per answer. Default: the value used in the forecast that was
    published with the draft, or 64 without a forecast.
    """
    json: bool = False
    """Print one JSON object for a bug report: machine, versions, engine, and the checks of the
    target and draft.
    """
    output: Path = Path("outputs")
    """Folder for runs. Its disk is checked, and the engine's log is written to it."""


def main(cfg: DoctorConfig) -> None:
    if cfg.engine not in ("vllm", "none") and cfg.target is None and cfg.url is None:
        raise ValueError(f"--engine {cfg.engine} needs the draft's target: set --target")
    has_pair = any(each is not None for each in (cfg.draft, cfg.target, cfg.url))
    machine: dict[str, str] = {}
    found: list[Finding] = []
    if cfg.json or not has_pair:
        # The check of a target and draft itself imports the engine.
        facts = gather(cfg.output, import_engine=cfg.engine == "vllm" and not has_pair)
        machine, found = list_facts(facts), diagnose(facts)
    pair: dict[str, str] = {}
    notes: list[str] = []
    if cfg.url is None and cfg.engine in ("vllm", "none") and is_lookup(cfg.draft):
        pair, alone = check_lookup(str(cfg.draft), cfg.target)
        notes, found = [A_LOOKUP], [*found, *alone]
    elif cfg.url is not None or cfg.target is not None:
        checked = check_pair(cfg) if cfg.url is None else check_running(cfg, cfg.url)
        pair, notes = checked.facts, checked.notes
        found = [*found, *checked.findings]
    elif cfg.draft is not None:
        pair, alone = check_alone(cfg.draft)
        notes, found = ["not compared with its target: set --target"], [*found, *alone]
    if cfg.json:
        named = [
            {"problem": one.problem, "cure": one.cure, "is_doubt": one.is_doubt} for one in found
        ]
        print(
            json.dumps(
                {"machine": machine, "pair": pair, "notes": notes, "findings": named}, indent=2
            )
        )
    else:
        for name, value in (*machine.items(), *pair.items(), *(("note", note) for note in notes)):
            print(f"{name:<14}{value}")
        print(format_findings(found))
    if any(not finding.is_doubt for finding in found):
        raise SystemExit(1)


def choose_recipe(args: Sequence[str], prog: str) -> tuple[Recipe, Sequence[str]]:
    """Return the recipe and its arguments. A first argument without dashes is the draft."""
    if args and not args[0].startswith("-"):
        args = ["--draft", *args]
    return Recipe(main=main, config_type=DoctorConfig, description=__doc__, prog=prog), args


def is_lookup(source: str | None) -> bool:
    """Whether this is a draft without a model: counted answers, live counts or n-grams.

    Raises:
        FileNotFoundError: the draft is neither a folder nor on the hub.
    """
    from redraft.eval.forecast.draft_source import DraftSource
    from redraft.heads.families.retrieval import is_retrieval

    draft = None if source is None else DraftSource.parse(source)
    if draft is None or draft.lookup is not None:  # of `ngram+HEAD`, the head is checked
        return False
    return draft.is_lookup if draft.is_without_folder else is_retrieval(fetch_model(draft.source))


def check_lookup(source: str, target: str | None) -> tuple[dict[str, str], list[Finding]]:
    """Return facts and findings about a draft without a model.

    Raises:
        FileNotFoundError: there is no such target.
    """
    from redraft.eval.forecast.draft_source import DraftSource
    from redraft.files.target_folder import TargetFolder

    draft = DraftSource.parse(source)
    if draft.is_without_folder:
        facts, found = describe_lookup(source, draft.family), list(_missing(draft))
    else:
        facts, found = describe_draft(fetch_model(draft.source))
    if target is not None:
        folder = TargetFolder.open(target).folder
        read_config(folder)  # raises if it is no model
        facts = {"target": str(folder), **facts}
    return facts, found


def _missing(draft: "DraftSource") -> Iterator[Finding]:
    try:
        draft.require_package()
    except ValueError as error:
        yield Finding.of(error)


def check_alone(source: str) -> tuple[dict[str, str], list[Finding]]:
    """Return facts and findings about the draft's folder, without a target.

    Raises:
        FileNotFoundError: the draft is neither a folder nor on the hub.
        ValueError: the draft is part of the target, or is a lookup with a head.
    """
    from redraft.eval.forecast.draft_source import DraftSource

    draft = DraftSource.parse(source)
    if draft.is_without_folder:
        raise ValueError(f"--draft {source} needs its target: set --target as well")
    return describe_draft(fetch_model(draft.source))


def check_pair(cfg: DoctorConfig) -> "Checked":
    """Check the draft against the target.

    Raises:
        FileNotFoundError: a folder is missing.
        ValueError: the folder contains no draft, or the target no MTP layer.
    """
    # These modules import torch, which may not be installed.
    from redraft.distill.doctor.check_draft import check_draft
    from redraft.distill.doctor.in_engine import EngineCheck
    from redraft.eval.forecast.draft_source import DraftSource

    assert cfg.target is not None
    draft = DraftSource.parse(cfg.draft or cfg.target)
    if draft.lookup is None and draft.is_without_folder and draft.is_lookup:
        raise ValueError(f"{draft} is a lookup without a model, so there is nothing to compare")
    draft.require_layer(cfg.target)
    engine = EngineCheck(
        dtype=cfg.target_dtype,
        prompts=cfg.prompts,
        num_prompts=cfg.num_prompts,
        max_tokens=cfg.max_tokens,
        folder=cfg.output / "doctor",
    )
    return check_draft(
        cfg.target,
        cfg.target if draft.is_without_folder else draft.source,
        method=cfg.method,
        num_speculative_tokens=cfg.num_speculative_tokens,
        engine=engine if cfg.engine == "vllm" else None,
        engine_name="vllm" if cfg.engine == "none" else cfg.engine,
    )


def check_running(cfg: DoctorConfig, url: str) -> "Checked":
    """Compare a running server's acceptance with the forecast.

    Raises:
        ConnectionError: nothing answers at the address.
        FileNotFoundError: a folder is missing.
        ValueError: the target or the draft is not named, or the server cannot be compared.
    """
    # These modules import torch, which may not be installed.
    from redraft.distill.doctor.beside_server import ServerCheck, check_server
    from redraft.distill.doctor.check_draft import Checked
    from redraft.distill.doctor.in_engine import EngineCheck
    from redraft.engine.running_server import find_server
    from redraft.files.target_folder import TargetFolder
    from redraft.heads.doctor.pair import Pair
    from redraft.heads.engines.table import find_engine
    from redraft.online.fleet.server import require_address

    if cfg.target is None or cfg.draft is None:
        raise ValueError("--url compares a draft with its server: set --target and --draft too")
    require_address(url)
    pair = Pair.read(TargetFolder.open(cfg.target), fetch_model(cfg.draft))
    server = find_server(url)
    engine = EngineCheck(
        dtype=cfg.target_dtype,
        prompts=cfg.prompts,
        num_prompts=cfg.num_prompts,
        max_tokens=cfg.max_tokens,
        folder=cfg.output / "doctor",
    )
    check = ServerCheck(
        server=server,
        known_version=find_engine(server.engine).version,
        num_speculative_tokens=cfg.num_speculative_tokens,
        engine=engine,
    )
    checked = Checked()
    for found in check_server(pair, check, checked.facts):
        if isinstance(found, Finding):
            checked.findings.append(found)
        else:
            checked.notes.append(found)
    return checked


def format_findings(findings: Sequence[Finding]) -> str:
    """Format the last lines of the output: the problems and doubts, each with a fix."""
    if not findings:
        return "\nEverything fits."
    lines = ["", "No problem was found."] if all(finding.is_doubt for finding in findings) else []
    for kind, is_doubt in (("problem", False), ("doubt", True)):
        if listed := [finding for finding in findings if finding.is_doubt == is_doubt]:
            lines.append(f"\n{len(listed)} {kind}{'s' if len(listed) > 1 else ''}:")
        for finding in listed:
            lines += [f"  {finding.problem}", f"    fix: {finding.cure}"]
    return "\n".join(lines)
