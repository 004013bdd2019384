"""Create records as a server under load would, without a server.

The capacity page and the ingest benchmark use such records.

R = rows, K = kept top-k ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redraft.files.setting_error import SettingError, require_least
from redraft.online.engine.config import LOG_RECORD_BYTES
from redraft.online.engine.request_log import RequestInfo, RequestLog, Rows, VerifiedStep
from redraft.online.records.record import Record, Sampling


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Size and acceptance of the requests."""

    prompt_tokens: int = 500
    """Number of tokens per prompt."""
    output_tokens: int = 250
    """Number of tokens per answer."""
    num_speculative_tokens: int = 3
    """Draft tokens per step. A record has one row for each draft token and one for the bonus token.
    """
    tau: float = 2.5
    """Tokens emitted per target step, including the bonus token."""
    top_k: int = 32
    """Number of token probabilities kept per row."""
    vocab_size: int = 128_256
    """Size of the target's vocabulary. `redraft plan fleet` replaces it with that of --target."""

    def __post_init__(self) -> None:
        require_least(self, prompt_tokens=1, output_tokens=1, num_speculative_tokens=1, top_k=1)
        if not 1 <= self.tau <= self.num_speculative_tokens + 1:
            raise SettingError(
                f"{{tau}} is {self.tau}: with {self.num_speculative_tokens} draft tokens, a step "
                f"emits 1 to {self.num_speculative_tokens + 1} tokens"
            )


def make_record(number: int, traffic: Traffic) -> Record:
    """Create the record of one complete request with the plugin's code.

    The same `number` always gives the same record.

    The ids follow a power law, as words do. The log-probabilities decrease along a row and use all
    bits of a float32, so they hardly compress, like real ones.
    """
    rng = np.random.default_rng(number)
    prompt = _ids(rng, traffic, traffic.prompt_tokens)
    log = RequestLog(info=_info(f"cmpl-{number:08d}", prompt, traffic), max_bytes=LOG_RECORD_BYTES)
    # This token is sampled from the prompt, before the first draft.
    log.append(len(prompt), [int(_ids(rng, traffic, 1)[0])], None)
    while not log.is_complete:
        start = len(prompt) + len(log.output)
        num_accepted = _num_accepted(rng, traffic)
        drafts = _ids(rng, traffic, traffic.num_speculative_tokens)
        sampled = [*drafts[:num_accepted].tolist(), int(_ids(rng, traffic, 1)[0])]
        log.append(start, sampled, _verified(rng, traffic, start, drafts, num_accepted))
    # This server id and fingerprint are placeholders that the benchmarks' buffers accept.
    record = log.cut_segment("0123456789abcdef", "0" * 64)
    assert record is not None
    return record


def _info(request_id: str, prompt: np.ndarray, traffic: Traffic) -> RequestInfo:
    return RequestInfo(
        request_id=request_id,
        prompt_ids=prompt.tolist(),
        sampling=Sampling(),
        max_tokens=traffic.output_tokens,
        stop_ids=frozenset(),
        domain="code",
    )


def _verified(
    rng: np.random.Generator, traffic: Traffic, start: int, drafts: np.ndarray, num_accepted: int
) -> VerifiedStep:
    num_rows = len(drafts) + 1
    gaps_RK = rng.exponential(0.5, (num_rows, traffic.top_k))
    return VerifiedStep(
        start=start,
        draft_ids=drafts,
        draft_probs=np.ones(len(drafts), np.float32),
        num_accepted=num_accepted,
        rows=Rows(
            topk_ids_RK=_ids(rng, traffic, num_rows * traffic.top_k).reshape(num_rows, -1),
            topk_log_probs_RK=-gaps_RK.cumsum(1).astype(np.float32),
            log_sum_exp_R=rng.normal(20, 3, num_rows).astype(np.float32),
        ),
    )


def _num_accepted(rng: np.random.Generator, traffic: Traffic) -> int:
    """Draw a random number of accepted draft tokens with mean tau - 1."""
    return int(
        rng.binomial(
            traffic.num_speculative_tokens, (traffic.tau - 1) / traffic.num_speculative_tokens
        )
    )


def _ids(rng: np.random.Generator, traffic: Traffic, count: int) -> np.ndarray:
    # V^u for a uniform u has the density 1 / id, i.e. follows Zipf's law.
    ids: np.ndarray = (traffic.vocab_size ** rng.random(count)).astype(np.int32) - 1
    return ids
