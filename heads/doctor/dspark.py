"""Checks of a DSpark head.

These are DFlash's checks, plus checks of the block layout, Markov head and confidence head.
"""

from collections.abc import Iterator

from redraft.heads.doctor import dflash
from redraft.heads.doctor.pair import Check, Finding, Pair

CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")


def layout(pair: Pair) -> Iterator[Finding]:
    """Check that the config states whether the anchor proposes a token, if readers need it.

    In the `speculators` layout, every config must state it. In vLLM's layout, it must be stated
    only if the anchor proposes no token.
    """
    if "sample_from_anchor" in pair.config:
        return
    trained = pair.trained_with.get("sample_from_anchor")
    if pair.is_speculators:
        value = "true or false, as in training," if trained is None else str(trained).lower()
        yield Finding(
            "config.json has no sample_from_anchor: speculators assumes true, but vLLM assumes "
            "false",
            f'write "sample_from_anchor": {value} into config.json',
        )
    elif trained is False:
        yield Finding(
            "config.json has no sample_from_anchor: the engine assumes true, but the head was "
            "trained with false",
            'write "sample_from_anchor": false into config.json',
        )


def markov_head(pair: Pair) -> Iterator[Finding]:
    """Check the shapes of the Markov head's matrices.

    The code table has one row per target token, and the output head one row per draft token.
    """
    rank = pair.config.get("markov_rank")
    found = {
        name: pair.shapes.get(f"markov_head.{name}.weight") for name in ("markov_w1", "markov_w2")
    }
    vocab_size = pair.target_config.vocab_size
    rows = {
        "markov_w1": vocab_size,
        "markov_w2": pair.shapes.get("lm_head.weight", (vocab_size,))[0],
    }
    if rank is None:
        # The rank is the smaller dimension of either matrix.
        ranks = sorted({min(shape) for shape in found.values() if shape})
        yield Finding(
            "config.json has no markov_rank, so vLLM fails to start",
            f'write "markov_rank": {ranks[0]} into it',
        )
        return
    for name, shape in found.items():
        wanted = (rows[name], rank)
        if shape is None or shape == wanted:  # loading the head reports missing tensors
            continue
        if shape == wanted[::-1]:
            yield Finding(
                f"markov_head.{name}.weight has the shape {shape}, but the engine requires "
                f"{wanted}: it is transposed",
                "transpose it in the checkpoint, or export the head again",
            )
        else:
            yield Finding(
                f"markov_head.{name}.weight has the shape {shape}, but the engine requires "
                f"{wanted}",
                f'write the rank used in training as "markov_rank" ({min(shape)} '
                "according to this tensor), or export the head again",
            )


def confidence_head(pair: Pair) -> Iterator[Finding]:
    """Check that the confidence head is either present and enabled, or absent and disabled."""
    held, enabled = (
        [name for name in CONFIDENCE if name in pair.shapes],
        pair.config.get("enable_confidence_head"),
    )
    if held and not enabled:
        yield Finding(
            "enable_confidence_head is not set, so the engine drops the checkpoint's "
            "confidence head",
            'write "enable_confidence_head": true into config.json',
        )
    elif enabled and len(held) < len(CONFIDENCE):
        missing = next(name for name in CONFIDENCE if name not in held)
        yield Finding(
            f"enable_confidence_head is set, but the checkpoint lacks {missing}",
            'export the head again, or write "enable_confidence_head": false into config.json',
        )
    elif enabled:
        yield from _confidence_width(pair)


def _confidence_width(pair: Pair) -> Iterator[Finding]:
    hidden, rank = pair.target_config.hidden_size, pair.config.get("markov_rank") or 0
    with_markov, width = (
        bool(pair.config.get("confidence_head_with_markov")),
        pair.shapes[CONFIDENCE[0]][-1],
    )
    if width == hidden + rank * with_markov:
        return
    if width in (hidden, hidden + rank):
        right = str(not with_markov).lower()
        yield Finding(
            f"confidence_head_with_markov is {str(with_markov).lower()}, but the "
            f"confidence head reads {width} numbers",
            f'write "confidence_head_with_markov": {right} into config.json',
        )
    else:
        yield Finding(
            f"the confidence head reads {width} numbers, but the hidden state has {hidden} and the "
            f"Markov head adds {rank}",
            "export the head again",
        )


CHECKS: tuple[Check, ...] = (*dflash.OF_BLOCKS, layout, markov_head, confidence_head)
