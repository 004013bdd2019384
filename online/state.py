"""Where the learner stands, and what may happen next. Pure; saved so that a killed learner goes on where it was.

    idle ─ begin ─► training ─ trained ─► judging ─ promoted ─► publishing ─ published ─► canary ─ passed ─► rolling
     ▲                 │ failed              │ rejected,                           │ rolled back         │ rolled out,
     └─────────────────┴─────────────────────┴ inconclusive ───────────────────────┴─────────────────────┴ rolled back

The work of every phase can be done again from its start: after a restart, load the state and enter its phase.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from heads.artifact import write_whole


class Phase(Enum):
    IDLE = "idle"
    TRAINING = "training"
    JUDGING = "judging"
    PUBLISHING = "publishing"
    CANARY = "canary"
    ROLLING = "rolling"
    HALTED = "halted"


class Event(Enum):
    BEGIN = "begin"
    TRAINED = "trained"
    FAILED = "failed"
    """Training gave nothing to judge: the loss was not finite, or the target changed meanwhile."""
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"
    PROMOTED = "promoted"
    PUBLISHED = "published"
    SWAP_REQUESTED = "swap requested"
    """A person chose a version: past the gate, but never past the canary."""
    PASSED = "passed"
    ROLLED_OUT = "rolled out"
    ROLLED_BACK = "rolled back"
    HALT = "halt"
    RESUME = "resume"


TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (Phase.IDLE, Event.BEGIN): Phase.TRAINING,
    (Phase.IDLE, Event.SWAP_REQUESTED): Phase.CANARY,
    (Phase.TRAINING, Event.TRAINED): Phase.JUDGING,
    (Phase.TRAINING, Event.FAILED): Phase.IDLE,
    (Phase.JUDGING, Event.PROMOTED): Phase.PUBLISHING,
    (Phase.JUDGING, Event.REJECTED): Phase.IDLE,
    (Phase.JUDGING, Event.INCONCLUSIVE): Phase.IDLE,
    (Phase.PUBLISHING, Event.PUBLISHED): Phase.CANARY,
    (Phase.CANARY, Event.PASSED): Phase.ROLLING,
    (Phase.CANARY, Event.ROLLED_BACK): Phase.IDLE,
    (Phase.ROLLING, Event.ROLLED_OUT): Phase.IDLE,
    (Phase.ROLLING, Event.ROLLED_BACK): Phase.IDLE,
    **{(phase, Event.HALT): Phase.HALTED for phase in Phase},
    (Phase.HALTED, Event.RESUME): Phase.IDLE,
}


class IllegalEventError(RuntimeError):
    """An event that has no meaning in this phase: the caller is wrong, and going on would hide it."""


@dataclass(frozen=True, kw_only=True)
class State:
    phase: Phase = Phase.IDLE
    candidate: str | None = None
    """What the phase is about: a checkpoint until it is published, then a version. None while idle or training."""
    reason: str = ""
    """Why the last event came, for people."""


def advance(state: State, event: Event, *, candidate: str | None = None, reason: str = "") -> State:
    """The state after `event`; `candidate` replaces the one that is kept until the phase is idle or training.

    Raises: IllegalEventError where the table has no such transition.
    """
    phase = TRANSITIONS.get((state.phase, event))
    if phase is None:
        raise IllegalEventError(f"{event.value!r} can not happen while {state.phase.value}")
    has_candidate = phase not in (Phase.IDLE, Phase.TRAINING)
    return State(phase=phase, candidate=(candidate or state.candidate) if has_candidate else None, reason=reason)


def save(state: State, path: Path) -> None:
    """Write the state so that a reader finds this one or the one before, whole, whenever the machine stops."""
    write_whole(path, json.dumps({"phase": state.phase.value, "candidate": state.candidate, "reason": state.reason}))


def load(path: Path) -> State:
    """The state that was saved last; idle where there is none yet.

    Raises: ValueError where the file was changed by hand to something that is no state.
    """
    if not path.exists():
        return State()
    try:
        fields = json.loads(path.read_text())
        return State(phase=Phase(fields["phase"]), candidate=fields["candidate"], reason=fields["reason"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no state ({error}): remove it to begin at idle") from error
