"""Initial weights of an EAGLE-3 head before its first training step.

They are fitted by least squares to the target's hidden states.

    hidden[t+1] ~ A streams[t] + B embed(x[t+1]) + C copies[t]
      A -> fc
      B -> attention heads that attend to their own row
      C -> attention heads that attend to earlier rows whose token was x[t+1] and copy the token that followed it

`hidden` is the state from which the target predicts x[t+2]. Training finds these maps slowly. The
last one, attention that copies (an "induction head", Olsson et al., arXiv 2209.11895), forms late
even in large models. Here, all three take a few passes of matrix products over some thousands of
tokens, without a gradient. The MLP starts at zero.

S = sampled rows, F = size of a row's concatenated streams, D = hidden, E = attention head size, R =
rank of B.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from redraft.heads.draft import Batch, TargetSignal, aux_streams, final_hidden
from redraft.heads.families.eagle3 import Eagle3

RIDGE = 1e-3  # Penalty of squared weights, as a share of the inputs' mean square.
# Attention score of a row with itself. This score dominates the softmax even among thousands of
# tokens.
OWN_ROW = 32.0
# Attention score of an earlier row with the same token; lower, because keys are estimates.
SAME_TOKEN = 16.0


@torch.no_grad()
def start_by_least_squares(
    head: Eagle3, known: Sequence[tuple[Batch, TargetSignal]], stream_scales: Sequence[Tensor]
) -> None:
    """Set the weights of an untrained head by least squares.

    The output head and the final norm stay the target's (`Eagle3.init_from_layers`). `known`
    contains batches with the target's hidden states, with several times F + D tokens in total.
    `stream_scales` contains, for each stream, the norm weights [D] of the target layer whose input
    is that stream. These weights become the weights of `fc_norm`, because they shrink the entries
    that are hundreds of times larger than the others.

    Raises:
        ValueError: the head has no norm for each stream (`fc_norm`), or uses the normed feature as
            residual (`norm_before_residual`).
    """
    if not head.config.fc_norm or head.config.norm_before_residual:
        raise ValueError(
            "initialisation by least squares needs a head with fc_norm and without norm_before_residual"
        )
    layer, size = head.midlayer, head.shape.hidden_size
    own_norms: Any = head.fc_norm
    for mine, scale in zip(own_norms, stream_scales, strict=True):
        mine.weight.copy_(scale)
    for norm in (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm):
        norm.weight.fill_(1.0)

    def rows() -> Iterator[Rows]:
        """Compute the rows again on each call.

        In float32, they would take several times the memory of `known`.
        """
        return (Rows.of(head, batch, signal) for batch, signal in known)

    # 1. A and B.
    squares = gram((x, x) for x in (r.inputs for r in rows()))
    width = len(squares) - size
    solved = solve_ridge(squares, gram((r.inputs, r.hidden_SD) for r in rows()))
    a_DF, b_DD = solved.mT[:, :width], solved.mT[:, width:]
    head.fc.weight.copy_(a_DF)

    # 2. Attention. Its keys encode the row's own token, read from the feature A streams.
    own_FD = gram((r.streams_SF, r.own_SD) for r in rows())
    token_of_DD = solve_ridge(a_DF @ squares[:width, :width] @ a_DF.mT, a_DF @ own_FD).mT
    roles = Roles.of(head)
    aim(head, roles, token_of_DD)
    left_DR, right_RD = factor(
        b_DD, squares[width:, width:], rank=roles.slot(len(roles.own_row)).start
    )
    for place, (_, key) in chain(enumerate(roles.own_row), enumerate(roles.same_token)):
        layer.self_attn.v_proj.weight[roles.slot(key), :size] = right_RD[roles.slot(place)].to(
            head.fc.weight
        )

    # 3. B, and C fitted to the remainder.
    out_DO = layer.self_attn.o_proj.weight.zero_()
    for place, (query, _) in enumerate(roles.own_row):
        out_DO[:, roles.slot(query)] = left_DR[:, roles.slot(place)].to(out_DO)
    if roles.same_token:
        slots = [roles.slot(query) for query, _ in roles.same_token]
        followers = [
            torch.cat([out[:, slot] for slot in slots], dim=1)
            for out in attend(head, known, rows())
        ]
        rest = (r.hidden_SD - r.inputs @ solved.to(r.inputs) for r in rows())
        c_DR = solve_ridge(
            gram((f, f) for f in followers), gram(zip(followers, rest, strict=True))
        ).mT
        for place, slot in enumerate(slots):
            out_DO[:, slot] = c_DR[:, roles.slot(place)].to(out_DO)
    layer.mlp.down_proj.weight.zero_()
    for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
        projection.weight.normal_(0, 1 / math.sqrt(size))


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows t of a batch that have a previous and a next row in their document.

    The first row of a document is excluded, because in many targets its streams are a thousand
    times larger. Row t + 1 must have a state; a state that was not requested from the server is
    zero.
    """

    kept_BT: Tensor
    streams_SF: Tensor
    own_SD: Tensor
    """Normed embedding of x[t]."""
    next_SD: Tensor
    """Normed embedding of x[t+1]."""
    hidden_SD: Tensor
    """State of row t + 1, divided by the weights of the final norm."""

    @property
    def inputs(self) -> Tensor:
        """Return streams and next embeddings, concatenated, [S, F + D]."""
        return torch.cat([self.streams_SF, self.next_SD], dim=1)

    @staticmethod
    def of(head: Eagle3, batch: Batch, signal: TargetSignal) -> Rows:
        embed_BTD = head.midlayer.input_layernorm(head.embed(batch.input_ids_BT).to(head.fc.weight))
        streams_BTF = head.concat(aux_streams(signal, head.aux_layer_ids).to(head.fc.weight))
        # Where the weight is zero, the normed state is zero regardless of the value before.
        hidden_BTD = final_hidden(signal).to(head.norm.weight) / head.norm.weight.where(
            head.norm.weight != 0, 1
        )
        document_BT = batch.document_BT
        kept_BT = hidden_BTD[:, 1:].any(dim=-1)
        kept_BT &= (document_BT[:, 1:] == document_BT[:, :-1]) & (document_BT[:, :-1] >= 0)
        kept_BT &= batch.position_ids_BT[:, :-1] > 0
        return Rows(
            kept_BT=kept_BT,
            streams_SF=streams_BTF[:, :-1][kept_BT],
            own_SD=embed_BTD[:, :-1][kept_BT],
            next_SD=embed_BTD[:, 1:][kept_BT],
            hidden_SD=hidden_BTD[:, 1:][kept_BT],
        )


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of the attention heads, as pairs (query head, key head)."""

    own_row: list[tuple[int, int]]
    same_token: list[tuple[int, int]]
    head_size: int

    @staticmethod
    def of(head: Eagle3) -> Roles:
        keys = head.shape.num_key_value_heads
        group = head.shape.num_attention_heads // keys
        if group > 1:  # uses the first two queries of a group; the other queries start at zero
            own, same = (
                [(key * group, key) for key in range(keys)],
                [(key * group + 1, key) for key in range(keys)],
            )
        else:
            own, same = (
                [(key, key) for key in range(0, keys, 2)],
                [(key, key) for key in range(1, keys, 2)],
            )
        return Roles(own_row=own, same_token=same, head_size=head.shape.head_dim)

    def slot(self, number: int) -> slice:
        return slice(number * self.head_size, (number + 1) * self.head_size)


def aim(head: Eagle3, roles: Roles, token_of_DD: Tensor) -> None:
    """Set the query and key weights for their roles, and clear the values.

    In the fast half of the rotary pairs, which distinguishes near from far rows, a key encodes the
    token in its row's embedding. In the slow half, which hardly rotates within a few hundred
    tokens, it encodes the token in its row's feature.
    """
    attention, size, width = head.midlayer.self_attn, head.shape.hidden_size, roles.head_size
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    for parameter in chain.from_iterable(projection.parameters() for projection in projections):
        parameter.zero_()
    if attention.o_proj.bias is not None:
        attention.o_proj.bias.zero_()
    pair = torch.arange(width) % (width // 2)
    fast, slow = (pair < width // 4).nonzero().squeeze(1), (pair >= width // 4).nonzero().squeeze(1)
    q_OI, k_OI = attention.q_proj.weight, attention.k_proj.weight
    for query, key in roles.own_row:
        look_ED = random_rows(len(fast), size, OWN_ROW, width).to(k_OI)
        q_OI[query * width + fast, :size] = look_ED
        k_OI[key * width + fast, :size] = look_ED
    for query, key in roles.same_token:
        look_ED = random_rows(len(slow), size, SAME_TOKEN, width).to(k_OI)
        q_OI[query * width + slow, :size] = look_ED
        k_OI[key * width + slow, size:] = look_ED @ token_of_DD.to(k_OI)
    busy = {query for query, _ in (*roles.own_row, *roles.same_token)}
    for idle in set(range(head.shape.num_attention_heads)) - busy:
        # Small random values instead of zero, because equal heads would stay equal.
        q_OI[roles.slot(idle)].normal_(0, 0.02)
    if head.shape.qk_norm:
        # Normed queries and keys have a length of sqrt(E), and own-row queries match the larger
        # part of the key.
        sharpness = math.sqrt(OWN_ROW / math.sqrt(width))
        attention.q_norm.weight.fill_(sharpness)
        attention.k_norm.weight.fill_(sharpness)


def random_rows(count: int, size: int, score: float, head_size: int) -> Tensor:
    """Create `count` orthogonal rows for queries and keys.

    The attention score of a normed embedding of width `size` with itself is about `score`.
    """
    rows: Tensor = torch.linalg.qr(torch.randn(size, count))[0].mT
    return rows * math.sqrt(score * math.sqrt(head_size) / rows.shape[0])


def attend(
    head: Eagle3, known: Sequence[tuple[Batch, TargetSignal]], rows: Iterable[Rows]
) -> Iterator[Tensor]:
    """Yield the input of attention's output projection for each batch's kept rows, [S, H E]."""
    taken: list[Tensor] = []

    def take(_: nn.Module, args: tuple[Any, ...]) -> None:
        taken.append(args[0])

    hook = head.midlayer.self_attn.o_proj.register_forward_pre_hook(take)
    try:
        for (batch, signal), kept in zip(known, rows, strict=True):
            head.draft_steps(batch, signal, 1)
            yield taken.pop()[:, :-1][kept.kept_BT]
    finally:
        hook.remove()


def gram(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean of left^T right over the rows of all pairs, in float64."""
    total, count = torch.zeros(()), 0
    for left, right in pairs:
        total, count = (left.mT @ right).double() + total.to(left.device), count + len(left)
    return total / count


def solve_ridge(squares: Tensor, products: Tensor) -> Tensor:
    """Solve X W ~ Y for W by ridge regression, from the means of X^T X and X^T Y."""
    penalised = squares.clone()
    penalised.diagonal().add_(RIDGE * squares.diagonal().mean())
    solved: Tensor = torch.linalg.solve(penalised, products)
    return solved


def factor(matrix_DD: Tensor, squares_DD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factor a matrix into (left [D, R], right [R, D]).

    Among all such products, theirs is closest to the matrix on inputs with these second moments.
    """
    values, vectors = torch.linalg.eigh(squares_DD)
    root = values.clamp_min(values.max() * 1e-9).sqrt()
    u, s, vt = torch.linalg.svd(matrix_DD @ (vectors * root))
    half = s.sqrt()
    left_DR, right_RD = u * half, half[:, None] * vt / root @ vectors.mT
    spare = max(0, rank - len(s))
    return pad(left_DR[:, :rank], (0, spare)), pad(right_RD[:rank], (0, 0, 0, spare))
