"""The messages between a client and vLLM: what the tap adds to a question and takes out of an answer.

N = output tokens, K = kept top-k ids.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from online.records import Record, Sampling
from online.request_origin import Origin

COMPLETION_PATHS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
"""Where text is asked for, and how."""

ADDED_FIELDS = ("logprobs", "token_ids", "prompt_token_ids")
"""Of an answer's choices, and of the answer: what is only there because the tap asked."""


@dataclass(kw_only=True)
class Answer:
    """What the tap has read of one answer so far."""

    request_id: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    """Log-probability by token id, one of each output token."""

    def read(self, message: dict[str, Any]) -> None:
        """Take in a whole answer, or one event of a streamed one."""
        self.request_id = message.get("id") or self.request_id
        self.prompt_ids += message.get("prompt_token_ids") or []
        for choice in message.get("choices") or []:
            self.prompt_ids += choice.get("prompt_token_ids") or []
            self.output_ids += choice.get("token_ids") or []
            self.top += _top_logprobs(choice.get("logprobs") or {})

    def record(
        self, question: dict[str, Any], origin: Origin, server_id: str, target_fingerprint: str, top_k: int
    ) -> Record | None:
        """The record of the answer, None where it has no token."""
        count = min(len(self.output_ids), len(self.top))
        if not count or not self.prompt_ids:
            return None
        ranked = [_likeliest(top, sampled) for top, sampled in zip(self.top, self.output_ids, strict=False)]
        top_k = min(top_k, *map(len, ranked))
        pairs_NK2 = np.array([top[:top_k] for top in ranked], np.float64)
        unknown = np.full(count, np.nan, "<f4").tobytes()
        return Record(
            server_id=server_id,
            request_id=self.request_id,
            sequence=0,
            time_s=time.time(),
            domain=origin.domain,
            tenant=origin.tenant,
            target_fingerprint=target_fingerprint,
            sampling=_sampling(question),
            num_prompt_tokens=len(self.prompt_ids),
            top_k=top_k,
            context=np.array(self.prompt_ids, "<i4").tobytes(),
            output=np.array(self.output_ids[:count], "<i4").tobytes(),
            row_positions=(len(self.prompt_ids) + np.arange(count, dtype="<i4")).tobytes(),
            row_branches=bytes(4 * count),
            row_drafts=np.full(count, -1, "<i4").tobytes(),
            row_draft_probs=unknown,
            row_accepted=bytes(count),
            row_topk_ids=pairs_NK2[:, :, 0].astype("<i4").tobytes(),
            row_topk_log_probs=pairs_NK2[:, :, 1].astype("<f4").tobytes(),
            row_log_sum_exp=unknown,
        )


def _likeliest(top: dict[int, float], sampled: int) -> list[tuple[int, float]]:
    """The tokens that are certainly the likeliest, by falling log-probability.

    vLLM always tells the sampled token's too: where it comes last it may be none of the likeliest, and have taken the
    place of one.
    """
    ranked = sorted(top.items(), key=lambda item: -item[1])
    return ranked[:-1] if len(ranked) > 1 and ranked[-1][0] == sampled else ranked


CONSTRAINED = (
    "structured_outputs",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""By a grammar; servers of before 2026 call it guided."""


def is_recordable(question: Any) -> bool:
    """Whether a request has one prompt and one answer and asks for nothing that the tap would have to add to."""
    if not isinstance(question, dict):
        return False
    prompt = question.get("prompt")
    is_single = not isinstance(prompt, list) or (bool(prompt) and all(isinstance(token, int) for token in prompt))
    asks = ("logprobs", "top_logprobs", "prompt_logprobs", "echo", "return_token_ids", "return_tokens_as_token_ids")
    unusual = ("use_beam_search", "logprob_token_ids", "suffix", *CONSTRAINED)
    # `logprobs: 0` is a wish too: the sampled token's
    is_plain = all(question.get(name) is None or question.get(name) is False for name in (*asks, *unusual))
    # Of a call that a tool's schema may constrain, what vLLM tells comes with the grammar's mask in it.
    is_free = not question.get("tools") or question.get("tool_choice") == "none"
    return is_single and is_plain and is_free and question.get("n") in (None, 1)


def tapped(question: dict[str, Any], kind: str, top_k: int) -> dict[str, Any]:
    """The request with the tap's own wishes added."""
    wish: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    wish |= {"logprobs": True, "top_logprobs": top_k} if kind == "chat" else {"logprobs": top_k}
    return question | wish


def strip(message: dict[str, Any]) -> bool:
    """Take out of an answer or event what the tap asked for; False where nothing is left that the client would get."""
    choices = message.get("choices") or []
    had_tokens = any(choice.get("token_ids") for choice in choices)
    for part in (message, *choices):
        for name in ADDED_FIELDS:
            if name in part:
                part[name] = None
    is_empty_delta = had_tokens and all(
        "delta" in choice and not choice["delta"] and choice.get("finish_reason") is None for choice in choices
    )
    return not is_empty_delta


def _top_logprobs(logprobs: dict[str, Any]) -> list[dict[int, float]]:
    """Log-probability by token id, one of each token, from the logprobs of either kind of answer."""
    if "content" in logprobs:
        tokens = [token["top_logprobs"] for token in logprobs["content"] or []]
        return [{_token_id(entry["token"]): entry["logprob"] for entry in top} for top in tokens]
    return [{_token_id(token): value for token, value in top.items()} for top in logprobs.get("top_logprobs") or []]


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _sampling(question: dict[str, Any]) -> Sampling:
    """What the request says of sampling; the server's own defaults where it says nothing are not known here."""
    given = {name: question[name] for name in Sampling.__struct_fields__ if question.get(name) is not None}
    return Sampling(**given)
