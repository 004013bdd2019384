"""Check a draft in the real engine.

Its numbers are compared with training, and its acceptance with the forecast.

plan_run ──► EngineRun ──► Dump ──► judge_dump: passes, acceptance, other readings of the weights
"""

import datetime
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from redraft.distill.data.conversations import load_conversations, split_held_out
from redraft.distill.data.day import choose_day
from redraft.distill.data.rendering import Renderer
from redraft.distill.data.samples import held_out_prompts
from redraft.distill.doctor.readings import find_better_readings
from redraft.distill.plan.memory_check import require_target_room
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.counts import AcceptanceCounts, format_contexts
from redraft.engine.hardware import Machine, this_machine
from redraft.engine.head_size import head_size, require_model_heads
from redraft.engine.machine import ENGINE_IS_CPU
from redraft.engine.parity.run import Dump, EngineRun
from redraft.engine.target_dtype import TargetDtype, default_target_dtype
from redraft.eval.forecast.stored import StoredForecast
from redraft.eval.parity.acceptance import (
    MIN_DRAFTS,
    find_dead,
    find_lost_acceptance,
    find_missed_forecast,
    find_too_good,
)
from redraft.eval.parity.compare import compare
from redraft.files.checkpoint import load_causal_lm
from redraft.files.served_target import visible_length
from redraft.files.windows import served_views
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.draft import Draft
from redraft.heads.target import Target

DEFAULT_MAX_TOKENS = 64
# Length of a prompt with which a windowed head is compared, in addition to a prompt of three
# windows.
LONG_TOKENS = 12_000
# Number of tokens in a block of vLLM's cache on a CPU; on a GPU, a block has fewer.
CACHE_BLOCK = 128
# Minimum number of the published forecast's prompts that must be available here for a comparison
# with it.
COMPARED_PROMPTS = 4
# Minimum number of served prompts with a published forecast for a comparison with it.
MIN_PROMPTS = 4

FALLBACK = (
    "What is the capital of France?",
    "Write a function in Python that returns the factorial of a number.",
    "Tell a short story that begins with: once upon a time.",
    "How do I sort a list of numbers?",
    "Explain how a bicycle stays upright.",
    "List three uses of copper.",
    "Write a SQL query that counts the orders of each customer.",
    "What is the difference between a list and a tuple?",
    "Translate into German: the train arrives at noon.",
    "Summarize the plot of Romeo and Juliet.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write a regular expression that matches an email address.",
    "What is 17 times 23? Show the steps.",
    "Describe a rainy day in a big city.",
    "Write a class for a bank account with deposit and withdraw.",
)
"""Questions to ask if the draft's data is unknown. They are enough to detect a useless draft, but
not enough to measure a good one.
"""


@dataclass(frozen=True, kw_only=True)
class EngineCheck:
    folder: Path
    """Folder for the engine's log and tensor dumps."""
    dtype: TargetDtype | None = None
    """Dtype of the engine. If None, the dtype of the published forecast is used, provided that this
    machine supports it.
    """
    prompts: str | None = None
    num_prompts: int = 16
    max_tokens: int | None = None
    """Maximum answer length. Default: the length in the published forecast, if there is one;
    otherwise DEFAULT_MAX_TOKENS.
    """
    on_cpu: bool = ENGINE_IS_CPU


@dataclass(kw_only=True)
class Plan:
    run: EngineRun
    stored: StoredForecast | None
    are_held_out: bool
    """Whether the prompts come from the draft's training data or from --prompts."""
    num_long: int = 0
    """Number of prompts at the start that are longer than the head's windows. They are compared,
    but their acceptance does not count.
    """
    notes: list[str] = field(default_factory=list)

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The prompts used to evaluate acceptance."""
        return self.run.prompts[self.num_long :]


def plan_run(
    pair: Pair, num_tokens: int, engine: EngineCheck, machine: Machine | None = None
) -> Plan:
    """Plan the engine run for a draft with `num_tokens` tokens per step.

    Raises:
        ValueError: the target, which this process loads to evaluate the run, does not fit.
    """
    stored, machine = StoredForecast.from_json(pair.provenance.forecast), machine or this_machine()
    dtype = engine.dtype or choose_dtype(pair, stored, machine, on_cpu=engine.on_cpu)
    if pair.family.is_head and not pair.target.quantization:
        require_model_heads(
            f"the target {pair.target.name}",
            pair.target.text_config,
            getattr(torch, dtype),
            machine,
        )
        way_out = (
            "use --engine none, which reads only configs and tensors, and measure with redraft "
            "eval --no-forecast"
        )
        device = torch.device(machine.device)
        require_target_room(pair.target.in_dtype(dtype), device, way_out=way_out, machine=machine)
    max_tokens = engine.max_tokens or (stored.max_tokens if stored else DEFAULT_MAX_TOKENS)
    notes: list[str] = []
    prompts, are_held_out = find_prompts(pair, num_tokens, max_tokens, engine, notes)
    # The engine evicts cache blocks that lie before a window, and only a long prompt shows how.
    room = pair.target_config.max_position_embeddings - max_tokens - num_tokens
    long = _beyond_windows(pair, prompts, room, notes)
    speculative = {**pair.family.speculative, "num_speculative_tokens": num_tokens}
    if not pair.is_own_target:
        speculative["model"] = str(pair.draft.absolute())
    run = EngineRun(
        target=str(pair.target.folder.absolute()),
        speculative_config=speculative,
        prompts=[*long, *prompts],
        max_tokens=max_tokens,
        # The fallback questions are answered at full length, which gives more drafts to count.
        end_ids=pair.target.end_ids if are_held_out else (),
        dtype=dtype,
        recorded_prompts=len(long) + COMPARED_PROMPTS,
        kv_cache_bytes=max(1 << 30, _cache_bytes(pair, max(map(len, long), default=0))),
    )
    return Plan(run=run, stored=stored, are_held_out=are_held_out, num_long=len(long), notes=notes)


def _beyond_windows(
    pair: Pair, prompts: Sequence[Sequence[int]], room: int, notes: list[str]
) -> list[list[int]]:
    """Return prompts longer than the head's windows; empty if it has no windows.

    One prompt is as long as three windows and two blocks, and a second has LONG_TOKENS tokens. Both
    are cut to `room`, and omitted if they are then no longer than the widest window.
    """
    views = served_views(pair.config) if pair.family.layers_key else ()
    windows = [view.window for view in views if view.window]
    if not windows:
        return []
    needed = 3 * max(windows) + 2 * CACHE_BLOCK
    if needed > room:
        notes.append(
            f"the target supports prompts of at most {room} tokens, so the engine was checked beyond "
            f"the window of {max(windows)} on only {max(0, room - max(windows))} positions"
        )
    lengths = sorted({min(length, room) for length in (needed, LONG_TOKENS)})
    text = itertools.cycle([token for prompt in prompts for token in prompt])
    return [list(itertools.islice(text, length)) for length in lengths if length > max(windows)]


def _cache_bytes(pair: Pair, num_tokens: int) -> int:
    """Return an upper bound on the KV cache of `num_tokens` tokens, in float32, in bytes."""
    config = pair.target.text_config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layers = config.num_hidden_layers + len(served_views(pair.config))
    return int(2 * 4 * num_tokens * layers * heads * head_size(config))


def choose_dtype(
    pair: Pair, stored: StoredForecast | None, machine: Machine, *, on_cpu: bool
) -> TargetDtype:
    """Choose the dtype for an engine run if the user sets none.

    The published forecast's dtype is chosen if the engine can compute in it, because acceptance can
    then be compared with the forecast.
    """
    known = stored.dtype if stored else None
    if known and (
        not on_cpu or known == "float32" or (known == "bfloat16" and machine.cpu_has_bfloat16)
    ):
        return cast(TargetDtype, known)
    return default_target_dtype(pair.target, on_cpu=on_cpu, machine=machine) or "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Served:
    """The target's answers to a plan's prompts, and the acceptance on each answer.

    Both come from the engine, or from a forecast.
    """

    outputs: Sequence[Sequence[int]]
    counts: Sequence[AcceptanceCounts]
    by_context: Mapping[int, AcceptanceCounts] = field(default_factory=dict)

    @property
    def total(self) -> AcceptanceCounts:
        return sum(self.counts, AcceptanceCounts.zero())


def judge_dump(
    pair: Pair, plan: Plan, dump: Dump, facts: dict[str, str]
) -> Iterator[Finding | str]:
    """Return findings, and notes as text. Numbers are added to `facts`."""
    draft: Draft | None = None
    signal: InProcessTarget | None = None
    if pair.family.is_head and (method := pair.target.quantization):
        yield (
            "the outputs of vLLM's drafter were not compared with training, which runs only unquantised "
            f"targets: {pair.target.name} is quantised ({method})"
        )
    else:
        draft, signal = load_as_trained(pair, dump.run.dtype)
        yield from compare(draft, pair.family.name, signal, dump, device=this_machine().device)
        num_tokens = dump.run.num_speculative_tokens
        facts["compared"] = (
            f"{len(dump.recorded())} blocks of {num_tokens} tokens, {dump.run.dtype}"
        )
    served = Served(
        outputs=dump.outputs[plan.num_long :],
        counts=dump.counts_by_prompt()[plan.num_long :],
        by_context=dump.counts_by_context(first=plan.num_long),
    )
    yield from judge_acceptance(pair, plan, served, draft, signal, facts)


def judge_acceptance(
    pair: Pair,
    plan: Plan,
    served: Served,
    draft: Draft | None,
    signal: InProcessTarget | None,
    facts: dict[str, str],
) -> Iterator[Finding | str]:
    """Return findings and notes on acceptance.

    Acceptance is evaluated by itself, and against the published forecast or, without one, against
    training. Without `draft` and `signal`, other readings of the weights are not tried.
    """
    total, known = served.total, _in_forecast(plan, served)
    facts["acceptance"] = f"tau {total.tau:.3f} over {total.num_drafts} drafts"
    if served.by_context:
        facts["by context"] = format_contexts(served.by_context)
    yield from find_dead(total)
    if len(known) >= MIN_PROMPTS:
        # Keep only prompts that both have, because the others have no counterpart.
        expected = sum((each for _, each in known), AcceptanceCounts.zero()).tau
        facts["forecast"] = (
            f"tau {expected:.3f}, published for {len(known)} of these {len(served.outputs)} prompts"
        )
        counted, expected_counts = zip(*known, strict=True)
        is_exact = plan.stored is not None and plan.run.dtype == plan.stored.dtype == "float32"
        missed = list(find_missed_forecast(counted, expected_counts, is_exact=is_exact))
        if not missed:  # there is nothing more to check
            return
        yield from missed
    else:
        yield from _judge_without_forecast(pair, plan, total)
    if draft is not None and signal is not None:
        answers = list(zip(plan.prompts, served.outputs, strict=True))
        yield from find_better_readings(
            pair, draft, signal, answers, plan.run.num_speculative_tokens, this_machine().device
        )


def _in_forecast(plan: Plan, served: Served) -> list[tuple[AcceptanceCounts, AcceptanceCounts]]:
    """Return (served, expected) counts for each prompt in the published forecast.

    Return nothing if the forecast used a different number of draft tokens or maximum answer length.
    """
    stored, run = plan.stored, plan.run
    if stored is None or (run.num_speculative_tokens, run.max_tokens) != (
        stored.num_speculative_tokens,
        stored.max_tokens,
    ):
        return []
    pairs = zip(served.counts, stored.expected(plan.prompts), strict=True)
    return [(counts, expected) for counts, expected in pairs if expected is not None]


def _judge_without_forecast(
    pair: Pair, plan: Plan, counts: AcceptanceCounts
) -> Iterator[Finding | str]:
    """Compare acceptance with training's tau on held-out text, if there is one."""
    yield from find_too_good(counts)
    made = pair.provenance
    measured = [entry["held_out_tau"] for entry in made.metrics if "held_out_tau" in entry]
    same_tokens = made.config.prove.num_speculative_tokens == plan.run.num_speculative_tokens
    if counts.num_drafts < MIN_DRAFTS:
        yield f"{counts.num_drafts} drafts are too few to evaluate acceptance: set --prompts"
    elif measured and plan.are_held_out and same_tokens:
        why = (
            "these are not the prompts of the published forecast"
            if plan.stored
            else "no forecast was published"
        )
        yield f"{why}: acceptance must reach 75% of what training measured on held-out text"
        yield from find_lost_acceptance(counts, measured[-1])
    else:
        yield (
            "there is no reference for the acceptance: only a useless draft, or weights in the "
            "wrong order, could be detected"
        )
        if not plan.are_held_out:
            yield (
                "acceptance was measured on general questions, with answers that run beyond their "
                "end: set --prompts to measure it on your text"
            )


def find_prompts(
    pair: Pair, num_tokens: int, max_tokens: int, engine: EngineCheck, notes: list[str]
) -> tuple[list[list[int]], bool]:
    """Return (token ids of the prompts, whether they come from data instead of fallback questions).

    The data come from --prompts, or otherwise from the held-out part of the draft's training data.
    """
    tokenizer = pair.target.tokenizer
    data, day = pair.provenance.config.data, day_of_training(pair)
    # A held-out prompt must leave room for the answer and the last block.
    length = visible_length(pair.target_config, is_head=pair.family.is_head)
    room = length - max_tokens - num_tokens
    if engine.prompts is None and not data.source:
        return ask_fallback(tokenizer, engine.num_prompts, day), False
    if engine.prompts is not None:
        conversations = load_conversations(engine.prompts)
    else:
        try:
            _, conversations = split_held_out(
                load_conversations(data.source, split=data.split), data.held_out
            )
        except (ValueError, FileNotFoundError) as error:
            notes.append(
                f"the data that it was trained on is not available ({error}): give --prompts"
            )
            return ask_fallback(tokenizer, engine.num_prompts, day), False
    prompts = held_out_prompts(
        conversations,
        tokenizer,
        num_prompts=engine.num_prompts,
        max_length=min(room, data.max_prompt_tokens),
        usual=pair.provenance.template_arguments,
        day=day,
    )
    return [prompt.token_ids for prompt in prompts], True


def ask_fallback(
    tokenizer: Any, num_prompts: int, day: datetime.date | None = None
) -> list[list[int]]:
    """Return the first questions of FALLBACK as token ids.

    They are rendered with the chat template if there is one. A template that writes today's date
    writes `day`, which is then required.
    """
    questions: Sequence[str] = FALLBACK[:num_prompts]
    if tokenizer.chat_template is None:
        return [tokenizer(text)["input_ids"] for text in questions]
    render = Renderer(tokenizer, {}, day)
    return render.tokenise(
        [render([{"role": "user", "content": text}], prompt=True) for text in questions]
    )


def load_as_trained(
    pair: Pair, dtype: str, *, needs_target: bool = False
) -> tuple[Draft, InProcessTarget | None]:
    """Return (the draft as a training module, the target's signal).

    Without `needs_target`, the signal is None if the draft reads nothing from the target.
    """
    torch_dtype, device = getattr(torch, dtype), this_machine().device
    # A whole model can be loaded without the target.
    reads_target = needs_target or pair.family.is_head
    model = load_causal_lm(pair.target, torch_dtype).to(device) if reads_target else None
    draft = pair.family.load(pair.draft, lambda: Target.from_model(model), torch_dtype)
    draft = draft.to(device).eval()
    return draft, None if model is None else InProcessTarget(model, draft.aux_layer_ids)


def day_of_training(pair: Pair) -> datetime.date:
    """Return the date that the template wrote in training, or today if the provenance has none.

    With that date, a template that contains the date produces the same text on another day.
    """
    return choose_day(pair.provenance.date, "the date in the draft's provenance")
