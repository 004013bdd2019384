"""Compare a running server's acceptance with the forecast on the text that it serves.

    prompts ─► server ─► answers and counts ─┐
                              └─► forecast ────┴─► findings

The forecast uses the served text, so it is not a fault if the target writes different text on this
server, e.g. because it is quantised. The comparison shows how well the draft predicts this text, on
the server and with training's arithmetic.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from redraft.distill.doctor.in_engine import (
    DEFAULT_MAX_TOKENS,
    EngineCheck,
    choose_dtype,
    find_prompts,
    load_as_trained,
)
from redraft.distill.doctor.readings import find_better_readings
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.counts import AcceptanceCounts, format_contexts
from redraft.engine.hardware import this_machine
from redraft.engine.prompts import Prompt
from redraft.engine.running_server import CountedAnswer, RunningServer
from redraft.eval.forecast.greedy import Continuation, forecast, generate_answers
from redraft.eval.forecast.stored import StoredForecast
from redraft.eval.parity.acceptance import find_dead, find_missed_forecast
from redraft.files.checkpoint import refuse_quantised
from redraft.files.progress import Progress
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.draft import Batch, ExactTarget

MIN_OWN_TEXT = 0.5
"""Minimum fraction of a server's greedy tokens that are the target's most probable ones. If the
target is quantised to a few bits, some tokens differ. With a different target, most of them do.
"""

MAX_UNEVEN = 0.02
"""Maximum relative difference from the same number of draft tokens in every step."""

CURE = (
    "the server reads the draft differently from training: export it for this engine "
    "again (redraft export), and serve the exported draft"
)


@dataclass(frozen=True, kw_only=True)
class ServerCheck:
    server: RunningServer
    known_version: str
    """Engine version on which redraft's rules are based."""
    num_speculative_tokens: int | None
    engine: EngineCheck
    """Settings of the comparison: the prompts and their number, the answer length, and the dtype.
    """


def check_server(pair: Pair, check: ServerCheck, facts: dict[str, str]) -> Iterator[Finding | str]:
    """Return findings, and notes as text. Numbers are added to `facts`.

    Raises:
        ConnectionError: the server stopped answering.
        ValueError: the server drafts nothing, drafts uneven numbers of tokens, or also serves other
            clients.
    """
    # The forecast runs the target in this process.
    refuse_quantised(
        pair.target,
        f"--target {pair.target.name}",
        "give the unquantised model from which the served one was made",
    )
    server = check.server
    facts["server"] = f"{server.url}: {server.engine} {server.version or 'of an unknown version'}"
    yield from find_unknown_version(server, check.known_version)
    stored, machine = StoredForecast.from_json(pair.provenance.forecast), this_machine()
    asked, notes = check.engine, list[str]()
    max_tokens = asked.max_tokens or (stored.max_tokens if stored else DEFAULT_MAX_TOKENS)
    prompts, _ = find_prompts(pair, check.num_speculative_tokens or 1, max_tokens, asked, notes)
    yield from notes
    answers = [
        server.answer(prompt, max_tokens)
        for prompt in Progress(prompts, desc="server's answers", unit="answer")
    ]
    num_tokens = check.num_speculative_tokens or count_draft_tokens(answers)
    if not server.drafts_to_the_end:
        require_even_drafts(server.url, answers, num_tokens)
    dtype = asked.dtype or choose_dtype(pair, stored, machine, on_cpu=machine.device == "cpu")
    draft, signal = load_as_trained(pair, dtype, needs_target=True)
    assert signal is not None
    texts = [
        continue_text(signal.model, prompt, answer, num_tokens)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    told = forecast(
        draft,
        signal,
        texts,
        num_tokens,
        this_machine().device,
        max_tokens if server.drafts_to_the_end else None,
        of_text=True,
    )
    served = [answer.counts for answer in answers]
    expected = [prompt.counts for prompt in told.per_prompt]
    if server.drafts_to_the_end:  # the number of steps is known, but not which of them drafted
        expected = [
            replace(counts, num_drafts=max(len(answer.token_ids) - 1 - counts.num_accepted, 0))
            for counts, answer in zip(expected, answers, strict=True)
        ]
    total, foretold = _sum(served), _sum(expected)
    facts["acceptance"] = (
        f"tau {total.tau:.3f} over {total.num_drafts} drafts of {num_tokens} tokens"
    )
    facts["forecast"] = f"tau {foretold.tau:.3f} on the served text"
    if told.by_context:
        facts["by context"] = f"forecast {format_contexts(told.by_context)}"
    own = own_share(signal, texts)
    facts["text"] = f"{own:.1%} of the tokens are {pair.target.name}'s most probable tokens"
    yield from find_other_text(own, pair)
    yield from find_dead(total)
    # In float32, and with the target's text up to the last token, the server computes as training
    # does.
    is_exact = dtype == "float32" and own == 1
    missed = list(
        find_missed_forecast(served, expected, is_exact=is_exact, source="the forecast", cure=CURE)
    )
    yield from missed
    if missed and pair.family.is_head:
        pairs = [(text.prompt.token_ids, text.output_ids) for text in texts]
        yield from find_better_readings(
            pair, draft, signal, pairs, num_tokens, this_machine().device
        )


def find_unknown_version(server: RunningServer, known: str) -> Iterator[Finding]:
    """Report a doubt if redraft's rules are for a different release than the server's."""
    if server.version and not server.version.startswith(known):
        yield Finding(
            f"the server is {server.engine} {server.version}, but redraft's rules are based on "
            f"{known}",
            "rely on the acceptance below, which needs no rules",
            is_doubt=True,
        )


def find_other_text(own: float, pair: Pair) -> Iterator[Finding | str]:
    """Report a finding if the served text is not the target's, or a note if a few tokens differ."""
    if own < MIN_OWN_TEXT:
        yield Finding(
            f"only {own:.0%} of the served tokens are {pair.target.name}'s most probable tokens: "
            "the server serves a different target, or does not decode greedily",
            "give the served model as --target",
        )
    elif own < 1:
        yield (
            "the server rounds differently or is quantised: a few tokens differ, and the "
            "forecast uses the served text"
        )


def count_draft_tokens(answers: Sequence[CountedAnswer]) -> int:
    """Return the number of draft tokens per step, from the server's counts.

    The maximum over the answers is used, because an answer's last block may be shorter.
    """
    rates = [a.counts.num_draft_tokens / max(a.counts.num_drafts, 1) for a in answers]
    return max(1, math.ceil(max(rates) - 1e-9))


def require_even_drafts(url: str, answers: Sequence[CountedAnswer], num_tokens: int) -> None:
    """Raise ValueError unless a server proposes this number of tokens in nearly every step.

    Otherwise, it would accept less than the forecast for a reason that is no fault of the draft.
    """
    total = _sum([answer.counts for answer in answers])
    expected = num_tokens * total.num_drafts
    if abs(total.num_draft_tokens - expected) > MAX_UNEVEN * expected:
        raise ValueError(
            f"{url} proposed {total.num_draft_tokens} tokens in {total.num_drafts} steps, and not "
            f"{num_tokens} in each: serve the head alone, with --pace off, and give the server's "
            "number as --num-speculative-tokens"
        )


def continue_text(
    model: object, prompt: Sequence[int], answer: CountedAnswer, num_tokens: int
) -> Continuation:
    """Return a served answer, followed by target tokens that vLLM's last block may reach."""
    whole = Prompt(token_ids=[*prompt, *answer.token_ids])
    (rest,) = generate_answers(
        model, [whole], max_tokens=max(num_tokens - 1, 1), num_speculative_tokens=1, end_ids=()
    )
    return Continuation(
        prompt=Prompt(token_ids=list(prompt)),
        output_ids=answer.token_ids,
        beyond_ids=rest.output_ids[: num_tokens - 1],
    )


@torch.no_grad()
def own_share(signal: InProcessTarget, texts: Sequence[Continuation]) -> float:
    """Return the fraction of served tokens that are the target's most probable ones there."""
    num_own = num_all = 0
    for text in texts:
        ids = [*text.prompt.token_ids, *text.output_ids]
        batch = Batch.padded([ids], num_prompt_tokens=1, device=this_machine().device)
        exact = signal(batch).distribution
        assert isinstance(exact, ExactTarget)
        first = len(text.prompt.token_ids) - 1
        rows_N = torch.arange(first, len(ids) - 1, device=batch.input_ids_BT.device)
        best_N = exact.logits(rows_N).argmax(-1)
        num_own += int((best_N == batch.input_ids_BT[0, first + 1 :]).sum())
        num_all += len(rows_N)
    return num_own / max(num_all, 1)


def _sum(counts: Sequence[AcceptanceCounts]) -> AcceptanceCounts:
    return sum(counts, AcceptanceCounts.zero())
