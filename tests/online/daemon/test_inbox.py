"""Events that wait for the cycle: who gets which answer, and when nothing waits any more."""

from __future__ import annotations

import asyncio

from redraft.online.daemon.inbox import Inbox
from redraft.online.daemon.state import TRANSITIONS, Event, Move


def test_an_event_waits_until_it_is_settled_and_everyone_who_posted_it_gets_the_result():
    async def main():
        inbox = Inbox()
        first, second = (
            inbox.post(Move(Event.RECALLED)),
            inbox.post(Move(Event.RECALLED, reason="again")),
        )
        assert inbox.find(Event.HALT, Event.RECALLED) == Move(Event.RECALLED, reason="again")
        inbox.settle(Event.RECALLED, "done")
        assert (await first, await second) == ("done", "done")
        assert Event.RECALLED not in inbox
        inbox.settle(Event.RECALLED)  # nothing waits: nothing happens

    asyncio.run(main())


def test_an_event_is_taken_once():
    async def main():
        inbox = Inbox()
        inbox.post(Move(Event.BEGIN_AGAIN))
        assert inbox.take(Event.BEGIN_AGAIN) == Move(Event.BEGIN_AGAIN)
        assert inbox.take(Event.BEGIN_AGAIN) is None

    asyncio.run(main())


def test_a_wait_ends_with_its_own_event_only():
    async def main():
        inbox = Inbox()
        waiting = asyncio.create_task(inbox.wait_for(Event.RESUME))
        also_waiting = asyncio.create_task(inbox.wait_for(Event.BEGIN_AGAIN))
        await asyncio.sleep(0)  # a turn of the loop: both wait
        inbox.post(Move(Event.BEGIN_AGAIN))
        await also_waiting  # woken after `waiting`
        assert not waiting.done()
        inbox.post(Move(Event.RESUME))
        await asyncio.wait_for(waiting, 60)

    asyncio.run(main())


def test_every_event_that_can_wait_has_its_place_in_the_table():
    waiting = {Event.HALT, Event.RESUME, Event.SWAP_REQUESTED, Event.RECALLED, Event.BEGIN_AGAIN}
    assert waiting <= {event for _, event in TRANSITIONS}
