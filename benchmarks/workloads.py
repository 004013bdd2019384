"""Traffic like that of a fleet, made from texts of the Python standard library.

    questions    unrelated questions, one at a time
    agents       sessions of four turns with tool results, after one long prefix
    retrieval    long prompts of documents, and short answers
    batch-8, batch-16    unrelated questions from 8 or 16 clients

No question is asked twice. Agent sessions share their prefix, and a turn repeats the turns before
it. Apart from that, no two prompts share a block of text.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redraft.distill.data.corpus import stdlib_conversations
from redraft.engine.prompts import Prompt

PREFIX, DOCUMENTS, RESULT = 1500, 4000, 150
"""Number of tokens in the agents' prefix, in a prompt with documents, and at most in a tool result.
"""

TURNS = 4

MARK = "REDRAFT-ANSWER"  # In place of an answer, to find the text around it.


@dataclass(frozen=True, kw_only=True)
class Session:
    """One client's turns, in order."""

    prompt: Prompt
    results: tuple[list[int], ...] = ()
    """For each later turn, the tokens between the previous answer and the next one."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sessions, and how many of them run at the same time."""

    name: str
    sessions: Iterator[Session]
    clients: int = 1
    block: int = 2
    """Number of sessions in a measurement."""
    max_tokens: int = 48
    """Maximum length of an answer, in tokens."""


def extend(prompt: Prompt, answer: Sequence[int], result: Sequence[int]) -> Prompt:
    """Return the prompt for a session's next turn."""
    # A tool result begins with the end of the answer's message, which a complete answer already
    # contains.
    rest = result[1:] if answer and answer[-1] == result[0] else result
    return Prompt(token_ids=[*prompt.token_ids, *answer, *rest], domain=prompt.domain)


def list_workloads(
    tokenizer: Any, questions: Iterable[Prompt], longest: int, seed: int = 0
) -> list[Workload]:
    """Return all workloads, for a server with a context of `longest` tokens.

    Servers with a shorter context get shorter workloads. `questions` are single questions, each of
    which is used once.
    """
    asked = iter(questions)
    texts = Texts(tokenizer, seed)
    prefix, documents = min(PREFIX, longest // 4), min(DOCUMENTS, longest * 5 // 8)

    def single() -> Iterator[Session]:
        for prompt in asked:
            yield Session(prompt=prompt)

    return [
        Workload(name="questions", sessions=single()),
        Workload(name="agents", sessions=texts.agents(prefix, min(RESULT, longest // 24)), block=1),
        Workload(name="retrieval", sessions=texts.retrieval(documents), block=1, max_tokens=24),
        *(
            Workload(name=f"batch-{clients}", sessions=single(), clients=clients, block=clients)
            for clients in (8, 16)
        ),
    ]


class Texts:
    """Documents and source code of the standard library in random order, each used once."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer = tokenizer
        pairs: dict[str, list[tuple[str, str]]] = {"code": [], "prose": []}
        for conversation in stdlib_conversations():
            question, answer = conversation["messages"][:2]  # type: ignore[index]
            pairs[str(conversation["domain"])].append((question["content"], answer["content"]))
        for some in pairs.values():
            random.Random(seed).shuffle(some)
        self._code, self._prose = iter(pairs["code"]), iter(pairs["prose"])

    def agents(self, prefix: int, result: int) -> Iterator[Session]:
        """Yield sessions with one system prompt of about `prefix` tokens, until the texts run out."""
        tools = "\n\n".join(f"{name}\n{text}" for name, text in self._take(prefix))
        system = f"You write Python and may use these tools:\n\n{tools}"
        for task, source in self._code:
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": f"{task} Look at the sources first:\n{source}"},
            ]
            results = []
            for _ in range(TURNS - 1):
                found = next(self._code, None)
                if found is None:
                    return
                text = self.tokenizer.decode(self._ids(found[1])[:result])
                said = {"role": "user", "content": f"Tool result:\n{text}\nGo on."}
                whole = self._render([*messages, {"role": "assistant", "content": MARK}, said])
                results.append(self._ids(whole.split(MARK)[-1]))
            yield Session(
                prompt=Prompt(token_ids=self._ids(self._render(messages)), domain="agents"),
                results=tuple(results),
            )

    def retrieval(self, documents: int) -> Iterator[Session]:
        """Yield questions about one of many documents, in prompts of about `documents` tokens."""
        while found := self._take(documents):
            question = found[len(found) // 2][0]
            text = "\n\n".join(f"{name}\n{answer}" for name, answer in found)
            asked = f"{text}\n\nAnswer in one sentence from the text above. {question}"
            ids = self._ids(self._render([{"role": "user", "content": asked}]))
            yield Session(prompt=Prompt(token_ids=ids, domain="retrieval"))

    def _take(self, size: int) -> list[tuple[str, str]]:
        """Return documents of about that many tokens, or none once they are used up."""
        found, left = list[tuple[str, str]](), size
        for name, text in self._prose:
            num_tokens = len(self._ids(f"{name}\n{text}\n\n"))
            if num_tokens > left:
                if left < size // 10:
                    return found
                continue
            found.append((name, text))
            left -= num_tokens
        return []

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)
