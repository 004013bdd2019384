"""Train/serve parity: compare the engine's drafter with the draft's training steps, pass by pass.

    training   text = prefix + drafted ──► target signal ──► draft_steps ──► for every pass: fed, computed, proposed
    serving    Dump: inputs, outputs and proposals of vLLM's drafter               │
                                                                                   ▼
    compare    the first difference of each kind: ids, positions, feature, first step, later steps, tokens, confidence

Both use the engine's draft tokens, so one difference does not cause others after it.

B = batch, T = tokens, N = rows of a pass, D = hidden, W = draft vocabulary.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redraft.engine.lossless import TIE_LOGIT_GAP, TIE_LOGIT_GAP_HALF
from redraft.engine.parity.run import Block, Dump, relative_difference
from redraft.eval.forecast.greedy import SignalFunction
from redraft.heads.catalog import find_family
from redraft.heads.doctor.pair import Finding
from redraft.heads.draft import Batch, DraftStep
from redraft.heads.family import Parity

# Tolerance relative to a row's largest entry; kernels differ by less.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass of a drafter over the rows at `positions_N`."""

    ids_N: Tensor | None
    """Token ids that the head reads. None if it reads no tokens."""
    positions_N: Tensor
    feature_ND: Tensor | None
    """The target's state that is fed into the head. None if the head reads its own state."""
    hidden_ND: Tensor
    """Input of the draft's output head."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One draft block, as computed in training."""

    passes: list[Pass]
    logits: list[Tensor]
    """Logits of every drafted token, each [W]."""
    draft_ids_W: Tensor | None
    confidence: list[float]
    """Estimated acceptance of each token. Empty if the head does not estimate it."""


def compare(
    draft: Any, family: str, signal: SignalFunction | None, dump: Dump, device: str = "cpu"
) -> list[Finding]:
    """Return the first difference of each kind, causes first. Empty if serving equals training.

    Raises:
        ValueError: there is no rule for how the engine computes this family.
    """
    parity, tolerance = find_family(family).parity, TOLERANCE[dump.run.dtype]
    if parity is None:
        raise ValueError(f"the passes of {family} in the engine cannot be compared with training")
    found: dict[str, Finding] = {}
    for block in dump.recorded():
        trained = _trained(draft, parity, signal, dump.prefix(block), block.drafted, device)
        served = _served(block, parity, draft, trained.passes)
        # Later blocks also have rows of rejected tokens, which the engine batches differently.
        kinds = (
            _pass_differences(trained.passes, served, tolerance)
            if block.num_output == 1
            else iter(())
        )
        # One wrong id changes every later number, so only the first difference of a block is
        # evidence.
        first = next(itertools.chain(kinds, _token_differences(trained, block, dump.run.dtype),
                                     _confidence_differences(trained, block, tolerance)), None)  # fmt: skip
        if first is not None:
            kind, difference = first
            place = f"prompt {block.request}, after {block.num_output} tokens of its answer"
            # The first block with a difference of this kind represents all of them.
            found.setdefault(kind, Finding(f"{difference} ({place})", CURES[kind]))
    return list(found.values())


CURES = {
    "ids": "the engine shifts tokens differently from training: serve with this family's method",
    "positions": "the engine counts positions differently from training: serve with this "
    "family's method",
    "feature": "check the aux layer ids and which side of the final norm the head reads",
    "step 1": "a norm, bias, window or rotary parameter differs in serving: compare config.json with an "
    "export from training",
    "later": "the hidden state that is fed back differs: check norm_output and on which "
    "side of the norm the head feeds back",
    "tokens": "check d2t and the head's rows (lm_head, markov_head) in the checkpoint",
    "confidence": "check confidence_head in the checkpoint, and confidence_head_with_markov in "
    "config.json",
}


def _pass_differences(
    trained: Sequence[Pass], served: Sequence[Pass], tolerance: float
) -> Iterator[tuple[str, str]]:
    """Yield (kind, message) for every difference between the passes of a block."""
    if len(trained) != len(served):
        yield (
            "ids",
            f"the drafter makes {len(served)} passes for a block, but training makes {len(trained)}",
        )
        return
    for k, (mine, other) in enumerate(zip(trained, served, strict=True)):
        # The engine may pad a pass, so its rows after ours do not count.
        rows = len(mine.positions_N)
        for kind, wanted, given in (
            ("ids", mine.ids_N, other.ids_N),
            ("positions", mine.positions_N, other.positions_N),
        ):
            if (
                wanted is not None
                and given is not None
                and not torch.equal(given[:rows].long(), wanted)
            ):
                row = int((given[:rows].long() != wanted).nonzero()[0])
                yield (
                    kind,
                    f"draft step {k + 1}, row {row}: the engine fed {kind} "
                    f"{int(given[row])}, but training used {int(wanted[row])}",
                )
        if mine.feature_ND is not None and other.feature_ND is not None:
            yield from _rows_apart("feature", f"draft step {k + 1}: the target's feature", mine.feature_ND,
                                   other.feature_ND, mine, tolerance)  # fmt: skip
        kind = "step 1" if k == 0 else "later"
        yield from _rows_apart(kind, f"draft step {k + 1}: the head's input", mine.hidden_ND, other.hidden_ND, mine,
                               tolerance)  # fmt: skip


def _rows_apart(
    kind: str, name: str, mine_ND: Tensor, other_ND: Tensor, at: Pass, tolerance: float
) -> Iterator[tuple[str, str]]:
    if other_ND.shape[-1] != mine_ND.shape[-1]:
        yield (
            kind,
            f"{name} is {other_ND.shape[-1]} wide in serving, but {mine_ND.shape[-1]} in training",
        )
        return
    apart_N = relative_difference(other_ND[: len(mine_ND)], mine_ND)
    if bool((apart_N > tolerance).any()):
        row = int((apart_N > tolerance).nonzero()[0])
        largest = float(apart_N.max())
        yield (
            kind,
            f"{name} differs at position {int(at.positions_N[row])}, by up to {largest:.2g} of its "
            "size",
        )


def _token_differences(trained: Trained, block: Block, dtype: str) -> Iterator[tuple[str, str]]:
    """Yield drafted tokens that differ from training's proposals, except for ties."""
    tie = TIE_LOGIT_GAP if dtype == "float32" else TIE_LOGIT_GAP_HALF
    for k, (logits_W, token) in enumerate(zip(trained.logits, block.drafted, strict=True)):
        best = int(logits_W.argmax())
        # Logits are over the draft vocabulary, but drafted tokens are target ids.
        ours = best if trained.draft_ids_W is None else int(trained.draft_ids_W[best])
        index = (
            token
            if trained.draft_ids_W is None
            else int(torch.searchsorted(trained.draft_ids_W, token))
        )
        known = index < len(logits_W) and (
            trained.draft_ids_W is None or int(trained.draft_ids_W[index]) == token
        )
        if ours != token and not (known and float(logits_W[best] - logits_W[index]) <= tie):
            yield (
                "tokens",
                f"draft step {k + 1} proposes token {token}, but training would propose {ours}",
            )


def _confidence_differences(
    trained: Trained, block: Block, tolerance: float
) -> Iterator[tuple[str, str]]:
    if len(trained.confidence) != len(block.confidence):
        yield (
            "confidence",
            f"{len(block.confidence)} acceptance estimates in serving, but "
            f"{len(trained.confidence)} in training",
        )
        return
    for k, (ours, served) in enumerate(zip(trained.confidence, block.confidence, strict=True)):
        if abs(ours - served) > tolerance:
            yield (
                "confidence",
                f"draft step {k + 1} estimates an acceptance of {served:.4f}, but training "
                f"estimates {ours:.4f}",
            )


@torch.no_grad()
def _trained(
    draft: Any,
    parity: Parity,
    signal: SignalFunction | None,
    prefix: Sequence[int],
    drafted: Sequence[int],
    device: str,
) -> Trained:
    batch = Batch.padded([[*prefix, *drafted]], device=device)
    target = None if signal is None else signal(batch)
    steps = draft.draft_steps(batch, target, len(drafted))
    feature_BTD = None if target is None else draft.feature(target)
    passes, rows = EXPECT[parity](draft, steps, batch, feature_BTD, len(drafted))
    logits = [
        step.logits(torch.tensor([row], device=device), torch.float32)[0].cpu()
        for step, row in rows
    ]
    ids_W = steps[0].draft_ids_W
    return Trained(
        passes=passes,
        logits=logits,
        draft_ids_W=None if ids_W is None else ids_W.cpu(),
        confidence=[
            float(step.confidence_BT.flatten()[step.places(torch.tensor([row]))].sigmoid())
            for step, row in rows
            if step.confidence_BT is not None
        ],
    )


Expected = tuple[list[Pass], list[tuple[DraftStep, int]]]
"""The expected passes, and for every drafted token, the draft step and the row that contain its
logits.
"""


def _recurrent(
    _: Any, steps: list[DraftStep], batch: Batch, feature_BTD: Tensor | None, num_drafted: int
) -> Expected:
    """EAGLE and MTP: the prefix, shifted by one token, then one row per further token."""
    assert feature_BTD is not None
    # For a prefix x[0..4] and 3 drafted tokens, T = 8 and num_rows = 4, because the target has not
    # read x[4]. The first pass gets ids x[1..4] and the features of rows 0 to 3. The next two
    # passes get the first two drafted tokens.
    ids_T, num_rows = batch.input_ids_BT[0].cpu(), batch.input_ids_BT.shape[1] - num_drafted - 1
    first = Pass(
        ids_N=ids_T[1 : num_rows + 1],
        positions_N=torch.arange(num_rows),
        feature_ND=feature_BTD[0, :num_rows].cpu(),
        hidden_ND=steps[0].hidden_BTD[0, :num_rows].cpu(),
    )
    last = [step.hidden_BTD[0, num_rows - 1] for step in steps[:num_drafted]]
    later = [
        Pass(
            ids_N=ids_T[num_rows + k : num_rows + k + 1],
            positions_N=torch.tensor([num_rows - 1 + k]),
            feature_ND=None,
            hidden_ND=last[k][None].cpu(),
        )
        for k in range(1, num_drafted)
    ]
    return [first, *later], [(step, num_rows - 1) for step in steps[:num_drafted]]


def _parallel(
    _: Any, steps: list[DraftStep], batch: Batch, feature_BTD: Tensor | None, num_drafted: int
) -> Expected:
    """Medusa: every head reads the target's last hidden state. Each head counts as a pass."""
    assert feature_BTD is not None
    # This is the last row that the target has computed: the one before the prefix's last token.
    row = batch.input_ids_BT.shape[1] - num_drafted - 2
    last = [step.hidden_BTD[0, row] for step in steps[:num_drafted]]
    at, feature_1D = torch.tensor([row]), feature_BTD[0, row : row + 1].cpu()
    passes = [
        Pass(ids_N=None, positions_N=at, feature_ND=feature_1D, hidden_ND=h[None].cpu())
        for h in last
    ]
    return passes, [(step, row) for step in steps[:num_drafted]]


def _block(
    draft: Any, steps: list[DraftStep], batch: Batch, _: Tensor | None, num_drafted: int
) -> Expected:
    """DFlash and DSpark: the anchor and the masks in one pass.

    The pass contains the slots from the first slot that proposes a token. The features were written
    to the cache earlier, so they are not part of the pass.
    """
    row = batch.input_ids_BT.shape[1] - num_drafted - 2
    last = [step.states(torch.tensor([row]))[0] for step in steps[:num_drafted]]
    # Slot 0 is the prefix's last token, at position row + 1.
    at_N = row + 1 + draft.config.first_slot + torch.arange(num_drafted)
    slots = Pass(ids_N=None, positions_N=at_N, feature_ND=None, hidden_ND=torch.stack(last).cpu())
    return [slots], [(step, row) for step in steps[:num_drafted]]


def _prefix_and_masks(
    draft: Any, steps: list[DraftStep], batch: Batch, feature_BTD: Tensor | None, num_drafted: int
) -> Expected:
    """P-EAGLE: the prefix as in EAGLE, then the masks, which count as a second pass here."""
    (first, *_), rows = _recurrent(draft, steps, batch, feature_BTD, num_drafted)
    masks_at = first.positions_N[-1] + torch.arange(1, num_drafted)
    hidden = [step.hidden_BTD[0, row] for step, row in rows[1:]]
    if not hidden:
        return [first], rows
    masks = Pass(
        ids_N=None, positions_N=masks_at, feature_ND=None, hidden_ND=torch.stack(hidden).cpu()
    )
    return [first, masks], rows


def _autoregressive(
    draft: Any, steps: list[DraftStep], batch: Batch, feature_BTD: Tensor | None, num_drafted: int
) -> Expected:
    """A standalone draft: a pass over the whole prefix, then one per drafted token."""
    ids_T, hidden_TD = batch.input_ids_BT[0].cpu(), steps[0].hidden_BTD[0]
    length = len(ids_T) - num_drafted
    bounds = [(0, length), *((length + k, length + k + 1) for k in range(num_drafted - 1))]
    passes = [
        Pass(
            ids_N=ids_T[a:b],
            positions_N=torch.arange(a, b),
            feature_ND=None,
            hidden_ND=hidden_TD[a:b].cpu(),
        )
        for a, b in bounds
    ]
    return passes, [(steps[0], length - 1 + k) for k in range(num_drafted)]


EXPECT: dict[Parity, Callable[[Any, list[DraftStep], Batch, Tensor | None, int], Expected]] = {
    "recurrent": _recurrent,
    "parallel": _parallel,
    "autoregressive": _autoregressive,
    "block": _block,
    "prefix_and_masks": _prefix_and_masks,
}
"""Functions by `Family.parity` that return the passes expected from an engine. Their arguments are
the draft, its steps, the batch, the target's feature and the number of draft tokens.
"""


def _served(block: Block, parity: Parity, draft: Any, trained: Sequence[Pass]) -> list[Pass]:
    if parity == "parallel":  # one row, whose position the engine does not pass on
        (only,) = block.passes
        at, feature_ND = trained[0].positions_N, only["args"][0]
        return [
            Pass(ids_N=None, positions_N=at, feature_ND=feature_ND, hidden_ND=out)
            for out in only["out"]
        ]
    if parity == "block":
        (only,) = block.passes
        first = draft.config.first_slot
        slots = slice(first, first + len(block.drafted))
        at, hidden_ND = only["positions"][slots], only["out"][draft.engine_output][slots]
        return [Pass(ids_N=None, positions_N=at, feature_ND=None, hidden_ND=hidden_ND)]
    if parity == "prefix_and_masks":
        (only,) = block.passes
        # The engine makes one pass where training makes several, so split the engine's pass.
        ends = np.cumsum([0, *(len(each.positions_N) for each in trained)])
        parts = [slice(begin, end) for begin, end in itertools.pairwise(ends.tolist())]
        return [
            Pass(
                ids_N=only["input_ids"][part],
                positions_N=only["positions"][part],
                feature_ND=only["hidden_states"][part],
                hidden_ND=only["out"][draft.engine_output][part],
            )
            for part in parts
        ]
    return [
        Pass(
            ids_N=each["input_ids"],
            positions_N=each["positions"],
            feature_ND=each.get("hidden_states"),
            hidden_ND=each["out"][draft.engine_output],
        )
        for each in block.passes
    ]
