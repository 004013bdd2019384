"""Finds the conversation of each record from the prompts in the buffer.

The turns of a conversation are not independent, because each turn's prompt extends the
previous turn's prompt. A record belongs to the conversation of the longest stored prompt that its own
prompt continues, whether or not the turns in between were recorded. No header is needed.

    turn 1    prompt, answer's header │ answer
    turn 2    prompt, answer's header   answer (perhaps without its reasoning), question, header │ ...

A shared system prompt or shared examples do not join two conversations: records are joined only if
one's whole prompt is the beginning of the other's. A conversation is split if

- the client or the template changes text of earlier prompts, for example the time in the system
  prompt, or drops reasoning that they contained;
- all earlier turns have left the buffer, or arrive later than this one;
- it has MAX_PROMPTS prompts. Otherwise, a single request whose prompt is the shared system prompt
  could turn all traffic into one conversation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from redraft.online.learning.buffer_file import Index

MAX_PROMPTS = 128
"""Maximum number of distinct prompts in a conversation."""


class Conversations:
    """The conversations in a buffer. A conversation's name is the hash of its first prompt."""

    def __init__(self, index: Index) -> None:
        # By tenant, so that no tenant can join or fill the conversations of others.
        self._by_prompt: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._num_later: Counter[tuple[str, int]] = Counter()  # prompts after the first
        self.num_records = 0
        columns = (index[name].tolist() for name in ("prompt", "conversation", "tenant"))
        for prompt, conversation, tenant in zip(*columns, strict=True):
            self.add(prompt, conversation, tenant)

    def find(self, prompt: int, earlier: Iterable[int], tenant: str) -> int:
        """Return the conversation of a prompt, given the hashes of prompts that it may continue.

        The first of these prompts that is in the buffer decides. A prompt without one begins a
        conversation.
        """
        known = self._by_prompt[tenant]
        if prompt in known:
            return known[prompt]
        for conversation in filter(None, map(known.get, earlier)):
            if self._num_later[tenant, conversation] < MAX_PROMPTS - 1:
                return conversation
        return prompt

    def add(self, prompt: int, conversation: int, tenant: str) -> None:
        """Add the prompt of a record in the buffer."""
        known = self._by_prompt[tenant]
        if conversation not in (prompt, known.get(prompt)):
            self._num_later[tenant, conversation] += 1
        known[prompt] = conversation
        self.num_records += 1
