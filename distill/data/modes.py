"""Thinking modes: the template arguments of a request that switch a target's reasoning.

This module does not import transformers, because the learner names modes before it loads torch.
"""

from collections.abc import Mapping
from typing import Any

# Request arguments that switch reasoning on or off.
SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
# Values of the effort argument, in the order they are tried.
EFFORTS = ("high", "xhigh", "max", "medium", "low")
# Values of the effort argument that turn thinking off.
NO_EFFORTS = ("none", "no_think", "off")


def name_mode(arguments: Mapping[str, Any]) -> str:
    """Return the thinking mode that a request's arguments select, in words.

    Empty if they select none.
    """
    # Check this first, because vLLM adds `enable_thinking` to an effort.
    if (effort := arguments.get(EFFORT)) in (*EFFORTS, *NO_EFFORTS):
        return f"effort {effort}"
    switch = next((arguments[name] for name in SWITCHES if name in arguments), None)
    return {True: "thinking", False: "no thinking"}[switch] if isinstance(switch, bool) else ""
