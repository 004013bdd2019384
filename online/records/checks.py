"""Checks of a decoded record.

A CRC and types prove that nothing was damaged in transit, but not that the sender was correct.

Every later use relies on these checks: array lengths agree, rows are within the text, numbers are
finite, an engine can have served the parameters, and the names can be written to the journal, the
database and the metrics unchanged.

R = rows of a record
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from redraft.online.records.origin import MAX_ARGUMENTS_CHARS, MAX_LABEL_CHARS
from redraft.online.records.states import BLOCK, state_bytes

if TYPE_CHECKING:
    from redraft.online.records.record import Record, Sampling

# Maximum length of a version, server or fingerprint; the journal rejects longer ones.
MAX_NAME_CHARS = 200
# Maximum length of a request id. Clients choose part of it, with X-Request-Id.
MAX_REQUEST_ID_CHARS = 1024
MAX_TOP_K = 1 << 20
MAX_STATE_SIZE = 1 << 20
"""Maximum number of kept ids, of states per token, and of numbers per state. These limits are far
above the sizes of any model, and only bound products of malicious sizes.
"""

_NUL = re.compile(r"\0")
_CONTROL = re.compile(r"[\0-\x1f\x7f-\x9f]")
_SPACE = re.compile(rf"\s|{_CONTROL.pattern}")
IDENTIFIERS = (
    ("server_id", MAX_NAME_CHARS, _CONTROL),
    ("target_fingerprint", MAX_NAME_CHARS, _CONTROL),
    # The journal allows no white space in an identifier. An empty version is written as `none`.
    ("target_version", MAX_NAME_CHARS, _SPACE),
    ("draft_version", MAX_NAME_CHARS, _SPACE),
    ("request_id", MAX_REQUEST_ID_CHARS, _CONTROL),
    # Labels are escaped wherever they are used, and may be in any script. SQLite's shell truncates
    # a text at a NUL.
    ("domain", MAX_LABEL_CHARS, _NUL),
    ("tenant", MAX_LABEL_CHARS, _NUL),
    ("adapter", MAX_NAME_CHARS, _CONTROL),
    ("template_arguments", MAX_ARGUMENTS_CHARS, _CONTROL),
)
"""Name, maximum length and forbidden characters. The forbidden characters are given as regular
expressions, which are fast, because every record is checked.
"""

EXPONENT = 0x7F80  # Exponent bits of a bfloat16. All of them set means NaN or an infinity.


class Fault(NamedTuple):
    reason: str
    """Reason under which the record is counted, a label of the metrics."""
    sentence: str


def find_fault(record: Record) -> Fault | None:
    # The order matters, because each check relies on those before it.
    for reason, find in (
        ("corrupt", _find_wrong_length),
        ("corrupt", _find_wrong_text),
        ("corrupt", _find_wrong_states),
        ("corrupt", _find_wrong_row),
        ("bad_identifier", _find_bad_identifier),
        ("bad_sampling", lambda record: find_bad_sampling(record.sampling)),
        ("bad_probabilities", _find_bad_probability),
        ("not_finite", _find_bad_state),
    ):
        if sentence := find(record):
            return Fault(reason, sentence)
    return None


def find_bad_sampling(sampling: Sampling) -> str:
    """Describe a parameter that vLLM would have rejected; empty if it accepts all of them."""
    # These are the ranges of vLLM's SamplingParams. A comparison with NaN is false, so NaN is in no
    # range.
    within = {
        "temperature": 0 <= sampling.temperature <= 2,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= -1,
        "min_p": 0 <= sampling.min_p <= 1,
        "presence_penalty": -2 <= sampling.presence_penalty <= 2,
        "frequency_penalty": -2 <= sampling.frequency_penalty <= 2,
        "repetition_penalty": 0 < sampling.repetition_penalty < math.inf,
    }
    for name, is_within in within.items():
        if not is_within:
            return f"no engine serves a request with {name} {getattr(sampling, name)}"
    return ""


def _find_wrong_length(record: Record) -> str:
    """Describe a field whose length does not fit the number of rows; empty if all fit."""
    if not 1 <= record.top_k <= MAX_TOP_K:
        return f"inconsistent record: top_k is {record.top_k}"
    rows = len(record.row_positions) // 4
    one_number = (
        "row_positions",
        "row_branches",
        "row_drafts",
        "row_draft_probs",
        "row_log_sum_exp",
    )
    wanted = dict.fromkeys(one_number, 4 * rows) | {"row_accepted": rows}
    wanted |= dict.fromkeys(("row_topk_ids", "row_topk_log_probs"), 4 * rows * record.top_k)
    if record.row_proposers:
        wanted["row_proposers"] = rows
    for name, size in wanted.items():
        if len(getattr(record, name)) != size:
            return f"inconsistent record: {name} has {len(getattr(record, name))} bytes, not {size}"
    return ""


def _find_wrong_text(record: Record) -> str:
    if len(record.context) % 4 or len(record.output) % 4:
        return "inconsistent record: the text is not a whole number of int32 ids"
    if not 0 <= record.context_begin < 1 << 31:
        return f"inconsistent record: the context begins at token {record.context_begin}"
    tokens = record.context_begin + len(record.context) // 4
    if not 0 <= record.num_prompt_tokens <= tokens:
        return (
            f"inconsistent record: a prompt of {record.num_prompt_tokens} tokens does not "
            f"fit a context of {tokens}"
        )
    if not (1 if record.context_begin else 0) <= record.sequence < 1 << 31:
        return f"inconsistent record: segment number {record.sequence}"
    if not math.isfinite(record.time_s):
        return "inconsistent record: time_s is not finite"
    return ""


def _find_wrong_states(record: Record) -> str:
    tokens = record.num_tokens
    num_states, size = record.hidden_shape
    if not (
        0 <= num_states <= MAX_STATE_SIZE
        and 0 <= size <= MAX_STATE_SIZE
        and 0 <= record.hidden_begin <= tokens
    ):
        return "inconsistent record: the hidden states have an invalid shape"
    rest = len(record.hidden) % max(1, num_states * state_bytes(record.hidden_format, size))
    if record.hidden and (
        min(num_states, size) < 1 or rest or record.hidden_begin > tokens - record.num_hidden
    ):
        return "inconsistent record: the hidden states do not fit the tokens"
    return ""


def _find_wrong_row(record: Record) -> str:
    """Describe a row outside the text, or one whose branch does not continue earlier drafts."""
    tokens, rows = record.num_tokens, len(record.positions)
    hanging_R = record.branches
    # A row on a branch of length b > 0 must come right after a row of length b - 1, one position
    # further, and that row must have a draft token. [:rows] is needed for a record without rows.
    follows_R = np.concatenate([[0], hanging_R[:-1] + 1])[:rows]
    is_next_R = (np.diff(record.positions) == 1) & (record.draft_ids[:-1] != -1)
    follows_draft_R = np.concatenate([[False], is_next_R])[:rows]
    if ((hanging_R != 0) & ((hanging_R != follows_R) | ~follows_draft_R)).any():
        return "inconsistent record: a row follows draft tokens that do not precede it"
    # Number of tokens of the true text before the row. A row needs at least one, and at most as
    # many as exist.
    known_R = record.positions - hanging_R
    if ((known_R < 1) | (known_R > tokens)).any():
        return f"inconsistent record: a row is outside its text of {tokens} tokens"
    return ""


def _find_bad_identifier(record: Record) -> str:
    """Describe a name that is too long or has unsafe characters.

    Such characters would break a line, a label or a query.
    """
    for name, max_chars, forbidden in IDENTIFIERS:
        value = getattr(record, name)
        if len(value) > max_chars:
            return f"{name} has {len(value)} characters, but at most {max_chars} are allowed"
        if forbidden.search(value):
            return f"{name} contains a space or a control character"
    return ""


def _find_bad_probability(record: Record) -> str:
    if not np.isfinite(record.topk_log_probs).all():
        return "log-probabilities that are not finite"
    # NaN means unknown in these two fields, but an infinity has no meaning.
    if np.isinf(record.draft_probs).any() or np.isinf(record.log_sum_exp).any():
        return "draft probabilities or log-sum-exp that are infinite"
    return ""


def _find_bad_state(record: Record) -> str:
    words = record.hidden_words.reshape(-1)
    for begin in range(0, len(words), BLOCK):
        if (words[begin : begin + BLOCK] & EXPONENT == EXPONENT).any():
            return "hidden states that are not finite"
    return ""
