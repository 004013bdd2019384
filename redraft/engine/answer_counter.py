"""Live counts without the lookup: the answer counter and the head's measured acceptance."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from redraft.engine.live_file import LiveFile
from redraft.heads.families.retrieval import Live, Text

# A head pays off from this acceptance of the first token. A pass of the head and a row to
# verify take about a fifth of a step.
LEAST_HEAD = 0.2
# If the head's acceptance is below LEAST_HEAD, or a lookup drafts, one in this many drafts still
# comes from the head, to measure it.
TRIED = 32
FIRST = 64  # number of a new head's drafts before its acceptance is used
REMEMBERED = 256  # both sums are halved after this many drafts
COUNTED_AT_ONCE = 48  # number of counting operations per engine step
MOST_WAITING = 64  # maximum number of answers that wait to be counted; any others are not counted
# Number of last tokens counted in a text, because each token is looked up in all earlier ones.
MOST_TOKENS = 4096


class AnswerCounter:
    """Counts finished answers, a few tokens in each engine step.

    All ranks of a server must have equal counts, because a lookup decides whether the head runs.
    """

    def __init__(self, requests: Mapping[str, Any], draft: Live) -> None:
        """Take the running `requests` by name, as stored by the runner."""
        self.draft, self.requests = draft, requests
        self.file: LiveFile | None = None
        self.counts = Counter[
            str
            # Numbers of answers by outcome (counted, not_allowed, too_short, passed_over,
            # failed_...), shown in the status.
        ]()
        # Returns the owner of a request's text. None if the text must not be used for drafts. Set
        # by the plugin.
        self.find_owner: Callable[[Any], bytes | None] = lambda request: None
        # Cached owners of running requests.
        self._owners: dict[str, bytes | None] = {}
        self._ended: dict[str, Text] = {}
        self._waiting = deque[tuple[bytes, Iterator[None]]]()

    def owner(self, name: str, request: Any) -> bytes | None:
        """The owner of a request's answer, and of the text that its drafts come from."""
        if name not in self._owners:
            self._owners[name] = None
            with self._surviving():
                self._owners[name] = self.find_owner(request)
        return self._owners[name]

    def end(self, name: str, request: Any) -> None:
        """Queue the answer of a finished request."""
        owner = None if request is None else self.owner(name, request)
        self._owners.pop(name, None)
        if request is None or request.prompt_token_ids is None:
            return
        with self._surviving():
            if owner is None:
                self.counts["not_allowed"] += 1
                return
            prompt, answer = (
                request.prompt_token_ids,
                cut_answer(request.output_token_ids, request.sampling_params),
            )
            if len(answer) < 2:
                # No draft can speed up such an answer, and many of them, e.g. beam search steps,
                # would displace the others from the window.
                self.counts["too_short"] += 1
                return
            ids = np.array([*prompt[-MOST_TOKENS:], *answer], np.int32)[-MOST_TOKENS:]
            is_label = np.arange(len(ids)) >= len(ids) - len(answer)
            self._ended[name] = Text(ids=ids, is_label=is_label, owner=owner)

    def forget(self, beginning: bytes) -> int:
        """Delete all text of owners whose names start with `beginning`. Return the number of runs.

        The answers to their running requests are not counted at all.
        """

        def keeps(owner: bytes | None) -> bool:
            return owner is None or not owner.startswith(beginning)

        for name, request in self.requests.items():
            if not keeps(self.owner(name, request)):
                self._owners[name] = None
        self._ended = {name: text for name, text in self._ended.items() if keeps(text.owner)}
        self._waiting = deque(item for item in self._waiting if keeps(item[0]))
        num_runs = self.draft.runs.forget(beginning)
        # The file may contain runs that have been overwritten in memory.
        if self.file and self.file.is_written:
            self.file.write()
        return num_runs

    def learn(self) -> None:
        """Count queued answers, for less than 1 ms."""
        # Sort by name, because vLLM's order of requests that end together differs between ranks.
        for _, text in sorted(self._ended.items()):
            is_taken = len(self._waiting) < MOST_WAITING
            self.counts["counted" if is_taken else "passed_over"] += 1
            if is_taken:
                self._waiting.append((text.owner, self.draft.learn(text)))
        self._ended.clear()
        with self._surviving():
            for _ in range(COUNTED_AT_ONCE):
                if not self._waiting:
                    break
                if next(self._waiting[0][1], self) is self:
                    self._waiting.popleft()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Turn an exception into an answer that is only partly counted.

        Otherwise, the exception would crash the engine.
        """
        try:
            yield
        except Exception as error:
            # Log the exception without its message, which may contain text.
            self.counts[f"failed_{type(error).__name__}"] += 1


def cut_answer(tokens: Sequence[int], params: Any) -> Sequence[int]:
    """Return the answer up to its end, without tokens that the last draft added beyond it."""
    ends = {*(params.stop_token_ids or ()), params.eos_token_id} if params else set()
    length = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: min(length, params.max_tokens or length) if params else length]


@dataclass
class FirstTokens:
    """Recent hit rate of the head's first token, including steps that verified a lookup's token."""

    hits: float = 0.5
    drafts: float = 1.0
    waiting: dict[str, int] = field(default_factory=dict)
    """The head's first token, by request, until its step is verified."""
    _num_asked: int = 0

    @property
    def probability(self) -> float:
        return self.hits / self.drafts

    @property
    def is_good(self) -> bool:
        return self.drafts < FIRST or self.probability >= LEAST_HEAD

    def note(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """Add the outcomes of a step. `sampled` contains each request's new tokens."""
        new = [
            sampled[name][0] == token for name, token in self.waiting.items() if sampled.get(name)
        ]
        self.hits, self.drafts = self.hits + sum(new), self.drafts + len(new)
        if self.drafts > REMEMBERED:
            self.hits, self.drafts = self.hits / 2, self.drafts / 2

    def is_due(self) -> bool:
        """Whether the head should draft now to measure its acceptance.

        A counter decides, so that all ranks of a server agree.
        """
        self._num_asked += 1
        return self.drafts < FIRST or self._num_asked % TRIED == 0
