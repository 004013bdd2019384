"""The forecast of many drafts at once.

One pass of the target per batch serves all of them, at any temperature.

    prompts ─► the target's answers at a temperature ─► one pass of the target ─► every draft's steps ─► PromptRows
               cached on disk                           hidden states, no [T, V]                          cached on disk

B = batch, T = tokens, N = labels, K = num_speculative_tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redraft.engine.counts import (
    AdaptivePoint,
    ExpectedCounts,
    expected_blocks,
    split_by_context,
    verify_as_block,
    walk_adaptive,
)
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import Sampling
from redraft.eval.forecast.greedy import (
    Continuation,
    SignalFunction,
    generate_answers,
    require_window,
)
from redraft.eval.forecast.ngram import Lookup
from redraft.eval.forecast.verification import (
    NOTHING,
    Labels,
    Proposals,
    VerifiedLabels,
    verify_labels,
)
from redraft.files.kept import compute_once
from redraft.files.progress import Progress
from redraft.heads.draft import Batch, DraftStep, ExactTarget, TargetSignal


@dataclass(frozen=True, kw_only=True)
class Forecastable:
    """A draft with a forecast: a module with draft steps, or n-grams."""

    fingerprint: str
    """Identifies the draft in cached results, e.g. a folder's fingerprint."""
    steps: Callable[[Batch, TargetSignal, int], list[DraftStep]] | Lookup
    """Computes the draft steps for a number of draft tokens."""
    first: Lookup | None = None
    """Lookup that runs before the steps. If it finds tokens, they form the block."""
    head_tokens: int | None = None
    """Maximum number of draft tokens from the steps after a lookup. If None, it is the same as for
    the lookup.
    """
    is_autoregressive: bool = False
    is_block: bool = False
    """Whether each number of draft tokens needs a separate pass, because it changes all
    predictions.
    """
    aux_layer_ids: tuple[int, ...] = ()
    is_sampled: bool = False
    """Whether serving above temperature 0 samples from q instead of choosing the most probable
    token.
    """
    can_sample: bool = False
    """Whether serving can sample from q (`draft_sample_method: probabilistic`)."""
    max_tokens: int | None = None
    """Maximum number of draft tokens. None if there is no limit."""
    module: Any = None
    """Module that computes `steps`, for callers that move it to another device."""


@dataclass(frozen=True, kw_only=True)
class PromptRows:
    """The results of one draft on the answer to one prompt, at one temperature."""

    num_output_tokens: int
    num_rows: int
    alpha_sum: float
    """Sum of alpha over the first tokens of all blocks, with p and q as sampled."""
    alpha_greedy_sum: float
    counts: dict[int, ExpectedCounts]
    """Counts by number of draft tokens."""
    other_counts: dict[int, ExpectedCounts] = field(default_factory=dict)
    """Counts with the other of vLLM's two values of `draft_sample_method`. Empty if it makes no
    difference.
    """
    block_counts: dict[int, ExpectedCounts] = field(default_factory=dict)
    """Counts with sampled drafts and block verification. Empty whenever `other_counts` is.
    """
    adaptive: list[AdaptivePoint] = field(default_factory=list)
    """Results with the maximum number of draft tokens, by threshold of adaptive verification. Empty
    for lookups.
    """
    by_context: dict[int, ExpectedCounts] = field(default_factory=dict)
    """Counts with the maximum number of draft tokens, by context length (`split_by_context`).
    """


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings of the forecast, which are the same for all drafts."""

    temperatures: tuple[float, ...]
    num_speculative_tokens: tuple[int, ...]
    max_tokens: int
    end_ids: tuple[int, ...]
    seed: int
    batch_size: int
    filters: Sampling = field(default_factory=Sampling)
    """Sampling filters for the answers, used at every temperature."""

    @property
    def most_tokens(self) -> int:
        return max(self.num_speculative_tokens)


# Results by temperature, prompt and name of the draft.
Rows = dict[float, list[dict[str, PromptRows]]]


def forecast_drafts(
    target: Any,
    target_fingerprint: str,
    signal: SignalFunction,
    drafts: Mapping[str, Forecastable],
    prompts: Sequence[Prompt],
    protocol: Protocol,
    folder: Path,
) -> Rows:
    """Evaluate every draft on the target's answer to every prompt.

    Finished batches are cached in `folder`. `signal` must return the last hidden state, and all
    layers that any of the drafts uses, in ascending order.

    Raises:
        ValueError: a prompt plus its answer exceeds the target's window.
    """
    require_window(
        target,
        prompts,
        protocol.max_tokens + protocol.most_tokens - 1,
        # These drafts need the row layout of a language model.
        is_head=not any(draft.is_autoregressive for draft in drafts.values()),
    )
    # Prompts of similar length share a batch, so there is little padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    starts = range(0, len(order), protocol.batch_size)
    rows: Rows = {t: [{} for _ in prompts] for t in protocol.temperatures}
    with Progress(total=len(prompts) * len(rows), desc="forecast", unit="answer") as bar:
        for temperature in protocol.temperatures:
            for start in starts:
                chosen = order[start : start + protocol.batch_size]
                batch = _Batch(
                    [prompts[i] for i in chosen], temperature, protocol, target_fingerprint, folder
                )
                for i, result in zip(chosen, batch.rows(target, signal, drafts), strict=True):
                    rows[temperature][i] = result
                bar.update(len(chosen))
    return rows


@dataclass(frozen=True)
class _Batch:
    prompts: list[Prompt]
    temperature: float
    protocol: Protocol
    target_fingerprint: str
    folder: Path

    @property
    def sampling(self) -> Sampling:
        return self.protocol.filters.at(self.temperature)

    @property
    def key(self) -> list[object]:
        protocol = self.protocol
        return [
            *(
                self.target_fingerprint,
                self.prompts,
                self.temperature,
                protocol.max_tokens,
                protocol.most_tokens,
            ),
            *(protocol.end_ids, protocol.seed, self.sampling),
        ]

    def rows(
        self, target: Any, signal: SignalFunction, drafts: Mapping[str, Forecastable]
    ) -> list[dict[str, PromptRows]]:
        """Return the results of every draft by name, in the order of the prompts."""
        fingerprints = [
            (name, d.fingerprint, d.is_sampled, d.can_sample) for name, d in drafts.items()
        ]
        return compute_once(
            self.folder,
            f"rows-t{self.temperature:g}",
            [*self.key, self.protocol.num_speculative_tokens, fingerprints, "adaptive", "context"],
            list[dict[str, PromptRows]],
            lambda: evaluate_batch(
                self.texts(target), signal, drafts, self.temperature, self.protocol, target.device
            ),
        )

    def texts(self, target: Any) -> list[Continuation]:
        """Return the target's answers, which do not depend on the drafts."""
        protocol = self.protocol
        return compute_once(
            self.folder,
            f"answers-t{self.temperature:g}",
            self.key,
            list[Continuation],
            lambda: generate_answers(
                target,
                self.prompts,
                max_tokens=protocol.max_tokens,
                num_speculative_tokens=protocol.most_tokens,
                end_ids=protocol.end_ids,
                sampling=self.sampling,
                seed=protocol.seed,
            ),
        )


@torch.no_grad()
def evaluate_batch(
    texts: Sequence[Continuation],
    signal: SignalFunction,
    drafts: Mapping[str, Forecastable],
    temperature: float,
    protocol: Protocol,
    device: torch.device | str = "cpu",
) -> list[dict[str, PromptRows]]:
    """Evaluate every draft on every text, with one target pass over all texts."""
    # 1. Run the target once over all texts.
    ids = [[*text.prompt.token_ids, *text.output_ids, *text.beyond_ids] for text in texts]
    batch = Batch.padded(ids, [len(text.prompt.token_ids) for text in texts], device=device)
    known = signal(batch)
    assert isinstance(known.distribution, ExactTarget), "the target's whole distribution"
    union = sorted({layer for draft in drafts.values() for layer in draft.aux_layer_ids})
    # 2. Collect the proposals of every draft for every label.
    labels, proposed = _labels(texts, batch), {}
    for name, draft in drafts.items():
        layers = _select_layers(known, union, draft)
        for most in _list_passes(draft, protocol):
            proposed[name, most] = _propose(draft, batch, layers, texts, most)
    # 3. Verify all drafts at once, because this computes the target's logits only once. `verified`
    # keeps this order.
    flat = [each for steps in proposed.values() for each in steps]
    verified = iter(
        verify_labels(flat, known.distribution, labels, protocol.filters.at(temperature))
    )
    # 4. Compute the expected counts of each text.
    results: list[dict[str, PromptRows]] = [{} for _ in texts]
    for (name, most), steps in proposed.items():
        # At temperature 0, both draft_sample_methods are equivalent.
        draft = drafts[name] if temperature > 0 else replace(drafts[name], can_sample=False)
        limited = replace(protocol, num_speculative_tokens=(most,)) if draft.is_block else protocol
        rates = [next(verified) for _ in steps]
        if draft.first is not None:
            rates = _mix(steps[:most], rates)
        rows = _by_prompt(draft, steps, rates, texts, limited)
        for result, row in zip(results, rows, strict=True):
            result[name] = _add_counts(result.get(name), row)
    return results


def _list_passes(draft: Forecastable, protocol: Protocol) -> list[int]:
    limit = draft.max_tokens or protocol.most_tokens
    if draft.is_block:
        # If all numbers exceed the limit, one pass at the limit still gives alpha.
        return [k for k in protocol.num_speculative_tokens if k <= limit] or [limit]
    return [min(protocol.most_tokens, limit)]


def _add_counts(earlier: PromptRows | None, row: PromptRows) -> PromptRows:
    if earlier is None:
        return row
    return replace(
        row,
        counts=earlier.counts | row.counts,
        other_counts=earlier.other_counts | row.other_counts,
        block_counts=earlier.block_counts | row.block_counts,
        adaptive=row.adaptive or earlier.adaptive,
        by_context=row.by_context or earlier.by_context,
    )


def _labels(texts: Sequence[Continuation], batch: Batch) -> Labels:
    width = batch.input_ids_BT.shape[1]
    # A prompt's last row predicts the first label: for x[0..3] in text 1 of width 10, it is row 13.
    rows = [
        row * width + len(t.prompt.token_ids) - 1 + i
        for row, t in enumerate(texts)
        for i in range(_num_labels(t))
    ]
    target_rows_N = torch.tensor(rows, device=batch.input_ids_BT.device)
    return Labels(
        target_rows_N=target_rows_N,
        ids_N=batch.input_ids_BT.flatten()[target_rows_N + 1],
        length=width,
    )


def _num_labels(text: Continuation) -> int:
    return len(text.output_ids) + len(text.beyond_ids)


def _select_layers(signal: TargetSignal, union: Sequence[int], draft: Forecastable) -> TargetSignal:
    # Shape [B, T, L, D]. The signal has the layers of all drafts, in ascending order.
    if not draft.aux_layer_ids or signal.aux_BTLD is None:
        return replace(signal, aux_BTLD=None)
    return replace(
        signal,
        aux_BTLD=signal.aux_BTLD[:, :, [union.index(layer) for layer in draft.aux_layer_ids]],
    )


def _propose(
    draft: Forecastable,
    batch: Batch,
    signal: TargetSignal,
    texts: Sequence[Continuation],
    most_tokens: int,
) -> list[Proposals]:
    """The proposals for K = `most_tokens` tokens.

    An autoregressive draft has one step, any other K steps. A lookup proposes K tokens. For a
    lookup before a head, the lookup's tokens are followed by the head's steps.
    """
    if isinstance(draft.steps, Lookup):
        return list(_looked_up(draft.steps, texts, most_tokens).to(batch.input_ids_BT.device))
    if draft.first is not None:
        alone = replace(draft, first=None, head_tokens=None)
        most_by_head = (
            most_tokens if draft.head_tokens is None else min(draft.head_tokens, most_tokens)
        )
        return [
            *_propose(replace(alone, steps=draft.first), batch, signal, texts, most_tokens),
            *(_propose(alone, batch, signal, texts, most_by_head) if most_by_head else ()),
        ]
    return list(
        draft.steps(batch, signal, most_tokens)[: 1 if draft.is_autoregressive else most_tokens]
    )


def _mix(
    looked_up: Sequence[Proposals], verified: Sequence[VerifiedLabels]
) -> list[VerifiedLabels]:
    """Return the rates of a block's K tokens: the lookup's if it finds a token, else the head's.

    `verified` contains the lookup's rates, then the head's.
    """
    by_lookup, by_head = verified[: len(looked_up)], verified[len(looked_up) :]
    matched_N = _is_found(looked_up[0])
    mixed = []
    for j, found in enumerate(by_lookup):
        # Token j of a block is j labels after its first. `roll` moves values from the end of
        # another text to the first j labels, but no block of this text reaches these labels, and
        # `_block_table` omits them.
        matches_N = matched_N.roll(j)
        rates = {
            name: torch.where(
                matches_N, rate_N, getattr(by_head[j], name) if j < len(by_head) else 0.0
            )
            for name, rate_N in vars(found).items()
        }
        mixed.append(VerifiedLabels(**rates))
    return mixed


def _is_found(proposed: Proposals) -> Tensor:
    """Whether a lookup found a token at each label, bool [N]."""
    assert isinstance(proposed, Tensor), "a lookup"
    return (proposed != NOTHING).cpu()


def _looked_up(lookup: Lookup, texts: Sequence[Continuation], most_tokens: int) -> Tensor:
    """Return each label's token from the block with its j-th position there, int64 [K, N]."""
    columns = []
    for text in texts:
        ids = [*text.prompt.token_ids, *text.output_ids, *text.beyond_ids]
        first, num_labels = len(text.prompt.token_ids), _num_labels(text)
        proposed_KN = torch.full((most_tokens, num_labels), NOTHING)
        for start, tokens in enumerate(lookup.blocks(ids, first, num_labels, most_tokens)):
            # The block that begins at label `start` has its j-th token at label start + j.
            for j, token in enumerate(tokens[: num_labels - start]):
                proposed_KN[j, start + j] = token
        columns.append(proposed_KN)
    return torch.cat(columns, dim=1)


def _by_prompt(
    draft: Forecastable,
    proposed: Sequence[Proposals],
    verified: Sequence[VerifiedLabels],
    texts: Sequence[Continuation],
    protocol: Protocol,
) -> list[PromptRows]:
    rates = verified[0]
    # A model always drafts. A lookup may find nothing, and then an engine counts no draft.
    is_lookup = all(isinstance(each, Tensor) for each in proposed)
    drafted_N = _is_found(proposed[0]) if is_lookup else torch.ones_like(rates.alpha_N)
    columns = {"alpha": rates.alpha_N, "alpha_greedy": rates.alpha_greedy_N, "drafted": drafted_N}
    accept_greedy_SN = torch.stack([each.accept_greedy_N for each in verified])
    ratio_sampled_SN = torch.stack([each.ratio_sampled_N for each in verified])
    has_confidence = not any(isinstance(each, Tensor) for each in proposed)
    confidence_SN = torch.stack([each.confidence_N for each in verified])
    served_SN, other_SN = accept_greedy_SN, ratio_sampled_SN.clamp(max=1)
    if draft.is_sampled:
        served_SN, other_SN = other_SN, served_SN
    rows, start = [], 0
    for text in texts:
        at = slice(start, start + _num_labels(text))
        start = at.stop
        here = {name: column[at] for name, column in columns.items()}
        others = (other_SN[:, at], ratio_sampled_SN[:, at]) if draft.can_sample else None
        confidence = confidence_SN[:, at] if has_confidence else None
        rows.append(_prompt_rows(draft, text, served_SN[:, at], others, confidence, here, protocol))
    return rows


def _prompt_rows(
    draft: Forecastable,
    text: Continuation,
    served_SN: Tensor,
    others_2SN: tuple[Tensor, Tensor] | None,
    confidence_SN: Tensor | None,
    columns: Mapping[str, Tensor],
    protocol: Protocol,
) -> PromptRows:
    """The results of one draft on one answer.

    `others_2SN` contains the acceptance probabilities under the other `draft_sample_method`, and
    the ratios for block verification.
    """
    num_output = len(text.output_ids)
    # A head reads the target's state of the second-to-last token, which a prompt of one token does
    # not have.
    answer = slice(
        0 if draft.is_autoregressive or len(text.prompt.token_ids) > 1 else 1, num_output
    )
    # Label 0 comes from the prefill, so the first block begins at label 1.
    drafted_T = columns["drafted"][1:num_output].double().numpy()
    most = draft.max_tokens or protocol.most_tokens

    numbers = [k for k in protocol.num_speculative_tokens if k <= most]

    def lay_out(rates_SN: Tensor) -> NDArray[np.float64]:
        return _block_table(rates_SN, num_output, draft.is_autoregressive, protocol.most_tokens)

    def count(accept_SN: Tensor, *, is_block: bool = False) -> dict[int, ExpectedCounts]:
        accept_TK = lay_out(accept_SN)
        accept_TK = verify_as_block(accept_TK) if is_block else accept_TK
        return {k: expected_blocks(accept_TK[:, :k], num_output, drafted_T) for k in numbers}

    return PromptRows(
        num_output_tokens=num_output,
        num_rows=answer.stop - answer.start,
        alpha_sum=float(columns["alpha"][answer].double().sum()),
        alpha_greedy_sum=float(columns["alpha_greedy"][answer].double().sum()),
        counts=count(served_SN),
        other_counts={} if others_2SN is None else count(others_2SN[0]),
        block_counts={} if others_2SN is None else count(others_2SN[1], is_block=True),
        adaptive=walk_adaptive(
            lay_out(served_SN)[:, : numbers[-1]], lay_out(confidence_SN)[:, : numbers[-1]]
        )
        if numbers and confidence_SN is not None
        else [],
        by_context=split_by_context(
            lay_out(served_SN)[:, : numbers[-1]],
            num_output,
            len(text.prompt.token_ids),
            drafted_T,
        )
        if numbers
        else {},
    )


def _block_table(
    accept_SN: Tensor, num_output: int, is_autoregressive: bool, most_tokens: int
) -> NDArray[np.float64]:
    """P(accepted) for the j-th token of a block that begins after output token t, [T, K]."""
    num_rows = max(num_output - 1, 0)
    # For an autoregressive draft, S = 1: the same step proposes every token, from later rows.
    steps = accept_SN[:1].expand(most_tokens, -1) if is_autoregressive else accept_SN
    # The block that begins after output token t drafts labels t + 1, t + 2, ... For j = K - 1, the
    # slice ends at label num_output + K - 2. That is why there are K - 1 tokens beyond the answer.
    columns = [step_N[1 + j : 1 + j + num_rows].double().numpy() for j, step_N in enumerate(steps)]
    return np.stack(columns, axis=1)
