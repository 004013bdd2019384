"""The check of the server before the tap records its answers.

The tap sends requests of its own.

    /v1/models          the names of the target itself (an adapter has a parent)
    /v1/completions     as many log-probabilities as a record needs, from before sampling parameters,
                        and the parameters with which a request without any is sampled

All of this depends on the server's flags: --max-logprobs, --logprobs-mode, --generation-config,
--override-generation-config, --watermark-config. The check is repeated after every outage of the
server, because it may have come back with different flags or a different model.

The check generates up to 1,026 answers of one token, at most once a minute. The tap uses the
operator's key for them if there is one, and otherwise the key of the first client that received an
answer.
"""

import asyncio
import json
import logging
import math
import operator
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redraft.online.fleet.reach import explain_answer
from redraft.online.records.guard import Guard
from redraft.online.traffic.upstream import ForwardedRequest, Upstream

logger = logging.getLogger("redraft.tap")

CHECK_S = 0.5  # Seconds between two decisions whether to check the server.
LOOK_S = 1.0  # Seconds between two connections that look for an outage; a restart takes longer.
# Minimum seconds between two checks that generate answers, or whose key is refused.
COST_PAUSE_S = 60.0
TIMEOUT_S = 60.0
# Maximum sum of the most probable tokens' probabilities. It may exceed 1, because log-probabilities
# are rounded.
MAX_TOTAL = 1.01
MAX_CHANGE = (
    # Maximum change of a log-probability with a different top_p, or after a restart of the server;
    # with the filter or a different model, it would be far larger.
    0.5
)
PROMPT = "The"
PROMPTS = (
    "The",
    "A",
    "In",
    "My",
    "It",
    "He",
    "We",
    "1",
    "How",
    "To",
    "New",
    "For",
    "One",
    "This",
    "What",
    "And",
)
SAMPLES, SEED = 16, 4711
"""Number of first tokens to sample for each of PROMPTS. Later tokens would depend on the draft,
because verification ignores the seed on a CPU.
"""

MAX_UNEQUAL = 0.02
"""Maximum fraction of first tokens that may differ between requests with and without explicit
parameters, in addition to the fraction that differs between identical requests because of rounding
on a busy GPU. In a test with 256 tokens, top_p 0.95 changes 6%, top_p 0.99 3%, temperature 0.9 11%.
"""

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""vLLM's own defaults, which apply with `--generation-config vllm`."""


class NotYetError(Exception):
    """The server gave no answer that can be checked, e.g. because it requires a key."""


class UnfitError(Exception):
    """The server's answers cannot be recorded; the message names the flag to change."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    problem: str = ""
    """Why the server's answers are not recorded; empty if they are."""
    models: frozenset[str] = frozenset()
    """Model names of the target, without adapters."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of a request that sets none."""


class ServerCheck:
    def __init__(
        self,
        top_k: int,
        guard: Guard,
        defaults: Mapping[str, float],
        key: str = "",
    ) -> None:
        """Create a check of the server behind the tap.

        `defaults` are the sampling parameters in the target's generation_config.json, and `key` is
        the operator's key for the server.
        """
        self.top_k, self.guard, self.defaults = top_k, guard, defaults
        self.verdict: Verdict | None = None  # None until the server has been checked.
        self.problem = ""  # Why the server has not been checked yet.
        self.authorization = f"Bearer {key}" if key else ""
        self._has_own_key = bool(key)
        self._wants_key = False  # Whether the server has refused a check without a key.
        self._next_s = 0.0  # Earliest time of the next check.
        self._look_s = 0.0  # Earliest time of the next connection that looks for an outage.
        # The log-probabilities that identify the model that was recorded first.
        self._known: dict[str, float] = {}

    def offer_key(self, authorization: str) -> None:
        """Use the key from a client's request that the server has answered, if no key is set."""
        if self._wants_key and not self.authorization:
            self.authorization = authorization

    def find_skip_reason(self, model: Any) -> str:
        """Return why an answer for this model is not recorded; empty if it is recorded."""
        if self.verdict is None:
            return "unchecked_server"
        if self.verdict.problem:
            return "unfit_server"
        return "" if model in (None, "") or str(model) in self.verdict.models else "adapter"

    async def run_forever(self, upstream: Upstream) -> None:
        while True:
            with self.guard.round("tap-check"):
                await self._look(upstream)
            await asyncio.sleep(CHECK_S)

    async def _look(self, upstream: Upstream) -> None:
        if self.verdict is not None and time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + LOOK_S
            await upstream.look()
        if upstream.is_down:
            self.verdict = None
        is_keyless = self._wants_key and not self.authorization
        if self.verdict is not None or is_keyless or time.monotonic() < self._next_s:
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                models = await self._find_models(upstream)
                verdict = Verdict(
                    models=models, defaults=await self._find_defaults(upstream, min(models))
                )
        except UnfitError as error:
            verdict = Verdict(problem=str(error))
        except (NotYetError, TimeoutError) as error:
            problem = f"it has not been checked yet: {str(error) or 'no answer came in time'}"
            if self.problem != problem:
                logger.warning("no answers from %s are recorded: %s", upstream.url, problem)
            self.problem = problem
            return
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            verdict = Verdict(problem="its answers are not those of vLLM's API")
        if verdict.problem:
            logger.warning("no answers from %s are recorded: %s", upstream.url, verdict.problem)
        self.problem, self.verdict = "", verdict

    async def _find_models(self, upstream: Upstream) -> frozenset[str]:
        """Return the names of the target.

        Raises:
            UnfitError, NotYetError
        """
        listed = (await self.ask(upstream, "GET", b"/v1/models")).get("data") or []
        names = [str(card["id"]) for card in listed if not card.get("parent")]
        if not names:
            raise UnfitError("/v1/models lists no model")
        plain = await self._read_log_probs(upstream, names[0], top_p=1.0)
        filtered = await self._read_log_probs(upstream, names[0], top_p=1e-6)
        total = sum(map(math.exp, plain.values())) if max(plain.values()) <= 0 else math.inf
        changes = [abs(plain[token] - filtered.get(token, -math.inf)) for token in plain]
        if total > MAX_TOTAL or max(changes) > MAX_CHANGE:
            raise UnfitError(
                "its log-probabilities differ from the model's: start vLLM with --logprobs-mode "
                "raw_logprobs"
            )
        # The tap's records name one target, and the server may have come back with a different one.
        self._known = self._known or plain
        if max(_find_change(self._known, plain), _find_change(plain, self._known)) > MAX_CHANGE:
            raise UnfitError(
                "it serves a different model than before: restart the tap with that model's folder as "
                "--target"
            )
        return frozenset(names)

    async def _find_defaults(self, upstream: Upstream, model: str) -> Mapping[str, float]:
        """Return the sampling parameters that apply to a request without any.

        Raises:
            UnfitError, NotYetError
        """
        by_default, again = [await self._sample(upstream, model, {}) for _ in range(2)]
        least = sum(map(operator.eq, by_default, again)) - MAX_UNEQUAL * len(by_default)
        for defaults in (self.defaults, {}):
            # A server with watermarking marks every request that does not disable it.
            tokens = await self._sample(
                upstream, model, {**NEUTRAL, **defaults, "watermarking": False}
            )
            if sum(map(operator.eq, by_default, tokens)) >= least:
                return defaults
        raise UnfitError(
            "its sampling defaults differ from the target's generation_config.json: start vLLM "
            "without "
            "--override-generation-config and --watermark-config, and with --generation-config "
            "auto or vllm"
        )

    async def _sample(
        self, upstream: Upstream, model: str, sampling: Mapping[str, float]
    ) -> list[Any]:
        asked = {
            "model": model,
            "prompt": PROMPTS,
            "n": SAMPLES,
            "max_tokens": 1,
            "seed": SEED,
            "ignore_eos": True,
        }
        asked |= {"return_token_ids": True, **sampling}
        answer = await self.ask(upstream, "POST", b"/v1/completions", asked)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return [choice["token_ids"] for choice in choices]

    async def _read_log_probs(
        self, upstream: Upstream, model: str, top_p: float
    ) -> dict[str, float]:
        asked = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": top_p,
        }
        asked |= {"logprobs": self.top_k}
        asked |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        answer = await self.ask(upstream, "POST", b"/v1/completions", asked)
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"][:1]
        # vLLM adds the sampled token, which depends on top_p. Without the last entry, both lists
        # agree.
        count = max(1, min(len(top), self.top_k) - 1)
        ranked = sorted(top.items(), key=lambda item: -item[1])[:count]
        return {str(token): float(value) for token, value in ranked}

    async def ask(
        self, upstream: Upstream, method: str, path: bytes, content: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
        # A plugin or another tap must not record the check.
        headers += [(b"x-redraft-opt-out", b"1")]
        if self.authorization:
            headers += [(b"authorization", self.authorization.encode("latin-1"))]
        body = b"" if content is None else json.dumps(content).encode()
        if content is not None:
            self._next_s = time.monotonic() + COST_PAUSE_S
        try:
            reply = await upstream.send(
                ForwardedRequest(method=method, path=path, headers=headers, body=body)
            )
        except Exception as error:
            raise NotYetError(upstream.problem or str(error)) from error
        try:
            answer = await reply.read()
        except Exception as error:
            raise NotYetError("the answer was cut off") from error
        finally:
            await reply.aclose()
        if foreign := explain_answer(reply.status, reply.headers):
            raise NotYetError(foreign)
        if reply.status in (400, 422):
            raise UnfitError(
                f"it rejects requests for {self.top_k} log-probabilities and ids per token: "
                "start vLLM "
                f"with --max-logprobs {self.top_k}, or set fewer logprobs"
            )
        if reply.status in (401, 403):
            raise NotYetError(self._explain_refusal(reply.status))
        if reply.status != 200:
            raise NotYetError(f"it answers {reply.status}")
        try:
            found: dict[str, Any] = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise UnfitError("its answers are not JSON") from error
        return found

    def _explain_refusal(self, status: int) -> str:
        self._wants_key = True
        if self.authorization:
            self._next_s = time.monotonic() + COST_PAUSE_S
        if self._has_own_key:
            return f"it rejects the key in key_file ({status})"
        self.authorization = ""
        return (
            f"it requires a key ({status}): set key_file; until then, the key of the next "
            "client that it answers is used"
        )


def _find_change(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return by how much the log-probability of a token has changed at least, for any of `before`."""
    # A token that is missing is at most as probable as the last one that is listed.
    least = min(after.values())
    return max(
        abs(value - after[token]) if token in after else value - least
        for token, value in before.items()
    )


class SglangCheck(ServerCheck):
    """Checks a server whose records contain only token ids, without generating an answer."""

    async def _find_models(self, upstream: Upstream) -> frozenset[str]:
        info = await self.ask(upstream, "GET", b"/server_info")
        if "speculative_algorithm" not in info:
            raise UnfitError("it is not SGLang: its /server_info has no speculative_algorithm")
        self._samples_as_model = info.get("sampling_defaults", "model") == "model"
        return await self._list_models(upstream)

    async def _list_models(self, upstream: Upstream) -> frozenset[str]:
        listed = (await self.ask(upstream, "GET", b"/v1/models")).get("data") or []
        return frozenset(str(card["id"]) for card in listed)

    async def _find_defaults(self, upstream: Upstream, model: str) -> Mapping[str, float]:
        return self.defaults if self._samples_as_model else {}


class LlamaCppCheck(SglangCheck):
    """Checks a llama.cpp server, whose answers state the sampling parameters that were used."""

    async def _find_models(self, upstream: Upstream) -> frozenset[str]:
        if "build_info" not in await self.ask(upstream, "GET", b"/props"):
            raise UnfitError("it is not llama.cpp: its /props has no build_info")
        self._samples_as_model = False
        return await self._list_models(upstream)

    def find_skip_reason(self, model: Any) -> str:
        # llama.cpp serves one model, whichever name a request contains.
        return super().find_skip_reason(None)


CHECKS: Mapping[str, type[ServerCheck]] = {
    "vllm": ServerCheck,
    "sglang": SglangCheck,
    "llama.cpp": LlamaCppCheck,
}
"""The class that checks a server, by engine."""
