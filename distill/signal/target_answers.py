"""Let the target rewrite every answer of conversations.

A draft must not learn a different model's text.

conversations ─► history up to each assistant turn ─► /v1/chat/completions ─► one JSON line per finished conversation
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np

from redraft.distill.data.conversations import Conversation, is_plain_text
from redraft.distill.data.messages import (
    Message,
    conversation_hash,
    is_cut_reason,
    read_message,
    require_json,
    with_parts,
)
from redraft.distill.data.rows import UnusableRowError
from redraft.distill.data.sessions import TokenTurn, are_ids, fit_results, pack_turns, take_results
from redraft.distill.data.template import Arguments
from redraft.distill.signal.endpoint import Endpoint, RequestFailedError, RequestRefusedError
from redraft.distill.signal.storage import StatesLostError
from redraft.engine.running_server import find_part
from redraft.files.artifact import naming
from redraft.files.progress import Progress
from redraft.files.replaced import PREVIOUS, drop_previous, keep_previous, undo_move

if TYPE_CHECKING:
    from redraft.distill.signal.features_store import Storage

SKIPPED_STATUS = {
    200,
    400,
    413,
    422,
}  # errors that concern only one conversation, which is skipped while the others continue


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters and template options for the target's answers."""

    temperature: float | None = None
    """Sampling temperature of every request. Default: the value in the target's
    generation_config.json, otherwise 1, as in vLLM.
    """
    max_tokens: int = 2048
    """Maximum answer length in tokens. A conversation ends with an answer that is truncated at this
    length.
    """
    template_options: dict[str, bool | int | str] = field(default_factory=dict)
    """Options passed to the chat template, e.g. `enable_thinking False`. They take precedence over
    a row's `chat_template_kwargs`.
    """


@dataclass(kw_only=True)
class RegenerationStats:
    done: int = 0
    already_there: int = 0
    """Number of conversations answered by an earlier run with the same output."""
    cut: int = 0
    """Number of conversations whose last answer was truncated at `max_tokens` in this run."""
    without_question: int = 0
    departed: Counter[str] = field(default_factory=Counter)
    """Number of sessions that ended early, by reason: the data's tool results do not match the
    target's call, or the server does not answer the next request.
    """
    tokens_kept: int = 0
    """Number of tokens whose hidden states this run stored. Each token of a session counts once."""
    states_lost: int = 0
    """Number of answers in this run whose hidden states did not arrive."""
    without_ids: int = 0
    """Number of conversations answered by a server that returned no token ids."""
    refused: int = 0
    """Number of conversations without any answer, because the server refused the first request."""
    refusal: str = ""
    """The reason of the server's first refusal."""

    def __str__(self) -> str:
        parts = [
            f"{self.done:,} conversations regenerated ({self.cut:,} truncated at the length limit)"
        ]
        counts = {
            "were already there": self.already_there,
            "contain no question": self.without_question,
            "have no token ids, because this server does not return any": self.without_ids,
            **{f"end {reason}": count for reason, count in self.departed.items()},
        }
        parts += [f"{count:,} {what}" for what, count in counts.items() if count]
        if self.tokens_kept:
            parts.append(f"the states of {self.tokens_kept:,} tokens were stored")
        if self.states_lost:
            parts.append(f"the states of {self.states_lost:,} answers were lost")
        if self.refused:
            parts.append(f"{self.refused:,} refused by the server")
        if self.refusal:
            parts.append(f"the first reason: {self.refusal}")
        return "; ".join(parts)


class _Answer(NamedTuple):
    message: Message
    is_cut: bool
    turn: TokenTurn | None
    """Token ids of the turn. None if the server returned none."""
    states_url: str


class _Session(NamedTuple):
    """A conversation with the target's answers."""

    messages: list[Message]
    turns: list[TokenTurn | None]
    is_cut: bool = False
    departure: str = ""
    """Why the session ended before the data's conversation did. Empty if it did not end early."""
    refusal: str = ""
    """The error, if the server refused a request or sent no usable answer."""


def prompt_key(conversation: Conversation) -> str:
    """Return the `conversation_hash` of all but the assistant's messages, tools and arguments.

    The same questions with the same tools and template arguments are answered only once.
    """
    # Add tools and arguments as further messages, with roles that no conversation has. Without
    # them, only the questions determine the key.
    asked = [
        {"role": name, "content": json.dumps(value, sort_keys=name == "arguments")}
        for name in ("tools", "arguments")
        if (value := conversation.get(name))
    ]
    return conversation_hash([*_questions(conversation), *asked])


def regenerate(
    conversations: Sequence[Conversation],
    endpoint: Endpoint,
    output: Path,
    sampling: Sampling,
    target: str = "",
    *,
    overwrite: bool = False,
    states: "tuple[Storage, Storage] | None" = None,
) -> RegenerationStats:
    """Answer every assistant turn again, in order, and append the results to `output` (JSONL).

    Each turn is answered after the regenerated history. The data's tool results are kept as long as
    the target makes the same calls. Conversations already in `output` are skipped, so an
    interrupted run continues where it stopped. `target` identifies the answering model more
    precisely than its name. With `overwrite`, new answers replace those in `output`, which are set
    aside when the first new answer is written. `states` contains the storage of a server started
    with `features.server_args`, and the storage in which to keep the hidden states of prompts and
    answers.

    Raises:
        ConnectionError: the server does not answer; the message names the URL and how many
            conversations were finished.
        ValueError: `output` is damaged or was written by a different target or with different
            settings, or the server refuses everything.
    """
    settings = {**({"target": target} if target else {}), **asdict(sampling)}
    work = _Regeneration(endpoint, output, sampling, replaces=overwrite, states=states)
    return asyncio.run(work.run(conversations, settings))


class _Regeneration:
    """A run: `concurrency` workers take conversations from one queue and append to one file."""

    def __init__(
        self,
        endpoint: Endpoint,
        output: Path,
        sampling: Sampling,
        *,
        replaces: bool,
        states: "tuple[Storage, Storage] | None",
    ) -> None:
        self.endpoint, self.output, self.sampling = endpoint, output, sampling
        self.replaces, self.states = replaces, states
        self.file: TextIO | None = None  # opened when the first answer is written
        self.stats = RegenerationStats()
        self.returns_ids = True

    async def run(
        self, conversations: Sequence[Conversation], settings: dict[str, Any]
    ) -> RegenerationStats:
        # If several conversations have the same key, only the last is asked, because the key does not
        # include the domain.
        wanted = {prompt_key(c): c for c in conversations if _questions(c)}
        self.stats.without_question = sum(not _questions(c) for c in conversations)
        async with self.endpoint:
            settings = {"model": await self.endpoint.model(), **settings}
            undo_move(previous_answers(self.output))
            there = set() if self.replaces else finished_keys(self.output, settings)
            pending = {
                key: conversation for key, conversation in wanted.items() if key not in there
            }
            self.stats.already_there = len(wanted) - len(pending)
            try:
                await self._answer_all(pending, settings)
            except ConnectionError as error:
                without = " without --overwrite" if self.replaces and self.stats.done else ""
                raise ConnectionError(
                    f"{error}; {self._num_kept:,} of {len(wanted):,} conversations are in "
                    f"{self.output}: run the same command again{without} to continue"
                ) from error
        if self._num_kept == 0:
            raise ValueError(f"no conversation was regenerated: {self.stats}")
        drop_previous(previous_answers(self.output))
        return self.stats

    @property
    def _num_kept(self) -> int:
        return self.stats.already_there + self.stats.done

    async def _answer_all(self, pending: dict[str, Conversation], settings: dict[str, Any]) -> None:
        kept = self.stats.already_there
        with Progress(
            total=kept + len(pending), initial=kept, desc="regenerating", unit="conv"
        ) as bar:
            queue = iter(pending.items())
            # All workers share one iterator: each takes the next conversation when it is free.
            workers = [
                asyncio.create_task(self._work(queue, settings, bar))
                for _ in range(self.endpoint.concurrency)
            ]
            clock = asyncio.create_task(_show_time(bar))
            try:
                await asyncio.gather(*workers)
            finally:  # the other workers must not write to a closed file
                for task in (*workers, clock):
                    task.cancel()
                await asyncio.gather(*workers, clock, return_exceptions=True)
                if self.file is not None:
                    self.file.close()

    async def _work(
        self,
        queue: Iterator[tuple[str, Conversation]],
        settings: dict[str, Any],
        bar: Any,
    ) -> None:
        for key, conversation in queue:
            session = await self._answer(conversation)
            if session.turns:
                arguments = self._arguments(conversation)
                self._append(_make_row(key, conversation, session, arguments, settings))
                self.stats.cut += session.is_cut
                self.stats.without_ids += None in session.turns
                if session.departure:
                    self.stats.departed[session.departure] += 1
            else:
                self.stats.refused += 1
            if not session.turns or session.refusal:
                self.stats.refusal = self.stats.refusal or session.refusal or "its answer is empty"
            bar.update()

    async def _answer(self, conversation: Conversation) -> _Session:
        """Return the conversation with the target's answers.

        It ends before a tool result that does not belong to the target's call, and before a request
        that the server refuses, for example because the session exceeds its context.

        Raises:
            RequestRefusedError: the server would refuse all conversations.
        """
        history: list[Message] = []
        turns: list[TokenTurn | None] = []
        # A last question without an answer also gets one.
        messages = [*conversation["messages"], {"role": "assistant", "content": ""}]
        num_taken = 0  # messages up to here are in the history, or have been replaced
        for place, message in enumerate(messages):
            if place < num_taken:
                continue
            if message["role"] == "tool":
                return _Session(
                    history, turns, departure="where the data has a result without a call"
                )
            if message["role"] != "assistant":
                history.append(message)
            # Two consecutive answers become one. An answer before any question is omitted.
            elif history and history[-1]["role"] != "assistant":
                num_done = self.stats.done
                try:
                    answer = await self._ask(history, conversation)
                except UnusableRowError as error:
                    why = "where the target's next answer is malformed"
                    return _Session(history, turns, departure=why, refusal=str(error))
                except (RequestRefusedError, RequestFailedError) as error:
                    # If the server finished no other conversation in the meantime, it is broken.
                    if (
                        error.status not in SKIPPED_STATUS
                        if isinstance(error, RequestRefusedError)
                        else self.stats.done == num_done
                    ):
                        raise
                    why = "where the server refuses the next request"
                    return _Session(history, turns, departure=why, refusal=str(error))
                if _is_empty(answer):
                    break
                history.append(answer.message)
                turns.append(answer.turn)
                await asyncio.to_thread(self._keep_states, turns, answer.states_url)
                if answer.is_cut:
                    return _Session(history, turns, is_cut=True)
                if place + 1 >= len(messages) - 1:  # the data ends here, or with this answer
                    break
                results = take_results(messages[place + 1 :])
                fitted = fit_results(answer.message, message, results)
                if isinstance(fitted, str):
                    return _Session(history, turns, departure=fitted)
                history += fitted
                num_taken = place + 1 + len(results)
        return _Session(history, turns)

    def _arguments(self, conversation: Conversation) -> Arguments:
        """Return the template arguments of the conversation's requests.

        The options of this run take precedence over the data's arguments.
        """
        return {**conversation.get("arguments", {}), **self.sampling.template_options}

    async def _ask(self, history: list[Message], conversation: Conversation) -> _Answer:
        messages = [_as_sent(message) for message in history]
        options: dict[str, Any] = {"max_tokens": self.sampling.max_tokens}
        if self.sampling.temperature is not None:
            options["temperature"] = self.sampling.temperature
        if arguments := self._arguments(conversation):
            options["chat_template_kwargs"] = arguments
        if tools := conversation.get("tools"):
            options["tools"] = tools
        if self.states:
            options["kv_transfer_params"] = {"include_output_tokens": True}
        path = "/v1/chat/completions"
        reply = await self._post(path, messages=messages, **options)
        choice = _read_choice(reply, self.endpoint.url + path)
        # This raises an error that `_answer` expects: parsers pass on tool calls with incomplete
        # JSON, or with half a character.
        answer = read_message({"role": "assistant", **choice["message"]})
        require_json(answer)
        is_cut = is_cut_reason(choice.get("finish_reason"))
        return _Answer(answer, is_cut, _read_turn(reply, choice), self._read_url(reply))

    def _read_url(self, reply: dict[str, Any]) -> str:
        """Return the URL of an answer's hidden states; empty if none are kept.

        Raises:
            ConnectionError: the server sends no hidden states.
        """
        if self.states is None:
            return ""
        url = find_part(reply, "kv_transfer_params", "hidden_states")
        if not isinstance(url, str):
            raise ConnectionError(
                f"{self.endpoint.url} sends no hidden states: start it with `redraft "
                "serve-features`"
            )
        return url

    def _keep_states(self, turns: Sequence[TokenTurn | None], url: str) -> None:
        """Keep the newest turn's states, and drop the states of the turns that it extends."""
        *earlier, turn = turns
        if self.states is None or turn is None:
            return
        source, kept = self.states
        # The target does not process an answer's last token, so this token has no state.
        read = np.concatenate(turn)[:-1]
        try:
            source.move(url, kept, read.tolist())
        except StatesLostError as error:
            self.stats.states_lost += 1
            Progress.write(f"hidden states lost: {error}")
            return
        self.stats.tokens_kept += len(read)
        before = earlier[-1] if earlier else None
        if before is not None and np.array_equal(
            turn.prompt_P[: before.num_tokens], np.concatenate(before)
        ):
            kept.forget(np.concatenate(before)[:-1].tolist())
            self.stats.tokens_kept -= before.num_tokens - 1

    async def _post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the reply, with token ids if the server can return them."""
        if self.returns_ids:
            try:
                return await self.endpoint.post(path, return_token_ids=True, **body)
            except RequestRefusedError as error:
                # Not every gateway names the parameter that it refuses.
                if error.status not in (400, 422) and "return_token_ids" not in error.reason:
                    raise
        reply = await self.endpoint.post(path, **body)
        self.returns_ids = False
        return reply

    def _append(self, row: dict[str, Any]) -> None:
        if self.file is None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            if self.replaces:
                keep_previous([self.output], previous_answers(self.output))
            self.file = self.output.open("a", encoding="utf-8")
        with naming(self.output):
            self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self.file.flush()
            # An answer takes a server seconds, but a sync takes only milliseconds.
            os.fsync(self.file.fileno())
        self.stats.done += 1


async def _show_time(bar: Progress) -> None:
    """Redraw the bar every second, because the first answer may take minutes."""
    while True:
        await asyncio.sleep(1)
        bar.refresh()


def _make_row(
    key: str,
    conversation: Conversation,
    session: _Session,
    arguments: Arguments,
    settings: dict[str, Any],
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": key,
        "domain": conversation["domain"],
        "messages": [with_parts(message) for message in session.messages],
        "cut": session.is_cut,
    }
    if "tools" in conversation:
        row["tools"] = conversation["tools"]
    if arguments:
        row["chat_template_kwargs"] = arguments
    turns = [turn for turn in session.turns if turn is not None]
    if len(turns) == len(session.turns):
        row["token_ids"] = pack_turns(turns)
    return {**row, "settings": settings}


def _is_empty(answer: _Answer) -> bool:
    message = answer.message
    is_cut_thought = answer.is_cut and "reasoning" in message
    return not message["content"].strip() and "tool_calls" not in message and not is_cut_thought


def _read_turn(reply: dict[str, Any], choice: dict[str, Any]) -> TokenTurn | None:
    try:
        ids = [np.array(part) for part in (reply.get("prompt_token_ids"), choice.get("token_ids"))]
    except ValueError:  # lists of different lengths
        return None
    if not all(part.size and are_ids(part) for part in ids):
        return None
    return TokenTurn(*(part.astype(np.int32) for part in ids))


def _read_choice(reply: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the first choice in a server's reply.

    Raises:
        RequestRefusedError: there is no choice, or a content filter has cut it.
    """
    try:
        choice: dict[str, Any] = reply["choices"][0]
        is_filtered = choice.get("finish_reason") == "content_filter"
        {**choice["message"]}
    except (LookupError, TypeError, AttributeError):
        raise RequestRefusedError(url, 200, f"no answer in {str(reply)[:100]}") from None
    if is_filtered:
        raise RequestRefusedError(url, 200, "a content filter truncated the answer")
    return choice


def _as_sent(message: Message) -> Message:
    message = with_parts(message)
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    sent = [{**function, "arguments": json.dumps(function["arguments"])} for function in functions]
    calls = [
        {**call, "function": function}
        for call, function in zip(message["tool_calls"], sent, strict=True)
    ]
    return {**message, "tool_calls": calls}


def previous_answers(output: Path) -> Path:
    """Return the folder that keeps the earlier answers while new ones replace them."""
    return output.with_name(f".{output.name}{PREVIOUS}")


def finished_keys(output: Path, settings: dict[str, Any] | None) -> set[str]:
    """Return the keys of the conversations in `output`, and remove a killed run's torn last line.

    Raises:
        ValueError: a line is damaged, or has settings other than `settings`; the file stays.
    """
    if not output.exists():
        return set()
    whole, newline, torn = output.read_bytes().rpartition(b"\n")
    lines = whole.splitlines()
    keys = set()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            key, used = row["key"], row["settings"]
        except (ValueError, KeyError, TypeError):
            raise _not_ours(output, number) from None
        if settings is not None and used != settings:
            raise ValueError(
                f"{output} was generated with {used}, not {settings}: use --overwrite or another "
                "--output"
            )
        keys.add(key)
    if not _begins_row(torn):
        raise _not_ours(output, len(lines) + 1)
    # Appending after a torn line would damage the next line as well.
    if torn:
        os.truncate(output, len(whole) + len(newline))
    return keys


def _not_ours(output: Path, number: int) -> ValueError:
    return ValueError(
        f"{output}, line {number}: not a regenerated conversation; choose another output"
    )


def _begins_row(torn: bytes) -> bool:
    """Whether the bytes are the beginning of a row, however short.

    A file that was given by mistake must not lose its last line.
    """
    start, key, rest = torn[:9], torn[9:73], torn[73:86]
    is_hex = not key.strip(b"0123456789abcdef")
    return b'{"key": "'.startswith(start) and is_hex and b'", "domain": '.startswith(rest)


def _questions(conversation: Conversation) -> list[Message]:
    if is_plain_text(conversation):
        return []
    return [message for message in conversation["messages"] if message["role"] != "assistant"]
