"""What an engine drafts with each family, one token after the other: the oracle of `draft_steps`.

T = tokens, D = hidden, V = target vocabulary, W = draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.heads.draft import Batch, TargetSignal, final_hidden
from redraft.heads.families.dflash import DFlash
from redraft.heads.families.dspark import DSpark
from redraft.heads.families.eagle3 import Eagle3
from redraft.heads.families.medusa import Medusa
from redraft.heads.families.peagle import PEagle
from redraft.heads.families.standalone import StandaloneDraft
from redraft.heads.nn.attention import _prepare

Drafted = list[tuple[int, Tensor]]
"""Draft tokens in order, each with the distribution q [V] it was drawn from (one-hot at temperature
0).
"""


def draw(
    logits_V: Tensor, temperature: float, generator: torch.Generator | None = None
) -> tuple[int, Tensor]:
    """A draft token and the distribution q [V] it was drawn from.

    Temperature 0 takes the first maximum, one-hot.
    """
    if temperature == 0:
        best = int(logits_V.argmax())
        return best, torch.zeros_like(logits_V).index_fill_(0, torch.tensor([best]), 1)
    q_V = (logits_V / temperature).softmax(-1)
    return int(torch.multinomial(q_V, 1, generator=generator)), q_V


@torch.no_grad()
def propose(
    head: Any,
    prefix_ids: Sequence[int],
    signal: TargetSignal | None,
    num_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Drafted:
    """`num_tokens` draft tokens after the prefix, as an engine would draft them.

    The target has sampled the prefix's last token but not read it, so `signal` (B = 1) has one row
    fewer.
    """
    if hasattr(head, "propose"):  # of a made-up family
        made: Drafted = head.propose(prefix_ids, signal, num_tokens, temperature, generator)
        return made
    decode = next(
        (decode for kind, decode in DECODERS.items() if isinstance(head, kind)), of_recurrent
    )

    def draw_next(logits_W: Tensor) -> tuple[int, Tensor]:
        return draw(over_target_vocabulary(head, logits_W).float(), temperature, generator)

    return decode(head, prefix_ids, signal, num_tokens, draw_next)


def over_target_vocabulary(head: Any, logits_W: Tensor) -> Tensor:
    """Logits over the target's vocabulary, [V]; -inf at ids outside the draft's vocabulary."""
    draft_ids_W = getattr(head, "_draft_ids_W", None)
    if draft_ids_W is None:
        return logits_W
    return logits_W.new_full((head.shape.vocab_size,), -torch.inf).index_copy(
        0, draft_ids_W, logits_W
    )


def of_standalone(
    head: Any, prefix_ids: Sequence[int], signal: Any, num_tokens: int, draw_next: Any
) -> Drafted:
    unread_BT, cache, drafted = torch.tensor([list(prefix_ids)]), None, []
    for _ in range(num_tokens):
        output = head.model(input_ids=unread_BT, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        drafted.append(draw_next(output.logits[0, -1]))
        unread_BT = torch.tensor([[drafted[-1][0]]])
    return drafted


def of_medusa(
    head: Any, prefix_ids: Sequence[int], signal: Any, num_tokens: int, draw_next: Any
) -> Drafted:
    # the target has not read the prefix's last token, so the last row is the one before
    hidden_D = final_hidden(signal)[0, len(prefix_ids) - 2].to(head._dtype)
    heads = list(zip(head.blocks, head.lm_heads, strict=True))[:num_tokens]
    return [draw_next(lm_head(block(hidden_D))) for block, lm_head in heads]


def of_peagle(
    head: Any, prefix_ids: Sequence[int], signal: Any, num_tokens: int, draw_next: Any
) -> Drafted:
    """All tokens from the prefix and `num_tokens` - 1 masks."""
    feature_BTD, num_rows = head.feature(signal), len(prefix_ids) - 1
    at_1N = torch.arange(num_rows + num_tokens - 1)[None]
    ids_1N = torch.full_like(at_1N, head._mask_token_id)
    ids_1N[0, :num_rows] = torch.tensor(list(prefix_ids[1:]))
    masks_1ND = head._mask_feature().expand(1, num_tokens - 1, -1)
    caches = [KeyCache() for _ in range(1 + len(head.layers))]
    hidden_ND = head._pass(ids_1N, torch.cat([feature_BTD, masks_1ND], dim=1), at_1N, caches)[0]
    # The last known row proposes the first token, each mask one more: `num_tokens` rows.
    return [draw_next(_output(head, hidden_D)) for hidden_D in hidden_ND[num_rows - 1 :]]


def of_dflash(
    head: Any, prefix_ids: Sequence[int], signal: Any, num_tokens: int, draw_next: Any
) -> Drafted:
    """All tokens from one block.

    The anchor is the prefix's last token, whose row the target has not computed.
    """
    context_BTD, num_rows = head.feature(signal), len(prefix_ids) - 1
    batch = Batch.padded([prefix_ids])
    # The zero row only makes lengths equal. The block's range ends one row earlier.
    context_BTD = F.pad(context_BTD, (0, 0, 0, 1))
    first = head.config.first_slot
    hidden_SD = head._blocks(
        batch, context_BTD, torch.tensor([[num_rows - 1]]), first + num_tokens
    )[0, 0]
    before, drafted = prefix_ids[-1], []
    for logits_W in _output(head, hidden_SD[first:]).float():
        if isinstance(head, DSpark):
            # The one sequential part: each bias needs the token drawn in the slot before.
            logits_W = logits_W + head.markov_head.markov_w2(
                head.markov_head.markov_w1.weight[before]
            ).to(logits_W)
        drafted.append(draw_next(logits_W))
        before = drafted[-1][0]
    return drafted


def of_recurrent(
    head: Any, prefix_ids: Sequence[int], signal: Any, num_tokens: int, draw_next: Any
) -> Drafted:
    feature_BTD, drafted = head.feature(signal), []
    caches = [KeyCache() for _ in range(getattr(head.config, "num_layers", 1))]
    # Row t reads token t + 1 beside the feature of row t: n tokens make n - 1 rows.
    ids_BT = torch.tensor([list(prefix_ids[1:])])
    position_ids_BT = torch.arange(len(prefix_ids) - 1)[None]
    for _ in range(num_tokens):
        hidden_BTD, feature_BTD = head.step(ids_BT, feature_BTD, position_ids_BT, *caches)
        drafted.append(draw_next(_output(head, hidden_BTD[0, -1])))
        # from the second token on, a pass has one row: the last one, one position further
        ids_BT, position_ids_BT = torch.tensor([[drafted[-1][0]]]), position_ids_BT[:, -1:] + 1
        feature_BTD = feature_BTD[:, -1:]
    return drafted


DECODERS = {
    StandaloneDraft: of_standalone,
    Medusa: of_medusa,
    PEagle: of_peagle,
    DFlash: of_dflash,
}


def _output(head: Any, hidden: Tensor) -> Tensor:
    """The output head on hidden states, over the draft's vocabulary."""
    weight_WD = (
        head.head
        if isinstance(head, Eagle3)
        else head._head_WD
        if isinstance(head, DFlash)
        else head._head_VD
    )
    return F.linear(hidden, weight_WD.to(hidden.dtype))


class KeyCache:
    """The memory of a decoder: the rows of each call follow those of the call before."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def attend(self, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, scale: float) -> Tensor:
        q, k, v = _prepare(q_BHTE, k_BGTE, v_BGTE)
        self._keys = k if self._keys is None else torch.cat([self._keys, k], dim=2)
        self._values = v if self._values is None else torch.cat([self._values, v], dim=2)
        num_queries, num_keys = q.shape[2], self._keys.shape[2]
        # 2 queries and 5 keys: tril(3) shows keys 0..3 to the first query and 0..4 to the second.
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        out: Tensor = F.scaled_dot_product_attention(
            q, self._keys, self._values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        return out[..., : v_BGTE.shape[-1]]
