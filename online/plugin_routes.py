"""What the plugin adds to vLLM's API process: `GET /redraft/status`, `POST /redraft/swap`, and who a request is from.

    client headers ─► OriginMiddleware ─► context variable ─► engine_client.generate ─► SamplingParams.extra_args

so that tenant, domain and opt-out reach the worker without a trace in what the client sends or gets.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from starlette.datastructures import Headers, State

from heads.artifact import PROVENANCE, verify
from online.plugin_config import PLUGIN_NAME, PluginConfig, read_config
from online.request_origin import EXTRA_ARGS_KEY, Origin, origin_of

VERSION = re.compile(r"v\d{6,}")

_origin: ContextVar[Origin] = ContextVar("redraft_origin")


class Endpoint:
    """The object that vLLM's endpoint plugins are."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.config = read_config()
        self.engine: Any = None
        self._swapping = asyncio.Lock()

    def attach_router(self, app: FastAPI) -> None:
        app.add_middleware(OriginMiddleware)
        app.add_api_route("/redraft/status", self.status, methods=["GET"], response_model=None)
        app.add_api_route("/redraft/swap", self.swap, methods=["POST"], response_model=None)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        self.engine = engine_client
        if self.config.capture is not None:
            pass_origin_on(engine_client)

    async def status(self, request: Request) -> dict[str, Any]:
        """The first rank's status, vLLM's version, and whether all ranks agree on the draft's version."""
        authorize(request, self.config)
        return await self._status()

    async def swap(self, request: Request) -> dict[str, Any]:
        """Body `{"version": "v000012"}`. 200: all ranks serve it, nothing that runs was cut off."""
        authorize(request, self.config)
        try:
            version = (await request.json())["version"]
        except (ValueError, KeyError, TypeError):
            raise HTTPException(400, 'send a JSON body {"version": "v000012"}') from None
        folder = self._folder(version)
        # A client that goes away must not leave the engine paused.
        return await asyncio.shield(asyncio.ensure_future(self._swap_one_at_a_time(version, folder)))

    def _folder(self, version: Any) -> Path:
        if self.config.registry is None:
            raise HTTPException(503, "no registry: start the server with REDRAFT_REGISTRY")
        folder = self.config.registry / str(version)
        # An id and nothing else: a path could name any folder of this machine.
        if not isinstance(version, str) or not VERSION.fullmatch(version) or not folder.is_dir():
            raise HTTPException(404, f"no version {str(version)[:40]!r} in the registry")
        return folder

    async def _swap_one_at_a_time(self, version: str, folder: Path) -> dict[str, Any]:
        async with self._swapping:
            status = await self._status()
            if status["draft_version"] == version and status["draft_intact"]:
                return {"version": version, "previous": version, "swapped": False}
            await asyncio.to_thread(_require_intact, folder)
            _require_target(folder, status["target_fingerprint"])
            began_s = time.perf_counter()
            try:
                # Keys and values of the old draft would spoil the new one's guesses for all text that is cached.
                await self.engine.pause_generation(mode="keep", clear_cache=True)
                loaded = await self._load(version, str(folder), status["draft_version"])
            finally:
                await self.engine.resume_generation()
        return {
            "version": version,
            "previous": status["draft_version"],
            "swapped": True,
            "pause_ms": 1e3 * (time.perf_counter() - began_s),
            **loaded,
        }

    async def _load(self, version: str, folder: str, serving: str) -> dict[str, Any]:
        """Load on all ranks, or put the last good draft back on all ranks."""
        ranks = await self.engine.collective_rpc("redraft_load", args=(folder,))
        failed = [rank for rank in ranks if not rank["ok"]]
        if not failed:
            await self.engine.collective_rpc("redraft_commit", args=(folder, version))
            if any(rank["checksum_before"] != rank["checksum_after"] for rank in ranks):
                raise HTTPException(500, "the target's weights changed: restart this server")
            return {
                "load_ms": max(rank["load_ms"] for rank in ranks),
                "target_checksum_before": ranks[0]["checksum_before"],
                "target_checksum_after": ranks[0]["checksum_after"],
            }
        error = failed[0]["error"]
        if any(rank["ok"] or rank["touched"] for rank in ranks):
            restored = await self.engine.collective_rpc("redraft_restore")
            if not all(rank["ok"] for rank in restored):
                raise HTTPException(500, f"{error}; and {serving} could not be put back: swap to a good version")
            raise HTTPException(500, f"{error}; {serving} was put back")
        raise HTTPException(409, f"{error}; still serving {serving}")

    async def _status(self) -> dict[str, Any]:
        import vllm

        ranks = await self.engine.collective_rpc("redraft_status")
        recording = next((rank for rank in ranks if rank["capture"]), ranks[0])
        return {
            **recording,
            "vllm_version": vllm.__version__,
            "num_ranks": len(ranks),
            "draft_intact": all(rank["draft_intact"] for rank in ranks)
            and len({rank["draft_version"] for rank in ranks}) == 1,
            "target_intact": all(rank["target_intact"] for rank in ranks),
        }


class OriginMiddleware:
    """Keeps what the headers X-Redraft-Tenant, -Domain and -Opt-Out say where `pass_origin_on` finds it."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            _origin.set(origin_of(Headers(scope=scope)))
        await self.app(scope, receive, send)


def pass_origin_on(engine_client: Any) -> None:
    """Let `engine_client.generate` write the origin into the sampling parameters, over what a client put there."""
    generate = engine_client.generate

    def generate_with_origin(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        origin = {EXTRA_ARGS_KEY: _origin.get(Origin())._asdict()}
        sampling_params.extra_args = (sampling_params.extra_args or {}) | origin
        return generate(prompt, sampling_params, *args, **kwargs)

    engine_client.generate = generate_with_origin


def authorize(request: Request, config: PluginConfig) -> None:
    """Return where the request may use the routes.

    Raises: HTTPException 403 from another machine, 503 without a token configured, 401 with a wrong one.
    """
    if not config.allow_remote and not _is_local(request.client.host if request.client else None):
        raise HTTPException(403, "only from this machine: set REDRAFT_ALLOW_REMOTE=1 to allow others")
    if config.token is None:
        raise HTTPException(503, "no token: start the server with REDRAFT_TOKEN or REDRAFT_TOKEN_FILE")
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {config.token}".encode()):
        raise HTTPException(401, "wrong or missing bearer token", headers={"WWW-Authenticate": "Bearer"})


def _is_local(host: str | None) -> bool:
    if host is None:  # a Unix socket
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require_intact(folder: Path) -> None:
    try:
        verify(folder)
    except (ValueError, OSError) as error:
        raise HTTPException(422, f"{folder.name} is damaged: {error}") from error


def _require_target(folder: Path, fingerprint: str) -> None:
    """A version that says which target it was trained for is refused by any other."""
    path = folder / PROVENANCE
    wanted = json.loads(path.read_text()).get("target_fingerprint") if path.is_file() else None
    if wanted and wanted != fingerprint:
        raise HTTPException(409, f"{folder.name} was trained for target {wanted[:12]}, this is {fingerprint[:12]}")
