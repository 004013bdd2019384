"""The state that accelerate keeps for a whole process."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState, PartialState


def reset_accelerator() -> None:
    """Forget the device and the precision of this process's first training.

    Accelerate would refuse others.
    """
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
