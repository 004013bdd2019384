"""Wait for what a test expects.

The deadline only ends a test that fails: a busy machine may take its time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any

PATIENCE_S = 300.0
LONGEST_PAUSE_S = 0.05


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def until(
    condition: Callable[[], Any],
    task: asyncio.Task[None] | None = None,
    timeout_s: float = PATIENCE_S,
    about: Callable[[], Any] = lambda: "",
) -> Any:
    """The value of the condition, which may be a coroutine function, once it is true.

    Raises: what ended the task, if it ends before.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        found = condition()
        if found := await found if inspect.isawaitable(found) else found:
            return found
        if task is not None and task.done():
            task.result()
            raise AssertionError("the task ended")
        assert time.monotonic() < deadline_s, f"not after {timeout_s} s {about()}"
        await asyncio.sleep(pause_s := min(2 * pause_s, LONGEST_PAUSE_S))


def wait_until(condition: Callable[[], Any], about: Callable[[], Any] = lambda: "") -> Any:
    """`until` in a test without an event loop."""
    deadline_s, pause_s = time.monotonic() + PATIENCE_S, 0.001
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not after {PATIENCE_S} s {about()}"
        time.sleep(pause_s := min(2 * pause_s, LONGEST_PAUSE_S))
    return found
