"""The reference decoder: head and target in this process, for heads without an engine to serve them.

T = tokens, D = hidden, V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from redraft.eval.counts import AcceptanceCounts
from redraft.eval.engine.measure import Measurement, Output
from redraft.eval.forecast.greedy import Continuation
from redraft.eval.forecast.sampler import sample
from redraft.heads.draft import ExactTarget, TargetSignal
from redraft.heads.progress import Progress


class TargetReader:
    """A target's last hidden states on any prefix. The previous prefix is cached, and only the rest is computed."""

    def __init__(self, model: Any) -> None:
        self.model, self._cache = model, DynamicCache(config=model.config)
        self._head_VD: Tensor = model.get_output_embeddings().weight
        self._ids: list[int] = []
        self._hidden_TD: Tensor = self._head_VD.new_empty(0, self._head_VD.shape[1])

    @torch.no_grad()
    def hidden(self, ids: Sequence[int]) -> Tensor:
        """After the final norm, [T, D]."""
        pairs = enumerate(zip(ids, self._ids, strict=False))
        known = next((i for i, (new, old) in pairs if new != old), min(len(ids), len(self._ids)))
        # Otherwise `ids` begins the cached text, and attention is causal: the cached rows are right.
        if known < len(ids):
            # The cache holds another branch: draft tokens of which one was rejected.
            if known < len(self._ids):
                self._cache.crop(known - len(self._ids))  # negative: how many to forget
            output = self.model.base_model(
                input_ids=torch.tensor([list(ids[known:])], device=self._head_VD.device),
                position_ids=torch.arange(known, len(ids), device=self._head_VD.device)[None],
                past_key_values=self._cache,
                use_cache=True,
            )
            self._hidden_TD = torch.cat([self._hidden_TD[:known], output.last_hidden_state[0]])
            self._ids = list(ids)
        return self._hidden_TD[: len(ids)]

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """[V]."""
        logits_V: Tensor = self._head_VD @ self.hidden(ids)[-1]
        return logits_V

    def signal(self, ids: Sequence[int]) -> TargetSignal:
        """The signal on these tokens, for heads on the last hidden state."""
        return TargetSignal(distribution=ExactTarget(hidden_BTD=self.hidden(ids)[None], head_VD=self._head_VD))


def measure_by_reference(
    model: Any, head: Any, continuations: Sequence[Continuation], num_speculative_tokens: int
) -> Measurement:
    """Decode the greedy answers again, to the known lengths, with blocks drafted by `head`; None decodes without."""
    reader = TargetReader(model)
    num_tokens = 0 if head is None else num_speculative_tokens

    def propose(
        prefix: Sequence[int], num_tokens: int, temperature: float, generator: torch.Generator | None
    ) -> list[tuple[int, Tensor]]:
        if num_tokens == 0:
            return []
        # Without the last token, which the target has sampled and not read, as in an engine.
        drafted: list[tuple[int, Tensor]] = head.propose(
            prefix, reader.signal(prefix[:-1]), num_tokens, temperature, generator
        )
        reader.hidden([*prefix, *(token for token, _ in drafted)])  # one pass over the block verifies it
        return drafted

    outputs, started = [], time.perf_counter()
    for known in Progress(continuations, desc="reference decoder", unit="prompt"):
        token_ids, counts = sample(
            reader.next_logits,
            propose,
            known.prompt.token_ids,
            num_speculative_tokens=num_tokens,
            max_tokens=len(known.output_ids),
            temperature=0,
        )
        outputs.append(Output(token_ids=token_ids, counts=counts if num_tokens else None))
    duration_s = time.perf_counter() - started
    return Measurement(
        prompts=[known.prompt for known in continuations],
        outputs=outputs,
        duration_s=duration_s,
        dtype=str(model.dtype).removeprefix("torch."),
        counts=sum((o.counts for o in outputs if o.counts), AcceptanceCounts.zero(num_tokens)) if num_tokens else None,
    )
