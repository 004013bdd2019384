"""Check that a draft gets the same inputs in serving as in training: folder, labels, and the real engine.

static      configs, headers, small tensors, provenance            heads.doctor.checks
labels      the loss mask recorded in training                     distill.doctor.label_probe
numeric     vLLM's drafter beside the draft's training steps       eval.parity.compare
acceptance  in vLLM, beside the one measured in training           eval.parity.compare
"""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from redraft.distill.data.conversations import load_conversations, split_held_out
from redraft.distill.data.samples import held_out_prompts
from redraft.distill.doctor.label_probe import compare_probes, label_probe
from redraft.distill.inputs import Data
from redraft.distill.signal.sources import InProcessTarget
from redraft.eval.engine.server import engine_is_cpu
from redraft.eval.parity.compare import compare, find_lost_acceptance
from redraft.eval.parity.run import Dump, EngineRun, run_engine
from redraft.heads.doctor.checks import notes, static_findings
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.draft import Draft
from redraft.heads.files.checkpoint import load_causal_lm, load_tokenizer
from redraft.heads.files.folder import model_folder
from redraft.heads.target import Target

DEFAULT_NUM_TOKENS = 3

FALLBACK = (
    "The capital of France is",
    "def factorial(n):\n    ",
    "Once upon a time there was",
    "To sort a list of numbers, first",
)
"""Prompts to use if nothing is known of the data: enough to compare numbers, too few to judge acceptance."""

COMPARED_PROMPTS = 4
"""Prompts whose passes are compared; the others only count towards acceptance."""


@dataclass(frozen=True, kw_only=True)
class EngineCheck:
    """The run of the draft in the real engine."""

    folder: Path
    """Folder for the engine's log and the dumps."""
    dtype: str | None = None
    prompts: str | None = None
    num_prompts: int = 16
    max_tokens: int = 64


@dataclass(kw_only=True)
class Checked:
    """The result of all checks."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Checks that were not possible, with the reason."""
    facts: dict[str, str] = field(default_factory=dict)


def check_draft(
    target: str, draft: str, *, method: str | None, num_speculative_tokens: int | None, engine: EngineCheck | None
) -> Checked:
    """All checks of a draft; without `engine`, only those of its folder.

    Args:
        target: Folder or hub name.
        draft: Folder or hub name.
        method: vLLM's method for serving it; None for the family's.
        num_speculative_tokens: Tokens to draft; None for the number in the provenance, or 3.
        engine: How to run it in the real engine.

    Raises:
        FileNotFoundError: a folder is missing.
        ValueError: a folder is corrupt or holds no draft.
    """
    pair = Pair.read(model_folder(target), model_folder(draft))
    recorded = _recorded(pair, "prove").get("num_speculative_tokens")
    most = pair.family.max_tokens(pair.config) or DEFAULT_NUM_TOKENS
    num_tokens = num_speculative_tokens or recorded or min(DEFAULT_NUM_TOKENS, most)
    checked = Checked(
        findings=static_findings(pair, method=method, num_speculative_tokens=num_tokens), notes=list(notes(pair))
    )
    checked.facts |= {
        "target": str(pair.target),
        "draft": f"{pair.draft}: {pair.family.name}, {num_tokens} tokens a step",
    }
    _check_labels(pair, checked)
    if engine is None or pair.family.method is None:
        return checked
    if "v1" not in pair.family.decoders or pair.family.parity is None:
        checked.notes.append(f"a {pair.family.title} drafter's passes in vLLM cannot be recorded: it was not run there")
        return checked
    if checked.findings:
        checked.notes.append("the draft was not run in the engine: fix the problems below first")
        return checked
    _check_in_engine(pair, num_tokens, engine, checked)
    return checked


def _recorded(pair: Pair, section: str) -> dict[str, Any]:
    """A section of the training config; empty if it is not known."""
    return dict((pair.provenance or {}).get("config", {}).get(section) or {})


def _day_of_training(pair: Pair) -> datetime.date | None:
    """The date that the template wrote in training, so a template with today's date is no difference on another day."""
    recorded = (pair.provenance or {}).get("date")
    return datetime.date.fromisoformat(recorded) if recorded else None


def _check_labels(pair: Pair, checked: Checked) -> None:
    trained = (pair.provenance or {}).get("label_probe")
    if trained is None:
        checked.notes.append("no label_probe in its provenance: template and loss mask of training are not known")
        return
    served = label_probe(load_tokenizer(pair.target), _day_of_training(pair))
    if served is not None:
        checked.findings += compare_probes(trained, served)


def _check_in_engine(pair: Pair, num_tokens: int, engine: EngineCheck, checked: Checked) -> None:
    dtype = engine.dtype or ("float32" if engine_is_cpu() else "bfloat16")
    prompts, are_held_out = _prompts(pair, num_tokens, engine, checked)
    speculative = {"method": pair.family.method, "num_speculative_tokens": num_tokens}
    if not pair.is_own_target:
        speculative["model"] = str(pair.draft.absolute())
    run = EngineRun(
        target=str(pair.target.absolute()),
        speculative_config=speculative,
        prompts=prompts,
        max_tokens=engine.max_tokens,
        dtype=dtype,
        recorded_prompts=COMPARED_PROMPTS,
        kv_cache_bytes=1 << 30,
    )
    try:
        (dump,) = run_engine([run], engine.folder)
    except ChildProcessError as error:
        checked.findings.append(Finding(str(error), "fix the problem that the engine names, or read its log"))
        return
    draft, signal = _load_as_trained(pair, dtype)
    checked.findings += compare(draft, pair.family.name, signal, dump, device=_device())
    checked.facts["compared"] = f"{len(dump.recorded())} blocks of {num_tokens} tokens, {dtype}"
    _check_acceptance(pair, dump, are_held_out, checked)


def _check_acceptance(pair: Pair, dump: Dump, are_held_out: bool, checked: Checked) -> None:
    counts = dump.counts()
    checked.facts["acceptance"] = f"tau {counts.tau:.2f} over {counts.num_drafts} drafts"
    measured = [
        entry["held_out_tau"] for entry in (pair.provenance or {}).get("metrics", ()) if "held_out_tau" in entry
    ]
    same_tokens = _recorded(pair, "prove").get("num_speculative_tokens") == dump.run.num_speculative_tokens
    if not (measured and are_held_out and same_tokens):
        checked.notes.append("acceptance was not judged: give a draft with provenance and the data it held out")
    elif (finding := find_lost_acceptance(counts, measured[-1])) is not None:
        checked.findings.append(finding)


def _prompts(pair: Pair, num_tokens: int, engine: EngineCheck, checked: Checked) -> tuple[list[list[int]], bool]:
    """Token ids of the prompts to answer, and whether they come from the data of the draft's training."""
    tokenizer = load_tokenizer(pair.target)
    recorded = _recorded(pair, "data")
    room = pair.target_config.max_position_embeddings - engine.max_tokens - num_tokens
    if engine.prompts is None and not recorded:
        return [tokenizer(text)["input_ids"] for text in FALLBACK], False
    data = replace(Data(), **{k: v for k, v in recorded.items() if k in asdict(Data())})
    if engine.prompts is not None:
        conversations = load_conversations(engine.prompts)
    else:
        try:
            _, conversations = split_held_out(load_conversations(data.source, split=data.split), data.held_out)
        except (ValueError, FileNotFoundError) as error:
            checked.notes.append(f"the data it was trained on is not here ({error}): give --prompts")
            return [tokenizer(text)["input_ids"] for text in FALLBACK], False
    prompts = held_out_prompts(
        conversations,
        tokenizer,
        num_prompts=engine.num_prompts,
        max_length=min(room, data.max_prompt_tokens),
        day=_day_of_training(pair),
    )
    return [prompt.token_ids for prompt in prompts], True


def _load_as_trained(pair: Pair, dtype: str) -> tuple[Draft, InProcessTarget | None]:
    """The draft as the module of training, and the target's signal; None if the draft reads nothing of the target."""
    torch_dtype, device = getattr(torch, dtype), _device()
    if not pair.family.is_head:
        whole = pair.family.load(pair.draft, lambda: Target.from_folder(pair.target), torch_dtype)
        return whole.to(device).eval(), None
    model = load_causal_lm(pair.target, torch_dtype).to(device)
    head = pair.family.load(pair.draft, lambda: Target.from_model(model), torch_dtype).to(device).eval()
    return head, InProcessTarget(model, head.aux_layer_ids)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
