"""The log of one running request, which turns verification steps into records.

R = rows, K = kept top-k ids, H = tokens, L = hidden states per token, D = size of a state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from redraft.online.records.record import Constraint, Record, Sampling
from redraft.online.records.states import SCALE_BYTES

# A long answer is sent in segments, so that the learner need not wait for its end.
SEGMENT_ROWS = 512

# Position, branch, draft, probability and log-sum-exp take 4 bytes each, and `accepted` one.
ROW_BYTES = 21  # size of a row in a record, without the top-k

KEPT_STATES = 64
"""Number of hidden states that a segment repeats from the previous one, so that its first rows can
attend to them. There are fewer if they would take more than a quarter of the segment. If all layers
of a head have a window, the segment repeats every state that they read, so these rows are trained
exactly as they are served.
"""


@dataclass(frozen=True, kw_only=True)
class RequestInfo:
    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_ids: frozenset[int]
    domain: str = ""
    tenant: str = ""
    constraints: tuple[Constraint, ...] = ()
    adapter: str = ""
    template_arguments: str = ""
    text_begin: int = 0
    """Index of the first token after the last image. Earlier states are omitted, because a head
    would also need the image's embeddings, which records do not contain.
    """


# Rows and VerifiedStep are created for every request of every step. A dataclass would take five
# times as long.
class Rows(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Reduced logits: top-k and log-sum-exp of every row."""

    topk_ids_RK: NDArray[np.int32]
    topk_log_probs_RK: NDArray[np.float32]
    log_sum_exp_R: NDArray[np.float32]

    def select(self, first: int, count: int) -> Rows:
        kept = slice(first, first + count)
        return Rows(
            topk_ids_RK=self.topk_ids_RK[kept],
            topk_log_probs_RK=self.topk_log_probs_RK[kept],
            log_sum_exp_R=self.log_sum_exp_R[kept],
        )


@dataclass(frozen=True)
class States:
    begin: int
    """Index of the first token of these states in prompt + output."""
    words_HLD: NDArray[np.uint16] | NDArray[np.uint8]
    """bfloat16 bits (numpy has no such dtype) or float8 bits."""

    @property
    def end(self) -> int:
        return self.begin + len(self.words_HLD)

    @property
    def num_bytes(self) -> int:
        return int(self.words_HLD.nbytes)

    def newest(self, num_bytes: int) -> States:
        """Return the states of the newest tokens that fit into `num_bytes`.

        Unless all states fit, the result is a copy, so that the older ones can be freed.
        """
        if self.num_bytes <= num_bytes:
            return self
        kept = self.within(self.end - num_bytes // self.words_HLD[0].nbytes, self.end)
        return States(kept.begin, kept.words_HLD.copy())

    def within(self, begin: int, end: int) -> States:
        """Return the states of the tokens from `begin` up to, but not including, `end`."""
        begin = min(max(begin, self.begin), self.end)
        return States(begin, self.words_HLD[begin - self.begin : max(end, begin) - self.begin])


def join_states(chunks: Sequence[States], end: int, num_bytes: int) -> States | None:
    """Join the states of the last gapless run of tokens before `end` that fits into `num_bytes`.

    If chunks overlap, the later one wins.
    """
    kept: list[States] = []
    for chunk in chunks:
        # After a preemption, the target reads tokens a second time. The later states replace the
        # earlier ones.
        while kept and kept[-1].end > chunk.begin:
            rest = kept.pop().within(0, chunk.begin)
            kept += [rest] if len(rest.words_HLD) else []
        if kept and kept[-1].end != chunk.begin:  # a step was lost
            kept = []
        kept.append(chunk)
    if not kept:
        return None
    whole = States(kept[0].begin, np.concatenate([chunk.words_HLD for chunk in kept])).within(
        0, end
    )
    fitting = whole.newest(num_bytes)
    return fitting if len(fitting.words_HLD) else None


class VerifiedStep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request's rows in one step: one per draft token in order, then the bonus row."""

    start: int
    draft_ids: NDArray[np.int32]
    draft_probs: NDArray[np.float32]
    num_accepted: int
    proposer: int = 0
    """0 if the served version proposed the draft tokens, otherwise LOOKUP or PADDING."""
    rows: Rows

    @property
    def end(self) -> int:
        """Index just after the last token that the step sampled."""
        return self.start + self.num_accepted + 1


@dataclass(kw_only=True)
class RequestLog:
    """State of one running request, from which the next segment is cut."""

    info: RequestInfo
    max_bytes: int
    """Maximum size of a record. If a text is too long, only its newest tokens keep their states."""
    kept_states: int = KEPT_STATES
    """Number of states that a segment repeats for the first rows of the next one."""
    output: list[int] = field(default_factory=list)
    verified: list[VerifiedStep] = field(default_factory=list)
    states: list[States] = field(default_factory=list)
    draft_version: str = ""
    """Version that proposed the draft tokens of the next record."""
    target_version: str = ""
    """Version of the target weights that verified the draft tokens."""
    next_version: str = ""
    """Version loaded in the newest step, which proposes the tokens for the next step."""
    sequence: int = 0
    num_shipped: int = 0
    """Number of output tokens that earlier segments contain."""
    num_sent: int = 0
    """Number of prompt and output tokens in earlier records."""
    is_complete: bool = False
    """Whether the request has ended."""
    is_closed: bool = False
    """Whether nothing more can be recorded, because the request ended or a step was lost."""
    num_rows: int = 0
    """Number of rows in `verified`, including those to be dropped after a preemption."""
    _num_state_bytes: int = 0
    _num_new_bytes: int = 0
    """Size in bytes of the states from the segment's first row on."""

    def append(self, start: int, sampled: list[int], verified: VerifiedStep | None) -> bool:
        """Add one step.

        Return False if earlier steps are missing, because the text is then unknown.
        """
        begin = start - len(self.info.prompt_ids)
        if begin > len(self.output):
            return False
        if begin < len(self.output):
            self._forget(begin)
        if verified is not None:
            self.verified.append(verified)
            self.num_rows += len(verified.draft_ids) + 1
        for token in sampled:
            self.output.append(token)
            # A step may sample tokens past the request's end. The scheduler drops them, and so must
            # the record.
            if token in self.info.stop_ids or len(self.output) >= self.info.max_tokens:
                self.is_complete = True
                break
        return True

    def add_states(self, states: Sequence[States]) -> None:
        """Add the next states, and drop the oldest ones that no longer fit into any record."""
        for chunk in states:
            bytes_of_text = (
                (chunk.end - self.info.text_begin) * chunk.num_bytes // max(1, len(chunk.words_HLD))
            )
            if bytes_of_text <= 0:  # up to an image
                continue
            self.states.append(chunk.newest(min(bytes_of_text, self.max_bytes)))
            self._num_state_bytes += self.states[-1].num_bytes
            # The first row is predicted from the token before it. States of earlier tokens, e.g. of
            # a prompt, are not new.
            begin = self.verified[0].start - 1 if self.verified else chunk.end
            self._num_new_bytes += self.states[-1].within(begin, chunk.end).num_bytes
            # Drop the oldest chunk only if the others are enough to fill a record.
            while self._num_state_bytes - self.states[0].num_bytes >= self.max_bytes:
                self._num_state_bytes -= self.states.pop(0).num_bytes

    def drop_states(self) -> None:
        self.states, self._num_state_bytes, self._num_new_bytes = [], 0, 0

    @property
    def is_full(self) -> bool:
        """Whether a record is due.

        It is due if it has many rows, or if its new states fill three quarters of the room for
        states. The last quarter is reserved for earlier states.
        """
        return self.num_rows >= SEGMENT_ROWS or 4 * self._num_new_bytes >= 3 * self._state_budget()

    def _state_budget(self) -> int:
        """Return the number of bytes for hidden states in the next record.

        At least a quarter of the record is for states, because a long text can be compressed.
        """
        text = 4 * (len(self.info.prompt_ids) + len(self.output) - self.num_sent)
        row = ROW_BYTES + 8 * self.verified[-1].rows.topk_ids_RK.shape[1] if self.verified else 0
        return max(self.max_bytes // 4, self.max_bytes - text - self.num_rows * row)

    def cut_segment(self, server_id: str, fingerprint: str) -> Record | None:
        """Return a record of everything since the last segment, or None if there is no row yet.

        The call starts the next segment.
        """
        # 1. First, compute everything that depends on the rows, because they are dropped below.
        columns = self._collect_columns()
        states = join_states(
            self.states, len(self.info.prompt_ids) + len(self.output), self._state_budget()
        )
        context = self.info.prompt_ids + self.output[: self.num_shipped]
        output = self.output[self.num_shipped :]
        self.num_shipped = len(self.output)
        self.verified, self.num_rows = [], 0
        # There are no rows yet, so the text becomes context of the next record, and the states wait
        # for it.
        if not columns:
            return None
        # 2. Start the next segment with no rows and with the last few states of this one.
        self.sequence += 1
        num_left_out, self.num_sent = self.num_sent, len(context) + len(output)
        self.drop_states()
        if states is not None:
            kept_bytes = self.kept_states * states.words_HLD[0].nbytes
            self.add_states([states.newest(min(kept_bytes, self.max_bytes // 4))])
        return Record(
            server_id=server_id,
            request_id=self.info.request_id,
            sequence=self.sequence - 1,
            time_s=time.time(),
            domain=self.info.domain,
            tenant=self.info.tenant,
            target_fingerprint=fingerprint,
            target_version=self.target_version,
            draft_version=self.draft_version,
            sampling=self.info.sampling,
            constraints=self.info.constraints,
            adapter=self.info.adapter,
            template_arguments=self.info.template_arguments,
            num_prompt_tokens=len(self.info.prompt_ids),
            top_k=columns["row_topk_ids"].shape[1],
            context=_pack_ids(context[num_left_out:]),
            context_begin=num_left_out,
            output=_pack_ids(output),
            **_encode_arrays(columns, states),
        )

    def _forget(self, begin: int) -> None:
        """Drop the output from `begin` on.

        The scheduler discards these tokens when it preempts a request.
        """
        del self.output[begin:]
        first_lost = len(self.info.prompt_ids) + begin
        self.verified = [step for step in self.verified if step.end <= first_lost]
        self.states = [
            states.within(0, first_lost) for states in self.states if states.begin < first_lost
        ]
        self._num_state_bytes = sum(states.num_bytes for states in self.states)
        # An earlier record may contain text that was discarded. The receiver truncates it at the
        # next `context_begin`.
        self.num_shipped, self.num_sent = (
            min(self.num_shipped, begin),
            min(self.num_sent, first_lost),
        )
        self.is_complete = False

    def _collect_columns(self) -> dict[str, NDArray[Any]]:
        """Return the record's columns without rows beyond the end of the request.

        The result is empty if no row remains.
        """
        columns = _join_columns(self.verified) if self.verified else {}
        if not columns:
            return {}
        # position - branch is a position in the text. Rows beyond the text's end follow tokens that
        # no client received.
        kept = columns["row_positions"] - columns["row_branches"] < len(self.info.prompt_ids) + len(
            self.output
        )
        return {name: column[kept] for name, column in columns.items()} if kept.any() else {}


def _join_columns(steps: Sequence[VerifiedStep]) -> dict[str, NDArray[Any]]:
    """Join the rows of many steps at once.

    A single step has so few rows that numpy's call overhead would exceed the work.
    """
    # E.g. a step at 11 with drafts a, b, c, of which only a is accepted: positions 11 12 13 14
    # branches 0 0 1 2   drafts a b c -1   accepted 1 0 0 0
    counts = np.array([len(step.draft_ids) + 1 for step in steps])
    last_R = np.cumsum(counts) - 1
    index_R = (np.arange(counts.sum()) - np.repeat(last_R + 1 - counts, counts)).astype(np.int32)
    start_R = np.repeat(np.array([step.start for step in steps], np.int32), counts)
    num_accepted_R = np.repeat(np.array([step.num_accepted for step in steps], np.int32), counts)
    # The bonus row at the end of a step has no draft token: it gets -1 and NaN.
    drafts_R, draft_probs_R = (
        np.full(len(index_R), -1, np.int32),
        np.full(len(index_R), np.nan, np.float32),
    )
    has_draft_R = np.ones(len(index_R), bool)
    has_draft_R[last_R] = False
    drafts_R[has_draft_R] = np.concatenate([step.draft_ids for step in steps])
    draft_probs_R[has_draft_R] = np.concatenate([step.draft_probs for step in steps])
    # Row i follows i draft tokens. The accepted tokens are part of the text. Each later draft token
    # leads further into the rejected branch.
    return {
        "row_positions": start_R + index_R,
        "row_branches": np.maximum(0, index_R - num_accepted_R),
        "row_drafts": drafts_R,
        "row_draft_probs": draft_probs_R,
        "row_accepted": (index_R < num_accepted_R).astype(np.uint8),
        "row_proposers": np.repeat(np.array([step.proposer for step in steps], np.uint8), counts),
        "row_topk_ids": np.concatenate([step.rows.topk_ids_RK for step in steps]),
        "row_topk_log_probs": np.concatenate([step.rows.topk_log_probs_RK for step in steps]),
        "row_log_sum_exp": np.concatenate([step.rows.log_sum_exp_R for step in steps]),
    }


def _encode_arrays(columns: dict[str, NDArray[Any]], states: States | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: np.ascontiguousarray(column).tobytes() for name, column in columns.items()
    }
    if not columns["row_proposers"].any():
        del fields["row_proposers"]
    if states is not None:
        num_states, size = states.words_HLD.shape[1:]
        if states.words_HLD.dtype == np.uint8:
            size -= SCALE_BYTES
            fields["hidden_format"] = "float8"
        fields |= {
            "hidden_begin": states.begin,
            "hidden_shape": (num_states, size),
            "hidden": states.words_HLD.tobytes(),
        }
    return fields


def _pack_ids(ids: list[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()
