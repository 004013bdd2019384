"""Formats and locations of recorded hidden states.

The module does not import torch, so that settings that contain them load fast.
"""

from typing import Literal

HiddenDtype = Literal["bfloat16", "float32", "float8"]  # Types of cached hidden states.

StatesFormat = Literal["exact", "float8"]  # States as the server computes them, or in 8 bits.

DEFAULT_STORAGE = "/dev/shm/redraft-features"  # Storage of server and trainer on one machine.


class StatesLostError(OSError):
    """The states are missing or damaged, but can be requested from the server again."""
