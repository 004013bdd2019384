"""Messages between a client and vLLM.

The tap adds fields to a request and removes them from the answer.

N = output tokens, K = kept top-k ids.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from redraft.engine.sampling import MIN_TEMPERATURE
from redraft.online.records.checks import find_bad_sampling
from redraft.online.records.origin import Origin, pack_arguments
from redraft.online.records.record import Record, Sampling, text_rows

COMPLETION_PATHS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
"""Paths whose answers the tap reads, with the kind of each."""

TEXT_PATHS = frozenset(
    {
        *COMPLETION_PATHS,
        *("/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/v1/systemone"),
        *("/inference/v1/generate", "/cohere/v2/chat", "/invocations"),
    }
)
"""Paths that generate text, without a slash at the end. A request to any of them has a domain."""

ADDED_FIELDS = ("logprobs", "token_ids", "prompt_token_ids")
"""Fields of an answer, or of its choices, present only because the tap asked for them."""


# Maximum length of the server's request id, which contains X-Request-Id of any length.
MAX_ID_CHARS = 128


MAX_TOP_K = 2**31 - 1


class AnswerError(Exception):
    """An answer cannot be recorded. The message contains no user text."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # Name of the counter.


@dataclass(kw_only=True)
class Answer:
    """The tokens and probabilities of one answer that have arrived so far."""

    request_id: str = ""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of a request that sets none."""
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    """Log-probabilities by token id, per position."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that the server reports."""
    failure: Exception | None = None
    """Error after which the remainder is not read, because it would be recorded incorrectly."""

    def read(self, message: dict[str, Any]) -> None:
        self.request_id = str(message.get("id") or self.request_id)
        self.prompt_ids += message.get("prompt_token_ids") or []
        for choice in message.get("choices") or []:
            self.prompt_ids += choice.get("prompt_token_ids") or []
            self.output_ids += choice.get("token_ids") or []
            self.top += _top_logprobs(choice.get("logprobs") or {})

    def record(
        self,
        payload: dict[str, Any],
        origin: Origin,
        server_id: str,
        target_fingerprint: str,
        top_k: int,
    ) -> Record | None:
        """Build the record of the answer; None if it has no tokens.

        Raises:
            AnswerError: the answer cannot be recorded; any other exception is also possible.
        """
        if self.failure is not None:
            raise self.failure
        count, pairs_NK2 = self.rank(top_k)
        if not count or not self.prompt_ids:
            return None
        positions_N = len(self.prompt_ids) + np.arange(len(pairs_NK2))
        return Record(
            server_id=server_id,
            # All calls of one trace may share one X-Request-Id, and a record with a known id counts
            # as a duplicate.
            request_id=f"{self.request_id[:MAX_ID_CHARS]}-{uuid.uuid4().hex}",
            sequence=0,
            time_s=time.time(),
            domain=origin.domain,
            tenant=origin.tenant,
            target_fingerprint=target_fingerprint,
            sampling=read_sampling(payload | self.sampling),
            template_arguments=_pack_arguments(payload),
            num_prompt_tokens=len(self.prompt_ids),
            top_k=pairs_NK2.shape[1],
            context=np.array(self.prompt_ids, "<i4").tobytes(),
            output=np.array(self.output_ids[:count], "<i4").tobytes(),
            **text_rows(positions_N, pairs_NK2[:, :, 0], pairs_NK2[:, :, 1]),
        )

    def rank(self, top_k: int) -> tuple[int, NDArray[np.float64]]:
        """Return the number of tokens to record, and (id, log-probability) by row, [N, K, 2].

        float64 represents every id exactly.
        """
        count = min(len(self.output_ids), len(self.top))
        ranked = [
            _likeliest(top, sampled)
            for top, sampled in zip(self.top, self.output_ids, strict=False)
        ]
        # All rows have the same width, so the shortest list of certain tokens decides.
        top_k = min(top_k, *map(len, ranked)) if ranked else top_k
        return count, np.array([top[:top_k] for top in ranked], np.float64)


def _pack_arguments(payload: dict[str, Any]) -> str:
    """Pack the request's template arguments. The tap does not know the server's defaults."""
    given = payload.get("chat_template_kwargs")
    effort = {"reasoning_effort": payload.get("reasoning_effort")}
    return pack_arguments({**effort, **(given if isinstance(given, dict) else {})})


def _likeliest(top: dict[int, float], sampled: int) -> list[tuple[int, float]]:
    """Return the tokens that are certainly the most probable, by descending log-probability.

    vLLM always includes the sampled token. If that token comes last, it may not belong to the top
    k, so it is left out.
    """
    ranked = sorted(top.items(), key=lambda item: -item[1])
    return ranked[:-1] if len(ranked) > 1 and ranked[-1][0] == sampled else ranked


CLASHING = (
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "return_token_ids"),
    *(
        "return_tokens_as_token_ids",
        "return_token_offsets",
        "return_prompt_text",
        "return_mm_kwargs",
    ),
)
"""Fields that conflict with those that the tap sets. `logprobs: 0` also conflicts with them."""

CHANGED = (
    # Fields that change the logits, after their log-probabilities are computed.
    *("logit_bias", "min_tokens", "bad_words", "allowed_token_ids", "thinking_token_budget"),
    *("watermarking", "vllm_xargs"),
    # Fields that change which tokens are generated, and how.
    *("use_beam_search", "best_of", "logprob_token_ids", "suffix"),
    # Fields with a grammar. Servers from before 2026 call them guided_*.
    *("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "functions", "function_call"),
    # Fields with which the target reads more than the prompt's token ids, or a different server
    # reads them.
    *(
        "prompt_embeds",
        "mm_payload",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "audio",
        "modalities",
    ),
    *("kv_transfer_params", "ec_transfer_params"),
)
"""Fields that make text or distribution differ from the plain target's."""

ZERO_IS_A_VALUE = ("logprobs", "prompt_logprobs", "thinking_token_budget")

PLAIN = (
    *(
        "model",
        "prompt",
        "messages",
        "n",
        "stream",
        "stream_options",
        "stream_interval",
        "seed",
        "user",
    ),
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "length_penalty", "max_tokens", "max_completion_tokens", "ignore_eos"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "repetition_detection"),
    *("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"),
    *(
        "truncate_prompt_tokens",
        "truncation_side",
        "add_generation_prompt",
        "continue_final_message",
    ),
    *(
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "include_reasoning",
    ),
    *(
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "priority",
        "request_id",
        "session_id",
        "cache_salt",
    ),
    "routed_experts_prompt_start",
    # Fields from OpenAI clients that vLLM ignores.
    *("metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "verbosity"),
)
"""Fields that leave the distribution unchanged, or whose effect the record describes."""

KNOWN = frozenset((*CLASHING, *CHANGED, *PLAIN))


def find_skip_reason(payload: Any) -> str:
    """Return why the answer to a request is not recorded.

    Empty if the request has one text prompt and one answer, and both belong to the plain target. A
    field in none of this module's lists is also a reason.
    """
    if not isinstance(payload, dict):
        return "unreadable" if payload is None else "unfit"
    set_fields = {name for name, value in payload.items() if _is_set(name, value)}
    prompt = payload.get("prompt")
    is_single = not isinstance(prompt, list) or (
        bool(prompt) and all(isinstance(token, int) for token in prompt)
    )
    # If a tool's schema may constrain the output, the log-probabilities contain the grammar's mask.
    is_free = not payload.get("tools") or payload.get("tool_choice") == "none"
    is_plain = payload.get("n") in (None, 1) and set_fields.isdisjoint((*CLASHING, *CHANGED))
    if not (is_single and is_free and is_plain):
        return "unfit"
    if not set_fields <= KNOWN:
        return "unknown_field"
    return "" if _is_text(payload.get("messages")) else "multimodal"


def _is_set(name: str, value: Any) -> bool:
    if value is None or value is False:
        return False
    return bool(value) or name in ZERO_IS_A_VALUE


def _is_text(messages: Any) -> bool:
    """Whether all messages of a chat contain only text, without other parts such as images."""
    messages = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(
        not isinstance(part, dict) or "text" in str(part.get("type", "text")) for part in parts
    )


def add_logprobs(payload: dict[str, Any], kind: str, top_k: int) -> dict[str, Any]:
    added: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    if kind == "chat":
        added |= {"logprobs": True, "top_logprobs": top_k}
    else:
        added |= {"logprobs": top_k}
    return payload | added


def strip_added(message: Any) -> bool:
    """Remove the fields that the tap added from an answer or event, whatever its format.

    Return False if nothing is left for the client.
    """
    if not isinstance(message, dict):
        return True
    choices = message.get("choices")
    choices = (
        [choice for choice in choices if isinstance(choice, dict)]
        if isinstance(choices, list)
        else []
    )
    had_tokens = any(choice.get("token_ids") for choice in choices)
    for part in (message, *choices):
        for name in ADDED_FIELDS:
            if name in part:
                part[name] = None
    # These are tokens without text, e.g. half of a character. vLLM sends such events only if token
    # ids are requested.
    is_empty_delta = had_tokens and all(
        "delta" in choice and not choice["delta"] and choice.get("finish_reason") is None
        for choice in choices
    )
    return not is_empty_delta


def _top_logprobs(logprobs: dict[str, Any]) -> list[dict[int, float]]:
    """Map token ids to log-probabilities, for each token of a completion or a chat."""
    if "content" in logprobs:
        tokens = [token["top_logprobs"] for token in logprobs["content"] or []]
        return [{_token_id(entry["token"]): entry["logprob"] for entry in top} for top in tokens]
    return [
        {_token_id(token): value for token, value in top.items()}
        for top in logprobs.get("top_logprobs") or []
    ]


def _token_id(name: str) -> int:
    digits = name.removeprefix("token_id:")
    if digits == name or not digits.isdecimal():
        message = (
            "the server does not name tokens by their ids (return_tokens_as_token_ids): it "
            "needs a newer vLLM"
        )
        raise AnswerError("unnamed_tokens", message)
    return int(digits)


def read_sampling(payload: dict[str, Any]) -> Sampling:
    """Read the sampling parameters of an answered request as vLLM interprets them.

    Raises:
        AnswerError: vLLM would have rejected them, so the server must have interpreted them
            differently.
    """
    given = {
        name: payload[name] for name in Sampling.__struct_fields__ if payload.get(name) is not None
    }
    try:
        top_k = int(given.pop("top_k", 0))
        numbers = {name: float(value) for name, value in given.items()}
    except (TypeError, ValueError, OverflowError):
        raise AnswerError(
            "sampling", "a sampling parameter of the request is not a number"
        ) from None
    sampling = structs.replace(Sampling(top_k=min(top_k, MAX_TOP_K)), **numbers)
    if find_bad_sampling(sampling):
        raise AnswerError(
            "sampling", "a sampling parameter of the request is outside the range that vLLM accepts"
        )
    if sampling.temperature == 0:  # at temperature 0, vLLM ignores the filters
        return structs.replace(sampling, top_p=1.0, top_k=0, min_p=0.0)
    return structs.replace(
        sampling,
        temperature=max(sampling.temperature, MIN_TEMPERATURE),
        top_k=max(sampling.top_k, 0),
    )
