"""A forecast of the acceptance in an engine at temperature 0.

It uses teacher-forced passes over the target's greedy text.

B = batch, T = tokens, N = rows, K = num_speculative_tokens.

Under greedy decoding, every emitted token is the target's greedy token. One pass of target and
draft over the target's continuation therefore shows which draft tokens would match after every
prefix. Walking the blocks over this table gives the engine's counts without the engine.
"""

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from redraft.engine.counts import (
    AcceptanceCounts,
    add_by_context,
    cut_blocks,
    simulate_blocks,
    split_by_context,
    tau,
)
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import GREEDY, Sampling
from redraft.eval.forecast.rows import (
    ComparedRows,
    block_matches,
    compare_rows,
    take_draft_steps,
)
from redraft.eval.forecast.sampled import sampled_probabilities
from redraft.files.progress import Progress
from redraft.files.served_target import visible_length
from redraft.files.setting_error import SettingError
from redraft.heads.draft import Batch, Draft, DraftStep, TargetSignal

SignalFunction = Callable[[Batch], TargetSignal]


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A prompt and the target's answer to it, greedy or sampled."""

    prompt: Prompt
    output_ids: list[int]
    """The answer as the engine returns it: up to the end token (included) or up to `max_tokens`
    tokens.
    """
    beyond_ids: list[int]
    """The target's tokens after the end. The engine's last block extends past the end, and all of
    it counts.
    """


Keep = Callable[[list[Prompt], Callable[[], list[Continuation]]], list[Continuation]]
"""`keep(prompts, compute)` returns the answers to a batch from an earlier run, or the result of
`compute()` if there are none.
"""


@dataclass(frozen=True, kw_only=True)
class PromptForecast:
    """The forecast for one answer. Sums run over the rows of the answer."""

    domain: str
    num_output_tokens: int
    alpha_sum: float
    alpha_greedy_sum: float
    num_rows: int
    counts: AcceptanceCounts
    by_context: Mapping[int, AcceptanceCounts] = field(default_factory=dict)
    """The counts by context length (`split_by_context`). Every step counts as a draft, even if an
    engine that stops at the maximum length has nothing to draft.
    """


@dataclass(frozen=True, kw_only=True)
class ForecastSummary:
    """The forecast summarised over several answers."""

    num_prompts: int
    num_output_tokens: int
    alpha: float
    """Mean alpha over the answers' rows, at temperature 1."""
    alpha_greedy: float
    """Mean alpha_greedy over the answers' rows, at temperature 1."""
    tau: float
    """Tokens per target step at temperature 0."""
    acceptance_per_position: list[float]
    """Fraction of drafts whose first j + 1 tokens are accepted, at temperature 0."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of one draft on all prompts."""

    per_prompt: list[PromptForecast]

    @property
    def overall(self) -> ForecastSummary:
        return _summary(self.per_prompt)

    @property
    def by_domain(self) -> dict[str, ForecastSummary]:
        names = sorted({prompt.domain for prompt in self.per_prompt})
        return {name: _summary([p for p in self.per_prompt if p.domain == name]) for name in names}

    @property
    def by_context(self) -> dict[int, AcceptanceCounts]:
        return add_by_context(prompt.by_context for prompt in self.per_prompt)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.overall),
            "by_domain": {name: asdict(row) for name, row in self.by_domain.items()},
        }


def _summary(forecasts: Sequence[PromptForecast]) -> ForecastSummary:
    num_rows = sum(f.num_rows for f in forecasts)
    counts = sum((f.counts for f in forecasts[1:]), forecasts[0].counts)
    return ForecastSummary(
        num_prompts=len(forecasts),
        num_output_tokens=sum(f.num_output_tokens for f in forecasts),
        alpha=sum(f.alpha_sum for f in forecasts) / num_rows,
        alpha_greedy=sum(f.alpha_greedy_sum for f in forecasts) / num_rows,
        tau=counts.tau,
        acceptance_per_position=counts.acceptance_per_position,
    )


def greedy_continuations(
    target: Any,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    num_speculative_tokens: int,
    end_ids: Collection[int],
    batch_size: int = 16,
    keep: Keep | None = None,
    is_head: bool = True,
) -> list[Continuation]:
    """Return the target's greedy answer to every prompt, and the K - 1 tokens after it.

    The target is a `transformers` causal LM. With `keep`, an interrupted run resumes after the
    last complete batch. `is_head` is as in `require_window`.

    Raises:
        ValueError: a prompt plus its answer exceeds the target's window.
    """
    require_window(target, prompts, max_tokens + num_speculative_tokens - 1, is_head=is_head)
    # Prompts of similar length share a batch, so there is little padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    results: dict[int, Continuation] = {}
    # A batch of a large model takes minutes, so the progress bar counts steps. Most batches need
    # all of them.
    steps = max_tokens + num_speculative_tokens - 1
    with Progress(
        total=-(-len(order) // batch_size) * steps, desc="target's greedy answers", unit="step"
    ) as bar:
        for number, first in enumerate(range(0, len(order), batch_size), 1):
            chosen = order[first : first + batch_size]
            compute = functools.partial(
                generate_answers,
                target,
                batch := [prompts[i] for i in chosen],
                max_tokens=max_tokens,
                num_speculative_tokens=num_speculative_tokens,
                end_ids=end_ids,
                on_step=bar.update,
            )
            texts = keep(batch, compute) if keep else compute()
            results |= dict(zip(chosen, texts, strict=True))
            bar.update(number * steps - bar.n)
    return [results[i] for i in range(len(prompts))]


@torch.no_grad()
def generate_answers(
    target: Any,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    num_speculative_tokens: int,
    end_ids: Collection[int],
    sampling: Sampling = GREEDY,
    seed: int = 0,
    on_step: Callable[[], object] = lambda: None,
) -> list[Continuation]:
    """The answers to one batch of prompts.

    `on_step` is called once per decoding step of the batch. The random numbers for an answer
    depend on the seed, temperature and prompt, but not on the batch.
    """
    beyond = num_speculative_tokens - 1
    uniform_BT = torch.stack(
        [_uniform(p, max_tokens + beyond, sampling.temperature, seed) for p in prompts]
    )

    def choose(logits_BV: Tensor, step: int) -> Tensor:
        on_step()
        if sampling.temperature == 0:
            return logits_BV.argmax(-1)
        # Invert the cumulative distribution in float64, because float32 sums over a large
        # vocabulary would change how often rare tokens are drawn. The draw is scaled by the last
        # sum, which is not exactly 1, and `right` skips tokens with probability 0.
        cumulative_BV = sampled_probabilities(logits_BV.double(), sampling).cumsum(-1)
        drawn_B1 = uniform_BT[:, step, None].to(cumulative_BV) * cumulative_BV[:, -1:]
        return torch.searchsorted(cumulative_BV, drawn_B1, right=True).squeeze(-1)

    texts = _generate(
        target, [prompt.token_ids for prompt in prompts], max_tokens, beyond, end_ids, choose
    )
    return [
        cut_continuation(p, text, max_tokens, beyond, end_ids)
        for p, text in zip(prompts, texts, strict=True)
    ]


def _uniform(prompt: Prompt, num_tokens: int, temperature: float, seed: int) -> Tensor:
    """Random numbers in [0, 1), one per token of an answer, float64 [num_tokens]."""
    # Each prompt has its own seed, because an answer must not depend on the batch in which it is
    # generated.
    digest = hashlib.sha256(repr((seed, temperature, prompt.token_ids)).encode()).digest()
    # Use the CPU's generator, so that all devices get the same numbers.
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.rand(num_tokens, dtype=torch.float64, generator=generator)


def cut_continuation(
    prompt: Prompt, text: Sequence[int], max_tokens: int, num_beyond: int, end_ids: Collection[int]
) -> Continuation:
    """Split generated tokens into the answer and the `num_beyond` tokens after it."""
    end = _output_length(text, max_tokens, end_ids)
    return Continuation(
        prompt=prompt, output_ids=list(text[:end]), beyond_ids=list(text[end : end + num_beyond])
    )


def require_window(
    target: Any, prompts: Sequence[Prompt], num_new_tokens: int, *, is_head: bool = True
) -> None:
    """Raise ValueError if a prompt plus `num_new_tokens` is too long for a correct forecast.

    The limit is the target's number of positions. For a standalone draft (if `is_head` is false),
    it is also the window of a target whose layers all have one.
    """
    window = visible_length(target.config.get_text_config(), is_head=is_head)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + num_new_tokens > window:
        raise SettingError(
            f"a prompt of {longest} tokens and {num_new_tokens} new ones exceed the target's "
            f"window of {window}: exclude longer prompts ({{max_prompt_tokens}}), or lower "
            "{max_tokens}"
        )


def _output_length(text: Sequence[int], max_tokens: int, end_ids: Collection[int]) -> int:
    ends = (position + 1 for position, token in enumerate(text[:max_tokens]) if token in end_ids)
    return next(ends, max_tokens)


def _generate(
    target: Any,
    prompts: Sequence[list[int]],
    max_tokens: int,
    beyond: int,
    end_ids: Collection[int],
    choose: Callable[[Tensor, int], Tensor],
) -> list[list[int]]:
    """The tokens after each prompt, chosen by `choose(logits [B, V], step)`.

    Each list contains the output and at least `beyond` tokens after it.
    """
    # Padding is on the left, so the last column is the next token of every prompt.
    device = target.device
    width = max(map(len, prompts))
    # Any id can be used as padding, because the attention mask hides it.
    ids_BT = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts], device=device)
    mask_BT = torch.tensor(
        [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device
    )
    ends = torch.tensor(sorted(end_ids), device=device)
    needed_B = torch.full((len(prompts),), max_tokens + beyond, device=device)
    tokens: list[Tensor] = []
    cache = None
    while len(tokens) < int(needed_B.max()):
        # Positions count only real tokens. After the first pass, only the last column is new.
        position_ids_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
        output = target(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=position_ids_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,  # [B, 1, V] instead of [B, T, V]
        )
        tokens.append(choose(output.logits[:, -1], len(tokens)))
        # A text that has ended needs only the tokens beyond its end. The batch stops when no text
        # needs more tokens.
        after_end = torch.full_like(needed_B, len(tokens) + beyond)
        needed_B = torch.where(
            torch.isin(tokens[-1], ends), torch.minimum(needed_B, after_end), needed_B
        )
        ids_BT, cache = tokens[-1][:, None], output.past_key_values
        mask_BT = torch.nn.functional.pad(mask_BT, (0, 1), value=1)
    return [row.tolist() for row in torch.stack(tokens, dim=1)]


def forecast(
    draft: Draft,
    target_signal: SignalFunction,
    continuations: Sequence[Continuation],
    num_speculative_tokens: int,
    device: torch.device | str = "cpu",
    max_tokens: int | None = None,
    *,
    of_text: bool = False,
) -> Forecast:
    """Acceptance of `draft` at temperature 0 on the target's greedy text.

    It takes one teacher-forced pass per prompt. `max_tokens` is set for an engine that does not
    draft beyond this length (`simulate_blocks`). With `of_text`, the text comes from a different
    build of the target, e.g. a quantised one. A draft token then matches if it equals the text's
    token instead of this target's most probable token.

    Raises:
        ValueError: the draft has fewer draft steps than `num_speculative_tokens`.
    """
    return Forecast(
        per_prompt=[
            forecast_prompt(
                draft,
                target_signal,
                continuation,
                num_speculative_tokens,
                device,
                max_tokens,
                of_text=of_text,
            )
            for continuation in Progress(continuations, desc="forecast", unit="prompt")
        ]
    )


@torch.no_grad()
def forecast_prompt(
    draft: Draft,
    target_signal: SignalFunction,
    continuation: Continuation,
    num_speculative_tokens: int,
    device: torch.device | str,
    max_tokens: int | None = None,
    *,
    of_text: bool = False,
) -> PromptForecast:
    """`forecast` for a single answer."""
    num_output = len(continuation.output_ids)
    prompt_ids = continuation.prompt.token_ids
    text = [*prompt_ids, *continuation.output_ids, *continuation.beyond_ids]
    batch = Batch.padded([text], num_prompt_tokens=len(prompt_ids), device=device)
    signal = target_signal(batch)
    steps = take_draft_steps(draft, batch, signal, num_speculative_tokens)
    compared = [compare_rows(step, signal.distribution) for step in steps]
    counted = [
        _of_text(rows, step, batch) if of_text else rows
        for rows, step in zip(compared, steps, strict=True)
    ]
    match_BTK, _ = block_matches(counted, num_speculative_tokens, draft.is_autoregressive)
    # This is the first row that drafts, because output token 0 comes from the prefill. For the
    # prompt x[0..3], output token 0 is x[4], so the first block drafts x[5], from row 4 with shift
    # 0, and from row 3 with shift 1.
    start = len(prompt_ids) - steps[0].shift
    # Start one row earlier, because alpha counts every token of the answer, including the
    # prefill's, which no block drafts.
    rows = slice(max(start - 1, 0), start - 1 + num_output)
    match_TK = match_BTK[0, start : start + num_output - 1].cpu().double().numpy()
    accept_TK, _ = cut_blocks(match_TK, num_output, max_tokens)
    return PromptForecast(
        domain=continuation.prompt.domain,
        num_output_tokens=num_output,
        alpha_sum=float(compared[0].alpha_BT[0, rows].sum()),
        alpha_greedy_sum=float(compared[0].alpha_greedy_BT[0, rows].sum()),
        num_rows=int(compared[0].mask_BT[0, rows].sum()),
        counts=simulate_blocks(match_TK, num_output, max_tokens),
        by_context=dict(split_by_context(accept_TK, num_output, len(prompt_ids))),
    )


def _of_text(rows: ComparedRows, step: DraftStep, batch: Batch) -> ComparedRows:
    """Return the same rows, but a draft token agrees if it equals the text's token."""
    label_BT = batch.input_ids_BT.roll(-1 - step.shift, dims=1)
    return replace(rows, agree_BT=(rows.token_BT == label_BT) & rows.mask_BT)


@dataclass(frozen=True, kw_only=True)
class QuickMetrics:
    """Acceptance on held-out text, cheap enough to compute every few hundred training steps."""

    num_rows: int
    alpha: float
    alpha_greedy: float
    tau: float
    """1 + sum_j c_j with c_j from `acceptance_per_position`. Every row starts a block here, so this
    only approximates the forecast.
    """
    acceptance_per_position: list[float]
    """Fraction of rows whose first j + 1 draft tokens all equal the target's most probable tokens,
    given the text.
    """


def quick_metrics(sums: Tensor) -> QuickMetrics:
    """Compute the rates from `metric_sums` that were added up over any number of batches.

    Raises:
        ValueError: no row in the batches has a label.
    """
    if sums[0] == 0:
        raise ValueError(
            "the held-out batches have no row with a label: check the loss mask and the held-out "
            "split"
        )
    num_rows, alpha_sum, alpha_greedy_sum, num_blocks, *accepted = sums.tolist()
    per_position = [count / max(num_blocks, 1) for count in accepted]
    return QuickMetrics(
        num_rows=int(num_rows),
        alpha=alpha_sum / num_rows,
        alpha_greedy=alpha_greedy_sum / num_rows,
        tau=tau(per_position),
        acceptance_per_position=per_position,
    )


@torch.no_grad()
def metric_sums(
    draft: Draft, batch: Batch, signal: TargetSignal, num_speculative_tokens: int
) -> Tensor:
    """Return sums over a batch, float64 on the CPU, [4 + K].

    The entries are rows, alpha, alpha_greedy, blocks, and accepted tokens per position.

    Raises:
        ValueError: the draft has too few draft steps.
    """
    steps = take_draft_steps(draft, batch, signal, num_speculative_tokens)
    # The draft may run in bf16, but its metrics must not.
    with torch.autocast(batch.input_ids_BT.device.type, enabled=False):
        compared = [compare_rows(step, signal.distribution) for step in steps]
    match_BTK, labelled_BTK = block_matches(
        compared, num_speculative_tokens, draft.is_autoregressive
    )
    # Count only whole blocks, because a block that is cut off by the end of the text would count as
    # rejected there.
    blocks_NK = match_BTK[labelled_BTK.all(-1)]
    first = compared[0]
    rates = [
        first.mask_BT.sum(),
        first.alpha_BT.double().sum(),
        first.alpha_greedy_BT.double().sum(),
    ]
    accepted_K = (
        blocks_NK.long().cumprod(-1).sum(0)
    )  # 1 up to the first mismatch of a block, then 0
    return torch.tensor(
        [*map(float, rates), len(blocks_NK), *accepted_K.tolist()], dtype=torch.float64
    )
