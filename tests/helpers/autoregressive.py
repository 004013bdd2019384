"""A draft for the reference sampler that draws one token after another, as a standalone draft does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from reference_sampler import NextLogits, Propose
from torch import Tensor

from redraft.eval.acceptance import probabilities


def token_by_token(draft: NextLogits) -> Propose:
    """A proposer: draws each token from `draft` after the one before."""

    def propose(
        prefix: Sequence[int],
        num_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> list[tuple[int, Tensor]]:
        tokens, drafted = list(prefix), []
        for _ in range(num_tokens):
            q_V = probabilities(draft(tokens), temperature)
            tokens.append(int(torch.multinomial(q_V, 1, generator=generator)))
            drafted.append((tokens[-1], q_V))
        return drafted

    return propose
