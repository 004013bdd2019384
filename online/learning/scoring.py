"""Scores of a draft on held-out requests, teacher-forced on the target's answers.

The gate compares these scores.

R = rows of a text, N = rows of a chunk, K = kept top-k ids, V = vocabulary, W = draft vocabulary, J
= draft tokens of a block.

The records contain the target's distribution at every output token, to which the request's
penalties are applied. One pass of a draft over the text gives the acceptance probability a_r of the
token for row r. Dividing the rows into draft blocks as the engine does gives the expected numbers
of drafts and accepted tokens. At temperature 0, every a_r is 0 or 1, and the result equals the
engine's counts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.distill.data.modes import name_mode
from redraft.distill.signal.transfer import to_device
from redraft.engine.counts import AcceptanceCounts, add_by_context, split_by_context
from redraft.eval.forecast.rows import ROWS_A_CHUNK, step_rates, take_draft_steps, target_rows
from redraft.heads.draft import Draft, DraftStep, TargetSignal
from redraft.heads.family import Reads
from redraft.online.learning.evidence import OTHER, count_tenants
from redraft.online.learning.penalties import penalise
from redraft.online.learning.replay import (
    RecordedBatch,
    TrainingSequence,
    make_batches,
    training_sequence,
)
from redraft.online.records.origin import unpack_arguments
from redraft.online.records.record import Record, Sampling

Array = NDArray[np.float64]
Method = Literal["greedy", "probabilistic"]
NO_MASS = -1e4  # Logarithm of a probability that is 0 in float32.
CPU = torch.device("cpu")

ByContext = dict[int, AcceptanceCounts]
"""Counts by the context length before a block, keyed as by `split_by_context`."""


def score(draft: Draft, records: Sequence[Record], **settings: Any) -> list[AcceptanceCounts]:
    """Return the sum of `score_by_context` for every record."""
    return [_sum(score_by_context(draft, record, **settings)) for record in records]


def score_by_context(
    draft: Draft,
    record: Record,
    *,
    num_speculative_tokens: int,
    method: Method,
    sequence_length: int,
    reads: Reads = "nothing",
    needed_states: int = 0,
    device: torch.device = CPU,
) -> ByContext:
    """Return the expected numbers of drafts and accepted draft tokens.

    They are what an engine would count if `draft`, which is on `device`, drafted for the record's
    request. `needed_states` is explained at `make_batches`.

    Raises:
        ValueError: the draft has fewer draft steps than `num_speculative_tokens`.
    """
    batch = _make_batch(record, sequence_length, reads, needed_states)
    if batch is None:
        return {}
    moved = to_device(batch, device)
    rows = score_rows(draft, moved, record.sampling, method, num_speculative_tokens)
    return walk_stretches(*rows, int(batch.position_ids_BT[0, 0]))


def _make_batch(
    record: Record, sequence_length: int, reads: Reads, needed_states: int
) -> RecordedBatch | None:
    """Return the record's text, with the target's distributions as its request changed them.

    Return None if the text has no rows.
    """
    text = training_sequence(penalise(record))
    if record.constraints:
        text = hold_to_text(text)
    if not len(text.rows_R):
        return None
    (batch,) = make_batches(
        [text],
        num_batches=1,
        sequence_length=sequence_length,
        seed=0,
        reads=reads,
        needed_states=needed_states,
    )
    return batch


def hold_to_text(text: TrainingSequence) -> TrainingSequence:
    """Return the text with all of each row's probability on the token that the engine wrote.

    The tokens forbidden by a constraint are not recorded, but the written token was drawn from the
    constrained distribution p. So 1[draft token = written token] has mean p(draft token), which is
    the acceptance of a greedy draft. For a sampled draft it is a lower bound.
    """
    kept_R = text.rows_R + 1 < len(text.input_ids_T)  # the token after the last one is unknown
    rows_R, ids_RK = text.rows_R[kept_R], text.topk_ids_RK[kept_R]
    written_R = text.input_ids_T[rows_R + 1]
    # Each id must occur once in its row, so the best one takes the place of the written one.
    ids_RK = np.where(ids_RK == written_R[:, None], ids_RK[:, :1], ids_RK)
    ids_RK[:, 0] = written_R
    log_probs_RK = np.full(ids_RK.shape, NO_MASS, np.float32)
    log_probs_RK[:, 0] = 0
    return replace(text, rows_R=rows_R, topk_ids_RK=ids_RK, topk_log_probs_RK=log_probs_RK)


Request = tuple[str, str | int]
"""(server, request id), or (tenant, conversation) if the scores of its requests are summed."""


@dataclass(frozen=True)
class RequestScore:
    domain: str
    counts: AcceptanceCounts
    """Sum over the request's segments."""
    target: str = ""
    """Weights that verified the last segment, as in `Record.target`."""
    mode: str = ""
    """`name_mode` of the template arguments."""
    tenant: str = ""
    by_context: ByContext = field(default_factory=dict)
    """The parts of `counts`."""


def score_segment(draft: Draft, record: Record, **settings: Any) -> tuple[Request, RequestScore]:
    """The request of a record, and the score of this segment of it."""
    by_context = score_by_context(draft, record, **settings)
    mode = name_mode(unpack_arguments(record.template_arguments))
    whole = _sum(by_context)
    scored = RequestScore(record.domain, whole, record.target, mode, record.tenant, by_context)
    return (record.server_id, record.request_id), scored


def sum_segments(segments: Iterable[tuple[Request, RequestScore]]) -> dict[Request, RequestScore]:
    """Return the score of every request or conversation, in the order of first segments."""
    found: dict[Request, RequestScore] = {}
    for key, segment in segments:
        # Counts are summed over segments. A mean of rates would give a short segment the weight of
        # a long one.
        before = found.get(key)
        if before is not None:
            segment = replace(
                segment,
                counts=before.counts + segment.counts,
                by_context=add_by_context([before.by_context, segment.by_context]),
            )
        found[key] = segment
    return found


def pair_scores(
    candidate: Mapping[Request, RequestScore],
    incumbent: Mapping[Request, RequestScore],
    names: Mapping[str, str] | None = None,
) -> tuple[list[AcceptanceCounts], list[AcceptanceCounts], list[str], list[str]]:
    """Pair the counts of the requests that can be compared, for candidate and incumbent.

    Returns (candidate's counts, incumbent's counts, domains by `names`, thinking modes). A request
    is left out if its records expired between the two scorings, or if the incumbent's score is not
    finite: the served draft is known to be finite, so the record must be the cause. A request whose
    score is non-finite only for the candidate is kept, as evidence against the candidate.
    """
    compared = _list_compared(candidate, incumbent)
    return (
        [candidate[key].counts for key in compared],
        [incumbent[key].counts for key in compared],
        [(names or {}).get(incumbent[key].domain, OTHER) for key in compared],
        name_modes([incumbent[key] for key in compared]),
    )


def _list_compared(
    candidate: Mapping[Request, RequestScore], incumbent: Mapping[Request, RequestScore]
) -> list[Request]:
    return [
        key for key, score in incumbent.items() if key in candidate and _is_finite(score.counts)
    ]


def pair_contexts(
    candidate: Mapping[Request, RequestScore], incumbent: Mapping[Request, RequestScore]
) -> dict[int, tuple[list[AcceptanceCounts], list[AcceptanceCounts]]]:
    """The counts of `pair_scores`, for candidate and incumbent, by context length.

    As with modes, a range that only one of several tenants reaches is left out.
    """
    compared = _list_compared(candidate, incumbent)
    wanted = min(2, count_tenants([incumbent[key].tenant for key in compared]))
    found = {}
    for power in sorted({power for key in compared for power in incumbent[key].by_context}):
        keys = [
            key
            for key in compared
            if all(power in side[key].by_context for side in (candidate, incumbent))
        ]
        if len({incumbent[key].tenant for key in keys}) >= wanted:
            ours, theirs = (
                [side[key].by_context[power] for key in keys] for side in (candidate, incumbent)
            )
            found[power] = ours, theirs
    return found


def name_modes(scores: Sequence[RequestScore]) -> list[str]:
    """Return each request's thinking mode for the evaluation.

    As with domains, a mode that only one of several tenants uses is not evaluated separately,
    because any client can request a mode.
    """
    tenants: dict[str, set[str]] = {}
    for score in scores:
        tenants.setdefault(score.mode, set()).add(score.tenant)
    wanted = min(2, count_tenants([score.tenant for score in scores]))
    return [
        (score.mode or "default mode") if len(tenants[score.mode]) >= wanted else OTHER
        for score in scores
    ]


def list_rows(
    scores: Iterable[RequestScore], names: Mapping[str, str]
) -> list[tuple[str, float, float]]:
    """List the domain by `names`, drafts and accepted tokens of every request with drafts.

    Requests without drafts give no evidence about a draft.
    """
    usable = [score for score in scores if _is_finite(score.counts) and score.counts.num_drafts > 0]
    return [
        (names.get(one.domain, OTHER), one.counts.num_drafts, one.counts.num_accepted)
        for one in usable
    ]


def _is_finite(counts: AcceptanceCounts) -> bool:
    return math.isfinite(counts.num_drafts) and math.isfinite(counts.num_accepted)


@torch.no_grad()
def score_rows(
    draft: Draft,
    batch: RecordedBatch,
    sampling: Sampling,
    method: Method,
    num_speculative_tokens: int,
) -> tuple[NDArray[np.int64], Array]:
    """Compute the rows and probabilities from which the single text in `batch` is scored.

    Returns (rows at which a block can begin [R], acceptance probabilities [J, R]). Entry [j, r] is
    the acceptance probability of row r's token as the j-th token in a block, if all tokens before
    it were accepted. An autoregressive draft has the same probability for every j.
    """
    steps = take_draft_steps(draft, batch, batch.signal, num_speculative_tokens)
    by_step = [_alpha_by_row(step, batch.signal, sampling, method) for step in steps]
    rows_R = np.array(sorted(by_step[0]), np.int64)
    # 0 if a later step has no such row. No block reaches that far.
    accepted_JR = np.array(
        [[accepted.get(row, 0.0) for row in rows_R.tolist()] for accepted in by_step]
    )
    return rows_R, np.broadcast_to(accepted_JR, (num_speculative_tokens, len(rows_R)))


def _alpha_by_row(
    step: DraftStep, signal: TargetSignal, sampling: Sampling, method: Method
) -> dict[int, float]:
    target = signal.distribution
    served = sampling.served()
    # For a one-hot q, sum_v min(p, q) is p(argmax q), the acceptance of a greedy draft.
    temperature = served.temperature if method == "probabilistic" else 0.0
    alphas: dict[int, float] = {}
    for rows_N in torch.split(step.mask_BT.flatten().nonzero().squeeze(-1), ROWS_A_CHUNK):
        target_rows_N = rows_N + step.shift
        kept = target_rows(target, target_rows_N, served)
        # A recorded distribution may add up to more than 1, because of rounding or a malicious
        # sender.
        alpha_N = step_rates(step, rows_N, kept, temperature).alpha.clamp(0, 1)
        # `tolist` fetches a whole chunk from the GPU at once; `.item()` would wait for every row.
        alphas.update(zip(target_rows_N.tolist(), alpha_N.double().tolist(), strict=True))
    return alphas


def walk_stretches(rows_R: NDArray[np.int64], accepted_JR: Array, position: int = 0) -> ByContext:
    """Return the expected drafts and accepted tokens over all stretches of consecutive rows.

    A block that would extend beyond its stretch is left out. `position` is the position of row 0.
    """
    # One token more, because `split_by_context` also counts the prefill's token, after which the
    # first block begins. This token is the first row of the stretch.
    walked = add_by_context(
        split_by_context(accept_TK, len(accept_TK) + 1, position + row)
        for row, accept_TK in _list_blocks(rows_R, accepted_JR)
    )
    return {
        power: AcceptanceCounts(num_drafts=counts.num_drafts, num_accepted=counts.num_accepted)
        for power, counts in walked.items()
    }


def _sum(by_context: ByContext) -> AcceptanceCounts:
    return sum(by_context.values(), AcceptanceCounts.zero())


def _list_blocks(rows_R: NDArray[np.int64], values_JR: Array) -> list[tuple[int, Array]]:
    """List the first row of each stretch, and its values by block, [T, K].

    Token j of a block that begins at row r is in row r + j.
    """
    tables = []
    # E.g. with rows 3, 4, 5, 9 and J = 2, blocks begin at rows 3 and 4, and no block fits into the
    # stretch of row 9.
    begins = np.flatnonzero(np.diff(rows_R) != 1) + 1
    firsts = rows_R[np.append(0, begins)] if len(rows_R) else [0]
    for first, stretch_JR in zip(firsts, np.split(values_JR, begins, axis=1), strict=True):
        num_blocks = max(0, stretch_JR.shape[1] - len(stretch_JR) + 1)
        # Turn diagonals into rows: token j of block t is at [j, t + j] before, and at [t, j]
        # afterwards.
        table_TK = np.stack(
            [row_R[j : j + num_blocks] for j, row_R in enumerate(stretch_JR)], axis=1
        )
        tables.append((int(first), table_TK))
    return tables
