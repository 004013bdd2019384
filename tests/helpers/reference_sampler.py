"""The reference sampler: speculative sampling written to be read.

It decodes for `reference` and checks the forecast.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. The output follows the target's
distribution exactly, whatever the draft proposes.

V = vocabulary, K = num_speculative_tokens. p = target, q = draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redraft.engine.counts import AcceptanceCounts
from redraft.eval.acceptance import probabilities

NextLogits = Callable[[Sequence[int]], Tensor]
"""A model: token ids in, the logits of the next token out, [V]."""

Propose = Callable[[Sequence[int], int, float, torch.Generator | None], list[tuple[int, Tensor]]]
"""A draft: (prefix, K, temperature, generator) in, K tokens out, each with the q [V] it was drawn
from.
"""


def sample(
    target: NextLogits,
    propose: Propose,
    prompt: Sequence[int],
    *,
    num_speculative_tokens: int,
    max_tokens: int,
    temperature: float = 1.0,
    greedy_draft: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[list[int], AcceptanceCounts]:
    """`max_tokens` tokens after `prompt`, and the counts of the draft blocks.

    The tokens are distributed as the target's.

    The first token is the target's, as in an engine's prefill. The last block counts in full
    although it may be cut.
    """
    tokens = [*prompt, _draw(probabilities(target(prompt), temperature), generator)]
    end = len(prompt) + max_tokens
    accepted: list[int] = []
    while len(tokens) < end:
        drafted = propose(
            tokens, num_speculative_tokens, 0.0 if greedy_draft else temperature, generator
        )
        emitted = verify_block(target, tokens, drafted, temperature, generator)
        accepted.append(len(emitted) - 1)
        tokens += emitted
    return tokens[len(prompt) : end], AcceptanceCounts.from_blocks(accepted, num_speculative_tokens)


def verify_block(
    target: NextLogits,
    prefix: Sequence[int],
    drafted: Sequence[tuple[int, Tensor]],
    temperature: float,
    generator: torch.Generator | None = None,
) -> list[int]:
    """The accepted draft tokens and one token of the target: 1 to K + 1 tokens.

    Token x is accepted with probability min(1, p(x) / q(x)); the first one rejected is replaced by
    a draw from max(0, p - q), normalised, and the tokens drafted after it are dropped.
    """
    tokens = list(prefix)
    for token, q_V in drafted:
        p_V = probabilities(target(tokens), temperature)
        # Rejected if u >= p / q, without the division. With `>`, u = 0 would accept a token of p =
        # 0. At temperature 0 both are one-hot, and a match is always accepted, because u < 1.
        if _uniform(generator) * q_V[token] >= p_V[token]:
            # the part of p that q has not covered: accepted and drawn tokens together then follow p
            return [*tokens[len(prefix) :], _draw((p_V - q_V).clamp(min=0), generator)]
        tokens.append(token)
    # All are accepted: the target's row after the last of them gives one more, the bonus token.
    return [*tokens[len(prefix) :], _draw(probabilities(target(tokens), temperature), generator)]


def _draw(weights_V: Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(weights_V, 1, generator=generator))


def _uniform(generator: torch.Generator | None) -> float:
    return float(torch.rand((), dtype=torch.float64, generator=generator))
