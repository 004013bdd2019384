"""Routes and middleware in vLLM's API process: `GET /redraft/status`, `POST /redraft/swap`, and each request's origin.

    client headers ─► OriginMiddleware ─► context variable ─► engine_client.generate ─► SamplingParams.extra_args

Tenant, domain and opt-out reach the worker this way without changing what the client sends or receives.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import threading
import time
import uuid
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from starlette.datastructures import Headers, State

from redraft.heads.files.artifact import PROVENANCE
from redraft.online.engine import domains
from redraft.online.engine.config import PLUGIN_NAME, PluginConfig, read_config
from redraft.online.fleet.registry import hash_manifest, read_id
from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin, read_origin_headers

logger = logging.getLogger("vllm.redraft")

VERSION = re.compile(r"v[0-9]{6,18}")

STAGE_TIMEOUT_S = 200.0
"""Deadline for reading a version from the registry's storage into memory. Serving goes on meanwhile."""

STAGE_POLL_S = 0.05

PAUSE_TIMEOUT_S = 60.0
"""Deadline for the pause, in which the weights are copied from memory. Afterwards the engine is resumed in any case."""

RESUME_TIMEOUT_S = 30.0

RESUME_POLL_S = 0.5
"""Seconds between two attempts to resume: vLLM refuses while its pause is not complete."""

DEATH_POLL_S = 1.0
"""Seconds between two looks whether the engine that is asked still lives."""

DEAD = "the engine has died: start this server again"

CACHE_CURE = "swap again when no request waits for keys of another server, or restart this one with --swap.cache keep"

MAX_SAID = 400
"""Most characters of an error of the engine in an answer."""

MAX_STUCK_READS = 4
"""Hung readers of the registry allowed before further swaps are refused."""

T = TypeVar("T")

_origin: ContextVar[Origin] = ContextVar("redraft_origin")


class Endpoint:
    """Our implementation of vLLM's endpoint plugin interface."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.config = read_config()
        self.engine: Any = None
        self._id = uuid.uuid4().hex
        """For the workers, which let one API process swap at a time."""
        self._can_pause = True
        self._swapping = asyncio.Lock()
        self._registry_id = ""
        """Id of the served registry, from its folder or, if that has none, from the first swap."""
        self._readers: list[threading.Thread] = []

    def attach_router(self, app: FastAPI) -> None:
        app.add_middleware(OriginMiddleware)
        app.add_api_route("/redraft/status", self.status, methods=["GET"], response_model=None)
        app.add_api_route("/redraft/swap", self.swap, methods=["POST"], response_model=None)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        self.engine = engine_client
        self._can_pause = can_pause(engine_client.vllm_config)
        forward_origin(engine_client)

    async def status(self, request: Request) -> dict[str, Any]:
        """Status of the recording rank, vLLM's version, and whether all ranks agree on the draft version."""
        authorize(request, self.config)
        return await self._status()

    async def swap(self, request: Request) -> dict[str, Any]:
        """Swap to the version in the body, e.g. `{"version": "v000012", "manifest_sha256": ..., "registry": ...}`.

        The hash and the registry's id are optional; a version with another hash, or of another registry, is refused.
        200: all ranks serve it and no running request was cut off.
        """
        authorize(request, self.config)
        try:
            asked = _Asked.parse(await request.json())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise HTTPException(400, 'send a JSON body {"version": "v000012"}') from None
        if self.config.registry is None:
            raise HTTPException(503, "no registry: start the server with REDRAFT_REGISTRY=FOLDER")
        # Accept an id only: a path could name any folder of this machine.
        if not isinstance(asked.version, str) or not VERSION.fullmatch(asked.version):
            raise _no_version(str(asked.version)[:40])
        # A disconnecting client must not leave the engine paused.
        return await asyncio.shield(asyncio.ensure_future(self._swap_one_at_a_time(asked)))

    async def _swap_one_at_a_time(self, asked: _Asked) -> dict[str, Any]:
        async with self._swapping:
            # asked within the lock, because the swap before may have loaded this very version
            status = await self._status()
            if status.get("swap_off"):
                raise HTTPException(409, f"this server cannot swap drafts: {status['swap_off']}")
            serving = status["draft_version"]
            await self._require_awake()
            try:
                async with asyncio.timeout(STAGE_TIMEOUT_S):
                    found = await self._find(asked)
                    # A copy of the registry may hold another v000012, so the name alone proves nothing.
                    is_same = status.get("manifest_sha256") in ("", None, found.manifest_sha256)
                    if serving == found.name and status["draft_intact"] and is_same:
                        return {"version": found.name, "previous": found.name, "swapped": False}
                    _require_target(found, status["target_fingerprint"])
                    await self._stage(found, serving)
            except TimeoutError:
                detail = f"reading {asked.version} took longer than {STAGE_TIMEOUT_S:.0f} s; still serving {serving}"
                raise HTTPException(504, detail) from None
            try:
                report = await self._exchange(found, serving, clears=status["swap_cache"] == "clear")
            finally:
                await self._discard()
            # After the swap: a refused one must not bind this server to a registry.
            self._registry_id = found.registry or self._registry_id or asked.registry
            return report

    async def _find(self, asked: _Asked) -> _Found:
        """The version in the registry's folder. Raises HTTPException if it is not there, or not the one asked for."""
        assert self.config.registry is not None
        assert isinstance(asked.version, str)
        folder = self.config.registry / asked.version
        found = await self._read(lambda: _read_version(folder))
        known = found.registry or self._registry_id
        if asked.registry and known and asked.registry != known:
            raise HTTPException(
                409,
                f"this server serves the drafts of registry {known[:12]}, not of {asked.registry[:12]}: "
                "give each server one learner, and restart it to change that",
            )
        if asked.manifest_sha256 and asked.manifest_sha256 != found.manifest_sha256:
            raise HTTPException(
                409,
                f"{found.name} has manifest {found.manifest_sha256[:12]} here, not {asked.manifest_sha256[:12]}: "
                "copy the registry again",
            )
        return found

    async def _read(self, work: Callable[[], T]) -> T:
        """The result of `work` in a separate thread: a storage that hangs would fill the pool that vLLM uses too."""
        self._readers = [reader for reader in self._readers if reader.is_alive()]
        if len(self._readers) >= MAX_STUCK_READS:
            raise HTTPException(503, "the registry's storage hangs: earlier swaps are still reading")
        future: Future[T] = Future()

        def run() -> None:
            # From here on a swap that gives up cannot cancel the future: `set_result` would then raise.
            future.set_running_or_notify_cancel()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        reader = threading.Thread(target=run, name="redraft-registry", daemon=True)
        self._readers.append(reader)
        reader.start()
        return await asyncio.wrap_future(future)

    async def _stage(self, found: _Found, serving: str) -> None:
        """Have all ranks read the version into memory, while they serve."""
        try:
            for rank in await self._stage_on_ranks(str(found.folder)):
                if rank["damaged"]:
                    raise HTTPException(422, f"{found.name} is damaged: {rank['error']}")
                if rank["error"]:
                    raise HTTPException(409, f"{rank['error']}; still serving {serving}")
                if rank["manifest_sha256"] != found.manifest_sha256:
                    raise HTTPException(409, f"{found.name} changed while it was read; still serving {serving}")
        except BaseException:
            await self._discard()
            raise

    async def _stage_on_ranks(self, folder: str | None) -> list[dict[str, Any]]:
        """Read a draft into the memory of all ranks; None is the last good one.

        Returns the ranks' answers when all have read it or one has failed.
        """
        started = await self._ask_for_draft("redraft_stage", folder, self._id)
        if not all(rank["ok"] for rank in started):
            return [{"damaged": False, "error": rank["error"]} for rank in started if not rank["ok"]]
        while True:
            # Polled in short calls, because the engine takes no step while one is running.
            ranks = await self._ask_for_draft("redraft_staged")
            failed = [rank for rank in ranks if rank["error"]]
            if failed or all(rank["done"] for rank in ranks):
                return failed or ranks
            await asyncio.sleep(STAGE_POLL_S)

    async def _discard(self) -> None:
        """Free the staged version's memory. If this fails, the next swap does it."""
        with suppress(Exception):
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                await self._ask("redraft_discard", self._id)

    async def _exchange(self, found: _Found, serving: str, *, clears: bool) -> dict[str, Any]:
        """Load the staged version on all ranks while the engine pauses, or between two steps if it cannot pause.

        `clears`: the target reads everything again. Keys of the old draft would be gone at once.
        """
        await self._require_awake()
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(PAUSE_TIMEOUT_S):
                if self._can_pause:
                    await self._pause(serving, clears=clears)
                loaded = await self._load(found, serving, resets=clears and not self._can_pause)
        except TimeoutError:
            detail = f"{found.name} was not loaded within {PAUSE_TIMEOUT_S:.0f} s, and generation goes on: swap again"
            raise HTTPException(504, detail) from None
        finally:
            if self._can_pause:
                await self._resume()
        pause_ms = 1e3 * (time.perf_counter() - began_s)
        return {"version": found.name, "previous": serving, "swapped": True, "pause_ms": pause_ms, **loaded}

    async def _pause(self, serving: str, *, clears: bool) -> None:
        """Pause generation, and empty the cache if asked to. Raises HTTPException 503 if the engine refuses."""
        problem, cure = ("pause and empty its cache", CACHE_CURE) if clears else ("pause", "swap again")
        pause = self.engine.pause_generation(mode="keep", clear_cache=clears)
        await self._tell(pause, f"the engine could not {problem}", f"; still serving {serving}: {cure}")

    async def _reset_cache(self) -> None:
        """Empty the cache between two steps. Raises HTTPException 503 if the engine refuses."""
        problem = "the engine could not empty its cache"
        reset = self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if await self._tell(reset, problem) is False:  # as vLLM answers about an external cache
            raise HTTPException(503, f"{problem}: its KV connector did not reset")

    async def _require_awake(self) -> None:
        """Refuse to touch an engine that somebody has put to sleep or paused: a swap would also resume it."""
        if await self._while_alive(self.engine.is_sleeping()):
            raise HTTPException(409, "the engine sleeps or is paused: wake it up, then swap again")

    async def _resume(self) -> None:
        """Resume, unless the engine fell asleep meanwhile: then it is resumed when it is woken up."""
        refusal: HTTPException | None = None
        try:
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                while not await self._is_asleep():
                    try:
                        resume = self.engine.resume_generation()
                        return await self._tell(resume, "generation was not resumed", ": restart this server")
                    except HTTPException as error:
                        if self.engine.errored:
                            raise
                        refusal = error
                    await asyncio.sleep(RESUME_POLL_S)
        except TimeoutError:
            raise refusal or HTTPException(504, "the engine does not answer: restart this server") from None

    async def _is_asleep(self) -> bool:
        with suppress(Exception):  # a server that cannot say is resumed
            return any(rank["asleep"] for rank in await self._ask("redraft_status"))
        return False

    async def _load(self, found: _Found, serving: str, *, resets: bool) -> dict[str, Any]:
        """Load on all ranks, then empty the cache if it `resets`. If either fails, restore the last good draft."""
        try:
            # All ranks load, or all go back.
            ranks = await self._ask_for_draft("redraft_load", str(found.folder))
        # The engine has died, or has no draft: there is nothing to restore.
        except HTTPException:
            raise
        except Exception as silence:  # e.g. a call between processes failed: some ranks may have loaded
            raise await self._go_back(
                HTTPException(500, f"a rank gave no answer: {say(silence)}"), serving
            ) from silence
        failed = [rank for rank in ranks if not rank["ok"]]
        if failed:
            error = failed[0]["error"]
            # Ranks with different drafts would propose nonsense, so all go back.
            if any(rank["ok"] or rank["touched"] for rank in ranks):
                raise await self._go_back(HTTPException(500, error), serving)
            raise HTTPException(409, f"{error}; still serving {serving}")
        if resets:
            try:
                await self._reset_cache()
            except HTTPException as refusal:
                if self.engine.errored:
                    raise
                raise await self._go_back(refusal, serving, f": {CACHE_CURE}") from refusal
        # only now: if anything fails, the ranks need the last good draft to go back to
        await self._ask("redraft_commit", found.name)
        if any(rank["checksum_before"] != rank["checksum_after"] for rank in ranks):
            raise HTTPException(500, "the target's weights changed: restart this server")
        return {
            "load_ms": max(rank["load_ms"] for rank in ranks),
            "target_checksum_before": ranks[0]["checksum_before"],
            "target_checksum_after": ranks[0]["checksum_after"],
        }

    async def _go_back(self, refusal: HTTPException, serving: str, cure: str = "") -> HTTPException:
        """Restore the last good draft, and add that to the refusal."""
        if not await self._restore():
            told = f"{refusal.detail}; and {serving} could not be restored: swap to a good version"
            return HTTPException(500, told)
        return HTTPException(refusal.status_code, f"{refusal.detail}; {serving} was restored{cure}")

    async def _restore(self) -> bool:
        """Load the last good draft again on all ranks. Generation waits for it, at most PAUSE_TIMEOUT_S in all."""
        try:
            if any(rank["error"] for rank in await self._stage_on_ranks(None)):
                return False
            return all(rank["ok"] for rank in await self._ask_for_draft("redraft_restore"))
        except HTTPException:
            raise
        except Exception:
            logger.exception("the last good draft could not be restored")
            return False

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """The answers of all ranks of all replicas, to a method of the worker."""
        return await self._while_alive(self._ask_replicas(method, args))

    async def _ask_for_draft(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """The answers of the ranks with the draft. The stages of a pipeline before the last one have none."""
        ranks = [rank for rank in await self._ask(method, *args) if rank is not None]
        if not ranks:
            raise HTTPException(409, "no rank of this server has a draft to swap: restart it with one")
        return ranks

    async def _while_alive(self, call: Awaitable[T]) -> T:
        """The result of a call to the engine.

        vLLM never answers a call that was running when its engine died. A server ends only after its last request, so
        one such call would keep a dead server from being started again.

        Raises:
            HTTPException: 503, if the engine dies meanwhile.
        """
        running = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({running}, timeout=DEATH_POLL_S))[0]:
                if self.engine.errored:
                    raise HTTPException(503, DEAD)
            return running.result()
        finally:
            running.cancel()

    async def _tell(self, call: Awaitable[T], problem: str, then: str = "") -> T:
        """The result of a call that the engine may refuse.

        Raises:
            HTTPException: 503 with the problem, what the engine said about it, and `then`.
        """
        try:
            return await self._while_alive(call)
        except HTTPException:
            raise
        except Exception as error:
            if self.engine.errored:
                raise HTTPException(503, DEAD) from error
            raise HTTPException(503, f"{problem}: {say(error)}{then}") from error

    async def _ask_replicas(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """With data parallelism each replica has an engine. vLLM's `collective_rpc` asks all engines, but returns only
        the first one's answers."""
        ask_all = getattr(getattr(self.engine, "engine_core", None), "call_utility_all_async", None)
        if ask_all is None:  # e.g. an engine in this process
            answers: list[Any] = await self.engine.collective_rpc(method, args=args)
            return answers
        return list(chain.from_iterable(await ask_all("collective_rpc", method, None, args, None)))

    async def _status(self) -> dict[str, Any]:
        import vllm

        ranks = await self._ask("redraft_status")
        recording = [rank for rank in ranks if rank["capture"]]
        return {
            # One rank's answer. The keys below replace those that depend on all ranks.
            **(recording or ranks)[0],
            "capture": _add_up([rank["capture"] for rank in recording]) if recording else None,
            "vllm_version": vllm.__version__,
            "registry": self._registry_id,
            "num_ranks": len(ranks),
            **{
                name: next(filter(None, (rank.get(name) for rank in ranks)), "")
                for name in ("swap_off", "capture_off", "swap_cache")
            },
            "draft_intact": all(rank["draft_intact"] for rank in ranks)
            and len({rank["draft_version"] for rank in ranks}) == 1,
            "target_intact": all(rank["target_intact"] for rank in ranks),
            "asleep": any(rank["asleep"] for rank in ranks),
            "domains": await self._count_domains(),
        }

    async def _count_domains(self) -> domains.Counts:
        """Drafts and accepted tokens by domain, of all replicas; none from an engine that does not count them."""
        ask = getattr(getattr(self.engine, "engine_core", None), "call_utility_all_async", None)
        if ask is None or not domains.are_counted():
            return {}
        return domains.sum_counts(await self._while_alive(ask("redraft_domains")))


def say(error: Exception) -> str:
    """The engine's words about an error, in one line."""
    return " ".join(str(error).split())[:MAX_SAID].rstrip(".") or type(error).__name__


def can_pause(vllm_config: Any) -> bool:
    """Whether this API server can pause its engines by itself.

    Replicas that share experts step together, and pause together: vLLM waits until all of them have been told to.
    Behind an external or hybrid balancer an API server reaches only some of them.
    """
    parallel = vllm_config.parallel_config
    shares_experts = vllm_config.model_config.is_moe and parallel.data_parallel_size > 1
    return not (shares_experts and parallel.local_engines_only)


class OriginMiddleware:
    """Stores the X-Redraft-Tenant, -Domain and -Opt-Out headers of a request for `forward_origin`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            _origin.set(read_origin_headers(Headers(scope=scope)))
        await self.app(scope, receive, send)


def forward_origin(engine_client: Any) -> None:
    """Make `engine_client.generate` write the origin into the sampling parameters, over any value from the client."""
    generate = engine_client.generate

    def generate_with_origin(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        origin = {EXTRA_ARGS_KEY: _origin.get(Origin())._asdict()}
        sampling_params.extra_args = (sampling_params.extra_args or {}) | origin
        return generate(prompt, sampling_params, *args, **kwargs)

    engine_client.generate = generate_with_origin


def authorize(request: Request, config: PluginConfig) -> None:
    """Raise HTTPException unless the request may use the routes.

    Raises: HTTPException 403 for another machine, 503 if no token is configured, 401 for a wrong token.
    """
    if not config.allow_remote and not _is_local(request.client.host if request.client else None):
        raise HTTPException(403, "only this machine may ask: set REDRAFT_ALLOW_REMOTE=1 to allow others")
    if config.token is None:
        raise HTTPException(503, "no token: start the server with REDRAFT_TOKEN or REDRAFT_TOKEN_FILE")
    given = request.headers.get("authorization", "")
    # As bytes: `compare_digest` raises for a string that is not ASCII.
    if not hmac.compare_digest(given.encode(), f"Bearer {config.token}".encode()):
        raise HTTPException(401, "wrong or missing bearer token", headers={"WWW-Authenticate": "Bearer"})


def _add_up(captures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sums of all counters; of each text, the first that is not empty."""
    names = dict.fromkeys(chain.from_iterable(captures))
    values = {name: [capture[name] for capture in captures if name in capture] for name in names}
    return {
        name: next(filter(None, found), "") if isinstance(found[0], str) else sum(found)
        for name, found in values.items()
    }


def _is_local(host: str | None) -> bool:
    if host is None:  # a Unix socket
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The body of a swap request."""

    version: Any
    manifest_sha256: str
    registry: str

    @classmethod
    def parse(cls, body: Any) -> _Asked:
        """Raises ValueError, KeyError or TypeError if the body is not a request."""
        manifest_sha256, registry = body.get("manifest_sha256") or "", body.get("registry") or ""
        if not isinstance(manifest_sha256, str) or not isinstance(registry, str):
            raise TypeError("a hash and an id are strings")
        return cls(version=body["version"], manifest_sha256=manifest_sha256, registry=registry)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A version in the registry's folder."""

    folder: Path
    manifest_sha256: str
    registry: str
    """The registry's id; empty if it has none."""
    target_fingerprint: str
    """Empty if its provenance names none."""

    @property
    def name(self) -> str:
        return self.folder.name


def _no_version(name: str) -> HTTPException:
    return HTTPException(
        404,
        f"no version {name!r} in the registry: ask for one that `redraft fleet versions` lists, and copy the registry "
        "again if this server reads a copy",
    )


def _read_version(folder: Path) -> _Found:
    """Read the small files of a version. Blocking; raises HTTPException if there is no such version."""
    if not folder.is_dir():
        raise _no_version(folder.name)
    try:
        path = folder / PROVENANCE
        provenance = json.loads(path.read_text()) if path.is_file() else {}
        return _Found(
            folder=folder,
            manifest_sha256=hash_manifest(folder),
            registry=read_id(folder.parent),
            target_fingerprint=str(provenance.get("target_fingerprint") or ""),
        )
    except (ValueError, OSError, AttributeError) as error:
        raise HTTPException(422, f"{folder.name} is damaged: {error}") from error


def _require_target(found: _Found, fingerprint: str) -> None:
    """Refuse a version whose provenance names another target."""
    wanted = found.target_fingerprint
    if wanted and wanted != fingerprint:
        raise HTTPException(
            409,
            f"{found.name} was trained for target {wanted[:12]}, but this server runs {fingerprint[:12]}: "
            "give the server the registry of its own target, or restart it with the target of the draft",
        )
