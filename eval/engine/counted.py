"""Counted answers as a proposer of vLLM's V1 model runner.

B = requests of a step, T = tokens of the longest request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redraft.heads.families.retrieval import FOLDER, LEAST_FIRST, VERIFY_COST, Ids, Retrieval

VARIABLES = {FOLDER: "REDRAFT_RETRIEVAL", VERIFY_COST: "REDRAFT_VERIFY_COST", LEAST_FIRST: "REDRAFT_LEAST_FIRST"}
"""Keys of a config with counted answers, and the environment variables by which they reach the engine, past vLLM."""


def counted_env(config: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(config[key]) for key, name in VARIABLES.items() if key in config}


def read_counted(environment: Mapping[str, str] = os.environ) -> Retrieval | None:
    """The inverse of `counted_env`; None if no answers are named. Raises FileNotFoundError: there
    is no such folder. Raises ValueError: it holds another draft, or a number is out of bounds."""
    found = {key: environment[name] for key, name in VARIABLES.items() if environment.get(name)}
    folder = found.pop(FOLDER, None)
    changes = {key: float(value) for key, value in found.items()}
    return Retrieval.read(Path(folder), **changes) if folder else None


class Counted:
    def __init__(self, runner: Any, draft: Retrieval) -> None:
        self.runner, self.draft = runner, draft

    def propose(self, scheduled: Any, sampled: Sequence[Sequence[int]], *_: Any) -> list[list[int]]:
        """At most the scheduled number of draft tokens for each request, [B] lists. `sampled` has
        the step's new tokens of each request, none of one whose prompt is not read whole."""
        batch, most = self.runner.input_batch, scheduled.num_spec_tokens_to_schedule
        return [
            self._propose(batch.token_ids_cpu[row], int(batch.num_tokens_no_spec[row]), most, len(sampled))
            if tokens
            else []
            for row, tokens in enumerate(sampled)
        ]

    def _propose(self, ids_T: Ids, num_tokens: int, most: int, num_requests: int) -> list[int]:
        # a draft does not reach beyond the longest request
        return self.draft.propose(ids_T[:num_tokens], min(most, len(ids_T) - num_tokens), num_requests)
