"""Parts of live counts beside the lookup: a counter of answers, and the acceptance of the head behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from redraft.heads.families.retrieval import Live, Text

LEAST_HEAD = 0.2  # acceptance of a first token that pays for a head: its pass and a row take a fifth of a step
TRIED = 32  # one in so many drafts of a head below that
REMEMBERED = 256  # drafts; then all count half
COUNTED_AT_ONCE = 48  # steps of counting in a step of the engine
MOST_WAITING = 64  # answers; a server that ends more than it counts passes over the oldest


class AnswerCounter:
    """Counts answers that have ended, a little in each step."""

    def __init__(self, runner: Any, draft: Live) -> None:
        self.draft = draft
        self.may_count: Callable[[Any], bool] = lambda request: True  # The plugin knows who opted out.
        self._waiting = deque[Iterator[None]](maxlen=MOST_WAITING)
        self._removed, runner._on_request_state_removed = runner._on_request_state_removed, self.end
        runner.redraft_counter = self

    def end(self, name: str, request: Any) -> None:
        """Take the answer of a request that ended."""
        self._removed(name, request)
        if request is None or request.prompt_token_ids is None or not self.may_count(request):
            return
        ids = np.array([*request.prompt_token_ids, *request.output_token_ids], np.int32)
        is_label = np.arange(len(ids)) >= len(request.prompt_token_ids)
        self._waiting.append(self.draft.learn(Text(ids=ids, is_label=is_label)))

    def learn(self) -> None:
        """Count for less than a millisecond."""
        for _ in range(COUNTED_AT_ONCE):
            if not self._waiting:
                break
            if next(self._waiting[0], self) is self:
                self._waiting.popleft()


@dataclass
class FirstTokens:
    """How often the first token of the head is accepted, lately."""

    hits: float = 0.5
    drafts: float = 1.0
    waiting: set[str] = field(default_factory=set)  # Requests whose newest draft is the head's.
    _num_asked: int = 0

    @property
    def probability(self) -> float:
        return self.hits / self.drafts

    @property
    def is_good(self) -> bool:
        return self.probability >= LEAST_HEAD

    def note(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """The step's new tokens of each request: the accepted ones, and one of the target."""
        new = [len(sampled[name]) for name in self.waiting if sampled.get(name)]
        self.hits, self.drafts = self.hits + sum(count > 1 for count in new), self.drafts + len(new)
        if self.drafts > REMEMBERED:
            self.hits, self.drafts = self.hits / 2, self.drafts / 2

    def may_draft(self) -> bool:
        """Whether the head is accepted often enough, or is to show whether it is."""
        self._num_asked += 1
        return self.is_good or self._num_asked % TRIED == 0
