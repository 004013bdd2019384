"""Sessions with tools: the token ids of their turns, and tool results that match a target's calls.

P = tokens of a prompt, A = tokens of an answer
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from redraft.distill.data.messages import Message
from redraft.distill.data.rows import UnusableRowError

KEYS = {"kept", "prompt", "answer"}


class TokenTurn(NamedTuple):
    """The prompt tokens that a server received, and the tokens that the target wrote."""

    prompt_P: NDArray[np.int32]
    answer_A: NDArray[np.int32]
    """Token ids of the answer, including the end of turn unless the answer was truncated."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_P) + len(self.answer_A)


class StoredTurn(NamedTuple):
    """A turn in a session, of which only the new tokens are stored."""

    kept: int
    """Number of prompt tokens shared with the start of the previous turn."""
    prompt_P: NDArray[np.int32]
    """The remaining prompt tokens."""
    answer_A: NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        return self.kept + len(self.prompt_P) + len(self.answer_A)


def pack_turns(turns: Iterable[TokenTurn]) -> list[dict[str, Any]]:
    """Convert the turns for JSON, without the prompt prefix shared with the previous turn.

    Otherwise, a session with many turns would repeat its text in each of them.
    """
    packed, before = [], np.zeros(0, np.int32)
    for prompt_P, answer_A in turns:
        size = min(len(prompt_P), len(before))
        differs = np.flatnonzero(prompt_P[:size] != before[:size])
        kept = int(differs[0]) if len(differs) else size
        packed.append(
            {"kept": kept, "prompt": prompt_P[kept:].tolist(), "answer": answer_A.tolist()}
        )
        before = np.concatenate([prompt_P, answer_A])
    return packed


def read_turns(rows: Sequence[Any]) -> list[StoredTurn]:
    """Read the turns that `pack_turns` wrote.

    Raises:
        UnusableRowError: `pack_turns` did not write them.
    """
    turns: list[StoredTurn] = []
    length = 0
    for row in rows:
        try:
            kept, ids = row["kept"], [np.array(row[key]) for key in ("prompt", "answer")]
            is_whole = 0 <= kept <= length and all(map(are_ids, ids))
        except (TypeError, KeyError, ValueError):
            is_whole = False
        if not is_whole:
            raise UnusableRowError("with token ids that were not written by redraft regenerate")
        turns.append(StoredTurn(int(kept), *(part.astype(np.int32) for part in ids)))
        length = turns[-1].num_tokens
    return turns


def split_turns(ids: Any, mask: Any) -> list[StoredTurn]:
    """Split a conversation by its loss mask, which is 1 for the tokens of answers.

    Returns an empty list for any other values, and for an answer without a prompt.
    """
    try:
        ids_T, mask_T = np.array(ids), np.array(mask)
    except ValueError:  # lists of different lengths
        return []
    if not (are_ids(ids_T) and are_ids(mask_T)) or ids_T.shape != mask_T.shape:
        return []
    # E.g. the mask 0 0 1 1 0 1 has edges at 2, 4, 5 and 6.
    edges = np.flatnonzero(np.diff(mask_T, prepend=0, append=0)).tolist()
    if not edges or edges[0] == 0 or mask_T.max() > 1:
        return []
    prompts = zip([0, *edges[1::2]], edges[::2], edges[1::2], strict=False)
    ids_T = ids_T.astype(np.int32)
    return [StoredTurn(end, ids_T[end:start], ids_T[start:stop]) for end, start, stop in prompts]


def expand_turns(turns: Iterable[StoredTurn]) -> Iterator[TokenTurn]:
    """Yield the turns one by one, with complete prompts."""
    before = np.zeros(0, np.int32)
    for kept, prompt_P, answer_A in turns:
        turn = TokenTurn(np.concatenate([before[:kept], prompt_P]), answer_A)
        yield turn
        before = np.concatenate(turn)


def are_ids(part: NDArray[Any]) -> bool:
    if part.ndim != 1 or (part.size and part.dtype.kind != "i"):
        return False
    return not part.size or bool(part.min() >= 0 and part.max() < 1 << 31)


def take_results(messages: Sequence[Message]) -> list[Message]:
    """Return the tool results at the beginning of `messages`."""
    return list(takewhile(lambda message: message["role"] == "tool", messages))


def fit_results(
    answer: Message, recorded: Message, results: Sequence[Message]
) -> list[Message] | str:
    """Match the recorded results to the target's calls, or return the reason why they do not match.

    `recorded` is the message that the data has in place of the target's `answer`. The returned
    results refer to the target's calls, and are in the order of these calls.
    """
    ours, theirs = answer.get("tool_calls", []), recorded.get("tool_calls", [])
    reasons = {
        "where the target calls a tool and the data does not": ours and not theirs,
        "where the data calls a tool and the target does not": theirs and not ours,
        "where the target makes a different call": _functions(ours) != _functions(theirs),
        "where the data has no result for a call": len(results) < len(theirs),
        "where the data has a result without a call": len(results) > len(theirs),
    }
    if reason := next((why for why, applies in reasons.items() if applies), ""):
        return reason
    places = {call["id"]: place for place, call in enumerate(theirs) if "id" in call}
    named = [places.get(result.get("tool_call_id", ""), -1) for result in results]
    in_order = [*range(len(results))]
    # Without names, or with names of different calls, the results are in the order of the calls.
    order = named if sorted(named) == in_order else in_order
    fitted = list[Message](results)
    for place, result in zip(order, results, strict=True):
        rest = {key: value for key, value in result.items() if key != "tool_call_id"}
        name = {"tool_call_id": ours[place]["id"]} if "id" in ours[place] else {}
        fitted[place] = rest | name
    return fitted


def _functions(calls: Sequence[dict[str, Any]]) -> list[str]:
    return [json.dumps(call["function"], sort_keys=True) for call in calls]
