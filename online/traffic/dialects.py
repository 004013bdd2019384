"""Fields that the tap adds to a request and reads from the answer, for each engine.

                paths with answers                                  added fields
    vLLM        /v1/completions, /v1/chat/completions               ids and log-probabilities
    SGLang      the same, not streamed                              ids (read in 0.5.23, not run)
    llama.cpp   the same and /completion, not streamed              ids, and `verbose`

The tap sends no field that the engine rejects or does not have. Records of SGLang and llama.cpp
contain only ids: when llama.cpp runs a draft, it reports a probability of 1 for nearly every token,
which would teach a draft to be overconfident. `redraft data score` adds the distributions.
TensorRT-LLM refuses unknown fields and returns no prompt ids, so its answers cannot be recorded.
"""

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.engine.running_server import EngineName
from redraft.online.traffic import tap_messages
from redraft.online.traffic.tap_messages import (
    COMPLETION_PATHS,
    Answer,
    AnswerError,
)

Ask = Callable[[str, bytes, dict[str, Any] | None], Awaitable[dict[str, Any]]]
"""(method, path, content) -> the server's JSON."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The dialect of vLLM; subclasses override what other engines do differently."""

    engine: EngineName = "vllm"
    paths: Mapping[str, str] = field(default_factory=lambda: COMPLETION_PATHS)
    """Paths whose answers the tap reads, with the type of each answer."""
    client_paths: tuple[str, ...] = ()
    """First components of the engine's client paths, in addition to vLLM's."""
    is_streamed: bool = True
    """Whether streams can be read too."""
    has_probabilities: bool = True

    def find_skip_reason(self, payload: Any) -> str:
        """Return why the answer to a request is not recorded; empty if it is recorded."""
        reason = tap_messages.find_skip_reason(payload)
        return reason or ("" if self.is_streamed or not payload.get("stream") else "streamed")

    def ask(self, payload: dict[str, Any], kind: str, top_k: int) -> dict[str, Any]:
        """Return the request with the tap's fields added."""
        return tap_messages.add_logprobs(payload, kind, top_k)

    def strip(self, message: Any) -> bool:
        """Remove the tap's fields; return False if nothing is left for the client."""
        return tap_messages.strip_added(message)

    def answer(self, **known: Any) -> Answer:
        return Answer(**known)

    async def complete(self, answer: Answer, ask: Ask) -> None:
        """Request the data that the answer itself does not contain."""


@dataclass(kw_only=True)
class IdsAnswer(Answer):
    """An answer that contains only token ids."""

    prompt: str = ""
    num_prompt_tokens: int | None = None
    """Number of prompt tokens according to the server; None if it returns the ids."""

    def rank(self, top_k: int) -> tuple[int, NDArray[np.float64]]:
        return len(self.output_ids), np.empty((0, 1, 2))


class SglangAnswer(IdsAnswer):
    def read(self, message: dict[str, Any]) -> None:
        self.request_id = str(message.get("id") or self.request_id)
        for choice in message.get("choices") or []:
            self.prompt_ids += choice.get("prompt_token_ids") or []
            # A chat's choice comes first, then a completion's.
            self.output_ids += choice.get("response_token_ids") or choice.get("token_ids") or []


@dataclass(frozen=True, kw_only=True)
class Sglang(Dialect):
    engine: EngineName = "sglang"
    client_paths: tuple[str, ...] = ("generate", "encode", "model_info", "health_generate")
    is_streamed: bool = False
    has_probabilities: bool = False

    def ask(self, payload: dict[str, Any], kind: str, top_k: int) -> dict[str, Any]:
        return payload | {"return_token_ids": True}

    def strip(self, message: Any) -> bool:
        choices = message.get("choices") if isinstance(message, dict) else None
        for choice in choices if isinstance(choices, list) else ():
            for name in ("prompt_token_ids", "response_token_ids", "token_ids"):
                if isinstance(choice, dict) and name in choice:
                    choice[name] = None
        return True

    def answer(self, **known: Any) -> Answer:
        return SglangAnswer(**known)


SAME_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
OFF = {
    "dynatemp_range": 0,
    "xtc_probability": 0,
    "typical_p": 1,
    "dry_multiplier": 0,
    "mirostat": 0,
    "adaptive_target": -1,
    "top_n_sigma": -1,
}
"""llama.cpp's samplers that a record cannot describe, with the value that disables each."""

OF_LLAMA_CPP = frozenset(
    {
        *("n_predict", "cache_prompt", "id_slot", "repeat_penalty", "repeat_last_n", "samplers"),
        *("timings_per_token", "n_keep", "t_max_predict_ms", *OFF),
    }
)
"""Fields of llama.cpp that leave the distribution unchanged, or whose effect the record describes.
"""


@dataclass(kw_only=True)
class LlamaCppAnswer(IdsAnswer):
    def read(self, message: dict[str, Any]) -> None:
        native = message.get("__verbose") or message
        self.request_id = str(message.get("id") or uuid.uuid4().hex)
        if native.get("truncated"):
            raise AnswerError("truncated", "llama.cpp truncated the prompt to its context")
        used = native["generation_settings"]
        on = [name for name, off in OFF.items() if used.get(name, off) != off]
        if on or used.get("lora") or used.get("grammar"):
            reason = (on or ["lora" if used.get("lora") else "grammar"])[0]
            raise AnswerError("sampling", f"llama.cpp samples with {reason}")
        self.sampling = {name: used[name] for name in SAME_SAMPLING if name in used}
        self.sampling["repetition_penalty"] = used.get("repeat_penalty", 1.0)
        self.output_ids, self.prompt = list(native["tokens"]), native["prompt"]
        self.num_prompt_tokens = int(native["tokens_evaluated"])


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(Dialect):
    engine: EngineName = "llama.cpp"
    paths: Mapping[str, str] = field(
        default_factory=lambda: {**COMPLETION_PATHS, "/completion": "native"}
    )
    client_paths: tuple[str, ...] = ("completion", "completions", "infill", "apply-template")
    is_streamed: bool = False
    has_probabilities: bool = False

    def find_skip_reason(self, payload: Any) -> str:
        if isinstance(payload, dict) and payload.keys() & {"verbose", "return_tokens", "n_probs"}:
            # Otherwise, fields that the client requested would be removed from its answer.
            return "unfit"
        known = payload
        if isinstance(payload, dict):
            known = {name: value for name, value in payload.items() if name not in OF_LLAMA_CPP}
        return super().find_skip_reason(known)

    def ask(self, payload: dict[str, Any], kind: str, top_k: int) -> dict[str, Any]:
        added = {} if kind == "native" else {"verbose": True}
        return payload | {"return_tokens": True} | added

    def strip(self, message: Any) -> bool:
        if not isinstance(message, dict):
            return True
        if message.pop("__verbose", None) is None and "tokens" in message:
            message["tokens"] = []
        return True

    def answer(self, **known: Any) -> Answer:
        return LlamaCppAnswer(**known)

    async def complete(self, answer: Answer, ask: Ask) -> None:
        """Obtain the prompt's ids, which llama.cpp does not return.

        Raises:
            AnswerError: its tokenizer gives a different number of ids than the server read.
        """
        assert isinstance(answer, LlamaCppAnswer)
        asked = {"content": answer.prompt, "add_special": True, "parse_special": True}
        answer.prompt_ids = list((await ask("POST", b"/tokenize", asked))["tokens"])
        if len(answer.prompt_ids) != answer.num_prompt_tokens:
            raise AnswerError(
                "prompt",
                "the token ids from llama.cpp's tokenizer differ from those that the server read",
            )


DIALECTS: Mapping[EngineName, Dialect] = {
    "vllm": Dialect(),
    "sglang": Sglang(),
    "llama.cpp": LlamaCpp(),
}
