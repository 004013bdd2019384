"""The learner's state: the phase, the candidate in it, and the table of possible events.

    idle ─ begin ─► training ─ trained ─► judging ─ promoted ─► publishing ─ published ─► canary ─ passed ─► rolling
     ▲                 │ failed              │ rejected,      │ rejected           │ rolled back,        │ rolled out,
     └─────────────────┴─────────────────────┴ inconclusive, ─┴ begin again ───────┴ inconclusive, ──────┴ rolled back,
                                               begin again                           recalled              recalled

The state is saved at every event, so a killed learner continues where it stopped. The work of every
phase can be repeated from the start: after a restart, load the state and enter its phase.
"""

from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from redraft.files.sealed import DamagedError, read_sealed_as, write_sealed


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
    FAILED = "failed"  # nothing to evaluate: the loss was not finite, or training was interrupted
    BEGIN_AGAIN = "begin again"  # training restarts from the served version, with a fresh optimizer
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"
    PROMOTED = "promoted"
    PUBLISHED = "published"
    SWAP_REQUESTED = "swap requested"  # chosen by a user: bypasses the gate, but never the canary
    PASSED = "passed"
    ROLLED_OUT = "rolled out"
    ROLLED_BACK = "rolled back"
    RECALLED = "recalled"  # A user or an alarm ended the rollout before it had a result.
    HALT = "halt"  # The servers serve a different target: nothing may be trained or swapped.
    RESUME = "resume"


TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (Phase.IDLE, Event.BEGIN): Phase.TRAINING,
    (Phase.IDLE, Event.SWAP_REQUESTED): Phase.CANARY,
    (Phase.IDLE, Event.BEGIN_AGAIN): Phase.IDLE,
    (Phase.TRAINING, Event.BEGIN_AGAIN): Phase.TRAINING,
    (Phase.JUDGING, Event.BEGIN_AGAIN): Phase.IDLE,
    (Phase.PUBLISHING, Event.BEGIN_AGAIN): Phase.IDLE,
    (Phase.TRAINING, Event.TRAINED): Phase.JUDGING,
    (Phase.TRAINING, Event.FAILED): Phase.IDLE,
    (Phase.JUDGING, Event.PROMOTED): Phase.PUBLISHING,
    (Phase.JUDGING, Event.REJECTED): Phase.IDLE,
    (Phase.JUDGING, Event.INCONCLUSIVE): Phase.IDLE,
    (Phase.PUBLISHING, Event.PUBLISHED): Phase.CANARY,
    (Phase.PUBLISHING, Event.REJECTED): Phase.IDLE,
    (Phase.CANARY, Event.PASSED): Phase.ROLLING,
    (Phase.CANARY, Event.ROLLED_BACK): Phase.IDLE,
    (Phase.CANARY, Event.INCONCLUSIVE): Phase.IDLE,
    (Phase.CANARY, Event.RECALLED): Phase.IDLE,
    (Phase.ROLLING, Event.ROLLED_OUT): Phase.IDLE,
    (Phase.ROLLING, Event.ROLLED_BACK): Phase.IDLE,
    (Phase.ROLLING, Event.RECALLED): Phase.IDLE,
    # Handled only between phases, where the cycle checks for it, because a phase is never
    # interrupted.
    **{(phase, Event.HALT): Phase.HALTED for phase in Phase},
    (Phase.HALTED, Event.RESUME): Phase.IDLE,
}


class IllegalEventError(RuntimeError):
    """The transition table does not allow the event in this phase.

    This is a mistake in the caller, and continuing would hide it.
    """


class Move(NamedTuple):
    """An event, with its candidate and its reason."""

    event: Event
    candidate: str | None = None
    """The new candidate, if the event creates one."""
    reason: str = ""
    """Reason for the event, as text."""


@dataclass(frozen=True, kw_only=True)
class State:
    phase: Phase = Phase.IDLE
    candidate: str | None = None
    """A checkpoint until it is published, then a version."""
    reason: str = ""
    """Reason for the last event, as text."""
    num_looks: int = 0
    """Number of verdicts of the gate on held-out requests since the last rollout. The gate needs
    more evidence with every verdict, so the count must survive a kill.
    """
    has_gone_back: bool = False
    """Whether an alarm has rolled back a version since the last rollout."""
    is_by_person: bool = False
    """Whether a user started the current rollout, so that the draft in training does not descend
    from the candidate.
    """

    @property
    def is_rolling_out(self) -> bool:
        return self.phase in (Phase.CANARY, Phase.ROLLING)


AFTER_DAMAGE = State(num_looks=10, has_gone_back=True)
"""Used if the file is lost. Until the next rollout, the gate then requires more evidence rather
than less.
"""

NEEDS_CANDIDATE = (Phase.JUDGING, Phase.PUBLISHING, Phase.CANARY, Phase.ROLLING)


def advance(state: State, event: Event, *, candidate: str | None = None, reason: str = "") -> State:
    """Return the state after `event`.

    `candidate` replaces the current candidate. A candidate is kept until the next idle or training
    phase.

    Raises:
        IllegalEventError: the table has no such transition.
    """
    phase = TRANSITIONS.get((state.phase, event))
    if phase is None:
        raise IllegalEventError(f"{event.value!r} cannot happen while {state.phase.value}")
    # HALTED keeps the candidate so that users can see it. The next phase is always idle, which
    # drops it.
    has_candidate = phase not in (Phase.IDLE, Phase.TRAINING)
    return State(
        phase=phase,
        candidate=(candidate or state.candidate) if has_candidate else None,
        reason=reason,
        num_looks=0 if event is Event.ROLLED_OUT else state.num_looks,
        has_gone_back=event is not Event.ROLLED_OUT and state.has_gone_back,
        is_by_person=event is Event.SWAP_REQUESTED
        or (event is Event.PASSED and state.is_by_person),
    )


def save(state: State, path: Path) -> None:
    """Write the state atomically.

    Whenever the machine stops, the file contains either this state or the previous one in full.
    """
    write_sealed(path, {**asdict(state), "phase": state.phase.value})


@dataclass(kw_only=True)
class SavedState:
    path: Path
    state: State

    @property
    def candidate(self) -> str:
        assert self.state.candidate is not None
        return self.state.candidate

    def write(self, state: State) -> None:
        save(state, self.path)
        self.state = state


def load(path: Path) -> State:
    """Load the last saved state; idle if none was saved.

    Raises the same errors as `read_sealed_as`.
    """
    state = read_sealed_as(path, State, State())
    if state.candidate is None and state.phase in NEEDS_CANDIDATE:
        raise DamagedError(f"{path} is damaged (phase {state.phase.value} without a candidate)")
    return state
