"""Events from outside the phases.

Each event waits here until the cycle has handled it.

| event            | posted by                                         | handled                                       |
|---|---|---|
| `HALT`           | the watch: the servers serve a different target   | between phases; training ends early for it    |
| `RESUME`         | the watch: they serve our target again            | while halted                                  |
| `SWAP_REQUESTED` | a person                                          | when idle; training ends early for it         |
| `RECALLED`       | a person, or the alarm of a server                | ends a running rollout                        |
| `BEGIN_AGAIN`    | a rollback or swap, or candidates without a gain  | before the canary; training ends early for it |

Nothing here survives a restart: whoever posted an event notices that the learner ended, and the
watch checks again.
"""

import asyncio
from typing import Any

from redraft.online.daemon.state import Event, Move


class Inbox:
    """Waiting moves, at most one per event. For use within one event loop."""

    def __init__(self) -> None:
        self._moves: dict[Event, Move] = {}
        self._settled: dict[Event, asyncio.Future[Any]] = {}
        self._changed = asyncio.Event()

    def __contains__(self, event: Event) -> bool:
        return event in self._moves

    def post(self, move: Move) -> asyncio.Future[Any]:
        """Make the move wait, replacing any waiting move with the same event.

        The future resolves to the result passed to `settle`.
        """
        self._moves[move.event] = move
        self._changed.set()
        # Duplicate posts are merged, and both callers wait for the same result.
        if move.event not in self._settled:
            self._settled[move.event] = asyncio.get_running_loop().create_future()
        return self._settled[move.event]

    def find(self, *events: Event) -> Move | None:
        """The first waiting move among `events`; it stays in the inbox."""
        return next((self._moves[event] for event in events if event in self._moves), None)

    def take(self, event: Event) -> Move | None:
        move = self._moves.get(event)
        self.settle(event)
        return move

    def settle(self, event: Event, result: Any = None) -> None:
        """Remove `event` if it is waiting; everyone who posted it receives `result`."""
        self._moves.pop(event, None)
        settled = self._settled.pop(event, None)
        if settled is not None and not settled.done():
            settled.set_result(result)

    async def wait_for(self, event: Event) -> None:
        while event not in self._moves:  # the inbox may have changed because of a different event
            # There is no await between the check and `clear`, so no event is lost in between.
            self._changed.clear()
            await self._changed.wait()
