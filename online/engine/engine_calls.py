"""Calls from the API process to its engines.

They reach all replicas and ranks, and no call outlives its engine.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import chain
from typing import Any, TypeVar

from redraft.engine import adaptive, hooks
from redraft.online.engine import domains
from redraft.online.engine.pace_status import describe_pace

DEATH_POLL_S = 1.0  # seconds between two checks of whether the called engine is still alive
DEAD = "the engine has died: start this server again"
MAX_SAID = 400  # maximum length of an engine's error in a response, in characters
T = TypeVar("T")


class RefusedError(Exception):
    """Raised when a request is refused; `code` is the HTTP status that fits the reason."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why


class EngineCalls:
    def __init__(self, engine: Any) -> None:
        self.engine = engine  # vLLM's engine client.
        # The client for the engines of all replicas. None for an engine in this process.
        self._ask_all = getattr(
            getattr(engine, "engine_core", None), "call_utility_all_async", None
        )

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a worker method, and return the results from all ranks in all replicas."""
        return await self.while_alive(self._ask_replicas(method, args))

    async def ask_for_draft(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a worker method, and return the results from the ranks that have the draft.

        These are the ranks in a pipeline's last stage.
        """
        ranks = [rank for rank in await self.ask(method, *args) if rank is not None]
        if not ranks:
            raise RefusedError(
                409, "no rank of this server has a draft to swap: restart it with one"
            )
        return ranks

    async def while_alive(self, call: Awaitable[T]) -> T:
        """Await a call to the engine for as long as the engine is alive.

        vLLM never answers a call that was running when its engine died. A server stops only after
        its last request has ended, so such a call would keep a dead server from being restarted.

        Raises:
            RefusedError: 503 if the engine dies in the meantime.
        """
        running = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({running}, timeout=DEATH_POLL_S))[0]:
                if self.engine.errored:
                    raise RefusedError(503, DEAD)
            return running.result()
        finally:
            running.cancel()

    async def request(self, call: Awaitable[T], problem: str, then: str = "") -> T:
        """Await a call that the engine may refuse.

        Raises:
            RefusedError: 503, with `problem`, the engine's message and `then`.
        """
        try:
            return await self.while_alive(call)
        except RefusedError:
            raise
        except Exception as error:
            if self.engine.errored:
                raise RefusedError(503, DEAD) from error
            raise RefusedError(503, f"{problem}: {say(error)}{then}") from error

    async def status(self) -> dict[str, Any]:
        """Return the recording rank's status, vLLM's version, and whether all drafts agree."""
        import vllm

        ranks = await self.ask("redraft_status")
        recording = [rank for rank in ranks if rank["capture"]]
        versions = {rank.get("target_version") for rank in recording or ranks[:1]}
        versions |= {None for rank in ranks if rank.get("target_version") is None}
        return {
            # One rank's report. The entries below replace those that depend on all ranks.
            **(recording or ranks)[0],
            "capture": _add_up([rank["capture"] for rank in recording]) if recording else None,
            "vllm_version": vllm.__version__,
            "num_ranks": len(ranks),
            **{
                name: next(filter(None, (rank.get(name) for rank in ranks)), "")
                for name in ("swap_off", "capture_off", "swap_cache")
            },
            "draft_intact": all(rank["draft_intact"] for rank in ranks)
            and len({rank["draft_version"] for rank in ranks}) == 1,
            # Also None if a trainer has not yet updated all replicas, or if an update failed on one
            # rank.
            "target_version": versions.pop() if len(versions) == 1 else None,
            "target_intact": all(rank["target_intact"] for rank in ranks),
            "asleep": any(rank["asleep"] for rank in ranks),
            **await self._count_drafts(),
            "pace": await self.read_pace(),
        }

    async def forget(self, tenant: str) -> dict[str, Any]:
        """Drop a tenant's text from the live counts of all ranks."""
        return {"live_runs": sum(await self.ask("redraft_forget", tenant))}

    async def _ask_replicas(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Return all replicas' results. `collective_rpc` returns only the first replica's."""
        if self._ask_all is None:
            answers: list[Any] = await self.engine.collective_rpc(method, args=args)
            return answers
        return list(
            chain.from_iterable(await self._ask_all("collective_rpc", method, None, args, None))
        )

    async def _count_drafts(self) -> dict[str, Any]:
        """Count the served version's drafts, summed over all replicas.

        `drafts` contains the numbers of drafts and draft tokens, and accepted tokens by position.
        `positions` contains the tried and accepted tokens at each position, by domain. With
        adaptive verification, `loads` contains drafts and accepted tokens by domain and load. The
        result is empty for an engine without these counts.
        """
        ask = self._ask_all
        if ask is None or not hooks.is_installed("domains"):
            return {}
        counts = domains.sum_counts(await self.while_alive(ask("redraft_domains")))
        num_tokens, num_drafts, *rest = domains.add_up([[0, 0], *counts.values()])
        pairs = {name: [*zip(one[1::2], one[2::2], strict=True)] for name, one in counts.items()}
        found = {"positions": pairs, "drafts": [num_drafts, num_tokens, *rest[::2]]}
        config = getattr(self.engine, "vllm_config", None)
        if not is_adaptive(getattr(config, "speculative_config", None)):
            return found
        loads = domains.sum_loads(await self.while_alive(ask("redraft_loads")))
        return found | {"loads": loads}

    async def read_pace(self, new: str = "") -> dict[str, Any] | None:
        """Set a new pace, if given, and return the pacer's status with a human-readable line.

        Return None if there is no pacer.
        """
        ask = self._ask_all
        # With several replicas, there is no pacer.
        found = (
            (await self.while_alive(ask("redraft_pace", new)))[0]
            if ask and hooks.is_installed("pace")
            else None
        )
        return found and found | {"line": describe_pace(found)}

    async def take_pace(self, new: str) -> dict[str, Any]:
        """Set a new pace, and return the pacer's status.

        Raises:
            RefusedError: there is no pacer, or `new` is `adaptive` but the server verifies all
                draft tokens.
        """
        if (found := await self.read_pace(new)) is None:
            raise RefusedError(
                409, "this server does not support a pace: start it with redraft serve --pace auto"
            )
        if new == "adaptive" and not found.get("adaptive"):
            raise RefusedError(
                409, "this server verifies all draft tokens: start it with --pace adaptive"
            )
        return found


def is_adaptive(speculative_config: Any) -> bool:
    """Whether vLLM chooses how many draft tokens it verifies."""
    return bool(getattr(speculative_config, adaptive.KEY, False))


def say(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_SAID].rstrip(".") or type(error).__name__


def _add_up(captures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum all counters; for each text field, use the first value that is not empty."""
    names = dict.fromkeys(chain.from_iterable(captures))
    values = {name: [capture[name] for capture in captures if name in capture] for name in names}
    return {
        name: next(filter(None, found), "") if isinstance(found[0], str) else sum(found)
        for name, found in values.items()
    }
