"""The part of the `speculators` package's config.json layout that its families share."""

from collections.abc import Sequence
from typing import Any

MARK = "speculators_model_type"  # key that marks a folder in this layout; its value is the family


def frame(
    family: str,
    architecture: str,
    *,
    speculative_tokens: int,
    target_name: str,
    target_architectures: Sequence[str],
) -> dict[str, Any]:
    """Return the keys that surround a head's own keys, in speculators' layout.

    They name its architecture, and the target from which the package takes the rest.
    """
    greedy = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
    return {
        "architectures": [architecture],
        MARK: family,
        "speculators_version": "0.9.0",
        # null means the head's hidden size.
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": family,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**greedy, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target_name, "architectures": list(target_architectures)},
        },
    }
