"""Clients that come and go, and a verdict on every request.

The verdict says whether the request was answered or, if not, whether the client learned why.

answered    complete: every choice has a finish reason, and a stream ends with [DONE]
left        the client hung up in the middle, on purpose
told        an error status with a message, or an error event in the stream
cut         the connection broke visibly because the tap itself was killed
untold      anything else: silence, a cut answer that looks whole, a stream that ends without a word
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from redraft.engine.prompts import Prompt

SILENCE_S = 90.0
"""Maximum wait for a byte, in seconds. Every fault of the soak is shorter, so a longer silence
means that the client was not notified of the failure.
"""

TENANTS = ("", "acme", "globex", "initech", "umbrella")
DOMAINS = ("", "", "", "code", "prose", "invented")


@dataclass(frozen=True)
class Verdict:
    kind: str
    detail: str = ""


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    untold: list[str] = field(default_factory=list)
    """The first 20 failures without an error that the client could see, for the report."""

    def add(self, verdict: Verdict) -> None:
        self.counts[verdict.kind] += 1
        if verdict.kind == "told":
            self.told[verdict.detail] += 1
        elif verdict.kind == "untold" and len(self.untold) < 20:
            self.untold.append(verdict.detail)


@dataclass
class Clients:
    """`num_clients` concurrent clients, each with one request at a time."""

    taps: Mapping[str, Callable[[float], bool]]
    """For each tap's address, a function that returns whether the tap has been up since a monotonic
    time.
    """
    prompts: Sequence[Prompt]
    rng: random.Random
    num_clients: int
    pause_s: float
    tally: Tally = field(default_factory=Tally)

    async def run(self, is_over: asyncio.Event) -> None:
        """Send requests until the event is set, and then wait for the last answers."""
        await asyncio.gather(*(self._live(is_over) for _ in range(self.num_clients)))

    async def _live(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            # Open a new connection every few requests. httpx drops an idle one before the tap
            # closes it.
            limits = httpx.Limits(keepalive_expiry=2)
            async with httpx.AsyncClient(timeout=SILENCE_S, limits=limits) as http:
                for _ in range(self.rng.randrange(1, 8)):
                    if is_over.is_set():
                        return
                    self.tally.add(await self.ask(http))
                    await asyncio.sleep(self.pause_s * self.rng.uniform(0.2, 1.8))

    async def ask(self, http: httpx.AsyncClient) -> Verdict:
        """Send one random request and judge what comes back."""
        path, body, headers = self.draw_request()
        url, was_up = self.rng.choice(list(self.taps.items()))
        patience = self.rng.randrange(1, 12) if self.rng.random() < 0.15 else None
        began_s = time.monotonic()
        try:
            async with http.stream("POST", f"{url}{path}", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    return judge_refusal(answer.status_code, await answer.aread())
                if not body["stream"]:
                    return judge_whole(await answer.aread(), body.get("n", 1))
                return await judge_stream(answer, body.get("n", 1), patience)
        except httpx.HTTPError as error:
            name = type(error).__name__
            is_silence = isinstance(error, httpx.TimeoutException) and not isinstance(
                error, httpx.ConnectTimeout
            )
            # A refused connection is not a silence: the tap is down, and the client notices at
            # once.
            if is_silence or was_up(began_s):
                return Verdict(
                    "untold", f"{name} of {path} stream={body['stream']} after {_since(began_s)}"
                )
            return Verdict("cut", name)

    def draw_request(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        """Return path, body and headers of a random request."""
        rng, prompt = self.rng, self.rng.choice(self.prompts)
        body: dict[str, Any] = {
            "model": "m",
            "max_tokens": rng.choice((8, 24, 48, 96)),
            "temperature": rng.choice((0, 0, 0.7, 1.0)),
            "stream": rng.random() < 0.7,
        }
        if rng.random() < 0.1:
            body["n"] = rng.choice((2, 3))
            body["temperature"] = 1.0  # vLLM refuses several greedy answers
        headers = {"X-Redraft-Tenant": rng.choice(TENANTS), "X-Redraft-Domain": rng.choice(DOMAINS)}
        if rng.random() < 0.1:
            headers["X-Redraft-Opt-Out"] = "1"
        if rng.random() < 0.3:
            words = [
                "write",
                "a",
                "function",
                "that",
                "reads",
                "a",
                "file",
                "and",
                "counts",
                "its",
                "words",
            ]
            body["messages"] = [{"role": "user", "content": " ".join(rng.sample(words, 6))}]
            return "/v1/chat/completions", body, headers
        body["prompt"] = prompt.token_ids
        return "/v1/completions", body, headers


def judge_refusal(status: int, body: bytes) -> Verdict:
    """Judge an error status: its body must have a message where OpenAI's clients look for it."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    return (
        Verdict("told", str(status))
        if message
        else Verdict("untold", f"status {status} without a message")
    )


def judge_whole(body: bytes, num_choices: int) -> Verdict:
    try:
        choices = json.loads(body)["choices"]
        is_complete = len(choices) == num_choices and all(
            choice["finish_reason"] for choice in choices
        )
    except (ValueError, KeyError, TypeError):
        is_complete = False
    return (
        Verdict("answered")
        if is_complete
        else Verdict("untold", f"an incomplete answer: {body[:200]!r}")
    )


async def judge_stream(
    answer: httpx.Response,
    num_choices: int,
    patience: int | None = None,
    num_tokens: int | None = None,
) -> Verdict:
    """Read the events, and hang up after `patience` events if given.

    If `num_tokens` is given, the reported usage must equal it.
    """
    finished: set[int] = set()
    num_events, used = 0, None
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            is_complete = len(finished) == num_choices and used == num_tokens
            return (
                Verdict("answered")
                if is_complete
                else Verdict("untold", "[DONE] before all choices finished")
            )
        try:
            event = json.loads(data)
        except ValueError:
            return Verdict("untold", "an event that is not JSON")
        if "error" in event:
            return Verdict("told", "in the stream")
        if num_tokens is not None and event.get("usage"):
            used = event["usage"]["completion_tokens"]
        finished |= {choice["index"] for choice in event["choices"] if choice.get("finish_reason")}
        num_events += 1
        if num_events == patience:
            # Returning leaves the caller's `async with`, which closes the connection.
            return Verdict("left")
    return Verdict("untold", "the stream ended without [DONE]")


def _since(began_s: float) -> str:
    return f"{time.monotonic() - began_s:.1f} s"
