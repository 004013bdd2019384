"""Routes in vLLM's API process.

The routes are `GET /redraft/status`, and `POST` to `/redraft/swap`, `target`, `pace` and `forget`.
"""

import asyncio
import hmac
import logging
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from starlette.datastructures import Headers, State
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from redraft.engine import hooks
from redraft.engine.counters import EMBEDS_BESIDE_DRAFT, LOG_STATS_OFF
from redraft.engine.machine import VLLM_VERSION
from redraft.engine.proxies import is_local
from redraft.online.engine.config import PLUGIN_NAME, PluginConfig, check_pace, read_config
from redraft.online.engine.domains import LOOKUP_METHODS
from redraft.online.engine.engine_calls import RefusedError
from redraft.online.engine.pace_status import PaceMetrics
from redraft.online.engine.swap_transaction import Asked, Move, Swaps, can_pause
from redraft.online.records.origin import (
    EXTRA_ARGS_KEY,
    Origin,
    hash_salt,
    pack_arguments,
    read_origin_headers,
    stored_name,
)
from redraft.online.tokens import read_token

logger = logging.getLogger("vllm.redraft")

NO_REGISTRY = "no registry: start the server with `redraft serve --registry FOLDER`"

PACE_TIMEOUT_S = 2.0
"""Maximum time in seconds that /metrics waits for an engine."""

T = TypeVar("T")


class BeforeMetrics:
    """Middleware that awaits a call before /metrics answers.

    A timer would wake an idle engine.
    """

    def __init__(self, app: ASGIApp, call: Callable[[], Awaitable[None]]) -> None:
        self.app, self.call = app, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/") == "/metrics":
            # Answer without these, because the other metrics are still needed, e.g. after an engine
            # died.
            with suppress(Exception):
                await asyncio.wait_for(self.call(), PACE_TIMEOUT_S)
        await self.app(scope, receive, send)


class Endpoint:
    """Our implementation of vLLM's endpoint plugin interface."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        """Read the settings.

        Raises:
            ValueError, FileNotFoundError: this vLLM is not supported, or a setting is wrong. vLLM
                logs the error and serves without the routes and the middleware.
        """
        if error := hooks.find_unsupported(VLLM_VERSION):
            raise ValueError(error)
        self.config = read_config()
        self.notes: list[str] = []
        """Flags of this server that are probably mistakes."""
        self.swaps: Swaps

    def attach_router(self, app: FastAPI) -> None:
        app.add_middleware(OriginMiddleware)
        if hooks.is_installed("pace"):
            metrics = PaceMetrics()
            app.add_middleware(BeforeMetrics, call=lambda: self._show_pace(metrics))
        app.add_api_route("/redraft/status", self.status, methods=["GET"], response_model=None)
        app.add_api_route("/redraft/swap", self.swap, methods=["POST"], response_model=None)
        app.add_api_route("/redraft/target", self.move, methods=["POST"], response_model=None)
        app.add_api_route("/redraft/pace", self.pace, methods=["POST"], response_model=None)
        app.add_api_route("/redraft/forget", self.forget, methods=["POST"], response_model=None)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        can = can_pause(engine_client.vllm_config)
        self.swaps = Swaps(
            self.config.registry, engine_client, targets=self.config.targets, can_pause=can
        )
        forward_origin(engine_client, self.swaps.salt_for)
        note_arguments(getattr(state, "openai_serving_chat", None))
        self.notes = list_notes(engine_client.vllm_config, args)
        for note in self.notes:
            logger.warning("redraft: %s", note)

    async def _show_pace(self, metrics: PaceMetrics) -> None:
        if found := await self.swaps.calls.read_pace():
            metrics.show(found)

    async def status(self, request: Request) -> dict[str, Any]:
        """The recording rank's status, vLLM's version, and whether all ranks agree on the draft."""
        self.config = authorize(request, self.config)
        try:
            own = {"registry": self.swaps.registry_id, "notes": self.notes}
            return await self.swaps.calls.status() | own
        except RefusedError as refusal:
            raise HTTPException(refusal.code, refusal.why) from refusal

    async def swap(self, request: Request) -> dict[str, Any]:
        """Swap to the version named in the request body.

        For example, the body is `{"version": "v000012", "manifest_sha256": ..., "registry": ...}`.

        The hash and the registry's id are optional. A version with a different hash, or from a
        different registry, is refused. Status 200 means that all ranks serve the version, and that
        no running request was cut off.
        """
        asked = await self._read(request, _parse, 'send a JSON body {"version": "v000012"}')
        if self.config.registry is None:
            raise HTTPException(503, NO_REGISTRY)
        return await _run(self.swaps.swap, asked)

    async def move(self, request: Request) -> dict[str, Any]:
        """Name the target weights, or load new ones, as the request body specifies.

        For example, the body is `{"version": "step-17", "path": "/checkpoints/17", "draft":
        "v000012"}`.

        Without a path, the name is for weights that a trainer has already written. A draft is
        loaded in the same pause. If a trainer has paused the engine, it stays paused. Status 200
        means that all ranks have the weights and the draft, and that no running request was cut
        off.
        """
        told = (
            'send a JSON body {"version": "step-17"}, with "path", "draft" or both if they are '
            "to be loaded"
        )
        move = await self._read(request, _parse_move, told)
        if move.draft and self.config.registry is None:
            raise HTTPException(503, NO_REGISTRY)
        return await _run(self.swaps.move, move)

    async def pace(self, request: Request) -> dict[str, Any]:
        """Set the pace given in the request body from the next step on.

        The body is e.g. `{"pace": "auto"}`, or has a number of draft tokens as the pace.

        0 means no drafts, and `off` means the server's --num-speculative-tokens.
        """
        told = 'send a JSON body {"pace": "auto"}, or a number of draft tokens, 0 for none'
        pace = await self._read(request, lambda body: check_pace(str(body["pace"])), told)
        return await _run(self.swaps.calls.take_pace, pace)

    async def forget(self, request: Request) -> dict[str, Any]:
        """Delete the text of the tenant in the body, `{"tenant": "acme"}`, from the live counts.

        Return `live_runs`, the number of deleted runs on all ranks. The tenant's running requests
        are no longer counted; later requests are.
        """
        told = 'send a JSON body {"tenant": "acme"}'
        tenant = await self._read(request, lambda body: stored_name(body["tenant"]), told)
        return await _run(self.swaps.calls.forget, tenant)

    async def _read(self, request: Request, parse: Callable[[Any], T], told: str) -> T:
        """Check that a request may use the routes, and return its parsed body.

        Raises:
            HTTPException: the request may not use them, or the body is invalid.
        """
        self.config = authorize(request, self.config)
        try:
            return parse(await request.json())
        # A client that disconnects before its body is complete is not a server error, which would
        # log a traceback.
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ClientDisconnect):
            raise HTTPException(400, told) from None


async def _run(act: Callable[[T], Coroutine[Any, Any, dict[str, Any]]], asked: T) -> dict[str, Any]:
    try:
        # A disconnecting client must not leave the engine paused.
        return await asyncio.shield(asyncio.ensure_future(act(asked)))
    except RefusedError as refusal:
        raise HTTPException(refusal.code, refusal.why) from refusal


def list_notes(vllm_config: Any, args: Namespace) -> list[str]:
    """List this server's vLLM flags with which some feature does not work.

    `redraft serve` refuses these flags, or warns about them, before the start.
    """
    speculative = vllm_config.speculative_config
    has_draft = speculative is not None and speculative.method not in LOOKUP_METHODS
    notes = [LOG_STATS_OFF] if getattr(args, "disable_log_stats", False) else []
    return notes + (
        [EMBEDS_BESIDE_DRAFT] if has_draft and vllm_config.model_config.enable_prompt_embeds else []
    )


def _parse(body: Any) -> Asked:
    """Parse the body of a swap request.

    Raises:
        ValueError, KeyError, TypeError: if the body is not a valid request.
    """
    manifest_sha256, registry = body.get("manifest_sha256") or "", body.get("registry") or ""
    if not isinstance(manifest_sha256, str) or not isinstance(registry, str):
        raise TypeError("manifest_sha256 and registry must be strings")
    # A version that is not a string fails later, because the registry does not contain it.
    return Asked(version=str(body["version"]), manifest_sha256=manifest_sha256, registry=registry)


def _parse_move(body: Any) -> Move:
    """Parse the body of a request that moves the target.

    Raises:
        ValueError, TypeError, AttributeError: the body is not a valid request.
    """
    label, folder, draft = (body.get(name) or "" for name in ("version", "path", "draft"))
    if not all(isinstance(each, str) for each in (label, folder, draft)):
        raise TypeError("version, path and draft must be strings")
    if not label and not folder:
        raise ValueError("give a version or a path")
    return Move(folder=folder, label=label, draft=draft)


def authorize(request: Request, config: PluginConfig) -> PluginConfig:
    """Check that a request may use the routes. Return the config with the current token.

    The token file is read for each request, so a replaced token is refused at once.

    Raises:
        HTTPException: 403 for another machine, 503 if no token is configured, 401 for a wrong
            token.
    """
    # a Unix socket has no client address
    if not config.allow_remote and request.client and not is_local(request.client.host):
        raise HTTPException(
            403,
            "only this machine may use this route: `redraft serve --allow-remote` allows others",
        )
    if config.token is None:
        raise HTTPException(
            503,
            "no token: start the server with `redraft serve --token-file FILE` or REDRAFT_TOKEN",
        )
    if config.token_file:
        with suppress(OSError, ValueError):  # e.g. while the file is being replaced
            config = replace(config, token=read_token(config.token_file))
    given = request.headers.get("authorization", "")
    # Compare bytes, because `compare_digest` raises for a non-ASCII string.
    if not hmac.compare_digest(given.encode(), f"Bearer {config.token}".encode()):
        raise HTTPException(
            401, "wrong or missing bearer token", headers={"WWW-Authenticate": "Bearer"}
        )
    return config


_origin: ContextVar[Origin] = ContextVar("redraft_origin")


class OriginMiddleware:
    """Stores the X-Redraft-Tenant, -Domain and -Opt-Out headers of a request for `forward_origin`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            _origin.set(read_origin_headers(Headers(scope=scope)))
        await self.app(scope, receive, send)


def forward_origin(engine_client: Any, salt_for: Callable[[str | None], str | None]) -> None:
    """Make `engine_client.generate` write the origin into the sampling parameters.

    The origin replaces any value from the client. If the middleware has read no headers for a
    request, None is written, and the request is neither recorded nor counted. The prompt's own
    cache salt is replaced by the one that `salt_for` derives from it.
    """

    def write(generate: Callable[..., Any]) -> Callable[..., Any]:
        def generate_with_origin(
            prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
        ) -> Any:
            origin = _origin.get(None)
            is_plain = isinstance(prompt, dict)
            salt = prompt.get("cache_salt") if is_plain else getattr(prompt, "cache_salt", None)
            written = origin._replace(cache_salt=hash_salt(salt))._asdict() if origin else None
            sampling_params.extra_args = (sampling_params.extra_args or {}) | {
                EXTRA_ARGS_KEY: written
            }
            if (made := salt_for(salt)) != salt:
                if is_plain:
                    prompt = prompt | {"cache_salt": made}
                elif hasattr(prompt, "cache_salt"):  # a stream of inputs has none
                    prompt.cache_salt = made
            return generate(prompt, sampling_params, *args, **kwargs)

        return generate_with_origin

    hooks.hook(engine_client, "origin", generate=write)


def note_arguments(chat: Any) -> None:
    """Write each chat request's template arguments into its origin.

    They include the server's defaults. Without a chat API, nothing is written.
    """
    if chat is None:
        return

    def note(effective: Callable[..., Any]) -> Callable[..., Any]:
        def effective_arguments(request: Any) -> Any:
            arguments = effective(request)
            if origin := _origin.get(None):
                _origin.set(origin._replace(arguments=pack_arguments(arguments)))
            return arguments

        return effective_arguments

    hooks.hook(chat, "origin", _effective_chat_template_kwargs=note)
