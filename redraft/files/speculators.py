"""The layout of the package `speculators` in config.json, as far as its families share it."""

from collections.abc import Sequence
from typing import Any

MARK = "speculators_model_type"  # a folder with this key has the layout; its value: the family


def frame(
    family: str,
    architecture: str,
    *,
    speculative_tokens: int,
    target_name: str,
    target_architectures: Sequence[str],
) -> dict[str, Any]:
    """The keys that surround a head's own keys, in the layout of speculators.

    They name its architecture, and the target that supplies the rest to the package.
    """
    greedy = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
    return {
        "architectures": [architecture],
        MARK: family,
        "speculators_version": "0.9.0",
        # null means as wide as the head
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": family,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**greedy, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target_name, "architectures": list(target_architectures)},
        },
    }
