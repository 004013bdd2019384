"""Check that a standalone draft has the target's tokens and positions."""

from collections.abc import Iterator

from redraft.files.checkpoint import load_tokenizer
from redraft.files.tokenizers import check_same_tokenizer
from redraft.heads.doctor import checks, shared
from redraft.heads.doctor.pair import Check, Finding, Pair


def tokenizer(pair: Pair) -> Iterator[Finding]:
    """Check that the vocabulary and the tokenizer are the target's.

    The target uses the proposed ids unchanged.
    """
    mine, its = pair.config.get("vocab_size"), pair.target_config.vocab_size
    if mine != its:
        yield Finding(
            f"the draft's vocabulary has {mine} rows, but the target's has {its}: vLLM rejects "
            "the pair",
            "pad or truncate the draft's embeddings to the target's vocab_size (as "
            "redraft train standalone does)",
        )
    try:
        check_same_tokenizer(pair.target.tokenizer, load_tokenizer(pair.draft))
    except ValueError as error:
        problem, _, cure = str(error).partition("; ")
        yield Finding(problem, cure or "copy the target's tokenizer into the draft's folder")


CHECKS: tuple[Check, ...] = (tokenizer, shared.positions, checks.copy_of_target)
