"""Checks of how a draft is served: vLLM's method for it, and the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator

from redraft.heads.doctor.pair import Finding, Pair

STEERING = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Parts of a draft's path by which vLLM chooses the method, unless it was told one of these methods.
(`vllm.config.speculative`, in the order in which it looks.)"""


def method_flag(pair: Pair, method: str | None) -> Iterator[Finding]:
    """The method asked for, the one in the config, and the one in the path are the family's."""
    family, right = pair.family.name, pair.family.method
    if right is None:
        return
    if method not in (None, right):
        yield Finding(f'method "{method}" does not run drafts of family {family}', f'serve it with "method": "{right}"')
    algorithm = pair.config.get("speculators_model_type")
    if algorithm not in (None, pair.family.algorithm):
        yield Finding(
            f'config.json says speculators_model_type "{algorithm}", the tensors are those of {family}',
            f'write "{pair.family.algorithm}" there and into speculators_config.algorithm',
        )
    named = (pair.config.get("redraft") or {}).get("family")
    if named not in (None, family):
        yield Finding(
            f"config.json names the family {named}, the tensors are those of {family}",
            "export the head again: weights and config are of different heads",
        )
    # The whole path counts, the names of parent folders too. vLLM skips the search for these four methods.
    path = str(pair.draft).lower()
    steered = next((method for part, method in STEERING.items() if part in path), right)
    if steered != right and right not in STEERING.values():
        yield Finding(
            f'the path {pair.draft} makes vLLM take the method "{steered}", even if it is told "{right}"',
            f"move the draft to a path without {', '.join(STEERING)}",
        )


def number_of_tokens(pair: Pair, num_speculative_tokens: int) -> Iterator[Finding]:
    """No more draft tokens are asked for than the checkpoint can propose."""
    most = pair.family.max_tokens(pair.config)
    if most is not None and num_speculative_tokens > most:
        yield Finding(
            f"{num_speculative_tokens} tokens are to be drafted, the draft proposes {most}; vLLM makes up the others",
            f'serve with "num_speculative_tokens": {most} at most',
        )
