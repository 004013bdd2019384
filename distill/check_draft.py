"""Does serving see what training saw? A draft's folder, the labels it learned from, and the real engine.

static      configs, headers, small tensors, provenance            heads.check_static
labels      the loss mask that training recorded                   distill.label_probe
numeric     vLLM's drafter beside the draft's own training steps   eval.serving_parity
acceptance  what vLLM accepts beside what training measured        eval.serving_parity
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from distill.data import load_conversations, split_held_out
from distill.label_probe import compare_probes, label_probe
from distill.samples import held_out_prompts
from distill.setup import Data
from distill.signals import InProcessTarget
from eval.engine import engine_is_cpu
from eval.serving_parity import acceptance_finding, compare
from eval.serving_run import Dump, EngineRun, run_engine
from heads.check import Pair
from heads.check_families import METHODS
from heads.check_static import notes, static_findings
from heads.checkpoint import load_causal_lm, load_tokenizer, model_folder
from heads.families import family
from heads.finding import Finding
from heads.standalone import StandaloneDraft
from heads.target import Target

DEFAULT_NUM_TOKENS = 3

FALLBACK = (
    "The capital of France is",
    "def factorial(n):\n    ",
    "Once upon a time there was",
    "To sort a list of numbers, first",
)
"""Prompts where nothing is known of the data: enough to compare numbers, too few to judge acceptance."""

COMPARED_PROMPTS = 4
"""Prompts whose passes are compared; the others only count."""


@dataclass(frozen=True, kw_only=True)
class EngineCheck:
    """How the draft is run in the real engine."""

    folder: Path
    """Receives the engine's log and what was dumped."""
    dtype: str | None = None
    prompts: str | None = None
    num_prompts: int = 16
    max_tokens: int = 64


@dataclass(kw_only=True)
class Checked:
    """What was found out."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked."""
    facts: dict[str, str] = field(default_factory=dict)


def check_draft(
    target: str, draft: str, *, method: str | None, num_speculative_tokens: int | None, engine: EngineCheck | None
) -> Checked:
    """Everything that can be found wrong with a draft; without `engine`, what its folder alone gives away.

    Raises: FileNotFoundError, ValueError where a folder is missing or holds no draft.
    """
    pair = Pair.read(model_folder(target), model_folder(draft))
    recorded = _recorded(pair, "prove").get("num_speculative_tokens")
    num_tokens = num_speculative_tokens or recorded or min(DEFAULT_NUM_TOKENS, pair.config.get("num_heads") or 99)
    checked = Checked(
        findings=static_findings(pair, method=method, num_speculative_tokens=num_tokens), notes=list(notes(pair))
    )
    checked.facts |= {"target": str(pair.target), "draft": f"{pair.draft}: {pair.family}, {num_tokens} tokens a step"}
    _check_labels(pair, checked)
    if engine is None or pair.family not in METHODS:
        return checked
    if checked.findings:
        checked.notes.append("the draft was not run in the engine: mend what is named below first")
        return checked
    _check_in_engine(pair, num_tokens, engine, checked)
    return checked


def _recorded(pair: Pair, section: str) -> dict[str, Any]:
    """A section of the config that the draft was trained with; empty where it is not known."""
    return dict((pair.provenance or {}).get("config", {}).get(section) or {})


def _check_labels(pair: Pair, checked: Checked) -> None:
    trained = (pair.provenance or {}).get("label_probe")
    if trained is None:
        checked.notes.append("no label_probe in its provenance: template and loss mask of training are not known")
        return
    served = label_probe(load_tokenizer(pair.target))
    if served is not None:
        checked.findings += compare_probes(trained, served)


def _check_in_engine(pair: Pair, num_tokens: int, engine: EngineCheck, checked: Checked) -> None:
    dtype = engine.dtype or ("float32" if engine_is_cpu() else "bfloat16")
    prompts, are_held_out = _prompts(pair, num_tokens, engine, checked)
    speculative = {"method": METHODS[pair.family], "num_speculative_tokens": num_tokens}
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
        checked.findings.append(Finding(str(error), "mend what the engine names, or look into its log"))
        return
    draft, signal = _as_trained(pair, num_tokens, dtype)
    checked.findings += compare(draft, pair.family, signal, dump, device=_device())
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
    elif (finding := acceptance_finding(counts, measured[-1])) is not None:
        checked.findings.append(finding)


def _prompts(pair: Pair, num_tokens: int, engine: EngineCheck, checked: Checked) -> tuple[list[list[int]], bool]:
    """Token ids of the prompts to answer, and whether they are of the data that the draft was trained on."""
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
        conversations, tokenizer, num_prompts=engine.num_prompts, max_length=min(room, data.max_prompt_tokens)
    )
    return [prompt.token_ids for prompt in prompts], True


def _as_trained(pair: Pair, num_tokens: int, dtype: str) -> tuple[Any, InProcessTarget | None]:
    """The draft as the module that trains, and the target's signal."""
    torch_dtype, device = getattr(torch, dtype), _device()
    if pair.family == "standalone":
        return StandaloneDraft.load(pair.draft, torch_dtype).to(device).eval(), None
    model = load_causal_lm(pair.target, torch_dtype).to(device)
    head = family(pair.family).head.load(pair.draft, Target.of(model)).to(device, torch_dtype).eval()
    if hasattr(head.config, "num_steps"):
        head.config = replace(head.config, num_steps=num_tokens)
    return head, InProcessTarget(model, head.aux_layer_ids)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
