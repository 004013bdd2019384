"""Thinking modes: the template arguments of a request that switch a target's reasoning.

This module does not import transformers, because the learner names modes before it loads torch.
"""

from collections.abc import Mapping
from typing import Any

SWITCHES = ("enable_thinking", "thinking")  # arguments by which a request switches the reasoning
EFFORT = "reasoning_effort"
EFFORTS = ("high", "xhigh", "max", "medium", "low")  # its levels, the first is tried first
NO_EFFORTS = ("none", "no_think", "off")  # its levels at which a target does not think


def name_mode(arguments: Mapping[str, Any]) -> str:
    """Return the thinking mode that a request's arguments ask for, in words. Empty if none."""
    # Check this first, because vLLM adds `enable_thinking` to an effort.
    if (effort := arguments.get(EFFORT)) in (*EFFORTS, *NO_EFFORTS):
        return f"effort {effort}"
    switch = next((arguments[name] for name in SWITCHES if name in arguments), None)
    return {True: "thinking", False: "no thinking"}[switch] if isinstance(switch, bool) else ""
