"""Swap a draft in a transaction: all ranks serve the new version, or return to the last good draft.

find ─► stage: the ranks read it into memory, and serve ─► pause ─► load ─► commit ─► resume
         └─ a swap to another version, if found,         └─ a failure: restore the last good draft
            takes over here

A move loads or names the target weights in the same pause, before the draft if one is requested."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from redraft.files.folder import lineage
from redraft.heads.provenance import Provenance, read_provenance
from redraft.online.engine.engine_calls import EngineCalls, RefusedError, say
from redraft.online.engine.trainer_files import OutsideError, list_files, read_through
from redraft.online.fleet.registry import hash_manifest, read_id

T = TypeVar("T")
VERSION = re.compile(r"v[0-9]{6,18}")
STAGE_TIMEOUT_S = 200.0  # time limit for reading a version into memory, while serving continues
STAGE_POLL_S, BUSY_POLL_S = 0.05, 0.25
# Maximum pause, including the copies of the weights. The engine then resumes.
PAUSE_TIMEOUT_S = 60.0
# Time limit for reading target weights before the pause, and again for loading them within it.
TARGET_TIMEOUT_S = 1200.0
RESUME_TIMEOUT_S = 30.0
RESUME_POLL_S = 0.5  # between attempts to resume, because vLLM refuses until its pause is complete
CACHE_CURE = (
    "swap again when no request waits for a KV cache transfer, or restart this server "
    "with --swap.cache keep"
)

logger = logging.getLogger("vllm.redraft")


@dataclass(frozen=True, kw_only=True)
class Asked:
    version: str
    manifest_sha256: str = ""
    """Required hash of the manifest; empty if any is accepted."""
    registry: str = ""
    """Required registry id; empty if any is accepted."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A trainer's request for target weights from a folder, a name for them, and a draft.

    Each of the three may be empty.
    """

    folder: str = ""
    label: str = ""
    draft: str = ""


WITHOUT_KEYS = ("medusa",)
"""Methods whose drafts store nothing in the KV cache."""


class HalfNewError(RefusedError):
    """Raised when the target weights are only partly updated. The engine must not continue."""


class Swaps:
    """Runs the swaps of one API process, one at a time.

    If two requests name different versions, the later one wins.
    """

    def __init__(
        self,
        registry: Path | None,
        engine: Any,
        *,
        targets: tuple[Path, ...] = (),
        can_pause: bool = True,
    ) -> None:
        self.registry, self.engine, self.calls = registry, engine, EngineCalls(engine)
        self.targets = targets  # Target weights may be loaded from these folders.
        self.registry_id = ""  # id of the served registry, from its folder or from the first swap
        # Identifies this process to the workers, which let one API process swap at a time.
        self._id = uuid.uuid4().hex
        self._can_pause = can_pause
        self._owes_resumption = False  # whether this process has paused the engine
        self._pause_generation, engine.pause_generation = (
            engine.pause_generation,
            self._pause_for_others,
        )
        self._swapping = asyncio.Lock()
        # Salt for cached blocks, which depends on the draft that wrote them.
        self._first_draft = self._salt = ""
        self._num_asked = self._latest_number = 0
        # Last requested version that was found. `_latest_number` counts requests.
        self._latest = ""
        self._staged = ""  # The version of `_staging`.
        self._staging: asyncio.Future[None] | None = None
        # Reads of folders' small files that are in progress.
        self._reads: dict[str, Future[Any]] = {}

    async def move(self, move: Move) -> dict[str, Any]:
        """Load or name the target weights, and load a draft.

        Returns the response for the client.

        Raises:
            RefusedError: the message names the weights and the draft that are then served.
        """
        if move.folder:
            move = replace(move, folder=await self._find_target(move.folder))
        report: dict[str, Any] = {}
        if move.draft:
            report = await self.swap(Asked(version=move.draft), move)
        elif move.folder:
            async with self._swapping:
                status = await self.calls.status()
                report = await self._exchange(None, move, status["draft_version"], clears=True)
        else:
            await self.calls.ask("redraft_name_target", move.label)
        status = await self.calls.status()
        return report | {name: status[name] for name in ("target_version", "draft_version")}

    async def swap(self, asked: Asked, move: Move | None = None) -> dict[str, Any]:
        """Swap to a version, after `move` if it is given.

        Returns the response for the client.

        Raises:
            RefusedError: the swap is refused or fails.
        """
        if not VERSION.fullmatch(
            asked.version
        ):  # accept only a version id, because a path could name any folder on this machine
            raise _no_version(asked.version[:40])
        number = self._num_asked = self._num_asked + 1
        status = await self.calls.status()
        if status.get("swap_off"):
            raise RefusedError(409, f"this server cannot swap drafts: {status['swap_off']}")
        with _deadline(asked.version, status["draft_version"]):
            found = await self._find(asked, status)
        self._give_way_to(found.name, number)
        async with self._swapping:
            self._require_latest(found.name)
            # Check under the lock, because the previous swap may have loaded this same version.
            status = await self.calls.status()
            serving = status["draft_version"]
            await self._require_awake()
            # A copy of the registry may contain a different v000012, so the name alone does not
            # identify it.
            is_same = status.get("manifest_sha256") in ("", None, found.manifest_sha256)
            clears = status["swap_cache"] == "clear" or bool(move and move.folder)
            if serving == found.name and status["draft_intact"] and is_same:
                report = await self._exchange(None, move, serving, clears=clears) if move else {}
                return {"version": serving, "previous": serving, "swapped": False, **report}
            await self._read_into_memory(found, serving)
            try:
                report = await self._exchange(found, move, serving, clears=clears)
            finally:
                await self._discard()
            if status["swap_cache"] == "keep" and status.get("method") not in WITHOUT_KEYS:
                # A server's first draft has no salt, so that returning to it finds its cached
                # blocks.
                before = status.get("manifest_sha256") or serving
                self._first_draft = self._first_draft or before
                self._salt = found.manifest_sha256 or found.name
            # Set it only after the swap, because a refused swap must not bind this server to a
            # registry.
            self.registry_id = found.registry or self.registry_id or asked.registry
            return report

    def salt_for(self, given: str | None) -> str | None:
        """Return the cache salt for a request whose client sends the salt `given`.

        With this salt, the request does not match cached blocks that a different draft wrote.
        """
        is_first = self._salt == self._first_draft
        return given if is_first else f"{self._salt}\0{given or ''}"

    def _give_way_to(self, version: str, number: int) -> None:
        """Let a version that was requested later, and found, replace the version being read."""
        if number > self._latest_number:
            self._latest_number, self._latest = number, version
        self._require_latest(version)
        if self._staging is not None and self._staged != version:
            self._staging.cancel()  # the read may hang, and this request may be the rollback

    def _require_latest(self, version: str) -> None:
        if version != self._latest:
            raise RefusedError(
                409, f"the swap to {version} was replaced by a swap to {self._latest}"
            )

    async def _read_into_memory(self, found: _Found, serving: str) -> None:
        """Make all ranks read the version, unless a different version is requested meanwhile."""
        self._require_latest(found.name)
        self._staged = found.name
        self._staging = asyncio.ensure_future(self._stage(found, serving))
        try:
            with _deadline(found.name, serving):
                async with asyncio.timeout(STAGE_TIMEOUT_S):
                    await self._staging
        except asyncio.CancelledError:
            self._require_latest(found.name)
            raise
        finally:
            self._staging = None

    async def _find(self, asked: Asked, status: dict[str, Any]) -> _Found:
        """Find the version in the registry's folder.

        Raises:
            RefusedError: it is missing, differs from the requested one, or is for a different
                target.
        """
        async with asyncio.timeout(STAGE_TIMEOUT_S):
            assert self.registry is not None
            found = await self._read(self.registry / asked.version, _read_version)
        known = found.registry or self.registry_id
        if asked.registry and known and asked.registry != known:
            raise RefusedError(
                409,
                f"this server serves drafts from the registry {known[:12]}, not from "
                f"{asked.registry[:12]}: "
                "give each server one learner, and restart it to change that",
            )
        if asked.manifest_sha256 and asked.manifest_sha256 != found.manifest_sha256:
            raise RefusedError(
                409,
                f"{found.name} has manifest {found.manifest_sha256[:12]} here, not "
                f"{asked.manifest_sha256[:12]}: copy the registry again",
            )
        _require_target(found, status["target_fingerprint"], status.get("target_lineage", ""))
        return found

    async def _find_target(self, name: str) -> str:
        """Resolve a folder that has target weights of the served model.

        Raises:
            RefusedError: the folder may not be loaded.
        """
        if not self.targets:
            raise RefusedError(
                503,
                "target weights cannot be loaded: start the server with `redraft serve "
                "--targets FOLDER`",
            )
        status = await self.calls.status()
        try:
            async with asyncio.timeout(TARGET_TIMEOUT_S):
                folder, found = await self._read(Path(name), partial(_read_lineage, self.targets))
        except TimeoutError:
            raise RefusedError(
                504, f"reading {name} took longer than {TARGET_TIMEOUT_S:.0f} s"
            ) from None
        if found != status.get("target_lineage"):
            raise RefusedError(
                409,
                f"{name} differs from the served target in tensors, type or tokenizer: save a "
                f"complete checkpoint, or restart the server with this one",
            )
        return str(folder)

    async def _read(self, folder: Path, read: Callable[[Path], T]) -> T:
        """Read a folder's small files in a separate thread, or join an earlier read that hangs."""
        key = str(folder)
        future = self._reads.get(key)
        if future is None:
            future = self._reads[key] = Future()
            # A swap that gives up must not cancel this future, because `set_result` would then
            # raise.
            future.set_running_or_notify_cancel()
            future.add_done_callback(lambda _: self._reads.pop(key))
            threading.Thread(
                target=_settle, args=(future, read, folder), name="redraft-registry", daemon=True
            ).start()
        found: T = await asyncio.wrap_future(future)
        return found

    async def _stage(self, found: _Found, serving: str) -> None:
        try:
            for rank in await self._stage_on_ranks(str(found.folder)):
                if rank["damaged"]:
                    raise RefusedError(422, f"{found.name} is damaged: {rank['error']}")
                if rank["error"]:
                    raise RefusedError(409, f"{rank['error']}; still serving {serving}")
                if rank["manifest_sha256"] != found.manifest_sha256:
                    raise RefusedError(
                        409, f"{found.name} changed while it was read; still serving {serving}"
                    )
        except BaseException:
            await self._discard()
            raise

    async def _stage_on_ranks(self, folder: str | None) -> list[dict[str, Any]]:
        """Make all ranks read a draft, and return their results.

        If `folder` is None, they read the last good draft. If any rank has failed, only the results
        from the failed ranks are returned.
        """
        while True:
            started = await self.calls.ask_for_draft("redraft_stage", folder, self._id)
            if not any(rank.get("is_busy") for rank in started):
                break
            await asyncio.sleep(BUSY_POLL_S)
        if not all(rank["ok"] for rank in started):
            return [
                {"damaged": False, "error": rank["error"]} for rank in started if not rank["ok"]
            ]
        while True:
            # Poll in short calls, because the engine runs no step during a call.
            ranks = await self.calls.ask_for_draft("redraft_staged")
            failed = [rank for rank in ranks if rank["error"]]
            if failed or all(rank["done"] for rank in ranks):
                return failed or ranks
            await asyncio.sleep(STAGE_POLL_S)

    async def _discard(self) -> None:
        """Free the staged version's memory. If this fails, the next swap frees it."""
        with suppress(Exception):
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                await self.calls.ask("redraft_discard", self._id)

    async def _exchange(
        self, found: _Found | None, move: Move | None, serving: str, *, clears: bool
    ) -> dict[str, Any]:
        """Move the target if `move` is given, then load the staged version if `found` is given.

        All ranks load in a pause, which may be a trainer's, or otherwise between two steps. With
        `clears`, the pause empties the cache, and all requests are prefilled again.
        """
        await self._require_awake()
        is_paused = await self.calls.request(
            self.engine.is_paused(), "the engine does not report whether it is paused"
        )
        pauses = resumes = self._can_pause and (self._owes_resumption or not is_paused)
        self._owes_resumption |= pauses
        resets = clears and not pauses
        deadline_s = TARGET_TIMEOUT_S if move and move.folder else PAUSE_TIMEOUT_S
        began_s, has_moved = time.perf_counter(), False
        try:
            async with asyncio.timeout(deadline_s):
                if pauses:
                    await self._pause(serving, clears=clears)
                if move:
                    await self._move(move, resets=resets)
                    has_moved = bool(move.folder)
                loaded = (
                    await self._load(found, serving, resets=resets, has_moved=has_moved)
                    if found
                    else {}
                )
        except TimeoutError:
            name = found.name if found else "the target"
            raise RefusedError(
                504,
                f"{name} was not loaded within {deadline_s:.0f} s; generation continues: swap "
                f"again",
            ) from None
        except HalfNewError:
            resumes = False
            raise
        except RefusedError as refusal:
            if has_moved:
                raise RefusedError(
                    refusal.code, f"the target has the new weights, but {refusal.why}"
                ) from refusal
            raise
        finally:
            # Otherwise, a trainer has also paused the engine, and may be writing weights.
            if resumes and self._owes_resumption:
                await self._resume()
        report = {"pause_ms": 1e3 * (time.perf_counter() - began_s), **loaded}
        return report | (
            {"version": found.name, "previous": serving, "swapped": True} if found else {}
        )

    async def _move(self, move: Move, *, resets: bool) -> None:
        """Load the target weights on all ranks or on none, and name them."""
        if move.folder:
            ranks = await self.calls.ask("redraft_load_target", move.folder)
            error = next((rank["error"] for rank in ranks if not rank["ok"]), "")
            refusal = RefusedError(500, error) if error else None
            if resets and not error:
                try:
                    await self._reset_cache()
                    # The workers cleared their part of this cache when they loaded the weights.
                    await self.calls.request(
                        self.engine.reset_encoder_cache(),
                        "the engine could not clear its image cache",
                    )
                except RefusedError as refused:
                    refusal = refused
            if refusal is not None:
                if any(rank["ok"] or rank["touched"] for rank in ranks):
                    ranks = await self.calls.ask("redraft_load_target", None)
                    if not all(rank["ok"] for rank in ranks):
                        raise HalfNewError(
                            500,
                            f"{refusal.why}; the target is partly updated, and the engine "
                            "stays paused: load the weights again",
                        )
                raise RefusedError(refusal.code, f"{refusal.why}; the target keeps its old weights")
        if move.label:
            await self.calls.ask("redraft_name_target", move.label)

    async def _pause_for_others(self, **how: Any) -> None:
        self._owes_resumption = False
        await self._pause_generation(**how)

    async def _pause(self, serving: str, *, clears: bool) -> None:
        """Pause generation, and empty the cache if `clears`.

        Raises:
            RefusedError: 503 if the engine refuses.
        """
        problem, cure = (
            ("pause and empty its cache", CACHE_CURE) if clears else ("pause", "swap again")
        )
        pause = self._pause_generation(mode="keep", clear_cache=clears)
        await self.calls.request(
            pause, f"the engine could not {problem}", f"; still serving {serving}: {cure}"
        )

    async def _reset_cache(self) -> None:
        """Empty the cache between two steps.

        Raises:
            RefusedError: 503 if the engine refuses.
        """
        problem = "the engine could not empty its cache"
        reset = self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if await self.calls.request(reset, problem) is False:  # vLLM's result for an external cache
            raise RefusedError(503, f"{problem}: its KV connector did not reset")

    async def _require_awake(self) -> None:
        if await self._is_asleep():
            raise RefusedError(409, "the engine is sleeping: wake it up, then swap again")

    async def _resume(self) -> None:
        """Resume generation, unless the engine has fallen asleep in the meantime.

        A sleeping engine is resumed when it is woken up.
        """
        refusal: RefusedError | None = None
        try:
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                while not await self._is_asleep():
                    try:
                        resume = self.engine.resume_generation()
                        await self.calls.request(
                            resume, "generation was not resumed", ": restart this server"
                        )
                        break
                    except RefusedError as error:
                        if self.engine.errored:
                            raise
                        refusal = error
                    await asyncio.sleep(RESUME_POLL_S)
                self._owes_resumption = False
        except TimeoutError:
            raise refusal or RefusedError(
                504, "the engine does not answer: restart this server"
            ) from None

    async def _is_asleep(self) -> bool:
        with suppress(Exception):  # resume a server whose state is unknown
            return any(rank["asleep"] for rank in await self.calls.ask("redraft_status"))
        return False

    async def _load(
        self, found: _Found, serving: str, *, resets: bool, has_moved: bool
    ) -> dict[str, Any]:
        """Load the staged draft on all ranks, and empty the cache afterwards if `resets`.

        If either fails, restore the last good draft.
        """
        try:
            # Either all ranks load the draft, or all return to the last good one.
            ranks = await self.calls.ask_for_draft("redraft_load", str(found.folder), has_moved)
        # The engine has died or has no draft, so there is nothing to restore.
        except RefusedError:
            raise
        except (
            Exception
        ) as silence:  # e.g. a call between processes failed: some ranks may have loaded the draft
            raise await self._go_back(
                RefusedError(500, f"a rank gave no answer: {say(silence)}"), serving
            ) from silence
        failed = [rank for rank in ranks if not rank["ok"]]
        if failed:
            error = failed[0]["error"]
            # Ranks with different drafts would propose garbage, so all of them return to the last
            # good draft.
            if any(rank["ok"] or rank["touched"] for rank in ranks):
                raise await self._go_back(RefusedError(500, error), serving)
            raise RefusedError(409, f"{error}; still serving {serving}")
        if resets:
            try:
                await self._reset_cache()
            except RefusedError as refusal:
                if self.engine.errored:
                    raise
                raise await self._go_back(refusal, serving, f": {CACHE_CURE}") from refusal
        # Record it only now: if anything fails, the ranks need the last good draft to return to.
        await self.calls.ask("redraft_commit", found.name)
        if any(rank["checksum_before"] != rank["checksum_after"] for rank in ranks):
            raise RefusedError(500, "the swap changed the target's weights: restart this server")
        return {
            "load_ms": max(rank["load_ms"] for rank in ranks),
            "target_checksum_before": ranks[0]["checksum_before"],
            "target_checksum_after": ranks[0]["checksum_after"],
        }

    async def _go_back(self, refusal: RefusedError, serving: str, cure: str = "") -> RefusedError:
        if not await self._restore():
            return RefusedError(
                500, f"{refusal.why}; and {serving} could not be restored: swap to a good version"
            )
        return RefusedError(refusal.code, f"{refusal.why}; {serving} was restored{cure}")

    async def _restore(self) -> bool:
        """Load the last good draft again on all ranks.

        Generation waits in the meantime, for at most PAUSE_TIMEOUT_S in total.
        """
        try:
            if any(rank["error"] for rank in await self._stage_on_ranks(None)):
                return False
            return all(rank["ok"] for rank in await self.calls.ask_for_draft("redraft_restore"))
        except RefusedError:
            raise
        except Exception:
            logger.exception("the last good draft could not be restored")
            return False


def can_pause(vllm_config: Any) -> bool:
    """Whether this API server can pause its engines by itself.

    Replicas that share experts step and pause together: vLLM waits until each of them was asked to
    pause. Behind an external or hybrid load balancer, an API server reaches only some of the
    replicas.
    """
    parallel = vllm_config.parallel_config
    shares_experts = vllm_config.model_config.is_moe and parallel.data_parallel_size > 1
    return not (shares_experts and parallel.local_engines_only)


@dataclass(frozen=True, kw_only=True)
class _Found:
    folder: Path
    manifest_sha256: str
    registry: str
    """The registry's id. Empty if it has none."""
    provenance: Provenance

    @property
    def name(self) -> str:
        return self.folder.name


@contextmanager
def _deadline(version: str, serving: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        why = f"reading {version} took longer than {STAGE_TIMEOUT_S:.0f} s"
        raise RefusedError(504, f"{why}; still serving {serving}") from None


def _no_version(name: str) -> RefusedError:
    return RefusedError(
        404,
        f"no version {name!r} in the registry: ask for one that `redraft fleet versions` lists, "
        "and copy the registry again if this server reads a copy",
    )


def _settle(future: Future[Any], read: Callable[[Path], Any], folder: Path) -> None:
    try:
        future.set_result(read(folder))
    except BaseException as error:
        future.set_exception(error)


def _read_version(folder: Path) -> _Found:
    """Read the small files of a version. This call blocks.

    Raises:
        RefusedError: there is no such version, or it is damaged.
    """
    if not folder.is_dir():
        raise _no_version(folder.name)
    try:
        return _Found(
            folder=folder,
            manifest_sha256=hash_manifest(folder),
            registry=read_id(folder.parent),
            provenance=read_provenance(folder),
        )
    except (ValueError, OSError, AttributeError, RecursionError) as error:
        raise RefusedError(422, f"{folder.name} is damaged: {error}") from error


def _read_lineage(targets: tuple[Path, ...], folder: Path) -> tuple[Path, str]:
    """Read a target folder, and return (its resolved path, its lineage).

    The call blocks until all of the weights have been read.

    Raises:
        RefusedError: the folder is outside `targets`, has no weights, or is damaged.
    """
    try:
        files = list_files(folder, targets)
        found = lineage(folder)
        read_through(file for file in files if file.suffix == ".safetensors")
        return folder.resolve(), found
    except OutsideError as error:
        raise RefusedError(403, str(error)) from error
    except FileNotFoundError as error:
        raise RefusedError(404, f"{folder} has no weights in safetensors: {error}") from error
    except (ValueError, OSError, AttributeError, RecursionError) as error:
        raise RefusedError(422, f"{folder} is damaged: {error}") from error


def _require_target(found: _Found, fingerprint: str, lineage: str) -> None:
    wanted = found.provenance.target_fingerprint
    if wanted not in ("", fingerprint) and not found.provenance.names_lineage(lineage):
        raise RefusedError(
            409,
            f"{found.name} was trained for target {wanted[:12]}, but this server runs "
            f"{fingerprint[:12]}: "
            "give the server the registry of its own target, or restart it with the draft's target",
        )
